"""Translation memories of other tools: TMX is read and written, XLIFF 1.2 and 2, and its kinds, is read.

What a tool says of a translation counts: only what a person has confirmed is read, with tracked changes
accepted.

Units are cut out of the text as it comes, and expat parses each by itself: so memory does not grow with the
file, but for the dates of a TMX, and a damaged unit costs no other. A file that declares entities is refused,
which no translation memory
needs: so none can expand to more than it is, or name another file. HTML's names of characters are known. A
    document type is
not fetched.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from html.entities import html5
from itertools import islice
from json import detect_encoding
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.languages import IDENTIFIED_LINES, look_copied, refuse_exchanged, same_language
from fairseq_ccpr.text.pairs import (
    BYTE_ORDER_MARK,
    PACKED_NAMES,
    UNPACKED_BYTES,
    Watch,
    one_line,
    open_packed,
    read_pairs,
    tidy,
)
from fairseq_ccpr.version import __version__

TMX, XLIFF, TSV = (".tmx",), (".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff"), (".tsv", ".txt")
LONGEST_UNIT = 1 << 22  # characters of a unit, a comment or a tag
UNITS = {"tu", "trans-unit", "unit"}
# Elements inside a segment whose content is not text: codes of the document's own format.
CODES = {"bpt", "ept", "it", "ph", "ut", "x", "bx", "ex", "sc", "ec"}
ALONE = {"ph", "ut", "x"}  # of these, such as are not one of a pair
SAYING = (
    "type",
    "ctype",
    "subType",
    "equiv",
    "equiv-text",
    "equivStart",
    "equivEnd",
    "disp",
    "dispStart",
    "dispEnd",
)
# What a tool says of a translation that a person has confirmed, by attribute, in lower case; anything else is
# not confirmed.
CONFIRMED = {
    "state": "translated reviewed signed-off final",  # XLIFF 1.2, of a target, and 2, of a segment
    "conf": "translated approvedtranslation approvedsignoff",  # Trados: sdl:seg, and a property in TMX
    "status": "manuallyconfirmed reviewer1confirmed proofread confirmed confirmedtranslator confirmedreviewer1 "
    "confirmedreviewer2",  # memoQ
    "confirmed": "1 2 3 4 5 6 7 8 9 10 11 12 true",  # Phrase: the workflow step up to which it is confirmed
}
FINISHED_STATES = ("signed-off", "final")  # states that outweigh where a translation is from
LANGUAGES = {
    "source-language": "source",
    "srcLang": "source",
    "target-language": "target",
    "trgLang": "target",
}
BREAK = "\udc82"  # in place of a code that separates what is before and after it, until the text is complete
SEAM = "\udc81"  # likewise where a segment begins and ends
GAP = "\udc83"  # likewise of a code by itself, which may stand for a space, a character or nothing
DAMAGED = "\udc80"  # in place of bytes that are not of the encoding; no text has it, and expat refuses it
XML_LANG = "xml:lang"

_DECLARATION = re.compile(r"\A[\s\ufeff]*<\?xml\s[^>]*\?>")
_SAYING = re.compile(r"<(?:[\w.-]+:)?(?:trans-unit|segment|target)\s[^<>]*?\b(state|status|confirmed)\s*=")
_REJECTED, _FROM_MACHINE = re.compile("rejected-"), re.compile("(x-)?(fuzzy|mt-|tm-suggestion|leveraged-mt)")
# types of marked text that was taken out
_DELETED = re.compile("(.*[-:])?del(eted|etion|ete)?", re.IGNORECASE)
UNWRITTEN = {"note", "comment", "annotation", "cmt"}  # elements in a segment that are none of its text
_ENTITY = re.compile(r"&([A-Za-z][\w.-]*);")
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BEFORE_MARK = re.compile(rf"\s*(?:{BREAK}\s*)+(?=[.,;:!?](?:\s|{BREAK}|$))")
_BREAKING_TAGS = "br|p|div|hr|li|tr|td|th|h[1-6]|img|image|tab|cr|lb|pb|cb"
_BETWEEN_WORDS = re.compile(rf"(?<=\w){GAP}+(?=\w)")
_WRITTEN = re.compile(r"(?:\{|(?=<\w+\})<)(\w{1,5})[}>]")
_VALUE = re.compile(r"""=["']([^"'<>]*)["']""")
_WHITE = re.compile(r"(?:\s|\\[nrtvf])+")
_FORMAT = re.compile(  # a code that is one of a pair
    r"(?:\w+[:-])*(?:b|i|u|bold|italic|underlined?|link)|</?\w[^<>]*(?<!/)>|\{\\.*|\}",
    re.DOTALL | re.IGNORECASE,
)
_BREAKING = re.compile(  # the kind of a code, or its content
    rf"(?:\w+[:-])*(?:{_BREAKING_TAGS})|(?:\s|\\[nrtvf]|&(?:nbsp|#(?:10|13|160|x0*[AD]|xA0));|</?(?:\w+:)?(?:{_BREAKING_TAGS})(?:\s[^<>]*)?/?>"
    r"|\{?\\(?:line|par|tab|page)\b ?\}?)+",
    re.IGNORECASE,
)
_ATTRIBUTES = r"""(?:[^<>"']|"[^"<]*"|'[^'<]*')*+"""
_XML = re.compile(
    r"<!--(?:(?!--).)*+(?:-->|(?P<a>-{0,2}\Z))|<!\[CDATA\[(?:(?!\]\]>|<!\[CDATA\[).)*+(?:\]\]>|(?P<b>\Z))"
    r"|<\?(?:(?!\?>|<\?).)*+(?:\?>|(?P<c>\Z))"
    rf"""|<{_ATTRIBUTES}(?:"[^"<]*|'[^'<]*)?(?P<d>\Z)"""  # as a to c: not all of it is there yet
    r"|<(?P<end>/?)(?P<name>(?:[\w.-]+:)?(?:tmx|tu|xliff|file|group|trans-unit|unit))(?=[\s/>])"
    rf"(?P<rest>{_ATTRIBUTES}>?)",
    re.DOTALL,
)

codecs.register_error("fairseq_ccpr.damaged", lambda error: (DAMAGED, error.end))  # type: ignore[attr-defined]

Pair = tuple[str, str]


class SignedPair(Pair):
    """A pair with when it was made, in seconds since 1970, and by whom; 0 and nothing: not known."""

    time = 0
    author = ""

    @classmethod
    def of(cls, pair: Pair, time: int, author: str) -> SignedPair:
        signed = cls(pair)
        signed.time, signed.author = time, author
        return signed


def read_memory(
    path: Path,
    source: str,
    target: str,
    skipped: Counter[str],
    unconfirmed: bool = False,
    watch: Watch | None = None,
) -> Iterator[Pair]:
    """Read the pairs of a TMX, XLIFF or TSV file, packed or not, recognised by its name.

    Languages are such as de and en, which de-AT and en_GB are as well; a TSV does not name its own. `skipped`
    counts what is no pair of them, by reason, and what is not confirmed, unless that is to be read. `watch`
    sees how much was read, and may stop it. A file that ends too early is an error once all before it is
    read.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    kind = Path(path.stem if path.suffix.lower() in PACKED_NAMES else path.name).suffix.lower()
    if kind not in TMX + XLIFF + TSV:
        raise ConfigurationError(
            f"{path} is no TSV, TMX or XLIFF file by its name: it should end in .tsv, .tmx or .xlf"
        )
    reading = _Tmx if kind in TMX else _Xliff if kind in XLIFF else _Tsv
    return _without_copies(reading(path, source, target, skipped, unconfirmed, watch))


def _without_copies(reading: _Reading) -> Iterator[Pair]:
    for pair in reading.read():
        if look_copied(*pair, reading.source, reading.target):
            reading.skipped["its target is its source once more"] += 1
        else:
            yield pair


def tmx_lines(source: str, target: str, pairs: Iterable[tuple[str, str, str, int, str]]) -> Iterator[str]:
    """Write pairs as TMX 1.4, line by line: id, source, target, time and author, see `SignedPair`."""
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield '<tmx version="1.4">'
    yield (
        f'<header creationtool="fairseq-ccpr" creationtoolversion={quoteattr(__version__)} segtype="sentence" '
        f'o-tmf="fairseq-ccpr" adminlang="en" srclang={quoteattr(source)} datatype="plaintext"/>'
    )
    yield "<body>"
    for number, *both, time, author in pairs:
        texts = [one_line(text) for text in both]
        if found := _NO_XML.search("".join(texts)):
            raise ConfigurationError(
                f"the pair {number} has the character "
                f"U+{ord(found[0]):04X}, which XML cannot carry: forget it"
            )
        sides = zip(map(quoteattr, (source, target)), map(escape, texts))
        segments = "".join(f"<tuv xml:lang={language}><seg>{text}</seg></tuv>" for language, text in sides)
        when = f' creationdate="{datetime.fromtimestamp(time, UTC):%Y%m%dT%H%M%SZ}"' if time else ""
        who = f" creationid={quoteattr(author)}" if author else ""
        yield f"<tu tuid={quoteattr(number)}{when}{who}>{segments}</tu>"
    yield "</body>"
    yield "</tmx>"


@dataclass
class _Reading:
    """Goes through an XML file; a subclass makes pairs of its units."""

    path: Path
    source: str
    target: str
    skipped: Counter[str]
    unconfirmed: bool = False  # whether these are read as well
    watch: Watch | None = None
    required: set[str] = field(default_factory=set)  # what each translation has to say to be confirmed
    encoding: str = "utf-8"
    # by kind: the reason that counts it, with the first line
    damages: dict[str, str] = field(default_factory=dict)

    root = ""

    def read(self) -> Iterator[Pair]:
        blocks = filter(None, self._decoded())
        text, fault = self._beginning(blocks)
        for name, part, line in self._parts(text, blocks):
            name = name.rpartition(":")[2]
            if name in UNITS:
                fault = ""
                if (unit := self._element(part, line)) is not None:
                    yield from self.unit(unit)
                continue
            ends = part.startswith("</")
            if not ends:
                element = self._element(part.rstrip("/>") + "/>", line)
                self.tag(
                    name,
                    dict.fromkeys(LANGUAGES, f"a damaged <{name}>") if element is None else element.attrib,
                )
            if ends or part.endswith("/>"):
                self.tag(name, None)
                if name == self.root:
                    break
        else:
            fault = fault or f"it ends before </{self.root}>"
        if fault:
            raise ConfigurationError(f"{self.path} is no well-formed XML ({fault}): save it again")

    def tag(self, name: str, attributes: dict[str, str] | None) -> None:
        """See an element around units begin, or end, which has no attributes."""

    def unit(self, unit: Element) -> Iterator[Pair]:
        raise NotImplementedError

    def pair(self, source: str, target: str, said: Mapping[str, str]) -> Iterator[Pair]:
        """Yield a pair of what `_text` made, unless it has no text or a tool does not confirm it."""
        texts = [text.replace(SEAM + SEAM, BREAK).replace(SEAM, "") for text in (source, target)]
        gap = " " if all(map(_BETWEEN_WORDS.search, texts)) else ""
        texts = [_BEFORE_MARK.sub("", _BETWEEN_WORDS.sub(gap, text)).replace(BREAK, " ") for text in texts]
        source, target = (tidy(text.replace(GAP, "").replace(BYTE_ORDER_MARK, "")) for text in texts)
        if not source or not target:
            self.skipped["without text"] += 1
        elif doubt := not self.unconfirmed and self._doubt(said):
            self.skipped[f"not confirmed: {doubt}"] += 1
        else:
            yield source, target

    def _doubt(self, said: Mapping[str, str]) -> str:
        """Return the attribute by which a translation is not confirmed."""
        for name, values in CONFIRMED.items():
            value = said.get(name, "missing" if name in self.required else None)
            if value is not None and value.lower() not in values.split():
                return f"{name} is {value[:30]}"
        origin, approved = said.get("state-qualifier", ""), said.get("approved")
        if _REJECTED.match(origin) or (
            _FROM_MACHINE.match(origin) and approved != "yes" and said.get("state") not in FINISHED_STATES
        ):
            return f"state-qualifier is {origin[:30]}"
        return "approved is no" if approved == "no" and not said.keys() & CONFIRMED.keys() else ""

    def _decoded(self) -> Iterator[str]:
        with open_packed(self.path, self.watch) as stream:
            block = stream.read(1024)
            self.encoding = self._encoding(block)
            decoder = codecs.getincrementaldecoder(self.encoding)("fairseq_ccpr.damaged")
            while block:
                yield decoder.decode(block)
                # Unlike `read`, this loses nothing of what comes before damage.
                block = stream.read1(UNPACKED_BYTES)
            yield decoder.decode(b"", True)

    def _encoding(self, head: bytes) -> str:
        declared = re.match(rb"\s*<\?xml[^>]*?\sencoding\s*=\s*[\"']([^\"'<>]*)", head)
        if (found := detect_encoding(head)) != "utf-8" or not declared:  # by its zeros, or a byte order mark
            return found
        name = declared[1].decode("latin-1")
        try:
            return name if "<".encode(name) == b"<" else "utf-8"  # not UTF-16, if the declaration is ASCII
        except (LookupError, ValueError):
            raise ConfigurationError(
                f"{self.path} names the encoding '{name}', which is not known: save it as UTF-8"
            ) from None

    def _beginning(self, blocks: Iterator[str]) -> tuple[str, str]:
        """Read on to the first element, the format's; returns the text so far, and what is wrong in it."""
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
            if names or fault or len(text) > LONGEST_UNIT:
                break
        if names and names[0] != self.root:
            raise ConfigurationError(
                f"{self.path} is no {self.root.upper()}: it begins with the element '{names[0]}'"
            )
        return text, fault

    def _parts(self, text: str, blocks: Iterator[str]) -> Iterator[tuple[str, str, int]]:
        """Cut out units and tags around them: name, text and line; what has no end goes up to the next."""
        at, line, unit = 0, 1, ""  # where to look on; the name of the open unit, which `text` begins with
        left_out = ""  # the name of a unit whose end is still to come

        def cut(count: int) -> tuple[str, int]:
            nonlocal text, at, line
            part, first = text[:count], line
            text, at, line = text[count:], max(at - count, 0), line + part.count("\n")
            return part, first

        while True:
            found = _XML.search(text, at)
            if found is None or found.lastgroup not in ("rest", None):
                at = found.start() if found else len(text)
                if not unit:
                    cut(at)
                if len(text) < LONGEST_UNIT and (block := next(blocks, "")):
                    text += block
                elif found:  # it never ends, or not soon enough
                    at += 1
                elif unit:
                    part, first = cut(len(text))
                    if len(part) < LONGEST_UNIT:
                        yield unit, part, first
                    else:
                        self.skipped[f"longer than {LONGEST_UNIT:,} characters, as no unit is"] += 1
                        left_out = unit
                    unit = ""
                else:
                    return
                continue
            name, at = found["name"], found.end()
            if not name or (unit and name.rpartition(":")[0] != unit.rpartition(":")[0]):
                continue
            if unit:  # which ends here, or has no end
                ends = unit == name and found["end"]
                yield unit, *cut(at if ends else found.start())
                unit = ""
                if ends:
                    continue
            cut(at - len(found[0]))
            if left_out == name and found["end"]:
                left_out = ""
                cut(at)
            elif name.rpartition(":")[2] in UNITS and not found["end"] and not found["rest"].endswith("/>"):
                unit = name
            else:
                yield name, *cut(at)

    def _element(self, part: str, line: int) -> Element | None:
        builder, parser = TreeBuilder(), expat.ParserCreate("utf-8")
        parser.StartElementHandler = lambda name, attributes: builder.start(
            name.rpartition(":")[2], attributes
        )
        parser.EndElementHandler = lambda name: builder.end(name.rpartition(":")[2])
        parser.CharacterDataHandler, parser.buffer_text = builder.data, True
        named = dict.fromkeys(_ENTITY.findall(part))
        values = [
            (name, "".join(f"&#38;#{ord(one)};" for one in html5.get(f"{name};", ""))) for name in named
        ]
        try:
            if any(known := [f'<!ENTITY {name} "{value}">' for name, value in values if value]):
                parser.Parse(f"<!DOCTYPE {self.root} [{''.join(known)}]>")
            parser.Parse(part.encode("utf-8", "surrogatepass"), True)
            return builder.close()
        except expat.ExpatError as error:
            kind = f"bytes that are not {self.encoding}" if DAMAGED in part else expat.ErrorString(error.code)
            if expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY] == error.code:
                kind += f" {next((f'&{name};' for name, value in values if not value), '')}"
            first = f"is damaged: {kind}, as in line {line + error.lineno - 1:,} of {self.path.name}"
            self.skipped[self.damages.setdefault(kind, first)] += 1
            return None

    def _refuse_entities(self, name: str, *_: object) -> None:
        raise ConfigurationError(
            f"{self.path} declares the entity '{name}', which could name other files or grow without bounds: "
            "save it without a document type of its own"
        )


@dataclass
class _Tsv(_Reading):
    def read(self) -> Iterator[Pair]:
        sample: list[Pair] = []
        with suppress(ConfigurationError):  # of damage, which shows again
            sample.extend(
                islice(read_pairs(self.path, skipped=Counter(), watch=self.watch), IDENTIFIED_LINES)
            )
        refuse_exchanged(str(self.path), sample, self.source, self.target)
        yield from read_pairs(self.path, skipped=self.skipped, watch=self.watch)


@dataclass
class _Tmx(_Reading):
    # by source: when the newest translation of it was changed
    dates: dict[str, int] = field(default_factory=dict)

    root = "tmx"

    def unit(self, unit: Element) -> Iterator[Pair]:
        segments = [(seg, tuv) for tuv in unit.iter("tuv") for seg in tuv.findall("seg")]
        sides = [
            (seg.get(XML_LANG) or tuv.get(XML_LANG) or tuv.get("lang") or "", seg, tuv)
            for seg, tuv in segments
        ]
        both = [
            [side for side in reversed(sides) if same_language(side[0], one)]
            for one in (self.source, self.target)
        ]
        if not all(both):
            self.skipped[f"not in both {self.source} and {self.target}"] += 1
            return
        if others := sum(map(len, both)) - len(both):
            self.skipped["older than another variant of its language, or before it"] += others
        (_, source, _), (_, target, of_target) = (
            max(variants, key=lambda side: _signs(side[2])[0][0]) for variants in both
        )
        signs = sorted(_signs(unit) + _signs(of_target), key=lambda sign: -sign[0])
        date, author = signs[0][0], next((who for _, who in signs if who), "")
        level = next(
            (one.text for one in unit.iter("prop") if "ConfirmationLevel" in one.get("type", "")), None
        )
        for pair in self.pair(_text(source, {}), _text(target, {}), {"conf": level} if level else {}):
            if date and date < self.dates.get(pair[0], 0):
                self.skipped["older by its date than another translation of the same source"] += 1
                continue
            self.dates.pop(pair[0], None)
            if date:
                self.dates[pair[0]] = date
            yield SignedPair.of(pair, date, author)


@dataclass
class _Xliff(_Reading):
    """Units of XLIFF 1.2 and segments of XLIFF 2; alternatives in them are passed over."""

    languages: dict[str, str] = field(default_factory=dict)  # by attribute of the file
    translate: list[str] = field(default_factory=lambda: ["yes"])  # in the file and its open groups

    root = "xliff"

    def tag(self, name: str, attributes: dict[str, str] | None) -> None:
        if name == "group":
            asked = (
                [*self.translate, attributes.get("translate", self.translate[-1])]
                if attributes is not None
                else []
            )
            self.translate = asked or self.translate[: max(len(self.translate) - 1, 1)]
        elif name in ("xliff", "file") and attributes is not None:
            own = [one for one in LANGUAGES if name == "xliff" or "-" in one]  # in XLIFF 2 those of all files
            self.languages |= {one: attributes.get(one, "") for one in own}
            self.translate = [attributes.get("translate", "yes")]

    def read(self) -> Iterator[Pair]:
        before = ""
        with suppress(ConfigurationError):  # which shows again
            for block in self._decoded() if not self.unconfirmed else ():
                self.required.update(_SAYING.findall(before + block))
                before = block[-1000:]
        yield from super().read()

    def unit(self, unit: Element) -> Iterator[Pair]:
        codes = {one.get("id"): "".join(one.itertext()) for one in unit.iter("data")}
        codes |= {"{" + one.get("id", ""): "".join(one.itertext()) for one in unit.iter("mark")}
        levels = {one.get("id"): one.get("conf", "unspecified") for one in unit.iter("seg")}
        if unit.tag == "trans-unit":
            self.required.discard("state")  # which has no default in XLIFF 1.2
        for segment in [unit] if unit.tag == "trans-unit" else unit.iter("segment"):
            source, targets = segment.find("source"), segment.findall("target")
            if unit.get("translate", self.translate[-1]) == "no":
                self.skipped["not to be translated"] += 1
                continue
            if source is None or not targets:
                self.skipped["not translated"] += 1
                continue
            if not (fitting := [one for one in targets if not self._foreign(source, one)]):
                self.skipped[self._foreign(source, targets[-1])] += 1
                continue
            target = fitting[-1]
            said = {
                name.rpartition(":")[2]: value
                for one in (unit, segment, target)
                for name, value in one.attrib.items()
            }
            ours, theirs = (
                {one.get("mid"): _text(one, codes) for one in side.iter("mrk") if one.get("mtype") == "seg"}
                for side in (next(segment.iterfind("seg-source"), source), target)
            )
            if not ours or not theirs or None in ours | theirs or len(ours) == len(theirs) == 1:
                worst = min(
                    levels.values(), key=lambda level: level.lower() in CONFIRMED["conf"].split(), default=""
                )
                yield from self.pair(
                    _text(source, codes), _text(target, codes), said | ({"conf": worst} if worst else {})
                )
            else:
                for mid in ours | theirs:
                    level = {"conf": levels[mid]} if mid in levels else {}
                    yield from self.pair(ours.get(mid, ""), theirs.get(mid, ""), said | level)

    def _foreign(self, source: Element, target: Element) -> str:
        said = [("source", source.get(XML_LANG, "")), ("target", target.get(XML_LANG, ""))]
        for side, language in said + [
            (LANGUAGES[name], language) for name, language in self.languages.items()
        ]:
            if language and not same_language(
                language, wanted := self.source if side == "source" else self.target
            ):
                return f"its {side} is in {language}, not {wanted}"
        return ""


def _signs(element: Element) -> list[tuple[int, str]]:
    """Return when and by whom an element of TMX was changed and made, the last first."""
    signs = (
        (_time(element.get(f"{one}date", "")), element.get(f"{one}id", "")) for one in ("change", "creation")
    )
    return sorted(signs, key=lambda sign: -sign[0])


def _time(date: str) -> int:
    """Return a date such as 20240131T235959Z in seconds since 1970; 0 where it is none, or before.

    >>> [_time(date) for date in ("20240131", "20240131T12", "20240131T1230Z", "20240131 123000+0200", "new")]
    [1706659200, 1706702400, 1706704200, 1706697000, 0]
    """
    with suppress(ValueError):
        made = datetime.fromisoformat(re.sub(r"^(\d{8})[T ]?(?=\d)", r"\1T", date.strip().upper()))
        return max(0, int((made if made.tzinfo else made.replace(tzinfo=UTC)).timestamp()))
    return 0


def _text(element: Element, codes: Mapping[str | None, str]) -> str:
    """Return the text of a sentence, with marks where codes separate and where segments end."""
    texts = [_with_written_codes(element.text or "", codes)]
    for child in element:
        code = child.tag in CODES
        said = [child.get(name) for name in SAYING]
        said += [codes.get(child.get(name)) for name in ("dataRef", "dataRefStart", "dataRefEnd")]
        said += ["".join(child.itertext())] if code else []
        mark = _mark([one for one in said if one], child.tag in ALONE)
        if child.tag == "mrk" and child.get("mtype") == "seg":
            mark = SEAM
        elif child.tag == "cp":  # a character that XML has no place for
            mark = " "
        kinds = [child.tag, child.get("mtype", ""), child.get("type", "")]
        if child.tag in UNWRITTEN or any(map(_DELETED.fullmatch, kinds)):
            texts.append(mark)
        else:
            texts += [mark, "" if code else _text(child, codes) + mark]
        texts.append(_with_written_codes(child.tail or "", codes))
    return "".join(texts)


def _mark(said: list[str], alone: bool) -> str:
    """Return the mark of a code, by its kind and content: it shows a space, or may do so, if alone."""
    shown = [unescape(value) for one in said for value in _VALUE.findall(one)]
    if any(map(_BREAKING.fullmatch, said)) or any(map(_WHITE.fullmatch, shown)):
        return BREAK
    return GAP if alone and not any(map(_FORMAT.fullmatch, said)) else ""


def _with_written_codes(text: str, codes: Mapping[str | None, str]) -> str:
    """Replace the codes that Phrase writes into a text, {1} alone, {1> and <1} as a pair, by their marks."""

    def mark(code: re.Match[str]) -> str:
        content = codes.get("{" + code[1])
        return code[0] if content is None else _mark([content], code[0][0] + code[0][-1] == "{}")

    return _WRITTEN.sub(mark, text)
