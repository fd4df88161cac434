"""Training trust, and the votes of memories, on held-out references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, trust_step
from fairseq_ccpr.decoding.forced import ForcedText
from fairseq_ccpr.decoding.memory import Memory
from fairseq_ccpr.decoding.mixture import Mixture, Said
from fairseq_ccpr.decoding.trust import Trust
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.evaluation.fit import FOREIGN_HARM, Training, fit, lost, split
from fairseq_ccpr.evaluation.grids import HeldOut, Worth, limited, log_likelihood, names_of

WITHOUT, WITH = "without trust", "with trust"
# Weight of what a token loses against the system without phrases, as `FOREIGN_HARM`. References are kinder than
# the hypotheses of beam search, after which a phrase's continuation is right less often.
VOTE_HARM = 1.0
OF_TRUST = Training("trust", updates=400, every=20, tokens=8192, rate=5e-3, weight_decay=3e-3)
OF_VOTES = Training("votes", updates=240, every=60, tokens=512, rate=0.05, falls=0.6)


@one_thread()
def train_votes(memory: Memory, ensemble: RetrievalEnsemble, texts: Sequence[HeldOut]) -> Memory:
    """Train the votes of a memory alongside the others of an ensemble, where it has any to be trained.

    The loss of a text is its mean -log p, and what its tokens lose against the system without this memory.
    """
    if (begun := memory.trainable([])) is None:
        return memory
    trained, module = begun
    parts = split([text.beside(memory, ensemble) for text in texts], OF_VOTES.what)
    others = [other for other in ensemble.voting if other.name != memory.name]

    def likelihood(text: ForcedText, its: Said) -> Tensor:
        said = {one.name: text.records[one.name].vote(one, False).said(text.targets) for one in others}
        votes = limited(ensemble, {**said, memory.name: its})
        return log_likelihood(ensemble.mixture, text.log_probs, votes.values())

    def loss(held_out: HeldOut) -> Tensor:
        votes = [text.records[memory.name].vote(trained, False).said(text.targets) for text in held_out.texts]
        silent = [(torch.full_like(said, float("-inf")), torch.zeros_like(weight)) for said, weight in votes]
        with_it, without = (torch.cat(list(map(likelihood, held_out.texts, its))) for its in (votes, silent))
        return lost(with_it, without, VOTE_HARM)

    fit(module, loss, parts, OF_VOTES)
    return trained


class WeighedText(NamedTuple):
    """N reference tokens of a text as settings weigh them, and all that trust looks at."""

    name: str
    foreign: bool  # of another domain: it must not lose
    mixture: Mixture  # of what memories say with the model
    sentences: Tensor  # int64 [N]
    inputs: Tensor  # fp32 [N, I], see `Trust.inputs`
    weights: Tensor  # fp32 [N, M], f
    model: Tensor  # fp32 [N], log p_NMT of the reference token
    retrieved: Tensor  # fp32 [N, M], log p of it by each memory
    # bool [N, C], what of the first memory's names it; [N, 0] where nothing spreads over that
    matches: Tensor

    @classmethod
    def of(cls, text: HeldOut, trust: Trust, ensemble: RetrievalEnsemble) -> WeighedText:
        """Weigh a text as an ensemble does without trust, and collect what this kind of trust looks at."""
        text = text.having(names_of(ensemble))
        collected = []
        for one in text.texts:
            votes = [one.records[memory.name].vote(memory, True) for memory in ensemble.voting]
            step = trust_step(one.likeliest, ensemble.mixture.limited(votes))
            retrieved = torch.stack([vote.log_prob(one.targets) for vote in votes], dim=1)
            matches = torch.zeros(len(one.targets), 0).bool()
            if trust.SPREADS:
                matches = (votes[0].values == one.targets.unsqueeze(1)) & (votes[0].log_probs > float("-inf"))
            collected.append((trust.inputs(step), step.weights, one.log_probs, retrieved, matches))
        columns = (torch.cat(column) for column in zip(*collected))
        return cls(text.name, text.foreign, ensemble.mixture, text.sentences, *columns)

    def select(self, rows: Tensor) -> WeighedText:
        """Select some of the tokens, by number or by bool."""
        return WeighedText(*self[:3], *(part[rows] for part in self[3:]))

    def draw(self, count: int, generator: torch.Generator) -> WeighedText:
        return self.select(torch.randint(len(self.model), (count,), generator=generator))

    def log_likelihood(self, trust: Trust | None) -> Tensor:
        """Compute log p of the references, fp32 [N]; with trust of None as the settings have it."""
        weights, said = self.weights, self.retrieved
        if trust is not None:
            weights, spread = trust.decide(self.inputs, self.weights)
            if spread is not None:
                named = (spread * self.matches).sum(dim=1).clamp_min(1e-30).log()
                said = torch.cat([named.unsqueeze(1), said[:, 1:]], dim=1)
        return log_likelihood(self.mixture, self.model, zip(said.T, weights.T))


@one_thread()
def train_trust(trust: Trust, texts: Sequence[WeighedText]) -> Trust:
    """Train it, and return it.

    The loss of a text is its mean -log p; of one of another domain also what it loses against the model
    alone.
    """
    parts = split(texts, OF_TRUST.what)
    trust.prepare(torch.cat([text.inputs for text in parts[0]]))

    def loss(text: WeighedText) -> Tensor:
        return lost(text.log_likelihood(trust), text.model, FOREIGN_HARM * text.foreign)

    fit(trust, loss, parts, OF_TRUST)
    return trust


@torch.no_grad()
def worths(trust: Trust, text: WeighedText) -> dict[str, Worth]:
    """Measure the settings' own weights, and trust, on all tokens of a text."""
    measured = {}
    for name, one in ((WITHOUT, None), (WITH, trust)):
        weights = one.decide(text.inputs, text.weights).weights if one is not None else text.weights
        by_memory = dict(zip(trust.memories, weights.unbind(dim=1)))
        measured[name] = Worth.measure(text.model, text.log_likelihood(one), by_memory)
    return measured
