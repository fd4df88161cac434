"""Documents in, documents of the same kind out: Word, OpenDocument, HTML, Markdown, gettext's PO, plain text.

All but PO and plain text becomes HTML, and comes back by its tags. In these a number stands for what is kept,
so that `html.Page` leaves it as it was and puts formats and links at the words that they belong to. A tree of
the XML would be written in another form than it was read; here what is not text stays byte for byte.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile, ZipFile

from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.sentences import Segments

EXTRA = "files"
MOST_OF_TEXT = 1 << 28  # bytes of a document's texts
_NUMBERED = re.compile(r'</?(?:[mx]|br) n="(\d+)"(?:/?>| translate="no">.*?</x>)', re.DOTALL)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.DOTALL)
_DELIMITERS = {
    "Strong": 2,
    "Emphasis": 1,
    "Strikethrough": 2,
    "Link": 1,
}  # characters before their text, in Markdown
# Of OpenDocument: where a sentence ends, in HTML; what is not of the text.
_ENDS = {"p :": "text:[ph]", "br :": "text:(?:line-break|tab)"}
_FIELD = re.compile(
    r"<(dc:\w+|meta:[\w-]+|text:(?:note-citation|page-\w+|date|time|\w+-ref|chapter))(?: [^>]*)?>[^<]*</\1>"
)
# Of Word: what a paragraph begins or ends with; a run that has no others; its text; what only Word needs.
_PARAGRAPH = re.compile(r"(<w:p(?: [^>]*)?>(?:<w:pPr>.*?</w:pPr>)?|</w:p>)", re.DOTALL)
_RUNS = re.compile(
    r"<w:r(?: [^>]*)?>(<w:rPr>.*?</w:rPr>|<w:rPr/>)?((?:[^<]|<(?!w:[rp][ >]|/w:r>))*+)</w:r>|(?<=>)[^<]+",
    re.DOTALL,
)
_TEXT = re.compile(r"<w:t(?: [^>]*)?>([^<]*)</w:t>")
_NEEDLESS = re.compile(
    r"<w:(?:proofErr|lastRenderedPageBreak|lang)\b[^>]*/>|<w:([rp])PrChange\b.*?</w:\1PrChange>", re.DOTALL
)
_BREAK = re.compile(r"<w:(?:br|cr|tab|ptab)\b")
_CONTENT = re.compile(r"<w:sdt>(?:(?!<w:sdt>).)*?<w:sdtContent>|</w:sdtContent></w:sdt>", re.DOTALL)
_OF_WORD = re.compile(r'<(/?)(p|m|x|br|c) n="(\d+)"/?>')
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")  # which XML cannot have


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

    def save(self, texts: Sequence[str], path: Path) -> None:
        """Write the file with other texts in place of its segments."""
        path.write_bytes("".join(texts).encode())

    def keep(self, written: str) -> str:
        """Return the attribute that stands for something that is kept."""
        self.kept.append(written)
        return f'n="{len(self.kept) - 1}"'


class HtmlDocument(Document):
    """A page of HTML."""

    kind = Page


class GettextDocument(Document):
    """A catalogue of messages: those without a translation get one, marked fuzzy, as nobody has read it."""

    package = "polib"

    def read(self) -> None:
        import polib

        self.catalogue = polib.pofile(str(self.path))
        self.entries = [one for one in self.catalogue if not one.obsolete and not one.translated()]
        texts = (text for one in self.entries for text in (one.msgid, one.msgid_plural))
        self.segments += map(Segments.of, texts)

    def save(self, texts: Sequence[str], path: Path) -> None:
        for entry, text, plural in zip(self.entries, texts[::2], texts[1::2]):
            if entry.msgid_plural:
                entry.msgstr_plural = {n: plural if n else text for n in entry.msgstr_plural or (0, 1)}
            else:
                entry.msgstr = text
            entry.flags = [*dict.fromkeys([*entry.flags, "fuzzy"])]
        self.catalogue.save(str(path))


class MarkdownDocument(Document):
    """Markdown: paragraphs, headings, items and cells; code, HTML and what is before the text stay."""

    package = "mistletoe"

    def read(self) -> None:
        text = self.path.read_bytes().decode("utf-8-sig")
        front = _FRONT_MATTER.match(text)
        self.front = front[0] if front else ""
        self.text = text[len(self.front) :]
        self.render(None)

    def save(self, texts: Sequence[str], path: Path) -> None:
        path.write_bytes((self.front + self.render(texts)).encode())

    def render(self, texts: Sequence[str] | None) -> str:
        """Write the page with these texts, or gather its own."""
        from mistletoe import Document as Parsed
        from mistletoe.markdown_renderer import Fragment, MarkdownRenderer

        document, numbers = self, count()

        class Renderer(MarkdownRenderer):
            def span_to_lines(self, tokens: Any, max_line_length: int | None) -> Any:
                if texts is None:
                    document.segments.append(Page.of(document.shown(tokens, self)))
                    return iter([""])
                parts = _NUMBERED.split(texts[next(numbers)])  # text and numbers in turns
                parts[::2] = map(html.unescape, parts[::2])
                parts[1::2] = (document.kept[int(number)] for number in parts[1::2])
                return self.fragments_to_lines([Fragment("".join(parts))])

        with Renderer() as renderer:
            rendered: str = renderer.render(Parsed(self.text))
        return rendered

    def shown(self, tokens: Any, renderer: Any) -> str:
        """Write what a paragraph consists of as HTML."""

        def written(some: Any) -> str:
            return "".join(fragment.text for fragment in renderer.make_fragments(some))

        found = ""
        for token in tokens:
            name, whole = type(token).__name__, written([token])
            if name == "RawText" or (name == "LineBreak" and token.soft):
                found += html.escape(whole, quote=False)
            elif name in _DELIMITERS and (inner := written(token.children)):
                first, last = whole[: _DELIMITERS[name]], whole[_DELIMITERS[name] + len(inner) :]
                found += f"<m {self.keep(first)}>{self.shown(token.children, renderer)}</m {self.keep(last)}>"
            elif name in ("InlineCode", "EscapeSequence"):
                code = html.escape(token.children[0].content)
                found += f'<x {self.keep(whole)} translate="no">{code}</x>'
            else:
                found += f"<{'br' if name == 'LineBreak' else 'x'} {self.keep(whole)}/>"
        return found


class OpenDocument(Document):
    """A text of LibreOffice or another: a ZIP archive of XML, some of whose files have text."""

    parts = re.compile(r"content\.xml|styles\.xml")

    def read(self) -> None:
        try:
            with ZipFile(self.path) as archive:
                named = [one for one in archive.infolist() if self.parts.fullmatch(one.filename)]
                if sum(one.file_size for one in named) > MOST_OF_TEXT:
                    raise ConfigurationError(f"{self.path} has more than {MOST_OF_TEXT >> 20} MiB of text")
                texts = {one.filename: archive.read(one).decode() for one in named}
        except (BadZipFile, RuntimeError) as error:  # the latter of a password
            raise ValueError(error) from None
        if not texts:
            raise ValueError("it has no text in it")
        self.names = [*texts]
        self.segments += (Page.of(self.shown(text)) for text in texts.values())

    def save(self, texts: Sequence[str], path: Path) -> None:
        made = {name: self.restored(text).encode() for name, text in zip(self.names, texts)}
        with ZipFile(self.path) as archive, ZipFile(path, "w") as written:
            for one in archive.infolist():  # in their order, which OpenDocument prescribes
                written.writestr(one, made.get(one.filename) or archive.read(one))

    def shown(self, xml: str) -> str:
        """Write XML as HTML."""
        xml = re.sub(r"<text:s(?: [^>]*)?/>", " ", xml)
        xml = _FIELD.sub(lambda found: f"<x {self.keep(found[0])}/>", xml)
        for name, theirs in _ENDS.items():
            xml = re.sub(rf"<(/?)({theirs})(?=[\s/>])", rf"<\1{name}\2", xml)
        return xml

    def restored(self, text: str) -> str:
        """Write the HTML of `shown` as XML."""
        text = _NUMBERED.sub(lambda tag: self.kept[int(tag[1])], text)
        return re.sub("<(/?)(?:p|br) :", r"<\1", text)


class WordDocument(OpenDocument):
    """A text of Word. Runs of the format that most of a paragraph has become text, others elements."""

    parts = re.compile(r"word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml")

    def shown(self, xml: str) -> str:
        self.formats = dict[str, str]()
        xml = _CONTENT.sub(
            lambda found: f"<{'/' * found[0].startswith('</')}c {self.keep(found[0])}>",
            _NEEDLESS.sub("", xml),
        )
        start, *rest = _PARAGRAPH.split(xml)
        found = self._of_runs(start, "")
        for tag, runs in zip(rest[::2], rest[1::2]):
            lengths = Counter[str]()
            for run in _RUNS.finditer(runs):
                lengths[run[1] or ""] += sum(map(len, _TEXT.findall(run[2] or "")))
            usual = max(lengths, key=lambda style: lengths[style], default="")
            found += f"<p {self.keep(tag)}>"
            self.keep(usual)  # by the number after that
            found += self._of_runs(runs, usual)
        return found

    def _of_runs(self, xml: str, usual: str) -> str:
        """Write what is between the tags of paragraphs."""

        def write(run: re.Match[str]) -> str:
            if run[2] is None:  # text that is none of the document's, such as a measure
                return f"<x {self.keep(run[0])}/>" if run[0].strip() else ""
            style, found = run[1] or "", ""
            if style not in self.formats:
                self.formats[style] = self.keep(style)
            tag = f"m {self.formats[style]}"
            for number, part in enumerate(_TEXT.split(run[2])):
                if number % 2:
                    found += part if style == usual or not part else f"<{tag}>{part}</{tag}>"
                elif part:
                    name = "br" if _BREAK.match(part) else "x"
                    found += f"<{name} {self.keep(f'<w:r>{style}{part}</w:r>')}/>"
            return found

        return re.sub(r"</(m [^>]*)><\1>", "", _RUNS.sub(write, xml))

    def restored(self, text: str) -> str:
        styles, found = [""], ""
        for part in re.split("(<[^>]*>)", text):
            if tag := _OF_WORD.fullmatch(part):
                end, name, written = tag[1], tag[2], self.kept[int(tag[3])]
                if name == "p":
                    styles = [self.kept[int(tag[3]) + 1]]
                elif name == "m":
                    styles = styles[:-1] if end else [*styles, written]
                found += written if name != "m" else ""
            elif part and part[0] != "<":
                found += f'<w:r>{styles[-1]}<w:t xml:space="preserve">{_CONTROLS.sub("", part)}</w:t></w:r>'
            else:
                found += part
        return found


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
    except (ValueError, OSError) as error:  # of polib as well
        raise ConfigurationError(f"{path} is no readable {suffix} file: {error}") from None


def usable() -> list[str]:
    """List the formats whose packages are installed."""
    return [suffix for suffix, kind in FORMATS.items() if kind.package is None or find_spec(kind.package)]
