"""Word alignment by a pretrained encoder: against plain references, and through the commands."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.alignment import (
    AlignerOptions,
    EncoderAligner,
    SentencePair,
    linked_words,
    words_of_subwords,
)
from fairseq_ccpr.phrases.pair_store import PhrasePairs, read_manifest
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import Subwords
from fairseq_ccpr.text.words import word_spans
from tests.helpers import DEMO, call, refused
from tests.small_models import random_context

VERSES = list(itertools.islice(read_pairs(DEMO / "bible.valid.tsv.xz"), 120))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny encoder of random weights."""
    random_context(VERSES, path := tmp_path_factory.mktemp("encoder") / "encoder")
    return path


def pair_of(source: str, target: str) -> SentencePair:
    return SentencePair(source, target, word_spans(source), word_spans(target))


def test_words_of_subwords() -> None:
    text = "Köln, 東京"
    subwords = Subwords(text, [0, 9, 9, 9, 9, 9, 2], [0, 0, 3, 5, 6, 6, 8], [0, 3, 5, 5, 6, 8, 8])
    assert [text[a:b] for a, b in word_spans(text)] == ["Köln", ",", "東", "京"]
    found = words_of_subwords(subwords, word_spans(text))
    assert [np.flatnonzero(row).tolist() for row in found] == [[], [0], [0, 1], [], [], [2, 3], []]
    assert words_of_subwords(subwords, []).shape == (7, 0)


def centred(states: np.ndarray, rows: list[int]) -> dict[int, np.ndarray]:
    """Directions of some rows, from their mean where they are several."""
    mean = np.mean([states[row] for row in rows], axis=0) if len(rows) > 1 else 0
    return {row: (states[row] - mean) / np.linalg.norm(states[row] - mean) for row in rows}


def test_links_equal_the_reference() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        n, m, words, others = rng.integers(1, 9, 4)
        # two of padding
        source, target = (torch.from_numpy(rng.normal(size=(size + 2, 4))).float() for size in (n, m))
        of_source, of_target = rng.random((n, words)) < 0.3, rng.random((m, others)) < 0.3
        wanted = set()
        rows, columns = np.flatnonzero(of_source.any(1)).tolist(), np.flatnonzero(of_target.any(1)).tolist()
        x, y = centred(source.double().numpy(), rows), centred(target.double().numpy(), columns)
        for i, j in itertools.product(rows, columns):
            best_of_row = max(columns, key=lambda c: x[i] @ y[c])
            best_of_column = max(rows, key=lambda r: x[r] @ y[j])
            if (best_of_row, best_of_column) == (j, i):
                wanted |= set(itertools.product(np.flatnonzero(of_source[i]), np.flatnonzero(of_target[j])))
        links = linked_words(source, target, of_source, of_target)
        assert links.dtype == np.int32 and [tuple(link) for link in links.tolist()] == sorted(wanted)


def test_a_sentence_is_aligned_with_itself_word_by_word(encoder: Path) -> None:
    aligner = EncoderAligner(AlignerOptions(encoder=encoder))
    pairs, tokenizer = [pair_of(source, source) for source, _ in VERSES], aligner.encoder.tokenizer
    apart = [words_of_subwords(tokenizer.encode(p.source), p.source_words).sum(1).max() == 1 for p in pairs]
    assert sum(apart) > 60
    for pair, links in zip(
        itertools.compress(pairs, apart), aligner.align(list(itertools.compress(pairs, apart)))
    ):
        assert links.tolist() == [[i, i] for i in range(len(pair.source_words))]


def test_batches_change_nothing_and_layers_do(encoder: Path) -> None:
    aligner = EncoderAligner(AlignerOptions(encoder=encoder))
    pairs = [pair_of("", "no"), *(pair_of(*verse) for verse in VERSES[:40])]
    together = aligner.align(pairs)
    assert together[0].shape == (0, 2) and min(map(len, together[1:])) > 0
    for pair, links in zip(pairs, together, strict=True):
        assert np.array_equal(aligner.align([pair])[0], links)
    assert aligner.layer == 1 and aligner.align([]) == []
    for layer in (0, 2):
        other = EncoderAligner(AlignerOptions(encoder=encoder, encoder_layer=layer)).align(pairs)
        assert not all(map(np.array_equal, other, together))


def test_words_beyond_the_encoder_have_no_links(encoder: Path) -> None:
    aligner = EncoderAligner(AlignerOptions(encoder=encoder))
    text = " ".join(source for source, _ in VERSES[:20])
    links = aligner.align([pair_of(text, text)])[0]
    cut = aligner.encoder.tokenizer.encode(text).cut(aligner.encoder.max_positions)
    reached = sum(start < cut.ends[-2] for start, _ in word_spans(text))
    assert 20 < reached < len(word_spans(text)) and set(links[:, 0].tolist()) == set(range(reached))


def test_phrases_by_an_encoder(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.tsv").write_text(
        "".join(f"{source}\t{target}\n" for source, target in VERSES), encoding="utf-8"
    )
    words = [
        "--pairs",
        tmp_path / "text.tsv",
        "--aligner",
        "encoder",
        "--encoder",
        encoder,
        "--max-edge-share",
        0.1,
    ]
    call("extract", *words, "--output", tmp_path / "one", "--quiet")
    call("extract", *words, "--encoder-layer", 2, "--output", tmp_path / "two", "--quiet")
    one, two = (read_manifest(tmp_path / name / "train") for name in ("one", "two"))
    assert one.fingerprints["encoder"] == ContextEncoder.load(encoder).fingerprint()
    assert one.settings["aligner"] == "encoder" and one.settings["symmetrization"] == "mutual-nearest"
    assert (one.settings["encoder_layer"], two.settings["encoder_layer"]) == (
        1,
        2,
    ) and "encoder" not in one.settings
    assert not np.array_equal(*(PhrasePairs(tmp_path / name / "train").pairs for name in ("one", "two")))


def test_evaluation_by_layer(encoder: Path, tmp_path: Path) -> None:
    text = "and God said , Let there be light"
    (tmp_path / "gold").write_text(f"{text} ||| {text}\n")
    (tmp_path / "links").write_text(" ".join(f"{i}-{i}" for i in range(1, 9)) + "\n")
    words = [tmp_path / "gold", tmp_path / "links", "--aligners", "encoder", "--quiet"]
    layers = ["--encoder", encoder, "--encoder-layers", 0, 2]
    shown = call("evaluate alignment", *words, *layers).stdout
    for layer in (0, 2):
        assert shown.count(f"| encoder, layer {layer} | mutual-nearest | 0.000 | 1.000 | 1.000 |") == 1
    words += ["--encoder", encoder, "--json", tmp_path / "aligned.json"]
    shown = call("evaluate alignment", *words).stdout
    written = json.loads((tmp_path / "aligned.json").read_text())
    assert "| encoder | mutual-nearest | 0.000 |" in shown and written["signature"] in shown
    assert f"encoder:{ContextEncoder.load(encoder).fingerprint()[:12]}|" in written["signature"]
    assert [(one["aligner"], one["error_rate"], one["recall"]) for one in written["results"]] == [
        ("encoder", 0, 1)
    ]


def test_options_that_cannot_work(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.tsv").write_text("ja\tyes\n")

    def fails(*extra: object) -> Any:
        words = ["--pairs", tmp_path / "text.tsv", "--output", tmp_path / "out", "--quiet", *extra]
        return call("extract", *words, check=False)

    refused(fails("--aligner", "encoder"), "--aligner encoder needs --encoder DIR")
    refused(fails("--aligner", "encoder", "--encoder", tmp_path / "no"), "there is no encoder .*no")
    layer = ["--aligner", "encoder", "--encoder", encoder, "--encoder-layer"]
    refused(fails(*layer, 3), "--encoder-layer is 3, but .* has 2 layers: give 0 to 2")
    refused(fails(*layer, -1), "--encoder-layer is -1")
    refused(fails("--encoder", encoder), "--encoder is for --aligner encoder")
    refused(fails("--aligner", "hmm", "--encoder-layer", 1), "--encoder-layer is for --aligner encoder")
    (tmp_path / "gold").write_text("ja ||| yes\n")
    (tmp_path / "links").write_text("1-1\n")
    words = ["evaluate alignment", tmp_path / "gold", tmp_path / "links"]
    refused(call(*words, check=False), "give --train, sentence pairs to learn from")
    refused(call(*words, "--encoder", encoder, check=False), "need --aligners encoder")
    assert not (tmp_path / "out").exists()
