"""Makes the tables of the pages from the files under benchmarks/, as scripts/tables.yaml describes them.

    python scripts/results.py            # writes the tables into the pages
    python scripts/results.py --check    # fails where a table is not what its files give, or has figures and no file

A table stands in a page between `<!-- table NAME -->` and `<!-- end -->`. `UNFILED` counts those that have no file yet.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES, TABLES = ROOT / "benchmarks", ROOT / "scripts" / "tables.yaml"
PAGES = ("README.md", "docs/speed.md", "docs/scaling.md", "docs/results/*.md")
UNFILED: dict[str, dict[str, int]] = {  # by page and heading
    "README.md": {
        "Try it": 1, "Results": 1,
    },
    "docs/results/index.md": {
        "What to use": 1, "The texts": 1, "Measured and not used": 1,
    },
    "docs/results/memory.md": {
        "Learning while translating": 1, "What learning costs": 1, "Glossaries": 1, "Server": 2,
        "Markup in translations": 1,
    },
    "docs/results/monolingual.md": {
        "What the text gains": 2, "Text memory": 1, "Terms and errors": 1,
        "Phrases, alone and with pairs": 1, "A phrase encoder of three layers": 1, "What limits phrases": 2,
    },
    "docs/results/pairs.md": {
        "What a token datastore gains": 1, "The neighbour's sentence": 1, "Without near-duplicates": 1,
        "Text of another domain": 1, "Size, layer and seed": 1, "Precision of retrieval": 1,
        "The same pairs": 1, "Far domains": 1, "A few updates for each sentence": 1, "Side by side": 1,
        "What they offer": 1,
    },
    "docs/results/retrieval.md": {
        "Contextual encoders": 1, "What matters in training them": 1, "Which text to index": 1,
        "Phrase types (XPR)": 1, "Mining": 1, "Methods compared": 1,
        "By the fraction of sentences without a partner": 1, "At size": 1,
        "RFR against the margin ratio": 1, "Word alignment": 1,
    },
    "docs/scaling.md": {
        "What the plans say": 1, "Formulas": 1, "Indexes on disk and on several GPUs": 1,
    },
    "docs/speed.md": {
        "Search": 1, "Effort": 1,
    },
}  # fmt: skip
PLACE = re.compile(r"^<!-- table (\S+) -->\n((?:\|.*\n)*)(?=<!-- end -->$)", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{(\??)([^{}]*)\|([^{}|]*)\}")
# A figure is a number with a decimal point or a per cent sign, or one that a cell begins with.
MEASURED = re.compile(r"\d\.\d|\d ?%|^\W*\d[\d,]*(?![\w–])")
CODE_OR_ADDRESS = re.compile(r"`[^`]*`|\]\([^)]*\)")
DERIVED: dict[str, tuple[Callable[..., Decimal], str]] = {
    "minus": (lambda one, base: one - base, "+.1f"),
    "share": (lambda one, base, top: (one - base) / (top - base), ".0%"),
    "ratio": (lambda one, floor: one / floor, ".0f"),
}


class Fault(Exception):
    """What is wrong with a table, in one sentence."""


class Nothing(Fault):
    """A path that leads nowhere."""


@dataclass
class Figure:
    """A number as a cell has it."""

    text: str
    value: Decimal | None = None  # what the best is chosen by; a derived number takes no part
    best: bool = False

    def __str__(self) -> str:
        return f"**{self.text}**" if self.best else self.text


Cell = list[str | Figure]


@cache
def read(name: str) -> Any:
    """Read a file under benchmarks/: NAME.json, without the ending, or NAME.tsv, a dictionary for each line."""
    path = FILES / (name if name.endswith(".tsv") else f"{name}.json")
    if not path.exists():
        raise FileNotFoundError(f"there is no benchmarks/{path.relative_to(FILES)}")
    with path.open(encoding="utf-8", newline="") as stream:
        if path.suffix == ".tsv":
            return list(csv.DictReader(stream, delimiter="\t"))
        return json.load(stream, parse_float=Decimal)


def find(path: str) -> list[Any]:
    """Find the values at FILE:STEP/STEP: a step is a key, a place in a list, KEY=VALUE&KEY=VALUE of members, or *."""
    name, _, steps = path.partition(":")
    found = [read(name)]
    for step in filter(None, steps.split("/")):
        found = [value for one in found for value in _step(one, step)]
    return found


def _step(value: Any, step: str) -> list[Any]:
    if isinstance(value, dict):
        return [value[step]] if step in value else []
    if not isinstance(value, list) or step == "*":
        return value if isinstance(value, list) else []
    if step.isdigit():
        return value[int(step) : int(step) + 1]
    wanted = [pair.partition("=")[::2] for pair in step.split("&")]
    return [one for one in value if all(key in one and str(one[key]) == given for key, given in wanted)]


def figure(paths: list[str], form: str) -> Figure:
    """Write what stands at some paths: a number by Python's format, or what `DERIVED` makes of several.

    `count` counts what a path finds, `sign` is the p of two such counts, `p` a p, and `spread` a mean and the standard
    deviation.
    """
    found = [find(path) for path in paths]
    name, _, spec = form.partition(" ")
    if name == "count":
        return Figure(f"{len(found[0]):,}")
    if name == "sign":
        return Figure(_p(sign_test(*map(len, found))))
    for path, values in zip(paths, found):
        if len(values) != 1 or values[0] is None:
            raise Nothing(f"{path} names {len([v for v in values if v is not None])} values, not one")
    if isinstance(found[0][0], str):
        return Figure(found[0][0])
    values = [Decimal(one[0]) for one in found]
    if name == "p":
        return Figure(_p(values[0]))
    if name == "spread":
        return Figure(f"{statistics.mean(values):{spec}} ± {statistics.stdev(values):{spec}}")
    if name not in DERIVED:
        return Figure(_minus(f"{values[0]:{form}}"), values[0])
    function, default = DERIVED[name]
    return Figure(_minus(f"{function(*values):{spec or default}}"))


def _minus(number: str) -> str:
    return number.replace("-", "−") if re.search("[1-9]", number) else number.lstrip("+-")


def _p(p: Any) -> str:
    return f"{p:.3f}" if p < Decimal("0.0095") else f"{p:.2f}"


def sign_test(one: int, other: int) -> float:
    """Return how likely a difference as large is by chance, two-sided.

    >>> sign_test(1, 5) == 2 * (1 + 6) / 64
    True
    """
    return min(1.0, 2 * sum(comb(one + other, k) for k in range(min(one, other) + 1)) / 2 ** (one + other))


def fill(template: str, row: list[Any], table: dict[str, Any], label: bool) -> Cell:
    """Fill a cell; one that needs an entry which the row does not have is empty, as one whose numbers are all left out."""
    try:
        template, start = (
            _expand(text, row, table.get("let", {})) for text in (template, table.get("from", ""))
        )
    except IndexError:
        return []
    cell, end, known = Cell(), 0, False
    for place in PLACEHOLDER.finditer(template):
        paths = [path if ":" in path else f"{start}/{path}" for path in place[2].split("; ")]
        try:
            number, known = figure(paths, place[3]), True
        except Nothing:
            if not place[1]:
                raise
            number = Figure("–")
        cell += [template[end : place.start()], number]
        end = place.end()
    typed = "".join(part for part in (*cell, template[end:]) if isinstance(part, str))
    if re.search(r"\d", typed) and not (label and re.search(r"[^\W\d]", typed)):
        raise Fault(f"a cell has '{typed.strip()}': a number comes from a file, {{PATH|FORMAT}}")
    return [*cell, template[end:]] if known or not cell else []


def _expand(text: str, row: list[Any], let: dict[str, str]) -> str:
    def named(place: re.Match[str]) -> str:
        if not place[1].isdigit():
            return _expand(let[place[1]], row, let)
        found = row[int(place[1]) - 1]
        if found is None:
            raise IndexError
        return str(found)

    return re.sub(r"\$(\w+)", named, text)


def make(table: dict[str, Any]) -> str:
    """Make a table: a head, and blocks of rows, each with a template for each column, the first of which are labels."""
    labels, made = table.get("labels", 1), list[list[Cell]]()
    for block in table.get("blocks", [table]):
        if len(block["cells"]) != len(table["head"]):
            raise Fault(f"{len(block['cells'])} cells stand below a head of {len(table['head'])}")
        rows = (
            [[one, *row] for one in block["each"] for row in block["rows"]]
            if "each" in block
            else block["rows"]
        )
        for row in rows:
            made.append([fill(cell, row, table, i < labels) for i, cell in enumerate(block["cells"])])
    groups: dict[Any, list[Cell]] = {}
    for number, row in enumerate(made):
        for column, cell in enumerate(row[labels:], labels):
            across = table.get("best") == "across"
            if across or table["head"][column] in table.get("best", ()):
                groups.setdefault(number if across else (_text(row[0]), column), []).append(cell)
    for cells in groups.values():
        _mark(cells)
    lines, before = [table["head"]], [""] * labels
    for row in made:
        texts = [_text(cell) for cell in row]
        same = next((i for i in range(labels) if texts[i] != before[i]), labels)
        before = texts[:labels]
        lines.append([""] * same + texts[same:])
    head, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)
    return "\n".join([head, f"|{'---|' * len(table['head'])}", *body, ""])


def _text(cell: Cell) -> str:
    return "".join(map(str, cell)).strip()


def _mark(cells: list[Cell]) -> None:
    """Mark the best of what the cells have at the same place, if there are several."""
    numbers = [[one for one in cell if isinstance(one, Figure)] for cell in cells]
    for place in range(max(map(len, numbers), default=0)):
        known = [one[place] for one in numbers if len(one) > place and one[place].value is not None]
        best = max((one.value for one in known if one.value is not None), default=None)
        for one in known if len(known) > 1 else []:
            one.best = one.text == next(other.text for other in known if other.value == best)


def renew(page: str) -> tuple[str, str, set[str], list[str]]:
    """Return a page with its tables made, what of it was written by hand, the names of the tables, and faults.

    A table whose file is not there yet is left as it is, as one written by hand.
    """
    tables, names, faults = yaml.safe_load(TABLES.read_text(encoding="utf-8")), set[str](), list[str]()
    rest = page
    for place in PLACE.finditer(page):
        names.add(place[1])
        try:
            if place[1] not in tables:
                raise Fault(f"{TABLES.name} has no such table")
            page = page.replace(place[0], f"<!-- table {place[1]} -->\n{make(tables[place[1]])}")
        except FileNotFoundError:
            continue
        except Fault as fault:
            faults.append(f"table {place[1]}: {fault}")
        rest = rest.replace(place[0], "")
    return page, rest, names, faults


def by_hand(page: str) -> Counter[str]:
    """Count the tables with figures below each heading, their first columns apart."""
    found, heading, fenced, known = Counter[str](), "", False, False
    for line in page.splitlines():
        fenced ^= line.startswith("```")
        if not line.lstrip().startswith("|") or fenced:
            known = False  # the next table is another
            heading = line.lstrip("# ") if line.startswith("#") and not fenced else heading
            continue
        cells = [CODE_OR_ADDRESS.sub("", cell).replace("*", "") for cell in line.split("|")[2:-1]]
        if not known and any(map(MEASURED.search, cells)):
            found[heading], known = found[heading] + 1, True
    return found


def faults() -> Iterator[str]:
    """Yield what is wrong with the pages, a sentence each."""
    shown: set[str] = set()
    for path in sorted(one for pattern in PAGES for one in ROOT.glob(pattern)):
        name, page = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        new, rest, names, wrong = renew(page)
        shown |= names
        yield from (f"{name}, {one}" for one in wrong)
        if new != page:
            yield f"{name} has a table that its files do not give: run python scripts/results.py"
        found, known = by_hand(rest), Counter(UNFILED.get(name, {}))
        yield from (f"{name}, {one}: a table has figures and no file" for one in found - known)
        yield from (f"{name}, {one}: UNFILED counts more tables without a file" for one in known - found)
    for name in sorted(yaml.safe_load(TABLES.read_text(encoding="utf-8")).keys() - shown):
        yield f"no page shows the table {name} of {TABLES.name}"


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__.strip())
    if not sys.argv[1:]:
        for path in (one for pattern in PAGES for one in ROOT.glob(pattern)):
            path.write_text(renew(path.read_text(encoding="utf-8"))[0], encoding="utf-8")
    sys.exit("\n".join(faults()) or None)


if __name__ == "__main__":
    main()
