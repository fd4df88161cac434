"""Draw how often translations and their words are right by their confidence, and by the model's own probability.

python scripts/recipes/reliability.py CONFIDENCE.json PICTURE.png [NAME=FOLDER ...]

FOLDER is the --results-path of `fairseq-ccpr compare`, with a datastore that was tuned: what its comparison.json says about
confidence is first written into CONFIDENCE.json, by NAME. Without any, that file is drawn as it is. On the diagonal a number
holds what it claims; a point is a tenth of what can be claimed, and bars are the share of the claims in each.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_ccpr.evaluation.confidence import BINS
from fairseq_ccpr.lab.plots import COLOURS, save
from fairseq_ccpr.storage.files import write_json

KINDS = "sentences", "words"
CLAIMS = {"bins": ("confidence", "o-"), "probability_bins": ("probability", "s--")}


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[3:]):
        sys.exit(__doc__.strip())
    file, picture = map(Path, sys.argv[1:3])
    if folders := dict(word.split("=", 1) for word in sys.argv[3:]):
        texts = {name: compared(Path(folder, "comparison.json")) for name, folder in folders.items()}
        write_json(file, {"texts": texts})
    draw(json.loads(file.read_text(encoding="utf-8"))["texts"], picture)


def compared(file: Path) -> dict[str, Any]:
    """Read what `compare` found with a datastore: its scores, and how far its confidence holds."""
    found = json.loads(file.read_text(encoding="utf-8"))
    row = found["rows"][-1]
    if "confidence" not in row:
        sys.exit(f"{file} has no confidence: tune without --output and compare again, with that datastore")
    scores = {name: row[name] for name in ("bleu", "chrf", "bleu_signature", "chrf_signature")}
    of_run = {name: value for name, value in found.items() if name != "rows"}
    return {**of_run, **scores, **row["confidence"]}


def draw(texts: dict[str, Any], picture: Path) -> None:
    figure = Figure(figsize=(3.1 * len(texts) + 0.4, 8), layout="constrained", facecolor="white")
    panels = figure.subplots(
        2 * len(KINDS),
        len(texts),
        sharex=True,
        sharey="row",
        squeeze=False,
        height_ratios=(3, 1) * len(KINDS),
    )
    for column, (name, found) in zip(panels.T, texts.items()):
        column[0].set_title(name)
        column[-1].set_xlabel("claimed")
        for kind, curves, bars in zip(KINDS, column[::2], column[1::2]):
            draw_kind(found[kind], curves, bars)
    for number, kind in enumerate(KINDS):
        panels[2 * number, 0].set_ylabel(f"share of {kind} that are right")
        panels[2 * number + 1, 0].set_ylabel("share of claims")
    panels[0, 0].legend(fontsize=8, loc="upper left")
    save(figure, picture)


def draw_kind(found: dict[str, Any], curves: Axes, bars: Axes) -> None:
    """Draw the bins of sentences or words: claim against truth, and below it how many claim so."""
    curves.plot((0, 1), (0, 1), color="0.6", linewidth=0.8)
    for number, (bins, (label, style)) in enumerate(CLAIMS.items()):
        claimed, right, sizes = ([one[key] for one in found[bins]] for key in ("claimed", "right", "number"))
        curves.plot(claimed, right, style, color=COLOURS(number), markersize=4, label=label, clip_on=False)
        width = 0.4 / BINS
        places = [(min(int(one * BINS), BINS - 1) + 0.1) / BINS + number * width for one in claimed]
        bars.bar(places, [size / sum(sizes) for size in sizes], width, align="edge", color=COLOURS(number))
    curves.set(xlim=(0, 1), ylim=(0, 1))
    for axes in (curves, bars):
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
