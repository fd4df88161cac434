"""Gathers the pages of the documentation in build/pages, in the folders they have in the checkout, so that their links hold.

    python scripts/docs.py && zensical build --strict

then makes the site, build/site, and refuses a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
FILES = ("*.md", "*.png", "CITATION.cff", "docs/site.css", "docs/results/data/*.json", "benchmarks/*.json")


def gather() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES]
    for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
        source, target = ROOT / name, PAGES / name
        if source.exists():  # else it was removed, and git was not told yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


if __name__ == "__main__":
    gather()
