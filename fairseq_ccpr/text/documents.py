"""Documents in, documents of the same kind out: Word, OpenDocument text, HTML, Markdown, gettext's PO and plain text.

What is not translated stays as it was. Inline markup goes through `html.Page`: each paragraph becomes HTML in which a
number stands for every format, link or picture, and comes back with these at the words that they belong to.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile, ZipFile

from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.sentences import Segments

EXTRA, PACKAGES = "files", ("lxml", "mistletoe", "polib")
MOST_UNPACKED = 1 << 28  # bytes of a document's texts
_TAG = re.compile(r'<(?:(?P<end>/m|/x)|(?P<kind>[mx]|br) n="(?P<number>\d+)"[^>]*?(?P<empty>/?))>')
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")  # which XML cannot have
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_OPEN = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


@dataclass
class Inline:
    """Markup in a paragraph: around some of its text, or in place of something, if there are no pieces."""

    what: Any
    pieces: list[str | Inline] | None = None
    shown: str = ""  # what the model sees of something that is kept
    apart: bool = False  # whether a sentence ends there, as at a break or a tabulator


def as_html(pieces: Iterable[str | Inline], kept: list[Inline]) -> str:
    """Write pieces as HTML, with numbers of what is added to `kept` for their markup."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += html.escape(piece, quote=False)
            continue
        kept.append(piece)
        number = len(kept) - 1
        if piece.pieces is not None:
            text += f'<m n="{number}">{as_html(piece.pieces, kept)}</m>'
        elif piece.shown:
            text += f'<x n="{number}" translate="no">{html.escape(piece.shown, quote=False)}</x>'
        else:
            text += f'<{"br" if piece.apart else "x"} n="{number}"/>'
    return text


def from_html(text: str, kept: Sequence[Inline]) -> list[str | Inline]:
    """Read pieces as `as_html` wrote them, in whatever order they are now.

    >>> pieces, kept = ["Das ", Inline("bold", ["kleine"]), " Haus ", Inline("picture")], []
    >>> as_html(pieces, kept)
    'Das <m n="0">kleine</m> Haus <x n="1"/>'
    >>> from_html('The <m n="0">small</m> house <x n="1"/>', kept)  # doctest: +ELLIPSIS
    ['The ', Inline(what='bold', pieces=['small'], ...), ' house ', Inline(what='picture', pieces=None, ...)]
    """
    stack: list[list[str | Inline]] = [[]]
    at = 0
    for tag in _TAG.finditer(text):
        if tag.start() > at:
            stack[-1].append(_CONTROLS.sub("", html.unescape(text[at : tag.start()])))
        at = tag.end()
        if tag["end"]:
            last = stack.pop()
            if tag["end"] == "/m":
                stack[-1][-1].pieces = last  # type: ignore[union-attr]
        else:
            found = kept[int(tag["number"])]
            stack[-1].append(found)
            if not tag["empty"]:
                stack.append([])
    return [*stack[0], *filter(None, [_CONTROLS.sub("", html.unescape(text[at:]))])]


class Document:
    """A file whose texts are translated; `segments` has each with its sentences."""

    segments: list[Segments]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        """Read the file's segments; ConfigurationError if it is of another kind."""
        self.text = self.path.read_bytes().decode("utf-8-sig")
        self.segments = [self.kind.of(self.text)]

    kind: ClassVar[type[Segments]] = Segments

    def save(self, texts: Sequence[str], path: Path) -> None:
        """Write the file with other texts in place of its segments."""
        path.write_bytes("".join(texts).encode())


class HtmlDocument(Document):
    """A page of HTML."""

    kind = Page


class GettextDocument(Document):
    """A catalogue of messages: those that are not translated are, and are marked fuzzy, as nobody has read them."""

    def read(self) -> None:
        import polib

        self.catalogue = polib.pofile(str(self.path))
        self.entries = [
            one for one in self.catalogue if not one.obsolete and (not one.translated() or one.fuzzy)
        ]
        texts = (text for one in self.entries for text in filter(None, (one.msgid, one.msgid_plural)))
        self.segments = [Segments.of(text) for text in texts]

    def save(self, texts: Sequence[str], path: Path) -> None:
        given = iter(texts)
        for entry in self.entries:
            text = next(given)
            if entry.msgid_plural:
                plural = next(given)
                entry.msgstr_plural = {n: plural if n else text for n in entry.msgstr_plural or (0, 1)}
            else:
                entry.msgstr = text
            entry.flags = [*dict.fromkeys([*entry.flags, "fuzzy"])]
        self.catalogue.save(str(path))


class MarkdownDocument(Document):
    """Markdown: paragraphs, headings, items and cells; code and blocks of HTML stay."""

    def read(self) -> None:
        text = self.path.read_text(encoding="utf-8-sig")
        front = _FRONT_MATTER.match(text)
        self.front, self.text = (front[0], text[front.end() :]) if front else ("", text)
        self.kept: list[list[Inline]] = []
        self.segments = []
        self.render(None)

    def save(self, texts: Sequence[str], path: Path) -> None:
        path.write_text(self.front + self.render(texts), encoding="utf-8")

    def render(self, texts: Sequence[str] | None) -> str:
        """Write the page with these texts, or gather them if there are none."""
        from mistletoe import block_token
        from mistletoe import markdown_renderer as markdown

        document, numbers = self, count()

        class Renderer(markdown.MarkdownRenderer):
            def span_to_lines(self, tokens: Any, max_line_length: int | None) -> Any:
                number = next(numbers)
                if texts is None:
                    document.kept.append([])
                    found = as_html(_of_markdown([*tokens], self), document.kept[-1])
                    document.segments.append(Page.of(found))
                    return iter([""])
                pieces = from_html(texts[number], document.kept[number])
                return self.fragments_to_lines([markdown.Fragment(_as_markdown(pieces))])

        with Renderer() as renderer:
            rendered: str = renderer.render(block_token.Document(self.text))
        return rendered


def _of_markdown(tokens: list[Any], renderer: Any) -> Iterator[str | Inline]:
    opening = {"Strong": 2, "Emphasis": 1, "Strikethrough": 2, "Link": 1}  # characters before their text
    for token in tokens:
        name, written = type(token).__name__, _written(renderer, [token])
        if name == "RawText":
            yield token.content
        elif name == "LineBreak" and token.soft:
            yield " "
        elif name in opening and (inner := _written(renderer, token.children)):
            first = opening[name]
            around = written[:first], written[first + len(inner) :]
            yield Inline(around, [*_of_markdown(list(token.children), renderer)])
        else:
            shown = token.children[0].content if name in ("InlineCode", "EscapeSequence") else ""
            yield Inline(written, shown=shown, apart=name == "LineBreak")


def _written(renderer: Any, tokens: Any) -> str:
    return "".join(fragment.text for fragment in renderer.make_fragments(tokens))


def _as_markdown(pieces: Iterable[str | Inline]) -> str:
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        elif piece.pieces is None:
            text += piece.what
        else:
            text += _as_markdown(piece.pieces).join(piece.what)
    return text


class ZippedDocument(Document):
    """A ZIP archive of XML, some of whose files have paragraphs."""

    parts: ClassVar[re.Pattern[str]]
    paragraphs: ClassVar[tuple[str, ...]]

    def read(self) -> None:
        from lxml import etree

        parser = etree.XMLParser(resolve_entities=False, no_network=True)
        self.trees, self.found = dict[str, Any](), list[tuple[Any, list[Inline]]]()
        try:
            with ZipFile(self.path) as archive:
                named = [one for one in archive.infolist() if self.parts.fullmatch(one.filename)]
                if sum(one.file_size for one in named) > MOST_UNPACKED:
                    raise ConfigurationError(f"{self.path} is more than {MOST_UNPACKED >> 20} MiB unpacked")
                for one in named:
                    self.trees[one.filename] = etree.fromstring(archive.read(one), parser)
        except (BadZipFile, etree.XMLSyntaxError, RuntimeError) as error:  # the last of a password
            raise ConfigurationError(
                f"{self.path} is no readable {self.path.suffix} file ({error})"
            ) from None
        if not self.trees:
            raise ConfigurationError(f"{self.path} is no {self.path.suffix} file: it has no text in it")
        self.segments = []
        for tree in self.trees.values():
            for paragraph in [*tree.iter(*self.paragraphs)]:
                kept: list[Inline] = []
                page = Page.of(as_html(self.pieces(paragraph), kept))
                if page.sentences:
                    self.segments.append(page)
                    self.found.append((paragraph, kept))

    def save(self, texts: Sequence[str], path: Path) -> None:
        from lxml import etree

        for text, (paragraph, kept) in zip(texts, self.found):
            self.fill(paragraph, from_html(text, kept))
        with ZipFile(self.path) as archive, ZipFile(path, "w") as written:
            for one in archive.infolist():  # of an OpenDocument the first is not compressed
                tree = self.trees.get(one.filename)
                data = archive.read(one) if tree is None else _serialised(etree, tree)
                written.writestr(one, data)

    def pieces(self, element: Any) -> list[str | Inline]:
        """Return what is in a paragraph, or in part of one."""
        raise NotImplementedError

    def fill(self, element: Any, pieces: Iterable[str | Inline]) -> None:
        """Put pieces in place of what is in a paragraph, or in part of one."""
        raise NotImplementedError


def _serialised(etree: Any, tree: Any) -> bytes:
    data: bytes = etree.tostring(tree, xml_declaration=True, encoding="UTF-8", standalone=True)
    return data


class OpenDocument(ZippedDocument):
    """A text of LibreOffice, or of others."""

    parts = re.compile(r"content\.xml|styles\.xml")
    paragraphs = (f"{_OPEN}p", f"{_OPEN}h")
    around = (f"{_OPEN}span", f"{_OPEN}a")
    breaks = (f"{_OPEN}line-break", f"{_OPEN}tab")

    def pieces(self, element: Any) -> list[str | Inline]:
        found: list[str | Inline] = [element.text or ""]
        for child in element:
            found += [
                Inline(child, self.pieces(child) if child.tag in self.around else None),
                child.tail or "",
            ]
        return found

    def fill(self, element: Any, pieces: Iterable[str | Inline]) -> None:
        for child in [*element]:
            element.remove(child)
        element.text, last = "", None
        for piece in pieces:
            if isinstance(piece, Inline):
                last = piece.what
                if piece.pieces is not None:
                    self.fill(last, piece.pieces)
                element.append(last)
                last.tail = ""
            elif last is None:
                element.text += piece
            else:
                last.tail += piece


class WordDocument(ZippedDocument):
    """A text of Word. Adjacent runs of one format are one piece; the format that most of a paragraph has needs no markup."""

    parts = re.compile(r"word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")
    paragraphs = (f"{_WORD}p",)
    around = tuple(f"{_WORD}{name}" for name in ("hyperlink", "smartTag", "ins", "fldSimple", "sdt"))
    run, text, format, inner = (f"{_WORD}{name}" for name in ("r", "t", "rPr", "sdtContent"))
    breaks = tuple(f"{_WORD}{name}" for name in ("br", "cr", "tab", "ptab"))
    dropped = (f"{_WORD}proofErr", f"{_WORD}lastRenderedPageBreak")

    def pieces(self, element: Any) -> list[str | Inline]:
        return self._pieces(element, _digest(self._usual(element)))

    def _pieces(self, element: Any, usual: bytes) -> list[str | Inline]:
        found: list[str | Inline] = []
        for child in element:
            if child.tag == self.run:
                style = child.find(self.format)
                for part in child:
                    if part.tag == self.text:
                        self._add(found, part.text or "", style, usual)
                    elif part is not style and part.tag not in self.dropped:
                        found.append(Inline((_digest(style), style, part), apart=part.tag in self.breaks))
            elif child.tag in self.around:
                inner = child.find(self.inner)
                found.append(Inline(child, self._pieces(child if inner is None else inner, usual)))
            elif not _is_property(child) and child.tag not in self.dropped:
                found.append(Inline(child))
        return found

    def _add(self, found: list[str | Inline], text: str, style: Any, usual: bytes) -> None:
        last = found[-1] if found else None
        if _digest(style) == usual:
            found[-1:] = [last + text] if isinstance(last, str) else [*found[-1:], text]
        elif isinstance(last, Inline) and last.pieces and last.what[:1] == (_digest(style),):
            last.pieces = [f"{last.pieces[0]}{text}"]
        else:
            found.append(Inline((_digest(style), style, None), [text]))

    def _usual(self, element: Any) -> Any:
        """Return the format, rPr or None, that most characters of a paragraph have."""
        lengths, styles = Counter[bytes](), dict[bytes, Any]()
        for run in element.iter(self.run):
            style = run.find(self.format)
            styles.setdefault(_digest(style), style)
            lengths[_digest(style)] += sum(len(text.text or "") for text in run.findall(self.text))
        return styles[lengths.most_common(1)[0][0]] if styles else None

    def fill(self, element: Any, pieces: Iterable[str | Inline]) -> None:
        self._fill(element, pieces, self._usual(element))

    def _fill(self, element: Any, pieces: Iterable[str | Inline], style: Any) -> None:
        for child in [*element]:
            if not _is_property(child):
                element.remove(child)
        self._append(element, pieces, style)

    def _append(self, element: Any, pieces: Iterable[str | Inline], style: Any) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                text = element.makeelement(self.text, {_SPACE: "preserve"})
                text.text = piece
                self._append_run(element, style, text)
            elif isinstance(piece.what, tuple):
                _, style_of_piece, part = piece.what
                if piece.pieces is None:
                    self._append_run(element, style_of_piece, part)
                else:
                    self._append(element, piece.pieces, style_of_piece)
            else:
                if piece.pieces is not None:
                    inner = piece.what.find(self.inner)
                    self._fill(piece.what if inner is None else inner, piece.pieces, style)
                element.append(piece.what)

    def _append_run(self, element: Any, style: Any, part: Any) -> None:
        run = element.makeelement(self.run)
        run.extend([deepcopy(style), part] if style is not None else [part])
        element.append(run)


def _digest(style: Any) -> bytes:
    """Tell formats of runs apart; None is that of the paragraph."""
    from lxml import etree

    return etree.tostring(style, with_tail=False) if style is not None else b""


def _is_property(element: Any) -> bool:
    return str(element.tag).endswith("Pr")


FORMATS: dict[str, type[Document]] = {
    ".docx": WordDocument, ".odt": OpenDocument, ".html": HtmlDocument, ".htm": HtmlDocument, ".md": MarkdownDocument,
    ".po": GettextDocument, ".txt": Document,
}  # fmt: skip


def open_document(path: Path) -> Document:
    """Open a document by the end of its name.

    Raises:
        ConfigurationError: it is of no kind that is known, or not what its name says, or packages are missing.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ConfigurationError(f"{path} is no document that is known: {', '.join(FORMATS)}")
    try:
        return FORMATS[suffix](path)
    except ImportError as error:
        raise ConfigurationError(
            f"documents need {error.name}, which is not installed: {installing(EXTRA)}"
        ) from None
    except (UnicodeDecodeError, OSError, ValueError) as error:  # the latter two of polib, with a line
        raise ConfigurationError(f"{path} is no readable {suffix} file ({error})") from None


def has_extra() -> bool:
    """Tell whether the packages of documents are installed."""
    return all(map(find_spec, PACKAGES))
