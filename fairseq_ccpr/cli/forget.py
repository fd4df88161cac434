"""`fairseq-ccpr forget`: take pairs out of what was learnt."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.cli.command import command, counted
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import option

HELP = """\
Forget learnt sentence pairs by their ids, which fairseq-ccpr learn and memory print. From the next translation on, they
are no longer retrieved.

  fairseq-ccpr forget datastores/mine 17 18

fairseq-ccpr compact erases their text and keys from the journal.
"""


@dataclass
class Options:
    """The command's options."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    ids: list[int] = option([], "ids of the pairs", positional=True, nargs="*", metavar="ID")
    all: bool = option(False, "forget everything that was learnt")


def forget(options: Options) -> int:
    """Forget, and say what."""
    if options.all == bool(options.ids):
        raise ConfigurationError("say what to forget: give ids, or --all")
    with closing(LearnedStore(TokenDatastore(options.datastore))) as store:
        store.lock()  # others may have learnt since
        ids = list(store.pairs) if options.all else list(dict.fromkeys(options.ids))
        pairs = [store.pairs[number] for number in ids if number in store.pairs]
        store.forget(ids)
    for pair in pairs:
        print(f"{pair.id}\t{pair.source}\t{pair.target}")
    left = len(store.pairs)
    print(f"forgot {counted(len(pairs), 'pair')}; {left:,} {'is' if left == 1 else 'are'} left")
    return 0


main = command(HELP, forget, Options)
