"""Pictures of retrieval accuracy: figures of the CLKNN, XPR and RFR papers, for any datastore, encoder or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fairseq_ccpr.evaluation.page import COLOURS, STYLES, lines, save
from fairseq_ccpr.lab.accuracy.type_accuracy import TypeResult

SENTENCES, LAYER = "sentences", "layer"  # fields of a `TypeResult`


def draw_precision(curves: Mapping[str, Sequence[float]], path: Path, title: str, measure: str) -> None:
    """Draw lines over k = 1, 2, ... of each system's retrieval accuracy: figure 3 of the CLKNN paper."""
    with lines(path) as axes:
        for number, (name, values) in enumerate(curves.items()):
            axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS(number))
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks := [2**i for i in range(20) if 2**i <= max(map(len, curves.values()))], [str(t) for t in ticks]
        )
        axes.set(xlabel="k", ylabel=measure, title=title)


def draw_clusters(panels: list[tuple[str, np.ndarray, list[str]]], columns: int, path: Path) -> None:
    """Draw points in the plane, coloured by token: figure 2 of the CLKNN paper.

    Args:
        panels: title, coordinates [n, 2] and the token of each point, row by row.
        columns: panels in a row.
    """
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
    save(figure, path)


def draw_f1(curves: Mapping[str, Mapping[float, float]], path: Path, title: str) -> None:
    """Draw F1 by the fraction of sentences without a partner, a line per system: figure 2 of the RFR paper."""
    with lines(path) as axes:
        for number, (name, points) in enumerate(curves.items()):
            shares = [100 * share for share in points]
            axes.plot(shares, list(points.values()), marker="o", label=name, color=COLOURS(number % 10))
        axes.set(xlabel="non-pairing sentences, per cent", ylabel="F1", title=title, ylim=(0, 100))
