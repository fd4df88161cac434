"""From HTML to sentences, and back with the markup at the words that it belongs to.

What is not translated stays as it was written. Parsers that make a tree of a page write another page, without
what is not where HTML has it, such as a cell without its table, placeholders like <x/>, or the attributes of
templates.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fairseq_ccpr.text.sentences import Mark, Parts, Segments, sentences_of, trimmed

_ATTRIBUTE = r"([^\s/>][^\s/=>]*+)(?:\s*+=\s*+(?:\"([^\"]*+)\"?+|'([^']*+)'?+|([^\s>\"'][^\s>]*+)))?+"
# A comment, a tag, or what browsers take for a comment; each reaches the end of the page if nothing ends it
# before. No place is read twice, whatever the page.
_MARKUP = re.compile(
    rf"<!--.*?(?:-->|\Z)|<(?P<end>/?)(?P<name>[a-z][^\s/>]*+)(?P<given>(?:[\s/]++|{_ATTRIBUTE})*+)(?:>|\Z)|<[!?/][^>]*+(?:>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_GIVEN = re.compile(_ATTRIBUTE)
_READ = ("alt", "aria-label", "placeholder", "title")  # attributes that people read
_SCRIPTS = ("script", "style")
# Elements that are kept unless they say translate="yes": what computers read or write.
_KEPT = frozenset({*_SCRIPTS, "code", "kbd", "pre", "samp", "var"})
_VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "param",
    "source",
    "track",
    "wbr",
}
_BLOCKS = "article aside blockquote div dl footer form h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section table ul"
# Other elements at whose tags a sentence ends. Any that is not named here, or that HTML does not know, may be
# part of one.
_OTHERS = (
    "address area base body br button caption col dd details dt fieldset figcaption figure head html iframe "
    "legend li link meta noscript optgroup option script select style summary tbody td "
    "template textarea tfoot th thead title tr"
)
_APART = {*_BLOCKS.split(), *_OTHERS.split()}
# What an element ends that stands open before it.
_ENDED_BY = dict.fromkeys(_BLOCKS.split(), ("p",)) | {
    "li": ("p", "li"), "dt": ("p", "dt", "dd"), "dd": ("p", "dt", "dd"), "option": ("option",),
    "td": ("p", "td", "th"), "th": ("p", "td", "th"), "tr": ("p", "td", "th", "tr"),
}  # fmt: skip
_MOST_OPEN = 512  # elements that an end tag may close, as in browsers
_MOST_MARKS = 64  # tags inside a sentence, which ends before more of them
_MOST_KEPT = 100  # characters of what is kept that the model sees in its sentence
_HIDDEN = "\ue000"  # in place of these, where sentences are looked for


@dataclass
class _Element:
    name: str
    kept: bool
    run: _Run | None = None  # that its start tag is part of
    mark: Mark | None = None


@dataclass
class _Run:
    """What no block interrupts."""

    text: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # the same in one line, and what is kept hidden
    length: int = 0
    marks: list[Mark] = field(default_factory=list)

    def add(self, text: str, seen: str) -> None:
        self.text.append(text)
        self.seen.append(seen)
        self.length += len(text)

    def mark(self, parts: Parts, length: int = 0) -> Mark:
        self.marks.append(Mark(self.length, self.length + length, parts, kept=length > 0))
        return self.marks[-1]


@dataclass
class Page(Segments):
    """HTML in parts, some of which are sentences.

    >>> page = Page.of('<p>Das <b>kleine</b> Haus.<br>Es ist <i translate="no">Haus 3</i></p>')
    >>> page.sentences
    ['Das kleine Haus.', 'Es ist Haus 3']
    >>> [(one.start, one.stop, one.before, one.after) for one in page.marks[0]]
    [(4, 10, ['<b>'], ['</b>'])]
    """

    kept: frozenset[str] = _KEPT  # elements whose text stays as it is
    _attributes: set[int] = field(default_factory=set)  # the sentences in these
    _open: list[_Element] = field(default_factory=list)
    _run: _Run = field(default_factory=_Run)
    _kept: list[tuple[str, str]] = field(default_factory=list)  # since it began: as written, and as text
    _kept_apart: bool = False  # whether a sentence ends there

    @classmethod
    def of(cls, text: str, kept: Iterable[str] = ()) -> Page:
        """Divide a page, or any part of one; `kept` names further elements whose text stays as it is."""
        page, at = cls(kept=_KEPT.union(map(str.lower, kept))), 0
        while found := _MARKUP.search(text, at):
            page._add(text[at : found.start()])
            page._read(found, name := (found["name"] or "").lower())
            at = found.end()
            if name in _SCRIPTS and not found["end"]:
                end = re.compile(rf"</{name}[\s/>]", re.IGNORECASE).search(text, at)
                stop = end.start() if end else len(text)
                page._kept.append((text[at:stop], ""))
                at = stop
        page._add(text[at:])
        page._end_kept()
        page._end_run()
        return page

    def escaped(self, number: int, translation: str) -> str:
        return html.escape(translation, quote=number in self._attributes)

    @property
    def _keeps(self) -> bool:
        return bool(self._open) and self._open[-1].kept

    def _add(self, data: str) -> None:
        text = html.unescape(data)
        if self._keeps:
            self._kept.append((data, text))
        else:
            self._run.add(text, _in_line(text))

    def _read(self, tag: re.Match[str], name: str) -> None:
        # the first counts
        given = {one[1].lower(): one for one in reversed([*_GIVEN.finditer(tag["given"] or "")])}
        starts, ends = bool(name) and not tag["end"], bool(tag["end"])
        before, element = self._keeps, None
        while starts and self._open and self._open[-1].name in _ENDED_BY.get(name, ()):
            self._open.pop()
        if before and not self._keeps:
            self._end_kept()
            before = False
        kept = self._keeps_in(name, given) if starts else before
        if ends:
            element = self._close(name)
        elif starts and name not in _VOID and (name in _SCRIPTS or not self._closes_itself(tag)):
            self._open.append(element := _Element(name, kept))
        if before or self._keeps:
            # Where a part of what is kept is translated, neither can be moved without the other.
            self._kept_apart |= name in _APART or (ends == self._keeps and before != self._keeps)
            self._kept.append((tag[0], ""))
            if not self._keeps:
                self._end_kept()
            return
        parts = [tag[0]] if kept else self._with_attributes(tag, given)
        if name in _APART:
            self._end_run()
            self.parts += parts
            return
        mark = self._run.mark(parts)
        mark.follows, mark.ordered = ends, ends or element is not None
        if starts and element is not None:
            element.run, element.mark = self._run, mark
        elif element is not None and element.mark is not None and element.run is self._run:
            element.mark.end = mark
            mark.follows = element.mark.start < mark.start

    def _keeps_in(self, name: str, given: dict[str, re.Match[str]]) -> bool:
        """Tell whether the text of an element is kept."""
        said = {key: html.unescape(one[2] or one[3] or one[4] or "").strip() for key, one in given.items()}
        kept = self._keeps or name in self.kept or "notranslate" in said.get("class", "").split()
        kept = {"no": True, "yes": False, "": False}.get(said.get("translate", "as around").lower(), kept)
        return kept or name in _SCRIPTS

    @staticmethod
    def _closes_itself(tag: re.Match[str]) -> bool:
        """Tell whether a start tag ends in a slash that is not of an attribute, as in <a href=/>."""
        values = (one.end() for one in _GIVEN.finditer(tag["given"]))
        return tag["given"].endswith("/") and max(values, default=0) < len(tag["given"])

    def _close(self, name: str) -> _Element | None:
        for depth, element in enumerate(reversed(self._open[-_MOST_OPEN:]), 1):
            if element.name == name:
                del self._open[-depth:]
                return element
        return None

    def _with_attributes(self, tag: re.Match[str], given: dict[str, re.Match[str]]) -> list[str | int]:
        """Return the parts of a tag, of which the attributes that people read have sentences."""
        parts: list[str | int] = []
        first, at, known = tag.start("given") - tag.start(), 0, len(self.sentences)
        for one in sorted((given[name] for name in _READ if name in given), key=lambda one: one.start()):
            value = one.lastindex or 1
            if value > 1 and one[value].strip():
                parts.append(tag[0][at : first + one.start(value) - (value < 4)])
                parts += ['"', *self.divide(html.unescape(one[value]), html.escape), '"']
                at = first + one.end()
        self._attributes.update(range(known, len(self.sentences)))
        return [*parts, tag[0][at:]]

    def _end_kept(self) -> None:
        written, texts = ("".join(each) for each in zip(*self._kept)) if self._kept else ("", "")
        if self._kept_apart:
            self._end_run()
            self.parts.append(written)
        elif written:
            shown = texts if len(texts) <= _MOST_KEPT else ""
            self._run.mark([written], len(shown))
            self._run.add(shown, _HIDDEN * len(shown))
        self._kept, self._kept_apart = [], False

    def _end_run(self) -> None:
        """Divide a run into sentences, and what stands between them."""
        run, self._run = self._run, _Run()
        text, seen, places = "".join(run.text), "".join(run.seen), [mark.start for mark in run.marks]
        at, following = 0, iter(run.marks)
        waiting = next(following, None)
        used = set[Mark]()

        def between(end: int) -> Iterator[str | int]:
            nonlocal at, waiting
            while waiting is not None and waiting.start <= end:
                if waiting not in used:
                    yield html.escape(text[at : waiting.start], quote=False)
                    yield from waiting.before
                    at = waiting.stop
                waiting = next(following, None)
            yield html.escape(text[at:end], quote=False)

        for start, end in _sentences(seen, places):
            marks = _inside(
                run.marks[bisect_left(places, start) : bisect_right(places, end)], start, end, used
            )
            self.touching |= {len(self.sentences)} if start == at > 0 else set()
            self.parts += [*between(start), len(self.sentences)]
            if marks:
                self.marks[len(self.sentences)] = marks
            self.sentences.append(_in_line(text[start:end]))
            at = end
        self.parts += between(len(text))


def _in_line(text: str) -> str:
    return re.sub(r"[\t\n\r\f]", " ", text)


def _sentences(seen: str, places: list[int]) -> Iterator[tuple[int, int]]:
    """Find the sentences of a run that are not kept as a whole: where they start and end."""
    for start, end in sentences_of(seen):
        while start < end:
            last = bisect_right(places, start) + _MOST_MARKS
            stop = min(end, places[last]) if last < len(places) else end
            for first, past in trimmed(seen, start, stop):
                if _HIDDEN not in seen[first:past] or any(map(str.isalnum, seen[first:past])):
                    yield first, past
            start = stop


def _inside(marks: list[Mark], start: int, end: int, used: set[Mark]) -> list[Mark]:
    """Return the markup in a sentence by its places there, and add what it is made from to `used`."""
    found = []
    for at, mark in enumerate(marks):
        before, ordered = mark.before, False
        stop, after = (mark.end.start, mark.end.before) if mark.end is not None else (mark.stop, ())
        if mark.start < stop <= end and (mark.kept or (mark.start, stop) != (start, end)):
            used |= {mark, mark.end or mark}
        elif start < mark.start < end and mark not in used:
            empty = mark.end is not None and stop == mark.start  # with what is in it, it stays together
            whole = marks[at : marks.index(mark.end) + 1] if empty and mark.end is not None else [mark]
            before = [part for one in whole for part in one.before]
            stop, after, ordered = mark.start, (), mark.ordered and not empty
            used |= {*whole}
        else:
            continue
        found.append(Mark(mark.start - start, stop - start, before, after, mark.kept, mark.follows, ordered))
    return found
