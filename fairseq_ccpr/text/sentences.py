"""From texts of any length to sentences, and back to texts with their translations."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# Where a sentence may end: marks, what closes with them, and space, which Chinese and Japanese do without. No
# place is read twice, so that thousands of dots take no longer than other text.
# Marks that stand in no abbreviation, figure or address end a sentence without space: of Chinese, Japanese,
# Indic scripts, Arabic and Urdu, Armenian, Greek, Burmese, Khmer, Ethiopic, Mongolian, Sinhala, Tibetan and
# others.
_MARKS = ".!?…‼‽⁇⁈⁉"
_ALWAYS = "。！？｡।॥؟۔։\u037e။។៕።፧፨᠃᠉෴༎᱾᱿꯫܀"
_WIDE = "．"  # which is no end in ３．５ and Ｎｏ．１, nor after the number of a heading
_CLOSING = "」』”’）】》〉»"
_END = re.compile(
    rf"(?<![{_MARKS}{_ALWAYS}{_WIDE}])[{_MARKS}]++[\"'”“’‘»«)\]]*+\s++|(?<=[Ͱ-Ͽἀ-῾]);\s++"
    rf"|(?:[{_ALWAYS}]|{_WIDE}(?!(?<=[\dA-Za-zＡ-Ｚａ-ｚ]{_WIDE})\d))[{_ALWAYS}{_WIDE}{_MARKS}]*+[{_CLOSING}]*+(?:[\"')\]]++(?=\s))?+\s*+"
)
# Where one that is too long is divided: after marks of clauses, or else at space.
_CLAUSE = re.compile(rf"[,;:،؛{_MARKS}][\"'”’»)\]]*+\s++|\s[-–—]\s++|[、，；：]")
_SPACE = re.compile(r"\s++")
_LINE = re.compile(r"[^\n\r\v\f\x85\u2028\u2029]+")
_OPENING = "\"'“„«‘‚([¿¡-–— "
_ABBREVIATIONS = (
    "abs bd bzw ca cf dr etc evtl fig ggf hl jr mr mrs ms nr prof sog sr st str tel usw vgl vol vs"
)
_NO_END = frozenset(_ABBREVIATIONS.split())
# Not before a figure.
_OF_FIGURES = (
    "abb abschn anh anl anm art aufl bl bsp fn gl jg kap lit mio mrd no nrn pkt pos pp rn rz sec tab tsd ziff"
)
_BEFORE_FIGURES = frozenset(_OF_FIGURES.split())
Parts = Sequence["str | int"]  # of a text; a number stands for the translation of that sentence


@dataclass(eq=False)
class Mark:
    """Markup in a sentence: an element around sentence[start:stop], or a tag by itself, if both are equal.

    Attributes:
        before, after: what is written around the translation of the element's text.
        kept: whether `before` is written in place of it.
        follows: whether it belongs to the word before it, as an end tag does.
        ordered: whether it is a tag of an element that begins or ends outside of the sentence. Such tags stay
            in their order, in which those that end come before those that begin.
    """

    start: int
    stop: int
    before: Parts
    after: Parts = ()
    kept: bool = False
    follows: bool = False
    ordered: bool = False
    end: Mark | None = None  # the end tag of a start tag


@dataclass
class Segments:
    """A text in parts, some of which are sentences.

    >>> text = Segments.of("Es werde Licht! Und es\\n  ward Licht.")
    >>> text.sentences
    ['Es werde Licht!', 'Und es', 'ward Licht.']
    >>> text.join(["Let there be light!", "And there", "was light."])
    'Let there be light! And there\\n  was light.'
    """

    sentences: list[str] = field(default_factory=list)
    parts: list[str | int] = field(default_factory=list)
    marks: dict[int, list[Mark]] = field(default_factory=dict)  # of the sentences that have markup inside
    touching: set[int] = field(default_factory=set)  # the sentences that no space parts from the one before
    continued: set[int] = field(default_factory=set)  # those that go on with one that was too long

    @classmethod
    def of(cls, text: str) -> Segments:
        return cls.fitting(text, lambda sentence: True)

    @classmethod
    def fitting(cls, text: str, fits: Callable[[str], bool]) -> Segments:
        """Divide a text into sentences, and those that do not fit further, see `pieces_of`."""
        segments = cls()
        segments.parts = segments.divide(text, fits=fits)
        return segments

    def divide(
        self,
        text: str,
        escape: Callable[[str], str] = str,
        fits: Callable[[str], bool] = lambda sentence: True,
    ) -> list[str | int]:
        """Add the sentences of a text; returns its parts."""
        parts: list[str | int] = []
        at = 0
        for first, last in sentences_of(text):
            for start, end in pieces_of(text, first, last, fits):
                self.touching |= {len(self.sentences)} if parts and start == at else set()
                self.continued |= {len(self.sentences)} if start > first else set()
                parts += [escape(text[at:start]), len(self.sentences)]
                self.sentences.append(text[start:end])
                at = end
        return [*parts, escape(text[at:])]

    def join(self, translations: Sequence[str | Parts]) -> str:
        """Return the text with each of its sentences replaced by its translation, in order."""
        return "".join(self._texts(self.parts, translations))

    def ranked(self, translations: Sequence[Sequence[str | Parts]]) -> list[str]:
        """Return the text's best translation, then others: the n-th has of each sentence the n-th best."""
        ranks = range(max(map(len, translations), default=1))
        found = [self.join([each[min(rank, len(each) - 1)] for each in translations]) for rank in ranks]
        return list(dict.fromkeys(found))

    def space_before(self, number: int, translations: Sequence[str | Parts]) -> str:
        """Return what parts a translation from the one before, where the source does without and it does not."""
        if number not in self.touching:
            return ""
        both = ("".join(map(str, translations[n])) for n in (number - 1, number))
        before, after = (
            re.sub("<[^>]*>", "", html.unescape(text)).strip(f"{_CLOSING}{_MARKS} ") for text in both
        )
        wide = any(unicodedata.east_asian_width(one) in "WF" for one in before[-1:] + after[:1])
        return "" if wide or not (before and after) else " "

    def _texts(self, parts: Parts, translations: Sequence[str | Parts]) -> Iterator[str]:
        for part in parts:
            if isinstance(part, str):
                yield part
                continue
            yield self.space_before(part, translations)
            if isinstance(translation := translations[part], str):
                yield self.escaped(part, translation)
            else:
                yield from self._texts(translation, translations)

    def escaped(self, number: int, translation: str) -> str:
        return translation


def with_marks(texts: Sequence[Segments]) -> tuple[list[str], list[list[Mark]]]:
    """Return the sentences of all texts, and the markup of each."""
    sentences = [one for text in texts for one in text.sentences]
    return sentences, [text.marks.get(n, []) for text in texts for n in range(len(text.sentences))]


def sentences_of(text: str) -> Iterator[tuple[int, int]]:
    """Find the sentences of a text: where they start and end."""
    for line in _LINE.finditer(text):
        start, last = line.span()
        for mark in _END.finditer(text, start, last):
            if _ends(text, start, mark):
                yield from trimmed(text, start, mark.end())
                start = mark.end()
        yield from trimmed(text, start, last)


def _ends(text: str, start: int, mark: re.Match[str]) -> bool:
    """Tell whether a sentence ends with a mark: not after `Dr.`, `3.`, `z. B.`, nor before a small letter."""
    if mark[0][0] == _WIDE:
        return re.fullmatch(rf"[\d{_WIDE}]*+", text[start : mark.start()]) is None
    if mark[0][0] in _ALWAYS + ";":
        return True
    following = text[mark.end() : mark.end() + 8].lstrip(_OPENING)[:1]
    if not following or following.islower():
        return False
    if mark[0].rstrip() != ".":
        return True
    words = text[max(start, mark.start() - 40) : mark.start()].split()
    word = words[-1].lstrip(_OPENING).casefold() if words else ""
    known = word in _NO_END or (following.isdigit() and word in _BEFORE_FIGURES)
    return len(word) > 1 and not word.isdigit() and not known and "." not in word


def pieces_of(text: str, start: int, end: int, fits: Callable[[str], bool]) -> Iterator[tuple[int, int]]:
    """Divide text[start:end] until its pieces fit: near the middle after a clause, or else at a space.

    What has neither stays as long as it is.

    >>> text = "Als es Abend war, sagte er: Kommt alle her und setzt euch an den Tisch"
    >>> [text[start:end] for start, end in pieces_of(text, 0, len(text), lambda piece: len(piece) < 30)]
    ['Als es Abend war, sagte er:', 'Kommt alle her und', 'setzt euch an den Tisch']
    """
    if fits(text[start:end]):
        yield start, end
        return
    quarter = (end - start) // 4
    clauses = (one.end() for one in _CLAUSE.finditer(text, start + quarter, end - quarter))
    spaces = (one.end() for one in _SPACE.finditer(text, start, end))
    for places in (clauses, spaces):
        if (middle := min(places, key=lambda at: abs(2 * at - start - end), default=end)) < end:
            for first, last in (*trimmed(text, start, middle), *trimmed(text, middle, end)):
                yield from pieces_of(text, first, last, fits)
            return
    yield start, end


def trimmed(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield text[start:end] without space around it, if anything is left."""
    sentence = text[start:end]
    start, end = end - len(sentence.lstrip()), start + len(sentence.rstrip())
    if start < end:
        yield start, end
