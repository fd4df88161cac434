"""`tune_retrieval.py`: choose k, lambda and T on a held-out subset."""

from __future__ import annotations

import sys
from pathlib import Path

from fairseq_ccpr.cli.command import run
from fairseq_ccpr.evaluation.decoding import load, parse_generation
from fairseq_ccpr.evaluation.tuning import as_options, tune

HELP = """\
usage: tune_retrieval.py DATA_BIN --path MODEL -s LANG -t LANG --datastore DIR --output FILE [--subset valid]
                         [--decode 5] [option of fairseq-generate ...]

Choose --knn-k, --knn-lambda and --knn-temperature for a datastore. One teacher-forced pass over the subset scores a
grid of several hundred settings by the likelihood of the references; the best of them are decoded with, and the one of
the best BLEU goes to FILE, to be used as

  fairseq-generate DATA_BIN ... --datastore DIR $(cat FILE)

Give the options that make text of subwords (--remove-bpe or --bpe) as you do there.
"""


def take(arguments: list[str], name: str, default: str | None = None) -> str | None:
    """Take an option of this command's own out of the arguments, and leave the rest to fairseq."""
    if name not in arguments:
        return default
    at = arguments.index(name)
    value = arguments[at + 1] if at + 1 < len(arguments) else None
    del arguments[at : at + 2]
    return value


def tune_command(arguments: list[str]) -> int:
    """Tune, print what was tried, write what was chosen."""
    subset, output, count = (
        take(arguments, *option) for option in (("--subset", "valid"), ("--output",), ("--decode", "5"))
    )
    if output is None or not str(count).isdigit():
        print(HELP, end="", file=sys.stderr)
        return 2
    cfg = parse_generation([*arguments, "--gen-subset", str(subset)])
    tuned = tune(cfg, *load(cfg), count=int(str(count)))
    print(f"{len(tuned.grid)} settings by likelihood, then by BLEU:")
    for name, bleu in sorted(tuned.bleu.items(), key=lambda item: -item[1]):
        print(f"{bleu:7.2f}  {name}")
    Path(output).write_text(as_options(tuned.best) + "\n", encoding="utf-8")
    return 0


def main() -> None:
    """Parse, tune, print."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        sys.exit(0 if arguments else 2)
    run("tune_retrieval.py", lambda: tune_command(arguments))


if __name__ == "__main__":
    main()
