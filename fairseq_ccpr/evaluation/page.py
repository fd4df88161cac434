"""HTML pages that are complete in one file."""

from __future__ import annotations

import re
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")  # what all pages share


def fill(template: Path, parts: dict[str, str]) -> str:
    """Fill a template: replace each mark by its value."""
    marks = re.compile("|".join(map(re.escape, parts)))
    return marks.sub(lambda mark: parts[mark[0]], template.read_text(encoding="utf-8"))
