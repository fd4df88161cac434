"""Draw what systems gain on a domain against what they cost another one, from the results of experiments.

python scripts/recipes/home_and_abroad.py HOME ABROAD OUTPUT.png RESULTS.json [RESULTS.json ...] [NAME=LABEL ...]

A point is a system NAME of the domain HOME and the system HOME-NAME of the domain ABROAD, each as BLEU over the model alone:
see scripts/experiments/trust.yaml and fine-tuning.yaml. `fairseq-ccpr experiment run` writes results.json. A LABEL stands in
the picture in place of the name.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.lab.plots import save

SIDES = {6: "left", -6: "right", 0: "center"}  # of a label, by how far right of its point it begins
# Where the label of a point may stand, in points from it: the nearer, the earlier.
PLACES = [(x, y, side) for y in (0, 9, -9, 18, -18) for x, side in SIDES.items() if x or y]


def main() -> None:
    if len(sys.argv) < 5:
        sys.exit(__doc__.strip())
    home, abroad, output, *rest = sys.argv[1:]
    files = [word for word in rest if word.endswith(".json")]
    labels = dict(word.split("=", 1) for word in rest if not word.endswith(".json"))
    points: dict[str, tuple[float, float]] = {}
    for file in files:
        domains = json.loads(Path(file).read_text(encoding="utf-8"))["domains"]
        if missing := {home, abroad} - domains.keys():
            sys.exit(
                f"{file} has no results of {' and '.join(sorted(missing))}: run that experiment with them"
            )
        gained, lost = (gains(domains[name]) for name in (home, abroad))
        for name, gain in gained.items():
            if f"{home}-{name}" in lost:
                points[name] = gain, lost[f"{home}-{name}"]
    if not points:
        sys.exit(f"no system NAME of {home} has its {home}-NAME of {abroad} in {', '.join(files)}")
    points = {labels.get(name, name): point for name, point in points.items()}
    draw(points, home, abroad, Path(output))
    rows = [[name, f"{gain:+.2f}", f"{loss:+.2f}"] for name, (gain, loss) in points.items()]
    print(markdown_table([["system", home, abroad], *rows]))


def draw(points: dict[str, tuple[float, float]], home: str, abroad: str, output: Path) -> None:
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    gained, lost = zip(*points.values())
    axes.plot(lost, gained, "o", markersize=4)
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.margins(0.15, 0.08)
    axes.grid(alpha=0.3)
    axes.set_xlabel(f"{abroad}, BLEU over the model alone")
    axes.set_ylabel(f"{home}, BLEU over the model alone")
    figure.canvas.draw()
    places = axes.transData.transform(list(zip(lost, gained)))
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for name, (gain, loss) in points.items():
        taken.append(write_label(axes, name, (loss, gain), taken))
    save(figure, output)


def write_label(axes: Axes, name: str, point: tuple[float, float], taken: list[Bbox]) -> Bbox:
    """Write a label where it covers least of what is there and is least cut off."""

    def covered(text: Annotation) -> int:
        box = text.get_window_extent()
        outside = area(box, box) - area(box, axes.get_window_extent())
        return round(outside + sum(area(box, other) for other in taken))

    texts = [
        axes.annotate(name, point, (x, y), textcoords="offset points", ha=side, va="center", fontsize=7)
        for x, y, side in PLACES
    ]
    best = min(texts, key=covered)
    for text in texts:
        if text is not best:
            text.remove()
    return best.get_window_extent()


def area(one: Bbox, other: Bbox) -> float:
    """Return the area that two boxes share, in square pixels."""
    box = Bbox.intersection(one, other)
    return box.width * box.height if box is not None else 0.0


def gains(domain: dict[str, Any]) -> dict[str, float]:
    systems = domain["systems"]
    base = systems[domain["base"]]["scores"]["BLEU"]
    return {name: system["scores"]["BLEU"] - base for name, system in systems.items()}


if __name__ == "__main__":
    main()
