"""Entries in the decoder's subwords, written next to the datastore or cut out as needed: against cutting each by itself."""

from __future__ import annotations

import gc
import json
import logging
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fairseq_ccpr.datastore import written_subwords
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import digest_options
from fairseq_ccpr.datastore.written_subwords import DESCRIPTION, SUBWORDS_LOCK, of_store, open_or_write
from fairseq_ccpr.decoding.phrase_candidates import CutEntries, hash_tokens, lay_out, split_entries
from fairseq_ccpr.decoding.phrase_votes import MAX_SUBWORDS, NO_TOKEN
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords, Pieces, SplitSentences, as_rows, cut_phrases
from tests.small_models import World

UNKNOWN = 3

PIECES = st.lists(st.tuples(st.integers(3, 6), st.integers(0, 2), st.integers(0, 3)), max_size=9)


def pieces_of(steps: list[tuple[int, int, int]]) -> Pieces:
    """Subwords, each so far after the start of the one before, and so long; neither starts nor ends fall."""
    starts = np.cumsum([step for _, step, _ in steps], dtype=int)
    ends = np.maximum.accumulate(starts + [length for *_, length in steps]) if steps else starts
    return Pieces(tuple(i for i, *_ in steps), tuple(starts.tolist()), tuple(ends.tolist()))


@given(sentences=st.lists(PIECES, min_size=1, max_size=4))
def test_phrases_are_cut_together_as_each_alone(sentences: list[list[tuple[int, int, int]]]) -> None:
    subwords: Any = DecoderSubwords(None, None, Dictionary())
    assert subwords.dictionary.unk() == UNKNOWN
    pieces = [pieces_of(steps) for steps in sentences]
    split = SplitSentences.of([as_rows(one) for one in pieces])
    spans = [(n, a, b) for n in range(len(pieces)) for a in range(22) for b in range(a, 22)]
    random.shuffle(spans)
    cuts = cut_phrases(np.array(spans), split, UNKNOWN)
    for (number, start, end), first, length in zip(spans, *(part.tolist() for part in cuts)):
        wanted = subwords.slice(pieces[number], start, end)
        assert split.ids[first : first + length].tolist() == (wanted or [])


@pytest.fixture(scope="module")
def subwords(world: World) -> DecoderSubwords:
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(world.spm)))
    return DecoderSubwords(None, bpe, Dictionary.load(str(world.data_bin / "dict.en.txt")), model="spm")


@pytest.fixture
def store(phrase_store: Path, tmp_path: Path) -> PhraseDatastore:
    shutil.copytree(phrase_store, tmp_path / "store", ignore=shutil.ignore_patterns("subwords*"))
    return PhraseDatastore(tmp_path / "store")


def one_by_one(store: PhraseDatastore, subwords: DecoderSubwords, entries: np.ndarray) -> list[list[int]]:
    """The ids of each phrase."""
    found = []
    for number, start, end in store.spans[entries].tolist():
        pieces = subwords.split(store.sentence(number))
        ids = subwords.slice(pieces, start, end) or []
        found.append(ids if len(ids) <= MAX_SUBWORDS else [])
    return found


def check(cut: CutEntries, entries: np.ndarray, wanted: list[list[int]]) -> None:
    tokens, lengths = lay_out(np.ones((1, len(entries)), bool), [cut(entries)])
    hashes: dict[tuple[int, ...], int] = {}
    numbers = hash_tokens(tokens, lengths)
    for row, length, number, ids in zip(tokens, lengths, numbers, wanted, strict=True):
        assert row[:length].tolist() == ids and (row[length:] == NO_TOKEN).all()
        assert (number == 0) == (not ids) and hashes.setdefault(tuple(ids), number) == number
    assert len({*hashes.values()}) == len(hashes)


def read_entries(store: PhraseDatastore, subwords: DecoderSubwords) -> CutEntries:
    written = open_or_write(store, subwords, "spm") or pytest.fail()
    return lambda entries: (written.tokens, written.cuts(entries))


WAYS: dict[str, Callable[[PhraseDatastore, DecoderSubwords], CutEntries]] = {
    "written": read_entries,
    "split": split_entries,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("longest", [2, MAX_SUBWORDS])
def test_entries_are_what_each_would_be_alone(
    way: str, longest: int, store: PhraseDatastore, subwords: DecoderSubwords, rng: np.random.Generator
) -> None:
    with patch.object(written_subwords, "ROWS_PER_BLOCK", 37):
        cut = WAYS[way](store, subwords)
    with (
        patch("fairseq_ccpr.decoding.phrase_candidates.MAX_SUBWORDS", longest),
        patch(f"{__name__}.MAX_SUBWORDS", longest),
    ):
        for entries in (
            np.arange(store.section.size),
            *(rng.integers(0, store.section.size, n) for n in (0, 1, 300)),
        ):
            check(cut, entries, one_by_one(store, subwords, entries))
    lengths = cut(np.arange(store.section.size))[1].lengths
    assert (lengths == 0).any() and (lengths > 1).any()


def test_subwords_are_written_once_for_a_store_and_a_model(
    store: PhraseDatastore, subwords: DecoderSubwords, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def folders() -> list[str]:
        return [path.name for path in store.directory.glob("subwords-*")]

    open_or_write(store, subwords, "spm")
    [first] = folders()
    with patch.object(DecoderSubwords, "split_unchecked", side_effect=AssertionError):
        assert open_or_write(store, subwords, "spm") is not None
    assert [record.message.split(",")[0] for record in caplog.records] == [
        f"writing the phrases of {store.directory} in the subwords of the model"
    ]
    open_or_write(store, subwords, "another model")
    assert len(folders()) == 2 and first in folders()
    with patch.object(written_subwords, "SUBWORDS_VERSION", 99):
        open_or_write(store, subwords, "spm")
    assert len(folders()) == 1 and first not in folders()  # what was cut otherwise is of no use any more


def _shorten(folder: Path) -> None:
    with (folder / "first.npy").open("r+b") as stream:
        stream.truncate(200)


def _edit(folder: Path) -> None:
    path = folder / DESCRIPTION
    path.write_text(path.read_text().replace('"tokens": ', '"tokens": 1'))


@pytest.mark.parametrize(
    "damage",
    [_shorten, _edit, lambda folder: (folder / DESCRIPTION).write_text(json.dumps({"made_from": "x"}))],
)
def test_damaged_subwords_are_written_again(
    damage: Callable[[Path], object], store: PhraseDatastore, subwords: DecoderSubwords
) -> None:
    wanted = open_or_write(store, subwords, "spm")
    assert wanted is not None
    counts = np.array(wanted.counts)
    [folder] = store.directory.glob("subwords-*")
    damage(folder)
    found = open_or_write(store, subwords, "spm")
    assert found is not None and np.array_equal(found.counts, counts)
    assert sorted(path.name for path in store.directory.iterdir()) == sorted(
        ["manifest.json", "phrase", folder.name, SUBWORDS_LOCK]
    )


def test_folders_that_cannot_be_written_to_are_done_without(
    store: PhraseDatastore, subwords: DecoderSubwords, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (store.directory / SUBWORDS_LOCK).mkdir()  # what no permission would do to root
    assert open_or_write(store, subwords, "spm") is None
    assert "phrases are made subwords as they are retrieved" in caplog.text
    assert not [*store.directory.glob("subwords-*")]


def test_subwords_of_another_model_are_refused_and_not_kept(
    store: PhraseDatastore, subwords: DecoderSubwords
) -> None:
    few = Dictionary()
    for symbol in subwords.dictionary.symbols[4:200]:
        few.add_symbol(symbol)
    other = DecoderSubwords(None, subwords.scheme.bpe, few)
    with pytest.raises(
        ConfigurationError, match="of the pieces of retrieved sentences are not in the target dictionary"
    ):
        open_or_write(store, other, "spm")
    assert not [*store.directory.glob("subwords-*")]


def test_samples_of_a_store_are_another_store(store: PhraseDatastore) -> None:
    assert of_store(store) == of_store(store.sample(store.section.size)) != of_store(store.sample(20))


@pytest.mark.full
def test_memory_of_a_long_run_is_flat(
    store: PhraseDatastore, subwords: DecoderSubwords, rng: np.random.Generator
) -> None:
    """However many entries were looked up; without a bound it would grow with them."""
    batches = [rng.integers(0, store.section.size, 500) for _ in range(20)]
    with patch("fairseq_ccpr.decoding.phrase_candidates.KEPT_SENTENCES", 10):
        for way in WAYS:
            cut = WAYS[way](store, subwords)
            tracemalloc.start()
            try:
                held = []
                for some in (batches[:5], batches):
                    for entries in some:
                        cut(entries)
                    gc.collect()  # tuples that Python keeps for later
                    held.append(tracemalloc.get_traced_memory()[0])
                assert held[1] - held[0] < 10_000, way
            finally:
                tracemalloc.stop()


def test_subword_models_are_told_by_their_bytes(world: World, tmp_path: Path) -> None:
    copied = tmp_path / "copy.model"
    shutil.copy(world.spm, copied)
    one, same, other = (
        digest_options(OmegaConf.create({"_name": "sentencepiece", "sentencepiece_model": str(path)}))
        for path in (world.spm, copied, world.data_bin / "dict.en.txt")
    )
    assert one == same != other
    assert digest_options({"_name": "sentencepiece"}) is None
