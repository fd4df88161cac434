"""The token memory: a search each step, kNN-MT's vote, and the features that trust reads of it.

Decoding, scoring, tuning and explaining call the same functions. They gather and count: nothing is as wide as
the vocabulary, and nothing goes back to the host. Letters: N tokens, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.domain import Domain
from fairseq_ccpr.datastore.source_index import Likeness
from fairseq_ccpr.datastore.token import FAMILIAR
from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.forced import GivenText
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Step
from fairseq_ccpr.decoding.mixture import (
    ALMOST_ALL,
    LookedUp,
    ModelEvidence,
    ModelView,
    Vote,
    distrust,
    neighbour_log_probabilities,
    neighbour_shares,
    retrieval_confidence,
    target_log_probabilities,
)
from fairseq_ccpr.decoding.options import PUBLISHED, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.remote_answers import RemoteAnswers
from fairseq_ccpr.decoding.token_retriever import LearningRetriever, Neighbours, Retriever, TokenRetriever
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.search.candidates import Candidates
from fairseq_ccpr.search.exact import largest
from fairseq_ccpr.settings import as_options, signature, signed
from fairseq_ccpr.timing import LIKENESS, MERGE, phase

RANKS = (1, 2, 4, 8, 16, 32, 64)
TYPICAL_RANK = 8  # whose score is followed along a hypothesis
# of the likeness that is familiar: the guard leaves nothing of sentences that are as little like any
STRANGE = 0.8
DEEP = 64  # neighbours that the k best are chosen among where their sentences count
SENTENCE_FEATURES = ("likeness of nearest", "highest likeness", "mean likeness", "likeness of best sentence")
STATE_FEATURES = ("state distance", "state cosine", "state norm")
RUNNING_FEATURES = ("running score", "running distance", "running agreement")

TOKEN_FEATURES = (
    *(f"score {rank}" for rank in RANKS),
    "found",
    *(f"distinct {rank}" for rank in RANKS[1:]),
    "highest p_tok",
    "entropy of p_tok",
    "count of favourite",
    "model of favourite",
    "agreement",
    "overlap",
    *SENTENCE_FEATURES,
    *STATE_FEATURES,
    *RUNNING_FEATURES,
    "position",
)

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


class Course(NamedTuple):
    """How N hypotheses have gone so far, this token included, and what they translate."""

    state: Tensor  # fp32 [N, 3], `STATE_FEATURES`, of this token alone
    running: Tensor  # fp32 [N, 3], `RUNNING_FEATURES`
    position: Tensor  # fp32 [N], tokens before this one
    # fp32 [N], the likeness of the datastore's sentence that is most like the source; 0 where not known
    best: Tensor

    @classmethod
    def of(cls, state: Tensor, sums: Tensor, length: Tensor | int, best: Tensor | None) -> Course:
        """Make it of the sums of what was `observed` at each token, fp32 [N, 4], and their number."""
        running = sums[:, :3] / sums[:, 3:].clamp_min(1)
        running[:, 1] = sums[:, 1] / length
        position = length - 1.0 if isinstance(length, Tensor) else sums.new_full((len(sums),), length - 1.0)
        return cls(state, running, position, torch.zeros_like(position) if best is None else best)


class TokenEvidence(NamedTuple):
    """What the token memory saw at N tokens."""

    # fp32 [N, k], inner products or minus squared distances; -inf where a neighbour is missing
    scores: Tensor
    values: Tensor  # int64 [N, k]
    likeness: Tensor | None  # fp32 [N, k], of their sentences
    log_probs: Tensor  # fp32 [N, k], log p_tok, duplicates merged
    model: Tensor  # fp32 [N, k], log p_NMT of `values`
    course: Course

    def features(self, model: ModelEvidence) -> Tensor:
        """Compute `TOKEN_FEATURES`, fp32 [N, F]."""
        found = self.scores > float("-inf")
        count = found.sum(dim=1, keepdim=True)
        some, at_least_one = count > 0, count.clamp_min(1)
        # A rank that was not found has the score of the last one that was.
        ranks = torch.minimum(_ranks(count.device), at_least_one)
        places = ranks - 1
        scores = self.scores.sort(dim=1, descending=True).values.gather(1, places)
        scores = similarities(scores).nan_to_num(neginf=0.0)
        values = torch.where(found, self.values, -1)
        first = (first_occurrences(values) & found).float()
        distinct = first.cumsum(dim=1).gather(1, places) / ranks
        probabilities = self.log_probs.exp() * first
        highest, place = probabilities.max(dim=1, keepdim=True)
        favourite = values.gather(1, place)
        named = torch.eq(values, favourite, out=torch.empty_like(probabilities))
        entropies = torch.special.entr(probabilities)
        sums = torch.stack([entropies, named, probabilities * self.model.exp()], dim=1).sum(dim=2)
        entropy, same, overlap = sums.split(1, dim=1)
        agreement = favourite == model.favourite.unsqueeze(1)
        state, running, position, best = self.course
        neighbours = scores, count / self.scores.size(1), distinct[:, 1:]
        consent = (
            same / at_least_one * some,
            distrust(model, self.model.gather(1, place), some),
            agreement,
            overlap,
        )
        likeness = torch.zeros_like(self.scores) if self.likeness is None else self.likeness * found
        alike = (
            likeness[:, :1],
            likeness.amax(dim=1, keepdim=True),
            likeness.sum(dim=1, keepdim=True) / at_least_one,
        )
        course = best.unsqueeze(1), state, running, torch.log1p(position).unsqueeze(1)
        return torch.cat([*neighbours, highest, entropy, *consent, *alike, *course], dim=1)


def observed(scores: Tensor, values: Tensor, state: Tensor, favourite: Tensor) -> Tensor:
    """What of N tokens is followed along their hypotheses, fp32 [N, 4]; tokens without neighbours count for the last alone.

    Columns: those of `RUNNING_FEATURES`, the similarity of a neighbour of typical rank, the distance of the
    state to the datastore's text, and whether the nearest neighbour names the model's favourite; then whether
    there are neighbours.
    """
    near = scores[:, :TYPICAL_RANK]
    least = near.masked_fill(near == float("-inf"), float("inf")).amin(dim=1)
    typical = similarities(least).nan_to_num(posinf=0.0)
    agrees = (values[:, 0] == favourite) & (scores[:, 0] > float("-inf"))
    some = scores.amax(dim=1) > float("-inf")
    return torch.stack([typical, state[:, 0], agrees, some], dim=1)


def along_sentences(seen: Tensor, positions: Tensor) -> Tensor:
    """Sum what was `observed`, fp32 [N, 4], from the beginning of each sentence to each token, at positions from 0."""
    sums = seen.double().cumsum(dim=0)
    start = torch.arange(len(positions), device=positions.device) - positions
    before = torch.cat([sums.new_zeros(1, sums.size(1)), sums])[start]
    return (sums - before).to(seen.dtype)


def similarities(scores: Tensor) -> Tensor:
    """Bring scores of any shape to one scale, fp32: inner products as they are, squared distances as minus their logarithm.

    Scores of a metric have one sign but for inner products below 0, which say as much as 0; missing ones are
    -inf.
    """
    return torch.where(scores < 0, -torch.log1p(-scores), scores)


def first_occurrences(values: Tensor) -> Tensor:
    """Tell which of k values of each row no earlier one equals, bool [N, k]."""
    ordered, order = values.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[:, 1:], ordered[:, :-1], out=new[:, 1:])
    return torch.empty_like(new).scatter_(1, order, new)


@cache
def _ranks(device: torch.device) -> Tensor:
    return 2 ** torch.arange(len(RANKS), device=device)  # made there: a copy would be waited for


def best_neighbours(found: Neighbours, settings: TokenRetrievalSettings) -> tuple[Neighbours, Tensor | None]:
    """Choose the k best of the neighbours found by their scores and their sentences' likeness to the source.

    A neighbour of sentence s scores gamma T (1 - sim(x, s)) less, so that its share of p_r is that of
    exp(score / T + gamma (sim(x, s) - 1)).

    Returns:
        The neighbours, best first, and their places among those found, int64 [N, k]; None: they are the first
        k.
    """
    if not settings.likeness or found.likeness is None:
        return found.nearest(settings.k), None
    scores = found.scores + settings.temperature * settings.likeness * (found.likeness - 1)
    best, places = largest(scores, min(settings.k, scores.size(1)))
    ids, values, likeness = (part.gather(1, places) for part in (found.ids, found.values, found.likeness))
    return Neighbours(ids, best, values, likeness), places


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
        return (settings.lambda_ * confidence).clamp(0, settings.lambda_max)
    return scores.new_full((len(scores),), settings.lambda_)


def token_weight(
    policy: WeightPolicy, neighbours: Neighbours, model: ModelView, settings: TokenRetrievalSettings
) -> Tensor:
    """Compute a policy's weight within its bounds: fp32 [N] in [0, 1), 0 where nothing was found."""
    scores = neighbours.scores
    weight = policy(scores, neighbours.values, model, settings)
    if not isinstance(weight, Tensor) or weight.shape != scores.shape[:1]:
        found = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ConfigurationError(
            f"the weight {name_of(policy)} returned {found} for neighbours {list(scores.shape)}: return a tensor "
            f"[{len(scores)}], a weight for each hypothesis"
        )
    return weight.clamp(0, ALMOST_ALL).masked_fill(scores.amax(dim=1) == float("-inf"), 0.0)


@dataclass(frozen=True)
class TokenMemory(Memory):
    """A token datastore alongside the decoder.

    Args:
        capture: reads the queries, from the one model the datastore belongs to.
        unknown: the unknown token, which nothing that is retrieved proposes.
        domain: what the datastore knows of its own text, on the model's device; None where it was built
            without.
        learned: what is learned alongside the datastore, live or as a snapshot; None: nothing.
        remote: what to do where a database has the keys and does not answer; None: an error.
        read_tokens: returns the subwords of a source, int64 [S], without padding and markers; None: sentences
            do not count.
    """

    name = "tokens"
    bounded = False  # --knn-lambda-max is its bound
    features = TOKEN_FEATURES
    part = "token"
    tuned = ("k", "lambda_", "temperature", "likeness")
    quick = True

    capture: KeyCapture
    retriever: Retriever
    settings: TokenRetrievalSettings
    unknown: int
    policy: WeightPolicy = confidence_weight
    domain: Domain | None = None
    learned: LearnedMemory | LearnedEntries | None = None
    remote: RemoteAnswers | None = None
    read_tokens: Callable[[Tensor], np.ndarray] | None = None

    def now(self, moment: dict[int, Any]) -> TokenMemory:
        """Return a snapshot of the memory, unaffected by later learning and forgetting."""
        if self.learned is None:
            return self
        entries = moment.setdefault(id(self.learned), self.learned.entries)
        return replace(self, learned=entries, retriever=entries.retriever or self.retriever)

    def begin(self, sources: Tensor) -> TokenBatch:
        """Begin a batch: only the decoder has queries. What is learned meanwhile counts for the next batch."""
        now = self.now({})
        rows = torch.arange(len(sources), device=sources.device)
        return TokenBatch(now, now.searched, SourceLikeness(now, sources.cpu(), sources.device), rows)

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
        """The first entry that was learned, where some were. The guard is not for those: they are for texts unlike it."""
        entries = self.learned.entries if self.learned is not None else None
        return entries.first if entries is not None and (entries.pairs or entries.moved) else None

    def familiarity(self, best: Tensor) -> Tensor:
        """Return what the guard multiplies the weight by, by the likeness of the sentence most like a source, fp32 [N]."""
        familiar = max(self.retriever.datastore.section.suits[FAMILIAR], 1e-6)
        return ((best / familiar - STRANGE) / (1 - STRANGE)).clamp(0, 1)

    def observe(self, queries: Tensor) -> Tensor:
        """Compare queries [N, d] with the datastore's own text: `STATE_FEATURES`, fp32 [N, 3]; what is not known is 0."""
        states = queries.float()
        norms = torch.linalg.vector_norm(states, dim=1).clamp_min(1e-8)
        if self.domain is None:
            return torch.stack([torch.zeros_like(norms), torch.zeros_like(norms), norms.log()], dim=1)
        return torch.stack(
            [self.domain.distance(states), self.domain.cosine(states, norms), norms.log()], dim=1
        )

    def kept(self, neighbours: Neighbours, course: Course | None) -> Tensor | None:
        """Compute what fraction of each neighbour the guard keeps, fp32 [N, k], or [N, 1] where all are alike; None: all."""
        if not self.settings.guard or course is None:
            return None
        familiarity = self.familiarity(course.best).unsqueeze(1)
        if self.first_learned is None:
            return familiarity
        return familiarity.expand_as(neighbours.scores).masked_fill(neighbours.ids >= self.first_learned, 1.0)

    def weight(self, neighbours: Neighbours, model: ModelView, kept: Tensor | None) -> Tensor:
        """Compute the interpolation weight of N tokens, fp32 [N], by policy and guard."""
        weight = token_weight(self.policy, neighbours, model, self.settings)
        if kept is None:
            return weight
        if kept.size(1) == 1:
            return weight * kept[:, 0]
        return weight * (neighbour_shares(neighbours.scores, self.settings.temperature) * kept).sum(dim=1)

    def vote(
        self,
        neighbours: Neighbours,
        model: ModelView,
        course: Course | None,
        trusted: bool,
        retrieved: Tensor | None = None,
    ) -> Vote:
        """Weigh neighbours at N tokens against the model.

        Args:
            course: of the hypotheses; None where neither guard nor trust looks at it.
            retrieved: log p_r of the neighbours' values, fp32 [N, k], if it was computed before.
        """
        scores, values, temperature = neighbours.scores, neighbours.values, self.settings.temperature
        kept = self.kept(neighbours, course)
        weight = self.weight(neighbours, model, kept)
        if kept is not None and self.first_learned is not None:
            retrieved = neighbour_log_probabilities(scores + temperature * kept.log(), values, temperature)
        elif retrieved is None:
            retrieved = neighbour_log_probabilities(scores, values, temperature)
        evidence = None
        if trusted and course is not None:
            evidence = TokenEvidence(scores, values, neighbours.likeness, retrieved, model.neighbours, course)
        return Vote(values, retrieved, weight, evidence)

    def on(self, device: torch.device) -> TokenMemory:
        """Return a memory that computes votes of records on another device."""
        return replace(self, domain=self.domain.to(device) if self.domain is not None else None)

    def signature(self) -> str:
        """Return everything that decides what is retrieved and how it counts, as one line to print with results."""
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
        given, found = self.settings, TokenRecord.joined(records)
        unit = self.retriever.datastore.section.projection is not None
        kinds = (True, False) if unit and not options.knn_confidence else (given.confidence,)
        temperatures = UNIT_TEMPERATURES if unit else TEMPERATURES
        likenesses = LIKENESSES if found.neighbours.likeness is not None else (0.0,)
        return self.points(
            found,
            targets,
            NEIGHBOURS if options.knn_k is None else (given.k,),
            temperatures if options.knn_temperature is None else (given.temperature,),
            (False,) if options.no_knn_confidence else kinds,
            likenesses if options.knn_likeness is None else (given.likeness,),
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
        """Yield points of a grid as `grid` does; whatever has none is as in the settings, and lambda is varied."""
        given = self.settings
        for k, temperature, likeness in product(neighbours, temperatures, likenesses):
            shape: dict[str, Any] = {"k": k, "temperature": temperature, "likeness": likeness}
            point = TokenRetrievalSettings(lambda_=1.0, guard=given.guard, sentences=given.sentences, **shape)
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


@dataclass
class SourceLikeness:
    """How much the datastore's sentences are like the sources of a batch; computed when it is first asked for."""

    memory: TokenMemory
    sources: Tensor  # int64 [B, S], on the host: later, it would have to be waited for
    device: torch.device  # of the model

    @cached_property
    def _found(self) -> Likeness | None:
        """What is known of the sources, on the host; None without an index of source sentences, and without sentences."""
        learned, read_tokens = self.memory.learned, self.memory.read_tokens
        if learned is None or read_tokens is None:
            return None
        sentences = learned.entries.sentences
        if sentences is None or not sentences.size:
            return None
        with phase(LIKENESS):
            return sentences.likeness([read_tokens(source) for source in self.sources])

    @cached_property
    def _sims(self) -> Tensor | None:
        return torch.from_numpy(self._found.sims).to(self.device) if self._found is not None else None

    @cached_property
    def _best(self) -> Tensor | None:
        return torch.from_numpy(self._found.best).to(self.device).float() if self._found is not None else None

    def prepare(self) -> None:
        """Compute what steps may ask for."""
        _ = self.strange, self._sims, self._best
        if self.memory.settings.sentences:
            _ = self.candidates

    @cached_property
    def candidates(self) -> Candidates:
        """The entries of the sentences most like each source, about as many as the settings say."""
        retriever, learned = self.memory.searched, self.memory.learned
        assert isinstance(retriever, TokenRetriever) and learned is not None  # as the task has made sure
        rows = self._found.sims if self._found is not None else np.zeros((len(self.sources), 0), np.float16)
        return retriever.candidates(
            [learned.entries.most_alike(row, self.memory.settings.sentences) for row in rows]
        )

    def of(self, found: Neighbours, rows: Tensor) -> Neighbours:
        """Add the likeness of the neighbours' sentences to the sources in these rows of the batch, int64 [N]."""
        if found.likeness is not None or self._sims is None or self.memory.learned is None:
            return found
        sentences = self.memory.learned.entries.sentences_of(found.ids)
        return found._replace(likeness=self._sims[rows.unsqueeze(1), sentences].float())

    @cached_property
    def strange(self) -> tuple[bool, Tensor] | None:
        """Tell whether the guard leaves no source any neighbours, and which not, bool [B]; None where all have some."""
        if not self.memory.settings.guard or self.memory.first_learned is not None or self._found is None:
            return None
        strange = self.memory.familiarity(torch.from_numpy(self._found.best).float()) <= 0
        return (bool(strange.all()), strange.to(self.device)) if strange.any() else None

    def best(self, rows: Tensor) -> Tensor | None:
        """Return the likeness of the sentence most like each of these rows' sources, fp32 [N]; None where not known."""
        return self._best[rows] if self._best is not None else None


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream once: torch keeps memory that was freed for the stream that it was allocated on."""
    return torch.cuda.Stream(device)


@dataclass
class TokenBatch(MemoryBatch):
    """The token memory during one batch: a search each step, started while the models still compute.

    On a GPU the search runs on a second CUDA stream, in parallel with the projection to the vocabulary.
    """

    memory: TokenMemory
    retriever: Retriever
    likeness: SourceLikeness
    rows: Tensor  # int64 [H], the sentence of each hypothesis
    _stream: torch.cuda.Stream | None = None
    _beam: int = 0  # hypotheses of a sentence; 0 before the first step
    _skipped: bool = False  # whether its sentences were counted as going without
    # Of this step: queries [H, d], all that was found, the k best, and log p_r of these, fp32 [H, k].
    _found: list[tuple[Tensor, Neighbours, Neighbours, Tensor]] = field(default_factory=list)
    _sums: Tensor | None = None  # fp32 [H, 4], see `Course.of`

    def encoded(self) -> None:
        """Compare the sources with the datastore's sentences, while a GPU encodes them."""
        self.likeness.prepare()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Search as soon as the decoder has computed its states."""
        with self.memory.capture.telling(self._begin_step):
            yield
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @phase(MERGE)
    def _begin_step(self) -> None:
        queries = self.memory.capture.read()[:, -1]  # [H, T, d] -> [H, d]
        # All hypotheses of a sentence are alike at the first step: one search serves them.
        copies, each = (1, self._beam) if self._beam else (len(queries) // self.sentences, 1)
        self._beam = self._beam or copies
        with self._on_second_stream(queries):
            settings = self.memory.settings
            found = self.search(queries[::copies], self.rows[::copies], each)
            if copies > 1:
                found = found.changed(lambda part: part.repeat_interleave(copies, dim=0))
            best, _ = best_neighbours(found, settings)
            retrieved = neighbour_log_probabilities(best.scores, best.values, settings.temperature)
        self._found.append((queries, found, best, retrieved))

    @property
    def sentences(self) -> int:
        """The sentences of the batch as it began."""
        return len(self.likeness.sources)

    def search(self, queries: Tensor, rows: Tensor, each: int | None = None) -> Neighbours:
        """Find the entries nearest to queries [N, d] of the sentences in these rows of the batch, int64 [N].

        They are k, or as many as the best k are chosen among where their sentences count. Those of the
        unknown token count as missing, in their places.

        Args:
            each: how many queries each sentence has that has any; None: they differ.
        """
        settings, strange = self.memory.settings, self.likeness.strange
        k = max(settings.k, DEEP) if settings.likeness else settings.k
        if strange is None:
            found = self._search(queries, rows, k, each)
        elif (everything := strange[0]) or not queries.is_cuda:
            found = Neighbours.missing(queries, k)
            if not everything and len(searched := (~strange[1][rows]).nonzero()[:, 0]):
                found.put(searched, self._search(queries[searched], rows[searched], k, each))
        else:  # to leave some out, a GPU would have to be asked how many
            found = self._search(queries, rows, k, each).without(strange[1][rows].unsqueeze(1))
        found = found.without(found.values == self.memory.unknown)
        return self.likeness.of(found, rows) if settings.likeness else found

    def _search(self, queries: Tensor, rows: Tensor, k: int, each: int | None) -> Neighbours:
        if self.memory.settings.sentences:
            retriever, candidates = self.retriever, self.likeness.candidates
            assert isinstance(retriever, TokenRetriever)  # or there are no candidates
            return retriever.search_among(candidates, queries, rows, k, each)
        remote, search = self.memory.remote, partial(self.retriever.search, queries, k)
        found = remote.ask(search, 0 if self._skipped else self.sentences) if remote is not None else search()
        if found is None:
            self._skipped = True
            return Neighbours.missing(queries, k)
        return found

    @contextmanager
    def _on_second_stream(self, queries: Tensor) -> Iterator[None]:
        """Queue GPU work on a second CUDA stream, after all that `queries` depends on."""
        if not queries.is_cuda:
            yield
            return
        self._stream = _second_stream(queries.device)
        self._stream.wait_stream(torch.cuda.current_stream(queries.device))
        # the allocator must not reuse its memory before that stream has read it
        queries.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    @phase(MERGE)
    def vote(self, step: Step) -> Vote:
        """Vote for the next token of each hypothesis."""
        queries, found, best, retrieved = self._found.pop()
        memory, model = self.memory, step.model
        if not step.trusted and not memory.settings.guard:
            return memory.vote(best, model.view(best.values), None, False, retrieved)
        length = step.tokens.size(1)
        state, favourite = memory.observe(queries), model.likeliest.favourite
        seen = observed(found.scores, found.values, state, favourite)
        self._sums = seen if self._sums is None else self._sums + seen
        course = Course.of(state, self._sums, length, self.likeness.best(self.rows))
        if step.trusted:
            best = self.likeness.of(best, self.rows)
        return memory.vote(best, model.view(best.values), course, step.trusted, retrieved)

    def reorder(self, order: Tensor) -> Self:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was."""
        sums = self._sums.index_select(0, order) if self._sums is not None else None
        return replace(self, rows=self.rows.index_select(0, order), _sums=sums)

    def force(self, text: GivenText) -> TokenRecord:
        """Search, and follow given targets as beam search does, for all tokens at once."""
        model, real = text.model, text.real
        queries = self.memory.capture.read()[:, -real.size(1) :][real]  # without those of forced tags
        state, favourite = self.memory.observe(queries), model.likeliest.favourite
        positions = (real.long().cumsum(dim=1) - 1)[real]
        rows = real.nonzero()[:, 0]
        found = self.likeness.of(self.search(queries, rows), rows)
        seen = observed(found.scores, found.values, state, favourite)
        view = model.view(found.values)
        course = Course.of(state, along_sentences(seen, positions), positions + 1, self.likeness.best(rows))
        return TokenRecord(found, LookedUp(view.neighbours, view.best, view.favourite), course)


@dataclass
class TokenRecord:
    """What the token memory found at N tokens of given targets."""

    neighbours: Neighbours  # [N, n], nearest first; the best k are chosen among them
    model: LookedUp  # what the model says of them
    course: Course

    def vote(self, memory: TokenMemory, trusted: bool) -> Vote:
        """Vote as the decoder does."""
        best = self.best(memory.settings)
        return memory.vote(best.neighbours, best.model, self.course, trusted)

    def best(self, settings: TokenRetrievalSettings) -> TokenRecord:
        """Keep the k best neighbours only, with scores as `best_neighbours` has them."""
        best, places = best_neighbours(self.neighbours, settings)
        said = self.model.neighbours
        said = said[:, : settings.k] if places is None else said.gather(1, places)
        return TokenRecord(best, self.model._replace(neighbours=said), self.course)

    def retrieved(self, targets: Tensor, temperature: float) -> Tensor:
        """Compute log p_tok of given tokens, int64 [N] -> fp32 [N]."""
        ids, scores, values, _ = self.neighbours
        return target_log_probabilities(scores, (values == targets.unsqueeze(1)) & (ids >= 0), temperature)

    def select(self, rows: Tensor) -> TokenRecord:
        """Select some of the tokens."""
        return self._changed([self], lambda parts: parts[0][rows])

    def cpu(self) -> TokenRecord:
        """Move to the CPU."""
        return self._changed([self], lambda parts: parts[0].cpu())

    @classmethod
    def joined(cls, records: Sequence[TokenRecord]) -> TokenRecord:
        """Join the records of several texts."""
        return cls._changed(records, torch.cat)

    @classmethod
    def _changed(
        cls, records: Sequence[TokenRecord], change: Callable[[list[Tensor]], Tensor]
    ) -> TokenRecord:
        found, parts = [one.neighbours for one in records], [[*one.model, *one.course] for one in records]
        columns = [change(list(column)) for column in zip(*parts)]
        return cls(Neighbours.joined(found, change), LookedUp(*columns[:3]), Course(*columns[3:]))
