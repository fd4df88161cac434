"""Pictures of speed by the size of a datastore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fairseq_ccpr.evaluation.page import COLOURS, STYLES, lines, save
from fairseq_ccpr.lab.speed.phrase_speed import SearchSpeed
from fairseq_ccpr.lab.speed.search_speed import SearchCost


def draw_speed(searches: Sequence[SearchSpeed], path: Path, title: str) -> None:
    """Draw queries per second by phrases, a line per index; bars reach from the slowest search to the fastest."""
    with lines(path) as axes:
        for number, name in enumerate(dict.fromkeys(search.index for search in searches)):
            rows = [search for search in searches if search.index == name]
            speeds = np.array([row.queries_per_second for row in rows])
            around = [speeds - [row.slowest for row in rows], [row.fastest for row in rows] - speeds]
            sizes = [row.phrases for row in rows]
            axes.errorbar(sizes, speeds, around, marker="o", capsize=3, label=name, color=COLOURS(number % 10))
        axes.set(xscale="log", yscale="log", xlabel="phrases", ylabel="queries per second")
        axes.set_title(title, fontsize=8)


def draw_costs(searches: Sequence[SearchCost], path: Path, title: str) -> None:
    """Draw milliseconds of a search by keys, queries and neighbours: colours are indexes, styles datastores, dots the floor.

    If datastores of several widths were searched, draw by width too, a line per index. What is not on an axis is as in the
    first search, but the keys are as many as there were at most.
    """
    stores, indexes = (list(dict.fromkeys(getattr(search, name) for search in searches)) for name in ("store", "index"))
    first = searches[0]
    fixed = {"keys": max(search.keys for search in searches), "queries": first.queries, "k": first.k}
    labels = {"keys": "keys N", "queries": "queries H", "k": "neighbours k"}
    if len({search.dimension for search in searches}) > 1:
        labels["dimension"] = "width d"
    figure = Figure(figsize=(4.4 * len(labels), 4.4), layout="constrained")
    panels = figure.subplots(1, len(labels), sharey=True)
    for axes, (across, label) in zip(panels, labels.items()):
        others = {name: value for name, value in fixed.items() if name != across}
        rows = [search for search in searches if all(getattr(search, name) == other for name, other in others.items())]
        lines: dict[str, list[SearchCost]] = {}
        for row in rows:
            name = row.index if across == "dimension" else f"{row.store}, d = {row.dimension}: {row.index}"
            lines.setdefault(name, []).append(row)
        for name, points in lines.items():
            points.sort(key=lambda row: getattr(row, across))
            look: dict[str, Any] = {"color": COLOURS(indexes.index(points[0].index) % 10)}
            style = "-" if across == "dimension" else STYLES[stores.index(points[0].store) % len(STYLES)]
            places, costs = [getattr(row, across) for row in points], np.array([row.milliseconds for row in points])
            around = [costs - [row.fastest for row in points], [row.slowest for row in points] - costs]
            axes.errorbar(places, costs, around, marker="o", capsize=3, label=name, linestyle=style, **look)
            axes.plot(places, [row.floor for row in points], ":", alpha=0.6, color="black")
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.set_title(", ".join(f"{name} = {value:,}" for name, value in others.items()), fontsize=8)
        axes.grid(alpha=0.3, which="both")
        if across != "keys":
            values = sorted({getattr(row, across) for row in rows})
            axes.set_xticks([], minor=True)
            axes.set_xticks(values, map(str, values))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    panels[0].set_ylabel("milliseconds per search; dotted: the floor of exact search")
    figure.suptitle(title, fontsize=9)
    save(figure, path)
