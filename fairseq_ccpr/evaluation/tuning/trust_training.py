"""Learn trust from held-out sentences: at home, where retrieval should help, and of other domains, where it must not harm."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, step_of
from fairseq_ccpr.decoding.interpolation import ALMOST_ALL, Vote, interpolate_references
from fairseq_ccpr.decoding.trust import Trust
from fairseq_ccpr.decoding.trust_features import ModelEvidence
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.tuning.held_out import CPU, HeldOut
from fairseq_ccpr.evaluation.tuning.worth import Worth
from fairseq_ccpr.progress import progress_bar

UPDATES, BATCH = 400, 8192  # tokens of each text in an update
LEARNING_RATE, WEIGHT_DECAY = 5e-3, 3e-3
EVERY = 20  # updates, after which the sentences held out are scored
HELD_OUT = 5  # one sentence in so many is not trained on, but chooses when to stop
WITHOUT, WITH = "without trust", "with trust"
HARM = 0.5  # weight of the loss of tokens of other domains, besides the likelihood of their text


class Rows(NamedTuple):
    """Some reference tokens of a text as training needs them, [n, ...]."""

    inputs: Tensor  # fp32 [n, I], see `Trust.inputs`
    weights: Tensor  # fp32 [n, M], f
    model: Tensor  # fp32 [n], log p_NMT of the reference token
    retrieved: Tensor  # fp32 [n, M], log p of it by each memory
    matches: Tensor  # bool [n, k], neighbours that name it; [n, 0] where nothing spreads over neighbours

    def at(self, rows: Tensor) -> Rows:
        """Select some of the tokens."""
        return Rows(*(part[rows] for part in self))


@dataclass
class TrainingText:
    """A text to learn from."""

    name: str
    foreign: bool  # of another domain: it must not lose
    rows: Rows
    sentences: Tensor  # int64 [n]

    def split(self) -> tuple[Rows, Rows]:
        """Part the tokens by sentence: to train on, and held out."""
        held_out = self.sentences % HELD_OUT == 0
        return self.rows.at(~held_out), self.rows.at(held_out)


def training_text(trust: Trust, text: HeldOut, foreign: bool, ensemble: RetrievalEnsemble) -> TrainingText:
    """Weigh a text as `ensemble` does without trust, and collect what this kind of trust looks at."""
    collected, places = [], []
    if ensemble.phrases is None:
        assert ensemble.tokens is not None and text.tokens is not None
        settings = ensemble.tokens.settings
        cache = text.tokens.first(settings.k)
        collected.append(_rows(trust, text, torch.arange(len(text.targets)), cache.vote(settings), None, ensemble))
        places.append(torch.arange(len(text.targets)))
    else:
        for batch in text.phrases.batches:
            token_vote = None
            if ensemble.tokens is not None and text.tokens is not None:
                settings = ensemble.tokens.settings
                token_vote = text.tokens.at(batch.rows).first(settings.k).vote(settings)
            phrase_vote = batch.vote(replace(ensemble.phrases.on(CPU), trusted=True))
            collected.append(_rows(trust, text, batch.rows, token_vote, phrase_vote, ensemble))
            places.append(batch.rows)
    rows = Rows(*(torch.cat(column) for column in zip(*collected)))
    return TrainingText(text.name, foreign, rows, text.sentences[torch.cat(places)])


def _rows(
    trust: Trust, text: HeldOut, at: Tensor, token_vote: Vote | None, phrase_vote: Vote | None, ensemble: RetrievalEnsemble
) -> Rows:  # fmt: skip
    votes = ensemble.limited(token_vote, phrase_vote)
    model = ModelEvidence(text.model.best[at], text.model.favourite[at])
    step = step_of(model, token_vote, phrase_vote, votes)
    targets = text.targets[at]
    retrieved = torch.stack([vote.of_token(targets) for vote in votes], dim=1)
    matches = torch.zeros(len(at), 0, dtype=torch.bool)
    if token_vote is not None and trust.SPREADS:
        scores = token_vote.evidence.scores  # type: ignore[union-attr]
        matches = (token_vote.values == targets.unsqueeze(1)) & (scores > float("-inf"))
    return Rows(trust.inputs(step), step.weights, text.log_probs[at], retrieved, matches)


def log_likelihood(trust: Trust | None, rows: Rows) -> Tensor:
    """Compute log p of n reference tokens, fp32 [n]; with trust of None as the settings have it."""
    if trust is None:
        return _mixture(rows.model, rows.weights, rows.retrieved)
    weights, spread = trust.decide(rows.inputs, rows.weights)
    if spread is None:
        return _mixture(rows.model, weights, rows.retrieved)
    named = (spread * rows.matches).sum(dim=1).clamp_min(1e-30).log()
    return _mixture(rows.model, weights, torch.cat([named.unsqueeze(1), rows.retrieved[:, 1:]], dim=1))


def _mixture(model: Tensor, weights: Tensor, retrieved: Tensor) -> Tensor:
    # log 0 has no gradient that is a number.
    votes = [(said.clamp_min(-80), weight.clamp(1e-12, ALMOST_ALL)) for said, weight in zip(retrieved.T, weights.T)]
    return interpolate_references(model, *votes)


@one_thread()
def learn(trust: Trust, texts: list[TrainingText], seed: int = 1) -> Trust:
    """Learn by Adam; returns the state that was best on sentences held out, which may be the start.

    The loss of a text is its mean -log p; of one of another domain also what it loses against the model alone. All texts
    count alike.

    Args:
        trust: where to start; it is changed.
        texts: the first is of the datastore's own domain.

    Raises:
        ConfigurationError: a text has too few sentences to be parted.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [text.split() for text in texts]
    for text, both in zip(texts, parts):
        if not all(len(rows.model) for rows in both):
            raise ConfigurationError(
                f"{text.name} has too few sentences to learn trust from: give at least {HELD_OUT + 1} pairs"
            )
    trained, held_out = zip(*parts)
    trust.prepare(torch.cat([rows.inputs for rows in trained]))
    optimizer = torch.optim.AdamW(trust.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, best_loss = copy.deepcopy(trust.state_dict()), float("inf")
    with torch.enable_grad():
        for update in progress_bar(f"trust ({trust.KIND})", "update", range(UPDATES + 1)):
            if update % EVERY == 0:
                with torch.no_grad():
                    loss = float(_loss(trust, texts, list(held_out)))
                if loss < best_loss:
                    best, best_loss = copy.deepcopy(trust.state_dict()), loss
            some = [rows.at(torch.randint(len(rows.model), (BATCH,), generator=generator)) for rows in trained]
            optimizer.zero_grad()
            _loss(trust, texts, some).backward()
            optimizer.step()
    trust.load_state_dict(best)
    return trust


def _loss(trust: Trust, texts: list[TrainingText], of_each: list[Rows]) -> Tensor:
    losses = []
    for text, rows in zip(texts, of_each):
        likelihood = log_likelihood(trust, rows)
        losses.append(-likelihood.mean())
        if text.foreign:
            losses[-1] = losses[-1] + HARM * (rows.model - likelihood).clamp_min(0).mean()
    return torch.stack(losses).mean()


@torch.no_grad()
def worths(trust: Trust, text: TrainingText) -> dict[str, Worth]:
    """Measure the settings' own weights, and trust, on all tokens of a text."""
    rows = text.rows
    measured = {}
    for name, one in ((WITHOUT, None), (WITH, trust)):
        weights = iter((trust.decide(rows.inputs, rows.weights).weights if one is not None else rows.weights).T)
        tokens, phrases = (next(weights) if there else None for there in (trust.tokens, trust.phrases))
        measured[name] = Worth.of(rows.model, log_likelihood(one, rows), tokens, phrases)
    return measured
