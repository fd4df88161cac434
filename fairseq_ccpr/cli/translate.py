"""`fairseq-ccpr translate`: translate text with a model and a datastore."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import count_option, quiet_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.sentences import Translation
from fairseq_ccpr.inference.system import WINDOW, System
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import read_lines, read_standard_input

HELP = """\
Translate text, one sentence per line, from standard input or files to standard output.

  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt
  fairseq-ccpr translate --path model.pt --datastore datastores/mine --input in.txt.xz --output-format jsonl > out.jsonl

The datastore stores model, languages, dictionaries, subwords and tuned settings. Without a datastore the model translates
alone, with the dictionaries and subwords in its own folder. Any option of fairseq-generate may be given, such as --beam or
--lenpen.

Every input line yields one output line. An empty line yields an empty one. So does a line that is longer than the model
accepts, which is reported on standard error; the exit code is then 1.
"""
TEXT, JSONL = "text", "jsonl"


@dataclass
class Options:
    """The command's own options."""

    input: list[Path] = option([], "text to translate, plain, .gz or .xz (standard input)", nargs="+", metavar="FILE")
    output_format: str = option(
        TEXT, "text: translations alone; jsonl: with source, score, subwords and their scores", choices=(TEXT, JSONL)
    )
    data: Optional[Path] = option(
        None, "folder with the model's dictionaries (found in the datastore, or next to the model)", metavar="DATA_BIN"
    )
    buffer_size: int = count_option(WINDOW, "sentences read before they are translated in batches of similar lengths")
    quiet: bool = quiet_option()


def translate(options: Options, rest: list[str]) -> int:
    """Translate line by line."""
    for path in options.input:
        if not path.is_file():
            raise ConfigurationError(f"--input: there is no file {path}")
    system = System.of(rest, options.data)
    print(f"retrieval signature: {system.signature or 'none, the model translates alone'}", file=sys.stderr)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # as the input is read, whatever the locale
    terminal = not options.input and sys.stdin.isatty()
    lines = chain.from_iterable(map(read_lines, options.input)) if options.input else read_standard_input()
    shown = not options.quiet and sys.stderr.isatty()
    total = sum(1 for path in options.input for _ in read_lines(path)) if options.input and shown else None
    with progress_bar("translations", "sentence", total=total, quiet=options.quiet or terminal) as bar:
        translations = system.translate(lines, bar.update, 1 if terminal else options.buffer_size)
        faults = write(translations, options.output_format, terminal or options.buffer_size == 1)
    for number, fault in faults:
        print(f"line {number} has no translation: {fault}", file=sys.stderr)
    terms = system.task.glossary
    if terms is not None and terms.searched and not terms.found:
        print(
            f"--glossary: no sentence has a term of {terms.path}: its first column is of the language translated from",
            file=sys.stderr,
        )
    return 1 if faults else 0


def write(translations: Iterable[Translation], output_format: str, at_once: bool) -> list[tuple[int, str]]:
    """Print translations; returns the numbers of the lines without one, and why."""
    faults = []
    for number, translation in enumerate(translations, 1):
        print(translation.text if output_format == TEXT else as_json(translation), flush=at_once)
        if translation.fault:
            faults.append((number, translation.fault))
    return faults


def as_json(translation: Translation) -> str:
    """Write a translation as a line of JSON."""
    return json.dumps(asdict(translation), ensure_ascii=False)


main = command(HELP, translate, Options, rest=True)
