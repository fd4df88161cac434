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
_ABBREVIATIONS = "abs bd bzw ca cf dr etc evtl fig ggf hl jr mr mrs ms nr prof sog sr st str tel usw vgl vol vs"
_NO_END = frozenset(_ABBREVIATIONS.split())
_SCRIPTS = ("script", "style")
# Elements that are kept unless they say translate="yes": what computers read or write.
_KEPT = (*_SCRIPTS, "code", "kbd", "pre", "samp", "var")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
_BLOCKS = "article aside blockquote div dl footer form h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section table ul"
_MOST_OPEN = 512  # elements that an end tag may close, as in browsers
# What an element ends that stands open before it.
_ENDED_BY = dict.fromkeys(_BLOCKS.split(), ("p",)) | {
    "li": ("p", "li"), "dt": ("p", "dt", "dd"), "dd": ("p", "dt", "dd"), "option": ("option",),
    "td": ("p", "td", "th"), "th": ("p", "td", "th"), "tr": ("p", "td", "th", "tr"),
}  # fmt: skip


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
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.segments = Segments(escape=lambda text: html.escape(text, quote=False))
        self.open: list[tuple[str, bool]] = []  # elements, and whether their text is kept

    def _keep(self, markup: str) -> None:
        self.segments.parts.append(markup)

    @property
    def kept(self) -> bool:
        return bool(self.open) and self.open[-1][1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._keep(self.get_starttag_text() or "")
        while self.open and self.open[-1][0] in _ENDED_BY.get(tag, ()):
            self.open.pop()
        if tag in _VOID:
            return
        given = {name: (value or "").strip() for name, value in reversed(attrs)}  # the first of a name counts
        kept = self.kept or tag in _KEPT or "notranslate" in given.get("class", "").split()
        said = given.get("translate", "as around").lower() if tag not in _SCRIPTS else "no"
        self.open.append((tag, {"no": True, "yes": False, "": False}.get(said, kept)))

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._keep(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._keep(f"</{tag}>")
        for depth, (name, _) in enumerate(reversed(self.open[-_MOST_OPEN:]), 1):
            if name == tag:
                del self.open[-depth:]
                break

    def handle_comment(self, data: str) -> None:
        self._keep(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._keep(f"<!{decl}>")

    def unknown_decl(self, data: str) -> None:
        self._keep(f"<![{data}]>")

    def handle_pi(self, data: str) -> None:
        self._keep(f"<?{data}>")

    def handle_data(self, data: str) -> None:
        if self.kept:
            self._keep(data if self.cdata_elem in _SCRIPTS else self.segments.escape(data))
            return
        first = len(self.segments.parts)
        self.segments.add(data)
        between = set(range(first, len(self.segments.parts))) - set(self.segments.places)
        for place in between:
            self.segments.parts[place] = self.segments.escape(self.segments.parts[place])


def _sentences(text: str) -> Iterator[tuple[int, int]]:
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
    sentence = text[start:end]
    start, end = end - len(sentence.lstrip()), start + len(sentence.rstrip())
    if start < end:
        yield start, end
