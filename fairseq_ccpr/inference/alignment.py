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


@torch.inference_mode()
def align(system: System, translations: Sequence[Translation]) -> list[Alignment]:
    """Align translations with their sources.

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
    dictionary = system.task.target_dictionary
    ids = [dictionary.index(token) for token in one.tokens]
    copied = [token for token, i in zip(one.tokens, ids) if i == dictionary.unk()]
    ends = [
        len(system.to_text(dictionary, torch.tensor(ids[:n]), unknown=copied)) for n in range(len(ids) + 1)
    ]
    starts, stops = np.array(words or [(0, 0)])[:, :, None].transpose(1, 0, 2)  # [W, 1] each
    # [W, T]
    shared = np.clip(np.minimum(stops, ends[1:]) - np.maximum(starts, ends[:-1]), 0, None).astype(np.float32)
    of_words = shared / np.maximum(shared.sum(axis=1, keepdims=True), 1) @ looked_at  # [W, S]

    def share(start: int, stop: int) -> Sequence[float]:
        first, past = (len(encode(one.source[:place], system.task)) - 1 for place in (start, stop))
        found: list[float] = of_words[:, first : max(past, first + 1)].sum(axis=1).tolist()
        return found

    return Alignment(one.source, one.text, words, share)


def place(alignment: Alignment, marks: list[Mark]) -> Parts:
    """Return a translation as HTML with the markup of its sentence: each once, elements inside those that they were inside.

    An element goes around the words next to each other that have the most attention for its text, less that
    for other text; a tag by itself goes before the word with the most attention for what follows it. They
    have the choice of the words that are left, in the element around them; tags of elements that reach beyond
    the sentence stay in their order.
    """
    source, text, words, share = alignment.source, alignment.text, alignment.words, alignment.share
    # of an element's words those that are left
    free: dict[Mark | None, list[bool]] = {None: [True] * len(words)}
    spans: dict[Mark | None, tuple[int, int]] = {None: (0, len(text))}  # of characters
    children: dict[Mark | None, list[Mark]] = {None: []}
    around: list[Mark | None] = [None]
    passed = 0  # where the last tag is that stays in order
    for mark in marks:
        while (outer := around[-1]) is not None and not (mark.start < outer.stop and mark.stop <= outer.stop):
            around.pop()
        left = free[outer]
        part = share(mark.start, mark.stop) if mark.start < mark.stop and any(left) else []
        copies = _copies(mark, source, text) if mark.kept else []
        of_copies = [
            [n for n, (start, end) in enumerate(words) if start < stop and end > begin]
            for begin, stop in copies
        ]
        copied = [
            number for number, chosen in enumerate(of_copies) if chosen and all(left[n] for n in chosen)
        ]
        if copied:  # the model has written it as it was
            best = max(copied, key=lambda number: sum(part[n] for n in of_copies[number]))
            span, chosen = copies[best], of_copies[best]
        elif not any(left):
            span, chosen = (spans[outer][1],) * 2, []
        elif mark.start < mark.stop:
            chosen = _best_run(left, [2 * of_word - 1 for of_word in part])
            span = words[chosen[0]][0], words[chosen[-1]][1]
        else:
            word = source[: mark.start].rstrip().rfind(" ") + 1
            near = share(word, mark.start) if mark.follows else share(mark.start, mark.start + 1)
            edges = [words[n][mark.follows] for n in range(len(words))]
            may = [n for n, at in enumerate(edges) if left[n] and not (mark.ordered and at < passed)]
            at = edges[max(may, key=lambda n: near[n])] if may else spans[outer][1]
            span, chosen = (at, at), []
        if mark.ordered:
            passed = span[0]
        spans[mark], children[mark] = span, []
        children[outer].append(mark)
        free[mark] = [n in chosen for n in range(len(words))]
        for n in chosen:
            left[n] = False
        if mark.start < mark.stop and not mark.kept:
            around.append(mark)

    def written(outer: Mark | None) -> Iterator[str | int]:
        at, end = spans[outer]
        for mark in sorted(children[outer], key=spans.__getitem__):
            start, stop = spans[mark]
            yield html.escape(text[at : max(at, start)], quote=False)
            yield from mark.before
            if not mark.kept:
                yield from written(mark)
            yield from mark.after
            at = max(at, stop)
        yield html.escape(text[at:end], quote=False)

    return [*written(None)]


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
