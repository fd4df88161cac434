"""Makes the tables of the pages from the files under benchmarks/, as scripts/tables.yaml describes them.

    python scripts/results.py            # writes the tables into the pages
    python scripts/results.py --check    # fails where a table is not what its files give, or has figures and no file

A table stands in a page between `<!-- table NAME -->` and `<!-- end -->`. `unfiled` of tables.yaml has those without a file.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
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
PLACE = re.compile(r"^<!-- table (\S+) -->\n((?:\|.*\n)*)(?=<!-- end -->$)", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{(\??)([^{}]*)\|([^{}|]*)\}")
BY_HAND = re.compile(r"^.*\|.*\n[ >:|-]+\n(?:.*\|.*\n?)*", re.MULTILINE)  # a head, a rule, and rows
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
CODE, ADDRESS, MEASURED = re.compile(r"`([^`\n]*)`"), re.compile(r"\]\([^)]*\)"), re.compile(r"\d\.\d|\d ?%")


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
    value: Decimal = Decimal("nan")  # which the best is chosen by; a derived number has none
    deviation: Decimal = Decimal(0)  # of several, whose mean the value is
    best: bool = False

    def __str__(self) -> str:
        return f"**{self.text}**" if self.best else self.text


Cell = list[str | Figure]


def _p(p: Any) -> str:
    return "< 0.001" if p < 0.0005 else f"{p:.3f}" if p < Decimal("0.0095") else f"{p:.2f}"


# By name: how many paths, and what is made of a format of Python's and the number at each, or the mean of several.
FORMS: dict[str, tuple[int, Callable[..., str]]] = {
    "mean": (1, lambda spec, one: f"{one:{spec}}"),
    "sign": (2, lambda spec, one, other: _p(binomtest(int(one), int(one + other)).pvalue)),
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
    """Find the values at FILE:STEP/STEP, which the head of tables.yaml describes."""
    name, _, steps = path.partition(":")
    found = [read(name)]
    for step in filter(None, steps.split("/")):
        members = [one for value in found if isinstance(value, list) for one in value]
        if step == "*":
            found = members
        elif step == "#":
            found = [len(found)]
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
        found = [one for one in members if str(one.get(key)) == value]
        unknown = members and not any(key in one for one in members)
        if not found and (unknown or not place):
            raise Nothing(f"no member has {key}={value} of {step}")
        members = found
    return members


def figure(paths: list[list[str]], form: str) -> Figure:
    """Write a number by Python's format, or mean ± standard deviation, a text where it is empty, or one of `FORMS`.

    Args:
        paths: those that the form takes, each once for each value of an entry that has several.
    """
    name, _, spec = form.partition(" ")
    expected, written = FORMS.get(name, (1, None))
    if expected != len(paths):
        raise Fault(f"'{form}' takes {expected} paths, not {len(paths)}")
    found = [[_value(path, form) for path in same] for same in paths]
    if isinstance(found[0][0], str):
        return Figure(found[0][0])
    if (name == "p" or not form) and any(len(same) > 1 for same in found):
        raise Fault(f"'{form}' is of one run, and {len(found[0])} are given")
    means = [sum(same, Decimal(0)) / len(same) for same in found]
    if written:
        return Figure(written(spec, *means))
    text = _minus(f"{means[0]:{form}}")
    if len(found[0]) == 1:
        return Figure(text, means[0])
    deviation = statistics.stdev(found[0])
    return Figure(f"{text} ± {deviation:{form}}", means[0], deviation)


def _value(path: str, form: str) -> Any:
    """Return the number at a path, or the text where the form is empty."""
    found = find(path)
    if len(found) != 1 or found[0] is None:
        raise Nothing(f"{path} names {len(found) - found.count(None)} values, not one")
    if not form and isinstance(found[0], str):
        return found[0]
    number = Decimal("nan" if isinstance(found[0], bool) else found[0])
    if not number.is_finite():
        raise Fault(f"{path} is no number")
    return number


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
        if names.get(place[1]) is not None:
            return _expand(str(names[place[1]]), names)
        raise Absent if place[1].isdigit() else Fault(f"there is no ${place[1]}")

    return re.sub(r"\$(\w+)", named, text)


def _refuse_typed(text: str, label: bool) -> None:
    words = label and re.search(r"[^\W\d]", text) and not MEASURED.search(text)
    if any(map(str.isnumeric, text)) and not words:
        raise Fault(f"a cell has '{text.strip()}': a number comes from a file, {{PATH|FORMAT}}")


def make(table: dict[str, Any]) -> str:
    """Make a table: of each row, a cell for each column, the first of which are labels."""
    labels, best, columns = table.get("labels", 1), table.get("best", ()), table["columns"]
    cells = [(table["cell"], one) if isinstance(one, dict) else (one, {}) for one in columns.values()]
    made = [
        [fill(cell, [one | more for one in names], i < labels) for i, (cell, more) in enumerate(cells)]
        for names in _rows(table)
    ]
    for place, name in enumerate(columns):
        _refuse_typed(f"{name} x", label=True)
        if not any(row[place] for row in made):
            raise Fault(f"no row has anything of the column '{name}'")
    groups: dict[Any, list[Cell]] = {}
    for number, row in enumerate(made):
        for name, cell in [*zip(columns, row)][labels:]:
            group = number if best == "across" else ("".join(map(str, row[0])), name)
            if best == "across" or name in best:
                groups.setdefault(group, []).append(cell)
    for compared in groups.values():
        _mark(compared)
    lines, texts = [[*columns]], [["".join(map(str, cell)).strip() for cell in row] for row in made]
    for line, above in zip(texts, [[], *texts]):
        same = [i < labels and line[: i + 1] == above[: i + 1] for i in range(len(line))]
        lines.append(["" if repeated else text for repeated, text in zip(same, line)])
    head, *body = ("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)
    return "\n".join([head, f"|{'---|' * len(columns)}", *body, ""])


def _rows(table: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield for each row what names stand for, once for each value of an entry that has several."""
    rows = [one if isinstance(one, dict) else {"row": one} for one in table["rows"]]
    for first in [[one] for one in table["each"]] if "each" in table else [[]]:
        for one in rows:
            entries = {str(place): entry for place, entry in enumerate([*first, *one["row"]], 1)}
            names = {"from": table.get("from", ""), **table.get("let", {}), **entries}
            several = {name: values for name, values in entries.items() if isinstance(values, list)}
            if "if" not in one or find(*_paths(_expand(one["if"], names), names)):
                yield [names | dict(zip(several, values)) for values in product(*several.values())]


def _mark(cells: list[Cell]) -> None:
    """Mark the highest at each place of the cells, and what no more than a standard deviation is below it."""
    numbers = [[one for one in cell if isinstance(one, Figure)] for cell in cells]
    for place in range(max(map(len, numbers), default=0)):
        known = [one[place] for one in numbers if len(one) > place and one[place].value.is_finite()]
        top = max(known, key=lambda one: one.value, default=Figure(""))
        for one in known if len(known) > 1 else []:
            one.best = one.text == top.text or top.value - one.value <= max(one.deviation, top.deviation)


def renew(page: str, tables: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a page with its tables made, and faults."""
    faults = list[str]()

    def made(place: re.Match[str]) -> str:
        try:
            if place[1] not in tables:
                raise Fault(f"{TABLES.name} has no such table")
            return f"<!-- table {place[1]} -->\n{make(tables[place[1]])}"
        except (Fault, KeyError) as fault:
            faults.append(f"table {place[1]}: {fault}")
            return place[0]

    return PLACE.sub(made, page), faults


def by_hand(page: str) -> int:
    """Count the tables that have a digit outside addresses and code; code without letters is figures."""
    text = ADDRESS.sub("", FENCED.sub("", page))
    text = CODE.sub(lambda code: "" if re.search(r"[^\W\d]", code[1]) else code[1].replace("|", ""), text)
    return sum(any(map(str.isnumeric, one)) for one in BY_HAND.findall(text))


def read_tables() -> tuple[dict[str, Any], dict[str, int]]:
    """Read the tables, of whose columns each has a template, and how many of each page have no file."""
    tables = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    shared, unfiled = tables.pop("columns", {}), tables.pop("unfiled", {})
    for columns in (table["columns"] for table in tables.values()):
        columns |= {head: shared.get(head, f"{{{head}|}}") for head in columns if columns[head] is None}
    return tables, unfiled


def renewed() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield each page, its text with its tables made, and what is wrong with it, a sentence each."""
    tables, unfiled, names = *read_tables(), set[str]()
    for path in sorted(one for pattern in PAGES for one in ROOT.glob(pattern)):
        name, page = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        names |= {place[1] for place in PLACE.finditer(page)}
        new, wrong = renew(page, tables)
        if new != page:
            wrong.append("a table is not what its files give: run python scripts/results.py")
        found, known = by_hand(PLACE.sub("", page)), unfiled.get(name, 0)
        if found != known:
            counted = f"{found} tables have figures and no file, and `unfiled` says {known}"
            wrong.append(f"{counted}: file what is new, or write {found}")
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
