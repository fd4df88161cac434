"""Makes the tables of the pages from the files under benchmarks/, as scripts/tables.yaml describes them.

    python scripts/results.py            # writes the tables into the pages
    python scripts/results.py --check    # fails where a table is not what its files give, or has figures and no file

A table stands in a page between `<!-- table NAME -->` and `<!-- end -->`. `unfiled` of tables.yaml has those without a file.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import binomtest

ROOT = Path(__file__).resolve().parent.parent
FILES, TABLES = ROOT / "benchmarks", ROOT / "scripts" / "tables.yaml"
PAGES = ("README.md", "docs/**/*.md")
UNFILED = "unfiled"
PLACE = re.compile(r"^<!-- table (\S+) -->\n((?:\|.*\n)*)(?=<!-- end -->$)", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{(\??)([^{}]*)\|([^{}|]*)\}")
ROW = re.compile(r"[\s>]*\||[\s>:|-]+$")  # what a table has at least one of: a pipe at the margin, or a rule
CODE, ADDRESS, MEASURED = re.compile(r"`([^`]*)`"), re.compile(r"\]\([^)]*\)"), re.compile(r"\d\.\d|\d ?%")


class Fault(Exception):
    """What is wrong with a table, in one sentence."""


class Nothing(Fault):
    """A path that leads nowhere."""


class Absent(Exception):
    """An entry that a row does not have."""


@dataclass
class Figure:
    """A number as a cell has it."""

    text: str
    value: Decimal | None = None  # which the best is chosen by; a derived number has none
    deviation: Decimal = Decimal(0)  # of several, whose mean the value is
    best: bool = False

    def __str__(self) -> str:
        return f"**{self.text}**" if self.best else self.text


Cell = list[str | Figure]


def _p(p: Any) -> str:
    return "< 0.001" if p < 0.0005 else f"{p:.3f}" if p < Decimal("0.0095") else f"{p:.2f}"


def _sign(spec: str, one: list[Any], other: list[Any]) -> str:
    tried = len(one) + len(other)
    return _p(binomtest(len(one), tried).pvalue if tried else 1.0)


# By name: how many paths, and what is made of a format of Python's and what they find: of `COUNTS` all that each finds, of
# the others a number, the mean of several.
COUNTS = "count", "sign"
FORMS: dict[str, tuple[int, Callable[..., str]]] = {
    "mean": (1, lambda spec, one: f"{one:{spec}}"),
    "count": (1, lambda spec, one: f"{len(one):,}"),
    "sign": (2, _sign),
    "minus": (2, lambda spec, one, base: _minus(f"{one - base:{spec or '+.1f'}}")),
    "share": (3, lambda spec, one, base, top: _minus(f"{(one - base) / (top - base):{spec or '.0%'}}")),
    "ratio": (2, lambda spec, one, floor: _minus(f"{one / floor:{spec or '.0f'}}")),
    "p": (1, lambda spec, p: _p(p)),
}


@cache
def read(name: str) -> Any:
    """Read a file under benchmarks/: NAME.json, without the ending, or NAME.tsv, a dictionary for each line.

    Of NAME.md, which has what a recipe printed, each table becomes a list of dictionaries.
    """
    path = FILES / (name if name.endswith((".tsv", ".md")) else f"{name}.json")
    if not path.exists():
        raise Fault(f"there is no benchmarks/{path.relative_to(FILES)}")
    with path.open(encoding="utf-8", newline="") as stream:
        if path.suffix == ".tsv":
            return list(csv.DictReader(stream, delimiter="\t"))
        if path.suffix == ".md":
            return list(_printed(stream.read()))
        return json.load(stream, parse_float=Decimal)


def _printed(text: str) -> Iterator[list[dict[str, Any]]]:
    for table in re.findall(r"(?:^\|.*\|(?:\n|\Z))+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
        if len(set(head)) < len(head):
            raise Fault(f"two columns of '{' | '.join(head)}' have one name")
        yield [dict(zip(head, map(_read_number, row), strict=True)) for row in rows]


def _read_number(cell: str) -> Any:
    plain = cell.replace(",", "").removesuffix("%")
    if not re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]\d+)?", plain):
        return cell or None
    return Decimal(plain) / 100 if cell.endswith("%") else Decimal(plain)


def find(path: str) -> list[Any]:
    """Find the values at FILE:STEP/STEP: a step is a key, a place in a list, KEY=VALUE&KEY=VALUE of members, or *."""
    name, _, steps = path.partition(":")
    found = [read(name)]
    for step in filter(None, steps.split("/")):
        members = [one for value in found if isinstance(value, list) for one in value]
        if step == "*":
            found = members
        elif "=" in step:
            found = _matching([one for one in members if isinstance(one, dict)], step)
        elif step.isdigit() and members:
            found = [one[int(step)] for one in found if isinstance(one, list) and int(step) < len(one)]
        else:
            found = [one[step] for one in found if isinstance(one, dict) and step in one]
    return found


def _matching(members: list[Any], step: str) -> list[Any]:
    """Select members; the first of several conditions is a name, which must be there."""
    for place, (key, value) in enumerate(pair.partition("=")[::2] for pair in step.split("&")):
        if members and not any(key in one for one in members):
            raise Nothing(f"no member has '{key}' of {step}")
        members = [one for one in members if str(one.get(key)) == value]
        if not (members or place):
            raise Nothing(f"no member has {key}={value} of {step}")
    return members


def figure(paths: list[list[str]], form: str) -> Figure:
    """Write what stands at some paths: a number by Python's format, a text where it is empty, or one of `FORMS`.

    Args:
        paths: of each, those of the values that it stands for; of several, mean ± standard deviation are written.
    """
    name, _, spec = form.partition(" ")
    expected, written = FORMS.get(name, (1, None))
    if expected != len(paths):
        raise Fault(f"'{form}' takes {expected} paths, not {len(paths)}")
    if name in COUNTS and written:
        return Figure(written(spec, *([one for path in same for one in find(path)] for same in paths)))
    found = [[_single(path) for path in same] for same in paths]
    if not form and isinstance(found[0][0], str):
        return Figure(found[0][0])
    numbers = [[Decimal("nan" if isinstance(one, bool) else one) for one in same] for same in found]
    if not all(one.is_finite() for same in numbers for one in same):
        raise Fault(f"{'; '.join(path for same in paths for path in same)} is no number")
    means = [sum(same, Decimal(0)) / len(same) for same in numbers]
    if written:
        return Figure(written(spec, *means))
    mean, text = means[0], _minus(f"{means[0]:{form}}")
    if len(numbers[0]) == 1:
        return Figure(text, mean)
    deviation = statistics.stdev(numbers[0])
    return Figure(f"{text} ± {deviation:{form}}", mean, deviation)


def _single(path: str) -> Any:
    found = find(path)
    if len(found) != 1 or found[0] is None:
        raise Nothing(f"{path} names {len([one for one in found if one is not None])} values, not one")
    return found[0]


def _minus(number: str) -> str:
    return number.replace("-", "−") if re.search("[1-9]", number) else number.lstrip("+-")


def fill(template: str, names: list[dict[str, Any]], label: bool) -> Cell:
    """Fill a cell; one that needs an entry which the row does not have is empty, as one whose numbers are all left out.

    Args:
        names: what $NAME stands for, and `from`, for each value of an entry that has several.
    """
    known = False
    try:
        texts = [PLACEHOLDER.split(_expand(template, one)) for one in names]
        cell: Cell = [texts[0][0]]
        for place in range(1, len(texts[0]), 4):
            optional, _, form, after = texts[0][place : place + 4]
            paths = zip(*(_paths(text[place + 1], one) for text, one in zip(texts, names)))
            try:
                number, known = figure([list(dict.fromkeys(same)) for same in paths], form), True
            except Nothing:
                if not optional:
                    raise
                number = Figure("–")
            cell += [number, after]
        _refuse_typed("".join(part for part in cell if isinstance(part, str)), label)
    except Absent:
        return []
    except (Fault, ArithmeticError, LookupError, ValueError, TypeError) as error:
        what = error if isinstance(error, Fault) else f"{type(error).__name__} {error}"
        entries = ", ".join(str(entry) for name, entry in names[0].items() if name.isdigit())
        raise Fault(f"row {entries}, {template}: {what}") from error
    return cell if known or len(cell) == 1 else []


def _paths(paths: str, names: dict[str, Any]) -> list[str]:
    return [one if ":" in one else f"{_expand(names['from'], names)}/{one}" for one in paths.split("; ")]


def _expand(text: str, names: dict[str, Any]) -> str:
    def named(place: re.Match[str]) -> str:
        if place[1] not in names:
            raise Fault(f"there is no ${place[1]}")
        if names[place[1]] is None:
            raise Absent
        return _expand(str(names[place[1]]), names)

    return re.sub(r"\$(\w+)", named, text)


def _refuse_typed(text: str, label: bool) -> None:
    words = label and re.search(r"[^\W\d]", text) and not MEASURED.search(text)
    if any(map(str.isnumeric, text)) and not words:
        raise Fault(f"a cell has '{text.strip()}': a number comes from a file, {{PATH|FORMAT}}")


def make(table: dict[str, Any]) -> str:
    """Make a table: blocks of rows, each with a template for each column, the first of which are labels."""
    blocks = table.get("blocks", [table])
    labels, made, head, optional = (
        table.get("labels", 1),
        list[list[Cell]](),
        [*blocks[0]["columns"]],
        set[int](),
    )
    for block in blocks:
        if [*block["columns"]] != head:
            raise Fault(f"the columns {', '.join(block['columns'])} stand below {', '.join(head)}")
        cells = [*block["columns"].values()]
        firsts = [[one] for one in block["each"]] if "each" in block else [[]]
        given = [one if isinstance(one, dict) else {"row": one} for one in block["rows"]]
        given = [one | {"row": [*first, *one["row"]]} for first in firsts for one in given]
        none = {str(place): None for place in range(1, 1 + max(len(one["row"]) for one in given))}
        for one in given:
            entries = {str(place): entry for place, entry in enumerate(one["row"], 1)}
            names = {"from": table.get("from", ""), **table.get("let", {}), **none, **entries}
            several = [name for name in names if isinstance(names[name], list)]
            chosen = [names | dict(zip(several, one)) for one in product(*(names[name] for name in several))]
            if "if" not in one or find(*_paths(_expand(one["if"], names), names)):
                made.append([fill(cell, chosen, i < labels) for i, cell in enumerate(cells)])
        optional |= {place for place, cell in enumerate(cells) if "{?" in cell}
    for place in optional:
        if not any(row[place] for row in made):
            raise Fault(f"no row has anything of the column '{head[place]}'")
    for name in head:
        _refuse_typed(f"{name} x", label=True)
    groups: dict[Any, list[Cell]] = {}
    for number, row in enumerate(made):
        for column, cell in enumerate(row[labels:], labels):
            across = table.get("best") == "across"
            if across or head[column] in table.get("best", ()):
                groups.setdefault(number if across else (_text(row[0]), column), []).append(cell)
    for cells in groups.values():
        _mark(cells)
    lines, before = [head], [""] * labels
    for row in made:
        texts = [_text(cell) for cell in row]
        same = next((i for i in range(labels) if texts[i] != before[i]), labels)
        before = texts[:labels]
        lines.append([""] * same + texts[same:])
    first, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
    return "\n".join([first, f"|{'---|' * len(head)}", *body, ""])


def _text(cell: Cell) -> str:
    return "".join(map(str, cell)).strip()


def _mark(cells: list[Cell]) -> None:
    """Mark the highest of what the cells have at the same place, if there are several, and what differs by chance alone.

    That is what lies below it by no more than the standard deviation of either.
    """
    numbers = [[one for one in cell if isinstance(one, Figure)] for cell in cells]
    for place in range(max(map(len, numbers), default=0)):
        known = [(one[place].value, one[place]) for one in numbers if len(one) > place]
        values = [(value, one) for value, one in known if value is not None]
        if len(values) < 2:
            continue
        highest, top = max(values, key=lambda pair: pair[0])
        for value, one in values:
            one.best = one.text == top.text or highest - value <= max(one.deviation, top.deviation)


def renew(page: str, tables: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return a page with its tables made, what of it has no file, and faults."""
    rest, faults = page, list[str]()
    for place in PLACE.finditer(page):
        try:
            if place[1] not in tables:
                raise Fault(f"{TABLES.name} has no such table")
            page = page.replace(place[0], f"<!-- table {place[1]} -->\n{make(tables[place[1]])}")
        except (Fault, KeyError) as fault:
            faults.append(f"table {place[1]}: {fault}")
        rest = rest.replace(place[0], "")
    return page, rest, faults


def by_hand(page: str) -> Iterator[str]:
    """Yield heading and digest of each table that has a digit, in Markdown or HTML, outside addresses and code."""
    heading, run, fenced, tagged = "", list[str](), False, False
    for line in [*page.splitlines(), ""]:
        fenced ^= bool(re.match(r"\s*(```|~~~)", line))
        tagged = not fenced and (tagged or "<table" in line)
        if tagged or (not fenced and "|" in CODE.sub("", line)):
            run.append(line)
            tagged = tagged and "</table" not in line
            continue
        if any(ROW.match(one) or "<table" in one for one in run) and any(map(_has_digits, run)):
            digest = hashlib.sha256("\n".join(run).encode()).hexdigest()
            yield f"{heading}, {digest[:8]}"
        run = []
        heading = line.strip("# ") if line.startswith("#") and not fenced else heading


def _has_digits(line: str) -> bool:
    """Tell whether a line has figures; code is one if it has no letters."""
    text = CODE.sub(lambda code: "" if re.search(r"[^\W\d]", code[1]) else code[1], ADDRESS.sub("", line))
    return any(map(str.isnumeric, text))


def renewed() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield each page, its text with its tables made, and what is wrong with it, a sentence each."""
    tables = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    unfiled, names = tables.pop(UNFILED, {}), set[str]()
    for path in sorted(one for pattern in PAGES for one in ROOT.glob(pattern)):
        name, page = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        names |= {place[1] for place in PLACE.finditer(page)}
        new, rest, wrong = renew(page, tables)
        if new != page:
            wrong.append("a table is not what its files give: run python scripts/results.py")
        found, known = list(by_hand(rest)), unfiled.get(name, [])
        if isinstance(known, int):
            if len(found) != known:
                counted = f"{len(found)} tables have figures and no file, and `{UNFILED}` says {known}"
                wrong.append(f"{counted}: file what is new, or write {len(found)}")
            found = known = []
        for one in Counter(found) - Counter(known):
            wrong.append(f"{one}: a table has figures and no file, or was changed: see `{UNFILED}`")
        for one in Counter(known) - Counter(found):
            wrong.append(f"{one}: no table is so any more: take it out of `{UNFILED}`")
        yield path, new, [f"{name}, {one}" for one in wrong]
    for name in sorted(tables.keys() - names):
        yield TABLES, TABLES.read_text(encoding="utf-8"), [f"no page shows the table {name} of {TABLES.name}"]


def faults() -> list[str]:
    """Return what is wrong with the pages."""
    return [one for _, _, wrong in renewed() for one in wrong]


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__.strip())
    for path, page, _ in renewed() if not sys.argv[1:] else ():
        path.write_text(page, encoding="utf-8")
    sys.exit("\n".join(faults()) or None)


if __name__ == "__main__":
    main()
