"""Held-out references as model and memories see them, and settings scored by their likelihood."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.datastore.tuned import Parts
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.forced import ForcedText, VoteRecord
from fairseq_ccpr.decoding.memory import Memory
from fairseq_ccpr.decoding.mixture import ALMOST_ALL, SILENT, Mixture, Said
from fairseq_ccpr.timing import progress_over

# Of the held-out text, and of all others together: more teach little, and cost as long as decoding them.
HELD_OUT_TOKENS = 24_000
# Of these, for memories that are not quick: phrases have hundreds of candidates at each, for every point of a
# grid.
SAMPLED_TOKENS = 10_000
LEAST_WEIGHT = 1e-12  # in place of a weight of 0, whose gradients are not numbers
TELLING = ("k", "temperature", "lambda_")  # settings of which candidates have all that are likely

Grid = dict[Any, float]  # mean log-likelihood of held-out references by a memory's settings


class Worth(NamedTuple):
    """Nats a token against the model alone, and mean interpolation weights."""

    gain: float  # mean of log p - log p_NMT
    harm: float  # mean of what tokens lose; those that gain count as 0
    weights: dict[str, float]  # mean weight of each memory

    @classmethod
    def measure(cls, model: Tensor, system: Tensor, weights: Mapping[str, Tensor]) -> Worth:
        """Measure a system by log p_NMT, log p and each memory's weight at N reference tokens, fp32 [N]."""
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
    foreign: bool = False  # of another domain: it must not lose

    def having(self, names: Collection[str]) -> HeldOut:
        """Keep the batches that all these memories were asked about."""
        texts = [text for text in self.texts if all(name in text.records for name in names)]
        return replace(self, texts=texts)

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

    def said(self, memory: Memory) -> Said:
        """Ask a memory about the references."""
        each = [text.records[memory.name].vote(memory, False).said(text.targets) for text in self.texts]
        log_probs, weights = zip(*each)
        return torch.cat(log_probs), torch.cat(weights)

    def beside(self, memory: Memory, ensemble: RetrievalEnsemble) -> HeldOut:
        """Keep what the other memories say of the references: `memory` alone can be asked with other settings."""
        texts = []
        for text in self.having(names_of(ensemble)).texts:
            records = dict(text.records)
            for other in ensemble.voting:
                if other.name != memory.name:
                    said, weight = records[other.name].vote(other, False).said(text.targets)
                    columns = text.targets.unsqueeze(1), said.unsqueeze(1)
                    records[other.name] = VoteRecord(*columns, weight, weight.new_empty(len(weight), 0))
            texts.append(replace(text, records=records))
        return replace(self, texts=texts)

    def select(self, rows: Tensor) -> HeldOut:
        """Select some of the tokens, bool [N]."""
        each = zip(self.texts, rows.split([len(text.targets) for text in self.texts]))
        return replace(self, texts=[text.select(some) for text, some in each if some.any()])

    def draw(self, count: int, generator: torch.Generator) -> HeldOut:
        """Draw tokens of one batch, with replacement."""
        text = self.texts[int(torch.randint(len(self.texts), (), generator=generator))]
        rows = torch.randint(len(text.targets), (count,), generator=generator)
        return replace(self, texts=[text.select(rows)])


def names_of(ensemble: RetrievalEnsemble) -> list[str]:
    """Name the memories that vote."""
    return [memory.name for memory in ensemble.voting]


def limited(ensemble: RetrievalEnsemble, said: Mapping[str, Said]) -> dict[str, Said]:
    """Limit the weights of memories, by name, as an ensemble's settings have it."""
    bounded = {memory.name: memory.bounded for memory in ensemble.voting}
    mixture = replace(ensemble.mixture, bounded=tuple(bounded[name] for name in said))
    weights = mixture.limit([weight.clamp_min(LEAST_WEIGHT) for _, weight in said.values()])
    return {name: (said[name][0], weight) for name, weight in zip(said, weights)}


def log_likelihood(mixture: Mixture, model: Tensor, said: Iterable[Said]) -> Tensor:
    """Mix log p_NMT of N references with what memories say, fp32 [N]; it can be differentiated."""
    votes = [(one.clamp_min(SILENT), weight.clamp(LEAST_WEIGHT, ALMOST_ALL)) for one, weight in said]
    return mixture.of_targets(model, votes)


@torch.inference_mode()
def force_decode_text(
    name: str,
    samples: list[Any],
    ensemble: RetrievalEnsemble,
    most: int = HELD_OUT_TOKENS,
    quiet: bool = False,
    foreign: bool = False,
) -> HeldOut:
    """Force-decode batches of held-out sentences, keeping what model and memories say of the references.

    Args:
        samples: fairseq's batches, spread over all lengths; of many, some are left out.
        ensemble: whose memories are `widest`.
        most: tokens, about, of which memories that are not quick are asked about as many as their share of
            `HELD_OUT_TOKENS`.
    """
    size = sum(int(sample["ntokens"]) for sample in samples)
    samples = spread(samples, size, most)
    sampled = {id(one) for one in spread(samples, min(size, most), SAMPLED_TOKENS * most // HELD_OUT_TOKENS)}
    always = [memory for memory in ensemble.memories if memory.acts_on == "model" or memory.quick]
    quick = ensemble.with_memories(always, None)
    # the rest only votes need
    samples = samples if quick.voting else [one for one in samples if id(one) in sampled]
    texts: list[ForcedText] = []
    sentences = 0
    for sample in progress_over(samples, name, "token", lambda one: int(one["ntokens"]), quiet):
        text = (ensemble if id(sample) in sampled else quick).force_decode(sample)
        texts.append(text.kept(sentences))
        sentences += len(sample["target"])
    return HeldOut(name, texts, foreign)


@torch.inference_mode()
def loss_of(ensemble: RetrievalEnsemble, samples: list[Any]) -> float:
    """Measure what held-out batches lose against the model alone, in nats per reference token."""
    lost, tokens = 0.0, 0
    for sample in samples:
        real = ensemble.real_tokens(sample["target"])
        log_probs = ensemble.force_models(sample)[0][real]
        text = ensemble.force_decode(sample)
        model = log_probs.gather(1, text.targets.unsqueeze(1)).squeeze(1)
        system = text.mixed(ensemble.decided(text, ensemble.votes(text)))
        lost += float((model.clamp_min(SILENT) - system.clamp_min(SILENT)).sum())
        tokens += len(model)
    return lost / max(1, tokens)


def spread(samples: list[Any], size: int, most: int) -> list[Any]:
    """Keep every n-th batch, so many that `size` tokens become about `most`."""
    return samples[:: max(1, round(size / most))]


@dataclass
class Grids:
    """Mean log-likelihoods of held-out references by the settings of each memory that has a grid."""

    of: dict[str, Grid]  # by memory, in the order in which they were scored

    @classmethod
    def score(cls, options: Any, ensemble: RetrievalEnsemble, text: HeldOut) -> Grids:
        """Score the settings of each memory, alongside the likeliest of those before it."""
        grids = cls({})
        for memory in (one for one in ensemble.voting if one.tuned):
            shared, others = grids._alongside(memory, text, ensemble)
            records = [one.records[memory.name] for one in shared.texts]
            grid: Grid = {}
            for settings, said, weight in memory.grid(options, records, shared.targets):
                votes = limited(ensemble, {**others, memory.name: (said, weight)})
                grid[settings] = float(
                    log_likelihood(ensemble.mixture, shared.log_probs, votes.values()).mean()
                )
            grids.of[memory.name] = grid
        return grids

    def _alongside(
        self, memory: Memory, text: HeldOut, ensemble: RetrievalEnsemble
    ) -> tuple[HeldOut, dict[str, Said]]:
        """Return what a memory is scored on, and what the others say there: quick ones are scored apart."""
        if memory.quick:
            return text, {}
        likeliest = with_settings(
            ensemble, *(max(grid, key=lambda one: grid[one]) for grid in self.of.values())
        )
        shared = text.having(names_of(ensemble))
        return shared, {one.name: shared.said(one) for one in likeliest.voting if one.name != memory.name}

    def best_settings(self, count: int) -> list[list[Any]]:
        """Pick settings of all memories to decode with, the most promising first."""
        each = [list(enumerate(candidates(grid, count))) for grid in self.of.values()]
        ranked = sorted(
            product(*each), key=lambda some: [sum(place for place, _ in some), *(i for i, _ in some)]
        )
        return [[settings for _, settings in some] for some in ranked[:count]]

    def settings_for_trust(self, ensemble: RetrievalEnsemble, parts: Parts) -> list[list[Any]]:
        """Pick settings that trust is trained on top of."""
        starts = [memory.starts(self.of.get(memory.name, {}), parts) for memory in ensemble.voting]
        return [list(some) for some in product(*filter(None, starts))]

    def worths(self, text: HeldOut, ensemble: RetrievalEnsemble) -> dict[str, Worth]:
        """Measure on a text the likeliest settings of each memory without trust, of each kind of weight."""
        measured, text = {}, text.having(names_of(ensemble))
        for memory in (one for one in ensemble.voting if one.tuned):
            grid, (_, others) = self.of[memory.name], self._alongside(memory, text, ensemble)
            kinds: dict[str, Memory] = {}
            for settings in sorted(grid, key=lambda one: -grid[one]):
                one = memory.changed(**vars(settings))
                kinds.setdefault(one.kind(), one)
            for kind, one in sorted(kinds.items()):
                votes = limited(ensemble, {**others, memory.name: text.said(one)})
                weights = {name: weight for name, (_, weight) in votes.items()}
                system = log_likelihood(ensemble.mixture, text.log_probs, votes.values())
                measured[kind] = Worth.measure(text.log_probs, system, weights)
        return measured


def with_settings(ensemble: RetrievalEnsemble, *settings: Any) -> RetrievalEnsemble:
    """Return an ensemble without trust, with these settings of memories that have settings of their types."""
    kinds = {type(one): one for one in settings}
    chosen = [memory for memory in ensemble.voting if memory.tuned and type(memory.settings) in kinds]
    return ensemble.replacing(*(memory.changed(**vars(kinds[type(memory.settings)])) for memory in chosen))


def candidates(grid: Grid, count: int) -> Sequence[Any]:
    """Pick the likeliest points of a grid that have a k, a T or a lambda that none before of their kind has.

    Likelihood and BLEU disagree on all three, and likelihood wants ever more neighbours.
    """
    chosen: list[Any] = []
    seen: set[tuple[object, ...]] = set()
    for settings in sorted(grid, key=lambda s: -grid[s]):
        kind = getattr(settings, "confidence", False)
        values = {(kind, name, getattr(settings, name, None)) for name in TELLING}
        if not values <= seen:
            seen |= values
            chosen.append(settings)
    return chosen[:count]
