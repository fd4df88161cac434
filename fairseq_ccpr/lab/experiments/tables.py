"""Results of experiments as rows of text, which pages and Markdown show alike."""

from __future__ import annotations

import shlex
from typing import Any

METRICS = ("BLEU", "chrF", "TER")
HEAD = ["system", "BLEU", "difference", "p", "chrF", "p", "TER", "p", "speed", "datastores"]


def rows_of(domain: dict[str, Any]) -> list[list[str]]:
    """Tabulate systems under `HEAD`: differences in BLEU and p are against the base model."""
    rows = []
    for name, system in domain["systems"].items():
        against = system["against"].get(domain["base"])
        row = [name]
        for metric in METRICS:
            row.append(f"{system['scores'][metric]:.2f}")
            row += [] if metric != "BLEU" else [difference(against[metric]) if against else ""]
            row.append(f"{against[metric]['p']:.3f}" if against else "")
        rows.append([*row, f"{system['speed']:.0%}", "; ".join(stores_of(system))])
    return rows


def rows_against_others(domain: dict[str, Any]) -> list[list[str]]:
    """Tabulate comparisons with other systems than the base model, below a head."""
    rows = [["system", "against", *(word for metric in METRICS for word in (f"{metric} difference", "p"))]]
    for name, system in domain["systems"].items():
        for other, metrics in system["against"].items():
            if other != domain["base"]:
                cells = [(difference(metrics[m]), f"{metrics[m]['p']:.3f}") for m in METRICS]
                rows.append([name, other, *(word for cell in cells for word in cell)])
    return rows


def difference(compared: dict[str, Any]) -> str:
    """Write a difference and the interval that holds 95% of its resamples.

    >>> difference({"difference": 1.5, "interval": [0.25, 2.5]})
    '+1.50 [+0.25, +2.50]'
    """
    low, high = compared["interval"]
    return f"{compared['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"


def stores_of(system: dict[str, Any]) -> list[str]:
    """Describe the datastores of a system, in brief."""
    return [
        f"{part} {store['entries']:,} ({store['bytes'] / 1e6:,.1f} MB)" if store else f"{part} (deleted)"
        for part, store in system["stores"].items()
    ]


def check_of_base(domain: dict[str, Any]) -> tuple[str, bool] | None:
    """Compare the base model's BLEU with the published one, if any: a sentence, and whether it is within the tolerance."""
    published = domain["published"]
    if published is None:
        return None
    bleu = domain["systems"][domain["base"]]["scores"]["BLEU"]
    off = round(bleu - published["bleu"], 2)
    where = f" ({published['in']})" if published["in"] else ""
    sentence = f"The base model has {bleu:.2f} BLEU; published are {published['bleu']:.2f}{where}: {off:+.2f}, "
    if abs(off) <= published["tolerance"]:
        return f"{sentence}within the tolerance of {published['tolerance']:g}.", True
    return (
        f"{sentence}more than the tolerance of {published['tolerance']:g}. Model, data or preprocessing are not those of the "
        "publication, so no number here compares with published ones.",
        False,
    )


def settings_of(system: dict[str, Any], stages: dict[str, Any]) -> list[tuple[str, str]]:
    """List the settings that a system was run with, by name."""
    settings = []
    if system["tuned"]:
        settings.append((f"tuned on {system['tuned']['on']}", system["tuned"]["options"]))
    if system["retrieval_signature"]:
        settings.append(("retrieval", system["retrieval_signature"]))
    for part, store in system["stores"].items():
        if store:
            prints = ", ".join(f"{name} {value[:12]}" for name, value in store["fingerprints"].items())
            settings.append((part, f"{store['index']}, width {store['dimension']}, share {store['share']:g}; {prints}"))
    return settings + [(name, shlex.join(stages[name]["command"])) for name in system["stages"] if name in stages]


def circumstances(results: dict[str, Any]) -> str:
    """Describe when, on what machine, and with which versions the experiment ran."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return " · ".join([*filter(None, [results["date"]]), results["machine"], versions])
