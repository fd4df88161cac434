"""HTML pages that need nothing else: no network, no other file."""

from __future__ import annotations

import re
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")  # what all pages share


def fill(template: Path, parts: dict[str, str]) -> str:
    """A template with something in the place of each of its marks."""
    marks = re.compile("|".join(map(re.escape, parts)))
    return marks.sub(lambda mark: parts[mark[0]], template.read_text(encoding="utf-8"))
