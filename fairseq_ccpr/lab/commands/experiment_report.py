"""`fairseq-ccpr experiment report`: show the results of experiments as a page and as Markdown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.experiments.report_page import Report, as_page
from fairseq_ccpr.lab.experiments.results import RESULTS
from fairseq_ccpr.lab.experiments.tables import HEAD, check_of_base, circumstances, rows_against_others, rows_of
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.files import write_text

HELP = """\
Write the results of experiments to one page for any browser, report.html, and to results.md: BLEU, chrF and TER with
significance, speed, datastores, tuning, every option, and a check of the base model against its published scores.

  fairseq-ccpr experiment report datastores/office.experiment datastores/koran.experiment

Each is a single file. Existing files of these names are overwritten.
"""


@dataclass
class Options:
    """The command's options."""

    experiments: list[Path] = option(
        help="outputs of fairseq-ccpr experiment run", positional=True, nargs="+", metavar="DIR"
    )
    output: Optional[Path] = option(None, "where the files go (the first of those)", metavar="DIR")


def report(options: Options) -> int:
    """Read, write, say where."""
    output = options.output or options.experiments[0]
    reports = [Report(folder, read_results(folder)) for folder in options.experiments]
    if not output.is_dir():
        raise ConfigurationError(f"--output {output}: there is no such folder")
    try:
        texts = {"report.html": as_page(reports), "results.md": "\n\n".join(as_markdown(r.results) for r in reports)}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        names = ", ".join(str(folder / RESULTS) for folder in options.experiments)
        raise ConfigurationError(
            f"{names}: damaged, or of another version ({error!r}): run fairseq-ccpr experiment run again"
        ) from None
    for name, text in texts.items():
        write_text(output / name, text.rstrip("\n") + "\n")
    print(f"{output / 'report.html'}, {output / 'results.md'}")
    return 0


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results of an experiment.

    Raises:
        ConfigurationError: there are none.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise ConfigurationError(
            f"there is no {path}: give the output of fairseq-ccpr experiment run, after its first domain is done"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is damaged ({error}): run fairseq-ccpr experiment run again") from None


def as_markdown(results: dict[str, Any]) -> str:
    """Write all tables of an experiment, with what they were made with."""
    lines = [f"# {results['title']}", ""]
    lines += [results["description"].strip(), ""] if results["description"] else []
    for name, domain in results["domains"].items():
        lines += [f"## {name}", "", markdown_table([HEAD, *rows_of(domain)]), ""]
        lines += [
            f"{domain['sentences']:,} sentences; differences in BLEU with their 95% intervals, and p, by paired bootstrap",
            "",
        ]
        check = check_of_base(domain)
        lines += [check[0] if check[1] else f"**{check[0]}**", ""] if check else []
        others = rows_against_others(domain)
        lines += [markdown_table(others), ""] if len(others) > 1 else []
        lines += [f"{metric} `{signature}`  " for metric, signature in domain["signatures"].items()]
        for system, about in domain["systems"].items():
            if about["tuned"]:
                lines += [f"{system}, tuned on {about['tuned']['on']}: `{about['tuned']['options']}`  "]
        lines += [""]
    if not results["domains"]:
        lines += ["No domain is done yet.", ""]
    lines += [circumstances(results)]
    return "\n".join(lines)


main = command(HELP, report, Options)
