"""`build_datastore.py`: build a datastore from a corpus."""

from __future__ import annotations

import argparse
import time

from fairseq_ccpr.building.adapter_build import build_projected_datastore
from fairseq_ccpr.building.distributed import launched
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings, build_phrase_datastore
from fairseq_ccpr.building.token_build import NO_ADAPTER, TokenBuildSettings, build_token_datastore
from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.datastore.token import UNKNOWN, TokenDatastore
from fairseq_ccpr.settings import add_options, read_options
from fairseq_ccpr.storage.fingerprint import short

TOKENS_HELP = """\
Build a token datastore: force-decode the sentence pairs of DATA_BIN with a trained model and keep, for every target
token, the decoder's state as its key.

  build_datastore.py tokens data-bin --path model.pt -s de -t en --output datastores/mine

--adapter clknn does more: it trains a small network on those keys by contrast (CLKNN) and stores its outputs as keys,
narrower, and trained for finding the right token. Decoding needs no other options for it.

Run the same command again after a kill and it resumes; on a finished datastore, another --index rebuilds only the index.
Several processes share the work: torchrun --nproc-per-node 4 scripts/build_datastore.py tokens ...
"""


PHRASES_HELP = """\
Build a phrase datastore from text of the target language alone: find the phrases of each sentence with a trained phrase
encoder and keep a vector of each and its place.

  build_datastore.py phrases mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --output datastores/mine
  build_datastore.py phrases mono.en.txt --encoder xpr/phrase-encoder/xpr.pt --segmentation lexicon:dictionary.tsv \
    --output datastores/types

With a CCPR encoder each phrase of each sentence is an entry. With an XPR encoder each string is one, its vector the mean
over all its sentences, of which the first is kept. XPR cannot tell phrases from other words, so give it a lexicon: FILE lists
phrases, one a line or separated by tabs. A dictionary of both languages serves for source sentences as well.

The text has a sentence a line, plain, .gz or .xz; the same sentence counts once. The output may hold a token part
already. Run the same command again after a kill and it resumes.

  build_datastore.py phrases mono.en.txt --encoder ccpr.pt --output datastores/mine --store http://localhost:19530

--store moves the keys to Milvus and keeps the rest in the folder, which is used as before. Credentials, user:password or
an API key, are taken from the URI or, better, from the environment variable MILVUS_TOKEN, where decoding looks for them too.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parser = argparse.ArgumentParser(prog="build_datastore.py", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, settings, of, description in (
        ("tokens", TokenBuildSettings, "from sentence pairs, for kNN-MT", TOKENS_HELP),
        ("phrases", PhraseBuildSettings, "from target-language text, for CCPR and XPR", PHRASES_HELP),
    ):
        part = parts.add_parser(name, help=of, description=description, formatter_class=HelpFormatter)
        add_options(part, settings)
    return parser


def build_tokens(settings: TokenBuildSettings) -> int:
    """Build, and print a summary."""
    settings.check()
    start = time.monotonic()
    with launched() as processes:
        build = build_token_datastore if settings.adapter == NO_ADAPTER else build_projected_datastore
        section, left_out = build(settings, processes)
        if processes.first:
            print(
                f"{settings.output}: {section.size:,} entries of width {section.dimension}, index {section.index}, "
                f"model {short(section.fingerprints['model'])}, {time.monotonic() - start:.0f} s"
            )
            if left_out:
                print(f"{left_out:,} sentences longer than the model takes were left out")
            if unknown := TokenDatastore(settings.output).count_unknown():
                print(f"{unknown:,} entries are of unknown tokens ({UNKNOWN}), which decoding passes over")
    return 0


def build_phrases(settings: PhraseBuildSettings) -> int:
    """Build, and print a summary."""
    settings.check()
    start = time.monotonic()
    with launched() as processes:
        report = build_phrase_datastore(settings, processes)
    if report is None:
        return 0
    section, lines = report.section, report.lines
    speed = f" ({report.encoded / report.seconds:.0f} sentences/s)" if report.encoded else ""
    print(
        f"{settings.output}: {section.size:,} phrases of {section.sentences:,} sentences "
        f"({section.size / section.sentences:.1f} a sentence), width {section.dimension}, index {section.index}, "
        f"encoder {short(section.fingerprints['encoder'])}, {time.monotonic() - start:.0f} s{speed}"
    )
    if lines.empty or lines.repeated:
        print(f"{lines.empty:,} empty lines and {lines.repeated:,} repeated sentences were left out")
    if report.too_long:
        print(f"{report.too_long:,} sentences longer than the encoder takes have no phrases")
    return 0


def main() -> None:
    """Parse, build, print."""
    options = make_parser().parse_args(own_arguments())
    if options.part == "tokens":
        run("build_datastore.py", lambda: build_tokens(read_options(TokenBuildSettings, options)))
    else:
        run("build_datastore.py", lambda: build_phrases(read_options(PhraseBuildSettings, options)))


if __name__ == "__main__":
    main()
