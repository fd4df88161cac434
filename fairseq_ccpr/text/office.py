"""Documents of Word and OpenDocument.

A tree of the XML would be written in another form than it was read: here elements are places among its bytes,
and what is outside of paragraphs is copied.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfileobj
from xml.parsers.expat import ParserCreate
from zipfile import ZipFile

from fairseq_ccpr.text.documents import OURS, Document
from fairseq_ccpr.text.html import Page

# MiB of a document's texts, and of all that is in it; elements inside each other
MOST_OF_TEXT, MOST_OF_ALL, MOST_DEEP = 32, 512, 200
# What begins and ends at places of its own, such as a bookmark, and what its two ends have in common.
_RANGE = re.compile(r"(?:w|text|office):(.*?)-?([sS]tart|[eE]nd)")
_NAMED = re.compile(r'\s(?:w:id|text:name|text:id|text:change-id|office:name)="([^"]*)"')
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")  # which XML cannot have


@dataclass(slots=True)
class _Element:
    """An element of XML: where it starts and ends, and where its content does, in bytes; `str` is text."""

    name: str
    start: int
    inside: int = 0
    past: int = 0
    end: int = 0
    divided: bool = False  # whether paragraphs are inside
    content: list[_Element | str] = field(default_factory=list)

    @property
    def elements(self) -> list[_Element]:
        return [one for one in self.content if isinstance(one, _Element)]

    @property
    def text(self) -> str:
        return "".join(one for one in self.content if isinstance(one, str))


def _parsed(xml: bytes, paragraphs: Sequence[str]) -> _Element:
    """Return the root around what XML has.

    Raises:
        ValueError, ExpatError: it is not well-formed, not in UTF-8, too deep, or has a document type.
    """
    parser, begun = ParserCreate("utf-8"), list[_Element]()  # whose start tag ends with what comes next
    around = [_Element("", 0)]

    def reach(*_: object) -> int:
        at = parser.CurrentByteIndex
        while begun:
            begun.pop().inside = at
        return at

    def start(name: str, attributes: object) -> None:
        begin = _Element(name, reach())
        if len(around) > MOST_DEEP:
            raise ValueError(f"its elements are more than {MOST_DEEP} deep")
        around[-1].content.append(begin)
        around.append(begin)
        begun.append(begin)

    def end(name: str) -> None:
        at, ended = reach(), around.pop()
        empty = ended.inside == at and xml[at - 2 : at] == b"/>"
        ended.past, ended.end = at, at if empty else xml.index(b">", at) + 1
        around[-1].divided |= ended.divided or name in paragraphs

    def text(data: str) -> None:
        reach()
        around[-1].content.append(data)

    def declared(_: str, encoding: str | None, *rest: object) -> None:
        if (encoding or "utf-8").lower() != "utf-8":
            raise ValueError(f"its XML is in {encoding}: expected UTF-8")

    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, text
    parser.DefaultHandler, parser.XmlDeclHandler = reach, declared
    parser.StartDoctypeDeclHandler = lambda *_: declared(
        "", "a document type"
    )  # whose entities would be lost
    parser.StartCdataSectionHandler = parser.EndCdataSectionHandler = reach
    parser.Parse(xml, True)
    return around[0]


class OpenDocument(Document):
    """A text of LibreOffice or another: a ZIP archive of XML, some of whose files have text.

    What is not in `paragraphs` is kept; in these what is not text, or `around` text, moves as a whole.
    """

    parts = re.compile(r"content\.xml|styles\.xml")
    paragraphs: tuple[str, ...] = ("text:p", "text:h", "svg:title", "svg:desc")
    around: tuple[str, ...] = ("text:span", "text:a", "text:meta")
    breaks: tuple[str, ...] = ("text:tab", "text:line-break")  # where a sentence ends
    needless: tuple[str, ...] = ()
    text_in: str = "{1}"  # what its text is written as, after the format

    def read(self) -> None:
        with ZipFile(self.path) as archive:
            every = archive.infolist()
            texts = [one for one in every if self.parts.fullmatch(one.filename)]
            for some, most in ((texts, MOST_OF_TEXT), (every, MOST_OF_ALL)):
                if sum(one.file_size for one in some) > most << 20:
                    raise ValueError(f"it has more than {most} MiB{' of text' * (some is texts)}")
            if not texts or (damaged := archive.testzip()):
                raise ValueError(f"{damaged} in it is damaged" if texts else "it has no text in it")
            self.names = [one.filename for one in texts]
            self.segments += (Page.of(self.shown(archive.read(one))) for one in texts)

    def write(self, texts: Sequence[str], path: Path) -> None:
        made = {name: self.restored(text).encode() for name, text in zip(self.names, texts)}
        with ZipFile(self.path) as archive, ZipFile(path, "w") as written:
            for one in archive.infolist():  # in their order, which OpenDocument prescribes
                if one.filename in made:
                    written.writestr(one, made[one.filename])
                else:
                    with archive.open(one) as source, written.open(copy(one), "w") as target:
                        copyfileobj(source, target)

    def shown(self, xml: bytes) -> str:
        """Write XML as HTML."""
        self.xml, self.at, self.found, self.usual = xml, 0, list[str](), ""
        self.fields = 0  # that have begun, and not ended: nothing is written until then
        self._outside(_parsed(xml, self.paragraphs))
        self.fields = 0
        self._divide(len(xml))
        return "".join(self.found)

    def written(self, start: int, end: int) -> str:
        return self.xml[start:end].decode()

    def _divide(self, end: int) -> None:
        """Keep what is before a place, and was not written, where no sentence goes on."""
        if not self.fields:
            self.found.append(f"<hr {self.keep(self.written(self.at, end))}>")
            self.keep(self.usual)  # by the number after that
            self.at, self.last = end, ""

    def _add(self, tag: str, start: int, end: int, after: str = "/>") -> None:
        if not self.fields:
            self.found.append(f"<{tag} {self.keep(self.written(start, end))}{after}")

    def _outside(self, element: _Element) -> None:
        for one in element.elements:
            if one.name in self.paragraphs:
                usual, self.usual = self.usual, self.usual_of(one)
                self._divide(_first(one))
                self._inside(one)
                self.at, self.usual = self.at if self.fields else one.past, usual
            elif one.divided:
                self._outside(one)

    def _inside(self, element: _Element) -> None:
        first = _first(element)
        for one in element.content:
            if isinstance(one, str):
                self.add_text(one)
            elif one.name in self.around:
                inner = next((own for own in one.elements if own.name == "w:sdtContent"), one)
                self._add("c", one.start, _first(inner), ">")
                self._inside(inner)
                self._add("/c", inner.past, one.end, ">")
            elif one.divided:
                self.at = self.at if self.fields else one.start
                self._outside(one)
                self._divide(one.end)
            elif one.start >= first:
                self.add(one, element)

    def add(self, element: _Element, parent: _Element) -> None:
        """Write an element without text of the paragraph."""
        ends = _RANGE.fullmatch(element.name)
        if ends:
            known = _NAMED.search(self.written(element.start, element.inside))
            name = re.sub(r"\W", "-", f"r-{ends[1]}-{known[1] if known else ''}").lower()
            self._add(f"{'/' * (ends[2].lower() == 'end')}{name}", element.start, element.end, ">")
        elif element.name == "text:s" and self.last.strip():  # else it is one more space
            self.add_text(" ")
        elif element.name not in self.needless:
            self._add("br" if element.name in self.breaks else "x", element.start, element.end)

    def add_text(self, text: str) -> None:
        self.found.append(html.escape(text, quote=False))
        self.last = text[-1]

    def usual_of(self, paragraph: _Element) -> str:
        """Return the format that most of a paragraph has."""
        return ""

    def restored(self, text: str) -> str:
        """Write the HTML of `shown` as XML."""
        styles, found = [""], list[str]()
        for part in re.split("(<[^>]*>)", text):
            if tag := OURS.fullmatch(part):
                written = self.kept[int(tag[3])]
                if tag[2] == "m":
                    styles = styles[:-1] if tag[1] else [*styles, written]
                    continue
                found.append(written)
                if tag[2] == "hr":
                    styles = [self.kept[int(tag[3]) + 1]]
            elif part:
                found.append(self.text_in.format(styles[-1], _CONTROLS.sub("", part)))
        return "".join(found)


def _first(element: _Element) -> int:
    """Return where an element's content begins, behind its properties."""
    return max((one.end for one in element.elements if one.name.endswith("Pr")), default=element.inside)


class WordDocument(OpenDocument):
    """A text of Word. Runs of the format that most of a paragraph has become text, others elements."""

    parts = re.compile(r"word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
    paragraphs = ("w:p",)
    around = ("w:hyperlink", "w:ins", "w:moveTo", "w:sdt", "w:smartTag", "w:customXml", "w:dir", "w:bdo")
    breaks = ("w:br", "w:cr", "w:tab", "w:ptab")
    needless = ("w:proofErr", "w:lastRenderedPageBreak", "w:lang", "w:rPrChange")
    text_in = '<w:r>{0}<w:t xml:space="preserve">{1}</w:t></w:r>'

    def read(self) -> None:
        self.formats, self.began = dict[str, str](), _Element("", 0)
        super().read()

    def add(self, element: _Element, parent: _Element) -> None:
        if element.name != "w:r":
            return super().add(element, parent)
        own = [one for one in element.elements if one.name == "w:fldChar"]
        ends = Counter(re.findall("begin|end", "".join(self.written(one.start, one.end) for one in own)))
        if self.fields or ends["begin"]:  # a field stays as a whole, which may be several paragraphs
            if not self.fields:
                self.at, self.began = element.start, parent
            self.fields = max(0, self.fields + ends["begin"] - ends["end"])
            if self.began is parent:
                self._add("x", self.at, element.end)
            else:
                self._divide(element.end)
            return None
        style = self._style(element)
        for one in element.elements:
            if one.name == "w:t" and one.text:
                self._add_run(html.escape(one.text, quote=False), style)
            elif one.name not in ("w:t", "w:rPr", *self.needless):
                tag = "br" if one.name in self.breaks else "x"
                whole = f"<w:r>{style}{self.written(one.start, one.end)}</w:r>"
                self.found.append(f"<{tag} {self.keep(whole)}/>")

    def add_text(self, text: str) -> None:
        """Leave out what is between runs."""

    def _add_run(self, text: str, style: str) -> None:
        if style not in self.formats:
            self.formats[style] = self.keep(style)
        tag = f"m {self.formats[style]}>"
        if style == self.usual:
            self.found.append(text)
        elif self.found[-1] == f"</{tag}":
            self.found[-1:] = [text, f"</{tag}"]
        else:
            self.found += [f"<{tag}", text, f"</{tag}"]

    def _style(self, run: _Element) -> str:
        own = (one for format in run.elements if format.name == "w:rPr" for one in format.elements)
        parts = [self.written(one.start, one.end) for one in own if one.name not in self.needless]
        return f"<w:rPr>{''.join(parts)}</w:rPr>" if parts else ""

    def usual_of(self, paragraph: _Element) -> str:
        lengths, waiting = Counter[str](), paragraph.elements
        for one in waiting:
            if one.name == "w:r":
                lengths[self._style(one)] += sum(len(own.text) for own in one.elements if own.name == "w:t")
            elif one.name in (*self.around, "w:sdtContent"):
                waiting += one.elements
        return max(lengths, key=lambda style: lengths[style], default="")
