"""Phrase pairs and their example sentences: the search, the split, what is refused."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.lab.xpr.lexicon import Lexicon, LexiconCounts, draw, is_near_copy, split_pairs
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines, read_pairs
from fairseq_ccpr.text.words import word_spans
from tests.helpers import call, refused
from tests.small_models import Xpr

pytestmark = pytest.mark.full

SPLITS = "train", "valid", "test"


def plain_examples(lines: list[str], phrase: str, most: int) -> list[tuple[str, int, int]]:
    """Every sentence against the phrase: whole words, ten characters more, those of lowest digest, the first place."""
    found = {}
    for line in (line for line in lines if phrase in line):
        starts, ends = zip(*word_spans(line)) if line.strip() else ((), ())
        places = [
            (a, a + len(phrase))
            for a in starts
            if a + len(phrase) in ends and line[a : a + len(phrase)] == phrase
        ]
        if places and len(line) >= len(phrase) + 10:
            found[line] = places[0]
    return [(line, *found[line]) for line in sorted(found, key=digest)[:most]]


def test_examples_equal_a_brute_force_search(xpr: Xpr) -> None:
    for split, side in itertools.product(SPLITS, (0, 1)):
        types, lines = Lexicon(xpr.lexicon / split).sides[side], list(read_lines(xpr.texts[side]))
        for number in range(0, len(types), 7):
            stored = [types.example(number, place) for place in range(types.counts[number])]
            assert stored and stored == plain_examples(lines, types.phrases[number], 6)


def test_pairs_are_those_with_examples_and_no_string_is_in_two_splits(xpr: Xpr) -> None:
    lines = [list(read_lines(path)) for path in xpr.texts]
    wanted = {
        pair
        for pair in read_pairs(xpr.pairs)
        if not is_near_copy(*pair) and all(plain_examples(lines[side], pair[side], 1) for side in (0, 1))
    }
    found, strings = [], []
    for split in SPLITS:
        lexicon = Lexicon(xpr.lexicon / split)
        lexicon.check()
        found.append(
            {(lexicon.sides[0].phrases[p], lexicon.sides[1].phrases[q]) for p, q in lexicon.pairs.tolist()}
        )
        strings.append({string.casefold() for pair in found[-1] for string in pair})
    assert set().union(*found) == wanted and sum(map(len, found)) == len(wanted)
    assert not any(one & two for one, two in itertools.combinations(strings, 2))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60, unique=True))
def test_split_shares_no_string_and_loses_no_pair(numbers: list[tuple[int, int]]) -> None:
    # the case of a letter makes no other string
    pairs = [(f"a{p}", f"{'A' if q < 3 else 'b'}{q}") for p, q in numbers]
    parts = split_pairs(pairs)
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    assert parts == split_pairs(pairs[::-1])
    strings = [{string.casefold() for pair in part for string in pair} for part in parts.values()]
    assert not any(one & two for one, two in itertools.combinations(strings, 2))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40, unique=True), st.integers(1, 30)
)
def test_no_translation_is_lost_between_phrases_that_are_drawn(
    numbers: list[tuple[int, int]], limit: int
) -> None:
    pairs = [(f"a{p}", f"b{q}") for p, q in numbers]
    counts = LexiconCounts()
    chosen = draw(pairs, limit, counts)
    sources, targets = ({pair[side] for pair in chosen} for side in (0, 1))
    assert set(chosen) == {pair for pair in pairs if pair[0] in sources and pair[1] in targets}
    assert min(limit, len(pairs)) <= len(chosen) == len(pairs) - counts.not_drawn
    assert set(draw(pairs, max(1, limit // 2), LexiconCounts())) <= set(chosen)
    assert draw(pairs, None, counts) == pairs and counts.not_drawn == 0


@pytest.mark.parametrize(
    ("source", "target", "copy"),
    [
        ("a b c", "A b c", True),
        ("a b", "a c", False),
        ("a b c", "b c", True),
        ("a b", "b a", False),
        ("x", "y z", False),
    ],
)
def test_near_copies(source: str, target: str, copy: bool) -> None:
    assert is_near_copy(source, target) is copy


def build(
    xpr: Xpr, output: Path, pairs: str, text: str | None = None, *extra: object
) -> subprocess.CompletedProcess[str]:
    """Build a lexicon of other pairs, or other text on both sides."""
    table, other = output.with_suffix(".tsv"), output.with_suffix(".txt")
    table.write_text(pairs, encoding="utf-8")
    other.write_text(text or "", encoding="utf-8")
    texts = xpr.texts if text is None else (other, other)
    words = [
        "--pairs",
        table,
        "--source-text",
        texts[0],
        "--target-text",
        texts[1],
        "--output",
        output,
        *extra,
    ]
    return call("lexicon", *words, check=False)


TEXT = "\n".join(f"the quick {w} is here today" for w in "abcdefghijklmno") + "\n\n"
PAIRS = "".join(f"quick {w}\t{w} is\n" for w in "abcdefghijklmno")


def test_bad_pairs_are_counted(xpr: Xpr, tmp_path: Path) -> None:
    extra = "quick a\ta is\n\n...\tx\nquick Zebra\tquick zebra\nno such\ta is\nquick a\tis here\n"
    done = build(xpr, tmp_path / "one", PAIRS + extra, TEXT)
    assert done.returncode == 0, done.stderr
    assert (
        "21 phrase pairs: 2 without letters, 1 repeated and 1 near-copies left out; 1 without an example"
        in done.stdout
    )
    lexicons = [Lexicon(tmp_path / "one" / split) for split in SPLITS]
    assert sum(len(lexicon.pairs) for lexicon in lexicons) == 16  # one to many is kept
    kept = build(
        xpr, tmp_path / "two", PAIRS + extra, TEXT, "--keep-phrases-alone", "--limit", 17, "--examples", 40
    )
    assert kept.returncode == 0, kept.stderr
    sides = [side for split in SPLITS for side in Lexicon(tmp_path / "two" / split).sides]
    # fewer than asked for
    assert sorted({int(count) for side in sides for count in side.counts}) == [0, 1, 15]


def test_builds_that_are_refused_leave_nothing(xpr: Xpr, tmp_path: Path) -> None:
    refused(
        build(xpr, tmp_path / "a", PAIRS, "\n\n"),
        "leaves no phrase pair for 'train': 15 read.*15 without an example",
    )
    refused(build(xpr, tmp_path / "b", "a\tb\tc\n", TEXT), "3 columns")
    refused(build(xpr, tmp_path / "c", PAIRS, TEXT, "--examples", 0), "--examples is 0")
    refused(build(xpr, xpr.lexicon, PAIRS, TEXT), "--output .* exists")
    refused(build(xpr, tmp_path / "d", "", TEXT), "0 read")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    refused(
        build(xpr, tmp_path / "e", PAIRS, TEXT, "--source-text", tmp_path / "no"), "there is no file .*no"
    )


def test_a_lexicon_is_checked(xpr: Xpr, tmp_path: Path) -> None:
    with pytest.raises(
        DatastoreError, match=r"there are no lexicon phrases at .*give one of its folders, such as train"
    ):
        Lexicon(xpr.lexicon)
    with pytest.raises(DatastoreError, match="holds no lexicon phrases"):
        Lexicon(xpr.context.parent / "phrases" / "train")
