"""Unknown subwords become what the model attended to when it wrote them, as with --replace-unk."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.text.decoder_subwords import UNKNOWN_SIGN
from fairseq_ccpr.text.pairs import one_line
from fairseq_ccpr.text.schemes import scheme_of
from fairseq_ccpr.text.sentencepiece import BLANK

OFF = "none"  # the value of --replace-unk that leaves <unk> in translations
REACHED = 0.1  # the least attention with which unknown characters are copied, of all that a token has


def given_text(sentence: str, task: Any) -> str:
    """Return a source sentence in one line, without the language tag that some models want in front of it."""
    return scheme_of(task.bpe).untagged(one_line(sentence))


def nothing_known(sources: Tensor, task: Any) -> bool:
    """Tell whether a source, int64 [S], has an unknown subword, and none that is known but blanks."""
    dictionary = task.source_dictionary
    scheme = scheme_of(task.bpe)
    symbols = {scheme.untagged(dictionary[token]) for token in _text_tokens(sources, task)[0]}
    return dictionary.unk_word in symbols <= {dictionary.unk_word, BLANK, ""}


def copies(task: Any, text: str | None, sources: Tensor, hypothesis: dict[str, Any]) -> list[str]:
    """Return what each of a hypothesis's U unknown subwords is written as: the source's, or nothing.

    It is the subword that it attends to most, or the whole run of unknown ones, each once: of two that attend
    to the same, the one that attends to it more has it, and the other the next best run of unknown ones, if
    any.

    Args:
        text: the source as it was given; None where its subwords alone are known, so that unknown ones become
            a sign.
        sources: its tokens, int64 [S], with padding and tags.
        hypothesis: of fairseq's generator, with `attention` [S, T].
    """
    target = task.target_dictionary
    written = hypothesis["tokens"].tolist()
    places = [place for place, token in enumerate(written) if token == target.unk()]
    if not places:  # as in most, for which no source is copied from the GPU
        return []
    tokens, columns = _text_tokens(sources, task)
    found: dict[int, str] = {}
    if not tokens or not hypothesis["attention"].numel():
        return [""] * len(places)
    looked = hypothesis["attention"][columns][:, places].float().cpu()
    unk, blank = task.source_dictionary.unk(), task.source_dictionary.index(BLANK)
    runs = [[*run] for _, run in groupby(range(len(tokens)), lambda n: -1 if tokens[n] == unk else n)]
    units = [run for run in runs if tokens[run[0]] != blank or blank == unk]
    share = torch.stack([looked[unit].sum(dim=0) for unit in units])  # [units, U]
    favourites, used = share.argmax(dim=0).tolist(), set[int]()
    for pair in share.flatten().argsort(descending=True, stable=True).tolist():
        unit, number = divmod(pair, len(places))
        is_unknown = tokens[units[unit][0]] == unk and share[unit, number] >= REACHED
        if number in found or unit in used or not (is_unknown or favourites[number] == unit):
            continue
        used.add(unit)
        symbols = _written(task, text, tokens, units[unit])
        after_blank = places[number] > 0 and target[written[places[number] - 1]] == BLANK
        found[number] = symbols.removeprefix(BLANK) if after_blank else symbols
    return [found.get(number, "") for number in range(len(places))]


def _text_tokens(sources: Tensor, task: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that are text, and where they are."""
    dictionary = task.source_dictionary
    others = {dictionary.pad(), dictionary.eos(), *task.tags.ids(dictionary)}
    both = [(token, column) for column, token in enumerate(sources.tolist()) if token not in others]
    return [token for token, _ in both], [column for _, column in both]


def _written(task: Any, text: str | None, tokens: list[int], unit: list[int]) -> str:
    """Write neighbouring subwords of a source as the decoder would, with the characters that were given."""
    dictionary, scheme = task.source_dictionary, scheme_of(task.bpe)
    if text is not None:
        text = task.tokenizer.encode(text) if task.tokenizer is not None else text
        symbols = scheme.encode(text).split()
        if len(symbols) == len(tokens):
            return scheme.as_given(text, symbols, unit[0], unit[-1])
    return " ".join(UNKNOWN_SIGN if tokens[n] == dictionary.unk() else dictionary[tokens[n]] for n in unit)
