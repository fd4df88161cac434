"""`fairseq-ccpr compact`: what was learnt becomes part of the datastore, and what was forgotten leaves it."""

from __future__ import annotations

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.cli.command import command

HELP = """\
Move what was learnt beside a datastore into its own entries, which its index finds, and rewrite journal and entries without
what was forgotten: no text and no key of that is then left in any file of the datastore.

  fairseq-ccpr compact datastores/mine

Do it from time to time: what was learnt since is searched as well as the index, which takes time. Pairs keep their ids, and
can be shown, exported and forgotten as before. Translations may go on meanwhile; programs that learn must end first, or
compact by themselves, as serve does. The datastore is replaced at one moment, and a run that was killed is run again.
Settings and trust that were tuned go on to be used.
"""


def compact(settings: CompactSettings) -> int:
    """Compact, and say what became of it."""
    done = compact_datastore(settings)
    print(
        f"{settings.datastore}: {done.section.size:,} entries, index {done.section.index}; {done.moved:,} pairs moved into "
        f"it, {done.removed:,} that were forgotten left it"
    )
    return 0


main = command(HELP, compact, CompactSettings)
