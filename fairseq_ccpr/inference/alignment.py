"""Which words of a translation stand for which characters of its source, by the attention of the model."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
import torch
from fairseq import utils
from torch import Tensor

from fairseq_ccpr.inference.system import System, Translation, batches_of, encode
from fairseq_ccpr.text.sentences import Mark, Parts

_WORDS = regex.compile(r"(?w)\b\S+?\b")  # by Unicode (UAX #29), with punctuation; ideographs are a word each


@dataclass(frozen=True)
class Alignment:
    """The W words of a translation, and the source they stand for.

    Attributes:
        words: where they start and end in the text.
        share: what part of its attention each word has for source[start:stop], one subword at least, [W].
    """

    source: str
    text: str
    words: list[tuple[int, int]]
    share: Callable[[int, int], Sequence[float]]


def align(system: System, translations: Sequence[Translation]) -> list[Alignment]:
    """Align translations with their sources; those in parts by their parts."""
    parts = [one.parts or (one,) for one in translations]
    each = iter(_align(system, [part for own in parts for part in own]))
    aligned = [[next(each) for _ in own] for own in parts]
    return [_joined(one, own) if one.parts else own[0] for one, own in zip(translations, aligned)]


def _joined(one: Translation, parts: Sequence[Alignment]) -> Alignment:
    """Join the alignments of a sentence's parts: their words attend to their part of the source alone.

    What is between two parts belongs to the second, so that a tag there goes before its first words.
    """
    words, begins, begin, at = list[tuple[int, int]](), list[int](), 0, 0
    for part in parts:
        begin, at = one.source.index(part.source, begin), one.text.index(part.text, at)
        begins.append(begin)
        words += [(at + start, at + stop) for start, stop in part.words]
        begin, at = begin + len(part.source), at + len(part.text)

    def share(start: int, stop: int) -> Sequence[float]:
        found, past = list[float](), -1
        for part, begin in zip(parts, begins):
            length = len(part.source)
            has = past < stop and start < begin + length
            first, last = max(start - begin, 0), max(min(stop - begin, length), 0)
            found += part.share(first, last) if has else [0.0] * len(part.words)
            past = begin + length
        return found

    return Alignment(one.source, one.text, words, share)


@torch.inference_mode()
def _align(system: System, translations: Sequence[Translation]) -> list[Alignment]:
    """Align translations of what the models take whole.

    A decoder's lower layers attend to what the subword that they read was made from, and its upper layers to
    what the next is made from: the mean of both is taken, each with its own subword. Of an ensemble the first
    model is asked.
    """
    task, model = system.task, system.models[0]
    source, target = task.source_dictionary, task.target_dictionary
    targets = [torch.tensor([*map(target.index, one.tokens), target.eos()]) for one in translations]
    sources = [encode(one.source, task) for one in translations]
    found: list[Alignment | None] = [None] * len(translations)
    markers = [
        {source.pad(), source.eos(), *task.tags.ids(source)},
        {target.pad(), target.eos(), *task.tags.ids(target)},
    ]
    for sample in batches_of(sources, system.cfg, task, targets) if translations else ():
        sample = utils.move_to_cuda(sample) if system.device.type == "cuda" else sample
        given = sample["net_input"]
        encoded, layers = model.encoder.forward_torchscript(given), len(model.decoder.layers)
        # [B, T, S] each.
        at = [_attention(model, given["prev_output_tokens"], encoded, layer) for layer in range(layers)]
        for row, number in enumerate(sample["id"].tolist()):
            columns = _others(given["src_tokens"][row], markers[0])
            read, written = (
                _others(t[row], markers[1]) for t in (given["prev_output_tokens"], sample["target"])
            )
            each = [
                a[row, read if layer < layers // 2 else written][:, columns] for layer, a in enumerate(at)
            ]
            mean = torch.stack([one / one.sum(dim=1, keepdim=True).clamp(min=1e-9) for one in each]).mean(
                dim=0
            )
            found[number] = _of_words(system, translations[number], mean.cpu().numpy())
    return [one for one in found if one is not None]


def _attention(model: Any, previous: Tensor, encoded: object, layer: int) -> Tensor:
    _, extra = model.decoder(previous, encoder_out=encoded, features_only=True, alignment_layer=layer)
    attention: Tensor = extra["attn"][0].float()
    return attention


def _others(tokens: Tensor, markers: set[int]) -> list[int]:
    return [place for place, token in enumerate(tokens.tolist()) if token not in markers]


def _of_words(system: System, one: Translation, looked_at: np.ndarray) -> Alignment:
    """Give words the attention of their subwords [T, S], by the characters that they have of each."""
    words = [word.span() for word in _WORDS.finditer(one.text)]
    ends = system.token_ends(one)
    starts, stops = np.array(words or [(0, 0)])[:, :, None].transpose(1, 0, 2)  # [W, 1] each
    # [W, T]
    shared = np.clip(np.minimum(stops, ends[1:]) - np.maximum(starts, ends[:-1]), 0, None).astype(np.float32)
    of_words = shared / np.maximum(shared.sum(axis=1, keepdims=True), 1) @ looked_at  # [W, S]

    def share(start: int, stop: int) -> Sequence[float]:
        first, past = (len(encode(one.source[:place], system.task)) - 1 for place in (start, stop))
        found: list[float] = of_words[:, first : max(past, first + 1)].sum(axis=1).tolist()
        return found

    return Alignment(one.source, one.text, words, share)


def place_markup(alignment: Alignment, marks: list[Mark]) -> Parts:
    """Return a translation as HTML with its sentence's markup: each once, nested as it was.

    An element goes around the words next to each other that have the most attention for its text, less that
    for other text; a tag by itself goes before the word with the most attention for what follows it. They
    have the choice of the words that are left, in the element around them; tags of elements that reach beyond
    the sentence stay in their order.
    """
    placing = _Placing(alignment)
    for mark in marks:
        placing.add(mark)
    return [*placing.written(None)]


def with_markup(
    system: System, ranked: Sequence[Sequence[Translation]], marks: Sequence[list[Mark]]
) -> list[list[str | Parts]]:
    """Return translations of sentences, several of each, with the markup of their sources.

    A sentence without a translation stays as it is.
    """
    marked = [one for best, own in zip(ranked, marks) if own for one in best if not one.fault]
    aligned = iter(align(system, marked))

    def written(one: Translation, own: list[Mark]) -> str | Parts:
        if not own:
            return one.source if one.fault else one.text
        return place_markup(_with_itself(one.source) if one.fault else next(aligned), own)

    return [[written(one, own) for one in best] for best, own in zip(ranked, marks)]


def _with_itself(source: str) -> Alignment:
    words = [word.span() for word in _WORDS.finditer(source)]

    def share(start: int, stop: int) -> Sequence[float]:
        return [float(first < max(stop, start + 1) and past > start) for first, past in words]

    return Alignment(source, source, words, share)


class _Placing:
    """Markup that has its place in a translation; None stands for the sentence around all of it."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        # Of an element's words those that are left, its characters, and what is in it.
        self.free: dict[Mark | None, list[bool]] = {None: [True] * len(alignment.words)}
        self.spans: dict[Mark | None, tuple[int, int]] = {None: (0, len(alignment.text))}
        self.children: dict[Mark | None, list[Mark]] = {None: []}
        self.around: list[Mark | None] = [None]
        self.passed = 0  # where the last tag is that stays in order

    def add(self, mark: Mark) -> None:
        while (outer := self.around[-1]) is not None and (mark.start >= outer.stop or mark.stop > outer.stop):
            self.around.pop()
        left = self.free[outer]
        span, chosen = self._find(mark, left, self.spans[outer][1])
        if mark.ordered:
            self.passed = span[0]
        self.spans[mark], self.children[mark] = span, []
        self.children[outer].append(mark)
        self.free[mark] = [n in chosen for n in range(len(left))]
        for n in chosen:
            left[n] = False
        if mark.start < mark.stop and not mark.kept:
            self.around.append(mark)

    def _find(self, mark: Mark, left: list[bool], end: int) -> tuple[tuple[int, int], list[int]]:
        """Return the characters and words that a mark gets of those left; `end` where there are none."""
        words, share = self.alignment.words, self.alignment.share
        if not any(left):
            return (end, end), []
        if mark.start == mark.stop:
            word = self.alignment.source[: mark.start].rstrip().rfind(" ") + 1
            near = share(word, mark.start) if mark.follows else share(mark.start, mark.start + 1)
            edges = [span[mark.follows] for span in words]
            may = [n for n, at in enumerate(edges) if left[n] and not (mark.ordered and at < self.passed)]
            at = edges[max(may, key=lambda n: near[n])] if may else end
            return (at, at), []
        part = share(mark.start, mark.stop)
        copies = _copies(mark, self.alignment.source, self.alignment.text) if mark.kept else []
        touched = [
            [n for n, (start, end) in enumerate(words) if start < stop and end > begin]
            for begin, stop in copies
        ]
        whole = [both for both in zip(copies, touched) if both[1] and all(left[n] for n in both[1])]
        if whole:  # the model has written it as it was
            return max(whole, key=lambda both: sum(part[n] for n in both[1]))
        chosen = _best_run(left, [2 * of_word - 1 for of_word in part])
        return (words[chosen[0]][0], words[chosen[-1]][1]), chosen

    def written(self, outer: Mark | None) -> Iterator[str | int]:
        """Yield the text of an element, with what is in it."""
        text, (at, end) = self.alignment.text, self.spans[outer]
        for mark in sorted(self.children[outer], key=self.spans.__getitem__):
            start, stop = self.spans[mark]
            yield html.escape(text[at : max(at, start)], quote=False)
            yield from mark.before
            if not mark.kept:
                yield from self.written(mark)
            yield from mark.after
            at = max(at, stop)
        yield html.escape(text[at:end], quote=False)


def _copies(mark: Mark, source: str, text: str) -> list[tuple[int, int]]:
    """Find what is kept in a translation, inside a word only if it was in the source."""

    def inside_word(text: str, start: int, end: int) -> tuple[bool, bool]:
        return text[max(0, start - 1) : start].isalnum(), text[end : end + 1].isalnum()

    found = [one.span() for one in re.finditer(re.escape(source[mark.start : mark.stop]), text)]
    return [span for span in found if inside_word(text, *span) == inside_word(source, mark.start, mark.stop)]


def _best_run(left: list[bool], scores: Sequence[float]) -> list[int]:
    """Return the run of words that are left with the greatest sum of scores."""
    best: list[int] = []
    run: list[int] = []
    most, total = -math.inf, 0.0
    for number, score in enumerate(scores):
        if not left[number] or total < 0:
            run, total = [], 0.0
        if left[number]:
            run, total = [*run, number], total + score
            if total > most:
                best, most = run, total
    return best
