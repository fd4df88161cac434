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

import numpy as np
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


class FlatPhrases(NamedTuple):
    """C phrases with what follows each in its sentence; N subwords in all."""

    tokens: np.ndarray  # int32 [N], above 0, which is a special one; phrase after phrase
    extents: np.ndarray  # int64 [C], subwords of each with what follows it, at least 1
    lengths: np.ndarray  # int64 [C], of the phrase
    prefixes: np.ndarray  # int64 [C], subwords up to and with the first that has a letter or digit: then it has begun
    queries: np.ndarray  # int64 [C], which source phrase of the sentence it was retrieved for
    scores: np.ndarray  # fp32 [C], similarities


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    lengths: Tensor  # int64 [B, A]
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    # Of each phrase, int64 [B, A, 6]: `queries`; the length of the prefix that begins it; its own length; the prefixes that
    # something follows, as bits; 1 where its first subword continues an unfinished word; its place in
    # `following`, whose last stands for no phrase.
    phrases: Tensor
    # All N subwords, phrase after phrase, and a 0, int32 [N + 1, 2]: the token, and its slot among the distinct tokens of
    # the sentence, from 1, up to D.
    following: Tensor
    # The same sorted by sentence * SENTENCE + token, and a last one that equals none: int64 [N + 1]; and of each its phrase,
    # which of its subwords it is, whether the phrase ends there, and 1 where it begins a phrase and goes on with a word that
    # is not finished: int32 [N + 1, 4].
    subwords: Tensor
    at_subword: Tensor
    # What phrases begin with, int64 [3, B, F]: the token, its slot, and 1 where it continues an unfinished word.
    openings: Tensor
    opened: Tensor  # int64 [2, B, P], pairs of an opening and a source phrase, some phrase of which it is
    pairs: Tensor  # int64 [B, A], the pair of each phrase
    state_of: Tensor  # int64, by kind and number of matching subwords; see `_states`
    unfinished: Tensor  # bool [V], of each token, whether a word may continue after it
    most_equal: int  # R, of the subwords of a sentence
    most_distinct: int  # D, of a sentence
    most_queries: int  # Q

    @classmethod
    def of(cls, counts: np.ndarray, phrases: FlatPhrases, borders: WordBorders) -> PhraseTable:
        """Make a table on the CPU.

        Args:
            counts: int64 [B], phrases of each sentence.
            phrases: of all sentences, in order.
            borders: of the target dictionary.
        """
        size, most, count = len(counts), max(1, int(counts.max(initial=0))), len(phrases.lengths)
        rows = np.repeat(np.arange(size), counts)  # the sentence of each
        lanes = np.arange(count) - np.repeat(counts.cumsum() - counts, counts)
        first = phrases.extents.cumsum() - phrases.extents
        owners = np.repeat(np.arange(count), phrases.extents)  # the phrase of each subword
        places = np.arange(len(owners)) - first[owners]  # which of its subwords
        order = _order(rows[owners], phrases.tokens)
        codes = (rows[owners] * SENTENCE + phrases.tokens)[order]
        slots = np.empty(len(owners), np.int64)
        slots[order] = _number_distinct(codes, np.searchsorted(codes, np.arange(size) * SENTENCE))
        inside = borders.going_on[phrases.tokens[first]]
        at_subword = np.stack(
            [lanes[owners], places, places + 1 == phrases.lengths[owners], inside[owners] & (places == 0)]
        )
        openings, opened, pairs = _openings(rows, slots[first], phrases.queries, size)
        beginning = first[openings[1]]

        def by_lane(column: np.ndarray, fill: int = 0) -> Tensor:
            """[C] -> [B, A]"""
            placed = np.full((size, most), fill, column.dtype)
            placed[rows, lanes] = column
            return torch.from_numpy(placed)

        queries, lengths = by_lane(phrases.queries), by_lane(phrases.lengths)
        followed = (1 << (phrases.extents - 1)) - 1
        others = (phrases.prefixes, phrases.lengths, followed, inside.astype(np.int64))
        of_phrases = [queries, *map(by_lane, others), by_lane(first, len(owners))]
        return cls(
            lengths, queries, by_lane(phrases.scores), torch.stack(of_phrases, dim=2),
            torch.from_numpy(np.append(np.stack([phrases.tokens, slots]), [[0], [0]], axis=1).astype(np.int32).T.copy()),
            torch.from_numpy(np.append(codes, size * SENTENCE)),
            torch.from_numpy(np.append(at_subword[:, order], np.zeros((4, 1), np.int64), axis=1).astype(np.int32).T.copy()),
            _padded(openings[0], size, phrases.tokens[beginning], slots[beginning], inside[openings[1]]),
            _padded(opened[0], size, *opened[1:]), by_lane(pairs), _states(), torch.from_numpy(borders.unfinished),
            int(np.diff(np.flatnonzero(np.diff(codes, prepend=-1, append=-1))).max(initial=1)),
            int(slots.max(initial=0)), 1 + int(phrases.queries.max(initial=0)),
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


class Begun(NamedTuple):
    """The phrases that have begun after each of H hypotheses, R at most."""

    lanes: Tensor  # int64 [H, R], which of the A phrases of the sentence
    there: Tensor  # bool [H, R], whether there is one
    values: Tensor  # int64 [H, R], the next token
    slots: Tensor  # int64 [H, R], see `Proposals`
    states: Tensor  # int64 [H, R], of STATES


class PhraseState:
    """How far each hypothesis is in each phrase.

    Args:
        table: phrases of the sentences.
        rows: int64 [H], the sentence of each hypothesis.
    """

    def __init__(self, table: PhraseTable, rows: Tensor) -> None:
        self.table, self.rows = table, rows
        # Bit m: the last m + 1 tokens begin the phrase.
        self._matched = rows.new_zeros(len(rows), table.lengths.size(1))
        self._origins = torch.arange(len(rows), device=rows.device)  # the row of `_matched` of each hypothesis
        # Hypotheses, phrases, and which of their subwords the last token is, of a prefix that matches; or else -1: int64 [M].
        self._found = rows[:0], rows[:0], rows[:0]
        self.covered = rows.new_zeros(len(rows), table.most_queries)  # 1: one of its phrases was written in full
        self.unfinished = rows.new_zeros(len(rows), dtype=torch.bool)  # whether the last token's word may continue

    @property
    def matched(self) -> Tensor:
        """The prefixes of each phrase that each hypothesis ends with, as bits, int64 [H, A]."""
        return self._matched.index_select(0, self._origins)

    def reorder(self, order: Tensor, same_sentences: bool = False) -> PhraseState:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was.

        Args:
            same_sentences: whether each hypothesis i remains one of its sentence, so that `rows` can be the same tensor.
        """
        other = copy.copy(self)
        other.rows = self.rows if same_sentences else self.rows.index_select(0, order)
        other._origins, other.covered, other.unfinished = (
            part.index_select(0, order) for part in (self._origins, self.covered, self.unfinished)
        )
        return other

    def advance(self, tokens: Tensor) -> None:
        """Follow the token that each hypothesis, int64 [H], has generated.

        All prefixes of all phrases are followed at once, each as a bit (the Shift-And algorithm of Baeza-Yates & Gonnet). No
        phrase begins inside a word.
        """
        table, phrases, queries = self.table, self._matched.size(1), self.covered.size(1)
        hypotheses, places, valid = self._find(tokens)
        lanes, subword, ends, begins_inside = table.at_subword.index_select(0, places).long().unbind(dim=1)
        barred = begins_inside.bool() & self.unfinished.index_select(0, hypotheses)
        before = self._matched.view(-1).index_select(0, self._origins.index_select(0, hypotheses) * phrases + lanes)
        matches = ((before << 1) | 1) & (valid << subword).masked_fill(barred, 0)
        found = torch.stack([hypotheses, lanes, torch.where(matches != 0, subword, -1), ends, matches])
        if may_ask(tokens.device):
            found = found[:, matches != 0]  # few
        hypotheses, lanes, subword, ends, matches = found
        self._matched = self._matched.new_zeros(len(tokens), phrases)
        self._matched.view(-1).scatter_add_(0, hypotheses * phrases + lanes, matches)
        self._origins = torch.arange(len(tokens), device=tokens.device)
        self._found = hypotheses, lanes, subword
        of_queries = table.queries.view(-1).index_select(0, self.rows.index_select(0, hypotheses) * phrases + lanes)
        written = ends * (matches != 0)
        self.covered.view(-1).scatter_reduce_(0, hypotheses * queries + of_queries, written, "amax")
        self.unfinished = table.unfinished.index_select(0, tokens)

    def _find(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the subwords of phrases that equal the token of each hypothesis.

        Returns:
            M times a hypothesis, the place of a subword among those of the table, and whether it is equal, 0 or 1: int64 [M]
            each. All are equal where the device may be asked how many there are; else there are R of each hypothesis.
        """
        table, codes = self.table, self.rows * SENTENCE + tokens
        hypotheses, first = torch.arange(len(codes), device=codes.device), torch.searchsorted(table.subwords, codes)
        if may_ask(codes.device):
            counts = torch.searchsorted(table.subwords, codes, right=True) - first
            hypotheses = hypotheses.repeat_interleave(counts)
            shifts = (first - counts.cumsum(dim=0) + counts).index_select(0, hypotheses)
            places = torch.arange(len(hypotheses), device=codes.device) + shifts
            return hypotheses, places, torch.ones_like(places)
        places = first.unsqueeze(1) + torch.arange(table.most_equal, device=codes.device)
        places = places.clamp_max_(len(table.subwords) - 1).view(-1)
        hypotheses = hypotheses.unsqueeze(1).expand(-1, table.most_equal).reshape(-1)
        equal = table.subwords.index_select(0, places) == codes.index_select(0, hypotheses)
        return hypotheses, places, equal.long()

    def ended(self) -> Tensor:
        """Tell whether the last token of each hypothesis was the last of a phrase, bool [H]."""
        ends = self.table.lengths.index_select(0, self.rows).sub_(1).clamp_min_(0)  # an absent phrase matches nothing
        return ((self.matched >> ends) & 1).any(dim=1)

    def begun(self) -> Begun:
        """Collect the phrases that have begun, each once, after `advance` or before anything was written; see `may_ask`."""
        table, phrases = self.table, self._matched.size(1)
        hypotheses, lanes, subword = self._found
        of_lanes = table.phrases.view(-1, table.phrases.size(2)).index_select(
            0, self.rows.index_select(0, hypotheses) * phrases + lanes
        )
        matched = self._matched.view(-1).index_select(0, hypotheses * phrases + lanes)
        lengths = _binary_digits(matched & of_lanes[:, 3])
        there = (lengths > 0) & (lengths == subword + 1)  # of several equal subwords of a phrase the last that matches
        kinds = (lengths >= of_lanes[:, 1]).long() + (lengths >= of_lanes[:, 2])
        states = table.state_of.index_select(0, kinds * (MAX_SUBWORDS + 1) + lengths)
        values, slots = table.following.index_select(0, of_lanes[:, 5] + lengths).long().unbind(dim=1)
        columns = torch.stack([lanes, values, slots, states], dim=1)
        hypotheses, columns = hypotheses[there], columns[there]
        counts = torch.bincount(hypotheses, minlength=len(self.rows))
        at = torch.arange(len(hypotheses)) - (counts.cumsum(dim=0) - counts).index_select(0, hypotheses)
        laid = columns.new_zeros(4, len(self.rows), int(counts.max()) if len(counts) else 0)
        laid[:, hypotheses, at] = columns.T
        return Begun(laid[0], torch.arange(laid.size(2)) < counts.unsqueeze(1), *laid[1:])

    def prefixes(self, followed: Tensor) -> Tensor:
        """Measure the longest prefix of each phrase and its sentence that is a suffix of its hypothesis, int64 [H, A].

        Args:
            followed: int64 [H, A], the prefixes that something follows, as bits.
        """
        return _binary_digits(self.matched & followed)

    def proposals(self) -> Proposals:
        """Collect what each phrase proposes next."""
        table = self.table
        of_rows = table.phrases.index_select(0, self.rows)
        queries, prefix, end, followed, inside, first = of_rows.unbind(dim=2)  # [H, A] each
        length = self.prefixes(followed)
        following = table.following.index_select(0, (first + length).view(-1)).long()
        values, slots = following.view(*length.shape, 2).unbind(dim=2)
        kinds = (length >= prefix).long() + (length >= end)
        kinds = torch.where((length == 0) & self.unfinished.unsqueeze(1) & inside.bool(), CANNOT_BEGIN, kinds)
        states = table.state_of.index_select(0, (kinds * (MAX_SUBWORDS + 1) + length).view(-1)).view(length.shape)
        return Proposals(values, slots, states, self.covered.gather(1, queries).float())


def may_ask(device: torch.device) -> bool:
    """Check whether a step may query sizes: a CPU has them, a GPU would have to be waited for."""
    return device.type == "cpu"


def _binary_digits(numbers: Tensor) -> Tensor:
    """Count the binary digits of int64 below 2^MAX_SUBWORDS."""
    return torch.frexp(numbers.double()).exponent.long()


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


def _order(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Sort subwords [N] by sentence and token, equal ones in their order; narrow numbers are sorted in linear time."""
    narrow = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32
    order = tokens.astype(narrow).argsort(kind="stable")
    return order[rows[order].astype(np.uint16 if rows.max(initial=0) < 1 << 16 else np.int32).argsort(kind="stable")]


def _number_distinct(ordered: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Number the distinct values of each sentence in sorted [N], from 1.

    Args:
        begins: [B], where the values of each sentence begin.
    """
    changes = np.cumsum(np.diff(ordered, prepend=-1) != 0)  # from 1
    before = np.append(0, changes)[begins]  # of the sentences before
    return changes - np.repeat(before, np.diff(np.append(begins, len(ordered))))


def _openings(
    rows: np.ndarray, slots: np.ndarray, queries: np.ndarray, sentences: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Group C phrases by what they begin with, and by source phrase.

    Args:
        rows: [C], the sentence of each, never falling.
        slots: [C], of its first token.
        queries: [C].

    Returns:
        Of the openings the sentence and one phrase; of the pairs the sentence, the opening and the source phrase; of each
        phrase its pair. Openings and pairs are numbered in each sentence from 0.
    """
    width = 1 + int(slots.max(initial=0)), 1 + int(queries.max(initial=0))
    found, some, opening = np.unique(rows * width[0] + slots, return_index=True, return_inverse=True)
    paired, pair = np.unique(opening * width[1] + queries, return_inverse=True)
    of_opening, of_pair = found // width[0], found[paired // width[1]] // width[0]
    first_opening, first_pair = (np.searchsorted(of, np.arange(sentences)) for of in (of_opening, of_pair))
    pairs = of_pair, paired // width[1] - first_opening[of_pair], paired % width[1]
    return (of_opening, some), pairs, pair - first_pair[rows]


def _padded(rows: np.ndarray, sentences: int, *columns: np.ndarray) -> Tensor:
    """Lay out columns, each [n], by sentence, [n] and never falling: int64 [columns, B, most], 0 where there are fewer."""
    first = np.searchsorted(rows, np.arange(sentences))
    at = np.arange(len(rows)) - first[rows]
    placed = np.zeros((len(columns), sentences, 1 + int(at.max(initial=0))), np.int64)
    placed[:, rows, at] = np.stack(columns)
    return torch.from_numpy(placed)
