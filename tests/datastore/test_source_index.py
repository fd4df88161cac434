"""The source sentences of a datastore: their likeness against a plain formula, and where they are after any rewriting."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.building.token_build import load_task
from fairseq_ccpr.datastore import parts, source_index
from fairseq_ccpr.datastore.manifest import SourceIndexDescription
from fairseq_ccpr.datastore.source_index import SentenceMemory, SourceIndex, write_source_index
from fairseq_ccpr.datastore.token import TokenDatastore
from tests.helpers import call
from tests.small_models import World, build

WORDS, UNKNOWN = 40, 3
NOTHING = np.empty(0, np.int64)
SOURCES = [one.file for one in parts.SOURCE_FILES]


def texts(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Sentences of frequent and rare subwords, unknown ones among them, one of nothing and some that repeat words."""
    lengths = rng.integers(1, 12, count)
    lengths[count // 2] = 0
    return [np.minimum(rng.geometric(0.12, n) + 2, WORDS - 1).astype(np.int32) for n in lengths]


def written(folder: Path, sentences: dict[int, np.ndarray], rng: np.random.Generator) -> SourceIndex:
    """Write an index of sentences that have one to five entries each."""
    folder.mkdir()
    places = [(number, place) for number in sentences for place in range(rng.integers(1, 6))]
    provenance = np.array(places, np.int32).reshape(-1, 2)
    described = write_source_index(folder, sentences.items(), provenance, WORDS, UNKNOWN)
    index = SourceIndex(folder, described)
    assert not index.find_damage(len(provenance))
    for number, source in sentences.items():
        assert index.source(number).tolist() == source.tolist()
        assert (
            index.entries(np.array([number])).tolist() == np.flatnonzero(provenance[:, 0] == number).tolist()
        )
    return index


def plain(
    source: np.ndarray, stored: dict[int, np.ndarray], learned: list[np.ndarray], gone: set[int], size: int
) -> list[float]:
    """BM25 as it is written, in float64."""
    counts = {number: Counter(one.tolist()) for number, one in stored.items() if number not in gone}
    everything = [*counts.values(), *(Counter(one.tolist()) for one in learned)]
    total = len(everything)
    lengths = [len(one) for one in stored.values()] or [len(one) for one in learned]
    mean = max(1.0, sum(lengths) / max(len(lengths), 1))

    def idf(word: int) -> float:
        frequency = sum(word in one for one in everything)
        if word == UNKNOWN or frequency > max(source_index.FEW_SENTENCES, source_index.COMMON * total):
            return 0.0
        return math.log(1 + (total - frequency + 0.5) / (frequency + 0.5))

    def score(sentence: Counter[int]) -> float:
        length = sum(sentence.values())
        return sum(
            idf(w) * sentence[w] * 2.2 / (sentence[w] + 1.2 * (0.25 + 0.75 * length / mean))
            for w in {*source.tolist()}
        )

    perfect = score(Counter(source.tolist()))
    own = [score(counts[n]) if n in counts else 0.0 for n in range(size)]
    found = [*own, *(score(Counter(one.tolist())) for one in learned)]
    return [min(1.0, one / perfect) if perfect else 0.0 for one in found]


@pytest.mark.parametrize("few", [1000, 3], ids=["all", "common subwords are no terms"])
@pytest.mark.parametrize("stored", [0, 1, 300])
def test_likeness_is_bm25(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stored: int, few: int
) -> None:
    """With numbers that have no sentence, sentences that were learned, and some that do not count."""
    monkeypatch.setattr(source_index, "FEW_SENTENCES", few)
    monkeypatch.setattr(source_index, "SORTED_ROWS", 50)
    numbers = np.sort(rng.choice(2 * stored + 1, stored, replace=False)).tolist()
    sentences = dict(zip(numbers, texts(rng, stored))) if stored else {}
    index, learned = written(tmp_path / "index", sentences, rng), texts(rng, 7)
    size = index.described.sentences
    gone = np.array(numbers[::5], np.int64)
    for several, left_out in (([], NOTHING), (learned, NOTHING), (learned, gone)):
        memory = SentenceMemory(index, several, left_out)
        sources = [*texts(rng, 20), *learned, np.array([UNKNOWN], np.int32), np.array([WORDS + 5], np.int32)]
        sims, best = memory.likeness(sources)
        assert sims.shape == (len(sources), size + len(several))
        wanted = [plain(source, sentences, several, {*left_out.tolist()}, size) for source in sources]
        np.testing.assert_allclose(sims, np.array(wanted).reshape(sims.shape), atol=2e-3)
        np.testing.assert_array_equal(best, sims.max(axis=1, initial=0.0))
        for place in range(len(several)):  # a sentence is like itself, unless it has no terms
            assert sims[20 + place, size + place] == pytest.approx(1.0, abs=2e-3) or not best[20 + place]


def test_blocks_of_any_size_write_the_same(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = dict(enumerate(texts(rng, 200)))
    written(tmp_path / "one", sentences, np.random.default_rng(1))
    for block in (1, 60):
        monkeypatch.setattr(source_index, "SORTED_ROWS", block)
        written(tmp_path / f"{block}", sentences, np.random.default_rng(1))
        for name in SOURCES:
            assert (tmp_path / f"{block}" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


def test_sentences_are_found_by_their_sources(tmp_path: Path, rng: np.random.Generator) -> None:
    one, two = np.array([5, 6, UNKNOWN], np.int32), np.array([6, 5], np.int32)
    index = written(tmp_path / "index", {2: one, 3: two, 7: one}, rng)
    hashes = [source_index.hash_source(source.tolist()) for source in (one, two, two[:1])]
    found = index.find(hashes)
    assert {name: numbers.tolist() for name, numbers in found.items()} == {hashes[0]: [2, 7], hashes[1]: [3]}
    assert [number for number, _ in index.sources()] == [2, 3, 7]


def test_damage_is_found(tmp_path: Path, rng: np.random.Generator) -> None:
    index = written(tmp_path / "index", dict(enumerate(texts(rng, 30))), rng)
    entries = int(index.sentences[-1, 0])
    assert index.find_damage(entries + 1)
    for name, value in ((parts.POSTINGS, 99), (parts.FIRSTS, -5), (parts.PLACES, 9999)):
        array = np.load(tmp_path / "index" / f"{name}.npy")
        array[3] = value
        broken = SourceIndex(tmp_path / "index", index.described)
        setattr(broken, {"postings-first": "firsts"}.get(name, name), array)
        assert any(name in fault for fault in broken.find_damage(entries)), name


def sources_are_true(folder: Path, world: World) -> int:
    """Check that the sentences' sources are those of their targets in the data; returns how many sentences there are."""
    task = load_task(world.data_bin, "de", "en")
    pairs: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for subset in ("train", "valid", "test"):
        task.load_dataset(subset)
        dataset = task.dataset(subset)
        for place in range(len(dataset)):
            item = dataset[place]
            pairs.add((tuple(task.source_subwords(item["source"]).tolist()), tuple(item["target"].tolist())))
    store = TokenDatastore(folder)
    index = store.source_index
    assert index is not None and not store.find_damage()
    numbers = np.unique(store.provenance[:, 0])
    assert [number for number, _ in index.sources()] == numbers.tolist() and index.described.known == len(
        numbers
    )
    for number, source in index.sources():
        entries = index.entries(np.array([number]))
        assert (store.provenance[entries, 0] == number).all()
        assert (tuple(source.tolist()), tuple(store.values[entries].tolist())) in pairs
    return len(numbers)


def test_sentences_stay_true_in_stores_of_every_origin(world: World, tmp_path: Path) -> None:
    small = ["--chunk-tokens", 300, "--subset", "valid", "test"]
    for name, *words in (
        ("whole", *small), ("valid", "--subset", "valid"), ("part", *small, "--fraction", 0.4),
        *((f"shard{shard}", *small, "--num-shards", 2, "--shard-id", shard) for shard in (0, 1)),
    ):  # fmt: skip
        build(world, tmp_path / name, *words)
    counts = {
        name: sources_are_true(tmp_path / name, world)
        for name in ("whole", "valid", "part", "shard0", "shard1")
    }
    assert 0 < counts["part"] < counts["whole"] == counts["shard0"] + counts["shard1"]
    for output, total, *words in (
        ("joined", counts["whole"], tmp_path / "shard0", tmp_path / "shard1"),
        (
            "both",
            sources_are_true(world.datastore, world) + counts["valid"],
            f"a={world.datastore}",
            tmp_path / "valid",
        ),
        ("rest", counts["valid"], tmp_path / "both", "--remove", "a"),
    ):
        call("merge", *words, "--output", tmp_path / output, "--quiet", "--index", "exact")
        assert sources_are_true(tmp_path / output, world) == total


def test_descriptions_are_read_again(world: World) -> None:
    described = TokenDatastore(world.datastore).section.source_index
    assert isinstance(described, SourceIndexDescription) and described.postings > described.known > 0
