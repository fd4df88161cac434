"""Gather what gpu_check.sh measured, of one run alone, in one file and one page.

python scripts/recipes/gpu_section.py OUTPUT [COMMIT]

OUTPUT/gpu.json gets what was measured, by the name of its part; benchmarks/gpu.json has that form (its commit was not kept),
and the tables of docs/speed.md's GPU section are made of it. OUTPUT/gpu.md gets all tables with their settings. Figures of
several commits, machines or versions are refused, and of a commit that is not known, or changed; COMMIT names that of a copy
without git.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILES = ("search.json", "exact-*.json", "faiss.json")  # of the second one for each size


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__.strip())
    output = Path(sys.argv[1])
    paths = [path for files in FILES for path in sorted(output.glob(files))]
    found: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    if not found:
        sys.exit(f"{output} has no figures: run gpu_check.sh, which measures them")
    for one in found.values():
        one["commit"] = one["commit"] or "".join(sys.argv[2:])
    runs = {(one["commit"], one["machine"], *one["versions"].items()) for one in found.values()}
    if len(runs) != 1:
        sys.exit(f"{output} has figures of {len(runs)} commits, machines or versions: empty it, run again")
    commit = next(iter(found.values()))["commit"]
    if not commit or commit.endswith("-dirty"):
        sys.exit(
            f"{output} has figures of the commit '{commit}', which nobody can look up: "
            "commit, run again, and where there is no git give COMMIT"
        )
    pages = [
        f"## {path.stem}\n\n{path.with_suffix('.md').read_text(encoding='utf-8').strip()}" for path in paths
    ]
    page = "\n\n".join([f"Of one run of gpu_check.sh, commit {commit}.", *pages])
    (output / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (output / "gpu.md").write_text(f"{page}\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
