"""Pictures of accuracy and speed: figures of the CLKNN, XPR and RFR papers, for any datastore, encoder or text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_ccpr.lab.accuracy.type_accuracy import TypeResult
from fairseq_ccpr.lab.speed.phrase_speed import SearchSpeed
from fairseq_ccpr.lab.speed.search_speed import SearchCost

SENTENCES, LAYER = "sentences", "layer"  # fields of a `TypeResult`
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


def draw_precision(curves: Mapping[str, Sequence[float]], path: Path, title: str, measure: str) -> None:
    """Draw lines over k = 1, 2, ... of each system's retrieval accuracy: figure 3 of the CLKNN paper."""
    with lines(path) as axes:
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS(number))
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks := [2**i for i in range(20) if 2**i <= max(map(len, curves.values()))],
            [str(t) for t in ticks],
        )
        axes.set(xlabel="k", ylabel=measure, title=title)


def draw_clusters(panels: list[tuple[str, np.ndarray, list[str]]], columns: int, path: Path) -> None:
    """Draw points in the plane, coloured by token: figure 2 of the CLKNN paper; panels as of `cluster_points`."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3.8 * rows), layout="constrained")
    for axes, (title, points, tokens) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
        for number, token in enumerate(dict.fromkeys(tokens)):
            same = np.array([other == token for other in tokens])
            # The space keeps matplotlib from leaving out labels that begin with "_".
            axes.scatter(*points[same].T, s=14, color=COLOURS(number % 10), label=f" {token}")
        axes.set(title=title, xticks=[], yticks=[])
        axes.legend(fontsize=6, loc="best", handletextpad=0.1, borderpad=0.2)
    save(figure, path)


def draw_types(results: Sequence[TypeResult], path: Path) -> None:
    """Draw acc@1 of both directions by number of example sentences, and by layer: figure 2 and table 4 of the XPR paper.

    A line is a system on a set of data; by sentences each has the layer, by layers the number of sentences,
    that is best. Of these two only those are drawn in which some system varies.
    """
    sets, systems = (
        list(dict.fromkeys(getattr(one, name) for one in results)) for name in ("data", "system")
    )
    drawn = [
        name
        for name in (SENTENCES, LAYER)
        if len({(one.system, getattr(one, name)) for one in results}) > len(systems)
    ]
    drawn = drawn or [SENTENCES]
    figure = Figure(figsize=(6 * len(drawn), 4.2), layout="constrained")
    panels = dict(zip(drawn, figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]))
    for data, system in dict.fromkeys((one.data, one.system) for one in results):
        rows = [one for one in results if (one.data, one.system) == (data, system)]
        best = max(rows, key=lambda one: one.mean)
        look = {
            "marker": "o", "label": f"{data}, {system}", "color": COLOURS(systems.index(system) % 10),
            "linestyle": STYLES[sets.index(data) % len(STYLES)],
        }  # fmt: skip
        for name, axes in panels.items():
            same = LAYER if name == SENTENCES else SENTENCES
            line = [one for one in rows if getattr(one, same) == getattr(best, same)]
            axes.plot([getattr(one, name) for one in line], [one.mean for one in line], **look)
    if SENTENCES in panels:
        counts = sorted({one.sentences for one in results})
        panels[SENTENCES].set_xscale("symlog", base=2, linthresh=1)
        panels[SENTENCES].set_xticks(counts, [str(count) for count in counts])
        panels[SENTENCES].set(xlabel="example sentences")
    if LAYER in panels:
        panels[LAYER].set(xlabel="layer")
    for axes in panels.values():
        axes.grid(alpha=0.3)
    panels[drawn[0]].set(ylabel="acc@1, per cent")
    figure.legend(*panels[drawn[0]].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save(figure, path)


def draw_f1(curves: Mapping[str, Mapping[float, float]], path: Path, title: str) -> None:
    """Draw F1 by the fraction of sentences without a partner, a line per system: figure 2 of the RFR paper."""
    with lines(path) as axes:
        for number, (name, points) in enumerate(curves.items()):
            shares = [100 * share for share in points]
            axes.plot(shares, list(points.values()), marker="o", label=name, color=COLOURS(number % 10))
        axes.set(xlabel="non-pairing sentences, per cent", ylabel="F1", title=title, ylim=(0, 100))


def draw_speed(searches: Sequence[SearchSpeed], path: Path, title: str) -> None:
    """Draw queries per second by phrases, a line per index; bars reach from the slowest search to the fastest."""
    with lines(path) as axes:
        for number, name in enumerate(dict.fromkeys(search.index for search in searches)):
            rows = [search for search in searches if search.index == name]
            speeds = np.array([row.queries_per_second for row in rows])
            around = [speeds - [row.slowest for row in rows], [row.fastest for row in rows] - speeds]
            sizes = [row.phrases for row in rows]
            axes.errorbar(
                sizes, speeds, around, marker="o", capsize=3, label=name, color=COLOURS(number % 10)
            )
        axes.set(xscale="log", yscale="log", xlabel="phrases", ylabel="queries per second")
        axes.set_title(title, fontsize=8)


def draw_costs(searches: Sequence[SearchCost], path: Path, title: str) -> None:
    """Draw milliseconds of a search by keys, queries and neighbours: colours are indexes, styles datastores, dots the floor.

    Datastores of several widths are drawn by width too, a line per index, and nothing by what has one value everywhere.
    What is not on an axis is as in the first search, but the keys are as many as there were at most.
    """
    stores, indexes = (
        list(dict.fromkeys(getattr(search, name) for search in searches)) for name in ("store", "index")
    )
    first = searches[0]
    fixed = {"keys": max(search.keys for search in searches), "queries": first.queries, "k": first.k}
    labels = {"keys": "keys N", "queries": "queries H", "k": "neighbours k", "dimension": "width d"}
    varied = [name for name in labels if len({getattr(search, name) for search in searches}) > 1]
    labels = {name: labels[name] for name in varied or ["keys"]}
    figure = Figure(figsize=(4.4 * len(labels), 4.4), layout="constrained")
    panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
    for axes, (across, label) in zip(panels, labels.items()):
        others = {name: value for name, value in fixed.items() if name != across}
        rows = [
            search
            for search in searches
            if all(getattr(search, name) == other for name, other in others.items())
        ]
        curves: dict[str, list[SearchCost]] = {}
        for row in rows:
            name = row.index if across == "dimension" else f"{row.store}, d = {row.dimension}: {row.index}"
            curves.setdefault(name, []).append(row)
        for name, points in curves.items():
            points.sort(key=lambda row: getattr(row, across))
            look: dict[str, Any] = {"color": COLOURS(indexes.index(points[0].index) % 10)}
            style = "-" if across == "dimension" else STYLES[stores.index(points[0].store) % len(STYLES)]
            places, costs = (
                [getattr(row, across) for row in points],
                np.array([row.milliseconds for row in points]),
            )
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
