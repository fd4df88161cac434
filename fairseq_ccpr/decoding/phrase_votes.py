"""How much each retrieved phrase counts: a softmax over what phrases propose and the model itself.

After a hypothesis, phrase a proposes one token v_a. With s_a its similarity, q the source phrase it was retrieved for, i its
state (`STATES`: it may begin, has begun, or is written and its sentence continues) and v* the model's likeliest token,

    u_a = w1 s_a + w2 (s_a - max over q of s) + b_i + c_i log(p_NMT(v_a) / p_NMT(v*)) + d [i = may begin, q is covered]
    u_0 = n0 + n1 p_NMT(v*)
    P(a) = exp(u_a) / (exp(u_0) + sum over b of exp(u_b))

P(a) is the vote of a, the rest is the model's. A source phrase is covered once one of its phrases was written in full.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.mixture import ModelView
from fairseq_ccpr.decoding.phrase_continuation import STATES, PhraseTable, Proposals
from fairseq_ccpr.storage.fingerprint import of_parameters, short

LEAST_RATIO = -12.0  # of the log probability of a token to that of the likeliest: less is as impossible


class Consent(NamedTuple):
    """What the model says of the tokens that phrases propose at N tokens."""

    ratios: Tensor  # fp32 [N, A], log of p_NMT of the token to that of the likeliest, at least LEAST_RATIO
    best: Tensor  # fp32 [N], log p_NMT of the likeliest token

    @classmethod
    def of(cls, model: ModelView) -> Consent:
        """Compare what the model says of the proposals' tokens with its likeliest."""
        return cls((model.neighbours - model.best.unsqueeze(1)).clamp_min(LEAST_RATIO), model.best)


class PhraseVotes(nn.Module):
    """The weights of the formula above.

    They start as learned for the demo's phrase encoder and model, on held-out sentences of an office suite's help with the
    English text of that help as memory. Training continues from there.
    """

    barred: Tensor

    def __init__(self) -> None:
        super().__init__()
        begun, written = (-3.8, -2.5, -2.1, -2.1, -2.5), (-3.8, -4.3, -2.8, -3.5, -2.2, -2.8)
        self.similarity = _weights(4.0, 9.3)  # w1, w2
        self.state = _weights(-6.4, *begun, *written)  # b
        self.consent = _weights(0.6, 0.4, 0.4, 0.4, 0.4, 0.1, 2.0, 0.3, 0.9, 0.2, 0.6, 0.3)  # c
        self.covered = _weights(-1.9)  # d
        self.model = _weights(1.2, 0.8)  # n0, n1
        assert len(self.state) == len(self.consent) == len(STATES)
        # Offset and consent of a phrase that cannot begin.
        self.register_buffer("barred", torch.tensor([[float("-inf"), 0.0]]), persistent=False)

    def of_phrases(self, table: PhraseTable) -> Tensor:
        """Compute the part of u that no hypothesis changes, fp32 [B, A]; -inf where there is no phrase."""
        absent = table.lengths == 0
        scores = table.scores.masked_fill(absent, -1.0)
        best = scores.new_full((len(scores), table.most_queries), -1.0).scatter_reduce(1, table.queries, scores, "amax")
        weighed = self.similarity[0] * scores + self.similarity[1] * (scores - best.gather(1, table.queries))
        return weighed.masked_fill(absent, float("-inf"))

    @property
    def of_covered(self) -> Tensor:
        """What is left of the vote of a phrase that may begin although its source phrase is covered, fp32 [1]."""
        return self.covered.exp()

    def forward(self, proposals: Proposals, consent: Consent, of_phrases: Tensor) -> Tensor:
        """Compute P, fp32 [N, A].

        Args:
            of_phrases: fp32 [N, A], of `of_phrases`, a row for each hypothesis.
        """
        weights = torch.cat([torch.stack([self.state, self.consent], dim=1), self.barred])
        by_state = weights.index_select(0, proposals.states.view(-1))
        offset, wanted = by_state.view(*proposals.states.shape, 2).unbind(dim=2)
        scores = of_phrases + offset + wanted * consent.ratios
        scores = scores + self.covered * proposals.covered * (proposals.states == 0)
        of_model = self.model[0] + self.model[1] * consent.best.exp()
        return torch.cat([of_model.unsqueeze(1), scores], dim=1).softmax(dim=1)[:, 1:]

    def digest(self) -> str:
        """Digest the weights, for signatures."""
        return short(of_parameters(self.state_dict().items()))


def _weights(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))
