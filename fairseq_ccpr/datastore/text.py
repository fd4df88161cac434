"""The text part of a datastore: how often n-grams of target subwords occur in a text, for one model's vocabulary.

    tokens.npy           uint16 or int32 [T]   the sentences, equal ones once, each with its end
    offsets.npy          int64 [S + 1]         where each begins
    contexts.npy         int64 [C]             hashes of contexts (0 to n - 1 tokens), ascending
    following.npy        uint32 [C, 4]         tokens and distinct tokens after each: in the text, in general text
    grams.npy            int64 [G]             hashes of contexts with a token after them, ascending
    counts.npy           uint32 [G, 2]         how often each occurs: in the text, in general text
    contexts-index.npy   int32 or int64 [2^b + 1]   where hashes with each prefix of b bits begin; grams-index.npy likewise

General text is counted after the contexts of the text alone. Letters: H hypotheses, N tokens asked about, n the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_ccpr.datastore.manifest import OpenedPart, TextSection
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.arrays import as_tensor, open_array
from fairseq_ccpr.storage.files import check_checksums
from fairseq_ccpr.storage.fingerprint import short

ORDER = 5
SEARCHED = 1 << 26  # tokens that an explanation looks through
TOKENS, OFFSETS, INDEX = "tokens", "offsets", "-index"
LANGUAGE = "target_language"  # among the fingerprints, where the model is multilingual
GENERAL = "general"  # among them, where there are general counts
TABLES = {"contexts": ("following", 4), "grams": ("counts", 2)}  # the rows of each table, and how wide they are
# Odd multipliers of the hash: that of the next token, then those of the tokens 1, 2, ... places back.
MULTIPLIERS = np.random.Generator(np.random.PCG64(44)).integers(2**62, size=17, dtype=np.int64) * 2 + 1


def part_files(section: TextSection) -> list[str]:
    """Name the files of a text part."""
    tables = [one for name, (rows, _) in TABLES.items() for one in (name, f"{name}{INDEX}", rows)]
    return [f"{name}.npy" for name in (TOKENS, OFFSETS, *tables)]


def token_type(words: int) -> str:
    """Choose the dtype of the tokens of a vocabulary."""
    return "uint16" if words <= 1 << 16 else "int32"


def context_hashes(hypotheses: Tensor, multipliers: Tensor) -> Tensor:
    """Hash the last 0, 1, ... n - 1 tokens of hypotheses, int64 [H, t] -> [H, min(n, t + 1)]: sums of multiplied tokens.

    Hypotheses begin with the end of a sentence, and no context is longer than a hypothesis.

    Args:
        multipliers: int64 [n - 1], on their device.
    """
    last = hypotheses[:, max(0, hypotheses.size(1) - len(multipliers)) :].flip(1) + 1
    return pad((last * multipliers[: last.size(1)]).cumsum(1), (1, 0))


class Table:
    """Rows of numbers by hash.

    Args:
        hashes: int64 [M], ascending.
        index: int64 [2^b + 1], where hashes with each prefix of b bits begin.
        rows: [M, c].
        bucket: most hashes with one prefix.
    """

    def __init__(self, hashes: Tensor, index: Tensor, rows: Tensor, bucket: int) -> None:
        self.hashes, self.index, self.rows, self.bucket = hashes, index, rows, bucket
        self.prefixes = len(index) - 1

    @classmethod
    def of(cls, hashes: np.ndarray, rows: np.ndarray) -> Table:
        """Make a table in memory of distinct hashes, ascending, int64 [M], and rows [M, c]."""
        prefixes = 1 << prefix_bits(len(hashes))
        index = prefix_begins(hashes, np.arange(prefixes + 1), prefixes)
        rows = np.ascontiguousarray(rows, np.int64)
        bucket = int(np.diff(index).max())
        return cls(torch.from_numpy(hashes), torch.from_numpy(index), torch.from_numpy(rows), bucket)

    def __getitem__(self, hashes: Tensor) -> Tensor:
        """Look up hashes, int64 [N] -> int64 [N, c]; zeros where they are missing. Nothing is asked of the device."""
        if not len(self.hashes):
            return hashes.new_zeros(len(hashes), self.rows.size(1))
        prefix = (hashes >> (65 - self.prefixes.bit_length())) + self.prefixes // 2
        low, high = (self.index.index_select(0, one).long() for one in (prefix, prefix + 1))
        last = len(self.hashes) - 1
        for _ in range(self.bucket.bit_length()):  # a binary search among hashes of one prefix
            middle = (low + high) >> 1
            below = self.hashes.index_select(0, middle.clamp_max_(last)) < hashes
            low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
        low.clamp_max_(last)
        return self.rows.index_select(0, low).long() * (self.hashes.index_select(0, low) == hashes).unsqueeze(1)

    def to(self, device: torch.device) -> Table:
        """Return it on another device."""
        rows = self.rows if self.rows.device == device else self.rows.long()  # few operations of a GPU take uint32
        return Table(self.hashes.to(device), self.index.to(device), rows.to(device), self.bucket)


def prefix_bits(size: int) -> int:
    """Choose b, so that a prefix has one or two of so many hashes."""
    return max(1, size.bit_length() - 1)


def place_type(size: int) -> str:
    """Choose the dtype of places among so many rows."""
    return "int32" if size < 1 << 31 else "int64"


def prefix_begins(hashes: np.ndarray, numbers: np.ndarray, prefixes: int) -> np.ndarray:
    """Find where sorted hashes with some of 2^b prefixes begin, int64 [n]; those after the last one begin at the end."""
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

    p_k(v) = (count(c_k v) + types(c_k) p_{k-1}(v)) / (tokens(c_k) + types(c_k)) for the last k tokens c_k, where
    p_{-1}(v) = 1 / V; a context that does not occur, and all longer ones, change nothing.

    Args:
        contexts: tokens and types after each context, in the text and in general text.
        grams: counts in both.
        order: n.
        words: V, tokens that have a probability.
        more: counts to be added to those, of what was learned.
    """

    def __init__(self, contexts: Table, grams: Table, order: int, words: int, more: Counts | None = None) -> None:
        self.contexts, self.grams, self.order, self.words, self.more = contexts, grams, order, words, more
        self.multipliers = torch.from_numpy(MULTIPLIERS[1:order]).to(contexts.hashes.device)

    def to(self, device: torch.device) -> Counts:
        """Return them on another device."""
        more = self.more.to(device) if self.more is not None else None
        return Counts(self.contexts.to(device), self.grams.to(device), self.order, self.words, more)

    def plus(self, sentences: list[np.ndarray], end: int) -> Counts:
        """Return these with sentences added, each int64 [L] with its end."""
        if not sentences:
            return Counts(self.contexts, self.grams, self.order, self.words)
        grams = Grams.of(np.concatenate(sentences), np.cumsum([0, *map(len, sentences)]), end, self.order)
        known = self.grams[torch.from_numpy(grams.hashes).to(self.grams.hashes.device)][:, 0].cpu().numpy() > 0
        contexts, following = grams.following(new=~known)
        tables = Table.of(contexts, pad_columns(following)), Table.of(grams.hashes, pad_columns(grams.counts[:, None]))
        more = Counts(*tables, self.order, self.words).to(self.grams.hashes.device)
        return Counts(self.contexts, self.grams, self.order, self.words, more)

    def look_up(self, hypotheses: Tensor, rows: Tensor, tokens: Tensor) -> Found:
        """Compute log-probabilities of tokens after hypotheses.

        Args:
            hypotheses: int64 [H, t], with the end of a sentence in front.
            rows: int64 [N], the hypothesis of each token.
            tokens: int64 [N].
        """
        contexts = context_hashes(hypotheses, self.multipliers)
        following = self._sum("contexts", contexts.flatten()).unflatten(0, contexts.shape)  # [H, k, 4]
        known = (following[..., 0] > 0).long().cumprod(1)
        length = (known.sum(1) - 1).clamp_min(0)
        seen = following.gather(1, length.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
        following = following.double() * known.unsqueeze(2)
        next_token = (tokens + 1) * int(MULTIPLIERS[0])
        grams = contexts[rows] + next_token.unsqueeze(1)  # [N, k]
        if rows.is_cuda:
            counts = self._sum("grams", grams.flatten()).unflatten(0, grams.shape)
        else:  # most contexts are too long to occur, and it costs nothing to know which
            some = known[rows].nonzero(as_tuple=True)
            counts = grams.new_zeros(*grams.shape, 2).index_put_(some, self._sum("grams", grams[some]))
        p = torch.full(
            (len(tokens), 2), 1 / self.words, dtype=torch.float64, device=tokens.device
        )  # text, general text
        after = following.unflatten(2, (2, 2))[rows]  # [N, k, 2 texts, tokens and types]
        for k in range(contexts.size(1)):
            total, types = after[:, k].unbind(2)
            p = torch.where(total > 0, (counts[:, k] + types * p) / (total + types).clamp_min_(1), p)
        log_probs = p.log().float().T
        return Found(log_probs[0], log_probs[1], length, seen)

    def counted(self, hypotheses: Tensor, tokens: Tensor) -> list[int]:
        """Count how often the text has a token after the last 0, 1, ... tokens of a hypothesis, int64 [1, t] and [1]."""
        grams = context_hashes(hypotheses, self.multipliers)[0] + (tokens + 1) * int(MULTIPLIERS[0])
        counts: list[int] = self._sum("grams", grams)[:, 0].tolist()
        return counts

    def _sum(self, table: str, hashes: Tensor) -> Tensor:
        rows: Tensor = getattr(self, table)[hashes]
        return rows if self.more is None else rows + getattr(self.more, table)[hashes]


def pad_columns(rows: np.ndarray) -> np.ndarray:
    """Append as many columns of zeros as there are columns: counts in general text, where there is none."""
    return np.concatenate([rows, np.zeros_like(rows)], 1)


class Grams(NamedTuple):
    """Distinct n-grams of sentences, ascending by hash."""

    hashes: np.ndarray  # int64 [G]
    contexts: np.ndarray  # int64 [G], the hash of each one's context
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
        context, parts = np.zeros_like(before), []
        for k in range(order):
            if k:
                context[k:] += before[:-k] * MULTIPLIERS[k]
            real = place >= max(k, 1)
            parts.append((context[real] + before[real] * MULTIPLIERS[0], context[real]))
        return cls.joined([cls(grams, contexts, np.ones(len(grams), np.int64)) for grams, contexts in parts])

    @classmethod
    def joined(cls, parts: list[Grams]) -> Grams:
        """Add several up."""
        hashes, contexts, counts = (np.concatenate(columns) for columns in zip(*parts))
        distinct, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        return cls(distinct, contexts[first], np.bincount(inverse, counts, len(distinct)).astype(np.int64))

    def following(self, new: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sum up what follows each context: hashes int64 [C], and tokens and distinct tokens, int64 [C, 2].

        Args:
            new: bool [G], the n-grams that count as distinct tokens; None: all.
        """
        contexts, inverse = np.unique(self.contexts, return_inverse=True)
        columns = [np.bincount(inverse, weights, len(contexts)) for weights in (self.counts, new)]
        return contexts, np.stack(columns, 1).astype(np.int64)

    def select(self, rows: np.ndarray) -> Grams:
        """Select some."""
        return Grams(*(column[rows] for column in self))


class TextDatastore(OpenedPart[TextSection]):
    """The text part of a datastore, opened for reading: memory-mapped, checked for size and shape.

    Attributes:
        tokens: [T]; offsets: int64 [S + 1].

    Raises:
        DatastoreError: missing, unfinished, damaged, or without a text part.
    """

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory, TextSection)
        self.tokens = self._open(TOKENS, (self.section.size,), token_type(self.section.words))
        self.offsets = self._open(OFFSETS, (self.section.sentences + 1,), "int64")

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return open_array(self.folder / f"{name}.npy", shape, dtype)

    def open_counts(self) -> Counts:
        """Map the counts."""
        return Counts(self._open_table("contexts"), self._open_table("grams"), self.section.order, self.section.words)

    def _open_table(self, name: str) -> Table:
        (rows, width), (size, prefixes, bucket) = TABLES[name], self.section.tables[name]
        hashes, index = (
            self._open(name, (size,), "int64"),
            self._open(f"{name}{INDEX}", (prefixes + 1,), place_type(size)),
        )
        return Table(as_tensor(hashes), as_tensor(index), as_tensor(self._open(rows, (size, width), "uint32")), bucket)

    @property
    def keys_fingerprint(self) -> str:
        """Digest of the counts, which takes the place of other parts' keys."""
        digest = self.section.digest(f"{TABLES['grams'][0]}.npy")
        assert digest is not None
        return digest

    def sentence(self, number: int) -> np.ndarray:
        """Return the tokens of a sentence, with its end."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def find(self, tokens: list[int], most: int, block: int = 1 << 22) -> Iterator[tuple[int, int]]:
        """Find the first sentences where tokens stand one after another: the number, and the place of the last token.

        Of a text of more than `SEARCHED` tokens, the first ones are searched.
        """
        before = len(tokens) - 1
        for start in range(0, min(len(self.tokens), SEARCHED), block):
            text = self.tokens[start : start + block + before]
            same = np.ones(max(len(text) - before, 0), bool)
            for place, token in enumerate(tokens):
                same &= text[place : place + len(same)] == token
            for place in (start + before + np.flatnonzero(same)).tolist():
                number = int(np.searchsorted(self.offsets, int(place), "right")) - 1
                if (position := place - int(self.offsets[number])) >= before:
                    yield number, position
                    most -= 1
                    if not most:
                        return

    def check_vocabulary(self, fingerprint: str, language: str | None = None) -> None:
        """Refuse a model with another vocabulary, or a multilingual one that translates into another language.

        Raises:
            DatastoreError: names both sides.
        """
        expected = self.section.fingerprints["target_dictionary"]
        if fingerprint != expected:
            raise DatastoreError(
                f"the text of {self.directory} was counted in the subwords of another model: they need the target "
                f"dictionary {short(expected)}, the one given is {short(fingerprint)}; build the text with this --path, into "
                "another --output"
            )

        known = self.section.fingerprints.get(LANGUAGE, language)
        if known != language:
            raise DatastoreError(
                f"the text of {self.directory} is {known}, and the model translates into {language}: name another --datastore"
            )

    def find_damage(self) -> list[str]:
        """Read every byte; returns a sentence for each fault, none if the part is healthy."""
        return check_checksums(self.directory, self.section.files)
