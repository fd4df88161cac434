"""Experiments: `fairseq-ccpr experiment run` and `experiment report`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.child_process import locked
from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.experiments.config import read_config
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.experiments.results import (
    HEAD,
    RESULTS,
    as_page,
    check_of_base,
    choose,
    goals,
    rows_against_others,
    rows_of,
    write_results,
)
from fairseq_ccpr.lab.experiments.stages import Runner, with_needs
from fairseq_ccpr.lab.machine import circumstances
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.files import write_text


@command("""\
Run an experiment described by a YAML file: prepare the data of each domain, train a phrase encoder, build datastores, tune,
translate the test sets with every system, and compare them.

  fairseq-ccpr experiment run scripts/experiments/demo.yaml --dry-run     # list the commands, and which would run
  fairseq-ccpr experiment run scripts/experiments/demo.yaml
  fairseq-ccpr experiment report datastores/demo.experiment                          # the results as a page

Each stage is one command in a process of its own, with a log in DIR/logs. A finished stage runs again only if its command, a
file it reads, or an earlier stage has changed; its old output is deleted first. Stop it at any moment, and run it again
to resume. Datastores may be deleted once their systems are decoded.
""")
def experiment_run(
    config: Path = option(
        help="the YAML file; its paths are relative to it", positional=True, metavar="CONFIG"
    ),
    output: Optional[Path] = option(
        None, "output folder (datastores/NAME.experiment for NAME.yaml)", metavar="DIR"
    ),
    only: list[str] = option(
        [], "these systems, and those they are compared with", nargs="+", metavar="SYSTEM"
    ),
    dry_run: bool = option(False, "show the stages and which of them would run"),
) -> int:
    settings, folder = read_config(config), config.absolute().parent
    output = output or Path("datastores") / f"{config.stem}.experiment"
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output {output} is a file: give a folder")
    runner, plan = Runner(folder, output), Plan(settings, folder, output)
    chosen = choose(settings, plan, runner, only)
    ends = goals(plan, chosen)
    stages, todo = with_needs(ends), runner.to_do(ends)
    if dry_run:
        print(f"# {len(todo)} of {len(stages)} stages to do, commands run in {runner.folder}")
        for stage in stages:
            state = "to do" if stage in todo else "done" if runner.done(stage) else "not needed"
            words = [
                word if word.startswith("$(cat ") else shlex.quote(word) for word in runner.command(stage)
            ]
            print(f"\n# {stage.name}: {state}\npython {' '.join(words)}")
        try:
            runner.check_inputs(todo)
        except ConfigurationError as error:
            print(f"it would not run: {error}", file=sys.stderr)
        return 0
    runner.check_inputs(todo)
    with locked(runner.output, "another run is at work") as lock:
        for number, stage in enumerate(todo, 1):
            print(f"[{number}/{len(todo)}] {stage.name}", end="", flush=True)
            try:
                print(f"  {runner.run(stage, lock):.0f} s", flush=True)
            except BaseException:
                print(flush=True)
                raise
            if stage in ends:
                write_results(settings, plan, runner, chosen)
        results = write_results(settings, plan, runner, chosen)
    print(f"{len(todo)} stages run, {len(stages) - len(todo)} were done or not needed; results in {output}\n")
    print(_as_markdown(results))
    return 0


@command("""\
Write the results of experiments to one page for any browser, report.html, and to results.md: BLEU, chrF and TER with
significance, speed, datastores, tuning, every option, and a check of the base model against its published scores.

  fairseq-ccpr experiment report datastores/office.experiment datastores/koran.experiment

Each is a single file. Existing files of these names are overwritten.
""")
def experiment_report(
    experiments: list[Path] = option(
        help="outputs of fairseq-ccpr experiment run", positional=True, nargs="+", metavar="DIR"
    ),
    output: Optional[Path] = option(None, "where the files go (the first of those)", metavar="DIR"),
) -> int:
    output = output or experiments[0]
    results = [_read_results(folder) for folder in experiments]
    if not output.is_dir():
        raise ConfigurationError(f"--output {output}: there is no such folder")
    try:
        texts = {"report.html": as_page(results), "results.md": "\n\n".join(map(_as_markdown, results))}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        names = ", ".join(str(folder / RESULTS) for folder in experiments)
        raise ConfigurationError(
            f"{names}: damaged, or of another version ({error!r}): run fairseq-ccpr experiment run again"
        ) from None
    for name, text in texts.items():
        write_text(output / name, text.rstrip("\n") + "\n")
    print(f"{output / 'report.html'}, {output / 'results.md'}")
    return 0


def _read_results(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS
    if not path.is_file():
        raise ConfigurationError(
            f"there is no {path}: give the output of fairseq-ccpr experiment run, after its first domain is done"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}): run fairseq-ccpr experiment run again"
        ) from None


def _as_markdown(results: dict[str, Any]) -> str:
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
