"""The text part of a datastore: how often n-grams of one model's target subwords occur in a text.

    tokens.npy           uint16 or int32 [T]   the sentences, equal ones once, each with its end
    offsets.npy          int64 [S + 1]         where each begins
    contexts.npy         int64 [C]             hashes of contexts (0 to n - 1 tokens), ascending
    contexts-index.npy   int32 or int64 [2^b + 1]   where hashes with each prefix of b bits begin
    following.npy        uint32 [C, 4]         tokens and distinct tokens after each: in the text, in general text
    grams.npy            int64 [G]             n-grams: number of the context * V + token, ascending
    counts.npy           uint32 [G, 2]         how often each occurs: in the text, in general text

General text is counted after the contexts of the text alone. N-grams of one context stand together, since the
likely tokens of a hypothesis are looked up together. Letters: H hypotheses, N tokens asked about, n the
order, V the vocabulary's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_ccpr.datastore.manifest import TextSection
from fairseq_ccpr.datastore.opened_part import OpenedPart
from fairseq_ccpr.datastore.parts import (
    CONTEXTS,
    COUNTS,
    FOLLOWING,
    GRAMS,
    PREFIXES,
    TEXT_OFFSETS,
    TEXT_TOKENS,
)
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.index_plan import CPU, room
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.fingerprint import short

ORDER = 5
LOOKED_UP = CONTEXTS, PREFIXES, FOLLOWING, GRAMS, COUNTS
SEARCHED = 1 << 26  # tokens that an explanation looks through
LANGUAGE = "target_language"  # among the fingerprints, where the model is multilingual
GENERAL = "general"  # among them, where there are general counts
# Odd multipliers of the hash of the tokens 1, 2, ... places back.
MULTIPLIERS = np.random.Generator(np.random.PCG64(44)).integers(2**62, size=17, dtype=np.int64) * 2 + 1


def context_hashes(hypotheses: Tensor, multipliers: Tensor) -> Tensor:
    """Hash the last 0, 1, ... n - 1 tokens of hypotheses, int64 [H, t] -> [H, min(n, t + 1)].

    Hypotheses begin with the end of a sentence, and no context is longer than a hypothesis.

    Args:
        multipliers: int64 [n - 1], on their device.
    """
    last = hypotheses[:, max(0, hypotheses.size(1) - len(multipliers)) :].flip(1) + 1
    return pad((last * multipliers[: last.size(1)]).cumsum(1), (1, 0))


class Hashes:
    """Distinct hashes, and where each stands.

    Args:
        hashes: int64 [M], ascending.
        index: int64 [2^b + 1], where hashes with each prefix of b bits begin.
        bucket: most hashes with one prefix.
    """

    def __init__(self, hashes: Tensor, index: Tensor, bucket: int) -> None:
        self.hashes, self.index, self.bucket, self.prefixes = hashes, index, bucket, len(index) - 1

    @classmethod
    def of(cls, hashes: np.ndarray) -> Hashes:
        prefixes = 1 << prefix_bits(len(hashes))
        index = prefix_begins(hashes, np.arange(prefixes + 1), prefixes)
        return cls(torch.from_numpy(hashes), torch.from_numpy(index), int(np.diff(index).max()))

    def find(self, hashes: Tensor) -> Tensor:
        """Find hashes, int64 [N] -> int64 [N]; -1 where they are missing. Nothing is asked of the device."""
        prefix = (hashes >> (65 - self.prefixes.bit_length())) + self.prefixes // 2
        low, high = (self.index.index_select(0, one).long() for one in (prefix, prefix + 1))
        last = len(self.hashes) - 1
        for _ in range(self.bucket.bit_length()):  # a binary search among hashes of one prefix
            middle = (low + high) >> 1
            below = self.hashes.index_select(0, middle.clamp_max_(last)) < hashes
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        low.clamp_max_(last)
        return low.masked_fill_(self.hashes.index_select(0, low) != hashes, -1)

    def to(self, device: torch.device) -> Hashes:
        return Hashes(self.hashes.to(device), self.index.to(device), self.bucket)


def prefix_bits(size: int) -> int:
    """Choose b, so that a prefix has one or two of so many hashes."""
    return max(1, size.bit_length() - 1)


def prefix_begins(hashes: np.ndarray, numbers: np.ndarray, prefixes: int) -> np.ndarray:
    """Find where sorted hashes with some of 2^b prefixes begin, int64 [n]; beyond the last, at the end."""
    bits = prefixes.bit_length() - 1
    bounds = (np.minimum(numbers, prefixes - 1) - prefixes // 2) << (64 - bits)
    return np.where(numbers < prefixes, np.searchsorted(hashes, bounds), len(hashes)).astype(np.int64)


class Found(NamedTuple):
    """What two texts say after hypotheses."""

    text: Tensor  # fp32 [N], log p_text of tokens
    general: Tensor  # fp32 [N], log p_general of them
    length: Tensor  # int64 [H], tokens of the longest context that the text has
    seen: Tensor  # int64 [H, 2], how many tokens, and distinct tokens, follow it there


class Counts:
    """Counts of n-grams, and probabilities by interpolated Witten-Bell smoothing.

    p_k(v) = (count(c_k v) + types(c_k) p_{k-1}(v)) / (tokens(c_k) + types(c_k)) for the last k tokens c_k,
    where p_{-1}(v) = 1 / V; a context that does not occur, and all longer ones, change nothing.

    Args:
        contexts: hashes of the contexts.
        following: [C, 4], tokens and types after each, in the text and in general text.
        grams: int64 [G], number of the context * V + token, ascending.
        counts: [G, 2], in both.
        order: n.
        words: V, tokens that have a probability.
        more: counts to be added to those, of what was learned, and below zero of what that supersedes.
    """

    def __init__(
        self,
        contexts: Hashes,
        following: Tensor,
        grams: Tensor,
        counts: Tensor,
        order: int,
        words: int,
        more: tuple[Counts, ...] = (),
    ) -> None:
        self.contexts, self.following, self.grams, self.counts = contexts, following, grams, counts
        self.order, self.words, self.more = order, words, more
        self.multipliers = torch.from_numpy(MULTIPLIERS[1:order]).to(grams.device)

    def to(self, device: torch.device) -> Counts:
        rows = self.following, self.counts
        following, counts = rows if self.grams.device == device else (_signed(one).to(device) for one in rows)
        contexts, grams = self.contexts.to(device), self.grams.to(device)
        more = tuple(one.to(device) for one in self.more)
        return Counts(contexts, following, grams, counts, self.order, self.words, more)

    def plus(self, added: list[np.ndarray], end: int, removed: Iterable[np.ndarray] = ()) -> Counts:
        """Return these with sentences added, and counted ones taken away, each int64 [L] with its end."""
        signed = [(1, added), (-1, list(removed))]
        parts = [
            (sign, Grams.of(np.concatenate(some), np.cumsum([0, *map(len, some)]), end, self.order))
            for sign, some in signed
            if some
        ]
        if not parts:
            return self
        contexts, numbers = np.unique(
            np.concatenate([grams.contexts for _, grams in parts]), return_inverse=True
        )
        tokens = np.concatenate([grams.tokens for _, grams in parts])
        distinct, places = np.unique(numbers * self.words + tokens, return_inverse=True)
        change = np.bincount(places, np.concatenate([sign * grams.counts for sign, grams in parts])).astype(
            np.int64
        )
        owners = distinct // self.words
        before = self._counted(contexts[owners], distinct % self.words)
        change = np.maximum(change, -before)
        types = (before + change > 0).astype(np.int64) - (before > 0)
        columns = [np.bincount(owners, one, len(contexts)) for one in (change, types)], [change]
        # none in general text
        following, counts = (
            np.stack([*one, *map(np.zeros_like, one)], 1).astype(np.int64) for one in columns
        )
        rows = torch.from_numpy(following), torch.from_numpy(distinct), torch.from_numpy(counts)
        layer = Counts(Hashes.of(contexts), *rows, self.order, self.words).to(self.grams.device)
        return self._with(*self.more, layer)

    def _with(self, *more: Counts) -> Counts:
        return Counts(self.contexts, self.following, self.grams, self.counts, self.order, self.words, more)

    def _counted(self, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Count n-grams in the text, int64 [G], by hash of the context, and token."""
        hashes, last = (torch.from_numpy(one).to(self.grams.device) for one in (contexts, tokens))
        counts: np.ndarray = (
            _added(one._own(place, last)[:, 0] for one, place in self._places(hashes)).cpu().numpy()
        )
        return counts

    def look_up(self, hypotheses: Tensor, rows: Tensor, tokens: Tensor) -> Found:
        """Compute log-probabilities of tokens after hypotheses.

        Args:
            hypotheses: int64 [H, t], with the end of a sentence in front.
            rows: int64 [N], the hypothesis of each token.
            tokens: int64 [N].
        """
        places = self._places(context_hashes(hypotheses, self.multipliers))
        following = _added(one._following(place) for one, place in places)  # [H, k, 4]
        known = (following[..., 0] > 0).long().cumprod(1)
        length = (known.sum(1) - 1).clamp_min(0)
        seen = following.gather(1, length.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        # [H, k, 2 texts]
        total, types = (following * known.unsqueeze(2)).double().unflatten(2, (2, 2)).unbind(3)
        share = 1 / (total + types).clamp_min_(1)  # of a count
        left = torch.where(total > 0, types * share, 1.0)  # to shorter contexts
        # by all that are longer
        left = torch.cat([left, torch.ones_like(left[:, :1])], 1).flip(1).cumprod(1).flip(1)
        share *= left[:, 1:]
        p = (
            left[:, 0].index_select(0, rows) / self.words
            + share[:, 0].index_select(0, rows) * self._unigrams[tokens]
        )
        longer = [(one, place[:, 1:].index_select(0, rows)) for one, place in places]
        counts = _added(one._own(place, tokens.unsqueeze(1)) for one, place in longer)  # [N, k - 1, 2]
        p += (share[:, 1:].index_select(0, rows) * counts).sum(1)
        log_probs = p.log().float().T
        return Found(log_probs[0], log_probs[1], length, seen)

    def counted(self, hypotheses: Tensor, tokens: Tensor) -> list[int]:
        """Count how often a token stands after the last 0, 1, ... tokens of a hypothesis, int64 [1, t] and [1]."""
        places = self._places(context_hashes(hypotheses, self.multipliers))
        counts: list[int] = _added(one._own(place[0], tokens)[:, 0] for one, place in places).tolist()
        return counts

    @cached_property
    def ratios(self) -> Tensor:
        """How much likelier each token is in the text than in general text, log fp32 [V], by unigrams."""
        counts = self._unigrams + 0.5
        text, general = (counts / counts.sum(0)).log().float().unbind(1)
        return text - general

    @cached_property
    def _unigrams(self) -> Tensor:  # int64 [V, 2]
        tokens = torch.arange(self.words, device=self.grams.device)
        places = self._places(torch.zeros_like(tokens))  # of no context the hash is 0
        return _added(one._own(place, tokens) for one, place in places)

    def _places(self, contexts: Tensor) -> list[tuple[Counts, Tensor]]:
        """Find contexts among these and those that are added, by their hashes, of any shape."""
        layers = [self, *self.more]
        return [(one, one.contexts.find(contexts.flatten()).view_as(contexts)) for one in layers]

    def _following(self, places: Tensor) -> Tensor:
        rows = self.following.index_select(0, places.flatten().clamp_min(0)).long().unflatten(0, places.shape)
        return rows * (places >= 0).unsqueeze(-1)

    def _own(self, places: Tensor, tokens: Tensor) -> Tensor:
        """Count tokens after contexts, of any shape, int64 [..., 2]; without those that are added."""
        grams = (places * self.words + tokens).flatten()  # below zero where there is no such context
        found = torch.searchsorted(self.grams, grams).clamp_max_(len(self.grams) - 1)
        counts = self.counts.index_select(0, found).long() * (
            self.grams.index_select(0, found) == grams
        ).unsqueeze(1)
        return counts.unflatten(0, places.shape)


def _signed(counts: Tensor) -> Tensor:
    """Give uint32, which few operations of a GPU take, another type: int32 where no count is too large."""
    if counts.dtype != torch.uint32:
        return counts
    narrow = counts.view(torch.int32)
    return narrow if not len(narrow) or int(narrow.min()) >= 0 else counts.long()


def _added(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


class Grams(NamedTuple):
    """Distinct n-grams of sentences, ascending by context and token."""

    contexts: np.ndarray  # int64 [G], the hash of each one's context
    tokens: np.ndarray  # int64 [G]
    counts: np.ndarray  # int64 [G]

    @classmethod
    def of(cls, tokens: np.ndarray, offsets: np.ndarray, end: int, order: int) -> Grams:
        """Count the n-grams of orders 1 to n; none reaches across sentences.

        Args:
            tokens: [T], each sentence with its end.
            offsets: int64 [S + 1], where each begins.
            end: the token in front of a sentence.
        """
        lengths = np.diff(offsets) + 1
        before = np.insert(np.asarray(tokens, np.int64), offsets[:-1], end) + 1
        place = np.arange(len(before)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        context, contexts, last = np.zeros_like(before), [], []
        for k in range(order):
            if k:
                context[k:] += before[:-k] * MULTIPLIERS[k]
            real = place >= max(k, 1)
            contexts.append(context[real])
            last.append(before[real] - 1)
        distinct, numbers = np.unique(np.concatenate(contexts), return_inverse=True)
        words = int(before.max())
        grams, counts = np.unique(numbers * words + np.concatenate(last), return_counts=True)
        return cls(distinct[grams // words], grams % words, counts)


class TextDatastore(OpenedPart[TextSection]):
    """The text part of a datastore, opened for reading: memory-mapped, checked for size and shape.

    Attributes:
        tokens: [T]; offsets: int64 [S + 1].

    Raises:
        DatastoreError: missing, unfinished, damaged, or without a text part.
    """

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory, TextSection)
        self.tokens, self.offsets = self.arrays[TEXT_TOKENS], self.arrays[TEXT_OFFSETS]

    @property
    def counted_bytes(self) -> int:
        """Bytes of what is looked up, in memory or on a GPU."""
        return sum(self.arrays[name].nbytes for name in LOOKED_UP)

    def open_counts(self, device: torch.device = CPU) -> Counts:
        """Open what is looked up, on the device of the models.

        Raises:
            ConfigurationError: a GPU has no room for it.
        """
        section, tensors = self.section, [as_tensor(self.arrays[name]) for name in LOOKED_UP]
        if device.type != "cpu":
            tensors = [_signed(one) for one in tensors]
            needed, left = sum(one.nbytes for one in tensors), room(device, scratch=0)
            if needed > left:
                raise ConfigurationError(
                    f"the text of {self.directory} takes {needed / 1e9:,.3g} GB of the GPU, which has "
                    f"{left / 1e9:,.3g} GB for it: leave it out of --datastore, build it of less text, or "
                    "give --cpu"
                )
        contexts, prefixes, following, grams, counts = tensors
        known = Hashes(contexts, prefixes, section.tables[CONTEXTS][2])
        return Counts(known, following, grams, counts, section.order, section.words).to(device)

    def sentence(self, number: int) -> np.ndarray:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def find(self, tokens: list[int], most: int, block: int = 1 << 22) -> Iterator[tuple[int, int]]:
        """Find the first sentences where tokens follow one another: the number, and the place of the last.

        Of a text of more than `SEARCHED` tokens, the first ones are searched.
        """
        before = len(tokens) - 1
        for start in range(0, min(len(self.tokens), SEARCHED), block):
            text = self.tokens[start : start + block + before]
            places = np.flatnonzero(text[before:] == tokens[-1])  # of what is compared next, few are left
            for back, token in enumerate(reversed(tokens[:-1]), 1):
                places = places[text[places + before - back] == token]
            for place in (start + before + places).tolist():
                number = int(np.searchsorted(self.offsets, int(place), "right")) - 1
                if (position := place - int(self.offsets[number])) >= before:
                    yield number, position
                    most -= 1
                    if not most:
                        return

    def check_vocabulary(self, fingerprint: str, language: str | None = None) -> None:
        """Refuse a model with another vocabulary, or one that translates into another language.

        Raises:
            DatastoreError: names both sides.
        """
        expected = self.section.fingerprints["target_dictionary"]
        if fingerprint != expected:
            raise DatastoreError(
                f"the text of {self.directory} was counted in the subwords of another model: they need the "
                f"target dictionary {short(expected)}, the one given is {short(fingerprint)}; build the "
                "text with this --path, into another --output"
            )

        known = self.section.fingerprints.get(LANGUAGE, language)
        if known != language:
            raise DatastoreError(
                f"the text of {self.directory} is {known}, and the model translates into {language}: name "
                "another --datastore"
            )
