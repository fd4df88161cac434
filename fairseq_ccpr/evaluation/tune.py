"""Tuning a datastore: grids by likelihood, trust where it helps, the choice by decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.datastore.tuned import Parts
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.memory import Memory, Variant
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust import LearnedTrust, Trust, TrustDescription, save_trust
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.confidence import calibrate
from fairseq_ccpr.evaluation.copying import copied, subwords_of_text
from fairseq_ccpr.evaluation.grids import (
    HELD_OUT_TOKENS,
    Grids,
    HeldOut,
    TextWorth,
    Worth,
    force_decode_text,
    loss_of,
    names_of,
    with_settings,
)
from fairseq_ccpr.evaluation.rescoring import CPU, tune_rescoring
from fairseq_ccpr.evaluation.test_set import (
    BASE,
    Decodings,
    OtherText,
    TranslationScores,
    batches,
    decode,
    load_subset,
)
from fairseq_ccpr.evaluation.training import WeighedText, train_trust, train_votes, worths
from fairseq_ccpr.inference.confidence import Confidence, conditions
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import as_options, automatic_values

SAMPLED = 3  # one batch in so many is decoded with all that is tried
BATCHES = 12  # at least, so that those are of all lengths
LEAST_TOKENS = 5000  # of the held-out text, for a hidden layer
QUALITY, FAITHFUL, SPEED = PREFERENCES = "quality", "faithful", "speed"
REFERENCES = "references"
LEAST_GAIN = 0.5  # of the best's gain over the model alone: what copies less must have it
MORE_NEIGHBOURS = 0.2  # points that more neighbours must gain, which are slower
LEVEL = 0.3  # points given up for speed, where that is preferred
HARMLESS = 0.01  # nats per token of other text that may be lost beyond what another finalist loses
LOSS_TOKENS = 6000  # of all other texts together, on which finalists are measured; they train nothing
APART = 4  # these are at most one batch in so many


def table(texts: dict[str, TextWorth]) -> list[str]:
    """Write the lines of a table: a row for each system on each text."""
    measured = [worth for text in texts.values() for worth in text.systems.values()]
    names = list(dict.fromkeys(name for worth in measured for name in worth.weights))
    rows = [("nats per token, weights", "", "gain", "harm", *names)]
    for text, (model, systems) in texts.items():
        rows.append((text[-23:], "model alone", f"{model:.3f}", "", *("" for _ in names)))
        for name, worth in systems.items():
            weights = (f"{worth.weights[one]:.2f}" if one in worth.weights else "" for one in names)
            rows.append(("", name, f"{worth.gain:+.3f}", f"{worth.harm:.3f}", *weights))
    widths = ("<24", "<18", ">8", ">8", *(f">{max(9, len(name) + 2)}" for name in names))
    return ["".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


@dataclass
class Candidate:
    """Settings, with trust or without."""

    ensemble: RetrievalEnsemble
    # with what was trained and without, by text
    texts: dict[str, dict[str, Worth]] = field(default_factory=dict)
    trained: str = ""  # what of it was trained
    # trains it again on the datastore's own domain alone, where it was trained on others too
    alone: Callable[[], Candidate] | None = None

    @property
    def name(self) -> str:
        """Its options, and what was trained."""
        return f"{options_of(self.ensemble)} {self.trained}".strip()

    def has(self, memory: Memory) -> bool:
        return memory.name in [one.name for one in self.ensemble.memories]

    def changed(self, memory: Memory) -> Candidate:
        """Return it with a memory in place of the one of its name."""
        return replace(self, ensemble=self.ensemble.replacing(memory, trust=self.ensemble.trust))

    def trained_alone(self) -> Candidate | None:
        """Return it with votes and trust that saw no other text; None where they did not anyway."""
        if self.alone is None:
            return None
        other = self.alone()
        settings = {one.name: one.settings for one in self.ensemble.memories if one.tuned}
        for memory in other.ensemble.memories:
            if memory.name in settings:
                other = other.changed(memory.changed(**vars(settings[memory.name])))
        return replace(other, trained=f"{self.trained} without --also")


@dataclass
class Trial:
    """Held-out sentences, and how systems translate them."""

    system: System
    sample: list[Any]
    prefer: str  # one of PREFERENCES
    # by name of the system, including the base
    scores: dict[str, TranslationScores] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    decoded: Decodings = field(default_factory=lambda: Decodings({}))
    tried: list[Candidate] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)  # on other text, nats per token; {}: unknown
    apart: list[list[Any]] = field(default_factory=list)  # batches of each other text, which train nothing
    timed: list[Any] = field(default_factory=list)  # batches that took the seconds
    text: np.ndarray | None = None  # subwords of the datastore's text, [T]

    def decode(self, tried: list[Candidate]) -> None:
        """Decode with each candidate and the model alone, in turns."""
        self.tried = list(tried)
        self.scores, self.seconds, self.decoded = self._decode(tried, self.sample)

    def decode_another(self, candidate: Candidate, other: Candidate, timed: bool) -> None:
        """Decode with other settings of a candidate's memories; they take as long unless they are `timed`."""
        self.tried.append(other)
        scores, seconds, decoded = self._decode([other], self.sample, timed)
        self.scores[other.name], took = scores[other.name], self.seconds[candidate.name]
        self.decoded.systems[other.name] = decoded.systems[other.name]
        if timed:
            took = seconds[other.name] * self.seconds[BASE] / seconds[BASE]
        self.seconds[other.name] = took

    def decode_rest(self, finalists: list[Candidate], rest: list[Any], losses: dict[str, float]) -> Trial:
        """Decode with finalists what is not of the sample: a trial of all, timed by that.

        Where the sample is all, it is decoded again.
        """
        for one in finalists:
            if one.name not in self.scores:
                self.decode_another(finalists[0], one, timed=False)
        sample, timed = [*self.sample, *rest], rest or self.sample
        other = replace(self, sample=sample, tried=finalists, losses=losses, timed=timed)
        other.scores, other.seconds, other.decoded = self._decode(finalists, timed, True, self.decoded)
        return other

    def _decode(
        self, tried: list[Candidate], samples: list[Any], base: bool = True, before: Decodings | None = None
    ) -> tuple[dict[str, TranslationScores], dict[str, float], Decodings]:
        """Decode with each candidate in turns, and with the base; returns scores and seconds, and outputs.

        Args:
            before: other sentences as these systems translated them, to be scored with the samples.
        """
        system = self.system
        generators = {BASE: system.generator(retrieve=False)} if base else {}
        for candidate in tried:
            generators[candidate.name] = system.generator(retrieve=False)
            system.task.equip(generators[candidate.name], candidate.ensemble)
        decodings = decode(system.cfg, system.task, system.models, generators, samples)
        if before is not None:
            decodings = decodings.after(before)
        scores = {name: decodings.scores(name) for name in generators}
        return scores, {name: one.seconds for name, one in decodings.systems.items()}, decodings

    @property
    def copied(self) -> dict[str, float]:
        """The share of its subwords that each system, and references, copied from the text; {} without one.

        Of systems that were decoded with since it was asked for last, one pass over the text tells.
        """
        known, outputs = self.decoded.copied, {REFERENCES: self.decoded.reference_ids}
        outputs |= {name: one.ids for name, one in self.decoded.systems.items()}
        new = {name: [*ids.values()] for name, ids in outputs.items() if name not in known}
        if self.text is not None and new:
            known |= copied(new, self.text)
        return known

    def speed(self, name: str) -> float:
        """Return how many tokens of references a system translated in a second, so that all had as many."""
        return sum(int(one["ntokens"]) for one in self.timed) / self.seconds[name]

    def deciding(self, candidate: Candidate) -> float:
        """Return the score of a candidate, see `TranslationScores.deciding`."""
        return self.scores[candidate.name].deciding

    def choose(self, tried: list[Candidate]) -> Candidate:
        """Choose the best; for speed, the fastest at most `LEVEL` below it and better than the base.

        Of the best's memories with trust, fewer neighbours are better that lose less than `MORE_NEIGHBOURS`.
        FAITHFUL is what copies least from the text, beyond what references share with it, of those that have
        `LEAST_GAIN`. None loses much more on other text than another, see `harmless`.
        """
        tried = self.harmless(tried)
        best, base = max(tried, key=self.deciding), self.scores[BASE].deciding
        if self.prefer == FAITHFUL and self.copied:
            least = base + LEAST_GAIN * (self.deciding(best) - base)
            near = [one for one in tried if one is best or self.deciding(one) >= least > base]
            return min(near, key=lambda one: (self.excess(one.name), -self.deciding(one)))
        if self.prefer != SPEED:
            least = max(base, self.deciding(best) - MORE_NEIGHBOURS)
            near = [one for one in tried if one is best or (self.deciding(one) > least and alike(one, best))]
            return min(near, key=lambda one: (neighbours(one), -self.deciding(one)))
        least = self.deciding(best) - LEVEL
        near = [one for one in tried if least <= self.deciding(one) > base or one is best]
        return min(near, key=lambda one: (self.seconds[one.name], -self.deciding(one)))

    def excess(self, name: str) -> float:
        """Return the share of subwords that a system copied, less that of the references; at least 0."""
        return max(0.0, self.copied[name] - self.copied[REFERENCES])

    def harmless(self, tried: list[Candidate]) -> list[Candidate]:
        """Return those that lose at most `HARMLESS` more on other text than another that beats the model.

        Where none beats it, all are returned.
        """
        better = [one for one in tried if self.deciding(one) > self.scores[BASE].deciding]
        if not self.losses or not better:
            return tried
        least = min(max(0.0, self.losses[one.name]) for one in better)
        return [one for one in tried if self.losses[one.name] <= least + HARMLESS]

    def finalists(self, winner: Candidate) -> list[Candidate]:
        """Return those that all is decoded with, the winner on the sample first.

        The others are what another preference takes of those that were tried there, and the winner with each
        variant that is `final` and with votes and trust that were trained without other text.
        """
        found = [winner, *(replace(self, prefer=one).choose(self.tried) for one in PREFERENCES)]
        for memory in winner.ensemble.memories:
            finals = [one for one in memory.variants(self.system.cfg.task) if one.final]
            found += [winner.changed(one.change(memory)) for one in finals]
        if (alone := winner.trained_alone()) is not None:
            found.append(alone)
        return [*{one.name: one for one in found}.values()]

    def vary(self, tried: list[Candidate], memories: tuple[Memory, ...]) -> Candidate:
        """Choose a candidate, and decode with the variants of each memory; return the winner of all."""
        winner = self.choose(tried)
        for memory in memories:
            kept = False
            for variant in memory.variants(self.system.cfg.task):
                if not self._is_worth_trying(variant, memory, winner, kept):
                    continue
                start = winner
                if not winner.has(memory):
                    start = self.choose([one for one in tried if one.has(memory)])
                chosen = self._try(variant, memory, start)
                kept = kept or (chosen is not start and not variant.otherwise)
                winner = chosen if start is winner else self.choose([winner, chosen])
        return winner

    def _is_worth_trying(self, variant: Variant, memory: Memory, winner: Candidate, kept: bool) -> bool:
        if variant.leaves_out:
            return bool(winner.ensemble.voting) and (kept or self.prefer == SPEED)
        return not (variant.final or (variant.otherwise and kept))

    def _try(self, variant: Variant, memory: Memory, candidate: Candidate) -> Candidate:
        """Decode with a variant of a candidate; return the one that is kept."""
        other = candidate.changed(variant.change(candidate.ensemble.find(type(memory))))
        self.decode_another(candidate, other, timed=variant.leaves_out)
        return self.choose([candidate, other])


@dataclass
class Tuned:
    """The outcome of tuning."""

    best: Candidate
    helps: bool  # whether it is better than the model alone; if not, the interpolation weights are 0
    # of memories without which others are best: settings with a weight of 0, and fields that are written
    left_out: list[tuple[Any, tuple[str, ...]]]
    screened: Trial  # of a sample, with all that was tried
    trial: Trial  # of all, with the finalists
    scored: int  # settings, by likelihood
    seconds: float  # of everything
    base_seconds: float  # of decoding the whole subset without retrieval
    linear: bool  # whether there were too few tokens for a hidden layer
    texts: dict[str, TextWorth]  # what settings and the best are worth, by text
    confidence: (
        Confidence | str
    )  # in what the best translates; why there is none, where the sample says too little

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The best settings, as `datastore.tuned` keeps them."""
        ensemble = self.best.ensemble
        kept = [memory.settings for memory in ensemble.memories if memory.tuned]
        left_out = [settings for settings, _ in self.left_out]
        return {one.PREFIX: automatic_values(one) for one in (*kept, *left_out, ensemble.mixture.settings)}

    @property
    def options(self) -> str:
        """Options of fairseq-generate for them, but for trust."""
        return " ".join([options_of(self.best.ensemble), *(as_options(*one) for one in self.left_out)])

    def save_trust(self, parts: Parts, path: Path) -> None:
        """Write the trust of the best, and what was trained of its memories."""
        ensemble = self.best.ensemble
        assert ensemble.trust is not None  # or there is nothing to write
        texts = {
            text: {name: one._asdict() for name, one in each.items()}
            for text, each in self.best.texts.items()
        }
        described = TrustDescription.of(
            ensemble.trust, ensemble.identity, ensemble.memories, parts, settings=self.settings, texts=texts
        )
        save_trust(
            ensemble.trust, {memory.name: memory.trained() for memory in ensemble.memories}, described, path
        )


@dataclass
class Tuning:
    """The steps of tuning, each of which takes and returns candidates, and what they leave for later ones."""

    trial: Trial  # of a sample
    # batches of held-out sentences by name, the first of the datastore's own domain
    texts: dict[str, list[Any]]
    trusting: bool
    count: int
    whole: RetrievalEnsemble  # all memories
    rescored: dict[str, TextWorth] = field(default_factory=dict)
    held_out: list[HeldOut] = field(default_factory=list)
    grids: Grids = field(default_factory=lambda: Grids({}))
    final: Trial = field(init=False)  # of all

    @property
    def quiet(self) -> bool:
        return bool(self.trial.system.cfg.common.no_progress_bar)

    def rescore(self, candidates: list[Candidate]) -> list[Candidate]:
        """Tune memories that act on the model alone, before others vote."""
        ensemble, self.rescored = tune_rescoring(
            candidates[0].ensemble, self.texts, self.trusting, self.quiet
        )
        self.whole = ensemble.replacing(*(memory.remembering() for memory in ensemble.memories))
        return [Candidate(self.whole)]

    def ask(self, candidates: list[Candidate]) -> list[Candidate]:
        """Keep what the model and memories say of the references, in one teacher-forced pass over each text."""
        widest = self.whole.replacing(*(memory.widest() for memory in self.whole.memories))
        share = HELD_OUT_TOKENS // max(1, len(self.texts) - 1)  # many others cost as much as one
        for place, (name, samples) in enumerate(self.texts.items()):
            most = share if place else HELD_OUT_TOKENS
            self.held_out.append(force_decode_text(name, samples, widest, most, self.quiet, place > 0))
        return candidates

    def score(self, candidates: list[Candidate]) -> list[Candidate]:
        """Choose settings by likelihood: those to decode with, or to train trust on top of."""
        system = self.trial.system
        self.grids = Grids.score(system.cfg.task, self.whole.on(CPU), self.held_out[0])
        if not self.whole.voting:
            return candidates
        if self.trusting:
            chosen = self.grids.settings_for_trust(self.whole, system.task.parts)
        else:
            chosen = self.grids.best_settings(self.count)
        return [Candidate(with_settings(self.whole, *settings)) for settings in chosen]

    def train(self, candidates: list[Candidate]) -> list[Candidate]:
        """Train votes and trust: for each candidate, and for the first without memories that are not quick."""
        first = candidates[0].ensemble
        if not self.trusting:
            return candidates
        if not first.voting:  # it keeps what was trained of the others
            trust = LearnedTrust({}, hidden=0).requires_grad_(False)
            return [Candidate(first.with_memories(first.memories, trust))]
        kind, names = self.trial.system.task.trust_class, names_of(first)
        tried = [with_trust(kind, one.ensemble, self.held_out, names) for one in candidates]
        others = [one for one in first.memories if one.quick or one.acts_on != "vote" or not one.tuned]
        if not any(memory.quick for memory in first.voting):
            # Phrases alone are often best as their votes have them.
            tried.append(with_votes(tried[0], self.held_out))
        elif len(others) < len(first.memories):  # which may be likelier together, and translate worse
            tried.append(with_trust(kind, first.with_memories(others, None), self.held_out, names))
        return tried

    def decode(self, candidates: list[Candidate]) -> list[Candidate]:
        """Decode a sample with each candidate, and by the model alone."""
        self.trial.decode(candidates)
        return candidates

    def vary(self, candidates: list[Candidate]) -> list[Candidate]:
        """Decode the sample with variants; return the finalists, what is best there first."""
        return self.trial.finalists(self.trial.vary(candidates, self.whole.memories))

    def decide(self, finalists: list[Candidate]) -> list[Candidate]:
        """Measure finalists on other text, decode all with them, and keep the winner."""
        some = [*filter(None, self.trial.apart)]
        losses = {one.name: max(loss_of(one.ensemble, each) for each in some) for one in finalists if some}
        rest = [one for place, one in enumerate(next(iter(self.texts.values()))) if place % SAMPLED]
        self.final = self.trial.decode_rest(finalists, rest, losses)
        return [self.final.choose(finalists)]

    def measured(self, winner: Candidate) -> dict[str, TextWorth]:
        """Measure the likeliest settings and the winner on each text, on top of what rescores."""
        measured, held = {}, self.whole.on(CPU)
        for text in self.held_out:
            systems = self.grids.worths(text, held) | winner.texts.get(text.name, {})
            model = float(text.having(names_of(held)).log_probs.mean())
            if (alone := self.rescored.get(text.name)) is not None:
                added = {f"+ {name}": worth for name, worth in systems.items()}
                model, systems = alone.model, alone.systems | added
            measured[text.name] = TextWorth(model, systems)
        return measured

    def outcome(self, winner: Candidate, start: float) -> Tuned:
        """Return what was tuned, silent if nothing beats the model alone; it began at this moment."""
        trial, samples = self.final, next(iter(self.texts.values()))
        helps = trial.deciding(winner) > trial.scores[BASE].deciding
        missing = [one.scaled(0.0) for one in self.whole.memories if one.tuned and not winner.has(one)]
        tokens = sum(int(one["ntokens"]) for one in samples)
        best = winner if helps else Candidate(silenced(winner.ensemble))
        holds_for = conditions(best.ensemble, trial.system.cfg.generation)
        return Tuned(
            best,
            helps,
            [*((one.settings, one.tuned) for one in missing), *trial.system.task.unused],
            self.trial,
            trial,
            sum(map(len, self.grids.of.values())),
            time.perf_counter() - start,
            tokens / trial.speed(BASE),
            linear=self.trusting and is_small(self.held_out[0]),
            texts=self.measured(winner),
            confidence=calibrate(trial.decoded, winner.name if helps else BASE, holds_for),
        )


def tune(system: System, also: list[OtherText], trusting: bool, count: int, prefer: str = QUALITY) -> Tuned:
    """Choose by likelihood what to decode with, and by the score of translations what of that to keep.

    See the steps of `Tuning`, `Trial.vary` and `Trial.finalists`, and `silenced` if nothing beats the model.

    Args:
        also: text of other domains, which must not suffer.
        trusting: whether trust is trained, of the kind that the task has; otherwise settings alone are
            chosen.
        count: settings that are decoded with, where trust is not trained.
        prefer: one of PREFERENCES.
    """
    start, subset = time.perf_counter(), system.cfg.dataset.gen_subset
    torch.manual_seed(system.cfg.common.seed)
    if system.ensemble is None:
        raise ConfigurationError("there is nothing to tune without a datastore: give --datastore DIR")
    text = subwords_of_text(system.task.parts, system.ensemble)
    if prefer == FAITHFUL and text is None:
        raise ConfigurationError(
            f"--prefer {FAITHFUL} is for what copies least from a text, and the datastore has neither a text nor "
            f"phrases of one in the model's subwords: build one, or leave out --prefer {FAITHFUL}"
        )
    load_subset(system.cfg, system.task)
    samples = list(batches(system.cfg, system.task, system.models, at_least=BATCHES))
    trial = Trial(system, samples[::SAMPLED], prefer, text=text)
    texts = {subset: samples}
    for one in also:
        others = one.samples(system, at_least=APART * BATCHES)
        texts[one.name], apart = held_apart(others, LOSS_TOKENS // len(also))
        trial.apart.append(apart)
    tuning = Tuning(trial, texts, trusting, count, system.ensemble)
    candidates = [Candidate(system.ensemble)]
    steps = tuning.rescore, tuning.ask, tuning.score, tuning.train, tuning.decode, tuning.vary, tuning.decide
    for step in steps:
        candidates = step(candidates)
    return tuning.outcome(candidates[0], start)


def held_apart(samples: list[Any], most: int) -> tuple[list[Any], list[Any]]:
    """Divide batches, which are ordered by length: those that train, and some of all lengths that do not.

    The latter are one in `APART` at most, and have about `most` tokens if that allows it.
    """
    step = max(APART, round(sum(int(one["ntokens"]) for one in samples) / most))
    apart = samples[step // 2 :: step]
    return [one for place, one in enumerate(samples) if place % step != step // 2], apart


def with_trust(
    kind: type[Trust],
    ensemble: RetrievalEnsemble,
    texts: list[HeldOut],
    names: list[str],
    among: int | None = None,
) -> Candidate:
    """Train the votes of memories, then trust, on top of an ensemble's settings.

    Args:
        texts: the first is of the datastore's domain; all are measured.
        names: of all memories; what was trained is measured where all of them were asked.
        among: how many of the texts to train on; None: all.
    """
    before, seen = ensemble, texts[:among]
    if issubclass(kind, LearnedTrust):
        held, device = ensemble.on(CPU), next(ensemble.models[0].parameters()).device
        ensemble = ensemble.replacing(*(train_votes(one, held, seen).on(device) for one in held.voting))
    held = ensemble.on(CPU)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        trust = kind.untrained(ensemble.voting, is_small(texts[0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        train_trust(trust, [WeighedText.of(text, trust, held) for text in seen])
    found = _candidate(trust, ensemble, texts, names, f"trust:{kind.KIND}")
    if len(seen) > 1:
        found.alone = partial(with_trust, kind, before, texts, names, 1)
    return found


def with_votes(trusting: Candidate, texts: list[HeldOut]) -> Candidate:
    """Leave the weights to the votes that were trained for a candidate: trust is a network of zeros."""
    ensemble, alone = trusting.ensemble, trusting.alone
    trust = LearnedTrust({memory.name: memory.features for memory in ensemble.voting}, hidden=0)
    found = _candidate(trust, ensemble, texts, names_of(ensemble), "votes")
    if alone is not None:
        found.alone = lambda: with_votes(alone(), texts)
    return found


def _candidate(
    trust: Trust, ensemble: RetrievalEnsemble, texts: list[HeldOut], names: list[str], trained: str
) -> Candidate:
    held = ensemble.on(CPU)
    worth = {one.name: worths(trust, WeighedText.of(one.having(names), trust, held)) for one in texts}
    trust = trust.requires_grad_(False).to(next(ensemble.models[0].parameters()).device)
    return Candidate(ensemble.with_memories(ensemble.memories, trust), worth, trained)


def is_small(text: HeldOut) -> bool:
    """Check whether a text has too few tokens for a hidden layer."""
    return len(text.targets) < LEAST_TOKENS


def alike(one: Candidate, other: Candidate) -> bool:
    """Check whether trust decides in both, and over the same memories."""
    trusting = one.ensemble.trust is not None and other.ensemble.trust is not None
    return trusting and names_of(one.ensemble) == names_of(other.ensemble)


def neighbours(candidate: Candidate) -> int:
    """Return k of its token memory; 0 without one."""
    tokens = candidate.ensemble.find(TokenMemory)
    return tokens.settings.k if tokens is not None else 0


def silenced(ensemble: RetrievalEnsemble) -> RetrievalEnsemble:
    """Return the ensemble with weights of 0: it translates as the model alone, to the bit.

    What no weight turns off stays: corrections, and memories of your own that act on the model or the mixture,
    or whose votes are not `bounded`.
    """
    silent = ensemble.replacing(*(memory.scaled(0.0) for memory in ensemble.memories))
    if not all(memory.tuned for memory in ensemble.voting):  # of one's own, whose weights Lambda_max bounds
        settings = replace(silent.mixture.settings, lambda_max=0.0)
        silent.mixture = replace(silent.mixture, settings=settings)
    return silent


def options_of(ensemble: RetrievalEnsemble) -> str:
    """Write the options of fairseq-generate that give an ensemble's settings."""
    options = [memory.written() for memory in ensemble.memories]
    return " ".join(filter(None, [*options, as_options(ensemble.mixture.settings)]))
