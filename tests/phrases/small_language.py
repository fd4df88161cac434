"""Sentence pairs of a small language, and the extraction of phrases from them."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

from fairseq_ccpr.phrases.alignment import SentencePair
from fairseq_ccpr.text.words import space_spans
from tests.helpers import call


def worded(source: str, target: str) -> SentencePair:
    return SentencePair(source, target, space_spans(source), space_spans(target))


LEXICON = {
    "hund": "dog", "katze": "cat", "maus": "mouse", "haus": "house", "garten": "garden", "baum": "tree", "sieht": "sees",
    "sucht": "seeks", "findet": "finds", "klein": "small", "gross": "big", "alt": "old",
}  # fmt: skip


def sentences(count: int) -> list[tuple[str, str]]:
    """Sentences that differ in word order: adjectives stand behind their nouns, verbs in the end."""
    chance = random.Random(1)
    nouns, verbs, adjectives = (list(LEXICON)[a:b] for a, b in ((0, 6), (6, 9), (9, 12)))
    made = []
    for _ in range(count):
        subject, thing = chance.sample(nouns, 2)
        verb, adjective = chance.choice(verbs), chance.choice(adjectives)
        english = f"the {LEXICON[adjective]} {LEXICON[subject]} {LEXICON[verb]} the {LEXICON[thing]}."
        made.append((f"der {subject} {adjective} der {thing} {verb}.".capitalize(), english.capitalize()))
    return made


def extract(text: Path, output: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command; in a text as small as this, every word is frequent."""
    words = ["--source", text / "text.de", "--target", text / "text.en", "--output", output, "--quiet"]
    if "--alignments" not in extra and "--aligner" not in extra:
        words += ["--aligner", "fast-align"]
    return call("extract", *words, "--max-edge-share", 0.15, *extra, check=check)


def refused(done: subprocess.CompletedProcess[str], *patterns: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    for pattern in ("error: ", *patterns):
        assert re.search(pattern, message), message
