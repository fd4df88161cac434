"""Gather what gpu_check.sh measured in one file, and make the tables of docs/speed.md's GPU section of it.

python scripts/recipes/gpu_section.py OUTPUT [COMMIT]

OUTPUT/gpu.json gets what was measured, and OUTPUT/gpu.md the section, with device, versions, date, commit and settings.
Figures of several commits or devices are refused, and of a commit that is not known, or changed; COMMIT names that of a
copy without git.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILES = ("search.json", "exact-*.json", "sentences.json", "faiss.json")  # of the second one for each size
WAYS = {"exact": "exactly", "sentences": "in the 64 nearest sentences", "faiss": "by FAISS"}
SAME = ("device", "commit", "torch", "fairseq-ccpr")
BASES = ("base", "base+")


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__.strip())
    output = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for path in (path for files in FILES for path in sorted(output.glob(files))):
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    if not found:
        sys.exit(f"{output} has no figures: run gpu_check.sh, which measures them")
    for one in found.values():
        one["machine"]["commit"] = one["machine"].get("commit") or "".join(sys.argv[2:])
    machines = {tuple(one["machine"].get(key) for key in SAME) for one in found.values()}
    if len(machines) != 1:
        sys.exit(
            f"{output} has figures of {len(machines)} devices, versions or commits, not of one run: empty it, run again"
        )
    machine = next(iter(found.values()))["machine"]
    if not machine["commit"] or machine["commit"].endswith("-dirty"):
        sys.exit(
            f"{output} has figures of the commit '{machine['commit']}', which nobody can look up: "
            "commit, run again, and where there is no git give COMMIT"
        )
    said = ", ".join(f"{key} {machine[key]}" for key in SAME if machine.get(key))
    tables = [searches(found["search"])] if "search" in found else []
    page = f"Of one run, {machine['date'][:10]}: {said}.\n\n" + "\n\n".join(tables + decoding(found)) + "\n"
    (output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (output / "gpu.md").write_text(page, encoding="utf-8")
    print(page)


def searches(found: dict[str, Any]) -> str:
    """Searches of k 8: a row for each width, number of keys and index, a column for queries at once."""
    rows = [row for row in found["search"] if row["k"] == 8]
    queries = sorted({row["queries"] for row in rows})
    lines: dict[tuple[int, int, str], dict[int, Any]] = {}
    for row in rows:
        lines.setdefault((row["keys"], row["dimension"], row["index"]), {})[row["queries"]] = row
    head = ["keys", "width", "index", *(f"{count} queries, ms" for count in queries), "÷ floor"]
    body = []
    for (keys, width, index), by in sorted(lines.items()):
        times = (f"{by[count]['milliseconds']:.2f}" if count in by else "" for count in queries)
        first = by[min(by)]
        body.append([f"{keys:,}", width, index, *times, f"{first['milliseconds'] / first['floor']:.1f}"])
    return table([head, *body])


def decoding(found: dict[str, Any]) -> list[str]:
    """A table for each load: speed, milliseconds of search, and operations a step, of each system; and settings."""
    head = ["system", "keys", "searched", "tokens/s", "of fairseq", "of base+"]
    head += ["search, ms", "operations a step"]
    loads: dict[int, list[list[Any]]] = {}
    signatures: dict[str, str] = {}
    for name, one in found.items():
        way = name.partition("-")[0]
        if way not in WAYS:
            continue
        signatures |= {f"{system}, {WAYS[way]}": line for system, line in one["signatures"].items()}
        for row in one["decoding"]:
            body, base = loads.setdefault(row["batch"], []), row["system"] in BASES
            if base and any(row["system"] == other[0] for other in body):
                continue
            searched = WAYS[way] if "search" in row["parts"] else ""
            speeds = f"{row['tokens_per_second']:,.0f}", f"{row['speed']:.0%}", f"{row['speed_equipped']:.0%}"
            keys = f"{row['entries']:,}" if row["entries"] else ""
            search = f"{row['parts'].get('search', 0):.2f}"
            body.append([row["system"], keys, searched, *speeds, search, f"{row['operations']:.0f}"])
    tables = [
        f"Batches of {batch:,} target token{'s' * (batch > 1)}:\n\n{table([head, *body])}"
        for batch, body in sorted(loads.items())
    ]
    settings = "\n".join(f"- {system}: `{line}`" for system, line in signatures.items())
    return [*tables, settings] if settings else tables


def table(rows: list[list[Any]]) -> str:
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


if __name__ == "__main__":
    main()
