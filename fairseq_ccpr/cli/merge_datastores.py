"""`merge_datastores.py`: several datastores as one, or one without some of its texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.building.merge import MergeSettings, merge_datastores
from fairseq_ccpr.cli.command import HelpFormatter, named, run
from fairseq_ccpr.settings import add_options, read_options

HELP = """\
Write a new datastore out of others, tokens, phrases or both, without encoding anything again: the shards of one build
(build_datastore.py --num-shards), or datastores of several texts, which are known by NAME from then on, or take texts out.

  merge_datastores.py mine.0 mine.1 mine.2 --output mine
  merge_datastores.py office=datastores/office koran=datastores/koran --output datastores/both
  merge_datastores.py datastores/both laws=datastores/laws --output datastores/three
  merge_datastores.py datastores/three --remove koran --output datastores/two

All must be built with the same model or encoder, adapter, PCA, key layer, metric and segmentation. A phrase datastore holds
a sentence that several texts share once, until the last of them is removed. The index is rebuilt. The datastores that are
read stay as they are; the output appears when it is complete.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="merge_datastores.py", description=HELP, formatter_class=HelpFormatter)
    parser.add_argument(
        "datastores",
        nargs="+",
        metavar="[NAME=]DIR",
        help="datastores, or shards; NAME is that of the text, by default the folder's; merged texts keep theirs",
    )
    add_options(parser, MergeSettings)
    return parser


def merge(settings: MergeSettings) -> int:
    """Merge, and print a summary."""
    manifest = merge_datastores(settings)
    for what, section in (("tokens", manifest.token), ("phrases", manifest.phrase)):
        if section is not None:
            of = f" of {', '.join(f'{s.name} ({s.size:,})' for s in section.sources)}" if section.sources else ""
            print(f"{settings.output}: {section.size:,} {what}{of}, width {section.dimension}, index {section.index}")
    return 0


def main() -> None:
    """Parse, merge, print."""
    options = make_parser().parse_args()

    def command() -> int:
        datastores = {name: Path(path) for name, path in named(options.datastores, "datastores").items()}
        return merge(read_options(MergeSettings, options, datastores=datastores))

    run("merge_datastores.py", command)


if __name__ == "__main__":
    main()
