"""Text to build from: files of one sentence per line, whose lines are counted as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import read_lines


class Lines:
    """The lines of a text that are not empty, in order, any number of times.

    Attributes:
        empty: lines left out, once they were all read.
        sentences, repeated: different lines that are taken, and lines equal to an earlier one: whoever finds
            equal ones counts them.
    """

    def __init__(self, read: Callable[[], Iterable[str]], name: str) -> None:
        self._read, self.name = read, name
        self.empty = self.sentences = self.repeated = 0

    @classmethod
    def of_files(cls, paths: list[Path]) -> Lines:
        return cls(lambda: (line for path in paths for line in read_lines(path)), ", ".join(map(str, paths)))

    def __iter__(self) -> Iterator[str]:
        empty = 0
        for line in self._read():
            if line.strip():
                yield line
            else:
                empty += 1
        self.empty = empty

    def refuse_none(self) -> None:
        if not self.sentences:
            raise ConfigurationError(
                f"{self.name}: there is no text in it; give files of one sentence per line"
            )
