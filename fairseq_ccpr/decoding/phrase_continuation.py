"""What retrieved phrases say of the next token: a phrase that has begun wants to go on, one that has not may begin.

Pure tensor maths, the same on CPU and GPU, without a loop over hypotheses or phrases and without a host round trip.
Letters: B sentences, H hypotheses, A phrases of a sentence, Q source phrases they were retrieved for, L subwords of the
longest phrase, N subwords of all phrases, P different pairs of a subword and a source phrase in a sentence (at least as many
as different subwords), R equal subwords, V target vocabulary. Rows of a table are taken with `index_select`, which copies
them whole; `[rows]` would look up each number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SUBWORDS = 48  # of a phrase: the prefixes that match are bits of a number, and float64 must hold it exactly
NO_TOKEN = -1
NEVER = 2**31  # a rank that no phrase has
SENTENCE = 2**32  # more than any token


class Weights(NamedTuple):
    """What each phrase counts, whatever is written."""

    each: Tensor  # fp32 [B, A], c_q w(a|q)
    of_query: Tensor  # fp32 [B, A], the sum over all phrases of its source phrase


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    lengths: Tensor  # int64 [B, A]
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    ranks: Tensor  # int64 [B, A], 0 is the best of its source phrase
    attended: Tensor  # bool [B, Q, S], source subwords of each source phrase
    # What follows the first subwords of a phrase, int32 [B, A, L, 3]: the token; which of the sentence's different tokens it
    # is, from 1; and which of its different pairs of a token and a source phrase, the same way, up to P. 0 after the end.
    following: Tensor
    # Of each phrase, int64 [B, A, 3]: `queries`; after how many subwords it has begun; the bits of its proper prefixes.
    at_lane: Tensor
    # All N subwords, sorted so that those that equal a written token are neighbours, and a last one that equals none: int64
    # [N + 1], sentence * SENTENCE + token; and of each its phrase, 2^m of the m-th subword, the rank of the phrase if it ends
    # there, and the source phrase: int64 [N + 1, 4].
    places: Tensor
    at_place: Tensor
    most_alike: int  # R, of the subwords of a sentence
    most_pairs: int  # P, of a sentence

    @classmethod
    def of(
        cls, tokens: Tensor, lengths: Tensor, entered: Tensor, queries: Tensor, scores: Tensor, ranks: Tensor,
        attended: Tensor,
    ) -> PhraseTable:  # fmt: skip
        """A table on the CPU, of tensors described above and these.

        Args:
            tokens: int32 [B, A, L], above 0, which is a special one; NO_TOKEN after the phrase's end.
            entered: int64 [B, A], subwords up to and with the first that has a letter or digit: then it has begun.
        """
        subwords = (tokens != NO_TOKEN).nonzero()  # [N, 3]: sentence, phrase, place in it
        of_each = subwords[:, 0] * SENTENCE + tokens[subwords.unbind(dim=1)]
        by_query, order = (of_each * attended.size(1) + queries[subwords[:, :2].unbind(dim=1)]).sort()
        places, (sentences, lanes, subword) = of_each[order], subwords[order].T.contiguous()
        types, pairs = _count_different(places, sentences), _count_different(by_query, sentences)
        rank_at_end = ranks[sentences, lanes].masked_fill(subword + 1 < lengths[sentences, lanes], NEVER)
        at_place = torch.stack([lanes, 1 << subword, rank_at_end, queries[sentences, lanes]], dim=1)
        following = tokens.new_zeros(*tokens.shape, 3)
        following[sentences, lanes, subword] = torch.stack([tokens[sentences, lanes, subword], types, pairs], dim=1)
        proper = (1 << (lengths - 1).clamp_min(0)) - 1
        return cls(
            lengths, queries, scores, ranks, attended, following, torch.stack([queries, entered, proper], dim=2),
            torch.cat([places, places.new_tensor([len(tokens) * SENTENCE])]),
            torch.cat([at_place, at_place.new_tensor([[0, 0, NEVER, 0]])]),
            max(places.unique_consecutive(return_counts=True)[1].tolist(), default=1),
            int(pairs.max()) if len(pairs) else 0,
        )  # fmt: skip

    def to(self, device: torch.device) -> PhraseTable:
        """The same on another device."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def weights(self, k: int, temperature: float, min_similarity: float) -> Weights:
        """c_q w(a|q) of each phrase: softmax over the k best of its source phrase, times their confidence.

        Args:
            k: phrases of each source phrase that count.
            temperature: T_p > 0, of w = softmax(score / T_p).
            min_similarity: s0; phrases no more similar count for nothing, and c = (best score - s0) / (1 - s0).
        """
        found = (self.lengths > 0) & (self.ranks < k) & (self.scores > min_similarity)
        scores = self.scores.masked_fill(~found, float("-inf"))
        count = self.attended.size(1)
        best = scores.new_full((len(scores), count), -1.0).scatter_reduce(1, self.queries, scores, "amax")
        best_of_each = best.gather(1, self.queries)
        weights = ((scores - best_of_each) / temperature).exp()
        totals = _sum_by(self.queries, weights, count)
        confidence = ((best_of_each - min_similarity) / (1 - min_similarity)).clamp(0, 1)
        each = confidence * weights / totals.clamp_min(torch.finfo(weights.dtype).tiny)
        return Weights(each, _sum_by(self.queries, each, count))


class Continuation(NamedTuple):
    """The distribution of the next token, sparse: A tokens for each of H hypotheses."""

    values: Tensor  # int64 [H, A]
    log_probs: Tensor  # fp32 [H, A], log p_phr, duplicates merged: equal tokens all have the token's whole probability
    mass: Tensor  # fp32 [H], Z, which is 0 where no phrase has anything to say


class Outlook(NamedTuple):
    """What each of A phrases would write next after each of H hypotheses, [H, A], whatever the phrases weigh."""

    queries: Tensor  # int64, the source phrase it was retrieved for
    values: Tensor  # int64, the token
    begun: Tensor  # bool, the phrase goes on; or else it would begin
    willing: Tensor  # fp32 in [0, 1], how far the model lets it
    covered: Tensor  # int64, rank of the best phrase of its source phrase that was written in full; NEVER without one
    types: Tensor  # int64, which of the sentence's different tokens that is
    pairs: Tensor  # int64, and which of its pairs of a token and a source phrase

    def votes(self, table: PhraseTable, rows: Tensor, weights: Weights, enter: float, k: int) -> Tensor:
        """What each phrase gives to its token, fp32 [H, A]: c_q w'(a|q) gamma.

        gamma is `willing`, times (1 - kappa_q) `enter` for a phrase that has not begun. w' is w(a|q) for those, and for one
        that has begun its part of the w of all of q that have: the others are out of the question, whatever they weighed.

        Args:
            table: the phrases.
            rows: int64 [H], the sentence of each hypothesis.
            weights: of `PhraseTable.weights`.
            enter: eta.
            k: kappa_q is 1 once one of the k best of q was written in full. What has begun may still end: it often holds the
                shorter one.
        """
        each, of_query = (part.index_select(0, rows) for part in weights)
        going = each * self.begun
        left = _sum_by(self.queries, going, table.attended.size(1))
        posterior = going * of_query / left.clamp_min(torch.finfo(each.dtype).tiny)
        entering = (enter * each).masked_fill(self.covered < k, 0.0)
        return torch.where(self.begun, posterior, entering) * self.willing

    def continuation(self, table: PhraseTable, rows: Tensor, weights: Weights, enter: float, k: int) -> Continuation:
        """M(v) = max_q of the sum of the votes for v of the phrases of q; Z = sum M; p_phr = M / Z; see `votes`."""
        votes = self.votes(table, rows, weights, enter, k)
        nothing = votes.new_zeros(len(votes), 1 + table.most_pairs)
        sums = nothing.scatter_add(1, self.pairs, votes).gather(1, self.pairs)
        largest = nothing.scatter_reduce(1, self.types, sums, "amax")  # each token's M, once
        mass = largest.sum(dim=1)
        tiny = torch.finfo(mass.dtype).tiny
        merged = largest.gather(1, self.types) / mass.clamp_min(tiny).unsqueeze(1)
        log_probs = merged.clamp_min(tiny).log().masked_fill(merged == 0, float("-inf"))  # a CPU's log of 0 is slow
        return Continuation(self.values, log_probs, mass)


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
        table = self.table
        place = (self.rows * SENTENCE + written).unsqueeze(1)  # [H, 1]
        alike = torch.searchsorted(table.places, place) + torch.arange(table.most_alike, device=place.device)
        alike.clamp_max_(len(table.places) - 1)  # [H, R]
        which = alike.view(-1)
        lanes, bits, ranks, queries = table.at_place.index_select(0, which).view(*alike.shape, -1).unbind(dim=2)
        bits = bits.masked_fill(table.places.index_select(0, which).view(alike.shape) != place, 0)
        here = torch.zeros_like(self.matched).scatter_add(1, lanes, bits)  # [H, A]
        self.matched = ((self.matched << 1) | 1) & here
        if self.coverage:
            ranks = ranks.masked_fill(self.matched.gather(1, lanes) & bits == 0, NEVER)
            self.covered.scatter_reduce_(1, queries, ranks, "amin")

    def prefixes(self, proper: Tensor) -> Tensor:
        """l_a, the longest proper prefix of each phrase that is a suffix of its hypothesis, int64 [H, A].

        Args:
            proper: int64 [H, A], the bits of proper prefixes.
        """
        return torch.frexp((self.matched & proper).double()).exponent.long()  # the number of binary digits

    def outlook(self, log_probs: Tensor, attention: Tensor | None = None) -> Outlook:
        """What each phrase would write next, and whether it may.

        Args:
            log_probs: fp32 [H, V], log p_NMT. The model lets a phrase go on with v as far as sqrt(p_NMT(v) / max p_NMT).
            attention: fp32 [H, S], of the decoder to the source: then a phrase may begin as far as that is on q.
        """
        table = self.table
        queries, entered, proper = table.at_lane.index_select(0, self.rows).unbind(dim=2)  # [H, A] each
        length = self.prefixes(proper)
        phrases, longest = table.following.shape[1:3]
        lanes = self.rows.unsqueeze(1) * phrases + torch.arange(phrases, device=length.device)  # of all sentences
        next_ones = (lanes * longest + length).view(-1)
        following = table.following.view(-1, 3).index_select(0, next_ones).long()
        values, types, pairs = following.view(*length.shape, 3).unbind(dim=2)
        begun = length >= entered
        willing = ((log_probs.gather(1, values) - log_probs.amax(dim=1, keepdim=True)) / 2).exp()
        if attention is not None:
            spans = table.attended.index_select(0, self.rows).to(attention.dtype)
            attended = torch.einsum("hqs,hs->hq", spans, attention).gather(1, queries).float()
            willing = torch.where(begun, willing, attended)
        covered = self.covered.gather(1, queries)
        return Outlook(queries, values, begun, willing, covered, types, pairs)


def _sum_by(queries: Tensor, parts: Tensor, count: int) -> Tensor:
    """For each of [N, A] the sum of those of its row that have the same of `count` queries."""
    return parts.new_zeros(len(parts), count).scatter_add(1, queries, parts).gather(1, queries)


def _count_different(ordered: Tensor, sentences: Tensor) -> Tensor:
    """Which of the different values of its sentence each of sorted [N] is, from 1, int32 [N]."""
    changes = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (1, 0)).long().cumsum(dim=0)
    first = torch.searchsorted(sentences, sentences)
    return (1 + changes - changes[first]).int()
