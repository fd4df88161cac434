"""Translation memories as other tools exchange them: TMX is read and written, XLIFF 1.2 and 2 is read.

Units are cut out of the text as it comes, and expat parses each by itself: so memory does not grow with the file, and a
damaged unit costs no other. A file that declares entities is refused, which no translation memory needs: so none can expand
to more than it is, or name another file. HTML's names of characters are known. A document type is not fetched.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html.entities import html5
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import open_packed, packed, read_pairs
from fairseq_ccpr.version import __version__

TMX, XLIFF, TSV = (".tmx",), (".xlf", ".xliff", ".sdlxliff", ".mqxliff"), (".tsv", ".txt")
BLOCK = 1 << 16  # bytes that are decoded at a time
MOST = 1 << 22  # characters of a unit, a comment or a tag
UNITS = {"tu", "trans-unit", "unit"}
# Elements inside a segment whose content is not text: codes of the document's own format.
CODES = {"bpt", "ept", "it", "ph", "ut", "x", "bx", "ex", "sc", "ec"}
SAYING = ("type", "ctype", "subType", "equiv", "equiv-text", "equivStart", "equivEnd", "disp", "dispStart", "dispEnd")
UNTRANSLATED = {"new", "initial", "needs-translation"}
LANGUAGES = {"source-language": "source", "srcLang": "source", "target-language": "target", "trgLang": "target"}
BREAK = "\u2028"  # in place of a code that separates what is before and after it
DAMAGED = "\udc80"  # in place of bytes that are not of the encoding; no text has it, and expat refuses it
ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", b"<\0\0\0": "utf-32-le", b"\0\0\0<": "utf-32-be",
    b"<\0": "utf-16-le", b"\0<": "utf-16-be",
}  # by what a file begins with  # fmt: skip

_DECLARATION = re.compile(r"\A[\s\ufeff]*<\?xml\s[^>]*\?>")
_ENTITY = re.compile(r"&([A-Za-z][\w.-]*);")
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BEFORE_MARK = re.compile(rf"\s*{BREAK}\s*(?=[.,;:!?](?:\s|$))")
_BLOCKS = "br|p|div|hr|li|tr|td|th|h[1-6]|img|image|tab|cr|lb|pb|cb"
_BREAKING = re.compile(  # the kind of a code, or its content
    rf"(?:\w+[:-])*(?:{_BLOCKS})|(?:\s|\\[nrtvf]|&(?:nbsp|#(?:10|13|160|x0*[AD]|xA0));|</?(?:\w+:)?(?:{_BLOCKS})(?:\s[^<>]*)?/?>"
    r"|\{?\\(?:line|par|tab|page)\b ?\}?)+", re.IGNORECASE,
)  # fmt: skip
_ATTRIBUTES = r"""(?:[^<>"']|"[^"<]*"|'[^'<]*')*+"""
_MARKUP = re.compile(
    r"<!--(?:(?!--).)*+(?:-->|(?P<a>-{0,2}\Z))|<!\[CDATA\[(?:(?!\]\]>|<!\[CDATA\[).)*+(?:\]\]>|(?P<b>\Z))"
    r"|<\?(?:(?!\?>|<\?).)*+(?:\?>|(?P<c>\Z))"
    rf"""|<{_ATTRIBUTES}(?:"[^"<]*|'[^'<]*)?(?P<d>\Z)"""  # as a to c: not all of it is there yet
    r"|<(?P<end>/?)(?P<name>(?:[\w.-]+:)?(?:tmx|header|tu|xliff|file|group|trans-unit|unit))(?=[\s/>])"
    rf"(?P<rest>{_ATTRIBUTES}>?)", re.DOTALL,
)  # fmt: skip

codecs.register_error("fairseq_ccpr.damaged", lambda error: (DAMAGED, error.end))  # type: ignore[attr-defined]

Pair = tuple[str, str]


def read_memory(path: Path, source: str, target: str, skipped: Counter[str]) -> Iterator[Pair]:
    """Read the pairs of a TMX, XLIFF or TSV file, plain, `.gz` or `.xz`, told by its name.

    Args:
        source, target: languages, such as de and en, which de-AT and en_GB are as well; a TSV does not name its own.
        skipped: counts what is no pair of them, by a few words that say why.

    Raises:
        ConfigurationError: no such file, another kind, no XML, entities, or an end too early, once all before it is read.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    kind = Path(path.stem if packed(path) else path.name).suffix.lower()
    if kind in TSV:
        return read_pairs(path, skipped=skipped)
    if kind not in TMX + XLIFF:
        raise ConfigurationError(
            f"{path} is no TSV, TMX or XLIFF file by its name: it should end in .tsv, .tmx or .xlf"
        )
    reading = _Tmx(path, source, target, skipped) if kind in TMX else _Xliff(path, source, target, skipped)
    return reading.read()


def tmx_lines(source: str, target: str, pairs: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Write pairs as TMX 1.4, line by line.

    Args:
        source, target: languages.
        pairs: of each its id, source and target.

    Raises:
        ConfigurationError: a text has a character that XML cannot carry.
    """
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield '<tmx version="1.4">'
    yield (
        f'<header creationtool="fairseq-ccpr" creationtoolversion={quoteattr(__version__)} segtype="sentence" '
        f'o-tmf="fairseq-ccpr" adminlang="en" srclang={quoteattr(source)} datatype="plaintext"/>'
    )
    yield "<body>"
    for number, *texts in pairs:
        if found := _NO_XML.search("".join(texts)):
            raise ConfigurationError(
                f"the pair {number} has the character U+{ord(found[0]):04X}, which XML cannot carry: leave it out"
            )
        segments = "".join(
            f"<tuv xml:lang={quoteattr(language)}><seg>{escape(text)}</seg></tuv>"
            for language, text in zip((source, target), texts)
        )
        yield f"<tu tuid={quoteattr(number)}>{segments}</tu>"
    yield "</body>"
    yield "</tmx>"


def same_language(one: str, other: str) -> bool:
    """Tell whether two tags are of one language, whatever their countries and scripts.

    >>> same_language("de-AT", "DE"), same_language("en_GB", "en-US"), same_language("de", "den")
    (True, True, False)
    """
    return one.replace("_", "-").split("-")[0].lower() == other.replace("_", "-").split("-")[0].lower()


@dataclass
class _Reading:
    """Follows the elements of an XML file; a subclass makes pairs of them."""

    path: Path
    source: str
    target: str
    skipped: Counter[str]
    encoding: str = ""
    stack: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # open elements, without their prefix
    text: list[str] | None = None  # of the sentence that is open, an element at `depth`
    depth: int = 0
    code: list[str] | None = None  # what is in the code that is open in it, an element at `code_depth`
    code_depth: int = 0
    segments: dict[str, str] = field(default_factory=dict)  # of the sentence, by `mid`
    segment_begin: int = 0  # in `text`
    segment_end: int = -1
    data: dict[str, str] = field(default_factory=dict)  # what codes of the unit stand for, by its id
    found: list[Pair] = field(default_factory=list)
    damages: dict[str, str] = field(default_factory=dict)  # by kind: the reason that counts it, with the first line

    root = ""

    def read(self) -> Iterator[Pair]:
        blocks = filter(None, self._decoded())
        text, fault = self._beginning(blocks)
        any_unit = False
        for name, part, line in self._parts(text, blocks):
            name = name.rpartition(":")[2]
            any_unit |= name in UNITS
            if part.startswith("</") and name not in UNITS:
                self.end(name)
            else:
                self._parse(part, line, name)
                yield from self.found
            if name == self.root and (part.startswith("</") or part.endswith("/>")):
                break
        else:
            fault = f"it ends before </{self.root}>"
        if fault and (not any_unit or fault.startswith("it ends")):
            raise ConfigurationError(f"{self.path} is no well-formed XML ({fault}): save it again")

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """See an element begin outside of sentences, `stack` being what it is in."""
        raise NotImplementedError

    def end(self, name: str) -> None:
        """See an element end outside of sentences, `stack` being what it was in."""
        raise NotImplementedError

    def close(self, name: str, attributes: dict[str, str], text: str) -> None:
        """Take a sentence, or other text that `open` began."""
        raise NotImplementedError

    def open(self) -> None:
        """Take what is in the element that begins for text."""
        self.text, self.segments, self.depth, self.segment_end = [], {}, len(self.stack), -1

    def pair(self, source: str, target: str) -> None:
        """Take a pair, unless a side of it has no text."""
        source, target = (" ".join(_BEFORE_MARK.sub("", text).split()) for text in (source, target))
        if source and target:
            self.found.append((source, target))
        else:
            self.skipped["without text"] += 1

    def _decoded(self) -> Iterator[str]:
        with open_packed(self.path) as stream:
            block = stream.read(1024)
            decoder = codecs.getincrementaldecoder(self._encoding(block))("fairseq_ccpr.damaged")
            while block:
                yield decoder.decode(block)
                block = stream.read1(BLOCK)  # unlike `read`, loses nothing of what comes before damage
            yield decoder.decode(b"", True)

    def _encoding(self, head: bytes) -> str:
        for mark, self.encoding in ENCODINGS.items():
            if head.startswith(mark):
                return self.encoding
        declared = re.match(rb"\s*<\?xml[^>]*?\sencoding\s*=\s*[\"']([^\"'<>]*)", head)
        self.encoding = declared[1].decode("latin-1") if declared else "utf-8"
        try:
            if "<".encode(self.encoding) != b"<":  # UTF-16 by a declaration that was ASCII
                self.encoding = "utf-8"
        except (LookupError, ValueError):
            raise ConfigurationError(
                f"{self.path} names the encoding '{self.encoding}', which is not known: save it as UTF-8"
            ) from None
        return self.encoding

    def _beginning(self, blocks: Iterator[str]) -> tuple[str, str]:
        """Read on to the first element, which must be the format's; returns the text so far and what is wrong behind it."""
        text, fault, names = "", "no element found", list[str]()
        for block in blocks:
            text, fault = _DECLARATION.sub("", text + block), ""
            parser = expat.ParserCreate("utf-8")
            parser.StartElementHandler = lambda name, _: names.append(name.rpartition(":")[2])
            parser.EntityDeclHandler = self._refuse_entities
            try:
                parser.Parse(text.encode("utf-8", "surrogatepass"))
            except expat.ExpatError as error:
                fault = str(error)
            if names or fault:
                break
        if not names:
            raise ConfigurationError(
                f"{self.path} is no well-formed XML ({fault or 'no element found'}): save it again"
            )
        if names[0] != self.root:
            raise ConfigurationError(f"{self.path} is no {self.root.upper()}: it begins with the element '{names[0]}'")
        return text, fault

    def _parts(self, text: str, blocks: Iterator[str]) -> Iterator[tuple[str, str, int]]:
        """Cut out units, and tags around them: name, text and line of each. What has no end has its text up to the next."""
        at, line, unit = 0, 1, ""  # where to look on; the name of the open unit, which `text` begins with

        def cut(count: int) -> None:
            nonlocal text, at, line
            text, at, line = text[count:], max(at - count, 0), line + text.count("\n", 0, count)

        while True:
            found = _MARKUP.search(text, at)
            if found is None or found.lastgroup not in ("rest", None):
                at = found.start() if found else len(text)
                if not unit:
                    cut(at)
                if len(text) < MOST and (block := next(blocks, "")):
                    text += block
                elif found:  # it never ends, or not soon enough
                    at += 1
                else:
                    if unit:
                        yield unit, text, line
                    if len(text) < MOST:
                        return
                    unit = cut(len(text)) or ""
                continue
            name, at = found["name"], found.end()
            if not name or (unit and name.rpartition(":")[0] != unit.rpartition(":")[0]):
                continue
            if unit == name and found["end"]:
                yield unit, text[:at], line
                unit = cut(at) or ""
                continue
            if unit:  # which has no end
                yield unit, text[: found.start()], line
            cut(found.start())
            unit = name if name.rpartition(":")[2] in UNITS and not found["end"] else ""
            if not unit or found["rest"].endswith("/>"):
                yield name, found[0], line
                unit = cut(at) or ""

    def _parse(self, part: str, line: int, name: str) -> None:
        """Follow the elements of a unit, or the tag of another element; a damaged one is counted, and gives nothing."""
        self.stack, self.text, self.code, self.found = [], None, None, []
        parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler, parser.EndElementHandler = self._begin, self._end
        parser.CharacterDataHandler, parser.buffer_text = self._characters, True
        named = dict.fromkeys(_ENTITY.findall(part))
        known = [
            f'<!ENTITY {one} "{"".join(f"&#38;#{ord(character)};" for character in html5[f"{one};"])}">'
            for one in named
            if f"{one};" in html5
        ]
        try:
            parser.Parse(f"<!DOCTYPE {self.root} [{''.join(known)}]>" if known else "")
            parser.Parse(part.encode("utf-8", "surrogatepass"), name in UNITS or not part.endswith(">"))
        except expat.ExpatError as error:
            self.found = []
            kind = f"bytes that are not {self.encoding}" if DAMAGED in part else expat.ErrorString(error.code)
            if expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY] == error.code:
                kind += f" {next(f'&{one};' for one in named if f'{one};' not in html5)}"
            first = f"is damaged: {kind}, as in line {line + error.lineno - 1:,} of {self.path.name}"
            self.skipped[self.damages.setdefault(kind, first)] += 1
            if name == "file":
                self.begin(name, dict.fromkeys(LANGUAGES, "a damaged <file>"))

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        if self.text is None:
            self.begin(name, attributes)
        elif self.code is None and name in CODES:
            self.code, self.code_depth = [], len(self.stack)
        elif self.code is None and _is_segment(name, attributes):
            if self.segment_end == len(self.text):  # right behind another
                self.text.append(BREAK)
            self.segment_begin = len(self.text)
        elif name == "cp":  # a character that XML has no place for
            self._characters(" ")
        elif self.code is None and self._separates(attributes):
            self.text.append(BREAK)
        self.stack.append((name, attributes))

    def _end(self, _: str) -> None:
        name, attributes = self.stack.pop()
        if self.text is None:
            self.end(name)
        elif self.code is not None:
            if len(self.stack) == self.code_depth:
                if self._separates(attributes, "".join(self.code)):
                    self.text.append(BREAK)
                self.code = None
        elif len(self.stack) == self.depth:
            text, self.text = "".join(self.text), None
            self.close(name, attributes, text)
        elif _is_segment(name, attributes):
            texts = [self.segments.get(mid := attributes.get("mid", ""), ""), *self.text[self.segment_begin :]]
            self.segments[mid], self.segment_end = "".join(texts), len(self.text)
        elif self._separates(attributes):
            self.text.append(BREAK)

    def _characters(self, text: str) -> None:
        if self.text is not None:
            (self.text if self.code is None else self.code).append(text)

    def _separates(self, attributes: dict[str, str], content: str = "") -> bool:
        """Tell whether a code stands for a line break, a space, an image or the like."""
        said = [attributes[name] for name in SAYING if name in attributes]
        said += [self.data.get(attributes.get(name, ""), "") for name in ("dataRef", "dataRefStart", "dataRefEnd")]
        return any(map(_BREAKING.fullmatch, [*said, content]))

    def _refuse_entities(self, name: str, *_: object) -> None:
        raise ConfigurationError(
            f"{self.path} declares the entity '{name}', which could name other files or grow without bounds: save it "
            "without a document type of its own"
        )


def _is_segment(name: str, attributes: dict[str, str]) -> bool:
    return name == "mrk" and attributes.get("mtype") == "seg"


@dataclass
class _Tmx(_Reading):
    language: str = ""
    sides: list[Pair] = field(default_factory=list)  # language and text of the unit that is open

    root = "tmx"

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self.sides = []
        elif name == "tuv":
            self.language = attributes.get("xml:lang") or attributes.get("lang", "")
        elif name == "seg":
            self.open()

    def close(self, name: str, attributes: dict[str, str], text: str) -> None:
        self.sides.append((attributes.get("xml:lang") or self.language, text))

    def end(self, name: str) -> None:
        if name == "tu":
            source, target = (
                next((text for language, text in self.sides if same_language(language, wanted)), None)
                for wanted in (self.source, self.target)
            )
            if source is None or target is None:
                self.skipped[f"not in both {self.source} and {self.target}"] += 1
            else:
                self.pair(source, target)


class _Side(NamedTuple):  # of a unit
    text: str = ""
    language: str = ""
    segments: Mapping[str, str] = MappingProxyType({})


@dataclass
class _Xliff(_Reading):
    """Units of XLIFF 1.2 (`trans-unit`) and segments of XLIFF 2 (`segment`); alternatives in them are passed over."""

    languages: dict[str, str] = field(default_factory=dict)  # by attribute of the file
    translate: list[str] = field(default_factory=lambda: ["yes"])  # in the file and its open groups
    unit_translate: str = "yes"
    sides: dict[str, _Side] = field(default_factory=dict)
    state: str = ""

    root = "xliff"

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        parent = self.stack[-1][0] if self.stack else ""
        if name in ("xliff", "file"):
            own = [attribute for attribute in LANGUAGES if name == "xliff" or "-" in attribute]
            self.languages |= {attribute: attributes.get(attribute, "") for attribute in own}
            self.translate = [attributes.get("translate", "yes")]
        elif name == "group":
            self.translate.append(attributes.get("translate", self.translate[-1]))
        elif name in UNITS:
            self.unit_translate, self.data = attributes.get("translate", self.translate[-1]), {}
        if name in ("trans-unit", "segment"):
            self.sides, self.state = {}, attributes.get("state", "")
        elif name in ("source", "target", "seg-source") and parent in ("trans-unit", "segment"):
            self.open()
            self.state = attributes.get("state", self.state)
        elif name == "data":
            self.open()

    def close(self, name: str, attributes: dict[str, str], text: str) -> None:
        if name == "data":
            self.data[attributes.get("id", "")] = text
        else:
            self.sides[name] = _Side(text, attributes.get("xml:lang", ""), self.segments)

    def end(self, name: str) -> None:
        if name in ("trans-unit", "segment"):
            self._take(self.sides.get("source", _Side()), self.sides.get("target"))
        elif name == "group" and len(self.translate) > 1:
            self.translate.pop()

    def _take(self, source: _Side, target: _Side | None) -> None:
        if self.unit_translate == "no":
            self.skipped["not to be translated"] += 1
        elif target is None or self.state in UNTRANSLATED:
            self.skipped["not translated"] += 1
        elif foreign := self._foreign(source, target):
            self.skipped[foreign] += 1
        else:
            ours, theirs = self.sides.get("seg-source", source).segments or source.segments, target.segments
            if not ours or not theirs or "" in ours | theirs or len(ours) == len(theirs) == 1:
                self.pair(source.text, target.text)
            else:
                for mid in ours | theirs:
                    self.pair(ours.get(mid, ""), theirs.get(mid, ""))

    def _foreign(self, source: _Side, target: _Side) -> str:
        """Say which side is in another language, by its own attribute or the file's; nothing where none is."""
        said = [("source", source.language), ("target", target.language)]
        for side, language in said + [(LANGUAGES[name], language) for name, language in self.languages.items()]:
            if language and not same_language(language, wanted := self.source if side == "source" else self.target):
                return f"its {side} is in {language}, not {wanted}"
        return ""
