"""Results of an experiment, every number with all that it depends on: JSON, rows of tables, and one HTML page.

The page is for any browser, and needs no script, no network and no other file.
"""

from __future__ import annotations

import html
import json
import lzma
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.page import STYLE, fill
from fairseq_ccpr.evaluation.test_set import BASE, RETRIEVAL
from fairseq_ccpr.lab.accuracy.copied_words import copied_words
from fairseq_ccpr.lab.experiments.config import REFERENCE, ExperimentConfig
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.experiments.stages import FileArguments, Runner, Stage, with_needs
from fairseq_ccpr.lab.machine import circumstances
from fairseq_ccpr.provenance import describe_run
from fairseq_ccpr.storage.files import atomic_file, write_json
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans

METRICS = ("BLEU", "chrF", "TER")
HEAD = ["system", "BLEU", "difference", "p", "chrF", "p", "TER", "p", "speed", "datastores"]
RESULTS = "results.json"
HERE = Path(__file__).parent


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
        rows.append([*row, f"{system['speed']:.0%}", "; ".join(_stores_of(system))])
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
    """Write a difference and the interval that holds 95% of its resamples."""
    low, high = compared["interval"]
    return f"{compared['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"


def _stores_of(system: dict[str, Any]) -> list[str]:
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
    sentence = (
        f"The base model has {bleu:.2f} BLEU; published are {published['bleu']:.2f}{where}: {off:+.2f}, "
    )
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
            # text has none
            keys = f"{store['index']}, width {store['dimension']}, " if store["dimension"] else ""
            settings.append((part, f"{keys}share {store['share']:g}; {prints}"))
    return settings + [
        (name, shlex.join(stages[name]["command"])) for name in system["stages"] if name in stages
    ]


def choose(config: ExperimentConfig, plan: Plan, runner: Runner, only: list[str]) -> dict[str, list[str]]:
    """Choose systems by domain: `only` those, or all; those they are compared with; those that an earlier run decoded."""
    for name in only:
        if name not in config.systems:
            raise ConfigurationError(
                f"--only names '{name}', and there is no such system; known are {', '.join(config.systems)}"
            )
    asked = {*(only or config.systems), *(config.system(name).against for name in only)}
    chosen = {}
    for domain in config.domains:
        known = config.systems_of(domain)
        names = [name for name in known if name in asked or runner.done(plan.decode(name, domain))]
        if names:
            chosen[domain] = list(dict.fromkeys([known[0], *names]))
    return chosen


def goals(plan: Plan, chosen: dict[str, list[str]]) -> list[Stage]:
    """Return the stages that all results come from."""
    return [stage for domain, names in chosen.items() for stage in plan.comparisons(domain, names).values()]


def write_results(
    config: ExperimentConfig, plan: Plan, runner: Runner, chosen: dict[str, list[str]]
) -> dict[str, Any]:
    """Gather the results of the domains that are done, and write them to the output."""
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
        **describe_run(choose_device(cpu=False)),
        "date": max((stamp["finished"] for stamp in known.values()), default=None),
        "commit": ", ".join(sorted({stamp.get("commit") or "" for stamp in known.values()} - {""})),
        "domains": domains,
        "stages": known,
        "config": asdict(config),
    }
    write_json(runner.output / RESULTS, results)
    return results


def _domain(
    config: ExperimentConfig,
    plan: Plan,
    runner: Runner,
    domain: str,
    names: list[str],
    comparisons: dict[str, Stage],
) -> dict[str, Any]:
    about, base = config.domains[domain], names[0]
    tables = {other: _read(stage.outputs[0]) for other, stage in comparisons.items()}
    # Files of before have fewer
    metrics = [
        m for m in tables[base]["signatures"] if all(m in one["signatures"] for one in tables.values())
    ]
    rows = {other: table["rows"] for other, table in tables.items()}
    apart = {other: table["unlike"]["rows"] for other, table in tables.items() if "unlike" in table}
    apart = apart if base in apart else {}
    systems = {}
    for name in names:
        systems[name] = _scored(rows, base, name, metrics) | _decoding(config, plan, runner, domain, name)
        systems[name] |= {"unlike": _scored(apart, base, name, metrics)} if apart else {}
    reference = (
        runner.folder / (about.references or [str(plan.decode(base, domain).outputs[0] / "reference.txt")])[0]
    )
    texts = {REFERENCE: reference, **{name: plan.translation(name, domain) for name in names}}
    lines = {name: list(read_lines(path)) for name, path in texts.items()}
    if about.publish:
        _write_outputs(runner.output / "outputs" / f"{domain}.tsv.xz", lines)
    published = {"bleu": about.published_bleu, "in": about.published_in, "tolerance": about.tolerance}
    found = {
        "base": base, "sentences": len(lines[base]), "published": published if about.published_bleu is not None else None,
        "signatures": tables[base]["signatures"], "systems": systems,
    }  # fmt: skip
    if apart:
        found["unlike"] = {key: value for key, value in tables[base]["unlike"].items() if key != "rows"}
    stored = [runner.folder / path for path in about.monolingual]
    if stored and all(path.exists() for path in stored):
        found["copied"] = _copied(lines, stored)
    return found


def _scored(
    tables: dict[str, list[dict[str, Any]]], base: str, name: str, metrics: list[str]
) -> dict[str, Any]:
    """Gather scores of a system, and what tables of comparisons, by the system compared with, say of it."""
    scores = next(row for row in tables[base] if row["system"] == name)
    return {
        "scores": {metric: scores[metric] for metric in metrics},
        # Files of before do not say
        **{what: scores[what] for what in ("brevity", "length") if what in scores},
        "against": {
            other: {
                m: {what: row[f"{m} {what}"] for what in ("difference", "interval", "p")} for m in metrics
            }
            for other, rows in tables.items()
            for row in rows
            if row["system"] == name != other
        },
    }


def _write_outputs(path: Path, lines: dict[str, list[str]]) -> None:
    """Write translations as a packed table, a column for each system below its name, the reference first."""
    path.parent.mkdir(exist_ok=True)
    rows = (
        "\t".join(cell.replace("\t", " ") for cell in row) + "\n"
        for row in [[*lines], *zip(*lines.values(), strict=True)]
    )
    packed = lzma.compress("".join(rows).encode())
    if not path.is_file() or path.read_bytes() != packed:  # a run that runs nothing changes nothing
        with atomic_file(path) as partial:
            partial.write_bytes(packed)


def _copied(lines: dict[str, list[str]], texts: list[Path]) -> dict[str, float]:
    """Compute the share of each translation, punctuation included, that is copied from the texts, without case."""

    def words(line: str) -> list[str]:
        return [line[start:end].lower() for start, end in word_spans(line)]

    systems = {name: map(words, each) for name, each in lines.items()}
    found = copied_words(systems, (words(line) for path in texts for line in read_lines(path)))
    return {name: round(share, 4) for name, share in found.items()}


def _decoding(config: ExperimentConfig, plan: Plan, runner: Runner, domain: str, name: str) -> dict[str, Any]:
    stage, tuned = plan.decode(name, domain), plan.tune(name, domain)
    comparison = _read(stage.outputs[0] / "comparison.json")
    kind = RETRIEVAL if config.has_store(name) else BASE
    row = next(row for row in comparison["rows"] if row["system"] == kind)
    stores = {
        part: (runner.stamp(store) or {}).get("datastore") for part, store in plan.datastores(name, domain)
    }
    settings = None
    if tuned is not None:
        options = runner.portable(shlex.join(FileArguments(tuned.outputs[0]).read()))
        settings = {"on": config.system(name).tuned_on(domain), "options": options}
    return {
        "speed": row["speed"], "tokens_per_second": row["tokens_per_second"],
        "retrieval_signature": comparison["retrieval_signature"], "stores": stores, "tuned": settings,
        "stages": [needed.name for needed in with_needs([stage])],
    }  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def as_page(experiments: list[dict[str, Any]]) -> str:
    """Make the page out of elements, so that text stays text whatever is in it."""
    titles = [results["title"] for results in experiments]
    body = Element("main")
    if len(experiments) > 1:
        _add(body, "h1", "Results")
    for results in experiments:
        _add_experiment(body, results, "h1" if len(experiments) == 1 else "h2")
    parts = {
        "/* title */": html.escape(" · ".join(titles)),
        "/* style */": STYLE.read_text(encoding="utf-8") + (HERE / "report.css").read_text(encoding="utf-8"),
        "/* content */": ElementTree.tostring(body, encoding="unicode", method="html"),
    }
    return fill(HERE / "report.html", parts)


def _add(parent: Element, tag: str, text: str = "", kind: str = "") -> Element:
    element = SubElement(parent, tag, {"class": kind} if kind else {})
    element.text = text
    return element


def _add_experiment(parent: Element, results: dict[str, Any], heading: str) -> None:
    section = _add(parent, "section", kind="experiment")
    _add(section, heading, results["title"])
    if results["description"]:
        _add(section, "p", results["description"].strip())
    _add(section, "p", circumstances(results), "muted small")
    if not results["domains"]:
        _add(section, "p", "No domain of this experiment is done yet.", "note")
        return
    _add_bars(section, results["domains"])
    for name, domain in results["domains"].items():
        _add_domain(section, name, domain, results)
    details = _details(section, "All settings")
    _add(details, "p", f"Started as {shlex.join(results['command'])}", "small")
    _add(details, "pre", json.dumps(results["config"], indent=1, ensure_ascii=False), "wide small")


def _add_bars(parent: Element, domains: dict[str, Any]) -> None:
    most = max(
        system["scores"]["BLEU"] for domain in domains.values() for system in domain["systems"].values()
    )
    bars = _add(parent, "div", kind="bars")
    for name, domain in domains.items():
        group = _add(bars, "section")
        _add(group, "h3", f"{name}, BLEU")
        rows = _add(group, "ul")
        for system, about in domain["systems"].items():
            row = _add(rows, "li", kind="base" if system == domain["base"] else "")
            _add(row, "span", system)
            bleu = about["scores"]["BLEU"]
            SubElement(
                _add(row, "span", kind="track"), "i", {"style": f"--share: {bleu / max(most, 1e-9):.1%}"}
            )
            _add(row, "b", f"{bleu:.2f}")


def _add_domain(parent: Element, name: str, domain: dict[str, Any], results: dict[str, Any]) -> None:
    section = _add(parent, "section", kind="domain")
    _add(section, "h3", f"{name}, {domain['sentences']:,} sentences")
    check = check_of_base(domain)
    if check is not None:
        _add(section, "p", check[0], "good" if check[1] else "note")
    _add_table(section, [HEAD, *rows_of(domain)])
    _add(section, "p", "Differences in BLEU with their 95% intervals, and p, by paired bootstrap against "
         f"{domain['base']}; speed in the same run.", "muted small")  # fmt: skip
    others = rows_against_others(domain)
    if len(others) > 1:
        _add_table(section, others, "comparisons")
    details = _details(section, "Exact options and signatures")
    _add_settings(details, [(metric, signature) for metric, signature in domain["signatures"].items()])
    for system, about in domain["systems"].items():
        _add(details, "h4", system)
        _add_settings(details, settings_of(about, results["stages"]))
    tuned = {system: about["tuned"] for system, about in domain["systems"].items() if about["tuned"]}
    if tuned:
        rows = [(f"{system}, tuned on {about['on']}", about["options"]) for system, about in tuned.items()]
        _add_settings(_details(section, "Tuning"), rows)


def _add_table(parent: Element, rows: list[list[str]], kind: str = "") -> None:
    frame = _add(parent, "div", kind="wide")
    frame.set("tabindex", "0")
    table = _add(frame, "table", kind=kind)
    head = _add(_add(table, "thead"), "tr")
    for cell in rows[0]:
        _add(head, "th", cell).set("scope", "col")
    body = _add(table, "tbody")
    for first, *rest in rows[1:]:
        row = _add(body, "tr")
        _add(row, "th", first).set("scope", "row")
        for cell in rest:
            _add(row, "td", cell)


def _details(parent: Element, summary: str) -> Element:
    details = _add(parent, "details")
    _add(details, "summary", summary)
    return details


def _add_settings(parent: Element, settings: Iterable[tuple[str, str]]) -> None:
    pairs = _add(parent, "dl")
    for name, value in settings:
        _add(pairs, "dt", name)
        _add(_add(pairs, "dd"), "code", value)
