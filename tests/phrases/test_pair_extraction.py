"""Word alignment and phrase pairs: what is extracted, how it is stored, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import lzma
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.phrases.aligners import ALIGNERS, ENCODER
from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions, SentencePair
from fairseq_ccpr.phrases.alignment_error import measure, read_gold
from fairseq_ccpr.phrases.pair_extraction import consistent_pairs
from fairseq_ccpr.phrases.pair_filters import PairFilter, WordFilter, edge_rule
from fairseq_ccpr.phrases.pair_store import FILES, PhrasePairs
from fairseq_ccpr.phrases.statistical_aligners import SYMMETRIZATIONS
from fairseq_ccpr.text.words import space_spans, word_spans
from tests.helpers import call, edit_manifest, write_lines


def enumerate_pairs(source_size: int, target_size: int, links: set[tuple[int, int]], max_words: int) -> set[tuple]:
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


@settings(max_examples=300, deadline=None)
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
        (number, *box) for number, sentence in enumerate(sentences) for box in enumerate_pairs(*sentence, max_words)
    }
    assert found.dtype == np.int32
    assert [tuple(row) for row in found.tolist()] == sorted(expected)


def worded(source: str, target: str) -> SentencePair:
    return SentencePair(source, target, space_spans(source), space_spans(target))


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


def test_terms_of_a_domain_are_not_barred_and_function_words_may_begin() -> None:
    """Against judging each word by hand: 'document' is frequent in this text alone, 'the' in both, 'lord' in the other."""
    own = Counter({"the": 40, "document": 30, "of": 20, "lord": 5, "page": 5})
    other = Counter({"the": 50, "lord": 30, "of": 19, "document": 1})
    pair = worded("the document of the lord", "the document of the lord")
    boxes = np.array([[0, a, b, a, b] for a, b in itertools.combinations(range(6), 2)])

    def kept(background: list[Counter[str]], may_begin: bool) -> set[str]:
        sides = (WordFilter(own, 0.1, False, background, may_begin) for _ in range(2))
        words = pair.target.split()
        return {" ".join(words[a:b]) for _, a, b, _, _ in PairFilter(*sides)([pair], boxes).tolist()}

    assert kept([], False) == {"lord"}
    assert kept([other], False) == {"document", "document of the lord", "lord"}
    begun = {"the document", "of the lord", "the lord", "the document of the lord"}
    assert kept([other], True) == kept([other], False) | begun
    assert kept([other, Counter({"x": 1})], False) > kept([other], False)  # nothing is frequent in all three
    assert edge_rule({"max_edge_share": 0.003}) == "own>0.003"


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


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.de, text.en and text.tsv."""
    folder = tmp_path_factory.mktemp("text")
    pairs = sentences(400)
    (folder / "text.de").write_text("".join(f"{source}\n" for source, _ in pairs))
    (folder / "text.en").write_text("".join(f"{target}\n" for _, target in pairs))
    (folder / "text.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return folder


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


@pytest.mark.parametrize("name", [name for name in ALIGNERS if name != ENCODER])
def test_aligners_find_the_words_of_a_small_language(name: str, tmp_path: Path) -> None:
    gold_text, gold_links = [], []
    for source, target in sentences(20):
        tokens = source.replace(".", " .").lower().split(), target.replace(".", " .").lower().split()
        gold_text.append(" ||| ".join(" ".join(side) for side in tokens))
        pairs = itertools.product(enumerate(tokens[0], 1), enumerate(tokens[1], 1))
        gold_links.append(" ".join(f"{i}-{j}" for (i, left), (j, right) in pairs if LEXICON.get(left) == right))
    (tmp_path / "gold").write_text("\n".join(gold_text) + "\n")
    (tmp_path / "links").write_text("\n".join(gold_links) + "\n")
    gold = read_gold(tmp_path / "gold", tmp_path / "links")
    pairs = [worded(source.replace(".", " ."), target.replace(".", " .")) for source, target in sentences(300)]
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
        words = ["--pairs", tmp_path / name, "--output", tmp_path / f"out-{name}", "--aligner", "fast-align", "--quiet"]
        words += ["--max-edge-share", 0.15]
        call("extract", *words)
        for file in FILES:
            one, two = ((tmp_path / out / "train" / file).read_bytes() for out in ("plain", f"out-{name}"))
            assert one == two
    assert PhrasePairs(tmp_path / "out-text.tsv.gz" / "train").manifest.skipped == {"empty": 2}


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
        ready, tmp_path / "short", "--alignments", ready / "links", "--max-phrase-words", 1, "--max-edge-share", 1
    )
    assert "| 7 |" in short.stdout
    extract(
        text, tmp_path / "held", "--valid-pairs", text / "text.tsv", "--valid", 30, "--align-with", text / "text.tsv"
    )
    assert PhrasePairs(tmp_path / "held" / "valid").sentences == 30


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


def test_words_are_barred_by_texts_of_other_domains_and_the_manifest_says_so(text: Path, tmp_path: Path) -> None:
    """Of 'the' and 'der', the most frequent words, which the other text does not have."""
    other = write_lines(tmp_path / "other.tsv", "ein Hund\ta dog", "ein Baum\ta tree")

    def edges(name: str, *extra: object) -> tuple[set[str], dict[str, object], dict[str, str]]:
        extract(text, tmp_path / name, *extra)
        pairs = PhrasePairs(tmp_path / name / "train")
        first = {pairs.sentence(n)[1][c:d].split()[0].lower() for n, _, _, c, d in pairs.pairs[:400].tolist()}
        return first, pairs.manifest.settings, pairs.manifest.fingerprints

    first, settings, fingerprints = edges("own")
    assert "the" not in first and settings["frequent_in"] == "own" and "background" not in fingerprints
    first, settings, fingerprints = edges("general", "--background", other)
    assert "the" in first and settings["frequent_in"] == "general" and len(fingerprints["background"]) == 64
    first, settings, _ = edges("begin", "--frequent-may-begin")
    assert "the" in first and edge_rule(settings) == "own>0.15,begin"
    empty = write_lines(tmp_path / "empty.tsv", "\t")
    refused(extract(text, tmp_path / "no", "--background", empty, check=False), "empty.tsv has no sentence pair")


def test_bad_text_is_refused(text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(text, bad)
    output = tmp_path / "phrases"
    (bad / "text.en").write_text("one\ntwo\n")
    refused(extract(bad, output, check=False), r"text\.de has 400 lines and .*text\.en has 2")
    (bad / "text.en").write_bytes(b"one\n\xff\xfe\n")
    refused(extract(bad, output, check=False), r"text\.en, line 2: the bytes are not UTF-8")
    (bad / "text.en").write_text("\n" * 400)
    refused(extract(bad, output, check=False), "no sentence pair for 'train'.*400 empty")
    refused(extract(text, output, "--valid", 400, check=False), "no sentence pair for 'train'.*held out: 400")
    refused(
        extract(text, output, "--max-edge-share", 1e-9, check=False),
        "no phrase pair is left in 'train': .*--max-edge-share 1e-09",
    )
    refused(extract(text, output, "--max-edge-share", 0, check=False), "--max-edge-share is 0.0")
    refused(extract(text, output, "--max-phrase-words", 0, check=False), "--max-phrase-words is 0")
    refused(extract(text, output, "--max-words", 201, check=False), "up to 200 words")
    refused(extract(text, output, "--valid", 0, check=False), "--valid is 0")
    refused(extract(text, output, "--pairs", text / "text.tsv", check=False), "or as --pairs")
    refused(extract(text, text, check=False), "exists: give a new folder")
    refused(extract(tmp_path, output, check=False), r"there is no file .*text\.de")
    words = ["--source", bad, "--target", text / "text.en", "--output", output]
    refused(call("extract", *words, check=False), "bad is no regular file: .* not pipes")
    (bad / "text.tsv").write_text("one\ttwo\nthree\n")
    refused(
        call("extract", "--pairs", bad / "text.tsv", "--output", output, "--quiet", check=False),
        r"text\.tsv, line 2: 1 column,",
    )
    (bad / "text.tsv.xz").write_bytes(b"no archive")
    refused(
        call("extract", "--pairs", bad / "text.tsv.xz", "--output", output, "--quiet", check=False),
        r"text\.tsv\.xz is damaged",
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_bad_alignments_are_refused(text: Path, tmp_path: Path) -> None:
    output, links = tmp_path / "phrases", tmp_path / "links"

    def with_links(content: str, *extra: object) -> subprocess.CompletedProcess[str]:
        links.write_text(content)
        return extract(text, output, "--alignments", links, *extra, check=False)

    refused(
        with_links("0-0\n" * 399 + "0-6\n"), r"links, line 400: the link 0-6 points beyond .* 6 source and 6 target"
    )
    refused(with_links("0-0\n0:1\n" + "0-0\n" * 398), "links, line 2: '0:1' is no link")
    refused(with_links("0-0\n" * 3), r"links has fewer lines than .*text\.de")
    refused(with_links("0-0\n" * 401), r"text\.de has fewer lines than .*links")
    refused(with_links("0-0\n" * 400, "--valid-pairs", text / "text.tsv"), "leave out --valid-pairs")


def test_an_aligner_may_learn_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Diagonal(Aligner):
        def train(self, pairs: object, show: bool) -> None: ...

        def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
            sizes = [min(len(pair.source_words), len(pair.target_words)) for pair in pairs]
            return [np.repeat(np.arange(size)[:, None], 2, axis=1) for size in sizes]

    monkeypatch.setitem(ALIGNERS, "hmm", lambda options: Diagonal(options.symmetrization))
    extract(text, tmp_path / "phrases", "--aligner", "hmm")
    assert PhrasePairs(tmp_path / "phrases" / "train").sentences == 400


def test_missing_aligner_says_how_to_install(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thot.alignment", None)
    refused(extract(text, tmp_path / "phrases", check=False), "pip install 'sil-thot>=3.5'")


def test_store_refuses_what_is_not_whole(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "phrases"
    extract(text, output)
    train = output / "train"
    whole = (train / "manifest.json").read_bytes()

    def opening_fails(pattern: str, **changes: object) -> None:
        (train / "manifest.json").write_bytes(whole)
        edit_manifest(train, **changes)
        with pytest.raises(DatastoreError, match=pattern):
            PhrasePairs(train)

    opening_fails("format version 9.*upgrade", format_version=9)
    opening_fails("holds no phrase pairs", kind="else")
    opening_fails("names other files", files={})
    opening_fails("manifest says int32", size=1)
    (train / "manifest.json").write_text("[]")
    with pytest.raises(DatastoreError, match=r"manifest\.json is damaged"):
        PhrasePairs(train)
    (train / "manifest.json").write_bytes(whole)
    content = (train / "pairs.npy").read_bytes()
    (train / "pairs.npy").write_bytes(content[:-1] + b"x")
    with pytest.raises(DatastoreError, match=r"is damaged \(pairs\.npy: the bytes have changed"):
        PhrasePairs(train).check()
    (train / "pairs.npy").write_bytes(content[:-4])
    with pytest.raises(DatastoreError, match=r"pairs\.npy is damaged: .* bytes found"):
        PhrasePairs(train)
    with pytest.raises(DatastoreError, match="such as train"):
        PhrasePairs(output)
    with pytest.raises(DatastoreError, match="no phrase pairs at"):
        PhrasePairs(tmp_path / "nowhere")
    output.rename(tmp_path / "phrases.partial")
    with pytest.raises(DatastoreError, match="unfinished"):
        PhrasePairs(output)


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
        "--aligners", "fast-align", "--symmetrizations", "union", "intersection", "--train-count", 200,
    )  # fmt: skip
    assert "| fast-align | intersection |" in done.stdout and "2 gold sentence pairs, 200 to learn from" in done.stdout
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
