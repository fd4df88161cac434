"""What retrieved phrases propose as the next token: an active phrase proposes to continue, any other proposes to begin.

Pure tensor maths, the same on CPU and GPU, without a loop over hypotheses or phrases and without a host round trip.
Letters: B sentences, H hypotheses, A phrases of a sentence, Q source phrases they were retrieved for, L subwords of the
longest phrase, N subwords of all phrases, P distinct pairs of a subword and a source phrase in a sentence (at least as many
as distinct subwords), R equal subwords, V target vocabulary. Rows of a table are taken with `index_select`, which copies
them whole; `[rows]` would look up each number.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SUBWORDS = 48  # of a phrase: the prefixes that match are bits of a number, and float64 must hold it exactly
NO_TOKEN = -1
NEVER = 2**31  # a rank that no phrase has
SENTENCE = 2**32  # more than any token


class Weights(NamedTuple):
    """How much each phrase counts, whatever the hypothesis."""

    each: Tensor  # fp32 [B, A], c_q w(a|q)
    of_query: Tensor  # fp32 [B, A], the sum over all phrases of its source phrase
    confidence: Tensor  # fp32 [B], the highest c_q of the sentence


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    lengths: Tensor  # int64 [B, A]
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    ranks: Tensor  # int64 [B, A], 0 is the best of its source phrase
    attended: Tensor  # bool [B, Q, S], source subwords of each source phrase
    # What follows the first subwords of a phrase, int32 [B, A, L, 3]: the token; its slot among the distinct tokens of the
    # sentence, from 1; and its slot among the distinct pairs of a token and a source phrase, likewise, up to P. 0 after the
    # end.
    following: Tensor
    # Of each phrase, int64 [B, A, 3]: `queries`; the length of the prefix that makes it active; its proper prefixes as bits.
    phrases: Tensor
    # All N subwords, sorted by sentence * SENTENCE + token, and a last one that equals none: int64 [N + 1]; and of each its
    # phrase, 2^m of the m-th subword, the rank of the phrase if it ends there, and the source phrase: int64 [N + 1, 4].
    subwords: Tensor
    at_subword: Tensor
    most_equal: int  # R, of the subwords of a sentence
    most_pairs: int  # P, of a sentence

    @classmethod
    def of(
        cls, tokens: Tensor, lengths: Tensor, prefixes: Tensor, queries: Tensor, scores: Tensor, ranks: Tensor,
        attended: Tensor,
    ) -> PhraseTable:  # fmt: skip
        """Make a table on the CPU, of tensors described above and these.

        Args:
            tokens: int32 [B, A, L], above 0, which is a special one; NO_TOKEN after the phrase's end.
            prefixes: int64 [B, A], subwords up to and with the first that has a letter or digit: then a phrase is active.
        """
        positions = (tokens != NO_TOKEN).nonzero()  # [N, 3]: sentence, phrase, subword of it
        codes = positions[:, 0] * SENTENCE + tokens[positions.unbind(dim=1)]
        by_query, order = (codes * attended.size(1) + queries[positions[:, :2].unbind(dim=1)]).sort()
        codes, (sentences, phrases, subword) = codes[order], positions[order].T.contiguous()
        token_slots, pair_slots = _number_distinct(codes, sentences), _number_distinct(by_query, sentences)
        rank_at_end = ranks[sentences, phrases].masked_fill(subword + 1 < lengths[sentences, phrases], NEVER)
        at_subword = torch.stack([phrases, 1 << subword, rank_at_end, queries[sentences, phrases]], dim=1)
        following = tokens.new_zeros(*tokens.shape, 3)
        columns = [tokens[sentences, phrases, subword], token_slots, pair_slots]
        following[sentences, phrases, subword] = torch.stack(columns, dim=1)
        proper = (1 << (lengths - 1).clamp_min(0)) - 1
        return cls(
            lengths, queries, scores, ranks, attended, following, torch.stack([queries, prefixes, proper], dim=2),
            torch.cat([codes, codes.new_tensor([len(tokens) * SENTENCE])]),
            torch.cat([at_subword, at_subword.new_tensor([[0, 0, NEVER, 0]])]),
            max(codes.unique_consecutive(return_counts=True)[1].tolist(), default=1),
            int(pair_slots.max()) if len(pair_slots) else 0,
        )  # fmt: skip

    def to(self, device: torch.device) -> PhraseTable:
        """Move all tensors to another device."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def weights(self, k: int, temperature: float, min_similarity: float) -> Weights:
        """Weigh each phrase by c_q w(a|q): softmax over the k best of its source phrase, times their confidence.

        Args:
            k: phrases of each source phrase that count.
            temperature: T_p > 0, of w = softmax(score / T_p).
            min_similarity: s0; phrases no more similar count for nothing, and c = (best score - s0) / (1 - s0).
        """
        mask = (self.lengths > 0) & (self.ranks < k) & (self.scores > min_similarity)
        scores = self.scores.masked_fill(~mask, float("-inf"))
        count = self.attended.size(1)
        best = scores.new_full((len(scores), count), -1.0).scatter_reduce(1, self.queries, scores, "amax")
        best_of_each = best.gather(1, self.queries)
        weights = ((scores - best_of_each) / temperature).exp()
        totals = _sum_by(self.queries, weights, count)
        confidence = ((best_of_each - min_similarity) / (1 - min_similarity)).clamp(0, 1)
        each = confidence * weights / totals.clamp_min(torch.finfo(weights.dtype).tiny)
        highest = (confidence * mask).amax(dim=1) if mask.size(1) else confidence.new_zeros(len(confidence))
        return Weights(each, _sum_by(self.queries, each, count), highest)


class Continuation(NamedTuple):
    """The distribution p_phr of the next token, sparse: A tokens for each of H hypotheses."""

    values: Tensor  # int64 [H, A]
    log_probs: Tensor  # fp32 [H, A], log p_phr, duplicates merged: equal tokens all have the token's whole probability
    mass: Tensor  # fp32 [H], Z, which is 0 where no phrase proposes anything
    going: Tensor  # fp32 [H], the share of votes that are of phrases that continue


class Proposals(NamedTuple):
    """What each of A phrases proposes after each of H hypotheses, [H, A], however much the phrases weigh."""

    queries: Tensor  # int64, the source phrase it was retrieved for
    values: Tensor  # int64, the token
    active: Tensor  # bool, the phrase continues; or else it would begin
    gate: Tensor  # fp32 in [0, 1], how far the model lets it
    coverage: (
        Tensor  # int64, rank of the best phrase of its source phrase that was generated in full; NEVER without one
    )
    token_slots: Tensor  # int64, of the token among the distinct ones of the sentence
    pair_slots: Tensor  # int64, of the pair of token and source phrase, likewise

    def votes(self, table: PhraseTable, rows: Tensor, weights: Weights, enter: float, k: int) -> Tensor:
        """Compute what each phrase gives to its token, fp32 [H, A]: c_q w'(a|q) gamma.

        gamma is `gate`, times (1 - kappa_q) `enter` for a phrase that is not active. w' is w(a|q) for those; an active
        phrase has its part of the w of all active phrases of q: the others are out of the question, whatever they weighed.

        Args:
            table: the phrases.
            rows: int64 [H], the sentence of each hypothesis.
            weights: of `PhraseTable.weights`.
            enter: eta.
            k: kappa_q is 1 once one of the k best of q was generated in full. An active phrase may still end: it often
                holds the shorter one.
        """
        each, of_query = (part.index_select(0, rows) for part in weights[:2])
        continuing = each * self.active
        remaining = _sum_by(self.queries, continuing, table.attended.size(1))
        posterior = continuing * of_query / remaining.clamp_min(torch.finfo(each.dtype).tiny)
        entering = (enter * each).masked_fill(self.coverage < k, 0.0)
        return torch.where(self.active, posterior, entering) * self.gate

    def continuation(self, table: PhraseTable, rows: Tensor, weights: Weights, enter: float, k: int) -> Continuation:
        """Merge votes: M(v) = max_q of the sum of those for v of the phrases of q; Z = sum M; p_phr = M / Z."""
        votes = self.votes(table, rows, weights, enter, k)
        zeros = votes.new_zeros(len(votes), 1 + table.most_pairs)
        sums = zeros.scatter_add(1, self.pair_slots, votes).gather(1, self.pair_slots)
        largest = zeros.scatter_reduce(1, self.token_slots, sums, "amax")  # each token's M, once
        mass = largest.sum(dim=1)
        tiny = torch.finfo(mass.dtype).tiny
        merged = largest.gather(1, self.token_slots) / mass.clamp_min(tiny).unsqueeze(1)
        log_probs = merged.clamp_min(tiny).log().masked_fill(merged == 0, float("-inf"))  # a CPU's log of 0 is slow
        going = (votes * self.active).sum(dim=1) / votes.sum(dim=1).clamp_min(tiny)
        return Continuation(self.values, log_probs, mass, going)


class PhraseState:
    """How far each hypothesis is in each phrase.

    Args:
        table: phrases of the sentences.
        rows: int64 [H], the sentence of each hypothesis.
        coverage: whether no phrase of a source phrase begins any more once one of them was generated in full.
    """

    def __init__(self, table: PhraseTable, rows: Tensor, coverage: bool = True) -> None:
        self.table, self.rows, self.coverage = table, rows, coverage
        hypotheses, phrases = len(rows), table.lengths.size(1)
        self.matched = rows.new_zeros(hypotheses, phrases)  # bit m: the last m + 1 tokens are the phrase's first
        self.covered = rows.new_full((hypotheses, table.attended.size(1)), NEVER)  # rank of the best one generated

    def reorder(self, order: Tensor) -> PhraseState:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was."""
        other = copy.copy(self)
        other.rows, other.matched, other.covered = (
            part.index_select(0, order) for part in (self.rows, self.matched, self.covered)
        )
        return other

    def advance(self, tokens: Tensor) -> None:
        """Follow the token that each hypothesis, int64 [H], has generated.

        All prefixes of all phrases are followed at once, each as a bit (the Shift-And algorithm of Baeza-Yates & Gonnet).
        """
        table = self.table
        code = (self.rows * SENTENCE + tokens).unsqueeze(1)  # [H, 1]
        equal = torch.searchsorted(table.subwords, code) + torch.arange(table.most_equal, device=code.device)
        equal.clamp_max_(len(table.subwords) - 1)  # [H, R]
        flat = equal.view(-1)
        phrases, bits, ranks, queries = table.at_subword.index_select(0, flat).view(*equal.shape, -1).unbind(dim=2)
        bits = bits.masked_fill(table.subwords.index_select(0, flat).view(equal.shape) != code, 0)
        ends_here = torch.zeros_like(self.matched).scatter_add(1, phrases, bits)  # [H, A]
        self.matched = ((self.matched << 1) | 1) & ends_here
        if self.coverage:
            ranks = ranks.masked_fill(self.matched.gather(1, phrases) & bits == 0, NEVER)
            self.covered.scatter_reduce_(1, queries, ranks, "amin")

    def prefixes(self, proper: Tensor) -> Tensor:
        """Measure l_a, the longest proper prefix of each phrase that is a suffix of its hypothesis, int64 [H, A].

        Args:
            proper: int64 [H, A], proper prefixes as bits.
        """
        return torch.frexp((self.matched & proper).double()).exponent.long()  # the number of binary digits

    def proposals(self, log_probs: Tensor, attention: Tensor | None = None) -> Proposals:
        """Collect what each phrase proposes next, and how far the model lets it.

        Args:
            log_probs: fp32 [H, V], log p_NMT. The model lets a phrase continue with v as far as
                sqrt(p_NMT(v) / max p_NMT).
            attention: fp32 [H, S], of the decoder to the source: then a phrase may begin as far as that is on q.
        """
        table = self.table
        queries, prefix, proper = table.phrases.index_select(0, self.rows).unbind(dim=2)  # [H, A] each
        length = self.prefixes(proper)
        phrases, longest = table.following.shape[1:3]
        rows = self.rows.unsqueeze(1) * phrases + torch.arange(phrases, device=length.device)  # of all sentences
        following = table.following.view(-1, 3).index_select(0, (rows * longest + length).view(-1)).long()
        values, token_slots, pair_slots = following.view(*length.shape, 3).unbind(dim=2)
        active = length >= prefix
        gate = ((log_probs.gather(1, values) - log_probs.amax(dim=1, keepdim=True)) / 2).exp()
        if attention is not None:
            spans = table.attended.index_select(0, self.rows).to(attention.dtype)
            attended = torch.einsum("hqs,hs->hq", spans, attention).gather(1, queries).float()
            gate = torch.where(active, gate, attended)
        return Proposals(queries, values, active, gate, self.covered.gather(1, queries), token_slots, pair_slots)


def _sum_by(queries: Tensor, parts: Tensor, count: int) -> Tensor:
    """For each of [N, A] the sum of those of its row that have the same of `count` queries."""
    return parts.new_zeros(len(parts), count).scatter_add(1, queries, parts).gather(1, queries)


def _number_distinct(ordered: Tensor, sentences: Tensor) -> Tensor:
    """Number the distinct values of each sentence in sorted [N], from 1, int32 [N]."""
    changes = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (1, 0)).long().cumsum(dim=0)
    first = torch.searchsorted(sentences, sentences)
    return (1 + changes - changes[first]).int()
