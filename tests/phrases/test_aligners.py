"""Word alignment: by aligners, of a small language; from a file; and how its error is measured."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.lab.accuracy.alignment_error import measure, read_gold
from fairseq_ccpr.phrases.alignment import (
    ALIGNERS,
    ENCODER,
    SYMMETRIZATIONS,
    Aligner,
    AlignerOptions,
    SentencePair,
)
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from tests.helpers import call
from tests.phrases.small_language import LEXICON, extract, refused, sentences, worded


@pytest.mark.parametrize("name", [name for name in ALIGNERS if name != ENCODER])
def test_aligners_find_the_words_of_a_small_language(name: str, tmp_path: Path) -> None:
    gold_text, gold_links = [], []
    for source, target in sentences(20):
        tokens = source.replace(".", " .").lower().split(), target.replace(".", " .").lower().split()
        gold_text.append(" ||| ".join(" ".join(side) for side in tokens))
        pairs = itertools.product(enumerate(tokens[0], 1), enumerate(tokens[1], 1))
        gold_links.append(
            " ".join(f"{i}-{j}" for (i, left), (j, right) in pairs if LEXICON.get(left) == right)
        )
    (tmp_path / "gold").write_text("\n".join(gold_text) + "\n")
    (tmp_path / "links").write_text("\n".join(gold_links) + "\n")
    gold = read_gold(tmp_path / "gold", tmp_path / "links")
    pairs = [
        worded(source.replace(".", " ."), target.replace(".", " .")) for source, target in sentences(300)
    ]
    aligner = ALIGNERS[name](AlignerOptions("grow-diag-final-and"))
    aligner.train(pairs, show=False)
    assert measure(aligner, gold).recall > 0.95
    again = ALIGNERS[name](AlignerOptions("grow-diag-final-and"))
    again.train(iter(pairs), show=False)
    two = zip(aligner.align(pairs[:50]), again.align(pairs[:50]))
    assert all(np.array_equal(left, right) for left, right in two)


def test_every_symmetrization_is_known_and_they_differ(text: Path) -> None:
    pairs = [worded(source, target) for source, target in sentences(60)]
    aligner = ALIGNERS["fast-align"](AlignerOptions(SYMMETRIZATIONS[0]))
    aligner.train(pairs, show=False)
    counts = {}
    for aligner.symmetrization in SYMMETRIZATIONS:
        counts[aligner.symmetrization] = sum(map(len, aligner.align(pairs)))
    assert counts["intersection"] < counts["grow-diag-final-and"] <= counts["union"]


def test_ready_alignments_and_held_out_pairs(text: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "text.de").write_text("  das  Haus, alt \n\nein zwei\nmehr Haus\n")
    (ready / "text.en").write_text("the old house, \n\none two\nmore houses\n")
    (ready / "links").write_text("0-0 1-2 2-1\n\n0-0 1-1\n0-0 1-1\n")
    output = tmp_path / "phrases"
    done = extract(ready, output, "--alignments", ready / "links", "--valid", 1, "--max-edge-share", 1)
    assert "1 empty" in done.stdout
    train = PhrasePairs(output / "train")
    source, target = train.sentence(0)
    assert source == "  das  Haus, alt "
    found = {(source[a:b], target[c:d]) for _, a, b, c, d in train.pairs_of(0).tolist()}
    assert found == {
        ("das", "the"), ("Haus,", "house,"), ("alt", "old"), ("Haus, alt", "old house,"),
        ("das  Haus, alt", "the old house,"),
    }  # fmt: skip
    assert train.manifest.skipped == {"empty": 1} and train.manifest.settings["aligner"] == "ready"
    assert PhrasePairs(output / "valid").sentence(0) == ("mehr Haus", "more houses")
    short = extract(
        ready,
        tmp_path / "short",
        "--alignments",
        ready / "links",
        "--max-phrase-words",
        1,
        "--max-edge-share",
        1,
    )
    assert "| 7 |" in short.stdout
    extract(
        text,
        tmp_path / "held",
        "--valid-pairs",
        text / "text.tsv",
        "--valid",
        30,
        "--align-with",
        text / "text.tsv",
    )
    assert PhrasePairs(tmp_path / "held" / "valid").sentences == 30


def test_an_aligner_may_learn_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Diagonal(Aligner):
        def train(self, pairs: object, show: bool) -> None: ...

        def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
            sizes = [min(len(pair.source_words), len(pair.target_words)) for pair in pairs]
            return [np.repeat(np.arange(size)[:, None], 2, axis=1) for size in sizes]

    monkeypatch.setitem(ALIGNERS, "hmm", lambda options: Diagonal(options.symmetrization))
    extract(text, tmp_path / "phrases", "--aligner", "hmm")
    assert PhrasePairs(tmp_path / "phrases" / "train").sentences == 400


def test_missing_aligner_says_how_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "thot.alignment", None)
    refused(extract(text, tmp_path / "phrases", check=False), "pip install 'sil-thot>=3.5'")


def test_alignment_error_rate(text: Path, tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("das Haus ||| the house\nja ||| yes\n")
    (tmp_path / "links").write_text("1-1 2-2 1p2\n1-1\n")
    gold = read_gold(tmp_path / "gold", tmp_path / "links")

    class Fixed(Aligner):
        def train(self, pairs: object, show: bool) -> None: ...

        def align(self, pairs: object) -> list[np.ndarray]:
            return [np.array([[0, 0], [0, 1], [1, 0]], np.int32), np.empty((0, 2), np.int32)]

    counts = measure(Fixed("union"), gold)
    assert (counts.found, counts.sure, counts.found_sure, counts.found_possible) == (3, 3, 1, 2)
    assert counts.error_rate == pytest.approx(1 - 3 / 6)
    done = call(
        "evaluate alignment", tmp_path / "gold", tmp_path / "links", "--train", text / "text.tsv", "--quiet",
        "--aligners", "fast-align", "--train-count", 200,
    )  # fmt: skip
    assert (
        "| fast-align | grow-diag-final-and |" in done.stdout
        and "2 gold sentence pairs, 200 to learn from" in done.stdout
    )
    words = [tmp_path / "gold", tmp_path / "links", "--train", text / "text.tsv", "--train-count", 0]
    refused(call("evaluate alignment", *words, check=False), "--train-count is 0")
    for content, pattern in (
        ("1-1 2-3\n1-1\n", r"line 1: '2-3' is no link"),
        ("1-1\n", "gold has 2 lines"),
        ("1p1\n\n", "no sure"),
    ):
        (tmp_path / "links").write_text(content)
        arguments = [tmp_path / "gold", tmp_path / "links", "--train", text / "text.tsv"]
        refused(call("evaluate alignment", *arguments, check=False), pattern)
