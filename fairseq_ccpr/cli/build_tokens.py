"""`fairseq-ccpr build tokens`: build a token datastore from sentence pairs, or from text of the target language."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from fairseq_ccpr.building.adapter_build import build_projected_datastore
from fairseq_ccpr.building.distributed import launched
from fairseq_ccpr.building.token_build import NO_ADAPTER, TokenBuildSettings, build_token_datastore
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.datastore.preprocessing import remember
from fairseq_ccpr.datastore.token import UNKNOWN, TokenDatastore
from fairseq_ccpr.inference.back_translation import back_translate, refuse_begun, tell_left_out
from fairseq_ccpr.inference.resources import preprocessing_for_build
from fairseq_ccpr.storage.fingerprint import short

HELP = """\
Build a token datastore: force-decode the sentence pairs of DATA_BIN with a trained model, and store one entry per target
token. The decoder's state is its key, the token its value.

  fairseq-ccpr build tokens data-bin --path model.pt --output datastores/mine

The datastore stores model, languages, dictionaries and subwords, so that later commands need no such options.

--adapter clknn also trains a small network on those states with a contrastive loss (CLKNN), and stores its outputs as
keys: narrower, and trained to find the right token. Decoding needs no further options.

--monolingual builds from text of the target language alone. A model of the opposite direction translates each sentence back,
and these pairs take the place of those of DATA_BIN, whose subwords and dictionaries are used:

  fairseq-ccpr build tokens data-bin --path model.pt --output mine --monolingual mono.txt --reverse-model reverse.pt

The folder back-translations of the datastore keeps the pairs: a table, pairs.tsv, and a DATA_BIN. Lines that are empty, too
long for the reverse model, or translated with nothing are left out and counted. fairseq-ccpr merge joins such a datastore
with one of pairs.

Run the same command again to resume an interrupted build. On a finished datastore, another --index rebuilds only the index.
Several processes share the work: torchrun --nproc-per-node 4 -m fairseq_ccpr build tokens ...
"""


def build_tokens(settings: TokenBuildSettings) -> int:
    """Build, and print a summary."""
    settings.check()
    preprocessing = preprocessing_for_build(
        settings.data_bin, Path(settings.path), settings.source_lang, settings.target_lang
    )
    settings = replace(settings, source_lang=preprocessing.source_lang, target_lang=preprocessing.target_lang)
    start = time.monotonic()
    with launched() as processes:
        if settings.monolingual:
            settings = replace(settings, pseudo_pairs=back_translate(settings, preprocessing, processes))
        else:
            refuse_begun(settings.output)
        build = build_token_datastore if settings.adapter == NO_ADAPTER else build_projected_datastore
        section, left_out = build(settings, processes)
        if processes.first:
            remember(preprocessing, settings.output)
            print(
                f"{settings.output}: {section.size:,} entries of width {section.dimension}, index {section.index}, "
                f"model {short(section.fingerprints['model'])}, {time.monotonic() - start:.0f} s"
            )
            if len(section.subsets) > 1:
                print(f"subsets: {', '.join(f'{name} {count:,} sentences' for name, count in section.subsets.items())}")
            if settings.pseudo_pairs and (told := tell_left_out(settings.pseudo_pairs.left_out)):
                print(told)
            if left_out:
                print(f"{left_out:,} sentences longer than the model takes were left out")
            if unknown := TokenDatastore(settings.output).count_unknown():
                print(f"{unknown:,} entries are of unknown tokens ({UNKNOWN}), which decoding passes over")
    return 0


main = command(HELP, build_tokens, TokenBuildSettings)
