"""Print the measures of the house, each with its bound: how much there is, and how often a decision stands twice.

    python scripts/measures.py            # the table
    python scripts/measures.py "fmt: skip"  # and every place that a measure counts, of those whose names have these words

The core is the package without `lab/`. All is counted in the syntax tree, so that formatting changes nothing, but
for lines and `# fmt: skip`. `tests/test_measures.py` refuses what is above its bound.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

BOUNDS = {  # each at most
    "statements in decoding": 4145,
    "statements in building": 2196,
    "statements in text": 2479,
    "statements in datastore": 1736,
    "statements in evaluation": 1680,
    "statements in search": 1199,
    "statements in models": 1198,
    "statements in training": 854,
    "statements in cli": 1659,
    "statements in inference": 1357,
    "statements in ground": 1179,
    "statements in server": 1004,
    "statements in storage": 679,
    "statements in phrases": 510,
    "statements in the core": 21875,
    "names of constants with more than two values": 0,
    "names of constants with two values": 39,
    "constants below a definition they do not need": 0,
    "functions above 60 lines": 0,
    "# fmt: skip": 28,
    "lines above 110 columns": 296,
    "public names that several modules define": 14,
    "options": 300,  # one that commands share counts once
}
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fairseq_ccpr"
LAB = "lab"
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
OPTION = re.compile(r"(\w+_)?option")  # makes an option of a field, see settings.py
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function


def measured() -> dict[str, list[str]]:
    """Return what counts towards each measure, in the order of the bounds: a place, or a name and where it stands."""
    found: dict[str, list[str]] = {name: [] for name in BOUNDS}
    for measure, place in _findings():
        found.setdefault(measure, []).append(place)  # the statements of a room that has no bound yet
    return found


def _findings() -> Iterator[tuple[str, str]]:
    values: dict[str, dict[str, str]] = defaultdict(dict)  # of each constant: what it is, and where
    modules_of: dict[str, list[str]] = defaultdict(list)  # that define a public name
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        room = name.partition("/")[0] if "/" in name else "ground"
        module = ast.parse(text)
        if path.name != "settings.py":  # which makes them
            yield from (("options", f"{name} {option}") for option in _options(module))
        if room == LAB:
            continue
        yield from _of_size(name, room, text, module)
        for constant, value, below in _constants(module):
            values[constant].setdefault(value, name)
            if below:
                yield "constants below a definition they do not need", f"{name} {constant}"
        for node in module.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                modules_of[node.name].append(name)
    for constant, places in values.items():
        if len(places) > 1:
            number = "two values" if len(places) == 2 else "more than two values"
            yield f"names of constants with {number}", f"{constant}: {', '.join(places.values())}"
    for public, names in modules_of.items():
        if len(set(names)) > 1:
            yield "public names that several modules define", f"{public}: {', '.join(names)}"


def _of_size(name: str, room: str, text: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.stmt):
            yield f"statements in {room}", f"{name}:{node.lineno}"
            yield "statements in the core", f"{name}:{node.lineno}"
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > 60:
            yield "functions above 60 lines", f"{name} {node.name}"
    for number, line in enumerate(text.splitlines(), 1):
        if "# fmt: skip" in line:
            yield "# fmt: skip", f"{name}:{number}"
        if len(line) > 110:
            yield "lines above 110 columns", f"{name}:{number}"


def _constants(module: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """Yield each constant of a module: its name, the expression of its value, and whether it could stand higher.

    It could not above what it is made of, as a table of the classes that the module defines.
    """
    defined: set[str] = set()
    for node in module.body:
        if isinstance(node, Definition):
            defined.add(node.name)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for one, value in pairs:
                if isinstance(one, ast.Name) and CONSTANT.fullmatch(one.id):
                    made_of = {name.id for name in ast.walk(value) if isinstance(name, ast.Name)}
                    needs = bool(made_of & defined)
                    yield one.id, ast.unparse(value), bool(defined) and not needs
                    defined |= {one.id} if needs else set()


def _options(module: ast.Module) -> Iterator[str]:
    """Yield what declares an option: `option(...)`, a function made of it, or a field of fairseq with a help."""
    makers = [one for one in ast.walk(module) if isinstance(one, Function) and one.name.endswith("_option")]
    inside = {id(call) for maker in makers for call in ast.walk(maker)}
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and id(call) not in inside:
            metadata = "".join(ast.unparse(one.value) for one in call.keywords if one.arg == "metadata")
            if OPTION.fullmatch(call.func.id) or (call.func.id == "field" and metadata.startswith("{'help'")):
                yield f"line {call.lineno}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for measure, places in measured().items():
        print(f"{len(places):>7,} {f'≤ {BOUNDS[measure]:,}' if measure in BOUNDS else '':<9} {measure}")
        if any(words in measure for words in sys.argv[1:]):
            print(*(f"{'':18}{place}" for place in places), sep="\n")
