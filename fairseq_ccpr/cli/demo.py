"""A first look: `fairseq-ccpr demo`."""

from __future__ import annotations

import shlex
from pathlib import Path

from sacrebleu.metrics import BLEU

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.evaluation.test_set import BASE, RETRIEVAL
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.timing import progress_bar

DEMO = Path(__file__).parent.parent / "demo"  # in a checkout, a link to datastores/demo


@command("""\
Translate twenty verses of the Bible with a small German-English model that was trained on software texts: without
retrieval, and with a small token datastore of other verses. Model, verses and datastore come with this package.

  fairseq-ccpr demo
""")
def demo() -> int:
    print("loading a German-English model of software texts, and a datastore of Bible verses ...", flush=True)
    words = ["--path", str(DEMO / "model.pt"), "--datastore", str(DEMO / "ready")]
    system = System.of([*words, "--beam", "2"])  # quick, as a first look should be
    sources, references = zip(*read_pairs(DEMO / "verses.tsv"))
    with progress_bar("translations", "sentence", total=2 * len(sources)) as bar:
        base, retrieval = (
            [one.text for one in system.translate(sources, bar.update, retrieve=retrieve)]
            for retrieve in (False, True)
        )
    for texts in zip(sources, base, retrieval, references):
        print()
        for name, text in zip(("source", BASE, RETRIEVAL, "reference"), texts):
            print(f"{name:10} {text}")
    before, after = (BLEU().corpus_score(found, [references]).score for found in (base, retrieval))
    print(f"""
BLEU is {before:.1f} for the model alone and {after:.1f} with retrieval. Read what retrieval writes against the source: so far
from the model's own texts, some of its sentences are fluent and say something else. The verses are from Mark 10, and the
datastore holds the 110 other verses that share most with them, so this is an easy case: bash scripts/demo.sh, in the
repository, translates 1,289 verses with a datastore of all others. Now a sentence of your own:

  echo 'Und Jesus segnete die Kinder.' | fairseq-ccpr translate {shlex.join(words)}""")
    return 0
