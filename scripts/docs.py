"""Gathers the pages of the documentation in build/pages, in the folders they have in the checkout, so that their links hold.

    python scripts/docs.py && zensical build --strict

then makes the site, build/site, and refuses a link or an anchor that leads nowhere. Pages that are generated, the reference
of commands and Python and the results as data, are in build/pages alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import reference
import results

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
FILES = ("*.md", "*.png", "*.svg", "CITATION.cff", "docs/papers.bib", "docs/site.css", "benchmarks/*.[jt]s*")


def gather(folder: Path = PAGES) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES]
    for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists():  # else it was removed, and git was not told yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    write(folder / "docs/reference", reference.pages())
    write(folder / "docs/results/data", results.files())


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    gather()
