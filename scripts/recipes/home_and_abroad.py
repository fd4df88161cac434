"""Draw what systems gain on a domain against what they cost another one, from the results of experiments.

python scripts/recipes/home_and_abroad.py HOME ABROAD OUTPUT.png RESULTS.json [RESULTS.json ...]

A point is a system NAME of the domain HOME and the system HOME-NAME of the domain ABROAD, each as BLEU over the model alone:
see scripts/experiments/trust.yaml and fine-tuning.yaml. `fairseq-ccpr experiment run` writes results.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.figures import COLOURS, lines


def main() -> None:
    if len(sys.argv) < 5:
        sys.exit(__doc__.strip())
    home, abroad, output, *files = sys.argv[1:]
    points: dict[str, tuple[float, float]] = {}
    for file in files:
        domains = json.loads(Path(file).read_text(encoding="utf-8"))["domains"]
        if missing := {home, abroad} - domains.keys():
            sys.exit(f"{file} has no results of {' and '.join(sorted(missing))}: run that experiment with them")
        gained, lost = (gains(domains[name]) for name in (home, abroad))
        for name, gain in gained.items():
            if f"{home}-{name}" in lost:
                points[name] = gain, lost[f"{home}-{name}"]
    if not points:
        sys.exit(f"no system NAME of {home} has its {home}-NAME of {abroad} in {', '.join(files)}")
    with lines(Path(output)) as axes:
        for number, (name, (gain, loss)) in enumerate(points.items()):
            axes.plot([loss], [gain], "os^v"[number // 10 % 4], color=COLOURS(number % 10), label=name)
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set_xlabel(f"{abroad}, BLEU over the model alone")
        axes.set_ylabel(f"{home}, BLEU over the model alone")
    rows = [[name, f"{gain:+.2f}", f"{loss:+.2f}"] for name, (gain, loss) in points.items()]
    print(markdown_table([["system", home, abroad], *rows]))


def gains(domain: dict[str, Any]) -> dict[str, float]:
    """Return the BLEU of each system over the base model."""
    systems = domain["systems"]
    base = systems[domain["base"]]["scores"]["BLEU"]
    return {name: system["scores"]["BLEU"] - base for name, system in systems.items()}


if __name__ == "__main__":
    main()
