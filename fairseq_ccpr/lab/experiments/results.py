"""Results of an experiment: every number with all that it depends on, as JSON and as rows of tables."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.planning import machine_name, versions
from fairseq_ccpr.evaluation.test_set import BASE, RETRIEVAL
from fairseq_ccpr.lab.experiments.config import ExperimentConfig
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.experiments.stages import Runner, Stage, with_needs
from fairseq_ccpr.storage.files import write_json

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


RESULTS = "results.json"


def choose(config: ExperimentConfig, plan: Plan, runner: Runner, only: list[str]) -> dict[str, list[str]]:
    """Choose the systems whose results are wanted, by domain.

    They are those named in `only`, or all; those they are compared with; and those that an earlier run has decoded.

    Raises:
        ConfigurationError: there is no such system.
    """
    for name in only:
        if name not in config.systems:
            raise ConfigurationError(
                f"--only names '{name}', and there is no such system; known are {', '.join(config.systems)}"
            )
    wanted = {*(only or config.systems), *(config.system(name).against for name in only)}
    chosen = {}
    for domain in config.domains:
        known = config.systems_of(domain)
        names = [name for name in known if name in wanted or runner.done(plan.decode(name, domain))]
        if names:
            chosen[domain] = list(dict.fromkeys([known[0], *names]))
    return chosen


def goals(plan: Plan, chosen: dict[str, list[str]]) -> list[Stage]:
    """Return the stages that all results come from."""
    return [stage for domain, names in chosen.items() for stage in plan.comparisons(domain, names).values()]


def write_results(
    config: ExperimentConfig, plan: Plan, runner: Runner, chosen: dict[str, list[str]], command: list[str]
) -> dict[str, Any]:
    """Gather the results of the domains that are done, and write them to the output.

    Args:
        command: the words that started the experiment.
    """
    domains = {}
    for domain, names in chosen.items():
        comparisons = plan.comparisons(domain, names)
        if all(runner.done(stage) for stage in comparisons.values()):
            domains[domain] = _domain(config, plan, runner, domain, names, comparisons)
    stages = {stage.name: runner.stamp(stage) for stage in with_needs(goals(plan, chosen))}
    known = {name: stamp for name, stamp in stages.items() if stamp is not None}
    results = {
        "title": config.title or runner.output.name,
        "description": config.description,
        "command": command,
        "date": max((stamp["finished"] for stamp in known.values()), default=None),
        "versions": versions(),
        "machine": machine_name(choose_device(cpu=False)),
        "domains": domains,
        "stages": known,
        "config": asdict(config),
    }
    write_json(runner.output / RESULTS, results)
    return results


def _domain(
    config: ExperimentConfig, plan: Plan, runner: Runner, domain: str, names: list[str], comparisons: dict[str, Stage]
) -> dict[str, Any]:
    """Gather the results of one domain."""
    about, base = config.domains[domain], names[0]
    tables = {other: _read(stage.outputs[0]) for other, stage in comparisons.items()}
    rows = {row["system"]: row for row in tables[base]["rows"]}
    systems = {}
    for name in names:
        systems[name] = {
            "scores": {metric: rows[name][metric] for metric in METRICS},
            "against": {
                other: {metric: _difference(row, metric) for metric in METRICS}
                for other, table in tables.items()
                for row in table["rows"]
                if row["system"] == name != other
            },
            **_decoding(config, plan, runner, domain, name),
        }
    sentences = plan.translation(base, domain).read_bytes().count(b"\n")
    published = {"bleu": about.published_bleu, "in": about.published_in, "tolerance": about.tolerance}
    return {
        "base": base,
        "sentences": sentences,
        "published": published if about.published_bleu is not None else None,
        "signatures": tables[base]["signatures"],
        "systems": systems,
    }


def _difference(row: dict[str, Any], metric: str) -> dict[str, Any]:
    return {what: row[f"{metric} {what}"] for what in ("difference", "interval", "p")}


def _decoding(config: ExperimentConfig, plan: Plan, runner: Runner, domain: str, name: str) -> dict[str, Any]:
    """Describe how a system translated a domain: speed, signature, datastores, settings, stages."""
    stage, tuned = plan.decode(name, domain), plan.tune(name, domain)
    comparison = _read(stage.outputs[0] / "comparison.json")
    kind = RETRIEVAL if config.has_store(name) else BASE
    row = next(row for row in comparison["rows"] if row["system"] == kind)
    stores = {part: (runner.stamp(store) or {}).get("datastore") for part, store in plan.datastores(name, domain)}
    return {
        "speed": row["speed"],
        "tokens_per_second": row["tokens_per_second"],
        "retrieval_signature": comparison["retrieval_signature"],
        "stores": stores,
        "tuned": _tuned(config, domain, name, tuned) if tuned is not None else None,
        "stages": [needed.name for needed in with_needs([stage])],
    }


def _tuned(config: ExperimentConfig, domain: str, name: str, stage: Stage) -> dict[str, Any]:
    options = stage.outputs[0].read_text(encoding="utf-8").strip()
    return {"on": config.system(name).tuned_on(domain), "options": options}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
