"""The interface of a mining method: by what keys it compares texts, how it matches them, how it is tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np

from fairseq_ccpr.lab.mining.encoded_text import EncodedText
from fairseq_ccpr.lab.mining.grid import Grid
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.pknn import Answers

# n sources, and the target that is hidden from each (-1: none) -> the likeliest target of each, both int64 [n]
Matcher = Callable[[np.ndarray, np.ndarray], Answers]


class MiningMethod(Protocol):
    """A way to find the translations of sentences: a frozen dataclass whose fields are its settings.

    A method is a file with such a class and a line in `METHODS`. Miner, trials, tuning and files of settings know
    no more of it than this.

    Attributes:
        name: in files of settings and after `--method`.
        window: words of the fragments that its keys are made from; None where sentences are compared as wholes.
        stride: words from one fragment to the next.
        centred: whether its keys are to be centred, each side by itself; see `Centre`.
        threshold: the score from which a pair is one.
    """

    name: ClassVar[str]
    centred: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def window(self) -> int | None: ...  # noqa: D102

    @property
    def stride(self) -> int: ...  # noqa: D102

    @property
    def threshold(self) -> float: ...  # noqa: D102

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Make the keys of a text; `text` has vectors of fragments only if there is a window."""

    def matcher(self, sources: SearchableText, targets: SearchableText) -> Matcher:
        """Prepare to match any of the sources with the targets; both are searchable by the keys of this method.

        Hiding a target from a source gives the answer that the source would have if its partner were not there.
        """

    def tune(
        self, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
    ) -> tuple[MiningMethod, float]:
        """Choose the settings with the highest F1.

        Args:
            sources: the text that the labelled sources are part of.
            targets: what they are matched with.
            labels: what is known of some of the sources.
            grid: values to try, for methods that need some.

        Returns:
            This method with those settings, and its F1.
        """
