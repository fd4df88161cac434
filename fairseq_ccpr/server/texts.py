"""From texts of any length, plain or HTML, to sentences, and back to texts with their translations."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

TEXT, HTML = "text", "html"
# Where a sentence may end: marks, what closes with them, and space, which Chinese and Japanese do without.
_END = re.compile(r"[.!?…]+[\"'”“’‘»«)\]]*\s+|[。！？]+[」』”]*\s*")
_OPENING = "\"'“„«‘‚([¿¡-–— "
_ABBREVIATIONS = """
abs bd bzw ca cf dr etc evtl fig ggf hl jr mr mrs ms nr prof sog sr st str tel usw vgl vol vs
"""
_NO_END = frozenset(_ABBREVIATIONS.split())
_UNTRANSLATED = ("script", "style")


@dataclass
class Segments:
    """A text in parts, some of which are sentences.

    >>> text = Segments.of("Es werde Licht! Und es\\n  ward Licht.")
    >>> text.sentences
    ['Es werde Licht!', 'Und es', 'ward Licht.']
    >>> text.join(["Let there be light!", "And there", "was light."])
    'Let there be light! And there\\n  was light.'
    """

    parts: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the sentences, in `parts`
    escape: Callable[[str], str] = str

    @classmethod
    def of(cls, text: str, kind: str = TEXT) -> Segments:
        """Divide a text of the kind `TEXT` or `HTML`; of the latter, what stands between tags is translated."""
        if kind == HTML:
            reader = _Reader()
            reader.feed(text)
            reader.close()
            return reader.segments
        segments = cls()
        segments.add(text)
        return segments

    def add(self, text: str) -> None:
        """Append the sentences of a text, and what stands between them."""
        at = 0
        for start, end in _sentences(text):
            self.places.append(len(self.parts) + 1)
            self.parts += [text[at:start], text[start:end]]
            at = end
        self.parts.append(text[at:])

    @property
    def sentences(self) -> list[str]:
        """What is to be translated."""
        return [self.parts[place] for place in self.places]

    def join(self, translations: Sequence[str]) -> str:
        """Return the text with each of its sentences replaced by its translation, in order."""
        parts = list(self.parts)
        for place, translation in zip(self.places, translations, strict=True):
            parts[place] = self.escape(translation)
        return "".join(parts)


class _Reader(HTMLParser):
    """Keeps tags, comments, scripts and styles as parts of their own."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.segments = Segments(escape=lambda text: html.escape(text, quote=False))

    def _keep(self, markup: str) -> None:
        self.segments.parts.append(markup)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._keep(self.get_starttag_text() or "")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._keep(f"</{tag}>")

    def handle_comment(self, data: str) -> None:
        self._keep(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def unknown_decl(self, data: str) -> None:
        self._keep(f"<![{data}]>")

    def handle_pi(self, data: str) -> None:
        self._keep(f"<?{data}>")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in _UNTRANSLATED:
            self._keep(data)
            return
        first = len(self.segments.parts)
        self.segments.add(data)
        between = set(range(first, len(self.segments.parts))) - set(self.segments.places)
        for place in between:
            self.segments.parts[place] = self.segments.escape(self.segments.parts[place])


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """Find where sentences begin and end; a line ends one, too."""
    for line in re.finditer(r"[^\n\r]+", text):
        start, last = line.span()
        for mark in _END.finditer(text, start, last):
            if _ends(text, start, mark):
                yield from _trimmed(text, start, mark.end())
                start = mark.end()
        yield from _trimmed(text, start, last)


def _ends(text: str, start: int, mark: re.Match[str]) -> bool:
    """Tell whether a sentence ends with a mark: not after `Dr.`, `3.`, `z. B.`, nor before a small letter."""
    if mark[0][0] in "。！？":
        return True
    following = text[mark.end() : mark.end() + 8].lstrip(_OPENING)[:1]
    if not following or following.islower():
        return False
    if mark[0].rstrip() != ".":
        return True
    words = text[max(start, mark.start() - 40) : mark.start()].split()
    word = words[-1].lstrip(_OPENING).casefold() if words else ""
    return len(word) > 1 and not word.isdigit() and word not in _NO_END and "." not in word


def _trimmed(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Leave out the space around a sentence, and the sentence where it is nothing else."""
    sentence = text[start:end]
    start, end = end - len(sentence.lstrip()), start + len(sentence.rstrip())
    if start < end:
        yield start, end
