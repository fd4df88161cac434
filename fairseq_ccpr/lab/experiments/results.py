"""Results of an experiment: every number, with all that it depends on, in one JSON file."""

from __future__ import annotations

import json
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
from fairseq_ccpr.lab.experiments.tables import METRICS
from fairseq_ccpr.storage.files import write_json

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
