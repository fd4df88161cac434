"""Phrases that were learned are found with the datastore's own as if built with them, the forgotten ones never."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.datastore.learned import LearnedStore, NewPair, PairPhrases, phrases_of_sentences
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.learned_memory import GrowingRows, LearnedPhrases, PhraseSegment
from fairseq_ccpr.decoding.phrase_candidates import lay_out, split_entries
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.decoding.phrase_votes import NO_TOKEN
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import Segmentation
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.live import JoinedIndex
from fairseq_ccpr.text.decoder_subwords import Pieces
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, write_lines
from tests.killing import ids_of, new_pair, store_at
from tests.small_models import Ccpr, World

CPU = torch.device("cpu")
SEGMENTATION = Segmentation("all", 0.5, 3)


@dataclass
class Divided:
    """A text whose phrases are built together, and the same whose second half is learned."""

    part: Path  # tokens, and phrases of the first half
    whole: Path  # phrases of all of it
    rest: list[NewPair]  # the second half, with the phrases that `whole` has of it
    queries: list[str]


@pytest.fixture(scope="module")
def divided(world: World, ccpr: Ccpr, mono: Path, tmp_path_factory: pytest.TempPathFactory) -> Divided:
    folder = tmp_path_factory.mktemp("divided")
    lines = list(dict.fromkeys(mono.read_text(encoding="utf-8").splitlines()))[:90]
    words = ["--encoder", ccpr.checkpoint, "--segmentation", "all", "--max-words", 3, "--cpu", "--quiet"]
    # the batches of both begin with the same sentences: keys are equal to the bit
    words += ["--chunk-sentences", 50]
    shutil.copytree(world.datastore, folder / "part")
    call("build phrases", write_lines(folder / "one.txt", *lines[:50]), *words, "--output", folder / "part")
    call("build phrases", write_lines(folder / "all.txt", *lines), *words, "--output", folder / "whole")
    whole = PhraseDatastore(folder / "whole")
    assert whole.keys is not None
    rest = []
    for number in range(50, 90):
        rows = whole.spans[:, 0] == number
        phrases = PairPhrases(np.array(whole.spans[rows, 1:]), np.array(whole.keys[rows]))
        token_keys = new_pair(number)
        rest.append(NewPair(f"Satz {number}", lines[number], token_keys.values, token_keys.keys, phrases))
    queries = [source for source, _ in list(read_pairs(world.folder / "test.tsv"))[:6]]
    return Divided(folder / "part", folder / "whole", rest, queries)


@pytest.fixture
def folder(divided: Divided, tmp_path: Path) -> Path:
    return Path(shutil.copytree(divided.part, tmp_path / "store"))


@pytest.fixture(scope="module")
def encoder(ccpr: Ccpr) -> PhraseEncoder:
    return PhraseEncoder.load(ccpr.checkpoint)


def retriever_of(folder: Path, encoder: PhraseEncoder, k: int = 3, least: float = 0.0) -> PhraseRetriever:
    return PhraseRetriever(PhraseDatastore(folder), encoder, SEGMENTATION, k, least, CPU)


def beside(folder: Path, store: LearnedStore | None = None) -> LearnedPhrases:
    return PhraseSegment(store or store_at(folder), PhraseDatastore(folder), CPU).update()


def without_ids(results: list[list[QueryPhrase]], entries: bool = True) -> list[object]:
    """What was found, but for the pairs that it comes from, and perhaps for the numbers of entries."""
    return [
        (query.string, query.start, [(one.entry if entries else 0, *one[1:6]) for one in query.retrieved])
        for of_sentence in results
        for query in of_sentence
    ]


@pytest.mark.parametrize(("k", "least"), [(1, 0.0), (5, -1.0), (90, 0.5)])
def test_both_together_are_one_datastore(
    divided: Divided, folder: Path, encoder: PhraseEncoder, k: int, least: float
) -> None:
    """Entries, strings, sentences and scores; of equal strings the best, of equal scores the first."""
    store = store_at(folder)
    ids = ids_of(store.learn(divided.rest))
    learned = beside(folder, store)
    found = retriever_of(folder, encoder, k, least).retrieve(divided.queries, learned)
    assert without_ids(found) == without_ids(
        retriever_of(divided.whole, encoder, k, least).retrieve(divided.queries)
    )
    each = [one for of_sentence in found for query in of_sentence for one in query.retrieved]
    own = PhraseDatastore(folder)
    texts = {number: pair.target for number, pair in zip(ids, divided.rest)}
    assert {bool(one.learned) for one in each} == {True, False}
    assert all((one.learned > 0) == (one.entry >= own.section.size) for one in each)
    assert all(texts[one.learned] == one.sentence for one in each if one.learned)


def test_what_was_forgotten_is_as_if_it_never_had_been_learned(
    divided: Divided, folder: Path, tmp_path: Path, encoder: PhraseEncoder, rng: np.random.Generator
) -> None:
    never = Path(shutil.copytree(folder, tmp_path / "never"))
    store, other = store_at(folder), store_at(never)
    segment = PhraseSegment(store, PhraseDatastore(folder), CPU)
    plain = retriever_of(folder, encoder).signature()
    ids = ids_of(store.learn(divided.rest[:20]))
    earlier = segment.update()
    keys = earlier.index.keys.clone()
    ids += ids_of(store.learn(divided.rest[20:]))
    gone = rng.permutation(len(ids))[:15]
    store.forget(ids[n] for n in gone)
    other.learn([one for n, one in enumerate(divided.rest) if n not in gone])
    retriever, learned, wanted = retriever_of(folder, encoder), segment.update(), beside(never, other)
    assert without_ids(retriever.retrieve(divided.queries, learned)) == without_ids(
        retriever_of(never, encoder).retrieve(divided.queries, wanted)
    )
    assert str(learned) == str(wanted) != str(earlier) and torch.equal(earlier.index.keys, keys)
    assert retriever.signature(learned=learned) == retriever.signature(learned=wanted) != plain
    store.forget(list(store.pairs))
    assert segment.update().empty and retriever.signature(learned=segment.update()) == plain
    assert without_ids(retriever.retrieve(divided.queries, segment.update())) == without_ids(
        retriever.retrieve(divided.queries)
    )


def test_what_has_moved_is_found_and_forgotten_as_before(
    divided: Divided, folder: Path, tmp_path: Path, encoder: PhraseEncoder, rng: np.random.Generator
) -> None:
    never = Path(shutil.copytree(folder, tmp_path / "never"))
    store, other = store_at(folder), store_at(never)
    ids = ids_of(store.learn(divided.rest))
    before = retriever_of(folder, encoder).retrieve(divided.queries, beside(folder, store))
    store.close()
    compact_datastore(CompactSettings(folder, cpu=True, quiet=True))
    retriever = retriever_of(folder, encoder)
    assert retriever.retrieve(divided.queries, beside(folder)) == before
    gone = rng.permutation(len(ids))[:25]
    store = store_at(folder)
    store.forget(ids[n] for n in gone)
    other.learn([one for n, one in enumerate(divided.rest) if n not in gone])
    found = retriever.retrieve(divided.queries, beside(folder, store))
    wanted = retriever_of(never, encoder).retrieve(divided.queries, beside(never, other))
    assert without_ids(found, entries=False) == without_ids(wanted, entries=False)
    texts = {number: pair.target for number, pair in zip(ids, divided.rest)}
    each = [one for of_sentence in found for query in of_sentence for one in query.retrieved if one.learned]
    assert each and all(texts[one.learned] == one.sentence for one in each)


def test_token_ids_of_both_are_those_of_one(divided: Divided, folder: Path) -> None:
    """Whichever way entries are mixed; words stand for the decoder's subwords."""

    class Words:
        """Subwords that are words, with the numbers that their letters give."""

        dictionary = SimpleNamespace(unk=lambda: -1)

        def split(self, text: str) -> Pieces:
            starts = [at for at in range(len(text)) if text[at] != " " and (not at or text[at - 1] == " ")]
            ends = [(text + " ").index(" ", at) for at in starts]
            return Pieces(tuple(10 * a + b for a, b in zip(starts, ends)), tuple(starts), tuple(ends))

    words: Any = Words()
    own, whole = PhraseDatastore(folder), PhraseDatastore(divided.whole)
    store = store_at(folder)
    store.learn(divided.rest)
    learned = beside(folder, store)
    one, two, both = (split_entries(part, words) for part in (own, learned, whole))
    for size in (0, 1, 300):
        entries = np.random.randint(whole.section.size, size=size)
        mine = learned.stored(entries)
        sources = [one(entries[mine]), two(entries[~mine] - own.section.size)]
        found = lay_out(np.stack([mine, ~mine]), sources)
        wanted = lay_out(np.ones((1, size), bool), [both(entries)])
        assert (
            all(map(np.array_equal, found, wanted))
            and ((found[0] != NO_TOKEN).sum(axis=1) == wanted[1]).all()
        )


def test_entries_of_sentences_are_all_of_theirs(divided: Divided) -> None:
    store = PhraseDatastore(divided.whole)
    for sentences in ([], [0], [89, 3, 4], list(range(90))):
        wanted = np.flatnonzero(np.isin(store.spans[:, 0], sentences))
        assert np.array_equal(phrases_of_sentences(store, sentences), wanted)


def test_two_indexes_are_searched_as_one(rng: np.random.Generator) -> None:
    for first, second in ((1, 1), (30, 5), (5, 30), (200, 300)):
        keys = torch.randint(-3, 3, (first + second, 4)).half()  # many of equal scores
        queries = torch.randint(-3, 3, (7, 4)).float()
        both = JoinedIndex(ExactIndex(keys[:first], "ip"), ExactIndex(keys[first:], "ip"))
        assert both.deepest == first + second
        for k in (1, 8, first + second):
            found, wanted = (
                both.search(queries, min(k, both.deepest)),
                ExactIndex(keys, "ip").search(queries, k),
            )
            assert all(map(torch.equal, found, (part[:, : both.deepest] for part in wanted)))


def test_keys_that_grow_leave_earlier_ones_alone(rng: np.random.Generator) -> None:
    grown, wanted = GrowingRows(torch.empty(0, 8).half()), np.empty((0, 8), np.float16)
    for size in (0, 3, 5000, 1, 9000):
        (earlier,), copy = grown.rows, grown.rows[0].clone()
        new = rng.standard_normal((size, 8)).astype(np.float16)
        grown.append(torch.from_numpy(new))
        wanted = np.concatenate([wanted, new])
        assert np.array_equal(grown.rows[0].numpy(), wanted) and torch.equal(earlier, copy)
