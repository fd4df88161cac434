"""Documents in Markdown, whose prose is translated and whose markup stays, byte for byte."""

from __future__ import annotations

import html
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fairseq_ccpr.text.documents import OURS, Document
from fairseq_ccpr.text.html import Page

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

logger = logging.getLogger(__name__)


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
        for tag in OURS.finditer(text):
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
