"""The tables of the pages in docs/results/ as JSON.

The pages are the source: each figure stands once, in the table that people read. scripts/docs.py writes the JSON among the
pages of the site, in docs/results/data/.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"


def files() -> dict[str, str]:
    pages = {path.stem: read(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.md"))}
    return {
        f"{name}.json": json.dumps(page, ensure_ascii=False, indent=1) + "\n" for name, page in pages.items()
    }


def read(page: str) -> dict[str, Any]:
    r"""Return a page's title and its tables.

    A cell left empty in a table's first column repeats the cell above it, as in the page; bold type is left out.

    >>> read("# T\n\n## S\n\n| a | b |\n|---|---|\n| x | **1** |\n| | 2 |\n\n```text\n| s | t |\n```\n")["tables"]
    [{'section': 'S', 'columns': ['a', 'b'], 'rows': [['x', '1'], ['', '2']]}]
    """
    found: dict[str, Any] = {"title": "", "tables": []}
    section, fenced = "", False
    table: dict[str, Any] | None = None
    for line in page.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            continue
        elif line.startswith("# "):
            found["title"] = line[2:]
        elif line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|") and table is None:
            table = {"section": section, "columns": _cells(line), "rows": []}
            found["tables"].append(table)
        elif line.startswith("|") and table is not None and not line.startswith("|---"):
            table["rows"].append(_cells(line))
        elif not line.startswith("|"):
            table = None
    return found


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [cell.replace("**", "").replace("\\|", "|").replace("\\*", "*").strip() for cell in cells]
