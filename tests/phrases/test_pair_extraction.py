"""Phrase pairs: what is extracted, by which options, and how it is stored."""

from __future__ import annotations

import gzip
import itertools
import lzma
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.phrases.pair_build import PairFilter, WordFilter, consistent_pairs
from fairseq_ccpr.phrases.pair_store import PAIR_FILES, PhrasePairs
from fairseq_ccpr.text.words import word_spans
from tests.helpers import call
from tests.phrases.small_language import LEXICON, extract, sentences, worded


def enumerate_pairs(
    source_size: int, target_size: int, links: set[tuple[int, int]], max_words: int
) -> set[tuple]:
    """The definition, box by box."""
    found = set()
    for a, c in itertools.product(range(source_size), range(target_size)):
        for b in range(a + 1, min(a + max_words, source_size) + 1):
            for d in range(c + 1, min(c + max_words, target_size) + 1):
                inside = [(a <= i < b, c <= j < d) for i, j in links]
                if (True, True) in inside and (True, False) not in inside and (False, True) not in inside:
                    found.add((a, b, c, d))
    return found


@st.composite
def alignments(draw: st.DrawFn) -> list[tuple[int, int, set[tuple[int, int]]]]:
    sentences = []
    for _ in range(draw(st.integers(1, 4))):
        n, m = draw(st.integers(1, 7)), draw(st.integers(1, 7))
        cells = st.tuples(st.integers(0, n - 1), st.integers(0, m - 1))
        sentences.append((n, m, draw(st.sets(cells, max_size=9))))
    return sentences


@given(alignments(), st.integers(1, 8))
def test_extraction_agrees_with_enumeration(
    sentences: list[tuple[int, int, set[tuple[int, int]]]], max_words: int
) -> None:
    links = [(number, i, j) for number, (_, _, links) in enumerate(sentences) for i, j in links]
    found = consistent_pairs(
        np.array([n for n, _, _ in sentences]),
        np.array([m for _, m, _ in sentences]),
        np.array(links, np.int32).reshape(-1, 3),
        max_words,
    )
    expected = {
        (number, *box)
        for number, sentence in enumerate(sentences)
        for box in enumerate_pairs(*sentence, max_words)
    }
    assert found.dtype == np.int32
    assert [tuple(row) for row in found.tolist()] == sorted(expected)


def test_filters_judge_edges_and_letters() -> None:
    frequencies = Counter({"the": 60, "of": 39, "house": 1})
    pair = worded("The 7 house .", "the 7 house .")
    boxes = [[0, a, b, a, b] for a, b in itertools.combinations(range(5), 2)]

    def kept(share: float, punctuation: bool) -> list[str]:
        word_filter = PairFilter(*(WordFilter(frequencies, share, punctuation) for _ in range(2)))
        words = pair.target.split()
        return [" ".join(words[a:b]) for _, a, b, _, _ in word_filter([pair], np.array(boxes)).tolist()]

    assert kept(0.39, False) == ["7 house", "house"]
    assert kept(0.60, False) == ["the", "the 7", "the 7 house", "7 house", "house"]
    assert kept(0.39, True) == ["7 house", "7 house .", "house", "house ."]


def test_phrases_of_a_text(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "phrases"
    done = extract(text, output, "--valid", 50, "-s", "de", "-t", "en", "--aligner", "eflomal")
    assert "| 350 |" in done.stdout
    train, valid = PhrasePairs(output / "train"), PhrasePairs(output / "valid")
    assert (train.sentences, valid.sentences) == (350, 50)
    assert [valid.sentence(i) for i in range(50)] == sentences(400)[350:]
    assert train.manifest.source_lang == "de" and train.manifest.name == "phrases"
    assert train.size == sum(len(train.pairs_of(i)) for i in range(350)) == len(train.pairs)
    train.check()
    right = Counter()
    for number, a, b, c, d in train.pairs.tolist():
        source, target = train.sentence(number)
        ends = (
            {end for span in word_spans(source) for end in span},
            {end for span in word_spans(target) for end in span},
        )
        assert {a, b} <= ends[0] and {c, d} <= ends[1]
        assert source[a:b].strip() == source[a:b] and target[c:d].strip() == target[c:d]
        if source[a:b] in LEXICON:
            right[LEXICON[source[a:b]] == target[c:d]] += 1
    assert right[True] > 20 * right[False]
    rows = train.pairs.tolist()
    assert rows == sorted(rows)
    assert all((train.pairs_of(i)[:, 0] == i).all() for i in range(350))


def test_all_forms_of_input_give_the_same(text: Path, tmp_path: Path) -> None:
    content = (text / "text.tsv").read_bytes()
    (tmp_path / "text.tsv.xz").write_bytes(lzma.compress(content))
    head, _, rest = content.partition(b"\n")
    (tmp_path / "text.tsv.gz").write_bytes(gzip.compress(head + b"\n\n \n" + rest))  # empty lines are skipped
    extract(text, tmp_path / "plain")
    for name in ("text.tsv.xz", "text.tsv.gz"):
        words = [
            "--pairs",
            tmp_path / name,
            "--output",
            tmp_path / f"out-{name}",
            "--aligner",
            "fast-align",
            "--quiet",
        ]
        words += ["--max-edge-share", 0.15]
        call("extract", *words)
        for file in PAIR_FILES:
            one, two = ((tmp_path / out / "train" / file).read_bytes() for out in ("plain", f"out-{name}"))
            assert one == two
    assert PhrasePairs(tmp_path / "out-text.tsv.gz" / "train").manifest.skipped == {"empty": 2}


def test_options_change_the_result(text: Path, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"  # on clean text all aligners agree
    shutil.copytree(text, noisy)
    lines = (text / "text.en").read_text().splitlines(keepends=True)
    (noisy / "text.en").write_text("".join(lines[:100] + lines[200:] + lines[100:200]))

    def size(name: str, *extra: object) -> int:
        extract(noisy, tmp_path / name, *extra)
        return PhrasePairs(tmp_path / name / "train").size

    plain = size("plain")
    assert size("aligner", "--aligner", "hmm") != plain
    assert size("symmetrization", "--symmetrization", "intersection") != plain
    assert size("short", "--max-phrase-words", 2) < plain
    assert size("share", "--max-edge-share", 0.05) != plain
    assert size("edges", "--punctuation-edges", "--max-edge-share", 1) > plain
    assert size("with", "--align-with", text / "text.tsv") != plain
    (tmp_path / "some").mkdir()
    shutil.copy(text / "text.de", tmp_path / "some")
    (tmp_path / "some" / "text.en").write_text("one two three.\n" + "a b c d e f g.\n" * 399)
    extract(tmp_path / "some", tmp_path / "words", "--max-words", 7, "--max-edge-share", 1)
    assert PhrasePairs(tmp_path / "words" / "train").manifest.skipped == {"too long": 399}
