"""Phrases that have not begun, by what they begin with: there are many, of few first tokens, and most weigh alike always.

After a hypothesis all phrases that begin with v propose v, and their votes add up. The score of them together is

    log sum over a of exp(w1 s_a + w2 (s_a - max over q of s) + d [q is covered]) + b_0 + c_0 log(p_NMT(v) / p_NMT(v*))

in the letters of `phrase_votes`, so they can be one proposal. The sum over the phrases of a source phrase q is that of the
sentence less those that have begun. So a step costs what has begun and what may begin, and not A phrases.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_continuation import BARRED, PhraseState, PhraseTable, Proposals

# Of the sum over the phrases of a pair: less is what rounding leaves of one whose phrases have all begun.
LEAST_LEFT = 1e-6


@dataclass(frozen=True)
class Openings:
    """What may begin in n sentences, or after n hypotheses; letters as in `PhraseTable`."""

    tokens: Tensor  # int64 [n, F]
    slots: Tensor  # int64 [n, F]
    inside: Tensor  # bool [n, F], whether it continues an unfinished word
    opening: Tensor  # int64 [n, P], below F
    query: Tensor  # int64 [n, P], below Q
    top: Tensor  # fp32 [n, 1], the highest score of a phrase that no hypothesis changes
    sums: Tensor  # fp32 [n, P], of exp(score - top)

    @classmethod
    def of(cls, table: PhraseTable, of_phrases: Tensor) -> Openings:
        """Sum up the phrases of sentences.

        Args:
            of_phrases: fp32 [B, A], see `PhraseVotes.of_phrases`.
        """
        top = of_phrases.amax(dim=1, keepdim=True)
        top = top.masked_fill(top == float("-inf"), 0)
        tokens, slots, inside = table.openings
        opening, query = table.opened
        sums = top.new_zeros(opening.shape).scatter_add(1, table.pairs, (of_phrases - top).exp())
        return cls(tokens, slots, inside.bool(), opening, query, top, sums)

    def of_rows(self, rows: Tensor) -> Openings:
        """Copy to hypotheses, int64 [H] of their sentences."""
        return Openings(*(getattr(self, field.name).index_select(0, rows) for field in fields(self)))


def merged_proposals(
    state: PhraseState, openings: Openings, of_phrases: Tensor, of_covered: Tensor
) -> tuple[Proposals, Tensor]:
    """Collect what phrases propose after H hypotheses: C = F + R proposals, of openings and of phrases that have begun.

    Args:
        openings: of the hypotheses.
        of_phrases: fp32 [B, A], see `PhraseVotes.of_phrases`.
        of_covered: fp32 [1], what is left of the vote of a phrase that may begin although its source phrase is covered.

    Returns:
        The proposals, and the scores of each that no state changes, fp32 [H, C], as `PhraseVotes` takes them.
    """
    table, begun = state.table, state.begun()
    places = (state.rows * of_phrases.size(1)).unsqueeze(1) + begun.lanes

    def of_begun(of_lanes: Tensor) -> Tensor:
        """[B, A] -> [H, R]"""
        return of_lanes.view(-1).index_select(0, places.view(-1)).view(places.shape)

    scores = of_begun(of_phrases).masked_fill(~begun.there, float("-inf"))
    pairs = of_begun(table.pairs)
    left = openings.sums.scatter_add(1, pairs, -(scores - openings.top).exp())
    left = torch.where(left > LEAST_LEFT * openings.sums, left, 0.0)
    left *= torch.lerp(of_covered.new_ones(1), of_covered, state.covered.float()).gather(1, openings.query)
    sums = left.new_zeros(openings.tokens.shape).scatter_add(1, openings.opening, left)
    tiny = torch.finfo(sums.dtype).tiny
    may_begin = (sums.clamp_min(tiny).log() + openings.top).masked_fill(sums == 0, float("-inf"))
    barred = openings.inside & state.unfinished.unsqueeze(1)
    merged = Proposals(
        torch.cat([openings.tokens, begun.values], dim=1), torch.cat([openings.slots, begun.slots], dim=1),
        torch.cat([BARRED * barred, begun.states], dim=1),
        torch.cat([torch.zeros_like(sums), state.covered.gather(1, of_begun(table.queries)).float()], dim=1),
    )  # fmt: skip
    return merged, torch.cat([may_begin, scores], dim=1)
