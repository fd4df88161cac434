"""The interface of a mining method: by what keys it compares texts, how it matches them, how it is tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.mining.pknn import Answers

Matcher = Callable[[SentenceKeys], Answers]  # keys of S sources -> the likeliest target of each


class MiningMethod(Protocol):
    """A way to find the translations of sentences: a frozen dataclass whose fields are its settings.

    A method is a file with such a class and a line in `METHODS`. Miner, trials, tuning and files of settings know
    no more of it than this.

    Attributes:
        name: in files of settings and after `--method`.
        window: words of the fragments that its keys are made from; None where sentences are compared as wholes.
        threshold: the score from which a pair is one.
    """

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def window(self) -> int | None: ...  # noqa: D102

    @property
    def threshold(self) -> float: ...  # noqa: D102

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Make the keys of a text; `text` has vectors of fragments only if there is a window."""

    def matcher(self, targets: SearchableText, sources: Callable[[], SearchableText]) -> Matcher:
        """Prepare to match any of the sources, block by block.

        Args:
            targets: the sentences to choose from, by the keys of this method.
            sources: indexes all source sentences, which takes time; for methods that search in both directions.
        """

    def tune(
        self, queries: SentenceKeys, gold: np.ndarray, targets: SearchableText, sources: Callable[[], SearchableText],
        grid: Grid,
    ) -> tuple[MiningMethod, float]:  # fmt: skip
        """Choose the settings with the highest F1.

        Args:
            queries: keys of S labelled sources.
            gold: int64 [S], the target of each or -1.
            targets: as for `matcher`.
            sources: as for `matcher`.
            grid: values to try, for methods that need some.

        Returns:
            This method with those settings, and its F1.
        """
