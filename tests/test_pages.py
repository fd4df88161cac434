"""The pages are few, say the same version, and show and name files that are there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fairseq_ccpr.version import __version__
from tests.helpers import ROOT

BARE_DECIMAL = re.compile(r"(?<![\w.\])/*\\])\.\d")
CODE = re.compile(r"^( *)```.*?^\1```[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")  # or a picture


def pages(*patterns: str) -> list[Path]:
    """The pages that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", pages("*.md"), ids=name)
def test_decimals_have_a_leading_zero(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [text[max(0, match.start() - 20) : match.end() + 10] for match in BARE_DECIMAL.finditer(text)]
    assert not found


def test_links_and_pictures_are_files() -> None:
    """Their anchors are checked when the site is built; no page names one that is only generated there."""
    missing = [
        f"{name(page)}: {link}"
        for page in pages("*.md")
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if not re.match(r"[a-z]+:|#", link) and not (page.parent / link.partition("#")[0]).exists()
    ]
    assert not missing


def test_the_documentation_is_short() -> None:
    lengths = {name(page): page.read_bytes().count(b"\n") for page in pages("docs/*.md")}
    assert len(lengths) <= 20 and sum(lengths.values()) <= 3000, lengths


@pytest.mark.parametrize("page", pages("*.md"), ids=name)
def test_rows_are_as_wide_as_their_tables(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 10_000 and text.count(b"\n") <= 150


def test_pages_name_the_version() -> None:
    titles = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == ("Unreleased" if __version__.endswith(".dev0") else __version__)
    released = next(title for title in titles if title != "Unreleased")
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"`fairseq-ccpr {__version__}`" in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")


def test_troubleshooting_quotes_what_the_code_prints() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    printed = [text for path in pages("fairseq_ccpr/*.py") for text in strings(path)]
    assert len(quotes) >= 15
    assert [quote for quote in quotes if not any(quote in text for text in printed)] == []


def strings(path: Path) -> list[str]:
    """The strings of a module; an ellipsis stands for what an f-string fills in."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    filled = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return filled + [
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
