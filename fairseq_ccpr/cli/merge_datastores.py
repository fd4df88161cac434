"""`merge_datastores.py`: several datastores as one, or one without some of its texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.building.merge import MergeSettings, merge_datastores
from fairseq_ccpr.cli.command import HelpFormatter, named, run
from fairseq_ccpr.datastore.manifest import Manifest

HELP = """\
Write a new datastore out of others, tokens, phrases or both, without encoding anything again: the shards of one build
(build_datastore.py --num-shards), or datastores of several texts, which are known by NAME from then on, or take texts out.

  merge_datastores.py mine.0 mine.1 mine.2 --output mine
  merge_datastores.py office=datastores/office koran=datastores/koran --output datastores/both
  merge_datastores.py datastores/both laws=datastores/laws --output datastores/three
  merge_datastores.py datastores/three --remove koran --output datastores/two

All must be built with the same model or encoder, adapter, PCA, key layer, metric and segmentation. A sentence that several
texts have is in a phrase datastore once, and goes when the last of them goes. The index is made anew. The datastores that
are read stay as they are; the output appears when it is complete.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="merge_datastores.py", description=HELP, formatter_class=HelpFormatter)
    add = parser.add_argument
    add(
        "datastores",
        nargs="+",
        metavar="[NAME=]DIR",
        help="datastores, or shards; NAME, of its text, is the folder's if not given; texts that were merged keep theirs",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="the new datastore: a folder that does not exist")
    add("--remove", nargs="+", default=[], metavar="NAME", help="texts that the output shall not hold")
    add(
        "--index",
        default="auto",
        metavar="exact|torch-ivf|FACTORY",
        help="as of build_datastore.py; disk, or disk:FACTORY, keeps inverted lists on disk",
    )
    add("--index-parameters", default="", metavar="P=V,...", help="FAISS search parameters")
    add("--cpu", action="store_true", help="choose the index for a CPU even where there is a GPU")
    add("--quiet", action="store_true", help="no progress bars")
    return parser


def merge(settings: MergeSettings) -> int:
    """Merge, and say what came of it."""
    return _report(settings.output, merge_datastores(settings))


def _report(output: Path, manifest: Manifest) -> int:
    for what, section in (("tokens", manifest.token), ("phrases", manifest.phrase)):
        if section is not None:
            of = f" of {', '.join(f'{s.name} ({s.size:,})' for s in section.sources)}" if section.sources else ""
            print(f"{output}: {section.size:,} {what}{of}, width {section.dimension}, index {section.index}")
    return 0


def main() -> None:
    """Parse, merge, print."""
    options = vars(make_parser().parse_args())

    def command() -> int:
        words = named(options.pop("datastores"), "datastores")
        return merge(MergeSettings({name: Path(path) for name, path in words.items()}, **options))

    run("merge_datastores.py", command)


if __name__ == "__main__":
    main()
