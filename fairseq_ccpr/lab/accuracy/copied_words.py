"""How much of translations is copied from text, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fairseq_ccpr.evaluation.copying import copied

RUN = 5  # so many words in a row are copied


def copied_words(
    systems: Mapping[str, Iterable[Sequence[str]]], text: Iterable[Sequence[str]]
) -> dict[str, float]:
    """Compute the share of the words of translations, 0 to 1, that stand in runs of `RUN` and more that a line has.

    Whoever calls says what words are, and whether punctuation is among them.

    Args:
        systems: the words of each line, of each system.
        text: the words of each line of the text; it is read once.
    """
    numbers: dict[str, int] = {}  # of the words of translations, from 1: other words end a run, as lines do
    ids = {
        name: [np.array([numbers.setdefault(word, len(numbers) + 1) for word in line]) for line in lines]
        for name, lines in systems.items()
    }
    of_text = (number for line in text for number in (*(numbers.get(word, 0) for word in line), 0))
    return copied(ids, np.fromiter(of_text, np.int32), RUN)
