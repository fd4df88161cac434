"""HTML pages that are complete in one file, and the style of all pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("page.css")  # what all pages share


def fill(template: Path, parts: dict[str, str]) -> str:
    """Fill a template: replace each mark by its value."""
    marks = re.compile("|".join(map(re.escape, parts)))
    return marks.sub(lambda mark: parts[mark[0]], template.read_text(encoding="utf-8"))


COLOURS = matplotlib.colormaps["tab10"]
STYLES = "-", "--", "-.", ":"


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=130, format="png")


@contextmanager
def lines(path: Path) -> Iterator[Axes]:
    """Axes to draw lines in; afterwards they get a grid and a legend, and are written as PNG."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    save(figure, path)
