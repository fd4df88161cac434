"""What tuning decodes with: settings, with what was learned on top of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.decoding.trust import LearnedTrust, Trust
from fairseq_ccpr.evaluation.tuning.held_out import CPU, HeldOut
from fairseq_ccpr.evaluation.tuning.phrase_grid import References
from fairseq_ccpr.evaluation.tuning.trust_training import learn, training_text, worths
from fairseq_ccpr.evaluation.tuning.vote_training import VotingText, learn_votes
from fairseq_ccpr.evaluation.tuning.worth import Worth
from fairseq_ccpr.settings import as_options

# Fields that the grids have: written into FILE even where they are at their default.
TUNED_OF_TOKENS = ("k", "lambda_", "temperature")
TUNED_OF_PHRASES = ("lambda_",)
SEED = 1  # of what is learned
LEAST_TOKENS = 5000  # of the held-out text, for a hidden layer


@dataclass
class Candidate:
    """Settings, with trust or without."""

    ensemble: RetrievalEnsemble
    texts: dict[str, dict[str, Worth]] = field(default_factory=dict)  # with what was learned and without, by text
    learned: str = ""  # what of it was learned

    @property
    def name(self) -> str:
        """Its options, and what was learned."""
        return f"{options_of(self.ensemble)} {self.learned}".strip()


def with_trust(kind: type[Trust], ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> Candidate:
    """Learn trust on top of an ensemble's settings.

    Args:
        texts: the first is of the datastore's domain.
    """
    settings = ensemble.tokens.settings if ensemble.tokens is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        trust = kind.untrained(settings is not None, ensemble.phrases is not None, settings, is_small(texts[0]))
    if ensemble.phrases is not None and isinstance(trust, LearnedTrust):
        trust.votes = _learned_votes(ensemble, texts)
        ensemble = ensemble.with_memories(ensemble.tokens, replace(ensemble.phrases, votes=trust.votes), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        rows = [training_text(trust, text, number > 0, ensemble) for number, text in enumerate(texts)]
        learn(trust, rows)
    if ensemble.phrases is None:  # measured where the settings are
        rows = [replace(one, rows=one.rows.at(text.rows)) for one, text in zip(rows, texts)]
    measured = {text.name: worths(trust, text) for text in rows}
    device = next(ensemble.models[0].parameters()).device
    trust = trust.requires_grad_(False).to(device)
    return Candidate(ensemble.with_memories(ensemble.tokens, ensemble.phrases, trust), measured, f"trust:{kind.KIND}")


def with_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> Candidate:
    """Leave the weights to an ensemble's learned votes: trust is a network of zeros."""
    assert ensemble.phrases is not None
    trust = LearnedTrust(tokens=False, phrases=True, hidden=0)
    trust.votes = ensemble.phrases.votes
    measured = {text.name: worths(trust, training_text(trust, text, False, ensemble)) for text in texts}
    trust = trust.requires_grad_(False).to(ensemble.phrases.device)
    return Candidate(ensemble.with_memories(None, ensemble.phrases, trust), measured, "votes")


def _learned_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> PhraseVotes:
    """Learn how much each phrase counts, alongside the token memory's settings."""
    assert ensemble.phrases is not None
    settings = ensemble.tokens.settings if ensemble.tokens is not None else None
    of_texts = [
        VotingText(text.phrases, text.sentences, References.of(text, settings, ensemble.settings.lambda_max))
        for text in texts
    ]
    return learn_votes(ensemble.phrases.on(CPU), of_texts).to(ensemble.phrases.device)


def is_small(text: HeldOut) -> bool:
    """Check whether a text has too few tokens for a hidden layer."""
    return len(text.targets) < LEAST_TOKENS


def with_settings(
    ensemble: RetrievalEnsemble, token_settings: TokenRetrievalSettings | None, phrase_settings: PhraseSettings | None
) -> RetrievalEnsemble:
    """Return the ensemble with other settings of its memories; None leaves a memory as it is."""
    tokens, phrases = ensemble.tokens, ensemble.phrases
    if tokens is not None and token_settings is not None:
        tokens = replace(tokens, settings=token_settings)
    if phrases is not None and phrase_settings is not None:
        phrases = replace(phrases, settings=phrase_settings)
    return ensemble.with_memories(tokens, phrases, None)


def silenced(ensemble: RetrievalEnsemble) -> RetrievalEnsemble:
    """Return the ensemble with weights of 0: it translates as the model alone, to the bit."""
    tokens = replace(ensemble.tokens.settings, lambda_=0.0) if ensemble.tokens is not None else None
    phrases = replace(ensemble.phrases.settings, lambda_=0.0) if ensemble.phrases is not None else None
    return with_settings(ensemble, tokens, phrases)


def options_of(ensemble: RetrievalEnsemble) -> str:
    """Write the options of fairseq-generate that give an ensemble's settings."""
    options = []
    if ensemble.tokens is not None:
        automatic = automatic_token_settings(ensemble.tokens.retriever.datastore, ensemble.tokens.settings.confidence)
        kind = ("confidence",) if automatic["confidence"] else ()  # the grid has both kinds
        options.append(as_options(ensemble.tokens.settings, (*TUNED_OF_TOKENS, *kind), automatic))
    if ensemble.phrases is not None:
        options.append(as_options(ensemble.phrases.settings, TUNED_OF_PHRASES))
    return " ".join([*options, as_options(ensemble.settings)]).strip()
