"""`fairseq-ccpr build phrases`: build a phrase datastore from target-language text alone."""

from __future__ import annotations

import time

from fairseq_ccpr.building.distributed import launched
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings, build_phrase_datastore
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.storage.fingerprint import short

HELP = """\
Build a phrase datastore from text of the target language alone: find the phrases of each sentence with a trained phrase
encoder and keep a vector of each and its place.

  fairseq-ccpr build phrases mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --output datastores/mine
  fairseq-ccpr build phrases mono.en.txt --encoder xpr/phrase-encoder/xpr.pt --segmentation lexicon:dictionary.tsv \\
    --output datastores/types

With a CCPR encoder each phrase of each sentence is an entry. With an XPR encoder each string is one, its vector the mean
over all its sentences, of which the first is kept. XPR cannot tell phrases from other words, so give it a lexicon: FILE lists
phrases, one per line or separated by tabs. A dictionary of both languages serves for source sentences as well.

The text has a sentence per line, plain, .gz or .xz; the same sentence counts once. The output may hold a token part
already. Run the same command again to resume an interrupted build.

  fairseq-ccpr build phrases mono.en.txt --encoder ccpr.pt --output datastores/mine --store http://localhost:19530

--store moves the keys to Milvus and keeps the rest in the folder, which is used as before. Credentials, user:password or
an API key, are taken from the URI or, better, from the environment variable MILVUS_TOKEN, where decoding looks for them too.
"""


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
        f"({section.size / section.sentences:.1f} per sentence), width {section.dimension}, index {section.index}, "
        f"encoder {short(section.fingerprints['encoder'])}, {time.monotonic() - start:.0f} s{speed}"
    )
    if lines.empty or lines.repeated:
        print(f"{lines.empty:,} empty lines and {lines.repeated:,} repeated sentences were left out")
    if report.too_long:
        print(f"{report.too_long:,} sentences longer than the encoder reads were read in windows")
    return 0


main = command(HELP, build_phrases, PhraseBuildSettings)
