"""Draw how often translations are right by their confidence, and by their mean probability: a panel a text.

python scripts/recipes/reliability.py CONFIDENCE.json OUTPUT.png [sentences|words]

The file has, by text in `texts`, what `fairseq-ccpr compare` writes about confidence into comparison.json. On the diagonal
confidence holds what it claims; the area of a point is proportional to the number in its bin.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_ccpr.lab.plots import COLOURS, save

AREA = 900  # square points, of a bin that has all
LOOKS = {"bins": ("confidence", "o"), "probability_bins": ("mean probability", "s")}


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__.strip())
    source, output, *rest = sys.argv[1:]
    kind = rest[0] if rest else "sentences"
    texts = json.loads(Path(source).read_text(encoding="utf-8"))["texts"]
    if without := [name for name, found in texts.items() if not LOOKS.keys() <= found.get(kind, {}).keys()]:
        sys.exit(f"{source} has no bins of {kind} of {', '.join(without)}: run compare on it again")
    figure = Figure(figsize=(3.2 * len(texts) + 0.4, 3.9), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(texts), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, texts.items()):
        axes.plot((0, 1), (0, 1), color="0.6", linewidth=0.8)
        for number, (bins, (label, marker)) in enumerate(LOOKS.items()):
            claimed, right, sizes = zip(
                *((one["claimed"], one["right"], one["number"]) for one in found[kind][bins])
            )
            colour = COLOURS(number)
            axes.plot(claimed, right, color=colour, marker=marker, markersize=3, label=label)
            areas = [AREA * size / sum(sizes) for size in sizes]
            axes.scatter(claimed, right, areas, color=colour, marker=marker, alpha=0.35, linewidths=0)
        axes.set(title=name, xlabel="claimed", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"share of {kind} that are right")
    panels[0].legend(fontsize=8, loc="upper left")
    save(figure, Path(output))


if __name__ == "__main__":
    main()
