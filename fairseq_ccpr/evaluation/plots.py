"""Pictures, as PNG files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.evaluation.accuracy.type_accuracy import TypeResult
from fairseq_ccpr.evaluation.speed.phrase_speed import SearchSpeed
from fairseq_ccpr.evaluation.speed.search_speed import SearchCost

COLOURS = matplotlib.colormaps["tab10"]
DPI = 130
STYLES = "-", "--", "-.", ":"
SENTENCES, LAYER = "sentences", "layer"  # fields of a `TypeResult`


def draw_grids(
    tokens: Mapping[TokenRetrievalSettings, float], phrases: Mapping[PhraseSettings, float], path: Path
) -> None:
    """Heat maps of a tuner's grids through their best points: lambda and k by T for each kind of lambda; then phrases."""
    kinds = sorted({settings.confidence for settings in tokens})
    height = len(kinds) + bool(phrases)
    figure = Figure(figsize=(11, 4 * height), layout="constrained")
    axes = figure.subplots(height, 2, squeeze=False)
    for row, kind in zip(axes, kinds):
        points = {settings: value for settings, value in tokens.items() if settings.confidence == kind}
        best = max(points, key=lambda settings: points[settings])
        label = "λ of λ*" if kind else "λ"
        fixed = {s: v for s, v in points.items() if s.k == best.k}
        other = {s: v for s, v in points.items() if s.lambda_ == best.lambda_}
        first = {(s.temperature, s.lambda_): v for s, v in fixed.items()}
        second = {(s.temperature, s.k): v for s, v in other.items()}
        _pair_of_maps(
            figure, row, (first, second), (label, "k"), ("T", "T"), tokens.values(),
            (f"{label} by T, k = {best.k}", f"k by T, {label} = {best.lambda_:g}"),
        )  # fmt: skip
    if phrases:
        top = max(phrases, key=lambda settings: phrases[settings])
        first = {
            (s.enter, s.lambda_): v
            for s, v in phrases.items()
            if replace(s, enter=top.enter, lambda_=top.lambda_) == top
        }
        second = {
            (s.temperature, s.k): v for s, v in phrases.items() if replace(top, temperature=s.temperature, k=s.k) == s
        }
        _pair_of_maps(
            figure, axes[-1], (first, second), ("λ of phrases", "k of phrases"), ("entering", "T"),
            phrases.values(),
            (f"phrases: λ by entering, k = {top.k}", f"phrases: k by T, entering = {top.enter:g}"),
        )  # fmt: skip
    figure.savefig(path, dpi=DPI, format="png")


Points = Mapping[Any, float]  # (across, up) -> value


def _pair_of_maps(
    figure: Figure, row: Sequence[Axes], points: tuple[Points, Points], labels: tuple[str, str],
    below: tuple[str, str], values: Collection[float], titles: tuple[str, str],
) -> None:  # fmt: skip
    low, high = np.quantile(list(values), [0.2, 1.0])
    for axes, of_axes, label, under, title in zip(row, points, labels, below, titles):
        image = _heat_map(axes, of_axes, label, low, high)
        axes.set(title=title, xlabel=under)
    figure.colorbar(image, ax=row[1], label="mean log p of the reference's tokens", extend="min")


def _heat_map(axes: Axes, values: Points, label: str, low: float, high: float) -> AxesImage:
    columns, rows = (sorted({point[i] for point in values}) for i in (0, 1))
    table = np.array([[values[column, row] for column in columns] for row in rows])
    image = axes.imshow(table, origin="lower", aspect="auto", cmap="viridis", vmin=low, vmax=high)
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    axes.set(ylabel=label)
    best = np.unravel_index(table.argmax(), table.shape)
    axes.plot(best[1], best[0], marker="*", color="red", markersize=14)
    return image


def draw_precision(curves: Mapping[str, Sequence[float]], path: Path, title: str, measure: str) -> None:
    """Lines over k = 1, 2, ... of each system's retrieval accuracy: figure 3 of the CLKNN paper."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, values) in enumerate(curves.items()):
        axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS(number))
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        ticks := [2**i for i in range(20) if 2**i <= max(map(len, curves.values()))], [str(t) for t in ticks]
    )
    axes.set(xlabel="k", ylabel=measure, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=DPI, format="png")


def draw_speed(searches: Sequence[SearchSpeed], path: Path, title: str) -> None:
    """Queries a second by phrases, a line an index; bars reach from the slowest search to the fastest."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(search.index for search in searches)):
        rows = [search for search in searches if search.index == name]
        speeds = np.array([row.queries_per_second for row in rows])
        around = [speeds - [row.slowest for row in rows], [row.fastest for row in rows] - speeds]
        sizes = [row.phrases for row in rows]
        axes.errorbar(sizes, speeds, around, marker="o", capsize=3, label=name, color=COLOURS(number % 10))
    axes.set(xscale="log", yscale="log", xlabel="phrases", ylabel="queries a second")
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=DPI, format="png")


def draw_f1(curves: Mapping[str, Mapping[float, float]], path: Path, title: str) -> None:
    """F1 by the share of sentences that pair with none, a line a system: figure 2 of the RFR paper."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(curves.items()):
        shares = [100 * share for share in points]
        axes.plot(shares, list(points.values()), marker="o", label=name, color=COLOURS(number % 10))
    axes.set(xlabel="non-pairing sentences, per cent", ylabel="F1", title=title, ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=DPI, format="png")


def draw_types(results: Sequence[TypeResult], path: Path) -> None:
    """acc@1 of both directions by number of example sentences, and by layer: figure 2 and table 4 of the XPR paper.

    A line is a system on a set of data; by sentences each has the layer, by layers the number of sentences, that is best.
    Of these two only those are drawn in which some system varies.
    """
    sets, systems = (list(dict.fromkeys(getattr(one, name) for one in results)) for name in ("data", "system"))
    drawn = [
        name for name in (SENTENCES, LAYER) if len({(one.system, getattr(one, name)) for one in results}) > len(systems)
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
    figure.savefig(path, dpi=DPI, format="png")


def draw_costs(searches: Sequence[SearchCost], path: Path, title: str) -> None:
    """Milliseconds of a search by keys, by queries and by neighbours, a colour an index, a style a store; the floor beneath.

    Where stores of several widths were searched, by width too, a line an index. What is not on an axis is as in the first
    search, but the keys, which are as many as there were at most.
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
    panels[0].set_ylabel("milliseconds a search; dotted: the floor of exact search")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=DPI, format="png")


def draw_clusters(panels: list[tuple[str, np.ndarray, list[str]]], columns: int, path: Path) -> None:
    """Points in the plane, coloured by token: figure 2 of the CLKNN paper.

    Args:
        panels: title, coordinates [n, 2] and the token of each point, row by row.
        columns: panels in a row.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3.8 * rows), layout="constrained")
    for axes, (title, points, tokens) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
        for number, token in enumerate(dict.fromkeys(tokens)):
            of_token = np.array([other == token for other in tokens])
            # The space keeps matplotlib from leaving out labels that begin with "_".
            axes.scatter(*points[of_token].T, s=14, color=COLOURS(number % 10), label=f" {token}")
        axes.set(title=title, xticks=[], yticks=[])
        axes.legend(fontsize=6, loc="best", handletextpad=0.1, borderpad=0.2)
    figure.savefig(path, dpi=DPI, format="png")
