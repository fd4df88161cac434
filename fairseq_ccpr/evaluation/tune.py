"""Tuning a datastore's settings: grids by likelihood, trust where it helps, the choice by decoding a sample."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory, name_of
from fairseq_ccpr.decoding.trust import (
    LearnedTrust,
    Trust,
    TrustDescription,
    needs_of,
    save_trust,
    trained_with,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.grids import (
    NEIGHBOURS,
    TOKENS,
    Alongside,
    Grids,
    HeldOut,
    TextWorth,
    Worth,
    force_decode_text,
    with_settings,
)
from fairseq_ccpr.evaluation.test_set import BASE, TranslationScores, batches, decode
from fairseq_ccpr.evaluation.text_tuning import scaled_text, with_tuned_text
from fairseq_ccpr.evaluation.trust_training import OtherText, TrainingText, train_trust, train_votes, worths
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import as_options, automatic_values

CPU = torch.device("cpu")  # where held-out text is weighed
FEW, MANY = 8, 32  # neighbours that trust is trained with: the more, the better and the slower
SAMPLED = 3  # one batch in so many is decoded
BATCHES = 12  # at least, so that those are of all lengths
# Fields that the grids have: written into FILE even where they are at their default.
TUNED_TOKEN_FIELDS = ("k", "lambda_", "temperature", "likeness")
TUNED_PHRASE_FIELDS = ("lambda_", "consent")
SEED = 1  # of what is trained
LESS, NONE, MORE = 0.5, 0.0, 1.5  # times alpha, that are tried
LEAST_TOKENS = 5000  # of the held-out text, for a hidden layer
QUALITY, SPEED = "quality", "speed"
CONSENT = 3.0  # nats, the bound on votes of phrases that is tried
# BLEU given up for speed, where that is preferred, and for that bound: without it translations say what the
# source does not.
LEVEL = 0.3


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

    @property
    def name(self) -> str:
        """Its options, and what was trained."""
        return f"{options_of(self.ensemble)} {self.trained}".strip()


@dataclass
class Tuned:
    """The outcome of tuning."""

    best: Candidate
    helps: bool  # whether it is better than the model alone; if not, the interpolation weights are 0
    left_out: PhraseSettings | None  # of phrases, with weight 0, where the tokens alone are best
    # by name of the system, including the base; on a sample of the subset
    scores: dict[str, TranslationScores]
    token_grid: dict[TokenRetrievalSettings, float]  # empty without a token memory
    # alongside the best of the token grid; empty without a phrase memory
    phrase_grid: dict[PhraseSettings, float]
    speeds: dict[str, float]  # of each system in that decoding, 1 being the base's
    seconds: float  # of everything
    base_seconds: float  # of decoding the whole subset without retrieval
    decoded: float  # how often the subset was decoded, all systems together
    sentences: int  # that were decoded
    linear: bool  # whether there were too few tokens for a hidden layer
    texts: dict[str, TextWorth]  # what settings and the best are worth, by text

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The best settings, as `datastore.tuned` keeps them."""
        ensemble = self.best.ensemble
        kinds = TokenMemory | PhraseMemory | TextMemory
        kept = [memory.settings for memory in ensemble.memories if isinstance(memory, kinds)]
        kept += [self.left_out] if self.left_out is not None else []
        return {one.PREFIX: automatic_values(one) for one in (*kept, ensemble.mixture.settings)}

    @property
    def options(self) -> str:
        """Options of fairseq-generate for them, but for trust."""
        left_out = [as_options(self.left_out, TUNED_PHRASE_FIELDS)] if self.left_out is not None else []
        return " ".join([options_of(self.best.ensemble), *left_out])

    def description(self, parts: Any) -> TrustDescription:
        """Describe the trust of the best, for the parts of the datastore."""
        trust = self.best.ensemble.trust
        assert trust is not None
        weighed = {"token": TokenMemory.name, "phrase": PhraseMemory.name, "text": TextMemory.name}
        known = [*trust.memories, TextMemory.name]
        parts = {name: part for name, part in parts.items() if weighed[name] in known}
        keys = {name: part.keys_fingerprint for name, part in parts.items()}
        texts = {
            text: {name: one._asdict() for name, one in each.items()}
            for text, each in self.best.texts.items()
        }
        tokens = self.best.ensemble.find(TokenMemory)
        weight = name_of(tokens.policy) if tokens is not None else ""
        arguments = trust.arguments()
        classes = trained_with(self.best.ensemble.identity, self.best.ensemble.memories)
        return TrustDescription(
            trust.KIND, arguments, needs_of(parts), keys, self.settings, texts, weight=weight, classes=classes
        )

    def save_trust(self, parts: Any, path: Path) -> None:
        """Write the trust of the best, and what was trained of its memories, for the parts of the datastore."""
        ensemble = self.best.ensemble
        assert ensemble.trust is not None  # or there is nothing to write
        trained = {memory.name: memory.trained() for memory in ensemble.memories}
        save_trust(ensemble.trust, trained, self.description(parts), path)


def tune(system: System, also: list[OtherText], trusting: bool, count: int, prefer: str = QUALITY) -> Tuned:
    """Choose by likelihood what to decode with, and by the score of translations what of that to keep.

    0. The text memory is tuned alone: it acts on the model before others vote.
    1. A teacher-forced pass over each text keeps what the model and each memory say of each reference token.
    2. The token memory's grid is scored, then the phrase memory's together with the likeliest token settings.
    3. The phrases' votes are trained, and trust, on top of the likeliest settings for few neighbours, and for
       many; of tokens with phrases and of tokens alone for one number of neighbours.
    4. A sample of the subset is decoded with each candidate, with other weights of phrases and text, and by
       the model alone. Keep the best by `TranslationScores.deciding`, or for speed the fastest within `LEVEL`
       of it; if none beats the model alone, see `silenced`.

    Args:
        also: text of other domains, which must not suffer.
        trusting: whether trust is trained, of the kind that the task has; otherwise settings alone are
            chosen.
        count: settings that are decoded with, where trust is not trained.
        prefer: quality or speed.
    """
    cfg, task, ensemble = system.cfg, system.task, system.ensemble
    if ensemble is None:
        raise ConfigurationError("there is nothing to tune without a datastore: give --datastore DIR")
    task.load_dataset(cfg.dataset.gen_subset)
    samples = list(batches(cfg, task, system.models, at_least=BATCHES))
    start = time.perf_counter()
    name, quiet = cfg.dataset.gen_subset, cfg.common.no_progress_bar
    batched = {name: samples, **{one.name: one.samples(system) for one in also}}
    ensemble, text_worth = with_tuned_text(ensemble, batched, trusting, quiet)  # before others vote, so first
    # One search for phrases serves all settings.
    remembering = [memory.remembering() for memory in ensemble.voting if isinstance(memory, PhraseMemory)]
    ensemble = ensemble.replacing(*remembering)
    found = ensemble.find(TokenMemory)
    widest = with_settings(
        ensemble, replace(found.settings, k=max(NEIGHBOURS)) if found is not None else None
    )
    texts = [force_decode_text(name, samples, widest, quiet=quiet)]
    for other in list(batched)[1:]:  # many cost as much as one
        texts.append(force_decode_text(other, batched[other], widest, TOKENS // len(also), quiet))
    grids = Grids.score(cfg, ensemble.on(CPU), texts[0])
    if not ensemble.voting:
        # It keeps what was trained of the text.
        trust = LearnedTrust({}, hidden=0).requires_grad_(False) if trusting else None
        tried = [Candidate(ensemble.with_memories(ensemble.memories, trust))]
    elif not trusting:
        tried = [Candidate(with_settings(ensemble, *chosen)) for chosen in grids.best_settings(count)]
    else:
        choices = grids.settings_for_trust(trusted_neighbours(task.parts))
        tried = [
            with_trust(task.trust_class, with_settings(ensemble, *chosen), texts, ensemble)
            for chosen in choices
        ]
        names = {memory.name for memory in ensemble.voting}
        if TokenMemory.name not in names:  # phrases alone are often best as their votes have them
            tried.append(with_votes(tried[0].ensemble, texts))
        elif PhraseMemory.name in names:  # which may be likelier together with tokens, and translate worse
            chosen = with_settings(ensemble, *choices[0]).memories
            others = [memory for memory in chosen if memory.name != PhraseMemory.name]
            tried.append(with_trust(task.trust_class, ensemble.with_memories(others, None), texts, ensemble))
    sample = samples[::SAMPLED]
    scores, took = _decode(system, tried, sample)
    winner = choose(tried, scores, took, prefer)
    # After references a phrase or the text is right more often than after the hypotheses of beam search.
    if having := [one for one in tried if one.ensemble.find(PhraseMemory) is not None]:
        likeliest = choose(having, scores, took, prefer)
        phrases = likeliest.ensemble.find(PhraseMemory)
        assert phrases is not None  # it is one of those
        less = replace(phrases, settings=replace(phrases.settings, lambda_=LESS * phrases.settings.lambda_))
        weighed = likeliest.ensemble.replacing(less, trust=likeliest.ensemble.trust)
        likeliest = _or_with(system, likeliest, weighed, sample, scores, took, prefer)
        winner = choose([winner, likeliest], scores, took, prefer)
    phrases = winner.ensemble.find(PhraseMemory)
    if phrases is not None and system.cfg.task.phrase_consent is None:
        bounded = replace(phrases, settings=replace(phrases.settings, consent=CONSENT))
        other = replace(winner, ensemble=winner.ensemble.replacing(bounded, trust=winner.ensemble.trust))
        _decode_as(winner, other, system, sample, scores, took)
        if scores[other.name].deciding > max(scores[BASE].deciding, scores[winner.name].deciding - LEVEL):
            winner = other
    # likelihood wants more of it than translations do, or less
    if ensemble.find(TextMemory) is not None:
        likeliest, tried_with = (
            winner,
            [scaled_text(winner.ensemble, factor) for factor in (LESS, MORE, NONE)],
        )
        winner = _or_with(system, likeliest, tried_with[0], sample, scores, took, prefer)
        halved = winner is not likeliest
        if not halved:
            winner = _or_with(system, likeliest, tried_with[1], sample, scores, took, prefer)
        if ensemble.voting and (halved or prefer == SPEED):
            winner = _or_with(system, winner, tried_with[2], sample, scores, took, prefer)
    helps = scores[winner.name].deciding > scores[BASE].deciding
    left_out = None
    if task.phrase_datastore is not None and winner.ensemble.find(PhraseMemory) is None:
        left_out = replace(task.settings[PhraseSettings], lambda_=0.0)
    tokens, sampled = (sum(int(one["ntokens"]) for one in some) for some in (samples, sample))
    measured = {}
    for text in texts:
        systems = grids.worths(text, ensemble.on(CPU)) | winner.texts.get(text.name, {})
        shared = text.having([memory.name for memory in ensemble.voting])
        measured[text.name] = TextWorth(float(shared.log_probs.mean()), systems)
        if (alone := text_worth.get(text.name)) is not None:  # the others are measured on top of it
            added = {f"+ {name}": worth for name, worth in systems.items()}
            measured[text.name] = TextWorth(alone.model, alone.systems | added)
    return Tuned(
        winner if helps else Candidate(silenced(winner.ensemble)),
        helps,
        left_out,
        scores,
        grids.tokens,
        grids.phrases,
        {name: took[BASE] / seconds for name, seconds in took.items()},
        time.perf_counter() - start,
        took[BASE] * tokens / sampled,
        len(scores) * sampled / tokens,
        sentences=sum(len(one["id"]) for one in sample),
        linear=trusting and is_small(texts[0]),
        texts=measured,
    )


def trusted_neighbours(parts: Parts) -> tuple[int, ...]:
    """Name the k that trust is trained with: few and many; alongside phrases what tuning left for the tokens alone, or many.

    Phrases cost more than neighbours, to learn as well as to decode with, and few neighbours can be worse by
    far.
    """
    if not {"token", "phrase"} <= parts.keys():
        return FEW, MANY
    return (read_tuned({"token": parts["token"]}).get(TokenRetrievalSettings.PREFIX, {}).get("k", MANY),)


def choose(
    tried: list[Candidate], scores: dict[str, TranslationScores], seconds: dict[str, float], prefer: str
) -> Candidate:
    """Choose the best; for speed, the fastest of those better than the base and at most `LEVEL` below the best."""
    best = max(tried, key=lambda one: scores[one.name].deciding)
    if prefer == QUALITY:
        return best
    least, base = scores[best.name].deciding - LEVEL, scores[BASE].deciding
    near = [one for one in tried if least <= scores[one.name].deciding > base or one is best]
    return min(near, key=lambda one: (seconds[one.name], -scores[one.name].deciding))


def _or_with(
    system: System,
    candidate: Candidate,
    weighed: RetrievalEnsemble,
    sample: list[Any],
    scores: dict[str, TranslationScores],
    took: dict[str, float],
    prefer: str,
) -> Candidate:
    """Decode with other weights of the same memories as well, adding their scores; returns the better candidate."""
    other = replace(candidate, ensemble=weighed)
    _decode_as(candidate, other, system, sample, scores, took)
    return choose([candidate, other], scores, took, prefer)


def _decode_as(
    candidate: Candidate,
    other: Candidate,
    system: System,
    sample: list[Any],
    scores: dict[str, TranslationScores],
    took: dict[str, float],
) -> None:
    text, faster = other.ensemble.find(TextMemory), False
    if text is not None:
        # nothing is looked up, which the base takes turns with to be compared
        faster = not text.settings.alpha
    found, seconds = _decode(system, [other], sample, base=faster)
    scores[other.name] = found[other.name]
    took[other.name] = seconds[other.name] * took[BASE] / seconds[BASE] if faster else took[candidate.name]


def _decode(
    system: System, tried: list[Candidate], samples: list[Any], base: bool = True
) -> tuple[dict[str, TranslationScores], dict[str, float]]:
    """Decode with each candidate in turns; returns scores and seconds by name, and those of the base if it takes part."""
    generators = {BASE: system.generator(retrieve=False)} if base else {}
    for candidate in tried:
        generators[candidate.name] = system.generator(retrieve=False)
        system.task.equip(generators[candidate.name], candidate.ensemble)
    decodings = decode(system.cfg, system.task, system.models, generators, samples)
    return {name: decodings.scores(name) for name in generators}, {
        n: one.seconds for n, one in decodings.systems.items()
    }


def with_trust(
    kind: type[Trust], ensemble: RetrievalEnsemble, texts: list[HeldOut], whole: RetrievalEnsemble
) -> Candidate:
    """Train the votes of phrases, then trust, on top of an ensemble's settings.

    Args:
        texts: the first is of the datastore's domain.
        whole: with all memories; what was trained is measured where all of them were asked.
    """
    if issubclass(kind, LearnedTrust):
        ensemble = _with_trained_votes(ensemble, texts)
    held = ensemble.on(CPU)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        trust = kind.untrained(ensemble.voting, is_small(texts[0]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        train_trust(
            trust, [TrainingText.weigh(trust, text, place > 0, held) for place, text in enumerate(texts)]
        )
    return _measured(trust, ensemble, texts, whole, f"trust:{kind.KIND}")


def with_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> Candidate:
    """Leave the weights to an ensemble's trained votes: trust is a network of zeros."""
    trust = LearnedTrust({memory.name: memory.features for memory in ensemble.voting}, hidden=0)
    return _measured(trust, ensemble, texts, ensemble, "votes")


def _measured(
    trust: Trust, ensemble: RetrievalEnsemble, texts: list[HeldOut], whole: RetrievalEnsemble, trained: str
) -> Candidate:
    held, names = ensemble.on(CPU), [memory.name for memory in whole.voting]
    worth = {
        one.name: worths(trust, TrainingText.weigh(trust, one.having(names), False, held)) for one in texts
    }
    trust = trust.requires_grad_(False).to(next(ensemble.models[0].parameters()).device)
    return Candidate(ensemble.with_memories(ensemble.memories, trust), worth, trained)


def _with_trained_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> RetrievalEnsemble:
    held, names = ensemble.on(CPU), [memory.name for memory in ensemble.voting]
    for memory in ensemble.voting:
        if isinstance(memory, PhraseMemory):
            alone = held.find(PhraseMemory)
            assert alone is not None  # the same on another device
            seen = [[Alongside.of(one, held, alone) for one in text.having(names).texts] for text in texts]
            ensemble = ensemble.replacing(replace(memory, votes=train_votes(alone, seen).to(memory.device)))
    return ensemble


def is_small(text: HeldOut) -> bool:
    """Check whether a text has too few tokens for a hidden layer."""
    return len(text.targets) < LEAST_TOKENS


def silenced(ensemble: RetrievalEnsemble) -> RetrievalEnsemble:
    """Return the ensemble with weights of 0: it translates as the model alone, to the bit, but for what no weight turns off.

    That is corrections, and memories of your own that act on the model or the mixture, or whose votes are not
    `bounded`.
    """
    ours = [memory for memory in ensemble.voting if isinstance(memory, TokenMemory | PhraseMemory)]
    silent = with_settings(ensemble, *(replace(memory.settings, lambda_=0.0) for memory in ours))
    silent = scaled_text(silent, 0.0) if silent.find(TextMemory) is not None else silent
    if len(ours) < len(ensemble.voting):  # memories of one's own, whose weights Lambda_max bounds
        settings = replace(silent.mixture.settings, lambda_max=0.0)
        silent.mixture = replace(silent.mixture, settings=settings)
    return silent


def options_of(ensemble: RetrievalEnsemble) -> str:
    """Write the options of fairseq-generate that give an ensemble's settings."""
    options = []
    for memory in ensemble.voting:
        if isinstance(memory, TokenMemory):
            automatic = automatic_token_settings(memory.retriever.datastore, memory.settings.confidence)
            kind = ("confidence",) if automatic["confidence"] else ()  # the grid has both kinds
            options.append(as_options(memory.settings, (*TUNED_TOKEN_FIELDS, *kind), automatic))
        elif isinstance(memory, PhraseMemory):
            options.append(as_options(memory.settings, TUNED_PHRASE_FIELDS))
    if (text := ensemble.find(TextMemory)) is not None:
        options.append(as_options(text.settings, ("alpha", "beta")))
    return " ".join([*options, as_options(ensemble.mixture.settings)]).strip()
