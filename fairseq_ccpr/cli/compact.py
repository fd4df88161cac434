"""`fairseq-ccpr compact`: what was learnt becomes part of the datastore, and what was forgotten leaves it."""

from __future__ import annotations

from fairseq_ccpr.building.rewrite import CompactSettings, compact_datastore
from fairseq_ccpr.cli.command import command, counted

HELP = """\
Move what a datastore has learnt into its own entries, which its index finds, and erase what was forgotten: none of its text
or keys remains in any file of the datastore.

  fairseq-ccpr compact datastores/mine

Do it from time to time: what was learnt since is searched in addition to the index, which takes time. Pairs keep their ids,
and can be shown, exported and forgotten as before. Other programs may translate meanwhile. Programs that learn must end
first, or compact by themselves, as serve does. The datastore is replaced at one moment. Run the command again if it was
interrupted. Tuned settings and trust stay valid.
"""


def compact(settings: CompactSettings) -> int:
    """Compact, and say what became of it."""
    done = compact_datastore(settings)
    print(
        f"{settings.datastore}: {done.section.size:,} entries, index {done.section.index}; "
        f"{counted(done.moved, 'pair')} moved into it, {done.removed:,} that were forgotten left it"
    )
    return 0


main = command(HELP, compact, CompactSettings)
