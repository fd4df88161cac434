"""What retrieved phrases propose as the next token: to begin, to continue, or to follow their sentence beyond their end.

Pure tensor maths, the same on CPU and GPU, without a loop over hypotheses or phrases and without a host round trip.
Letters: B sentences, H hypotheses, A phrases of a sentence, Q source phrases they were retrieved for, L subwords of the
longest phrase with what follows it, N subwords of all phrases, D distinct subwords of a sentence, R equal subwords, V target
vocabulary. Rows of a table are taken with `index_select`, which copies them whole; `[rows]` would look up each number.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.device import to_device, to_host
from fairseq_ccpr.text.decoder_subwords import WordBorders

MAX_SUBWORDS = 48  # of a phrase with what follows it: prefixes that match are bits of a number, which float64 must hold
NO_TOKEN = -1
CANNOT_BEGIN = 3  # a kind of phrase, see `_states`
SENTENCE = 2**32  # more than any token
# How far a phrase is after a hypothesis: its state. By the subwords that match:
BEGUN_AFTER = (1, 2, 3, 4, 6)  # so many at least, of the phrase
FOLLOWED_AFTER = (1, 2, 3, 4, 6, 9)  # so many at least, the phrase's last among them: its sentence continues
STATES = (
    "may begin", *(f"begun: {n} or more" for n in BEGUN_AFTER), *(f"written: {n} or more" for n in FOLLOWED_AFTER)
)  # fmt: skip
WRITTEN = 1 + len(BEGUN_AFTER)  # the first state of a phrase that is written in full
BARRED = len(STATES)  # the state of a phrase that may not begin, since a word is not finished; it proposes nothing


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    lengths: Tensor  # int64 [B, A]
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    # What follows the first subwords of a phrase, int32 [B, A, L, 2]: the token, and its slot among the distinct tokens of
    # the sentence, from 1, up to D. 0 after the end.
    following: Tensor
    # Of each phrase, int64 [B, A, 5]: `queries`; the length of the prefix that begins it; its own length; the prefixes that
    # something follows, as bits; 1 where its first subword goes on with a word that is not finished.
    phrases: Tensor
    # All N subwords, sorted by sentence * SENTENCE + token, and a last one that equals none: int64 [N + 1]; and of each its
    # phrase, 2^m of the m-th subword, whether the phrase ends there, the source phrase, and 1 where it begins a phrase and
    # goes on with a word that is not finished: int64 [N + 1, 5].
    subwords: Tensor
    at_subword: Tensor
    state_of: Tensor  # int64, by kind and number of matching subwords; see `_states`
    unfinished: Tensor  # bool [V], of each token, whether a word may go on after it
    most_equal: int  # R, of the subwords of a sentence
    most_distinct: int  # D, of a sentence
    most_queries: int  # Q

    @classmethod
    def of(
        cls, tokens: Tensor, lengths: Tensor, prefixes: Tensor, queries: Tensor, scores: Tensor, borders: WordBorders
    ) -> PhraseTable:
        """Make a table on the CPU, of tensors described above and these.

        Args:
            tokens: int32 [B, A, L], above 0, which is a special one; NO_TOKEN after the end of what follows the phrase.
            prefixes: int64 [B, A], subwords up to and with the first that has a letter or digit: then a phrase has begun.
            borders: of the target dictionary.
        """
        positions = (tokens != NO_TOKEN).nonzero()  # [N, 3]: sentence, phrase, subword of it
        codes, order = (positions[:, 0] * SENTENCE + tokens[positions.unbind(dim=1)]).sort(stable=True)
        sentences, phrases, subword = positions[order].T.contiguous()
        slots = _number_distinct(codes, sentences)
        ends = subword + 1 == lengths[sentences, phrases]
        unfinished, going_on = map(torch.from_numpy, borders)
        inside = going_on[tokens[:, :, 0].clamp_min(0)] & (lengths > 0)
        begins_inside = inside[sentences, phrases] & (subword == 0)
        at_subword = torch.stack([phrases, 1 << subword, ends, queries[sentences, phrases], begins_inside], dim=1)
        following = tokens.new_zeros(*tokens.shape, 2)
        following[sentences, phrases, subword] = torch.stack([tokens[sentences, phrases, subword], slots], dim=1)
        extents = (tokens != NO_TOKEN).sum(dim=2)
        followed = (1 << (extents - 1).clamp_min(0)) - 1
        return cls(
            lengths, queries, scores, following, torch.stack([queries, prefixes, lengths, followed, inside], dim=2),
            torch.cat([codes, codes.new_tensor([len(tokens) * SENTENCE])]),
            torch.cat([at_subword, at_subword.new_zeros(1, 5)]), _states(), unfinished,
            max(codes.unique_consecutive(return_counts=True)[1].tolist(), default=1),
            int(slots.max()) if len(slots) else 0,
            1 + (int(queries.max()) if queries.numel() else 0),
        )  # fmt: skip

    def to(self, device: torch.device) -> PhraseTable:
        """Move all tensors to another device, or back to the CPU, in one copy."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        move = to_host if device.type == "cpu" else partial(to_device, device=device)
        moved: dict[str, Any] = dict(zip(tensors, move(list(tensors.values()))))
        return replace(self, **moved)


class Continuation(NamedTuple):
    """The distribution p_phr of the next token, sparse: A tokens for each of H hypotheses."""

    values: Tensor  # int64 [H, A]
    log_probs: Tensor  # fp32 [H, A], log p_phr, duplicates merged: equal tokens all have the token's whole probability
    mass: Tensor  # fp32 [H], Z, what all phrases have against the model; 0 where no phrase proposes anything
    going: Tensor  # fp32 [H], the part of Z of phrases that have begun


class Proposals(NamedTuple):
    """What each of A phrases proposes after each of H hypotheses, [H, A], however much the phrases weigh."""

    values: Tensor  # int64, the token
    slots: Tensor  # int64, of the token among the distinct ones of the sentence
    states: Tensor  # int64, of STATES, or BARRED
    covered: Tensor  # fp32, 1 where a phrase of the same source phrase was written in full

    def continuation(self, votes: Tensor, distinct: int) -> Continuation:
        """Merge votes, fp32 [H, A], see `PhraseVotes`: Z = sum of all; p_phr(v) = sum of those for v / Z.

        Args:
            distinct: D of the table.
        """
        sums = votes.new_zeros(len(votes), 1 + distinct).scatter_add(1, self.slots, votes)
        mass = votes.sum(dim=1)
        tiny = torch.finfo(mass.dtype).tiny
        merged = sums.gather(1, self.slots) / mass.clamp_min(tiny).unsqueeze(1)
        log_probs = merged.clamp_min(tiny).log().masked_fill(merged == 0, float("-inf"))  # a CPU's log of 0 is slow
        return Continuation(self.values, log_probs, mass, (votes * (self.states > 0)).sum(dim=1) / mass.clamp_min(tiny))


class PhraseState:
    """How far each hypothesis is in each phrase.

    Args:
        table: phrases of the sentences.
        rows: int64 [H], the sentence of each hypothesis.
    """

    def __init__(self, table: PhraseTable, rows: Tensor) -> None:
        self.table, self.rows = table, rows
        self.matched = rows.new_zeros(len(rows), table.lengths.size(1))  # bit m: the last m + 1 tokens begin the phrase
        self.covered = rows.new_zeros(len(rows), table.most_queries)  # 1: one of its phrases was written in full
        self.unfinished = rows.new_zeros(len(rows), dtype=torch.bool)  # whether the last token's word may go on

    def reorder(self, order: Tensor) -> PhraseState:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was."""
        other = copy.copy(self)
        other.rows, other.matched, other.covered, other.unfinished = (
            part.index_select(0, order) for part in (self.rows, self.matched, self.covered, self.unfinished)
        )
        return other

    def advance(self, tokens: Tensor) -> None:
        """Follow the token that each hypothesis, int64 [H], has generated.

        All prefixes of all phrases are followed at once, each as a bit (the Shift-And algorithm of Baeza-Yates & Gonnet). No
        phrase begins inside a word.
        """
        table = self.table
        code = (self.rows * SENTENCE + tokens).unsqueeze(1)  # [H, 1]
        equal = torch.searchsorted(table.subwords, code) + torch.arange(table.most_equal, device=code.device)
        equal.clamp_max_(len(table.subwords) - 1)  # [H, R]
        flat = equal.view(-1)
        at_subword = table.at_subword.index_select(0, flat).view(*equal.shape, -1)
        phrases, bits, ends, queries, begins_inside = at_subword.unbind(dim=2)
        differs = table.subwords.index_select(0, flat).view(equal.shape) != code
        bits = bits.masked_fill(differs | (begins_inside.bool() & self.unfinished.unsqueeze(1)), 0)
        self.unfinished = table.unfinished.index_select(0, tokens)
        matches_here = torch.zeros_like(self.matched).scatter_add(1, phrases, bits)  # [H, A]
        self.matched = ((self.matched << 1) | 1) & matches_here
        written = ends * (self.matched.gather(1, phrases) & bits != 0)
        self.covered.scatter_reduce_(1, queries, written, "amax")

    def ended(self) -> Tensor:
        """Tell whether the last token of each hypothesis was the last of a phrase, bool [H]."""
        ends = self.table.lengths.index_select(0, self.rows).sub_(1).clamp_min_(0)  # an absent phrase matches nothing
        return ((self.matched >> ends) & 1).any(dim=1)

    def prefixes(self, followed: Tensor) -> Tensor:
        """Measure the longest prefix of each phrase and its sentence that is a suffix of its hypothesis, int64 [H, A].

        Args:
            followed: int64 [H, A], the prefixes that something follows, as bits.
        """
        return torch.frexp((self.matched & followed).double()).exponent.long()  # the number of binary digits

    def proposals(self) -> Proposals:
        """Collect what each phrase proposes next."""
        table = self.table
        queries, prefix, end, followed, inside = table.phrases.index_select(0, self.rows).unbind(dim=2)  # [H, A] each
        length = self.prefixes(followed)
        phrases, longest = table.following.shape[1:3]
        rows = self.rows.unsqueeze(1) * phrases + torch.arange(phrases, device=length.device)  # of all sentences
        following = table.following.view(-1, 2).index_select(0, (rows * longest + length).view(-1)).long()
        values, slots = following.view(*length.shape, 2).unbind(dim=2)
        kinds = (length >= prefix).long() + (length >= end)
        kinds = torch.where((length == 0) & self.unfinished.unsqueeze(1) & inside.bool(), CANNOT_BEGIN, kinds)
        states = table.state_of.index_select(0, (kinds * (MAX_SUBWORDS + 1) + length).view(-1)).view(length.shape)
        return Proposals(values, slots, states, self.covered.gather(1, queries).float())


def _states() -> Tensor:
    """Tabulate the state, int64, by kind and matching subwords.

    Kinds are 0: before its first letter, 1: begun, 2: written in full, and CANNOT_BEGIN.
    """
    lengths = torch.arange(MAX_SUBWORDS + 1)
    begun, written = (
        first - 1 + torch.searchsorted(torch.tensor(bounds), lengths.clamp_min(1), right=True)
        for first, bounds in ((1, BEGUN_AFTER), (WRITTEN, FOLLOWED_AFTER))
    )
    return torch.cat([torch.zeros_like(lengths), begun, written, torch.full_like(lengths, BARRED)])


def _number_distinct(ordered: Tensor, sentences: Tensor) -> Tensor:
    """Number the distinct values of each sentence in sorted [N], from 1, int32 [N]."""
    changes = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (1, 0)).long().cumsum(dim=0)
    first = torch.searchsorted(sentences, sentences)
    return (1 + changes - changes[first]).int()
