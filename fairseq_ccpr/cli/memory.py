"""`fairseq-ccpr memory`: show what a datastore has learnt, and export it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command, counted
from fairseq_ccpr.common_options import count_option, source_language_option, target_language_option
from fairseq_ccpr.datastore.learned import LearnedPair, LearnedStore
from fairseq_ccpr.datastore.preprocessing import remembered
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.files import write_text
from fairseq_ccpr.text.languages import as_bcp47
from fairseq_ccpr.text.translation_memory import tmx_lines

HELP = """\
Show the sentence pairs that a datastore has learnt, newest first: id, how often each was learnt, source and target, separated
by tabs. Words after the folder restrict the list to pairs that contain all of them. The exit code is 1 if the journal is
damaged: pairs before the damage are kept and shown.

  fairseq-ccpr memory datastores/mine
  fairseq-ccpr memory datastores/mine guten morgen
  fairseq-ccpr memory datastores/mine --export memory.tmx
"""


@dataclass
class Options:
    """The command's options."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    words: list[str] = option([], "of source or target", positional=True, nargs="*", metavar="WORD")
    most: Optional[int] = count_option(None, "show at most N pairs")
    export: Optional[Path] = option(None, "write them to this TMX file instead, oldest first", metavar="FILE")
    source_lang: Optional[str] = source_language_option(None, "source language in the TMX (that of the datastore)")
    target_lang: Optional[str] = target_language_option(None, "target language in the TMX (that of the datastore)")


def memory(options: Options) -> int:
    """Show or export."""
    check_folder("--export", options.export)
    store = LearnedStore(TokenDatastore(options.datastore))
    pairs = store.find(" ".join(options.words))[: options.most]
    if options.export is not None:
        exported = ((str(one.id), one.source, one.target) for one in reversed(pairs))
        write_text(options.export, "\n".join([*tmx_lines(*_languages(options), exported), ""]))
        print(f"{options.export}: {counted(len(pairs), 'pair')}")
    else:
        for one in pairs:
            print(_line(one))
        if not store.pairs:
            print(f"nothing was learnt alongside {options.datastore}", file=sys.stderr)
    return 1 if store.damage else 0


def _line(pair: LearnedPair) -> str:
    return f"{pair.id}\t{pair.count}\t{pair.source}\t{pair.target}"


def _languages(options: Options) -> tuple[str, str]:
    known = remembered(options.datastore)
    source = options.source_lang or (known.source_lang if known is not None else None)
    target = options.target_lang or (known.target_lang if known is not None else None)
    if source is None or target is None:
        raise ConfigurationError(f"{options.datastore} does not remember its languages: give -s and -t")
    return as_bcp47(source), as_bcp47(target)


main = command(HELP, memory, Options)
