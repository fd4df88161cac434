"""The token memory: neighbours of the decoder's states, what they say of the next token, and how much that weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fairseq_ccpr.datastore.domain import Domain
from fairseq_ccpr.decoding.distribution import Distribution
from fairseq_ccpr.decoding.interpolation import (
    ALMOST_ALL,
    Vote,
    neighbour_log_probabilities,
    neighbour_shares,
    retrieval_confidence,
)
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import LearningRetriever, ModelView, Neighbours, Retriever
from fairseq_ccpr.decoding.options import PUBLISHED, TokenRetrievalSettings
from fairseq_ccpr.decoding.trust_features import Course, TokenEvidence, along_sentences, observed
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.settings import signature, signed
from fairseq_ccpr.timing import MERGE, phase

# The nearest neighbours that lambda* averages, however many there are: of many, most are far whatever the first are.
CONFIDENT = 8
# How much the token memory weighs at N tokens, fp32 [N]: a pure function of the neighbours' scores and values, [N, k] each
# (-inf and any token where one is missing), of what the model says, and of the settings. Decoder, tuner and explanation call
# it; `TranslationRetrievalTask.token_weight` names it.
WeightPolicy = Callable[[Tensor, Tensor, ModelView, TokenRetrievalSettings], Tensor]


def name_of(policy: WeightPolicy) -> str:
    """Name a policy, for signatures and messages."""
    return getattr(policy, "__name__", type(policy).__name__)


def confidence_weight(scores: Tensor, values: Tensor, model: ModelView, settings: TokenRetrievalSettings) -> Tensor:
    """Weigh by lambda, or with `confidence` by lambda*, its mean as `lambda_star` says, fp32 [N]."""
    if settings.confidence:
        if settings.lambda_star == PUBLISHED:  # equation 8 of the CLKNN paper
            confidence = scores.masked_fill(scores == float("-inf"), 0).sum(dim=1) / settings.k
        else:
            confidence = retrieval_confidence(scores[:, :CONFIDENT], settings.min_similarity)
        return (settings.lambda_ * confidence).clamp(0, settings.lambda_max)
    return scores.new_full((len(scores),), settings.lambda_)


def token_weight(
    policy: WeightPolicy, neighbours: Neighbours, model: ModelView, settings: TokenRetrievalSettings
) -> Tensor:
    """Compute a policy's weight within its bounds: fp32 [N] in [0, 1), 0 where nothing was found.

    Raises:
        ConfigurationError: the policy returned something else than a weight for each token.
    """
    scores = neighbours.scores
    weight = policy(scores, neighbours.values, model, settings)
    if not isinstance(weight, Tensor) or weight.shape != scores.shape[:1]:
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ConfigurationError(
            f"the weight {name_of(policy)} returned {found} for neighbours {list(scores.shape)}: return a tensor "
            f"[{len(scores)}], a weight for each hypothesis"
        )
    return weight.clamp(0, ALMOST_ALL).masked_fill(scores.amax(dim=1) == float("-inf"), 0.0)


def guards(familiarity: Tensor, ids: Tensor, first_learnt: int) -> Tensor:
    """Compute the fraction of each neighbour that the guard keeps, fp32 [N, k]: of the datastore's own text as far as a
    hypothesis is like that text; all of what was learnt, which is there for texts unlike it.

    Args:
        familiarity: fp32 [N].
        ids: int64 [N, k], entries; those from `first_learnt` on were learnt.
    """
    return torch.where(ids >= first_learnt, torch.ones_like(familiarity).unsqueeze(1), familiarity.unsqueeze(1))


@dataclass(frozen=True)
class TokenMemory:
    """A token datastore alongside the decoder.

    Args:
        capture: reads the queries, from the one model the datastore belongs to.
        retriever: searches.
        settings: k, lambda, T.
        unknown: the unknown token, which nothing that is retrieved proposes.
        policy: how much the neighbours weigh.
        domain: what the datastore knows of its own text, on the model's device; None where it was built without.
        trusted: whether learned trust decides the weight, and so needs evidence.
        learnt: what is learnt alongside the datastore, live or as a snapshot; None: nothing.
    """

    capture: KeyCapture
    retriever: Retriever
    settings: TokenRetrievalSettings
    unknown: int
    policy: WeightPolicy = confidence_weight
    domain: Domain | None = None
    trusted: bool = False
    learnt: LearnedMemory | LearnedEntries | None = None

    def now(self, entries: LearnedEntries | None = None) -> TokenMemory:
        """Return a snapshot of the memory, unaffected by later learning and forgetting.

        Args:
            entries: what counts now, where that was looked at before.
        """
        if self.learnt is None:
            return self
        entries = entries or self.learnt.entries
        return replace(self, learnt=entries, retriever=entries.retriever or self.retriever)

    @property
    def _retriever(self) -> Retriever:
        """The retriever, with what was learnt up to now."""
        if self.learnt is None:
            return self.retriever
        entries = self.learnt.entries
        retriever = entries.retriever or self.retriever
        if entries.empty:
            return retriever
        assert isinstance(retriever, LearningRetriever)  # no other kind has pairs learnt alongside its datastore
        return retriever.with_learnt(entries)

    def start(self, sources: Tensor) -> Callable[[], TokenBatch]:
        """Wait for the first step: only the decoder has queries. What is learnt meanwhile counts for the next batch."""
        now = self.now()
        return lambda: TokenBatch(now, len(sources))

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of queries [N, d]; those of the unknown token count as missing, in their places."""
        ids, scores, values = self._retriever.search(queries, k)
        unknown = values == self.unknown
        return Neighbours(ids.masked_fill(unknown, -1), scores.masked_fill(unknown, float("-inf")), values)

    @phase(MERGE)
    def retrieve(self, queries: Tensor) -> tuple[Neighbours, Tensor]:
        """Search for queries [N, d]: the neighbours, and log p_r of their values, fp32 [N, k]."""
        return self.weighed(self.search(queries, self.settings.k))

    def weighed(self, neighbours: Neighbours) -> tuple[Neighbours, Tensor]:
        """Return neighbours, and log p_r of their values, fp32 [N, k]."""
        return neighbours, neighbour_log_probabilities(neighbours.scores, neighbours.values, self.settings.temperature)

    @property
    def _learnt(self) -> LearnedEntries | None:
        """What was learnt up to now, where something was; the guard is not for it."""
        entries = self.learnt.entries if self.learnt is not None else None
        return entries if entries is not None and (entries.pairs or entries.moved) else None

    def unguarded(self, neighbours: Neighbours, running_distance: Tensor) -> Neighbours:
        """Return the neighbours; all are missing where the guard gives them no weight.

        Args:
            running_distance: fp32 [N], see `Course`.
        """
        if self.settings.guard and self.domain is not None and self._learnt is None:
            far = (self.domain.familiarity(running_distance) <= 0).unsqueeze(1)
            ids, scores, values = neighbours
            return Neighbours(ids.masked_fill(far, -1), scores.masked_fill(far, float("-inf")), values)
        return neighbours

    @property
    def observes(self) -> bool:
        """Whether hypotheses are followed: what the guard and learned trust look at."""
        return self.trusted or self.settings.guard

    def observe(self, queries: Tensor) -> Tensor:
        """Compare queries [N, d] with the datastore's own text: `OF_STATE`, fp32 [N, 3]; what is not known is 0."""
        states = queries.float()
        norms = torch.linalg.vector_norm(states, dim=1).clamp_min(1e-8)
        if self.domain is None:
            return torch.stack([torch.zeros_like(norms), torch.zeros_like(norms), norms.log()], dim=1)
        return torch.stack([self.domain.distance(states), self.domain.cosine(states, norms), norms.log()], dim=1)

    def force_search(self, queries: Tensor, k: int, model: Distribution, real: Tensor) -> tuple[Neighbours, Course]:
        """Search and follow given targets as beam search does.

        Args:
            queries: [N, d], of the N real tokens.
            model: what it says at them.
            real: bool [B, T], where they are.
        """
        state, favourite = self.observe(queries), model.likeliest.favourite
        positions = (real.long().cumsum(dim=1) - 1)[real]
        distance = along_sentences(state[:, :1], positions)[:, 0] / (positions + 1)
        neighbours = self.unguarded(self.search(queries, k), distance)
        seen = observed(neighbours.scores, neighbours.values, state, favourite)
        return neighbours, Course.of(state, along_sentences(seen, positions), positions + 1)

    def weight(self, neighbours: Neighbours, model: ModelView, course: Course | None) -> Tensor:
        """Compute the interpolation weight of N tokens, fp32 [N], by policy and guard."""
        weight = token_weight(self.policy, neighbours, model, self.settings)
        if not self.settings.guard or self.domain is None or course is None:
            return weight
        familiarity = self.domain.familiarity(course.running_distance)
        if (learnt := self._learnt) is None:
            return weight * familiarity
        shares = neighbour_shares(neighbours.scores, self.settings.temperature)
        return weight * (shares * guards(familiarity, neighbours.ids, learnt.first)).sum(dim=1)

    def _guarded(self, neighbours: Neighbours, retrieved: Tensor, course: Course | None) -> Tensor:
        """Return log p_r, fp32 [N, k], of what the guard leaves of each neighbour: of what was learnt all."""
        learnt = self._learnt
        if learnt is None or not self.settings.guard or self.domain is None or course is None:
            return retrieved
        left = guards(self.domain.familiarity(course.running_distance), neighbours.ids, learnt.first)
        scores = neighbours.scores + self.settings.temperature * left.log()
        return neighbour_log_probabilities(scores, neighbours.values, self.settings.temperature)

    def vote(self, neighbours: Neighbours, retrieved: Tensor, model: ModelView, course: Course | None = None) -> Vote:
        """Weigh what `retrieve` gave for N tokens against the model.

        Args:
            course: of the hypotheses, where the memory `observes`.
        """
        retrieved = self._guarded(neighbours, retrieved, course)
        evidence = None
        if self.trusted and course is not None:
            evidence = TokenEvidence(neighbours.scores, neighbours.values, retrieved, model.neighbours, course)
        return Vote(neighbours.values, retrieved, self.weight(neighbours, model, course), evidence=evidence)

    def signature(self) -> str:
        """Return everything that decides what is retrieved and how it counts, as one line to print with results."""
        return signature({**self._retriever.describe(), **signed(self.settings), "weight": name_of(self.policy)})


@dataclass
class TokenBatch:
    """The token memory during one batch: a search each step, started while the models still compute.

    On a GPU the search runs on a second CUDA stream, in parallel with the projection to the vocabulary.
    """

    memory: TokenMemory
    sentences: int  # B
    _stream: torch.cuda.Stream | None = None
    _first: bool = True
    _queries: list[Tensor] = field(default_factory=list)  # [H, d], of this step
    _retrieved: list[tuple[Neighbours, Tensor]] = field(default_factory=list)
    _sums: Tensor | None = None  # fp32 [H, 4], see `Course.of`
    _copies: int = 1  # of each hypothesis at this step

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Search as soon as the decoder has computed its states."""
        with self.memory.capture.telling(self._search):
            yield
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _search(self) -> None:
        queries = self.memory.capture.read()[:, -1]  # [H, T, d] -> [H, d]
        # All hypotheses of a sentence are alike at the first step: one search serves them.
        self._copies, self._first = len(queries) // self.sentences if self._first else 1, False
        self._queries.append(queries)
        with self._on_second_stream(queries):
            self._retrieved.append(self._copied(*self.memory.retrieve(queries[:: self._copies])))

    def _copied(self, neighbours: Neighbours, retrieved: Tensor) -> tuple[Neighbours, Tensor]:
        if self._copies == 1:
            return neighbours, retrieved
        copied = Neighbours(*(part.repeat_interleave(self._copies, dim=0) for part in neighbours))
        return copied, retrieved.repeat_interleave(self._copies, dim=0)

    @contextmanager
    def _on_second_stream(self, queries: Tensor) -> Iterator[None]:
        """Queue GPU work on a second CUDA stream, after all that `queries` depends on."""
        if not queries.is_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(queries.device)
        self._stream.wait_stream(torch.cuda.current_stream(queries.device))
        queries.record_stream(self._stream)  # the allocator must not reuse its memory before that stream has read it
        with torch.cuda.stream(self._stream):
            yield

    @phase(MERGE)
    def vote(self, tokens: Tensor, model: Distribution) -> Vote:
        """Vote for the next token of each hypothesis."""
        queries, (neighbours, retrieved) = self._queries.pop(), self._retrieved.pop()
        if not self.memory.observes:
            return self.memory.vote(neighbours, retrieved, model.at(neighbours.values))
        state, favourite = self.memory.observe(queries), model.likeliest.favourite
        distance = state[:, 0] if self._sums is None else (self._sums[:, 1] + state[:, 0]) / tokens.size(1)
        if (left := self.memory.unguarded(neighbours, distance)) is not neighbours:
            neighbours, retrieved = self.memory.weighed(left)
        seen = observed(neighbours.scores, neighbours.values, state, favourite)
        self._sums = seen if self._sums is None else self._sums + seen
        course = Course.of(state, self._sums, tokens.size(1))
        return self.memory.vote(neighbours, retrieved, model.at(neighbours.values), course)

    def reorder(self, order: Tensor) -> TokenBatch:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was."""
        return self if self._sums is None else replace(self, _sums=self._sums.index_select(0, order))
