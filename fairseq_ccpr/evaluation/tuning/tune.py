"""Choosing how retrieval counts on a held-out subset: settings by likelihood, trust learned, the best few by BLEU."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from fairseq_ccpr.datastore.tuned import Parts, read_tuned
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.decoding.token_memory import name_of
from fairseq_ccpr.decoding.trust_file import TrustDescription, needs_of
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.comparison import BASE
from fairseq_ccpr.evaluation.translation.scores import TranslationScores
from fairseq_ccpr.evaluation.translation.test_set import batches, decode
from fairseq_ccpr.evaluation.tuning.candidates import (
    TUNED_OF_PHRASES,
    Candidate,
    is_small,
    options_of,
    silenced,
    with_settings,
    with_trust,
    with_votes,
)
from fairseq_ccpr.evaluation.tuning.grids import Grids
from fairseq_ccpr.evaluation.tuning.held_out import TOKENS, force_decode_text
from fairseq_ccpr.evaluation.tuning.other_text import OtherText
from fairseq_ccpr.evaluation.tuning.token_grid import NEIGHBOURS
from fairseq_ccpr.evaluation.tuning.worth import TextWorth
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import as_options, automatic_values

FEW, MANY = 8, 32  # neighbours that trust is learned with: the more, the better and the slower
SAMPLED = 3  # one batch in so many is decoded
BATCHES = 12  # at least, so that those are of all lengths


@dataclass
class Tuned:
    """The outcome of tuning."""

    best: Candidate
    helps: bool  # whether it is better than the model alone; if not, the interpolation weights are 0
    left_out: PhraseSettings | None  # of phrases, with weight 0, where the tokens alone are best
    scores: dict[str, TranslationScores]  # by name of the system, including the base; on a sample of the subset
    token_grid: dict[TokenRetrievalSettings, float]  # empty without a token memory
    phrase_grid: dict[PhraseSettings, float]  # alongside the best of the token grid; empty without a phrase memory
    seconds: float  # of everything
    base_seconds: float  # of decoding the whole subset without retrieval
    decoded: float  # how often the subset was decoded, all systems together
    sentences: int  # that were decoded
    linear: bool  # whether there were too few tokens for a hidden layer
    texts: dict[
        str, TextWorth
    ]  # what settings and the best are worth, by text; empty of text that nothing was asked of

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The best settings, as `datastore.tuned` keeps them."""
        ensemble = self.best.ensemble
        kept = [memory.settings for memory in (ensemble.tokens, ensemble.phrases) if memory is not None]
        kept += [self.left_out] if self.left_out is not None else []
        return {one.PREFIX: automatic_values(one) for one in (*kept, ensemble.settings)}

    @property
    def options(self) -> str:
        """Options of fairseq-generate for them, but for trust."""
        of_left_out = [as_options(self.left_out, TUNED_OF_PHRASES)] if self.left_out is not None else []
        return " ".join([options_of(self.best.ensemble), *of_left_out])

    def description(self, parts: Any) -> TrustDescription:
        """Describe the trust of the best, for the parts of the datastore."""
        trust = self.best.ensemble.trust
        assert trust is not None
        weighed = [name for name, whether in (("token", trust.tokens), ("phrase", trust.phrases)) if whether]
        parts = {name: parts[name] for name in weighed}
        keys = {name: part.keys_fingerprint for name, part in parts.items()}
        texts = {
            name: {system: worth._asdict() for system, worth in systems.items()}
            for name, systems in self.best.texts.items()
        }
        tokens = self.best.ensemble.tokens
        weight = name_of(tokens.policy) if tokens is not None else ""
        return TrustDescription(
            trust.KIND, trust.arguments(), needs_of(parts), keys, self.settings, texts, weight=weight
        )


def tune(system: System, also: list[OtherText], trusting: bool, count: int) -> Tuned:
    """Choose by likelihood what to decode with, and by BLEU what of that to keep.

    1. A teacher-forced pass over each text keeps what model, neighbours and phrases say of each reference token.
    2. The token memory's grid is scored, then the phrase memory's together with the likeliest token settings.
    3. The phrases' votes are learned, and trust, on top of the likeliest settings for few neighbours, and for many; of tokens
       with phrases and of tokens alone for one number of neighbours.
    4. A sample of the subset is decoded with each candidate, and with the model alone. The best by BLEU is chosen; where
       none is better than the model alone, the interpolation weights become 0.

    Args:
        system: with the subset that is held out as `--gen-subset`.
        also: text of other domains, which must not suffer.
        trusting: whether trust is learned, of the kind that the task has; otherwise settings alone are chosen.
        count: of candidates, without trust.

    Raises:
        ConfigurationError: no datastore.
    """
    cfg, task, ensemble = system.cfg, system.task, system.ensemble
    if ensemble is None:
        raise ConfigurationError("there is nothing to tune without a datastore: give --datastore DIR")
    task.load_dataset(cfg.dataset.gen_subset)
    samples = list(batches(cfg, task, system.models, at_least=BATCHES))
    start = time.perf_counter()
    if ensemble.phrases is not None:  # one search serves all settings
        ensemble = ensemble.with_memories(ensemble.tokens, ensemble.phrases.remembering(), None)
    most, quiet = max(NEIGHBOURS), cfg.common.no_progress_bar
    texts = [force_decode_text(cfg.dataset.gen_subset, samples, ensemble, most, quiet=quiet)]
    for one in also:  # many cost as much as one
        others = one.samples(system)
        texts.append(force_decode_text(one.name, others, ensemble, most, TOKENS // len(also), quiet))
    grids = Grids.of(cfg, ensemble, texts[0])
    if not trusting:
        tried = [Candidate(with_settings(ensemble, *pair)) for pair in grids.best_pairs(count)]
    else:
        pairs = grids.pairs_for_trust(trusted_neighbours(task.parts))
        tried = [with_trust(task.trust_class, with_settings(ensemble, *pair), texts) for pair in pairs]
        if ensemble.tokens is None:  # phrases alone are often best as their votes have them
            tried.append(with_votes(tried[0].ensemble, texts))
        elif ensemble.phrases is not None:  # which may be likelier together with tokens, and translate worse
            alone = with_settings(ensemble.with_memories(ensemble.tokens, None, None), *pairs[0])
            tried.append(with_trust(task.trust_class, alone, texts))
    sample = samples[::SAMPLED]
    scores, base_seconds = _decode(system, tried, sample)
    winner = max(tried, key=lambda one: scores[one.name].bleu)
    helps = scores[winner.name].bleu > scores[BASE].bleu
    left_out = None
    if task.phrase_datastore is not None and winner.ensemble.phrases is None:
        left_out = replace(task.phrase_settings, lambda_=0.0)
    tokens, of_sample = (sum(int(one["ntokens"]) for one in some) for some in (samples, sample))
    measured = {}
    for text in texts:
        systems = grids.worths(text, ensemble) | winner.texts.get(text.name, {})
        measured[text.name] = TextWorth(float(text.log_probs[text.rows].mean()), systems)
    return Tuned(
        winner if helps else Candidate(silenced(winner.ensemble)), helps, left_out, scores, grids.tokens, grids.phrases,
        time.perf_counter() - start, base_seconds * tokens / of_sample, len(scores) * of_sample / tokens,
        sentences=sum(len(one["id"]) for one in sample),
        linear=trusting and is_small(texts[0]), texts=measured,
    )  # fmt: skip


def trusted_neighbours(parts: Parts) -> tuple[int, ...]:
    """Name the k that trust is learned with: few and many; alongside phrases what tuning left for the tokens alone, or many.

    Phrases cost more than neighbours, to learn as well as to decode with, and few neighbours can be worse by far.
    """
    if len(parts) == 1:
        return FEW, MANY
    return (read_tuned({"token": parts["token"]}).get(TokenRetrievalSettings.PREFIX, {}).get("k", MANY),)


def _decode(system: System, tried: list[Candidate], samples: list[Any]) -> tuple[dict[str, TranslationScores], float]:
    """Decode batches with candidates and the model alone: scores by name, and the seconds of the latter."""
    generators = {BASE: system.generator(retrieve=False)}
    for candidate in tried:
        generators[candidate.name] = system.generator(retrieve=False)
        generators[candidate.name].model = candidate.ensemble
    decodings = decode(system.cfg, system.task, system.models, generators, samples)
    return {name: decodings.scores(name) for name in generators}, decodings.systems[BASE].seconds
