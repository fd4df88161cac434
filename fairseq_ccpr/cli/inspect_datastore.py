"""`inspect_datastore.py`: what a datastore holds, and whether it is whole."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fairseq_ccpr.cli.command import HelpFormatter, run
from fairseq_ccpr.datastore.manifest import Manifest, PhraseSection, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.phrase_prompt import marked
from fairseq_ccpr.decoding.phrase_retriever import RetrievedPhrase
from fairseq_ccpr.search.recall import DEPTH, SAMPLE

HELP = """\
Show what a datastore holds and was built from, and read every byte of it to see that it is whole: its tokens, its phrases,
or both. The exit code is 0 when it is, 1 when it is damaged.

  inspect_datastore.py datastores/mine
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="inspect_datastore.py", description=HELP, formatter_class=HelpFormatter)
    parser.add_argument("datastore", metavar="DIR", type=Path, help="the datastore")
    parser.add_argument(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="how many of the most frequent tokens, and of the phrases, to show",
    )
    return parser


def inspect(directory: Path, top: int) -> int:
    """Print what there is, then what is wrong."""
    manifest = Manifest.read(directory)
    print(f"datastore      {directory}")
    healthy = True
    if manifest.phrase is None or manifest.token is not None:
        healthy = _inspect_tokens(TokenDatastore(directory), top)
    if manifest.phrase is not None:
        healthy = _inspect_phrases(PhraseDatastore(directory), top) and healthy
    return 0 if healthy else 1


def _inspect_tokens(datastore: TokenDatastore, top: int) -> bool:
    """The token part; whether it is whole."""
    section = datastore.section
    print(f"entries        {section.size:,} (keys fp16, {section.dimension} wide, {section.key_layer})")
    if section.projection is not None:
        print(f"adapter        {section.projection}, from states {section.projection.query_dimension} wide")
    print(f"sentences      {', '.join(f'{name} {count:,}' for name, count in section.subsets.items())}")
    _print_origin(section)
    if _print_damage(datastore.find_damage()):
        return False
    symbols, counts = datastore.read_symbols(), np.bincount(datastore.values)
    for token in np.argsort(-counts, kind="stable")[:top]:
        print(f"top token      {symbols[token]:20} {counts[token]:>12,}  {counts[token] / section.size:.1%}")
    print("health         good: checksums, numbers, tokens and index")
    return True


def _inspect_phrases(datastore: PhraseDatastore, top: int) -> bool:
    """The phrase part; whether it is whole."""
    section = datastore.section
    print(f"phrases        {section.size:,} (keys fp16, {section.dimension} wide) of {section.sentences:,} sentences")
    print(f"segmentation   {', '.join(f'{name} {value}' for name, value in section.segmentation.items())}")
    _print_origin(section)
    if _print_damage(datastore.find_damage()):
        return False
    for entry in np.linspace(0, section.size, min(top, section.size), endpoint=False, dtype=int).tolist():
        print(f"phrase         {marked(RetrievedPhrase(entry, *datastore.phrase(entry), score=0.0))}")
    print("health         good: checksums, numbers, places and index of the phrases")
    return True


def _print_origin(section: TokenSection | PhraseSection) -> None:
    """Share, index, fingerprints and files of a part."""
    if section.share < 1:
        print(f"share          {section.share:g} of them, drawn at random")
    print(f"index          {section.index} ({section.index.metric})")
    if isinstance(section, PhraseSection) and section.store is not None:
        print(f"store          {section.store}")
    if section.index_recall is not None:
        print(
            f"recall         {section.index_recall:.1%} of the {DEPTH} nearest keys, for {SAMPLE} of its own drawn at random"
        )
    for name, value in section.fingerprints.items():
        print(f"{name:14} {value}")
    for name, file in section.files.items():
        print(f"{name:32} {file['bytes']:>16,} bytes")
    total = sum(file["bytes"] for file in section.files.values())
    print(f"{'total':32} {total:>16,} bytes, {total / section.size:,.0f} an entry")


def _print_damage(faults: list[str]) -> bool:
    for fault in faults:
        print(f"damaged        {fault}")
    return bool(faults)


def main() -> None:
    """Parse, read, print."""
    options = make_parser().parse_args()
    run("inspect_datastore.py", lambda: inspect(options.datastore, options.top))


if __name__ == "__main__":
    main()
