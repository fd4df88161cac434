"""What retrieved phrases propose as the next token, and how much each proposal counts.

After a hypothesis, phrase a proposes one token v_a, its first or what continues it. With s_a its similarity,
q the source phrase it was retrieved for, i its state (`STATES`: it may begin, or has begun) and v* the model's
likeliest token, its vote is

    u_a = w1 s_a + w2 (s_a - max over q of s) + b_i + c_i log(p_NMT(v_a) / p_NMT(v*)) + g_i l_q
          + d [i = may begin, q is covered]
    u_0 = n0 + n1 p_NMT(v*)
    P(a) = exp(u_a) / (exp(u_0) + sum over b of exp(u_b))

and the rest is the model's. A source phrase is covered once one of its phrases was written in full. l_q is
how much of the model's attention it has, see `looked_at`; 0 where that is not known. Where
p_NMT(v_a) is further than --phrases-consent below p_NMT(v*), in nats, u_a is -inf.

Pure tensor maths, without a loop over hypotheses or phrases, and on a GPU without a host round trip. Letters:
B sentences, H hypotheses, A phrases of a sentence, Q source phrases they were retrieved for, N subwords of
all phrases, D distinct subwords of a sentence, F distinct first ones, R equal subwords, V target vocabulary.
Rows of a table are taken with `index_select`, which copies them whole; `[rows]` would look up each number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.mixture import ModelView
from fairseq_ccpr.device import sync_is_free, to_device, to_host
from fairseq_ccpr.storage.fingerprint import of_parameters, short
from fairseq_ccpr.text.decoder_subwords import WordBorders

# of a phrase: prefixes that match are bits of a number, which float64 must hold
MAX_SUBWORDS = 48
NO_TOKEN = -1
SENTENCE = 2**32  # more than any token
# Of the log probability of a token to that of the likeliest: less is as impossible. --phrases-consent has it
# as its default.
LEAST_RATIO = -12.0
LEAST_SHARE = 0.02  # of the attention, is added to that of each source phrase
LEAST_LEFT = 1e-6  # of a sum over phrases: less is what rounding leaves of one whose phrases have all begun
# How far a phrase is after a hypothesis: its state. By the subwords that match:
BEGUN_AFTER = (1, 2, 3, 4, 6)  # so many at least, of the phrase
STATES = ("may begin", *(f"begun: {n} or more" for n in BEGUN_AFTER))
# the state of a phrase that may not begin, since a word is not finished; it proposes nothing
BARRED = len(STATES)
CANNOT_BEGIN = 2  # a kind of phrase, see `_states`


class Candidates(NamedTuple):
    """C retrieved phrases of a sentence as the decoder would generate them."""

    tokens: np.ndarray  # int32 [C, L], above 0, which is a special one; NO_TOKEN after the last
    lengths: np.ndarray  # int64 [C]
    queries: np.ndarray  # int64 [C], the source phrase it was retrieved for
    ranks: np.ndarray  # int64 [C], which of those retrieved for that source phrase it is
    scores: np.ndarray  # fp32 [C], similarities

    @classmethod
    def of(
        cls, written: Sequence[list[int]], queries: np.ndarray, ranks: np.ndarray, scores: np.ndarray
    ) -> Candidates:
        lengths = np.array([len(ids) for ids in written], np.int64)
        tokens = np.full((len(written), int(lengths.max(initial=1))), NO_TOKEN, np.int32)
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = [i for ids in written for i in ids]
        return cls(tokens, lengths, queries, ranks, scores)


@dataclass(frozen=True)
class PhraseTable:
    """The candidate phrases of B sentences; where a sentence has fewer than A, the rest have length 0."""

    lengths: Tensor  # int64 [B, A]
    queries: Tensor  # int64 [B, A], which source phrase it was retrieved for, below Q
    scores: Tensor  # fp32 [B, A], similarities
    # Of each phrase, int64 [B, A, 5]: `queries`; the length of the prefix that begins it, which ends with its
    # first letter or digit; the prefixes that something follows, as bits; 1 where its first subword continues
    # an unfinished word; its place in `following`, whose last stands for no phrase.
    phrases: Tensor
    # All N subwords, phrase after phrase, and a 0, int32 [N + 1, 2]: the token, and its slot among the
    # distinct tokens of the sentence, from 1, up to D.
    following: Tensor
    # The same sorted by sentence * SENTENCE + token, and a last one that equals none: int64 [N + 1]; and of
    # each its phrase, which of its subwords it is, whether the phrase ends there, and 1 where it begins a
    # phrase and continues an unfinished word: int32 [N + 1, 4].
    codes: Tensor
    subwords: Tensor
    # What phrases begin with, int64 [3, B, F]: the token, its slot, and 1 where it continues an unfinished
    # word.
    openings: Tensor
    opened: Tensor  # int64 [2, B, P], pairs of an opening and a source phrase, some phrase of which it is
    pairs: Tensor  # int64 [B, A], the pair of each phrase
    # fp32 [B, 1 + Q, S], 1 for subwords of the source that are words', and for those of each source phrase;
    # [B, 0, 0] where they are not known, see `covering_sources`
    covering: Tensor
    states: Tensor  # int64, by kind and number of matching subwords; see `_states`
    unfinished: Tensor  # bool [V], of each token, whether a word may continue after it
    most_equal: int  # R, of the subwords of a sentence
    most_distinct: int  # D, of a sentence
    most_queries: int  # Q

    @classmethod
    def of(cls, batch: Sequence[Candidates], letters: np.ndarray, borders: WordBorders) -> PhraseTable:
        """Make a table on the CPU; `letters` [V] are tokens with a letter or digit."""
        counts = np.array([len(one.lengths) for one in batch])
        lengths, queries, _, scores = map(np.concatenate, zip(*(one[1:] for one in batch)))
        tokens = np.concatenate([one.tokens[one.tokens != NO_TOKEN] for one in batch])
        size, most, count = len(counts), max(1, int(counts.max(initial=0))), len(lengths)
        rows = np.repeat(np.arange(size), counts)  # the sentence of each phrase
        lanes = np.arange(count) - np.repeat(counts.cumsum() - counts, counts)  # its place in the sentence
        first = lengths.cumsum() - lengths
        owners = np.repeat(np.arange(count), lengths)  # the phrase of each subword
        places = np.arange(len(owners)) - first[owners]  # which of its subwords
        order = _order(rows[owners], tokens)
        codes = (rows[owners] * SENTENCE + tokens)[order]
        # numbered from 1, through all sentences
        distinct = np.append(0, np.cumsum(np.diff(codes, prepend=-1) != 0))
        before = distinct[np.searchsorted(codes, np.arange(size) * SENTENCE)]
        slots = np.empty(len(owners), np.int64)
        slots[order] = distinct[1:] - before[rows[owners[order]]]
        lettered = np.append(letters[tokens].nonzero()[0], len(tokens))
        begun = lettered[np.searchsorted(lettered, first)] - first
        prefixes = np.where(begun < lengths, begun + 1, lengths)
        inside = borders.going_on[tokens[first]]
        begins_inside = inside[owners] & (places == 0)
        subwords = lanes[owners], places, places + 1 == lengths[owners], begins_inside
        # Phrases grouped by what they begin with, and by source phrase, numbered in each sentence from 0.
        begun_with = rows * SENTENCE + slots[first]
        opening_codes, some, opening = np.unique(begun_with, return_index=True, return_inverse=True)
        pair_codes, pair = np.unique(opening * SENTENCE + queries, return_inverse=True)
        opening_rows, pair_openings = opening_codes // SENTENCE, pair_codes // SENTENCE
        pair_rows = opening_rows[pair_openings]
        first_opening, first_pair = (_begins(one, size) for one in (opening_rows, pair_rows))

        def by_lane(column: np.ndarray, fill: int = 0) -> Tensor:
            """[C] -> [B, A]"""
            placed = np.full((size, most), fill, column.dtype)
            placed[rows, lanes] = column
            return torch.from_numpy(placed)

        followed = (1 << (lengths - 1)) - 1
        columns = [by_lane(one) for one in (queries, prefixes, followed, inside.astype(np.int64))]
        columns.append(by_lane(first, len(owners)))
        return cls(
            by_lane(lengths),
            columns[0],
            by_lane(scores),
            torch.stack(columns, dim=2),
            _ended(tokens, slots),
            torch.from_numpy(np.append(codes, size * SENTENCE)),
            _ended(*(column[order] for column in subwords)),
            _by_row(opening_rows, size, tokens[first[some]], slots[first[some]], inside[some]),
            _by_row(pair_rows, size, pair_openings - first_opening[pair_rows], pair_codes % SENTENCE),
            by_lane(pair - first_pair[rows]),
            torch.empty(size, 0, 0),
            _states(),
            torch.from_numpy(borders.unfinished),
            int(np.diff(np.flatnonzero(np.diff(codes, prepend=-1, append=-1))).max(initial=1)),
            int(slots.max(initial=0)),
            1 + int(queries.max(initial=0)),
        )

    def covering_sources(self, known: Sequence[np.ndarray | None]) -> PhraseTable:
        """Return it with what each source phrase covers, bool [1 + Q, S] of each sentence or None."""
        each = [one[: 1 + self.most_queries] for one in known if one is not None]
        if len(each) < len(self.lengths):
            return self
        made = torch.zeros(len(each), 1 + self.most_queries, each[0].shape[1])
        for row, one in zip(made, each):
            row[: len(one)] = torch.from_numpy(one)
        return replace(self, covering=made)

    def to(self, device: torch.device) -> PhraseTable:
        """Move all tensors to another device, or back to the CPU, in one copy."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        move = to_host if device.type == "cpu" else partial(to_device, device=device)
        moved: dict[str, Any] = dict(zip(tensors, move(list(tensors.values()))))
        return replace(self, **moved)


class Continuation(NamedTuple):
    """The distribution p_phr of the next token, sparse: A tokens for each of H hypotheses."""

    values: Tensor  # int64 [H, A]
    # fp32 [H, A], log p_phr, duplicates merged: equal tokens all have the token's whole probability
    log_probs: Tensor
    mass: Tensor  # fp32 [H], Z, what all phrases have against the model; 0 where no phrase proposes anything
    going: Tensor  # fp32 [H], the part of Z of phrases that have begun


class Proposals(NamedTuple):
    """What each of A phrases proposes after each of H hypotheses, [H, A], however much the phrases weigh."""

    values: Tensor  # int64, the token
    slots: Tensor  # int64, of the token among the distinct ones of the sentence
    states: Tensor  # int64, of STATES, or BARRED
    covered: Tensor  # fp32, 1 where a phrase of the same source phrase was written in full
    looked: Tensor | None = None  # fp32, l of its source phrase; None: not known

    def continuation(self, votes: Tensor, most_distinct: int) -> Continuation:
        """Merge votes, fp32 [H, A], see `PhraseVotes`: Z = sum of all; p_phr(v) = sum of those for v / Z."""
        sums = votes.new_zeros(len(votes), 1 + most_distinct).scatter_add(1, self.slots, votes)
        mass = votes.sum(dim=1)
        tiny = torch.finfo(mass.dtype).tiny
        merged = sums.gather(1, self.slots) / mass.clamp_min(tiny).unsqueeze(1)
        # a CPU's log of 0 is slow
        log_probs = merged.clamp_min(tiny).log().masked_fill(merged == 0, float("-inf"))
        return Continuation(
            self.values, log_probs, mass, (votes * (self.states > 0)).sum(dim=1) / mass.clamp_min(tiny)
        )


class PhraseState:
    """How far each hypothesis is in each phrase.

    Args:
        rows: int64 [H], the sentence of each hypothesis.

    Attributes:
        covered: int64 [H, Q], 1 where a phrase of the source phrase was written in full.
        unfinished: bool [H], whether the last token's word may continue.
    """

    def __init__(self, table: PhraseTable, rows: Tensor) -> None:
        self.table, self.rows = table, rows
        # Bit m: the last m + 1 tokens begin the phrase.
        self._matched = rows.new_zeros(len(rows), table.lengths.size(1))
        # the row of `_matched` of each hypothesis
        self._origins = torch.arange(len(rows), device=rows.device)
        # Hypotheses, phrases, and which of their subwords the last token is, of the prefixes that match:
        # int64 [M].
        self._found = rows[:0], rows[:0], rows[:0]
        # the prior scores, and what `merged` computes of them once for `rows`
        self._openings: list[Tensor] = []
        self._covering: Tensor | None = None  # that of the table for `rows`
        self.covered = rows.new_zeros(len(rows), table.most_queries)
        self.unfinished = rows.new_zeros(len(rows), dtype=torch.bool)

    @property
    def matched(self) -> Tensor:
        """The prefixes of each phrase that each hypothesis ends with, as bits, int64 [H, A]."""
        return self._matched.index_select(0, self._origins)

    def reorder(self, order: Tensor, same_sentences: bool = False) -> PhraseState:
        """Follow the beam; with `same_sentences` `rows` stays the same tensor."""
        other = copy.copy(self)
        if not same_sentences:
            other.rows, other._openings, other._covering = self.rows.index_select(0, order), [], None
        other._origins, other.covered, other.unfinished = (
            part.index_select(0, order) for part in (self._origins, self.covered, self.unfinished)
        )
        return other

    def advance(self, tokens: Tensor) -> None:
        """Follow the token that each hypothesis, int64 [H], has generated.

        All prefixes of all phrases are followed at once, each as a bit (the Shift-And algorithm of
        Baeza-Yates & Gonnet). No phrase begins inside a word.
        """
        table, phrases, queries = self.table, self._matched.size(1), self.covered.size(1)
        hypotheses, places, valid = self._equal_subwords(tokens)
        lanes, subword, ends, begins_inside = table.subwords.index_select(0, places).long().unbind(dim=1)
        barred = begins_inside.bool() & self.unfinished.index_select(0, hypotheses)
        before = self._matched.view(-1).index_select(
            0, self._origins.index_select(0, hypotheses) * phrases + lanes
        )
        matches = ((before << 1) | 1) & (valid << subword).masked_fill(barred, 0)
        if sync_is_free(tokens.device):  # few match
            parts = torch.stack([hypotheses, lanes, subword, ends, matches])
            hypotheses, lanes, subword, ends, matches = parts[:, matches != 0]
        self._matched = self._matched.new_zeros(len(tokens), phrases)
        self._matched.view(-1).scatter_add_(0, hypotheses * phrases + lanes, matches)
        self._origins = torch.arange(len(tokens), device=tokens.device)
        self._found = hypotheses, lanes, subword
        covering = table.queries.view(-1).index_select(
            0, self.rows.index_select(0, hypotheses) * phrases + lanes
        )
        written = ends * (matches != 0)
        self.covered.view(-1).scatter_reduce_(0, hypotheses * queries + covering, written, "amax")
        self.unfinished = table.unfinished.index_select(0, tokens)

    def _equal_subwords(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hypotheses, places of subwords in the table, and 1 where it equals the token, int64 [M] each.

        All are equal where `sync_is_free`; else there are R of each hypothesis.
        """
        table, codes = self.table, self.rows * SENTENCE + tokens
        hypotheses, first = (
            torch.arange(len(codes), device=codes.device),
            torch.searchsorted(table.codes, codes),
        )
        if sync_is_free(codes.device):
            counts = torch.searchsorted(table.codes, codes, right=True) - first
            hypotheses = hypotheses.repeat_interleave(counts)
            shifts = (first - counts.cumsum(dim=0) + counts).index_select(0, hypotheses)
            places = torch.arange(len(hypotheses), device=codes.device) + shifts
            return hypotheses, places, torch.ones_like(places)
        places = first.unsqueeze(1) + torch.arange(table.most_equal, device=codes.device)
        places = places.clamp_max_(len(table.codes) - 1).view(-1)
        hypotheses = hypotheses.unsqueeze(1).expand(-1, table.most_equal).reshape(-1)
        equal = table.codes.index_select(0, places) == codes.index_select(0, hypotheses)
        return hypotheses, places, equal.long()

    def ended(self) -> Tensor:
        """Tell whether the last token of each hypothesis was the last of a phrase, bool [H]."""
        # an absent phrase matches nothing
        ends = self.table.lengths.index_select(0, self.rows).sub_(1).clamp_min_(0)
        return ((self.matched >> ends) & 1).any(dim=1)

    def looked(self, attention: Tensor | None) -> Tensor | None:
        """Compute l of each source phrase by the attention of the hypotheses, fp32 [H, S]: fp32 [H, Q]."""
        if attention is None:
            return None
        if self._covering is None:
            self._covering = self.table.covering.index_select(0, self.rows)
        looked = looked_at(self._covering, attention.unsqueeze(1))
        return looked.squeeze(1) if looked is not None else None

    def proposals(self, looked: Tensor | None = None) -> Proposals:
        """Collect what each phrase proposes; `looked` is of the source phrases, fp32 [H, Q]."""
        queries, prefix, followed, inside, first = self.table.phrases.index_select(0, self.rows).unbind(dim=2)
        length = _binary_digits(self.matched & followed)  # of the longest prefix with a next subword
        barred = (length == 0) & self.unfinished.unsqueeze(1) & inside.bool()
        values, slots, states = self._look_up(length, prefix, first, barred)
        looked = looked.gather(1, queries) if looked is not None else None
        return Proposals(values, slots, states, self.covered.gather(1, queries).float(), looked)

    def _look_up(
        self, length: Tensor, prefix: Tensor, first: Tensor, barred: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        kinds = (length >= prefix).long()
        if barred is not None:
            kinds = torch.where(barred, CANNOT_BEGIN, kinds)
        states = self.table.states.index_select(0, (kinds * (MAX_SUBWORDS + 1) + length).view(-1)).view(
            length.shape
        )
        following = self.table.following.index_select(0, (first + length).view(-1)).long()
        values, slots = following.view(*length.shape, 2).unbind(dim=-1)
        return values, slots, states

    def merged(
        self, prior: Tensor, votes: PhraseVotes, looked: Tensor | None = None
    ) -> tuple[Proposals, Tensor]:
        """Collect proposals and prior scores, [H, C], fewer where `sync_is_free`, of the same sum of votes.

        Phrases that may begin with the same token v are then one proposal: they have one state, and so the
        score

            log(sum over a of exp(w1 s_a + w2 (s_a - max over q of s) + g_0 l_q + d [q is covered]))
            + b_0 + c_0 log(p(v) / p(v*))

        together. The sum over the phrases of a source phrase q is that of the sentence less those that have
        begun. So a step costs what has begun and what may begin, and not A phrases: with 300 to 600 of these
        a third to a half less time.

        Args:
            prior: fp32 [B, A], see `PhraseVotes.prior`.
            votes: whose prior it is.
            looked: of the source phrases, fp32 [H, Q], see `looked`.
        """
        if not sync_is_free(self.rows.device):
            return self.proposals(looked), prior.index_select(0, self.rows)
        table, phrases = self.table, prior.size(1)
        if not self._openings or self._openings[0] is not prior:
            top = prior.amax(dim=1, keepdim=True)
            top = top.masked_fill(top == float("-inf"), 0)
            sums = top.new_zeros(table.opened.shape[1:]).scatter_add(1, table.pairs, (prior - top).exp())
            parts = *table.openings, *table.opened, top, sums
            self._openings = [prior, *(part.index_select(0, self.rows) for part in parts)]
        _, tokens, token_slots, inside, *_ = self._openings

        hypotheses, places, length = self._begun(phrases)
        queries, prefix, _, _, first = table.phrases.view(-1, 5).index_select(0, places).unbind(dim=1)
        values, slots, states = self._look_up(length, prefix, first)
        of_queries = hypotheses * table.most_queries + queries
        covered = self.covered.view(-1).index_select(0, of_queries).float()
        scores = prior.view(-1).index_select(0, places)
        may_begin = self._may_begin(hypotheses, places, scores, votes.opening(self.covered, looked))
        barred = BARRED * (inside.bool() & self.unfinished.unsqueeze(1))

        counts = torch.bincount(hypotheses, minlength=len(self.rows))
        ranks = torch.arange(len(hypotheses)) - (counts.cumsum(dim=0) - counts).index_select(0, hypotheses)
        width = int(counts.max()) if len(counts) else 0

        def joined(first: Tensor, others: Tensor, fill: float = 0) -> Tensor:
            """[H, F], [M] -> [H, C]"""
            laid = first.new_full((len(first), width), fill)
            laid[hypotheses, ranks] = others
            return torch.cat([first, laid], dim=1)

        each = joined(tokens, values), joined(token_slots, slots), joined(barred, states)
        none = torch.zeros_like(may_begin)  # where all is in their scores
        if looked is not None:
            looked = joined(none, looked.reshape(-1).index_select(0, of_queries))
        proposals = Proposals(*each, joined(none, covered), looked)
        return proposals, joined(may_begin, scores, float("-inf"))

    def _may_begin(self, hypotheses: Tensor, places: Tensor, scores: Tensor, opening: Tensor) -> Tensor:
        """Sum, as log, what may begin with each of F tokens once M phrases have begun: fp32 [H, F].

        Args:
            opening: see `PhraseVotes.opening`.
        """
        _, tokens, _, _, openings, query, top, sums = self._openings
        pairs = hypotheses * sums.size(1) + self.table.pairs.view(-1).index_select(0, places)
        begun = (scores - top.view(-1).index_select(0, hypotheses)).exp()
        left = sums.view(-1).index_add(0, pairs, begun, alpha=-1).view(sums.shape)
        left = torch.where(left > LEAST_LEFT * sums, left, 0.0)
        left *= opening.gather(1, query)
        left = left.new_zeros(tokens.shape).scatter_add(1, openings, left)
        may_begin = left.clamp_min(torch.finfo(left.dtype).tiny).log() + top
        return may_begin.masked_fill(left == 0, float("-inf"))

    def _begun(self, phrases: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find M phrases that have begun, once each: hypotheses, places, subwords that match, int64 [M].

        Of several equal subwords of a phrase it is the last that matches.
        """
        hypotheses, lanes, subword = self._found
        places = self.rows.index_select(0, hypotheses) * phrases + lanes
        matched = self._matched.view(-1).index_select(0, hypotheses * phrases + lanes)
        followed = self.table.phrases.view(-1, 5)[:, 2].index_select(0, places)
        length = _binary_digits(matched & followed)
        kept = length == subword + 1
        hypotheses, places, length = torch.stack([hypotheses, places, length])[:, kept]
        return hypotheses, places, length


class Consent(NamedTuple):
    """What the model says of the tokens that phrases propose at N tokens."""

    ratios: Tensor  # fp32 [N, A], log of p_NMT of the token to that of the likeliest, at least LEAST_RATIO
    best: Tensor  # fp32 [N], log p_NMT of the likeliest token

    @classmethod
    def of(cls, model: ModelView) -> Consent:
        return cls((model.neighbours - model.best.unsqueeze(1)).clamp_min(LEAST_RATIO), model.best)


class PhraseVotes(nn.Module):
    """The weights of the formula above.

    They start as trained for the demo's phrase encoder and model, on an office suite's help with its English
    text as memory.
    """

    barred: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.similarity = _weights(4.0, 9.3)  # w1, w2
        self.state = _weights(-6.4, -3.8, -2.5, -2.1, -2.1, -2.5)  # b
        self.consent = _weights(0.6, 0.4, 0.4, 0.4, 0.4, 0.1)  # c
        self.attention = _weights(*[0.0] * len(STATES))  # g
        self.covered = _weights(-1.9)  # d
        self.model = _weights(1.2, 0.8)  # n0, n1
        # Offset, consent and attention of a phrase that cannot begin.
        self.register_buffer("barred", torch.tensor([[float("-inf"), 0.0, 0.0]]), persistent=False)

    def prior(self, table: PhraseTable) -> Tensor:
        """Compute the part of u that no hypothesis changes, fp32 [B, A]; -inf where there is no phrase."""
        absent = table.lengths == 0
        scores = table.scores.masked_fill(absent, -1.0)
        best = scores.new_full((len(scores), table.most_queries), -1.0).scatter_reduce(
            1, table.queries, scores, "amax"
        )
        weighed = self.similarity[0] * scores + self.similarity[1] * (scores - best.gather(1, table.queries))
        return weighed.masked_fill(absent, float("-inf"))

    @property
    def covered_factor(self) -> Tensor:
        """What is left of a phrase's vote to begin once its source phrase is covered, fp32 [1]."""
        return self.covered.exp()

    @property
    def attentive(self) -> bool:
        """Whether the attention counts; a GPU is asked, and waited for."""
        return bool(self.attention.any())

    def opening(self, covered: Tensor, looked: Tensor | None) -> Tensor:
        """Compute what phrases of each source phrase count to begin, fp32 [H, Q], see `PhraseState`."""
        counts = torch.lerp(self.covered.new_ones(1), self.covered_factor, covered.float())
        return counts if looked is None else counts * (self.attention[0] * looked).exp()

    def forward(self, proposals: Proposals, consent: Consent, prior: Tensor) -> Tensor:
        """Compute P, fp32 [N, A], with a row of `prior` for each hypothesis."""
        weights = torch.cat([torch.stack([self.state, self.consent, self.attention], dim=1), self.barred])
        by_state = weights.index_select(0, proposals.states.view(-1))
        offset, consent_weight, attention = by_state.view(*proposals.states.shape, 3).unbind(dim=2)
        scores = prior + offset + consent_weight * consent.ratios
        if proposals.looked is not None:
            scores = scores + attention * proposals.looked
        scores = scores + self.covered * proposals.covered * (proposals.states == 0)
        model = self.model[0] + self.model[1] * consent.best.exp()
        return torch.cat([model.unsqueeze(1), scores], dim=1).softmax(dim=1)[:, 1:]

    def digest(self) -> str:
        return short(of_parameters(self.state_dict().items()))


def looked_at(covering: Tensor, attention: Tensor | None) -> Tensor | None:
    """Compute how much of the attention, fp32 [B, T, S], source phrases have: fp32 [B, T, Q], 0 for all.

    l_q = log((m_q + 0.02) / 1.02), where m_q is the part of what words have that the subwords of q have.

    Args:
        covering: see `PhraseTable`; the result is None where a source of candidates has none.

    >>> looked_at(torch.tensor([[[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]), torch.tensor([[[0.3, 0.1, 0.6]]])).exp()
    tensor([[[0.7549]]])
    """
    if attention is None or attention.size(2) != covering.size(2):
        return None
    words, phrases = (attention @ covering.transpose(1, 2)).tensor_split([1], dim=2)
    shares = phrases / words.clamp_min(torch.finfo(words.dtype).tiny)
    return ((shares + LEAST_SHARE) / (1 + LEAST_SHARE)).log()


def _begins(rows: np.ndarray, size: int) -> np.ndarray:
    """Find where each of B sentences begins in sentences [n] that never fall."""
    return np.searchsorted(rows, np.arange(size))


def _by_row(rows: np.ndarray, size: int, *columns: np.ndarray) -> Tensor:
    """Lay out columns [n], by sentences [n] that never fall: int64 [columns, B, most]."""
    ranks = np.arange(len(rows)) - _begins(rows, size)[rows]
    placed = np.zeros((len(columns), size, 1 + int(ranks.max(initial=0))), np.int64)
    placed[:, rows, ranks] = np.stack(columns)
    return torch.from_numpy(placed)


def _ended(*columns: np.ndarray) -> Tensor:
    """Put columns [N] beside one another, and zeros behind the last row: int32 [N + 1, columns]."""
    return torch.from_numpy(np.pad(np.stack(columns), ((0, 0), (0, 1))).astype(np.int32).T.copy())


def _weights(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def _binary_digits(numbers: Tensor) -> Tensor:
    return torch.frexp(numbers.double()).exponent.long()


def _states() -> Tensor:
    # By kind, of which 0 is before its first letter, 1 begun, 2 barred, and by matching subwords.
    lengths = torch.arange(MAX_SUBWORDS + 1)
    begun = torch.searchsorted(torch.tensor(BEGUN_AFTER), lengths.clamp_min(1), right=True)
    return torch.cat([torch.zeros_like(lengths), begun, torch.full_like(lengths, BARRED)])


def _order(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Sort subwords [N] by sentence and token, stably; narrow numbers are sorted in linear time."""
    narrow = np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32
    order = tokens.astype(narrow).argsort(kind="stable")
    narrow = np.uint16 if rows.max(initial=0) < 1 << 16 else np.int32
    return order[rows[order].astype(narrow).argsort(kind="stable")]
