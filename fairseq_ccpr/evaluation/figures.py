"""Colours and line styles of all pictures, and how pictures become PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
