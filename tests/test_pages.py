"""The pages are readable, say the same version, and each figure stands in one place."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fairseq_ccpr.version import __version__
from scripts import results
from tests.helpers import ROOT
from tests.prose import sentences, words

MEAN, MOST = 17, 35  # words of a sentence
BARE_DECIMAL = re.compile(r"(?<![\w.\])/*\\])\.\d")


def pages(*patterns: str) -> list[Path]:
    """The pages that git knows, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


GUIDES = [
    page for page in pages("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")
    if "docs/reference/" not in str(page)
]  # fmt: skip


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    lengths = {sentence: words(sentence) for sentence in sentences(page.read_text(encoding="utf-8"))}
    long = [sentence for sentence, length in lengths.items() if length > MOST]
    assert not long, f"more than {MOST} words: {long}"
    mean = sum(lengths.values()) / len(lengths)
    assert mean <= MEAN, f"{mean:.1f} words in a sentence"


@pytest.mark.parametrize("page", pages("*.md"), ids=name)
def test_decimals_have_a_leading_zero(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [text[max(0, match.start() - 20) : match.end() + 10] for match in BARE_DECIMAL.finditer(text)]
    assert not found


def test_pictures_are_there() -> None:
    for page in pages("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / picture).is_file(), f"{name(page)} shows {picture}"


def test_the_figures_as_data_are_those_of_the_pages() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (results.FOLDER / "data").glob("*.json")}
    assert results.files() == kept, "docs/results/data is out of date: run python scripts/results.py"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 10_000 and text.count(b"\n") <= 180


def test_pages_name_the_version() -> None:
    titles = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] == ("Unreleased" if __version__.endswith(".dev0") else __version__)
    released = next(title for title in titles if title != "Unreleased")
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for page in ("quickstart", "installation"):
        assert f"`fairseq-ccpr {__version__}`" in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


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
    return filled + [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
