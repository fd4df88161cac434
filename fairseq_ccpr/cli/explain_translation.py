"""`explain_translation.py`: a page that shows where each token of translations came from."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.explain.explanation import Explanation
from fairseq_ccpr.evaluation.explain.page import write_page
from fairseq_ccpr.evaluation.explain.translate import explain
from fairseq_ccpr.evaluation.translation.comparison import BASE, RETRIEVAL
from fairseq_ccpr.evaluation.translation.test_set import parse_generation

HELP = """\
Translate sentences with retrieval and without, and write a page for any browser, one file that needs no network: for each
token how much of its probability came from the model, the token datastore and the phrase datastore, which neighbours and
phrases wanted it, in which sentences they stand, and what the model alone would have written.

  explain_translation.py DATA_BIN --path MODEL -s de -t en --datastore DIR --bpe sentencepiece \\
    --sentencepiece-model spm.model --output page.html

All other options are those of fairseq-generate --task translation_retrieval. The neighbours' sentences come from DATA_BIN,
which is then to be the folder that the datastore was built from. A file of that name is overwritten.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's own options."""
    parser = argparse.ArgumentParser(
        prog="explain_translation.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data_bin", metavar="DATA_BIN", help="folder that fairseq-preprocess wrote")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the page")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sentences", type=int, default=50, metavar="N", help="how many, the first of the subset")
    which.add_argument("--ids", type=int, nargs="+", metavar="N", help="these sentences, counted from 0")
    parser.add_argument("--neighbours", type=int, default=16, metavar="N", help="shown of each token, at most")
    return parser


def explain_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Explain, write the page, say what is in it."""
    for name, least in (("sentences", 1), ("neighbours", 0)):
        if (value := getattr(options, name)) < least:
            raise ConfigurationError(f"--{name} is {value}: give at least {least}")
    check_output(options.output)
    cfg = parse_generation([options.data_bin, *rest])
    if cfg.generation.score_reference:
        raise ConfigurationError("--score-reference is for fairseq-generate alone: leave it out here")
    explanation = explain(cfg, options.sentences, options.ids, options.neighbours)
    write_page(explanation, options.output)
    print(summary(explanation, options.output))
    return 0


def check_output(path: Path) -> None:
    """Refuse, before the work, a file that could not be written after it.

    Raises:
        ConfigurationError: there is no such folder, or the file is one.
    """
    if path.is_dir():
        raise ConfigurationError(f"--output {path} is a folder: give the name of a file")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"--output {path} cannot be written: there is no folder {path.parent}")


def summary(explanation: Explanation, path: Path) -> str:
    """What is in the page, in a line or two."""
    lines = [f"{path}: {len(explanation.sentences):,} of {explanation.sentences_in_subset:,} of {explanation.subset}"]
    if explanation.bleu is not None:
        lines[0] += f", BLEU of these {explanation.bleu[BASE]:.2f}, with retrieval {explanation.bleu[RETRIEVAL]:.2f}"
    lines += [f"note: {note}" for note in explanation.notes]
    return "\n".join(lines)


def main() -> None:
    """Parse, explain, write."""
    options, rest = make_parser().parse_known_args(own_arguments())
    run("explain_translation.py", lambda: explain_command(options, rest))


if __name__ == "__main__":
    main()
