"""`fairseq-ccpr merge`: several datastores as one, or one without some of its texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fairseq_ccpr.building.rewrite import MergeSettings, merge_datastores
from fairseq_ccpr.cli.command import command, named
from fairseq_ccpr.settings import option

HELP = """\
Write a new datastore from others, tokens, phrases or both, without encoding anything again: from the shards of one build
(--num-shards), or from datastores of several texts, which are then known by NAME. Or remove texts from one.

  fairseq-ccpr merge mine.0 mine.1 mine.2 --output mine
  fairseq-ccpr merge office=datastores/office koran=datastores/koran --output datastores/both
  fairseq-ccpr merge datastores/both laws=datastores/laws --output datastores/three
  fairseq-ccpr merge datastores/three --remove koran --output datastores/two

All must be built with the same model or encoder, adapter, PCA, key layer, metric and segmentation. A phrase datastore holds
a sentence that several texts share once, until the last of them is removed. The index is rebuilt. The input datastores are
not changed; the output appears when it is complete.
"""


@dataclass
class Options:
    """What is merged."""

    datastores: list[str] = option(
        help="datastores, or shards; NAME is that of the text, by default the folder's; merged texts keep theirs",
        positional=True, nargs="+", metavar="[NAME=]DIR",
    )  # fmt: skip


def merge(options: Options, settings: MergeSettings) -> int:
    """Merge, and print a summary."""
    datastores = {name: Path(path) for name, path in named(options.datastores, "datastores").items()}
    settings = replace(settings, datastores=datastores)
    manifest = merge_datastores(settings)
    for what, section in (("tokens", manifest.token), ("phrases", manifest.phrase)):
        if section is not None:
            of = f" of {', '.join(f'{s.name} ({s.size:,})' for s in section.sources)}" if section.sources else ""
            print(f"{settings.output}: {section.size:,} {what}{of}, width {section.dimension}, index {section.index}")
    return 0


main = command(HELP, merge, Options, MergeSettings)
