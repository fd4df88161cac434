"""The counts of a text: their probabilities, how they are built, and what is refused."""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from nltk.lm.models import InterpolatedLanguageModel
from nltk.lm.smoothing import WittenBell
from nltk.util import everygrams

from fairseq_ccpr.building import text_build
from fairseq_ccpr.building.text_build import Vocabulary, build_text_part, merge
from fairseq_ccpr.datastore import text
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.parts import COUNTS
from fairseq_ccpr.datastore.text import ORDER, Counts, Hashes, TextDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import index_plan
from tests.helpers import call, contents, write_lines

END, UNKNOWN, WORDS = 2, 3, 40


def vocabulary(digest: str = "a") -> Vocabulary:
    """Lines of numbers are the tokens themselves."""
    encode = lambda line: torch.tensor([*map(int, line.split()), END])  # noqa: E731
    return Vocabulary(encode, WORDS, END, UNKNOWN, digest)


def sentences(rng: np.random.Generator, count: int, most: int = 12) -> list[str]:
    """Sentences of few different tokens, so that contexts of all lengths occur again."""
    return [
        " ".join(map(str, 4 + rng.geometric(0.3, rng.integers(1, 12)).clip(max=most))) for _ in range(count)
    ]


@pytest.fixture
def texts(rng: np.random.Generator, tmp_path: Path) -> tuple[Path, Path]:
    lines = sentences(rng, 300)
    return write_lines(tmp_path / "own", *lines, "", lines[0]), write_lines(
        tmp_path / "general", *sentences(rng, 300, 20)
    )


def counts_of(texts: tuple[Path, Path], output: Path, general: bool = True) -> Counts:
    build_text_part([texts[0]], [texts[1]] if general else [], output, vocabulary(), quiet=True)
    return TextDatastore(output).open_counts()


class Reference:
    """Interpolated Witten-Bell over dictionaries, context by context, of a text or of general text after its contexts."""

    def __init__(self, path: Path, contexts: set[tuple[int, ...]] | None = None) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for line in dict.fromkeys(path.read_text().splitlines()):
            tokens = [END, *map(int, line.split()), END]
            for place in range(1, len(tokens) if line else 0):
                for size in range(min(ORDER - 1, place) + 1):
                    context = tuple(tokens[place - size : place])
                    if contexts is None or context in contexts:
                        self.counts[context][tokens[place]] += 1

    def probability(self, history: list[int], token: int, longest: int) -> float:
        p = 1 / WORDS
        for size in range(longest + 1):
            seen = self.counts.get(tuple(history[len(history) - size :]), Counter())
            if seen:
                p = (seen[token] + len(seen) * p) / (seen.total() + len(seen))
        return p

    def longest(self, history: list[int]) -> int:
        sizes = range(min(ORDER - 1, len(history)) + 1)
        return next(
            (size - 1 for size in sizes if tuple(history[len(history) - size :]) not in self.counts),
            sizes[-1],
        )


def histories(rng: np.random.Generator, length: int) -> torch.Tensor:
    last = 4 + rng.geometric(0.3, (20, length - 1)).clip(max=13)
    return torch.from_numpy(np.concatenate([np.full((20, 1), END), last], 1))


def test_probabilities_are_those_of_the_formula(
    rng: np.random.Generator, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    counts, own = counts_of(texts, tmp_path / "store"), Reference(texts[0])
    general = Reference(texts[1], set(own.counts))
    for length in (1, 2, 3, 6):
        hypotheses = histories(rng, length)
        rows = torch.arange(20).repeat_interleave(WORDS)
        found = counts.look_up(hypotheses, rows, torch.arange(WORDS).repeat(20))
        # over the vocabulary
        torch.testing.assert_close(found.text.exp().view(20, -1).sum(1), torch.ones(20))
        torch.testing.assert_close(found.general.exp().view(20, -1).sum(1), torch.ones(20))
        for row, history in enumerate(hypotheses.tolist()):
            longest = own.longest(history)
            assert int(found.length[row]) == longest
            after = own.counts[tuple(history[len(history) - longest :])]
            assert found.seen[row].tolist() == [after.total(), len(after)]
            for token in (4, 5, 9, 30, END):
                for said, reference in ((found.text, own), (found.general, general)):
                    expected = reference.probability(history, token, longest)
                    assert float(said[row * WORDS + token].exp()) == pytest.approx(expected, rel=1e-5)


def test_a_gpu_needs_room_for_a_text(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` is a device of tensors without numbers."""
    counts, store = counts_of(texts, tmp_path / "store"), TextDatastore(tmp_path / "store")
    elsewhere, needed = torch.device("meta"), store.counted_bytes
    kept = counts.contexts.hashes, counts.contexts.index, counts.following, counts.grams, counts.counts
    assert needed == sum(one.nbytes for one in kept)
    planned = call("inspect", tmp_path / "store", "--plan").stdout
    assert (
        f"text of {store.section.size:,} tokens: at most {needed / 1e9:,.4g} GB in memory, mapped, "
        in planned
    )

    def with_free(free: float) -> Counts:
        monkeypatch.setattr(index_plan, "free_bytes", lambda _: free / index_plan.SHARE)
        return store.open_counts(elsewhere)

    moved = with_free(needed + 1)  # no keys are searched, whose scores would take more
    assert moved.grams.device == moved.counts.device == elsewhere
    assert moved.counts.dtype == moved.following.dtype == torch.int32  # as many bytes
    with pytest.raises(
        ConfigurationError, match=r"the text of .*store takes .* GB of the GPU, which has .* GB"
    ):
        with_free(needed - 1)
    store.arrays[COUNTS] = large = np.array(store.arrays[COUNTS])
    large[0, 0] = 2**31  # which int32 has no room for
    with pytest.raises(ConfigurationError, match=r"the text of .*store takes"):
        with_free(needed + large.nbytes - 1)
    assert with_free(needed + large.nbytes + 1).counts.dtype == torch.int64
    assert store.open_counts().grams.device == torch.device("cpu")  # which pages it in


def test_counts_of_a_gpu_say_the_same(
    rng: np.random.Generator, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Which takes no uint32; too large a count is wider."""
    counts = counts_of(texts, tmp_path / "store")
    given = histories(rng, 4), torch.arange(20).repeat_interleave(WORDS), torch.arange(WORDS).repeat(20)
    for factor, dtype in ((1, torch.int32), (2**24, torch.int64)):
        signed = copy.copy(counts)
        for name in ("following", "counts"):
            numbers = (getattr(counts, name).long() * factor).clamp_max(2**32 - 1)
            setattr(counts, name, torch.from_numpy(numbers.numpy().astype(np.uint32)))
            setattr(signed, name, text._signed(getattr(counts, name)))
            assert torch.equal(getattr(signed, name).long(), numbers)
        assert signed.counts.dtype == signed.following.dtype == dtype
        found = counts.look_up(*given)
        assert found.text.isfinite().all() and all(map(torch.equal, signed.look_up(*given), found))


def test_perplexity_is_that_of_nltk(
    rng: np.random.Generator, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Which gives unigrams their relative frequency: interpolated with 1 / V here, as longer ones are with shorter."""
    lines = list(dict.fromkeys(texts[0].read_text().splitlines()))
    tokens = [[END, *map(int, line.split()), END] for line in lines if line]
    begun = [["<s>", *map(str, sentence[1:])] for sentence in tokens]

    seen = Counter(one for sentence in begun for one in sentence[1:])

    class Smoothed(WittenBell):
        def unigram_score(self, word: str) -> float:
            return (seen[word] + len(seen) / WORDS) / (seen.total() + len(seen))

    model = InterpolatedLanguageModel(Smoothed, ORDER)
    grams = [list(everygrams(sentence, max_len=ORDER)) for sentence in begun]
    model.fit(
        [[gram for gram in one if gram != ("<s>",)] for one in grams],
        vocabulary_text=["<s>", *map(str, range(WORDS))],
    )
    counts, total, expected = counts_of(texts, tmp_path / "store", general=False), 0.0, 0.0
    for sentence in begun[:25]:
        numbers = [END, *map(int, sentence[1:])]
        for place in range(1, len(sentence)):
            context = sentence[max(0, place - ORDER + 1) : place]
            expected += math.log(model.unmasked_score(sentence[place], tuple(context)))
            history = torch.tensor([numbers[:place]])
            total += float(counts.look_up(history, torch.tensor([0]), torch.tensor([numbers[place]])).text)
    assert total == pytest.approx(expected, rel=1e-5)


def test_lookups_are_those_of_a_dictionary(rng: np.random.Generator) -> None:
    hashes = np.unique(rng.integers(-(2**63), 2**63 - 1, 3000))
    hashes[:50] = hashes[0] + np.arange(50)  # of one prefix
    hashes = np.unique(hashes)
    found = Hashes.of(hashes)
    asked = np.concatenate([hashes, hashes + 1, [-(2**63), 2**63 - 1, 0]])
    known = {one: place for place, one in enumerate(hashes.tolist())}
    assert found.find(torch.from_numpy(asked)).tolist() == [known.get(one, -1) for one in asked.tolist()]


def test_chunks_and_ranges_change_nothing(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts_of(texts, tmp_path / "whole")
    monkeypatch.setattr(text_build, "CHUNK_SENTENCES", 37)
    monkeypatch.setattr(text_build, "MERGED_ROWS", 500)
    counts_of(texts, tmp_path / "parts")
    one, other = (contents(tmp_path / name / "text") for name in ("whole", "parts"))
    assert one == other
    section = TextDatastore(tmp_path / "whole").section
    assert section.sentences == len(set(texts[0].read_text().split("\n")) - {""})  # equal ones once
    assert not TextDatastore(tmp_path / "whole").find_damage()


def test_a_killed_build_resumes(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_build, "CHUNK_SENTENCES", 50)
    counts_of(texts, tmp_path / "whole")
    save = text_build.save_array
    for _ in range(8):
        saved: list[Path] = []

        def kill(path: Path, array: np.ndarray, saved: list[Path] = saved) -> None:
            saved.append(path)
            if len(saved) == 5:
                raise KeyboardInterrupt
            save(path, array)

        with monkeypatch.context() as patch:
            patch.setattr(text_build, "save_array", kill)
            with pytest.raises(KeyboardInterrupt):
                counts_of(texts, tmp_path / "killed")
        with pytest.raises(DatastoreError, match="is unfinished: run the command"):
            TextDatastore(tmp_path / "killed")
    counts_of(texts, tmp_path / "killed")
    assert contents(tmp_path / "killed" / "text") == contents(tmp_path / "whole" / "text")


def test_merging_runs_adds_equal_keys(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_build, "MERGED_ROWS", 100)
    runs = []
    for _ in range(4):
        keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 150) // 2**56 * 2**56)
        runs.append(np.stack([keys, rng.integers(0, 9, len(keys)), rng.integers(0, 9, len(keys))]))
    for unit in (1, 2**58):
        blocks = list(merge(runs, unit))
        assert len(blocks) > 3 and all(
            block[0, 0] // unit > before[0, -1] // unit for before, block in pairwise(blocks)
        )
        keys, *added = np.concatenate(blocks, axis=1)
        for row, sums in enumerate(added, 1):
            expected: Counter[int] = Counter()
            for run in runs:
                expected.update(dict(zip(run[0].tolist(), run[row].tolist())))
            assert keys.tolist() == sorted(expected)
            assert sums.tolist() == [expected[key] for key in sorted(expected)]


def test_sentences_that_are_added_count_as_if_they_were_built(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    lines = list(dict.fromkeys(filter(None, texts[0].read_text().splitlines())))
    split = write_lines(tmp_path / "first", *lines[:-40]), texts[1]
    base, whole = counts_of(split, tmp_path / "base", False), counts_of(texts, tmp_path / "store", False)
    added = [np.array([*map(int, line.split()), END]) for line in lines[-40:]]
    both = base.plus(added, END)
    for line in lines[:5] + lines[-5:]:
        tokens = [END, *map(int, line.split())]
        rows, all_tokens = torch.zeros(WORDS, dtype=torch.int64), torch.arange(WORDS)
        one, other = (counts.look_up(torch.tensor([tokens]), rows, all_tokens) for counts in (both, whole))
        torch.testing.assert_close(one.text, other.text)
        assert one.length.equal(other.length) and one.seen.equal(other.seen)
    assert not base.plus([], END).more


def test_places_are_found(texts: tuple[Path, Path], tmp_path: Path) -> None:
    counts_of(texts, tmp_path / "store")
    store = TextDatastore(tmp_path / "store")
    sought = store.sentence(7)[:2].tolist()
    expected = [
        (number, place + 1)
        for number in range(store.section.sentences)
        for place in range(len(store.sentence(number)) - 1)
        if store.sentence(number)[place : place + 2].tolist() == sought
    ]
    assert (
        list(store.find(sought, 10**6)) == expected and list(store.find(sought, 10**6, block=11)) == expected
    )
    assert list(store.find(sought, 1)) == expected[:1]


def test_bad_texts_are_refused(texts: tuple[Path, Path], tmp_path: Path) -> None:
    def build(text: Path, output: str = "store", digest: str = "a") -> None:
        build_text_part([text], [], tmp_path / output, vocabulary(digest), quiet=True)

    with pytest.raises(
        ConfigurationError, match=r"there is no text .*/missing: give files of one sentence per line"
    ):
        build(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="there is no text in it"):
        build(write_lines(tmp_path / "empty", "", " "))
    foreign = write_lines(tmp_path / "foreign", f"{UNKNOWN} {UNKNOWN} {UNKNOWN} 5")
    with pytest.raises(
        ConfigurationError, match="60% of the subwords are not in the model's target dictionary"
    ):
        build(foreign)
    assert not (tmp_path / "store").exists()
    build(texts[0])
    with pytest.raises(DatastoreError, match="was built with another target dictionary: a there, b now"):
        build(texts[0], digest="b")
    with pytest.raises(DatastoreError, match="counted in the subwords of another model"):
        TextDatastore(tmp_path / "store").check_vocabulary("b")
    shutil.rmtree(tmp_path / "store/text")
    with pytest.raises(DatastoreError, match="missing"):
        TextDatastore(tmp_path / "store")
    assert Manifest.read(tmp_path / "store").text is not None


def test_merged_texts_are_those_of_one_build(
    rng: np.random.Generator, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = write_lines(tmp_path / "second", *sentences(rng, 200), *texts[0].read_text().splitlines()[:50])
    for output, own in (("one", [texts[0]]), ("two", [second]), ("both", [texts[0], second])):
        build_text_part(own, [texts[1]], tmp_path / output, vocabulary(), quiet=True)
    monkeypatch.setattr(text_build, "CHUNK_SENTENCES", 37)
    monkeypatch.setattr(text_build, "MERGED_ROWS", 500)
    call("merge", tmp_path / "one", tmp_path / "two", "--output", tmp_path / "merged", "--quiet")
    built, merged = contents(tmp_path / "both" / "text"), contents(tmp_path / "merged" / "text")
    assert merged == built
    one, other = (Manifest.read(tmp_path / name).text for name in ("both", "merged"))
    assert one is not None and other is not None
    one.fingerprints["corpus"] = other.fingerprints["corpus"] = ""
    assert one == other


def test_texts_that_were_not_counted_alike_are_not_merged(texts: tuple[Path, Path], tmp_path: Path) -> None:
    build_text_part([texts[0]], [texts[1]], tmp_path / "one", vocabulary(), quiet=True)
    build_text_part([texts[1]], [texts[0]], tmp_path / "two", vocabulary(), quiet=True)
    build_text_part([texts[1]], [texts[1]], tmp_path / "other", vocabulary("b"), quiet=True)
    for words, reason in (
        (("two",), "were counted against different general text, and are not merged"),
        (("other",), "were counted with another target dictionary, and are not merged"),
        (("--remove", "one"), "does not know its corpora, and is left out"),
    ):
        paths = [word if word.startswith("--") else tmp_path / word for word in words]
        done = call(
            "merge", tmp_path / "one", *paths, "--output", tmp_path / "merged", "--quiet", check=False
        )
        assert done.returncode and reason in done.stderr
        assert not (tmp_path / "merged").exists()
