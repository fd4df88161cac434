"""`fairseq-ccpr learn`: sentence pairs that count from the next translation on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command, counted
from fairseq_ccpr.common_options import quiet_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.learning import Learner
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.search.base import EXACT_UP_TO
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.translation_memory import Pair, read_memory

HELP = """\
Learn sentence pairs into a datastore: corrections, or a translation memory. What was learnt counts from the next translation
on, and is on disk before the command says so.

  fairseq-ccpr learn --datastore datastores/mine --source "Guten Morgen." --target "Good morning."
  fairseq-ccpr learn --datastore datastores/mine memory.tmx project.xlf pairs.tsv

Files are TMX, XLIFF (1.2 or 2) or TSV, plain, .gz or .xz. A pair that is already there is counted, not stored twice. Pairs
with an empty or too long side, and lines of a TSV that are no pair or not UTF-8, are left out and counted by reason. An
interrupted run may be run again.

memory shows what was learnt, and exports it; forget removes pairs.
"""
WINDOW = 256  # pairs that are learnt together


@dataclass
class Options:
    """The command's own options."""

    files: list[Path] = option([], "translation memories", positional=True, nargs="*", metavar="FILE")
    source: Optional[str] = option(None, "a sentence", metavar="TEXT")
    target: Optional[str] = option(None, "its translation", metavar="TEXT")
    data: Optional[Path] = option(
        None, "folder with the model's dictionaries (found in the datastore, or next to the model)", metavar="DATA_BIN"
    )
    quiet: bool = quiet_option()


@dataclass
class Learnt:
    """The outcome for the pairs."""

    ids: list[int] = field(default_factory=list)  # of new ones
    again: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason


def learn(options: Options, rest: list[str]) -> int:
    """Learn a pair, or files of pairs; say what became of them."""
    if (options.source is None) != (options.target is None):
        raise ConfigurationError("--source and --target go together: give a sentence and its translation")
    if not options.files and options.source is None:
        raise ConfigurationError("there is nothing to learn: give files, or --source and --target")
    system = System.of(rest, options.data)
    learner, done = Learner(system), Learnt()
    languages = system.task.cfg.source_lang, system.task.cfg.target_lang
    hidden = options.quiet or not options.files
    with closing(learner.memory.store), progress_bar("learnt", "pair", quiet=hidden) as bar:
        if options.source is not None and options.target is not None:
            learn_pairs(learner, [(options.source, options.target)], done, bar.update)
        for path in options.files:
            try:
                learn_pairs(learner, read_memory(path, *languages, done.skipped), done, bar.update)
            except ConfigurationError:  # the file is damaged from somewhere on; what came before counts already
                if done.ids or done.again:
                    print(summary(done))
                raise
    print(summary(done))
    size = learner.memory.entries.index.size
    if size > EXACT_UP_TO:
        print(
            f"{size:,} learnt entries are searched as well as the index at each step: fairseq-ccpr compact moves them into it"
        )
    return 0 if done.ids or done.again else 1


def learn_pairs(learner: Learner, pairs: Iterable[Pair], done: Learnt, told: Callable[[int], object]) -> None:
    """Learn pairs, some at a time."""
    known = set(learner.memory.store.pairs)
    for some in _windows(pairs):
        for learnt in learner.learn(some):
            if isinstance(learnt, str):
                done.skipped[learnt] += 1
            elif learnt in known:
                done.again += 1
            else:
                done.ids.append(learnt)
                known.add(learnt)
        told(len(some))


def _windows(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    waiting = iter(pairs)
    while some := list(islice(waiting, WINDOW)):
        yield some


def summary(done: Learnt) -> str:
    """Report the outcome, with a line for each reason why pairs were left out."""
    ids = (
        f" (id {done.ids[0]})" if len(done.ids) == 1 else f" (ids {done.ids[0]} to {done.ids[-1]})" if done.ids else ""
    )
    line = f"learnt {counted(len(done.ids), 'pair')}{ids}"
    if done.again:
        line += f"; {done.again:,} were there already, and are counted"
    return "\n".join([line, *(f"left out {count:,}: {reason}" for reason, count in done.skipped.most_common())])


main = command(HELP, learn, Options, rest=True)
