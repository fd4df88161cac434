"""Documents in, documents of the same kind out: Word, OpenDocument, HTML, Markdown, gettext's PO, plain text.

All but plain text becomes HTML, and comes back by its tags. In these a number stands for what is kept, so
that `html.Page` leaves it as it was and puts formats and links at the words that they belong to. A tree of the
XML would be written in another form than it was read: here elements are places among its bytes, and what is
outside of paragraphs is copied.
"""

from __future__ import annotations

import html
import logging
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from shutil import copyfileobj
from typing import Any, ClassVar
from xml.parsers.expat import ExpatError, ParserCreate
from zipfile import BadZipFile, ZipFile

from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.sentences import Parts, Segments

EXTRA = "files"
# MiB of a document's texts, and of all that is in it; elements inside each other
MOST_OF_TEXT, MOST_OF_ALL, MOST_DEEP = 32, 512, 200
MOST_SHOWN = 100  # characters of what is kept that the model reads in its sentence
_OURS = re.compile(r'<(/?)([\w-]+) n="(\d+)"(?: alt="([^"]*)")?(?:/?>| translate="no">[^<]*</x>)')
# What begins and ends at places of its own, such as a bookmark, and what its two ends have in common.
_RANGE = re.compile(r"(?:w|text|office):(.*?)-?([sS]tart|[eE]nd)")
_NAMED = re.compile(r'\s(?:w:id|text:name|text:id|text:change-id|office:name)="([^"]*)"')
# What a translation of a message must have again: of C, of Python and others; a mark of a key, a tag.
_PLACEHOLDER = re.compile(
    r"%(?:\(\w+\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[zjtL])?[a-zA-Z@%]|%\d+"
    r"|\n|[$%]?\{[^{}]*\}|&\w+;|&(?=\w)|</?\w[^<>]*>"
)
# Of YAML, which a rule does not begin, or of TOML.
_FRONT_MATTER = re.compile(
    r"\A(?:---[ \t]*\n(?=(?:#[^\n]*\n)*[\w\"'][\w\"'.-]*:\s).*?^(?:---|\.\.\.)|\+\+\+[ \t]*\n.*?^\+\+\+)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
# What stays of Markdown's text: addresses, notes, templates, tasks; a line that begins what is set apart.
_UNREAD = re.compile(
    r"(https?://[^\s<>]*[^\s<>.,;:!?)\]'\"]|\[\^[^\]\s]+\]:?"
    r"|\{\{.*?\}\}|\{%.*?%\}|\{[#.:][^{}]*\}|^\[[ xX]\](?=\s))"
)
_SET_APART = re.compile(r"(?:!!!|\?\?\?|:::).*|\[!\w+\]$|:[ \t]+(?=\S)")
_FORMULA = re.compile(r"\$\$(?!\$).+?\$\$|\$(?![\s$])(?:\\.|[^\\$])+(?<!\s)\$(?!\d)", re.DOTALL)
# A reference by its own text, and its label, which is written where that is translated.
_OF_ITSELF, _LABEL = re.compile(r"\[([^\0\[\]]*)\]\0\1\0", re.IGNORECASE), re.compile(r"\0(.*?)\0(?:\[\])?")
_MARKING = r"\\`*_\[\]<>()#+.!|~&=$-"  # characters that may be markup in Markdown
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")  # which XML cannot have


logger = logging.getLogger(__name__)


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
            made = html.unescape(_OURS.sub(lambda tag: html.escape(self.kept[int(tag[3])]), text))
            had, has = (sorted(_PLACEHOLDER.findall(one)) for one in (entry.msgid, made))
            if had == has:
                entry.msgstr, entry.flags = made, [*dict.fromkeys([*entry.flags, "fuzzy"])]
        self.catalogue.encoding = "utf-8"  # whatever it was: it may lack the translations' characters
        self.catalogue.metadata["Content-Type"] = "text/plain; charset=UTF-8"
        self.catalogue.save(str(path))


class MarkdownDocument(Document):
    """A text in Markdown: of CommonMark, with tables, crossed out text, formulas and what `_UNREAD` says.

    Prose is translated, a block at a time. Where its translation would be read as other markup, what may be
    such is escaped; where that is not enough, the block stays, which a warning tells.
    """

    package = "markdown_it"

    def read(self) -> None:
        from markdown_it import MarkdownIt

        written = self.path.read_bytes().decode("utf-8-sig").replace("\0", "\ufffd")  # as Markdown reads it
        self.line_end = "\r\n" if "\r\n" in written else "\n"
        self.text, self.env = re.sub("\r\n?", "\n", written), dict[str, Any]()
        lengths = (len(line) + 1 for line in self.text.split("\n"))
        self.starts, self.stay = (
            [*accumulate(lengths, initial=0)],
            list[int](),
        )  # of lines; what stays, by line
        self.parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        self.parser.disable(["text_join", "fragments_join"])  # which lose what was written
        ruler = self.parser.inline.ruler
        ruler.before("escape", "formula", _formula)
        for name, rule in zip(ruler.get_active_rules(), ruler.getRules("")):
            ruler.at(name, _noting(rule))
        self.blocks = list[tuple[int, int, str]]()  # where each is, and what has to be escaped in it
        for places, bar, tokens in self._divided():
            self.blocks.append((places[0], places[-1], bar))
            self.segments.append(Page.of("".join(self._shown(places, tokens))))

    def _divided(self) -> Iterator[tuple[list[int], str, Sequence[Any]]]:
        """Find the blocks that have text: the places of its characters, what is escaped in it, its tokens."""
        body, reached = _FRONT_MATTER.sub(lambda front: "\n" * front[0].count("\n"), self.text), 0
        tokens: list[Any] = self.parser.parse(body, self.env)
        for opened, token in pairwise(tokens):
            if token.type != "inline" or not any(map(str.isalnum, token.content)):
                continue
            (first, past), own = token.map, token.content.split("\n")
            bar = "|" if opened.type in ("th_open", "td_open") else opened.markup[:1].strip("=-")
            # before it may be lines of white space that Markdown does not know
            each = (self._in_lines(own, number) for number in range(first, past - len(own) + 1))
            found = (
                self._in_line(token.content, opened.markup, first, reached)
                if bar
                else next(filter(None, each), [])
            )
            if found:
                reached = found[-1]
                yield found, bar, token.children
            else:
                self.stay.append(first + 1)

    def _in_line(self, content: str, markup: str, number: int, reached: int) -> list[int]:
        """Find a heading, or a cell, in its line: the places of its characters, or nothing."""
        written = [f"\\{one}" if one == "|" and not markup else one for one in content]
        after = max(reached, self.text.find(markup, self.starts[number]) + len(markup))
        begin = self.text.find("".join(written), after, self.starts[number + 1])
        return [*accumulate(map(len, written), initial=begin)] if begin >= 0 else []

    def _in_lines(self, own: list[str], first: int) -> list[int]:
        """Find lines, each at the end of one of the text: the places of their characters, or nothing."""
        places = list[int]()
        for line, (start, stop) in zip(own, pairwise(self.starts[first : first + len(own) + 1])):
            space = len(line) - len(line.lstrip(" \t"))
            begin = self.text.rfind(line[space:], start, stop)
            if begin < 0 or self.text[begin + len(line) - space : stop].strip():
                return []
            places += (begin + max(0, at - space) for at in range(len(line) + 1))
        return places

    def _shown(self, places: list[int], tokens: Sequence[Any]) -> Iterator[str]:
        """Write a block as HTML."""
        each, last = iter(tokens), "softbreak"
        for one in each:
            before, last, content = last, one.type, one.content
            start, end = one.meta.get("span", (0, 0))
            written, label = self.text[places[start] : places[end]] or one.markup, one.meta.get("label", "")
            if last == "text" and before == "softbreak" and (apart := _SET_APART.match(content)):
                yield f"<hr {self.keep(apart[0])}>"
                content = content[apart.end() :]
            if last == "text" or (last == "text_special" and (content.isspace() or content.isalpha())):
                for n, part in enumerate(_UNREAD.split(content)):  # special such as &auml;
                    yield self.alone(part, part) if n % 2 else html.escape(part, quote=False)
            elif one.type == "softbreak":  # after which may be what marks a quotation
                yield written if written == "\n" else f"\n<s {self.keep(written)}/>"
            elif one.type == "hardbreak":
                yield f"<br {self.keep(written)}/>"
            elif one.markup == "autolink":
                yield self.alone(written, next(each).content)
                next(each)
            elif one.type == "image" and one.content and re.search(r"[\\`*_\[\]<&\n]", one.content) is None:
                kept = self.text[places[start + 2 + len(one.content)] : places[end]]
                yield f'<img {self.keep(kept[:1] + label + kept[1:])} alt="{html.escape(one.content)}">'
            elif one.type == "html_inline" and (tag := re.match(r"</?[a-zA-Z][\w-]*", written)):
                yield f"{tag[0]} {self.keep(written)}{'/' * written.endswith('/>')}>"
            elif one.nesting:
                yield f"<{'/' * (one.nesting < 0)}c {self.keep(written[:1] + label + written[1:])}>"
            else:
                yield self.alone(written, one.content * (one.type != "image"))

    def _restored(self, text: str, escaped: str) -> str:
        """Write the HTML of `_shown` as Markdown; a backslash comes before these characters of its text."""

        def plain(text: str) -> str:
            return re.sub(f"[{escaped}]", r"\\\g<0>", html.unescape(text)) if escaped else html.unescape(text)

        found, at = list[str](), 0
        for tag in _OURS.finditer(text):
            before, kept = text[at : tag.start()], self.kept[int(tag[3])]
            if tag[2] == "s":  # where it is not inside of a sentence, the end of the line is part of it
                before, kept = (before[:-1], kept) if before.endswith("\n") else (before, "")
            found += [plain(before), f"![{plain(tag[4])}" if tag[4] is not None else "", kept]
            at = tag.end()
        return _LABEL.sub(r"[\1]", _OF_ITSELF.sub(r"[\1]", "".join([*found, plain(text[at:])])))

    def _read_as(self, text: str, bar: str) -> tuple[list[str], str]:
        """Return the markup of a block, sorted, and its text as it is shown."""
        # a heading, as there may be more of its marks at the end
        tokens = self.parser.parse("# " * (bar == "#") + re.sub(r"\n[ \t>]*", "\n", text), self.env)
        each = [one for token in tokens for one in (token, *(token.children or ()))]
        return sorted(
            f"{one.type} {one.attrs} {one.content * (one.type not in ('image', 'inline'))}"
            for one in each
            if one.type not in ("text", "text_special", "softbreak")
        ), "".join(one.content for one in each if one.type in ("text", "text_special"))

    def write(self, texts: Sequence[str], path: Path) -> None:
        made, reached, stay = list[str](), 0, [*self.stay]
        for (start, end, bar), text in zip(self.blocks, texts):
            own = self.text[start:end]
            least, most = (self._restored(text, escaped) for escaped in (bar.strip("#"), _MARKING))
            wanted = self._read_as(own, bar)[0], self._read_as(most, bar)[1]  # which shows what it says
            best = next((one for one in (least, most) if self._read_as(one, bar) == wanted), None)
            stay += [bisect_right(self.starts, start)] * (best is None)
            made += [self.text[reached:start], own if best is None else best]
            reached = end
        if stay:
            said = "%s: blocks that stay untranslated, as Markdown would read other markup: %d, of line %s"
            logger.warning(said, self.path, len(stay), ", ".join(map(str, sorted(stay))))
        whole = "".join([*made, self.text[reached:]])
        path.write_bytes(whole.replace("\n", self.line_end).encode())


def _noting(rule: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """Make a rule for inline markup tell of each token where it was written."""

    def noting(state: Any, silent: bool) -> bool:
        start, known, waiting = state.pos, len(state.tokens), state.pending
        if not rule(state, silent):
            return False
        made = [] if silent else [one for one in state.tokens[known:] if one.type != "text"]
        if made:  # the space before a break is part of it
            space = len(waiting) - len(waiting.rstrip(" ")) if made[0].type.endswith("break") else 0
            made[0].meta["span"], label = (start - space, state.pos), made[0].content
            if made[0].type == "link_open" and made[0].markup != "autolink":
                end = state.md.helpers.parseLinkLabel(state, start, True)
                made[0].meta["span"], made[-1].meta["span"] = (start, start + 1), (end, state.pos)
                label = state.src[start + 1 : end]
            of_itself = state.src[start : state.pos].removeprefix("!") in (f"[{label}]", f"[{label}][]")
            if of_itself and label[:1] != "^":  # which is a note's
                made[-1].meta["label"] = f"\0{' '.join(label.split())}\0"
        return True

    return noting


def _formula(state: Any, silent: bool) -> bool:
    """Read a formula of TeX where pandoc reads one, by a rule for inline markup."""
    found = _FORMULA.match(state.src, state.pos, state.posMax)
    if found and not silent:
        state.push("formula", "", 0).content = found[0]
    state.pos = found.end() if found else state.pos
    return found is not None


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
            if tag := _OURS.fullmatch(part):
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


FORMATS: dict[str, type[Document]] = {
    ".docx": WordDocument,
    ".odt": OpenDocument,
    ".html": HtmlDocument,
    ".htm": HtmlDocument,
    ".md": MarkdownDocument,
    ".po": GettextDocument,
    ".txt": Document,
}


def open_document(path: Path) -> Document:
    """Open a document by the end of its name.

    Raises:
        ConfigurationError: it is of no known kind, or not what its name says, or packages are missing.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigurationError(f"{path} is no document that is known: {', '.join(FORMATS)}")
    try:
        return FORMATS[suffix](path)
    except ImportError as error:
        needed = f"{error.name}, which is not installed: {installing(EXTRA)}"
        raise ConfigurationError(f"documents need {needed}") from None
    # of polib as well; RuntimeError: of a password, of what ZIP has besides
    except (ValueError, OSError, EOFError, RuntimeError, BadZipFile, zlib.error, ExpatError) as error:
        raise ConfigurationError(f"{path} is no readable {suffix} file: {error}") from None


def usable() -> list[str]:
    """List the formats whose packages are installed."""
    return [suffix for suffix, kind in FORMATS.items() if kind.package is None or find_spec(kind.package)]
