"""Heat maps of a tuner's grids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.evaluation.figures import save

Points = Mapping[Any, float]  # (across, up) -> value


def draw_grids(
    tokens: Mapping[TokenRetrievalSettings, float], phrases: Mapping[PhraseSettings, float], path: Path
) -> None:
    """Draw a tuner's grids through their best points: lambda and k by T for each kind of lambda; phrases by lambda."""
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
        weights = sorted(phrases, key=lambda settings: settings.lambda_)
        axes[-1, 0].plot([one.lambda_ for one in weights], [phrases[one] for one in weights], marker="o")
        axes[-1, 0].set(title="phrases", xlabel="λ of phrases", ylabel="mean log p of the reference's tokens")
        axes[-1, 1].set_visible(False)
    save(figure, path)


def _pair_of_maps(
    figure: Figure, row: Sequence[Axes], points: tuple[Points, Points], labels: tuple[str, str],
    below: tuple[str, str], values: Collection[float], titles: tuple[str, str],
) -> None:  # fmt: skip
    low, high = np.quantile(list(values), [0.2, 1.0])
    for axes, values_at, label, under, title in zip(row, points, labels, below, titles):
        image = _heat_map(axes, values_at, label, low, high)
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
