"""Gather what gpu_check.sh measured, of one run alone, in one file and one page.

python scripts/recipes/gpu_section.py OUTPUT [COMMIT]

OUTPUT/gpu.json gets what was measured, which the tables of docs/speed.md's GPU section are made of, and OUTPUT/gpu.md all
tables with their settings. Figures of several commits or devices are refused, and of a commit that is not known, or changed;
COMMIT names that of a copy without git.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILES = ("search.json", "exact-*.json", "faiss.json")  # of the second one for each size
SAME = ("device", "commit", "torch", "fairseq-ccpr")


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__.strip())
    output = Path(sys.argv[1])
    paths = [path for files in FILES for path in sorted(output.glob(files))]
    found: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
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
    pages = [f"Of one run, {machine['date'][:10]}: {said}."]
    pages += [
        f"## {path.stem}\n\n{path.with_suffix('.md').read_text(encoding='utf-8').strip()}" for path in paths
    ]
    (output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (output / "gpu.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    print("\n\n".join(pages))


if __name__ == "__main__":
    main()
