"""Documents in, documents of the same kind out: their common ground, and plain text, HTML and gettext's PO.

All but plain text becomes HTML, and comes back by its tags. In these a number stands for what is kept, so
that `html.Page` leaves it as it was and puts formats and links at the words that they belong to.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.sentences import Parts, Segments

MOST_SHOWN = 100  # characters of what is kept that the model reads in its sentence
# a tag that stands for what is kept
OURS = re.compile(r'<(/?)([\w-]+) n="(\d+)"(?: alt="([^"]*)")?(?:/?>| translate="no">[^<]*</x>)')
# What a translation of a message must have again: of C, of Python and others; a mark of a key, a tag.
_PLACEHOLDER = re.compile(
    r"%(?:\(\w+\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[zjtL])?[a-zA-Z@%]|%\d+"
    r"|\n|[$%]?\{[^{}]*\}|&\w+;|&(?=\w)|</?\w[^<>]*>"
)


class Document:
    """A file whose texts are translated: `segments` has each with its sentences. This one is plain text."""

    kind: ClassVar[type[Segments]] = Segments
    package: ClassVar[str | None] = None  # that it needs

    def __init__(self, path: Path) -> None:
        self.path, self.segments, self.kept = path, list[Segments](), list[str]()
        self.read()

    def read(self) -> None:
        """Divide the file into segments."""
        self.segments.append(self.kind.of(self.path.read_bytes().decode("utf-8-sig")))

    def save(self, translations: Iterable[str | Parts], path: Path) -> None:
        """Write the file with the translations of all sentences, in their order."""
        each = iter(translations)
        self.write([text.join([next(each) for _ in text.sentences]) for text in self.segments], path)

    def write(self, texts: Sequence[str], path: Path) -> None:
        """Write the file with other texts in place of its segments."""
        path.write_bytes("".join(texts).encode())

    def keep(self, written: str) -> str:
        """Return the attribute that stands for something that is kept."""
        self.kept.append(written)
        return f'n="{len(self.kept) - 1}"'

    def alone(self, written: str, shown: str = "") -> str:
        """Return the element that stands for something that is kept, and that the model reads as `shown`."""
        return f'<x {self.keep(written)} translate="no">{html.escape(shown[:MOST_SHOWN].strip())}</x>'


class HtmlDocument(Document):
    """A page of HTML."""

    kind = Page


class GettextDocument(Document):
    """A catalogue of messages: those that are empty get a translation, marked fuzzy, as nobody has read it.

    Those with plurals stay, whose number is that of another language.
    """

    package = "polib"

    def read(self) -> None:
        import polib

        self.catalogue = polib.pofile(str(self.path))
        empty = (one for one in self.catalogue if not (one.obsolete or one.msgstr or one.msgid_plural))
        self.entries = [*empty]
        self.segments += (Page.of(self.shown(one.msgid)) for one in self.entries)

    def shown(self, message: str) -> str:
        """Write a message as HTML that keeps placeholders; sentences have those that are words."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", message)  # text and placeholders in turns
        parts[::2] = map(html.escape, parts[::2])
        parts[1::2] = map(self._kept, parts[1::2])
        return "".join(parts)

    def _kept(self, placeholder: str) -> str:
        if placeholder[0] not in "<\n":
            return self.alone(placeholder, placeholder * (placeholder[0] != "&"))
        number, ends = self.keep(placeholder), "/" * placeholder.startswith("</")
        return f"<br {number}/>" if placeholder == "\n" else f"<{ends}c {number}>"

    def write(self, texts: Sequence[str], path: Path) -> None:
        for entry, text in zip(self.entries, texts):
            made = html.unescape(OURS.sub(lambda tag: html.escape(self.kept[int(tag[3])]), text))
            had, has = (sorted(_PLACEHOLDER.findall(one)) for one in (entry.msgid, made))
            if had == has:
                entry.msgstr, entry.flags = made, [*dict.fromkeys([*entry.flags, "fuzzy"])]
        self.catalogue.encoding = "utf-8"  # whatever it was: it may lack the translations' characters
        self.catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
        self.catalogue.save(str(path))
