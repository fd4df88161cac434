"""Settings scored by the likelihood of held-out references, from records of one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.building.defaults import LIKENESSES
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.forced import ForcedText, joined
from fairseq_ccpr.decoding.mixture import SILENT, Mixture
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory, TokenRecord
from fairseq_ccpr.timing import progress_over

# Of the held-out text, and of all others together: more teach little, and cost as long as decoding them.
TOKENS = 24_000
# Of these, for other memories than the tokens': phrases have hundreds of candidates at each, for every point
# of a grid.
SAMPLED_TOKENS = 10_000
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
PHRASE_LAMBDAS = (0.2, 0.4, 0.6, 0.8, 1.0)
# In squared distances, of which the decoder's states lie some tens to hundreds apart.
TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
# In inner products of unit vectors.
UNIT_TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
# The lambda that trust starts from: it multiplies odds, which can fall as far as they can rise from here. A
# weight near 1 could never fall.
TRUSTED_LAMBDA = 0.5
OF_PHRASES = "lambda of phrases"
LEAST = 1e-12  # in place of a weight of 0, whose gradients are not numbers


class Worth(NamedTuple):
    """Nats a token against the model alone, and mean interpolation weights."""

    gain: float  # mean of log p - log p_NMT
    harm: float  # mean of what tokens lose; those that gain count as 0
    weights: dict[str, float]  # mean weight of each memory

    @classmethod
    def measure(cls, model: Tensor, system: Tensor, weights: Mapping[str, Tensor]) -> Worth:
        """Measure a system by log p_NMT and log p of N reference tokens, and each memory's weight there, fp32 [N]."""
        gain = system - model
        means = {name: float(weight.mean()) for name, weight in weights.items()}
        return cls(float(gain.mean()), float((-gain).clamp_min(0).mean()), means)


class TextWorth(NamedTuple):
    """The worth of systems on a text."""

    model: float  # mean log p_NMT of its references
    systems: dict[str, Worth]  # by name


@dataclass
class HeldOut:
    """N reference tokens of a text as model and memories see them, batch by batch; on the CPU."""

    name: str
    texts: list[ForcedText]

    def having(self, names: Collection[str]) -> HeldOut:
        """Keep the batches that all these memories were asked about."""
        return HeldOut(
            self.name, [text for text in self.texts if all(name in text.records for name in names)]
        )

    @property
    def mixture(self) -> Mixture:
        """How votes are combined."""
        return self.texts[0].mixture

    @cached_property
    def targets(self) -> Tensor:
        """int64 [N]."""
        return torch.cat([text.targets for text in self.texts])

    @cached_property
    def sentences(self) -> Tensor:
        """int64 [N], numbered from 0."""
        return torch.cat([text.sentences for text in self.texts])

    @cached_property
    def log_probs(self) -> Tensor:
        """log p_NMT of the targets, fp32 [N]."""
        return torch.cat([text.log_probs for text in self.texts])

    @cached_property
    def found(self) -> TokenRecord:
        """What the token memory found at all of them."""
        found: list[TokenRecord] = [text.records[TokenMemory.name] for text in self.texts]
        return joined(found, torch.cat)


@torch.inference_mode()
def force_decode_text(
    name: str, samples: list[Any], ensemble: RetrievalEnsemble, most: int = TOKENS, quiet: bool = False
) -> HeldOut:
    """Force-decode batches of held-out sentences, keeping what model and memories say of the references.

    Args:
        samples: fairseq's batches, spread over all lengths; of many, some are left out.
        ensemble: whose token memory has the largest k.
        most: tokens, about, of which memories besides the tokens' are asked about as many as their share of
            `TOKENS`.
    """
    size = sum(int(sample["ntokens"]) for sample in samples)
    samples = spread(samples, size, most)
    sampled = {id(one) for one in spread(samples, min(size, most), SAMPLED_TOKENS * most // TOKENS)}
    always = [
        memory for memory in ensemble.memories if memory.acts_on == "model" or isinstance(memory, TokenMemory)
    ]
    quick = ensemble.with_memories(always, None)
    # the rest only votes need
    samples = samples if quick.voting else [one for one in samples if id(one) in sampled]
    texts: list[ForcedText] = []
    sentences = 0
    for sample in progress_over(samples, name, "token", lambda one: int(one["ntokens"]), quiet):
        text = (ensemble if id(sample) in sampled else quick).force_decode(sample)
        texts.append(text.kept(sentences))
        sentences += len(sample["target"])
    return HeldOut(name, texts)


def spread(samples: list[Any], size: int, most: int) -> list[Any]:
    """Keep every n-th batch, so many that `size` tokens become about `most`."""
    return samples[:: max(1, round(size / most))]


Settings = TokenRetrievalSettings | PhraseSettings


@dataclass(frozen=True)
class Alongside:
    """N reference tokens as the model and all memories but one see them."""

    text: ForcedText  # with the record of the one
    # of each other memory log p_r of the references, and the weight, fp32 [N] each
    others: list[tuple[Tensor, Tensor]]
    mixture: Mixture  # of the others and the one, which is last

    @classmethod
    def of(cls, text: ForcedText, ensemble: RetrievalEnsemble, one: PhraseMemory) -> Alongside:
        """See a text as the other memories of an ensemble do, with their settings."""
        others = [memory for memory in ensemble.voting if memory.name != one.name]
        votes = [text.records[memory.name].vote(memory, False) for memory in others]
        alone = replace(text, records={one.name: text.records[one.name]})
        bounded = (*(memory.bounded for memory in others), True)
        return cls(alone, text.said(votes), replace(text.mixture, bounded=bounded))

    def select(self, rows: Tensor) -> Alongside:
        """Select some of the tokens, by number or by bool."""
        others = [(said[rows], weight[rows]) for said, weight in self.others]
        return replace(self, text=self.text.select(rows), others=others)

    def weights(self, weight: Tensor) -> list[Tensor]:
        """Limit the weights of all memories, that of the one last, fp32 [N] each."""
        weights = [*(w for _, w in self.others), weight.clamp_min(LEAST)]
        return self.mixture.limit(weights)

    def log_likelihood(self, said: Tensor, weight: Tensor) -> Tensor:
        """Compute log p where the one says log p_r and weighs so much, fp32 [N] each."""
        votes = zip([*(s for s, _ in self.others), said], self.weights(weight))
        each = [(s.clamp_min(SILENT), w.clamp_min(LEAST)) for s, w in votes]
        return self.mixture.of_targets(self.text.log_probs, each)


@dataclass
class Grids:
    """Mean log-likelihoods of the held-out references by settings."""

    tokens: dict[TokenRetrievalSettings, float]
    phrases: dict[PhraseSettings, float]

    @classmethod
    def score(cls, cfg: Any, ensemble: RetrievalEnsemble, text: HeldOut) -> Grids:
        """Score the settings of tokens, then of phrases alongside the likeliest of those, as far as there are any."""
        grids = cls({}, {})
        for memory in ensemble.voting:
            if isinstance(memory, TokenMemory):
                grids.tokens = _score_tokens(cfg, memory, text)
        for memory, batches in grids._alongside(text, ensemble):
            full = replace(memory, settings=replace(memory.settings, lambda_=1.0))
            votes = [batch.text.records[memory.name].vote(full, False) for batch in batches]
            said = [(vote.log_prob(batch.text.targets), vote.weight) for vote, batch in zip(votes, batches)]
            for one in PHRASE_LAMBDAS:
                each = [batch.log_likelihood(p, one * weight) for batch, (p, weight) in zip(batches, said)]
                grids.phrases[replace(memory.settings, lambda_=one)] = float(torch.cat(each).mean())
        return grids

    def _alongside(
        self, text: HeldOut, ensemble: RetrievalEnsemble
    ) -> list[tuple[PhraseMemory, list[Alongside]]]:
        other = with_settings(ensemble, likeliest(self.tokens))
        shared = text.having([memory.name for memory in ensemble.voting]).texts
        phrases = [memory for memory in ensemble.voting if isinstance(memory, PhraseMemory)]
        return [(memory, [Alongside.of(one, other, memory) for one in shared]) for memory in phrases]

    def best_settings(self, count: int) -> list[list[Settings]]:
        """Pick settings of tokens and phrases to decode with, the most promising first."""
        tokens: list[list[Settings]] = [[one] for one in candidates(self.tokens, count)] or [[]]
        by_likelihood = sorted(self.phrases, key=lambda one: -self.phrases[one])
        phrases: list[list[Settings]] = [[one] for one in by_likelihood[:count]] or [[]]
        pairs = [(i + j, i, j) for i in range(len(tokens)) for j in range(len(phrases))]
        return [tokens[i] + phrases[j] for _, i, j in sorted(pairs)[:count]]

    def settings_for_trust(self, neighbours: Sequence[int]) -> list[list[Settings]]:
        """Pick the likeliest settings of tokens for these k, as far as the grid has them; phrases have trained votes."""
        if not self.tokens:
            return [[]]
        trusted = {one: value for one, value in self.tokens.items() if one.lambda_ == TRUSTED_LAMBDA}
        best: dict[int, TokenRetrievalSettings] = {}
        for settings in sorted(trusted, key=lambda one: -trusted[one]):
            best.setdefault(settings.k, settings)
        chosen = [best[k] for k in neighbours if k in best] or list(best.values())
        return [[settings] for settings in chosen]

    def worths(self, text: HeldOut, ensemble: RetrievalEnsemble) -> dict[str, Worth]:
        """Measure on a text the likeliest settings without trust: of tokens with either kind of lambda, and with phrases."""
        measured, shared = {}, text.having([memory.name for memory in ensemble.voting])
        for name, settings in likeliest_of_each_kind(self.tokens).items():
            alone = with_settings(ensemble, settings).find(TokenMemory)
            assert alone is not None  # whose settings these are
            vote = shared.found.vote(alone, False)
            said = vote.log_prob(shared.targets), vote.weight
            mixed = ensemble.mixture.of_targets(shared.log_probs, [said])
            measured[name] = Worth.measure(shared.log_probs, mixed, {alone.name: vote.weight})
        for memory, batches in self._alongside(text, ensemble):
            best = replace(memory, settings=likeliest(self.phrases))
            votes = [batch.text.records[memory.name].vote(best, False) for batch in batches]
            both = list(zip(batches, votes))
            mixed = torch.cat(
                [batch.log_likelihood(v.log_prob(batch.text.targets), v.weight) for batch, v in both]
            )
            weights = map(torch.cat, zip(*(batch.weights(v.weight) for batch, v in both)))
            names = [*(one.name for one in ensemble.voting if one.name != memory.name), memory.name]
            measured[OF_PHRASES] = Worth.measure(shared.log_probs, mixed, dict(zip(names, weights)))
        return measured


def with_settings(ensemble: RetrievalEnsemble, *settings: Settings | None) -> RetrievalEnsemble:
    """Return an ensemble without trust, with other settings of the memories that have settings of these types."""
    kinds = {type(one): one for one in settings if one is not None}
    memories = (memory for memory in ensemble.voting if isinstance(memory, TokenMemory | PhraseMemory))
    chosen = [
        replace(memory, settings=kinds.get(type(memory.settings), memory.settings))  # type: ignore[arg-type]
        for memory in memories
    ]
    return ensemble.replacing(*chosen)


def likeliest(grid: dict[Any, float]) -> Any:
    """Pick the likeliest point of a grid; None of an empty one."""
    return max(grid, key=lambda one: grid[one], default=None)


def candidates(grid: dict[TokenRetrievalSettings, float], count: int) -> list[TokenRetrievalSettings]:
    """Pick the likeliest points of the grid that have a k, a T or a lambda that none before has, for each kind of lambda.

    Likelihood and BLEU disagree on all three, and likelihood wants ever more neighbours.
    """
    chosen: list[TokenRetrievalSettings] = []
    seen: set[tuple[object, ...]] = set()
    for settings in sorted(grid, key=lambda s: -grid[s]):
        values = {
            (settings.confidence, name, getattr(settings, name)) for name in ("k", "temperature", "lambda_")
        }
        if not values <= seen:
            seen |= values
            chosen.append(settings)
    return chosen[:count]


def likeliest_of_each_kind(grid: dict[TokenRetrievalSettings, float]) -> dict[str, TokenRetrievalSettings]:
    """Pick the likeliest settings with a fixed lambda, and with lambda*, as far as the grid has both."""
    chosen: dict[str, TokenRetrievalSettings] = {}
    for settings in sorted(grid, key=lambda one: -grid[one]):
        chosen.setdefault("lambda*" if settings.confidence else "lambda", settings)
    return dict(sorted(chosen.items()))


def _score_tokens(cfg: Any, memory: TokenMemory, text: HeldOut) -> dict[TokenRetrievalSettings, float]:
    given = memory.settings
    unit = memory.retriever.datastore.section.projection is not None
    kinds = (True, False) if unit and not cfg.task.knn_confidence else (given.confidence,)
    if cfg.task.no_knn_confidence:
        kinds = (False,)
    neighbours = NEIGHBOURS if cfg.task.knn_k is None else (given.k,)
    temperatures: tuple[float, ...] = UNIT_TEMPERATURES if unit else TEMPERATURES
    if cfg.task.knn_temperature is not None:
        temperatures = (given.temperature,)
    likenesses = LIKENESSES if text.found.neighbours.likeness is not None else (0.0,)
    if cfg.task.knn_likeness is not None:
        likenesses = (given.likeness,)
    return score_grid(memory, text, neighbours, temperatures, kinds, likenesses)


def score_grid(
    memory: TokenMemory,
    text: HeldOut,
    neighbours: tuple[int, ...],
    temperatures: tuple[float, ...],
    confidences: tuple[bool, ...],
    likenesses: tuple[float, ...] = (0.0,),
) -> dict[TokenRetrievalSettings, float]:
    """Mean log-likelihood of the references at every point of the grid, with lambda fixed and, or, scaled to lambda*.

    Args:
        memory: whatever has no grid is as in its settings.
    """
    grid, given = {}, memory.settings
    for k, temperature, likeness in product(neighbours, temperatures, likenesses):
        point = TokenRetrievalSettings(
            k, 1.0, temperature, guard=given.guard, sentences=given.sentences, likeness=likeness
        )
        best = text.found.best(point)
        retrieved = best.retrieved(text.targets, temperature)
        for confidence, lambda_ in product(confidences, LAMBDAS):
            settings = replace(given if confidence else point, k=k, lambda_=lambda_, temperature=temperature)
            settings = replace(settings, confidence=confidence, likeness=likeness)
            one = replace(memory, settings=settings)
            kept = one.kept(best.neighbours, best.course)
            weight = one.weight(best.neighbours, best.model, kept)
            mixed = text.mixture.of_targets(text.log_probs, [(retrieved, weight)])
            grid[one.settings] = float(mixed.mean())
    return grid
