"""Results of experiments as one HTML page for any browser, which needs no script, no network and no other file."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from fairseq_ccpr.evaluation.page import STYLE, fill
from fairseq_ccpr.lab.experiments.results import (
    HEAD,
    check_of_base,
    circumstances,
    rows_against_others,
    rows_of,
    settings_of,
)

HERE = Path(__file__).parent


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
    """Add a new element at the end of another."""
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
    """Draw BLEU of every system, domain by domain, to one scale."""
    most = max(system["scores"]["BLEU"] for domain in domains.values() for system in domain["systems"].values())
    bars = _add(parent, "div", kind="bars")
    for name, domain in domains.items():
        group = _add(bars, "section")
        _add(group, "h3", f"{name}, BLEU")
        rows = _add(group, "ul")
        for system, about in domain["systems"].items():
            row = _add(rows, "li", kind="base" if system == domain["base"] else "")
            _add(row, "span", system)
            bleu = about["scores"]["BLEU"]
            SubElement(_add(row, "span", kind="track"), "i", {"style": f"--share: {bleu / max(most, 1e-9):.1%}"})
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
    """Add a table whose first row is its head, and which scrolls where it is wider than the screen."""
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
