"""HTML pages that need nothing else: no network, no other file."""

from __future__ import annotations

import re
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")  # what all pages share


def fill(template: Path, parts: dict[str, str]) -> str:
    """A template with something in the place of each of its marks."""
    marks = re.compile("|".join(map(re.escape, parts)))
    return marks.sub(lambda mark: parts[mark[0]], template.read_text(encoding="utf-8"))


def write(text: str, path: Path) -> None:
    """Write a file under its final name only when it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
