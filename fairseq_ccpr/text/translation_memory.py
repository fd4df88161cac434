"""Translation memories as other tools exchange them: TMX is read and written, XLIFF 1.2 and 2 is read.

XML is read by expat as it comes, so that memory does not grow with the file. A file that declares entities is refused, which
no translation memory needs: so none can expand to more than it is, or name another file. A document type is not fetched.
"""

from __future__ import annotations

import gzip
import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.languages import same_language
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.version import __version__

TMX, XLIFF, TSV = (".tmx",), (".xlf", ".xliff", ".sdlxliff", ".mqxliff"), (".tsv", ".txt")
PACKED: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
BLOCK = 1 << 16  # bytes that are parsed at a time
# Elements inside a segment whose content is not text: codes of the document's own format.
CODES = {"bpt", "ept", "it", "ph", "ut", "x", "bx", "ex", "sc", "ec", "data"}
UNTRANSLATED = {"new", "initial", "needs-translation"}
XML_LANG = "http://www.w3.org/XML/1998/namespace lang"

Pair = tuple[str, str]


def read_memory(path: Path, source: str, target: str, skipped: Counter[str]) -> Iterator[Pair]:
    """Read the pairs of a TMX, XLIFF or TSV file, plain, `.gz` or `.xz`, told by its name.

    Args:
        source, target: languages, such as de and en, which de-AT and en_GB are as well; a TSV does not name its own.
        skipped: counts what is no pair of them, by a few words that say why.

    Raises:
        ConfigurationError: no such file, another kind, no XML, entities, or another pair of languages.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    kind = Path(path.stem if path.suffix in PACKED else path.name).suffix.lower()
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
    """
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield '<tmx version="1.4">'
    yield (
        f'<header creationtool="fairseq-ccpr" creationtoolversion={quoteattr(__version__)} segtype="sentence" '
        f'o-tmf="fairseq-ccpr" adminlang="en" srclang={quoteattr(source)} datatype="plaintext"/>'
    )
    yield "<body>"
    for number, *texts in pairs:
        segments = "".join(
            f"<tuv xml:lang={quoteattr(language)}><seg>{escape(text)}</seg></tuv>"
            for language, text in zip((source, target), texts)
        )
        yield f"<tu tuid={quoteattr(number)}>{segments}</tu>"
    yield "</body>"
    yield "</tmx>"


@dataclass
class _Reading:
    """Follows the elements of an XML file; a subclass makes pairs of them."""

    path: Path
    source: str
    target: str
    skipped: Counter[str]
    stack: list[str] = field(default_factory=list)  # names of the open elements, without their namespace
    text: list[str] | None = None  # of the segment that is open
    found: list[Pair] = field(default_factory=list)

    def read(self) -> Iterator[Pair]:
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.EntityDeclHandler = self._refuse_entities
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.buffer_text = True
        opener: Callable[..., Any] = PACKED.get(self.path.suffix, open)
        try:
            with opener(self.path, "rb") as stream:
                last = False
                while not last:
                    block = stream.read(BLOCK)
                    last = not block
                    parser.Parse(block, last)
                    yield from self.found
                    self.found.clear()
        except expat.ExpatError as error:
            raise ConfigurationError(f"{self.path} is no well-formed XML ({error}): save it again") from None
        except (lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
            raise ConfigurationError(f"{self.path} is damaged, or not what its name says: {error}") from None

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """See an element begin, `stack` being what it is in."""
        raise NotImplementedError

    def end(self, name: str) -> None:
        """See an element end, `stack` being what it was in."""
        raise NotImplementedError

    def pair(self, source: str, target: str) -> None:
        """Take a pair, unless a side of it has no text."""
        texts = " ".join(source.split()), " ".join(target.split())
        if all(texts):
            self.found.append(texts)
        else:
            self.skipped["without text"] += 1

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(" ")[2]
        self.begin(name, attributes)
        self.stack.append(name)

    def _end(self, name: str) -> None:
        self.stack.pop()
        self.end(name.rpartition(" ")[2])

    def _characters(self, text: str) -> None:
        if self.text is not None and not CODES.intersection(self.stack):
            self.text.append(text)

    def _refuse_entities(self, name: str, *_: object) -> None:
        raise ConfigurationError(
            f"{self.path} declares the entity '{name}', which could name other files or grow without bounds: save it "
            "without a document type of its own"
        )


@dataclass
class _Tmx(_Reading):
    language: str = ""
    segments: list[Pair] = field(default_factory=list)  # language and text of the unit that is open

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if not self.stack and name != "tmx":
            raise ConfigurationError(f"{self.path} is no TMX: it begins with the element '{name}'")
        if name == "tu":
            self.segments = []
        elif name == "tuv":
            self.language = attributes.get(XML_LANG) or attributes.get("lang", "")
        elif name == "seg":
            self.text = []

    def end(self, name: str) -> None:
        if name == "seg" and self.text is not None:
            self.segments.append((self.language, "".join(self.text)))
            self.text = None
        elif name == "tu":
            sides = [
                next((text for language, text in self.segments if same_language(language, wanted)), None)
                for wanted in (self.source, self.target)
            ]
            if sides[0] is None or sides[1] is None:
                self.skipped[f"not in both {self.source} and {self.target}"] += 1
            else:
                self.pair(sides[0], sides[1])


@dataclass
class _Xliff(_Reading):
    """Units of XLIFF 1.2 (`trans-unit`) and segments of XLIFF 2 (`segment`); alternatives in them are passed over."""

    sides: dict[str, str] = field(default_factory=dict)
    state: str = ""

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if not self.stack and name != "xliff":
            raise ConfigurationError(f"{self.path} is no XLIFF: it begins with the element '{name}'")
        for option, attribute, wanted in (
            ("source-language", "srcLang", self.source),
            ("target-language", "trgLang", self.target),
        ):
            found = attributes.get(option) if name == "file" else attributes.get(attribute) if name == "xliff" else None
            if found is not None and not same_language(found, wanted):
                raise ConfigurationError(
                    f"{self.path} has {found} as {option}, and the model has {wanted}: give another file"
                )
        if name in ("trans-unit", "segment"):
            self.sides, self.state = {}, attributes.get("state", "")
        elif name in ("source", "target") and self.stack[-1] in ("trans-unit", "segment"):
            self.text = []
            self.state = attributes.get("state", self.state)
        elif name == "cp" and self.text is not None:  # a character that XML has no place for
            self.text.append(" ")

    def end(self, name: str) -> None:
        if name in ("source", "target") and self.stack[-1] in ("trans-unit", "segment") and self.text is not None:
            self.sides[name] = "".join(self.text)
            self.text = None
        elif name in ("trans-unit", "segment"):
            if self.state in UNTRANSLATED or "target" not in self.sides:
                self.skipped["not translated"] += 1
            else:
                self.pair(self.sides.get("source", ""), self.sides["target"])
