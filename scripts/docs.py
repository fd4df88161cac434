"""Gathers the pages of the documentation in build/pages, in the folders they have in the checkout, so that their links hold.

    python scripts/docs.py && zensical build --strict

then makes the site, build/site, and refuses a link or an anchor that leads nowhere. Pages that are generated, the reference
of commands and Python, are in build/pages alone; the files that tables are made from are copied. llms.txt, the list of pages
for language models, is made of the site's navigation and of what each page says first; it is kept in the checkout as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
import reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
FILES = ("*.md", "*.png", "*.svg", "CITATION.cff", "docs/papers.bib", "docs/site.css")
# Not outputs/, which have texts of others. In :(glob), unlike in the others, * does not cross a /.
RESULTS = (":(glob)benchmarks/*.json", ":(glob)benchmarks/results/*.json", "benchmarks/judged.tsv")


def llms() -> str:
    """Write the pages of the site as a list, by https://llmstxt.org."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    for entry in site["nav"]:
        ((title, pages),) = entry.items()
        section = pages if isinstance(pages, list) else [entry]
        lines += ["", f"## {title}", "", *(_line(*one) for page in section for one in page.items())]
    return "\n".join(lines) + "\n"


def _line(title: str, page: str) -> str:
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.exists() else reference.pages()[path.name]
    return f"- [{title}]({page}): {next(_sentences(text), 'Tables of figures.')}"


def _sentences(page: str) -> Iterator[str]:
    """Yield the prose of a page, without links and emphasis."""
    page = re.sub(r"^```.*?^```|^<.*?>$", "", page, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\n+", page):
        if paragraph.strip() and paragraph.strip()[0] not in "#|!-<`":
            text = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", paragraph)
            yield re.sub(r"\s+", " ", re.split(r"(?<=[.:?])\s", text.strip())[0]).rstrip(":")


def gather(folder: Path = PAGES) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FILES, *RESULTS]
    for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists():  # else it was removed, and git was not told yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    links = re.sub(r"(README)?\.md\)", lambda end: f"{'index' if end[1] else ''}.html)", llms())
    (folder / "llms.txt").write_text(links, encoding="utf-8")
    (folder / "docs/reference").mkdir(parents=True)
    for name, text in reference.pages().items():
        (folder / "docs/reference" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms(), encoding="utf-8")
    gather()
