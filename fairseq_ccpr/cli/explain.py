"""`fairseq-ccpr explain`: a page that shows where each token of translations came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import count_option, data_bin_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.explain.explanation import Explanation
from fairseq_ccpr.evaluation.explain.translate import explain_subset
from fairseq_ccpr.evaluation.translation.comparison import BASE, RETRIEVAL
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import option

HELP = """\
Translate sentences with and without retrieval, and write a page for any browser, one file that needs no network. It shows
how much of each token's probability came from the model, the token datastore and the phrase datastore. It lists the
neighbours and phrases that proposed the token, in their sentences, and what the model alone would have written.

  fairseq-ccpr explain data-bin --datastore datastores/mine --output page.html

DATA_BIN is what prepare makes of pairs; Translator.explain, in Python, explains sentences without references.
All other options are those of fairseq-generate --task translation_retrieval. A file of that name is overwritten.
"""


@dataclass
class Options:
    """The command's own options."""

    data_bin: str = data_bin_option()
    output: Path = option(help="the page", metavar="FILE")
    sentences: Optional[int] = count_option(None, "how many, the first of the subset (50)")
    ids: list[int] = option([], "these sentences, counted from 0", nargs="+", metavar="N")
    neighbours: int = option(16, "shown of each token, at most", within="[0, inf)", needs="at least 0", metavar="N")


def explain_command(options: Options, rest: list[str]) -> int:
    """Explain, write the page, say what is in it."""
    if options.ids and options.sentences is not None:
        raise ConfigurationError("--sentences and --ids exclude each other: give one of them")
    check_output(options.output)
    system = System.of(rest, Path(options.data_bin))
    explanation = explain_subset(system, options.sentences or 50, options.ids or None, options.neighbours)
    explanation.save(options.output)
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
    """Tell what is in the page, in a line."""
    line = f"{path}: {len(explanation.sentences):,} of {explanation.sentences_in_subset:,} of {explanation.subset}"
    if explanation.bleu is not None:
        line += f", BLEU of these {explanation.bleu[BASE]:.2f}, with retrieval {explanation.bleu[RETRIEVAL]:.2f}"
    return line


main = command(HELP, explain_command, Options, rest=True)
