"""Print the measures of the house, each with its bound: how much there is, and how often a decision stands twice.

    python scripts/measures.py            # the table
    python scripts/measures.py "fmt: skip"  # and every place that a measure counts, of those whose names have these words

The core is the package without `lab/`. All is counted in the syntax tree, so that formatting changes nothing, but
for lines and `# fmt: skip`. `tests/test_measures.py` refuses what is above its bound.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

BOUNDS = {  # each at most
    "statements in decoding": 3526,
    "statements in building": 2308,
    "statements in text": 1793,
    "statements in datastore": 1771,
    "statements in evaluation": 1583,
    "statements in search": 1246,
    "statements in models": 1188,
    "statements in training": 1141,
    "statements in cli": 1136,
    "statements in inference": 1027,
    "statements in ground": 1007,
    "statements in server": 798,
    "statements in storage": 704,
    "statements in phrases": 587,
    "statements in the core": 19815,
    "names of constants with more than two values": 18,
    "names of constants with two values": 49,
    "constants below the first definition of a module": 9,
    "functions above 60 lines": 12,
    "# fmt: skip": 28,
    "lines above 110 columns": 918,
    "public names that several modules define": 18,
    "options declared in the core": 219,
    "options declared in the lab": 139,
    "options of everyday commands": 374,
}
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fairseq_ccpr"
LAB = "lab"
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
OPTION = re.compile(r"(\w+_)?option\(")  # makes an option of a field, see settings.py
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
        for option in _options(module):
            yield f"options declared in the {LAB if room == LAB else 'core'}", f"{name} {option}"
        if room == LAB:
            continue
        yield from _of_size(name, room, text, module)
        for constant, value, below in _constants(module):
            values[constant].setdefault(value, name)
            if below:
                yield "constants below the first definition of a module", f"{name} {constant}"
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
    yield from (("options of everyday commands", option) for option in _of_everyday_commands())


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
    """Yield each constant of a module: its name, the expression of its value, and whether a definition stands above it."""
    below = False
    for node in module.body:
        below |= isinstance(node, Definition)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for one, value in pairs:
                if isinstance(one, ast.Name) and CONSTANT.fullmatch(one.id):
                    yield one.id, ast.unparse(value), below


def _options(module: ast.Module) -> Iterator[str]:
    """Yield the names of options: fields of settings, and parameters of commands."""
    for node in ast.walk(module):
        if isinstance(node, ast.AnnAssign) and node.value and OPTION.match(ast.unparse(node.value)):
            yield ast.unparse(node.target)
        elif isinstance(node, Function) and any(
            ast.unparse(decorator).startswith("command(") for decorator in node.decorator_list
        ):
            yield from (f"{node.name} {one.arg}" for one in [*node.args.args, *node.args.kwonlyargs])


def _of_everyday_commands() -> Iterator[str]:
    """Yield the options of each command that `fairseq-ccpr --help` lists first, those of several commands for each."""
    from fairseq_ccpr.cli import DAILY

    for command, its in json.loads((PACKAGE / "cli/options.json").read_text(encoding="utf-8")).items():
        names = [flags for _, flags, *_ in its["own"] if command in DAILY and "--help" not in flags]
        yield from (f"{command} {', '.join(flags)}" for flags in names)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for measure, places in measured().items():
        print(f"{len(places):>7,} {f'≤ {BOUNDS[measure]:,}' if measure in BOUNDS else '':<9} {measure}")
        if any(words in measure for words in sys.argv[1:]):
            print(*(f"{'':18}{place}" for place in places), sep="\n")
