"""The token memory: a retriever, a search each step, and kNN-MT's vote.

Decoding, scoring, tuning and explaining call the same functions. They gather and count: nothing is as wide as
the vocabulary, and nothing goes back to the host. Letters: N tokens or queries, k neighbours, d decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.token import FAMILIAR
from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.forced import GivenText, Record, joined
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Snapshot, Step
from fairseq_ccpr.decoding.mixture import (
    ALMOST_ALL,
    Distribution,
    LookedUp,
    ModelView,
    Vote,
    neighbour_log_probabilities,
    neighbour_shares,
    retrieval_confidence,
    target_log_probabilities,
)
from fairseq_ccpr.decoding.options import PUBLISHED, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.remote_answers import RemoteAnswers
from fairseq_ccpr.decoding.source_likeness import SourceLikeness
from fairseq_ccpr.decoding.token_features import (
    OBSERVED,
    Course,
    TokenEvidence,
    along_sentences,
    log_norms,
    observed,
)
from fairseq_ccpr.decoding.token_retriever import (
    AnsweredSearch,
    LearningRetriever,
    Neighbours,
    Retriever,
    TokenRetriever,
    best_neighbours,
)
from fairseq_ccpr.device import sync_is_free
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.settings import as_options, signature, signed
from fairseq_ccpr.timing import MERGE, phase

# of the likeness that is familiar: the guard leaves nothing of sentences that are as little like any
STRANGE = 0.8
DEEP = 64  # neighbours that the k best are chosen among where their sentences count

# What tuning compares: points of a grid.
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
TUNED_LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
# In squared distances, of which the decoder's states lie some tens to hundreds apart.
TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
# In inner products of unit vectors.
UNIT_TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
LIKENESSES = (0.0, 2.0, 4.0, 8.0)  # of gamma, in nats
# The lambda that trust starts from: it multiplies odds, which can fall as far as they can rise from here. A
# weight near 1 could never fall.
TRUSTED_LAMBDA = 0.5
TRUSTED_NEIGHBOURS = (8, 32)  # that trust is trained with: the more, the better and the slower

# The nearest neighbours that lambda* averages, however many there are: of many, most are far whatever the
# first are.
CONFIDENT = 8


# How much the token memory weighs at N tokens, fp32 [N]: a pure function of the neighbours' scores and
# values, [N, k] each (-inf and any token where one is missing), of what the model says, and of the settings.
# Decoder, tuner and explanation call it; `TranslationRetrievalTask.token_weight` names it.
WeightPolicy = Callable[[Tensor, Tensor, ModelView, TokenRetrievalSettings], Tensor]


def name_of(policy: WeightPolicy) -> str:
    """Name a policy, for signatures and messages."""
    return getattr(policy, "__name__", type(policy).__name__)


def confidence_weight(
    scores: Tensor, values: Tensor, model: ModelView, settings: TokenRetrievalSettings
) -> Tensor:
    """Weigh by lambda, or with `confidence` by lambda*, its mean as `lambda_star` says, fp32 [N]."""
    if settings.confidence:
        if settings.lambda_star == PUBLISHED:  # equation 8 of the CLKNN paper
            confidence = scores.masked_fill(scores == float("-inf"), 0).sum(dim=1) / settings.k
        else:
            confidence = retrieval_confidence(scores[:, :CONFIDENT], settings.min_similarity)
        return (settings.lambda_ * confidence).clamp(0, min(settings.lambda_max, ALMOST_ALL))
    return scores.new_full((len(scores),), min(settings.lambda_, ALMOST_ALL))


@dataclass(frozen=True)
class TokenMemory(Memory):
    """A token datastore alongside the decoder.

    Args:
        capture: reads the queries, from the one model the datastore belongs to.
        unknown: the unknown token, which nothing that is retrieved proposes.
        learned: what is learned alongside the datastore, live or as a snapshot; None: nothing.
        remote: what to do where a database has the keys and does not answer; None: an error.
        read_tokens: returns the subwords of a source, int64 [S], without padding and markers; None: sentences
            do not count.
    """

    name = "tokens"
    bounded = False  # --tokens-lambda-max is its bound
    features = TokenEvidence.names()
    part = "token"
    tuned = ("k", "lambda_", "temperature", "likeness")
    quick = True

    capture: KeyCapture
    retriever: Retriever
    settings: TokenRetrievalSettings
    unknown: int
    policy: WeightPolicy = confidence_weight
    learned: LearnedMemory | LearnedEntries | None = None
    remote: RemoteAnswers | None = None
    read_tokens: Callable[[Tensor], np.ndarray] | None = None

    def at(self, snapshot: Snapshot) -> TokenMemory:
        """Return the memory as of a snapshot; its datastore may have been compacted since it was opened."""
        if (learned := snapshot.learned) is None or self.learned is None:
            return self
        return replace(self, learned=learned, retriever=learned.retriever or self.retriever)

    def begin(self, sources: Tensor, snapshot: Snapshot) -> TokenBatch:
        memory = self.at(snapshot)
        asked = memory.searched
        find = asked.search
        if self.remote is not None:
            find = AnsweredSearch(find, self.remote, len(sources))
        rows = torch.arange(len(sources), device=sources.device)
        likeness = SourceLikeness(memory, sources.cpu(), sources.device)
        certain = False
        if not sync_is_free(sources.device):
            certain = isinstance(asked, TokenRetriever) and asked.always_finds(memory.asked_for, self.unknown)
        return TokenBatch(memory, find, likeness, rows, certain)

    @property
    def asked_for(self) -> int:
        """How many neighbours a search is asked for: more than k where their sentences count."""
        return max(self.settings.k, DEEP) if self.settings.likeness else self.settings.k

    @property
    def searched(self) -> Retriever:
        """The retriever, with what was learned up to now."""
        if self.learned is None:
            return self.retriever
        entries = self.learned.entries
        retriever = entries.retriever or self.retriever
        if entries.empty:
            return retriever
        # no other kind has pairs learned alongside its datastore
        assert isinstance(retriever, LearningRetriever)
        return retriever.with_learned(entries)

    @property
    def first_learned(self) -> int | None:
        """The first entry that was learned, where some were: the guard is not for those."""
        entries = self.learned.entries if self.learned is not None else None
        return entries.first if entries is not None and (entries.pairs or entries.moved) else None

    def familiarity(self, best: Tensor) -> Tensor:
        """Return the guard's factor of the weight, by the likeness of the sentence most like a source, fp32 [N]."""
        familiar = max(self.retriever.datastore.section.suits[FAMILIAR], 1e-6)
        return ((best / familiar - STRANGE) / (1 - STRANGE)).clamp(0, 1)

    def kept(self, neighbours: Neighbours, course: Course) -> Tensor | None:
        """Compute what fraction of each neighbour the guard keeps, fp32 [N, k] or [N, 1]; None: all."""
        if not self.settings.guard:
            return None
        familiar = course.familiar if course.familiar is not None else self.familiarity(course.best)
        familiarity = familiar.unsqueeze(1)
        if self.first_learned is None:
            return familiarity
        return familiarity.expand_as(neighbours.scores).masked_fill(neighbours.ids >= self.first_learned, 1.0)

    def weight(
        self, neighbours: Neighbours, model: ModelView, kept: Tensor | None = None, complete: bool = False
    ) -> Tensor:
        """Compute the weight of N tokens by policy and guard, fp32 [N] in [0, 1); 0 where nothing was found.

        Args:
            complete: whether it is known that no neighbour is missing.

        Raises:
            ConfigurationError: the policy returned no weight for each token.
        """
        scores = neighbours.scores
        weight = self.policy(scores, neighbours.values, model, self.settings)
        if not isinstance(weight, Tensor) or weight.shape != scores.shape[:1]:
            found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ConfigurationError(
                f"the weight {name_of(self.policy)} returned {found} for neighbours {list(scores.shape)}: "
                f"return a tensor [{len(scores)}], a weight for each hypothesis"
            )
        if self.policy is not confidence_weight:  # which sees to it
            weight = weight.clamp(0, ALMOST_ALL)
        if not complete:
            weight = weight.masked_fill(scores.amax(dim=1) == float("-inf"), 0.0)
        if kept is None:
            return weight
        if kept.size(1) == 1:
            return weight * kept[:, 0]
        return weight * (neighbour_shares(scores, self.settings.temperature) * kept).sum(dim=1)

    def vote(
        self,
        neighbours: Neighbours,
        model: ModelView,
        course: Course | None,
        trusted: bool,
        retrieved: Tensor | None = None,
        complete: bool = False,
    ) -> Vote:
        """Weigh neighbours at N tokens against the model.

        Args:
            course: of the hypotheses; None where neither guard nor trust looks at it.
            retrieved: log p_r of the neighbours' values, fp32 [N, k], if it was computed before.
            complete: whether it is known that no neighbour is missing.
        """
        scores, values, temperature = neighbours.scores, neighbours.values, self.settings.temperature
        kept = self.kept(neighbours, course) if course is not None else None
        weight = self.weight(neighbours, model, kept, complete)
        if kept is not None and self.first_learned is not None:
            retrieved = neighbour_log_probabilities(scores + temperature * kept.log(), values, temperature)
        elif retrieved is None:
            retrieved = neighbour_log_probabilities(scores, values, temperature)
        evidence = None
        if trusted and course is not None:
            said = retrieved, model.neighbours
            evidence = TokenEvidence(scores, values, neighbours.likeness, *said, course, complete)
        return Vote(values, retrieved, weight, evidence)

    def signature(self) -> str:
        return signature(
            {**self.searched.describe(), **signed(self.settings), "weight": name_of(self.policy)}
        )

    def widest(self) -> TokenMemory:
        return self.changed(k=max(NEIGHBOURS))

    def written(self) -> str:
        automatic = automatic_token_settings(self.retriever.datastore, self.settings.confidence)
        kind = ("confidence",) if automatic["confidence"] else ()  # the grid has both kinds
        return as_options(self.settings, (*self.tuned, *kind), automatic)

    def kind(self) -> str:
        return "lambda*" if self.settings.confidence else "lambda"

    def grid(
        self, options: Any, records: Sequence[TokenRecord], targets: Tensor
    ) -> Iterator[tuple[TokenRetrievalSettings, Tensor, Tensor]]:
        """Yield every k, T and likeness, with lambda fixed and, or, scaled to lambda*; what was given is not varied."""
        given, found = self.settings, joined(records, torch.cat)
        unit = self.retriever.datastore.section.projection is not None
        kinds = (True, False) if unit and not options.tokens_confidence else (given.confidence,)
        temperatures = UNIT_TEMPERATURES if unit else TEMPERATURES
        likenesses = LIKENESSES if found.neighbours.likeness is not None else (0.0,)
        return self.points(
            found,
            targets,
            NEIGHBOURS if options.tokens_k is None else (given.k,),
            temperatures if options.tokens_temperature is None else (given.temperature,),
            (False,) if options.no_tokens_confidence else kinds,
            likenesses if options.tokens_likeness is None else (given.likeness,),
        )

    def points(
        self,
        found: TokenRecord,
        targets: Tensor,
        neighbours: Sequence[int],
        temperatures: Sequence[float],
        confidences: Sequence[bool],
        likenesses: Sequence[float] = (0.0,),
    ) -> Iterator[tuple[TokenRetrievalSettings, Tensor, Tensor]]:
        """Yield the points of a grid as `grid` does, lambda varied too; other settings keep their values."""
        given = self.settings
        for k, temperature, likeness in product(neighbours, temperatures, likenesses):
            shape: dict[str, Any] = {"k": k, "temperature": temperature, "likeness": likeness}
            point = TokenRetrievalSettings(lambda_=1.0, guard=given.guard, **shape)
            best = found.best(point)
            retrieved = best.retrieved(targets, temperature)
            for confidence, lambda_ in product(confidences, TUNED_LAMBDAS):
                settings = replace(
                    given if confidence else point, lambda_=lambda_, confidence=confidence, **shape
                )
                one = replace(self, settings=settings)
                kept = one.kept(best.neighbours, best.course)
                yield settings, retrieved, one.weight(best.neighbours, best.model, kept)

    def starts(
        self, grid: Mapping[TokenRetrievalSettings, float], parts: Parts
    ) -> list[TokenRetrievalSettings]:
        """Pick the likeliest settings for few neighbours and for many, as far as the grid has them."""
        best: dict[int, TokenRetrievalSettings] = {}
        for settings in sorted(grid, key=lambda one: -grid[one]):
            if settings.lambda_ == TRUSTED_LAMBDA:
                best.setdefault(settings.k, settings)
        return [best[k] for k in trusted_neighbours(parts) if k in best] or list(best.values())


def trusted_neighbours(parts: Parts) -> tuple[int, ...]:
    """Name the k that trust is trained with; alongside phrases what tuning left for the tokens alone, or many.

    Phrases cost more than neighbours, to learn as well as to decode with, and few neighbours can be worse by
    far.
    """
    if not {"token", "phrase"} <= parts.keys():
        return TRUSTED_NEIGHBOURS
    tuned = read_tuned({"token": parts["token"]}).get(TokenRetrievalSettings.PREFIX, {})
    return (tuned.get("k", max(TRUSTED_NEIGHBOURS)),)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream once: torch keeps memory that was freed for the stream that it was allocated on."""
    return torch.cuda.Stream(device)


@dataclass
class TokenBatch(MemoryBatch):
    """The token memory during one batch: a search each step, started while the models still compute.

    On a GPU the search runs on a second CUDA stream, in parallel with the projection to the vocabulary.
    """

    memory: TokenMemory  # as of the batch's snapshot
    find: Callable[[Tensor, int], Neighbours]  # the search of its retriever
    likeness: SourceLikeness
    rows: Tensor  # int64 [H], the sentence of each hypothesis
    certain: bool = False  # whether searches leave no neighbour out
    _stream: torch.cuda.Stream | None = None
    _begun: bool = False  # whether hypotheses of a sentence may differ
    # fp32 [H, 4 + S], what was `observed` so far, summed up, and what is known of the source
    _followed: Tensor | None = None

    def encoded(self) -> TokenBatch:
        """Compare the sources with the datastore's sentences, while a GPU encodes them."""
        self.likeness.prepare()
        return self

    @contextmanager
    def listening(self, given: bool = False) -> Iterator[TokenStep]:
        """Search as soon as the decoder has computed its states; for given targets `force` does."""
        step = TokenStep(self)
        with self.memory.capture.telling(step.states.append if given else step.search):
            yield step
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @property
    def sentences(self) -> int:
        return len(self.likeness.sources)

    @property
    def complete(self) -> bool:
        """Whether no neighbour is missing, as far as that is known without asking a GPU."""
        return self.certain and self.likeness.strange is None

    def search(self, queries: Tensor, rows: Tensor) -> Neighbours:
        """Find the entries nearest to queries [N, d] of the sentences in these rows of the batch, int64 [N].

        They are k, or as many as the best k are chosen among where their sentences count. Those of the
        unknown token count as missing, in their places: their scores are -inf.
        """
        strange = self.likeness.strange
        k = self.memory.asked_for
        if strange is not None and strange[0]:
            return Neighbours.missing(queries, k)
        some, asked = None, queries
        if strange is not None and not queries.is_cuda:
            some = (~strange[1][rows]).nonzero()[:, 0]
            asked = queries[some]
        found = self.find(asked, k) if len(asked) else Neighbours.missing(asked, k)
        if some is not None:
            everything = Neighbours.missing(queries, k)
            everything.put(some, found)
            found = everything
        elif strange is not None:  # to leave some out, a GPU would have to be asked how many
            found = found.without(strange[1][rows].unsqueeze(1))
        if not self.complete and (
            not sync_is_free(queries.device) or (found.values.numpy() == self.memory.unknown).any()
        ):
            unknown = found.values == self.memory.unknown
            found = found._replace(scores=found.scores.masked_fill(unknown, float("-inf")))
        return self.likeness.of(found, rows) if self.memory.settings.likeness else found

    @contextmanager
    def _on_second_stream(self, queries: Tensor) -> Iterator[None]:
        """Queue a GPU's work on a second CUDA stream, after all that `queries` depends on."""
        self._stream = _second_stream(queries.device)
        self._stream.wait_stream(torch.cuda.current_stream(queries.device))
        # the allocator must not reuse its memory before that stream has read it
        queries.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def reorder(self, order: Tensor) -> Self:
        followed = self._followed.index_select(0, order) if self._followed is not None else None
        return replace(self, rows=self.rows.index_select(0, order), _followed=followed)


class Found(NamedTuple):
    """What H hypotheses found at a step."""

    queries: Tensor  # [H, d]
    everything: Neighbours
    best: Neighbours  # k, see `best_neighbours`
    retrieved: Tensor  # fp32 [H, k], log p_r of these
    complete: bool  # whether it is known that no neighbour is missing
    lost: Tensor | None  # bool [H], the queries that are no numbers, where only these could lack neighbours


@dataclass
class TokenStep(MemoryBatch):
    """A step of a batch, or all of given targets: what the decoder has said, and what that found."""

    batch: TokenBatch
    states: list[Tensor] = field(default_factory=list)  # [B, T, d], of given targets
    found: Found | None = None  # of a step

    @phase(MERGE)
    def search(self, states: Tensor) -> None:
        batch, settings, queries = self.batch, self.batch.memory.settings, states[:, -1]
        # All hypotheses of a sentence are alike at the first step: one search serves them.
        copies = 1 if batch._begun else len(queries) // batch.sentences
        batch._begun = True
        with batch._on_second_stream(queries) if queries.is_cuda else nullcontext():
            found = batch.search(queries[::copies], batch.rows[::copies])
            if copies > 1:
                found = found.changed(lambda part: part.repeat_interleave(copies, dim=0))
            complete, lost = batch.complete, None
            if complete:  # assumed, not measured: a query that is no number has no finite score
                lost = found.scores[:, 0] == float("-inf")
                found = found._replace(scores=found.scores.nan_to_num())
            elif sync_is_free(queries.device):
                complete = found.scores.numpy().min() > float("-inf")
            best, _ = best_neighbours(found, settings)
            scores, values, temperature = best.scores, best.values, settings.temperature
            retrieved = neighbour_log_probabilities(scores, values, temperature, complete)
        self.found = Found(queries, found, best, retrieved, complete, lost)

    @phase(MERGE)
    def vote(self, step: Step) -> Vote:
        assert self.found is not None  # the models have computed the step
        memory, model = self.batch.memory, step.model
        _, _, best, retrieved, complete, lost = self.found
        asked = step.trusted or memory.settings.guard
        course = self._course(self.found, model) if asked else None
        if step.trusted:
            best = self.batch.likeness.of(best, self.batch.rows)
        vote = memory.vote(best, model.view(best.values), course, step.trusted, retrieved, complete)
        return vote if lost is None else vote._replace(weight=vote.weight.masked_fill(lost, 0.0))

    def _course(self, found: Found, model: Distribution) -> Course:
        """Follow the hypotheses to this token."""
        batch, everything, complete = self.batch, found.everything, found.complete
        seen = observed(everything.scores, everything.values, model.likeliest.favourite, complete)
        if batch._followed is None:
            source = batch.likeness.columns(batch.rows)
            batch._followed = torch.cat([torch.zeros_like(seen), source], dim=1)
        sums, source = batch._followed.tensor_split([OBSERVED], dim=1)
        return Course.of(log_norms(found.queries), sums.add_(seen), source, complete)

    def force(self, text: GivenText) -> TokenRecord:
        """Search, and follow given targets as beam search does, for all tokens at once."""
        batch, model, real = self.batch, text.model, text.real
        queries = self.states[-1][:, -real.size(1) :][real]  # without those of forced tags
        positions = (real.long().cumsum(dim=1) - 1)[real]
        rows = real.nonzero()[:, 0]
        found = batch.search(queries, rows)
        found = batch.likeness.of(found.without(found.scores == float("-inf")), rows)
        sums = along_sentences(observed(found.scores, found.values, model.likeliest.favourite), positions)
        course = Course.of(log_norms(queries), sums, batch.likeness.columns(rows))
        view = model.view(found.values)
        said = LookedUp(view.neighbours, view.best, view.favourite)
        return TokenRecord(found, said, course)


@dataclass
class TokenRecord(Record):
    """What the token memory found at N tokens of given targets."""

    neighbours: Neighbours  # [N, n], nearest first; the best k are chosen among them
    model: LookedUp  # what the model says of them
    course: Course

    def vote(self, memory: TokenMemory, trusted: bool) -> Vote:
        best = self.best(memory.settings)
        return memory.vote(best.neighbours, best.model, self.course, trusted)

    def best(self, settings: TokenRetrievalSettings) -> TokenRecord:
        """Keep the k best neighbours only, with scores as `best_neighbours` has them."""
        best, places = best_neighbours(self.neighbours, settings)
        said = self.model.neighbours
        said = said[:, : settings.k] if places is None else said.gather(1, places)
        return TokenRecord(best, self.model._replace(neighbours=said), self.course)

    def retrieved(self, targets: Tensor, temperature: float) -> Tensor:
        ids, scores, values, _ = self.neighbours
        return target_log_probabilities(scores, (values == targets.unsqueeze(1)) & (ids >= 0), temperature)
