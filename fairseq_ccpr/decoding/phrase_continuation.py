"""What retrieved phrases say of the next token: a phrase that has begun wants to go on, one that has not may begin.

Pure tensor maths, the same on CPU and GPU, without a loop over hypotheses or phrases and without a host round trip.
Letters: B sentences, H hypotheses, A phrases of a sentence, Q source phrases they were retrieved for, L subwords of the
longest phrase, W subwords of all phrases of a sentence, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SUBWORDS = 48  # of a phrase: the prefixes that match are bits of a number, and float64 must hold it exactly
NO_TOKEN = -1
NEVER = 2**31  # a rank that no phrase has


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    tokens: Tensor  # int32 [B, A, L], NO_TOKEN after the phrase's end
    lengths: Tensor  # int64 [B, A]
    entered: Tensor  # int64 [B, A], subwords up to and with the first that has a letter or digit: then it has begun
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    ranks: Tensor  # int64 [B, A], 0 is the best of its source phrase
    attended: Tensor  # bool [B, Q, S], source subwords of each source phrase
    # The same tokens without the gaps after short phrases, W a sentence, NO_TOKEN after the last: most phrases are short.
    dense: Tensor  # int32 [B, W]
    dense_lanes: Tensor  # int64 [B, W], the phrase of each
    dense_bits: Tensor  # int64 [B, W], 2^m of the m-th subword of its phrase

    @classmethod
    def of(
        cls, tokens: Tensor, lengths: Tensor, entered: Tensor, queries: Tensor, scores: Tensor, ranks: Tensor,
        attended: Tensor,
    ) -> PhraseTable:  # fmt: skip
        """A table on the CPU, of the tensors described above."""
        sentences, lanes, places = (tokens != NO_TOKEN).nonzero().unbind(dim=1)
        counts = torch.bincount(sentences, minlength=len(tokens))
        columns = torch.arange(len(sentences)) - (counts.cumsum(0) - counts)[sentences]
        size = len(tokens), max(1, int(counts.max()))
        dense = tokens.new_full(size, NO_TOKEN).index_put((sentences, columns), tokens[sentences, lanes, places])
        dense_lanes, dense_bits = (
            lanes.new_zeros(size).index_put((sentences, columns), values) for values in (lanes, 1 << places)
        )
        return cls(tokens, lengths, entered, queries, scores, ranks, attended, dense, dense_lanes, dense_bits)

    def to(self, device: torch.device) -> PhraseTable:
        """The same on another device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in vars(self).items()})

    def weights(self, k: int, temperature: float, min_similarity: float) -> Tensor:
        """c_q w(a|q) of each phrase, fp32 [B, A]: softmax over the k best of its source phrase, times their confidence.

        Args:
            k: phrases of each source phrase that count.
            temperature: T_p > 0, of w = softmax(score / T_p).
            min_similarity: s0; phrases no more similar count for nothing, and c = (best score - s0) / (1 - s0).
        """
        found = (self.lengths > 0) & (self.ranks < k) & (self.scores > min_similarity)
        scores = self.scores.masked_fill(~found, float("-inf"))
        groups = len(self.lengths), self.attended.size(1)
        best = scores.new_full(groups, -1.0).scatter_reduce(1, self.queries, scores, "amax")
        best_of_each = best.gather(1, self.queries)
        weights = ((scores - best_of_each) / temperature).exp()
        totals = weights.new_zeros(groups).scatter_add(1, self.queries, weights)
        confidence = ((best_of_each - min_similarity) / (1 - min_similarity)).clamp(0, 1)
        return confidence * weights / totals.gather(1, self.queries).clamp_min(torch.finfo(weights.dtype).tiny)


class Continuation(NamedTuple):
    """The distribution of the next token, sparse: A tokens for each of H hypotheses."""

    values: Tensor  # int64 [H, A]
    log_probs: Tensor  # fp32 [H, A], log p_phr, duplicates merged: equal tokens all have the token's whole probability
    mass: Tensor  # fp32 [H], Z, which is 0 where no phrase has anything to say


class Outlook(NamedTuple):
    """What each of A phrases would write next after each of H hypotheses, [H, A], whatever the phrases weigh."""

    values: Tensor  # int64, the token
    begun: Tensor  # bool, the phrase goes on; or else it would begin
    willing: Tensor  # fp32 in [0, 1], how far the model lets it
    covered: Tensor  # int64, rank of the best phrase of its source phrase that was written in full; NEVER without one
    order: Tensor  # int64, which puts the lanes in the order of token and source phrase
    pairs: Tensor  # int64, in that order: the number of the run of equal (token, source phrase)
    tokens: Tensor  # int64, in that order: the number of the run of equal tokens

    def votes(self, table: PhraseTable, rows: Tensor, weights: Tensor, enter: float, k: int) -> Tensor:
        """What each phrase gives to its token, fp32 [H, A]: c_q w'(a|q) gamma.

        gamma is `willing`, times (1 - kappa_q) `enter` for a phrase that has not begun. w' is w(a|q) for those, and for one
        that has begun its part of the w of all of q that have: the others are out of the question, whatever they weighed.

        Args:
            table: the phrases.
            rows: int64 [H], the sentence of each hypothesis.
            weights: fp32 [B, A], c_q w(a|q), of `PhraseTable.weights`.
            enter: eta.
            k: kappa_q is 1 once one of the k best of q was written in full. What has begun may still end: it often holds the
                shorter one.
        """
        queries, weights = table.queries[rows], weights[rows]
        size = len(rows), table.attended.size(1)
        going = weights * self.begun
        totals = (weights.new_zeros(size).scatter_add(1, queries, part).gather(1, queries) for part in (weights, going))
        whole, left = totals
        posterior = going * whole / left.clamp_min(torch.finfo(weights.dtype).tiny)
        entering = (enter * weights).masked_fill(self.covered < k, 0.0)
        return torch.where(self.begun, posterior, entering) * self.willing

    def continuation(self, table: PhraseTable, rows: Tensor, weights: Tensor, enter: float, k: int) -> Continuation:
        """M(v) = max_q of the sum of the votes for v of the phrases of q; Z = sum M; p_phr = M / Z; see `votes`."""
        votes = self.votes(table, rows, weights, enter, k).gather(1, self.order)
        sums = torch.zeros_like(votes).scatter_add(1, self.pairs, votes).gather(1, self.pairs)
        largest = torch.zeros_like(votes).scatter_reduce(1, self.tokens, sums, "amax")  # each token's M, once
        mass = largest.sum(dim=1)
        merged = torch.empty_like(votes).scatter(1, self.order, largest.gather(1, self.tokens))
        return Continuation(
            self.values, (merged / mass.clamp_min(torch.finfo(mass.dtype).tiny).unsqueeze(1)).log(), mass
        )


class PhraseState:
    """How far each hypothesis is in each phrase.

    Args:
        table: phrases of the sentences.
        rows: int64 [H], the sentence of each hypothesis.
        coverage: whether no phrase of a source phrase begins any more once one of them was written in full.
    """

    def __init__(self, table: PhraseTable, rows: Tensor, coverage: bool = True) -> None:
        self.table, self.rows, self.coverage = table, rows, coverage
        hypotheses, phrases = len(rows), table.lengths.size(1)
        self.matched = rows.new_zeros(hypotheses, phrases)  # bit m: the last m + 1 tokens are the phrase's first
        self.covered = rows.new_full((hypotheses, table.attended.size(1)), NEVER)  # rank of the best one written

    def reorder(self, order: Tensor) -> None:
        """Follow the beam: hypothesis i goes on from what hypothesis order[i] was."""
        self.rows, self.matched, self.covered = (
            part.index_select(0, order) for part in (self.rows, self.matched, self.covered)
        )

    def advance(self, written: Tensor) -> None:
        """Take note of the token that each hypothesis, int64 [H], has written.

        All prefixes of all phrases are followed at once, each as a bit (the Shift-And algorithm of Baeza-Yates & Gonnet).
        """
        table, lengths = self.table, self.table.lengths[self.rows]
        bits = table.dense_bits[self.rows].masked_fill(table.dense[self.rows] != written[:, None], 0)  # [H, W]
        here = torch.zeros_like(self.matched).scatter_add(1, table.dense_lanes[self.rows], bits)  # [H, A]
        self.matched = ((self.matched << 1) | 1) & here
        if self.coverage:
            complete = (self.matched >> (lengths - 1).clamp_min(0) & 1).bool() & (lengths > 0)
            ranks = table.ranks[self.rows].masked_fill(~complete, NEVER)
            self.covered.scatter_reduce_(1, table.queries[self.rows], ranks, "amin")

    def prefixes(self) -> Tensor:
        """l_a, the longest proper prefix of each phrase that is a suffix of its hypothesis, int64 [H, A]."""
        proper = self.matched & ((1 << (self.table.lengths[self.rows] - 1).clamp_min(0)) - 1)
        return torch.frexp(proper.double()).exponent.long()  # the number of binary digits

    def outlook(self, log_probs: Tensor, attention: Tensor | None = None) -> Outlook:
        """What each phrase would write next, and whether it may.

        Args:
            log_probs: fp32 [H, V], log p_NMT. The model lets a phrase go on with v as far as sqrt(p_NMT(v) / max p_NMT).
            attention: fp32 [H, S], of the decoder to the source: then a phrase may begin as far as that is on q.
        """
        table, queries = self.table, self.table.queries[self.rows]
        length = self.prefixes()
        lanes = torch.arange(length.size(1), device=length.device)
        values = table.tokens[self.rows[:, None], lanes, length].clamp_min(0).long()  # [H, A]
        begun = length >= table.entered[self.rows]
        willing = ((log_probs.gather(1, values) - log_probs.amax(dim=1, keepdim=True)) / 2).exp()
        if attention is not None:
            spans = table.attended[self.rows].to(attention.dtype)
            attended = torch.einsum("hqs,hs->hq", spans, attention).gather(1, queries).float()
            willing = torch.where(begun, willing, attended)
        covered = self.covered.gather(1, queries)
        ordered, order = (values * table.attended.size(1) + queries).sort(dim=1)
        pairs, tokens = _runs(ordered), _runs(ordered // table.attended.size(1))
        return Outlook(values, begun, willing, covered, order, pairs, tokens)


def _runs(ordered: Tensor) -> Tensor:
    """The number of the run of equal values that each of sorted rows [H, A] is in."""
    return torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).long().cumsum(dim=1)
