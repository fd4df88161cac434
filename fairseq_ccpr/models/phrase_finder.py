"""Segments text into phrases and encodes them, for keys and queries alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import to_device, to_host
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import SpanEncoder
from fairseq_ccpr.models.xpr_encoder import span_means
from fairseq_ccpr.storage.fingerprint import of_file, short
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.subwords import Subwords, batches_of_like_length, collate, subword_bounds
from fairseq_ccpr.text.words import word_spans

LEARNED, ALL, NGRAM, LEXICON = "learned", "all", "ngram:", "lexicon:"
ENCODED_ELSEWHERE = 2  # extra subwords that a text may have where it does not begin with its first word
SEGMENTATIONS = "learned|all|ngram:N|lexicon:FILE"


@dataclass(frozen=True)
class Segmentation:
    """Which spans of words are phrases."""

    # `learned`, by the segmentation head; `all` spans; `ngram:N`, those of N words; or `lexicon:FILE`, those
    # a file lists.
    kind: str = LEARNED
    threshold: float = 0.7  # of the head's probability
    max_words: int = 7

    def __post_init__(self) -> None:
        is_ngram = self.kind.startswith(NGRAM) and self.kind[len(NGRAM) :].isdecimal()
        if not (self.kind in (LEARNED, ALL) or is_ngram or self.lexicon):
            raise ConfigurationError(
                f"there is no segmentation '{self.kind}': give learned, all, ngram:N such as ngram:5, or "
                "lexicon:FILE"
            )
        if not 0 <= self.threshold < 1:
            raise ConfigurationError(
                f"the threshold of phrases is {self.threshold}: give a probability in [0, 1)"
            )
        if min(self.words) < 1 or self.words[0] > self.words[1]:
            raise ConfigurationError(f"phrases of {self.words[0]} to {self.words[1]} words: give at least 1")

    @property
    def words(self) -> tuple[int, int]:
        """Fewest and most words of a candidate."""
        if not self.kind.startswith(NGRAM):
            return 1, self.max_words
        return (int(self.kind.removeprefix(NGRAM)),) * 2

    @property
    def lexicon(self) -> Path | None:
        """The file that names the phrases, where one does."""
        path = self.kind.removeprefix(LEXICON)
        return Path(path) if path and path != self.kind else None

    def explain_nothing(self) -> str:
        """Complete a message about text without a phrase: the settings, and what to do."""
        if self.kind == LEARNED:
            return f"with the segmentation {LEARNED} and the threshold {self.threshold}: lower that, or give more text"
        remedy = "give a lexicon of its language, or" if self.lexicon else "ask for fewer words, or give"
        return f"with the segmentation {self.kind}: {remedy} more text"


class Window(NamedTuple):
    """A part of a text, and which of its phrases are found there."""

    subwords: Subwords  # of the part alone
    offset: int  # where the part begins in the text, in characters
    begin: int  # phrases of the text that begin from here
    end: int  # up to, but not, here are found in this window, which has most of their context


@dataclass
class FoundPhrases:
    """P phrases of S texts, in the order of the text."""

    spans: np.ndarray  # int32 [P, 3]: text, start, end in characters
    probabilities: Tensor  # fp32 [P], of being a phrase
    vectors: Tensor  # fp32 [P, o], on the encoder's device
    too_long: int  # texts longer than the encoder reads, which it read in windows


class PhraseFinder:
    """Segments and encodes text on the encoder's device.

    With `pooled`, vectors are means of subwords before XPR's head, fp32 [P, H].
    """

    def __init__(self, encoder: SpanEncoder, segmentation: Segmentation, pooled: bool = False) -> None:
        if segmentation.kind == LEARNED and not encoder.segments:
            raise ConfigurationError(
                f"the segmentation {LEARNED} asks for an encoder that has learned what a phrase is (CCPR), "
                "and this one (XPR) has not: give lexicon:FILE, all or ngram:N"
            )
        self.encoder, self.segmentation = encoder, segmentation
        self.lexicon = read_phrases(segmentation.lexicon) if segmentation.lexicon else None
        self.tokenizer = encoder.context.tokenizer
        self._vectors = span_means if pooled else encoder.vectors
        self._width = encoder.context.hidden if pooled else encoder.dimension

    @property
    def _device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @property
    def description(self) -> str:
        """Everything besides the encoder that decides which spans are phrases and what their vectors are."""
        rule = self.segmentation
        kind = LEXICON + short(of_file(rule.lexicon)) if rule.lexicon else rule.kind
        learned = f",edges:{self.encoder.edges}" if rule.kind == LEARNED else ""
        bf16 = ",bf16" if self.encoder.context.bf16 else ""
        return f"{kind}>{rule.threshold}<={rule.max_words}words{learned}{bf16}"

    @torch.inference_mode()
    def find(self, texts: list[str], done: Callable[[int], object] = lambda count: None) -> FoundPhrases:
        """Find the phrases of texts.

        `done` is called after each batch with the number of texts read; a long one counts with its first
        window.
        """
        limit, encode = self.encoder.context.max_positions, self.tokenizer.encode
        wholes = [encode(text) for text in texts]
        cut = [
            windows(one, encode, limit) if one.count > limit else [Window(one, 0, 0, len(one.text) + 1)]
            for one in wholes
        ]
        parts = [part for some in cut for part in some]
        subwords = [part.subwords for part in parts]
        text_of = np.repeat(np.arange(len(texts)), list(map(len, cut)))
        first = np.diff(text_of, prepend=-1) > 0
        spans = [np.empty((0, 3), np.int32)]
        probabilities, vectors = [torch.empty(0)], [torch.empty(0, self._width, device=self._device)]
        for batch in batches_of_like_length(list(range(len(parts))), subwords):
            places, batch_probabilities, batch_vectors = self._find_in_batch(
                [subwords[number] for number in batch]
            )
            places[:, 0] = np.array(batch)[places[:, 0]]
            spans.append(places)
            probabilities.append(batch_probabilities)
            vectors.append(batch_vectors)
            done(int(first[batch].sum()))
        found = np.concatenate(spans)
        order = found[:, 0].argsort(kind="stable")
        too_long = sum(one.count > limit for one in wholes)
        if too_long:  # spans of windows move to their places in the text; those of other windows are left out
            offsets, begins, ends = np.array([(part.offset, part.begin, part.end) for part in parts])[
                found[:, 0]
            ].T
            found[:, 1:] += offsets[:, None].astype(found.dtype)
            order = order[((begins <= found[:, 1]) & (found[:, 1] < ends))[order]]
        found[:, 0] = text_of[found[:, 0]]
        [rows] = to_device([torch.from_numpy(order)], self._device)
        return FoundPhrases(found[order], torch.cat(probabilities)[order], torch.cat(vectors)[rows], too_long)

    def _find_in_batch(self, batch: list[Subwords]) -> tuple[np.ndarray, Tensor, Tensor]:
        """Wait for a GPU once: for the probabilities, from which the host decides which spans are phrases."""
        each = [candidate_spans(subwords, *self.segmentation.words) for subwords in batch]
        if (lexicon := self.lexicon) is not None:
            each = [
                spans[[subwords.text[start:end] in lexicon for start, end in spans[:, :2].tolist()]]
                for subwords, spans in zip(batch, each)
            ]
        numbers = np.repeat(np.arange(len(batch)), [len(c) for c in each])
        candidates = np.concatenate(each)  # [C, 4]
        tokens = collate(batch, self.tokenizer.pad)
        inside = torch.from_numpy(np.column_stack([numbers, candidates[:, 2:]]))
        tokens, spans = to_device([tokens, inside], self._device)
        states = self.encoder.states(tokens)
        probabilities = torch.ones(len(spans))
        if self.encoder.segments:
            [probabilities] = to_host([self.encoder.phrase_logits(states, spans).sigmoid()])
        if self.segmentation.kind == LEARNED:
            kept = probabilities > self.segmentation.threshold
            [spans] = to_device([inside[kept]], self._device)
            probabilities, numbers = probabilities[kept], numbers[kept.numpy()]
            candidates = candidates[kept.numpy()]
        found = np.column_stack([numbers, candidates[:, :2]]).astype(np.int32)
        return found, probabilities, self._vectors(states, spans)


def windows(subwords: Subwords, encode: Callable[[str], Subwords], limit: int) -> list[Window]:
    """Cut a text at its words into windows of at most `limit` subwords, from the middle of the one before.

    A phrase is found in one window: where two contain it, in the one with more of its sentence around it. A
    word with more subwords than `limit` is in none.
    """
    text, words = subwords.text, word_spans(subwords.text)
    inside = len(subwords.ids) - 1
    first = [bisect_right(subwords.ends, start, 1, inside) for start, _ in words]
    stop = [bisect_left(subwords.starts, end, 1, inside) for _, end in words]
    cut: list[tuple[int, int, Subwords]] = []  # first and last word, and what they are cut into
    begin = 0
    while begin < len(words):
        last = bisect_right(stop, first[begin] + limit - ENCODED_ELSEWHERE, begin) - 1
        while last >= begin and (part := encode(text[words[begin][0] : words[last][1]])).count > limit:
            last -= 1
        if last < begin:  # a word of too many subwords
            begin += 1
            continue
        cut.append((begin, last, part))
        if last + 1 == len(words):
            break
        begin = min(bisect_left(first, (first[begin] + stop[last]) // 2, begin + 1), last + 1)
    middles = [words[max((last + word + 1) // 2, word)][0] for (_, last, _), (word, _, _) in pairwise(cut)]
    borders = [0, *middles, len(text) + 1]
    return [Window(part, words[word][0], *ends) for (word, _, part), ends in zip(cut, pairwise(borders))]


def read_phrases(path: Path) -> frozenset[str]:
    """Read the phrases of a lexicon: one per line, or several separated by tabs, such as translations."""
    if not path.is_file():
        raise ConfigurationError(
            f"there is no lexicon {path}: give a file of one phrase per line, or of phrases with tabs "
            "between them"
        )
    phrases = frozenset(cell.strip() for line in read_lines(path) for cell in line.split("\t")) - {""}
    if not phrases:
        raise ConfigurationError(f"the lexicon {path} is empty: give a file of one phrase per line")
    return phrases


def choose_segmentation(kind: str | None, encoder: SpanEncoder, default: str = ALL) -> str:
    """Return the kind of segmentation, a lexicon by its absolute path, or else what the encoder has learned."""
    if kind is None:
        return LEARNED if encoder.segments else default
    path = kind.removeprefix(LEXICON)
    return kind if path in ("", kind) else LEXICON + str(Path(path).resolve())


def candidate_spans(subwords: Subwords, fewest: int, most: int) -> np.ndarray:
    """List the spans of `fewest` to `most` whole words whose borders no subword crosses, by start and end.

    Returns:
        int64 [C, 4]: start and end in characters, first and last subword.
    """
    words = word_spans(subwords.text)
    most = min(most, len(words))
    if most < fewest:
        return np.empty((0, 4), np.int64)
    # Where a span begins does not depend on where it ends, nor the reverse.
    begins = [subword_bounds(subwords, start, words[-1][1]) for start, _ in words]
    stops = [subword_bounds(subwords, words[0][0], end) for _, end in words]
    first = np.array([-1 if bounds is None else bounds[0] for bounds in begins])
    last = np.array([-1 if bounds is None else bounds[1] for bounds in stops])
    i = np.repeat(np.arange(len(words)), most - fewest + 1)
    j = i + np.tile(np.arange(fewest - 1, most), len(words))
    inside = j < len(words)
    i, j = i[inside], j[inside]
    whole = (first[i] >= 0) & (last[j] >= first[i])
    i, j = i[whole], j[whole]
    characters = np.array(words)
    return np.column_stack([characters[i, 0], characters[j, 1], first[i], last[j]]).astype(np.int64)
