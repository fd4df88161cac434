"""`fairseq-ccpr experiment run`: run a domain-adaptation experiment from a file of its settings."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.child_process import locked
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.commands.experiment_report import as_markdown
from fairseq_ccpr.lab.experiments.config import read_config
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.experiments.results import choose, goals, write_results
from fairseq_ccpr.lab.experiments.stages import Runner, Stage, with_needs
from fairseq_ccpr.settings import option

HELP = """\
Run an experiment described by a YAML file: prepare the data of each domain, train a phrase encoder, build datastores, tune,
translate the test sets with every system, and compare them.

  fairseq-ccpr experiment run scripts/experiments/demo.yaml --dry-run     # list the commands, and which would run
  fairseq-ccpr experiment run scripts/experiments/demo.yaml
  fairseq-ccpr experiment report datastores/demo.experiment                          # the results as a page

Each stage is one command in a process of its own, with a log in DIR/logs. A finished stage runs again only if its command, a
file it reads, or an earlier stage has changed; its old output is deleted first. Stop it at any moment, and run it again
to resume. Datastores may be deleted once their systems are decoded.
"""


@dataclass
class Options:
    """The command's options."""

    config: Path = option(help="the YAML file; its paths are relative to it", positional=True, metavar="CONFIG")
    output: Optional[Path] = option(None, "output folder (datastores/NAME.experiment for NAME.yaml)", metavar="DIR")
    only: list[str] = option([], "these systems, and those they are compared with", nargs="+", metavar="SYSTEM")
    dry_run: bool = option(False, "show the stages and which of them would run")


def run_experiment(options: Options) -> int:
    """Run what is to be done, and show the results."""
    config = read_config(options.config)
    output = options.output or Path("datastores") / f"{options.config.stem}.experiment"
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output {output} is a file: give a folder")
    folder = options.config.absolute().parent
    runner = Runner(folder, output)
    plan = Plan(config, folder, output)
    chosen = choose(config, plan, runner, options.only)
    wanted = goals(plan, chosen)
    todo = runner.to_do(wanted)
    if options.dry_run:
        show(runner, with_needs(wanted), todo)
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
            if stage in wanted:
                write_results(config, plan, runner, chosen, sys.argv)
        results = write_results(config, plan, runner, chosen, sys.argv)
    print(
        f"{len(todo)} stages run, {len(with_needs(wanted)) - len(todo)} were done or not needed; results in {output}\n"
    )
    print(as_markdown(results))
    return 0


def show(runner: Runner, stages: list[Stage], todo: list[Stage]) -> None:
    """Print stages and their command lines."""
    print(f"# {len(todo)} of {len(stages)} stages to do, commands run in {runner.folder}")
    for stage in stages:
        state = "to do" if stage in todo else "done" if runner.done(stage) else "not needed"
        words = [word if word.startswith("$(cat ") else shlex.quote(word) for word in runner.command(stage)]
        print(f"\n# {stage.name}: {state}\npython {' '.join(words)}")


main = command(HELP, run_experiment, Options)
