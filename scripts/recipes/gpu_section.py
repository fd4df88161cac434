"""Gather what gpu_check.sh measured in one file, and make the tables of docs/speed.md's GPU section of it.

python scripts/recipes/gpu_section.py OUTPUT

OUTPUT/gpu.json gets search.json, exact.json, sentences.json and faiss.json, as far as they are there, and
OUTPUT/gpu.md the section, with device, versions, date and commit. Figures of several commits or devices are refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

WAYS = {"exact": "exactly", "sentences": "64 sentences' keys", "faiss": "by FAISS"}
SAME = ("device", "commit", "torch", "fairseq-ccpr")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    output = Path(sys.argv[1])
    names = [name for name in ("search", *WAYS) if (output / f"{name}.json").exists()]
    found: dict[str, Any] = {name: json.loads((output / f"{name}.json").read_text()) for name in names}
    machines = {tuple(one["machine"].get(key) for key in SAME) for one in found.values()}
    if len(machines) != 1:
        sys.exit(
            f"{output} has figures of {len(machines)} devices, versions or commits, not of one run: empty it, run again"
        )
    (output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    machine = found[names[0]]["machine"]
    said = ", ".join(f"{key} {machine[key]}" for key in SAME if machine.get(key))
    tables = [searches(found["search"]), *(decoding(found) if len(names) > 1 else [])]
    page = f"Of one run, {machine['date'][:10]}: {said}.\n\n" + "\n\n".join(tables) + "\n"
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
    body = [
        [
            f"{keys:,}",
            width,
            index,
            *(f"{by[count]['milliseconds']:.2f}" for count in queries),
            over_floor(by[queries[0]]),
        ]
        for (keys, width, index), by in sorted(lines.items())
    ]
    return table([head, *body])


def over_floor(row: dict[str, Any]) -> str:
    return f"{row['milliseconds'] / row['floor']:.1f}"


def decoding(found: dict[str, Any]) -> list[str]:
    """A table for each load: speed, milliseconds of search, and operations a step, of each system."""
    tables = []
    for batch in sorted({row["batch"] for way in WAYS if way in found for row in found[way]["decoding"]}):
        head = [
            "system",
            "keys",
            "searched",
            "tokens/s",
            "of fairseq",
            "of base+",
            "search, ms",
            "operations a step",
        ]
        body = []
        for way, said in WAYS.items():
            seen = set()
            for row in found.get(way, {}).get("decoding", []):
                alone = not row["entries"]
                if row["batch"] != batch or (alone and (way != "exact" or row["system"] in seen)):
                    continue
                seen.add(row["system"])
                keys, searched = ("", "") if alone else (f"{row['entries']:,}", said)
                speeds = (
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['speed']:.0%}",
                    f"{row['speed_equipped']:.0%}",
                )
                search = f"{row['parts'].get('search', 0):.2f}"
                body.append([row["system"], keys, searched, *speeds, search, f"{row['operations']:.0f}"])
        tables.append(f"Batches of {batch:,} target token{'s' * (batch > 1)}:\n\n{table([head, *body])}")
    return tables


def table(rows: list[list[Any]]) -> str:
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


if __name__ == "__main__":
    main()
