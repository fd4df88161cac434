"""Phrase datastores: what is found in text, builds that are stopped, what is refused."""

from __future__ import annotations

import itertools
import lzma
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.building import part, phrase_build
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation, candidate_spans, windows
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.words import word_spans
from tests.helpers import DEMO, call, refused
from tests.small_models import Ccpr, World, build_options, build_phrases, entries, other_encoder

INDEX = "--index", "IVF4,Flat"  # as `sharded_store` has it


@pytest.fixture(scope="module")
def encoder(ccpr: Ccpr) -> PhraseEncoder:
    return PhraseEncoder.load(ccpr.checkpoint)


@given(
    text=st.text("abdeoth ,.()'-½中文1Ä", max_size=30),
    fewest=st.integers(1, 3),
    more=st.sampled_from([0, 1, 99]),
)
def test_candidates_are_all_spans_of_whole_words(
    encoder: PhraseEncoder, text: str, fewest: int, more: int
) -> None:
    subwords = encoder.context.tokenizer.encode(text)
    words, wanted = word_spans(text), []
    for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
        start, end = words[i][0], words[j][1]
        bounds = subword_bounds(subwords, start, end)
        if fewest <= j - i + 1 <= fewest + more and bounds is not None:
            wanted.append([start, end, *bounds])
    assert candidate_spans(subwords, fewest, fewest + more).tolist() == wanted


def test_store_holds_the_phrases_of_each_sentence_once(
    sharded_store: Path, repeated_text: Path, encoder: PhraseEncoder
) -> None:
    made = PhraseDatastore(sharded_store)
    lines = [line for line in repeated_text.read_text().splitlines() if line.strip()]
    assert [made.sentence(i) for i in range(made.section.sentences)] == list(dict.fromkeys(lines))
    found = entries(made)
    assert len(set(found)) == len(found) == made.section.size > 200
    assert found == sorted(found, key=lambda entry: entry[0])
    assert made.find_damage() == []
    finder = PhraseFinder(encoder, Segmentation("learned", 0.5, 5))
    for number in (0, 17, 89):
        phrases = finder.find([made.sentence(number)])
        rows = np.flatnonzero(made.spans[:, 0] == number)
        strings = [made.sentence(number)[a:b] for _, a, b in phrases.spans.tolist()]
        assert [found[row][1] for row in rows] == list(dict.fromkeys(strings))
        first = [strings.index(found[row][1]) for row in rows]
        np.testing.assert_allclose(made.keys[rows], phrases.vectors[first].numpy(), atol=2e-3)
        assert (phrases.probabilities > 0.5).all()
    assert (made.spans[:, 0] == 90).sum() > 1  # longer than the encoder reads


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_texts_longer_than_the_encoder_reads_are_read_in_windows(encoder: PhraseEncoder, seed: int) -> None:
    """Every span of up to three words is found once, in order, with the vector that its window gives it."""
    rng = random.Random(seed)
    words = ["the Lord", "house", "(of", "Israel),", "and", "water;", "unto", "generations"]
    text = " ".join(rng.choices(words, k=rng.randint(300, 700)))
    encode, limit = encoder.context.tokenizer.encode, encoder.context.max_positions
    finder = PhraseFinder(encoder, Segmentation("all", max_words=3))
    found = finder.find(["the house", text, ""])
    assert found.too_long == 1 and encode(text).count > 2 * limit
    wanted = candidate_spans(encode(text), 1, 3)[:, :2].tolist()
    assert [span for number, *span in found.spans.tolist() if number == 1] == wanted
    assert found.spans[found.spans[:, 0] == 0].tolist() == finder.find(["the house"]).spans.tolist()
    parts = windows(encode(text), encode, limit)
    assert all(limit / 2 < part.subwords.count <= limit for part in parts[:-1])
    for row in rng.sample(range(len(found.spans)), 20):
        number, start, end = found.spans[row].tolist()
        if number == 1:
            part = next(part for part in parts if part.begin <= start < part.end)
            inside = finder.find([part.subwords.text])
            at = inside.spans.tolist().index([0, start - part.offset, end - part.offset])
            torch.testing.assert_close(found.vectors[row], inside.vectors[at], atol=1e-4, rtol=1e-3)
            left, right = start - part.offset, part.offset + len(part.subwords.text) - end
            # characters around it
            assert (left > 20 or not part.offset) and (right > 20 or part is parts[-1])


def test_a_word_longer_than_the_encoder_reads_is_no_phrase(encoder: PhraseEncoder) -> None:
    giant = "".join(random.Random(1).choices("abcdefghijklmnop", k=3000))
    found = PhraseFinder(encoder, Segmentation("all", max_words=2)).find(
        [f"the Lord {giant} and water", giant]
    )
    text = f"the Lord {giant} and water"
    assert [text[a:b] for number, a, b in found.spans.tolist()] == [
        "the", "the Lord", "Lord", "and", "and water", "water",
    ]  # fmt: skip
    assert found.too_long == 2 and not found.spans[:, 0].any()


def test_share_of_a_text(ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path) -> None:
    whole = [
        PhraseDatastore(sharded_store).sentence(i)
        for i in range(PhraseDatastore(sharded_store).section.sentences)
    ]
    parts = []
    for share in (0.2, 0.6):
        build_phrases(ccpr, repeated_text, output := tmp_path / str(share), "--fraction", share)
        part = PhraseDatastore(output)
        parts.append([part.sentence(i) for i in range(part.section.sentences)])
        assert part.section.share == share and abs(len(parts[-1]) / len(whole) - share) < 0.15
    assert set(parts[0]) < set(parts[1]) < set(whole)
    refused(
        build_phrases(ccpr, repeated_text, tmp_path / "0.2", check=False),
        "another fraction: 0.2 there, 1.0 now",
    )
    refused(
        build_phrases(ccpr, repeated_text, tmp_path / "none", "--fraction", 2, check=False), "--fraction is 2"
    )


def test_text_may_be_compressed_and_in_several_files(
    ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path
) -> None:
    lines = repeated_text.read_bytes().splitlines(keepends=True)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"".join(lines[:30])))
    (tmp_path / "b.txt").write_bytes(b"".join(lines[10:]))
    done = build_phrases(ccpr, [tmp_path / "a.txt.xz", tmp_path / "b.txt"], tmp_path / "s")
    assert "1 sentences longer than the encoder reads were read in windows" in done.stdout
    assert "2 empty lines and 41 repeated sentences were left out" in done.stdout
    assert (
        "sentences/s" in done.stdout
        and "sentences/s" not in build_phrases(ccpr, repeated_text, sharded_store, *INDEX).stdout
    )
    made, other = PhraseDatastore(tmp_path / "s"), PhraseDatastore(sharded_store)
    assert np.array_equal(made.spans, other.spans) and np.array_equal(made.keys, other.keys)


@pytest.mark.parametrize("kind", ["ngram:2", "all"])
def test_other_segmentations(
    ccpr: Ccpr, repeated_text: Path, tmp_path: Path, encoder: PhraseEncoder, kind: str
) -> None:
    build_phrases(ccpr, repeated_text, tmp_path / "s", "--segmentation", kind)
    made, tokenizer = PhraseDatastore(tmp_path / "s"), encoder.context.tokenizer
    fewest, most = (2, 2) if kind == "ngram:2" else (1, 5)
    wanted = set()
    for number in range(90):
        text = made.sentence(number)
        words, subwords = word_spans(text), tokenizer.encode(text)
        for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
            whole = subword_bounds(subwords, words[i][0], words[j][1]) is not None
            if fewest <= j - i + 1 <= most and whole:
                wanted.add((number, text[words[i][0] : words[j][1]]))
    assert {
        (number, string) for number, string in entries(made) if number < 90
    } == wanted  # the last is read in windows


@pytest.mark.usefixtures("with_bf16")
def test_bf16_makes_nearly_the_same_keys(ccpr: Ccpr, repeated_text: Path, tmp_path: Path) -> None:
    every = "--segmentation", "all"
    build_phrases(ccpr, repeated_text, tmp_path / "plain", *every)
    build_phrases(ccpr, repeated_text, tmp_path / "bf16", *every, "--bf16")
    plain, made = PhraseDatastore(tmp_path / "plain"), PhraseDatastore(tmp_path / "bf16")
    assert np.array_equal(made.spans, plain.spans) and not np.array_equal(made.keys, plain.keys)
    cosines = (np.asarray(made.keys, np.float64) * plain.keys).sum(axis=1)
    assert cosines.mean() > 0.999 and cosines.min() > 0.99


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


STAGES = {
    "find": (PhraseFinder, "find"), "join": (phrase_build, "check_space"), "index": (part, "build_index"),
    "publish": (part, "describe_files"), "manifest": (Manifest, "write"), "clean": (part, "rmtree"),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_stopped_build_resumes(
    ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path, stage: str
) -> None:
    place, name = STAGES[stage]
    real, calls = getattr(place, name), itertools.count()

    def stop(*arguments: Any, **named: Any) -> Any:
        if stage != "find" or next(calls):  # one shard is done before
            raise KeyboardInterrupt
        return real(*arguments, **named)

    with patch.object(place, name, stop):
        assert build_phrases(ccpr, repeated_text, tmp_path / "s", *INDEX, check=False).returncode == 130
    if stage != "clean":
        with pytest.raises(DatastoreError, match="unfinished: run the command that was building it again"):
            PhraseDatastore(tmp_path / "s")
    if stage == "find":
        assert len(list((tmp_path / "s").rglob("*.json"))) == 2  # the plan and the first shard
        refused(
            build_phrases(ccpr, repeated_text, tmp_path / "s", "--max-words", 4, check=False),
            "built with another segmentation",
        )
        refused(
            build_phrases(ccpr, repeated_text, tmp_path / "s", "--chunk-sentences", 9, check=False),
            "another chunk sentences: 32",
        )
        (tmp_path / "s" / "phrase.partial" / "shards" / "000001.keys.npy").write_bytes(b"torn")
    build_phrases(ccpr, repeated_text, tmp_path / "s", *INDEX)
    assert contents(tmp_path / "s") == contents(sharded_store)


def test_files_are_on_disk_before_what_vouches_for_them(
    ccpr: Ccpr, repeated_text: Path, tmp_path: Path
) -> None:
    synced: list[str] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    with patch.object(os, "fsync", watched):
        build_phrases(ccpr, repeated_text, tmp_path / "s")
    for shard in range(3):
        mark = synced.index(f"{shard:06}.json.partial")
        assert {f"{shard:06}.{name}.npy" for name in ("keys", "spans")} <= set(synced[:mark])
    files = Manifest.read(tmp_path / "s").phrase.files
    written = {Path(name).name for name in files} - {"totals.json"}
    assert written == {"keys.npy", "spans.npy", "sentence-offsets.npy", "sentences.txt", "string-hashes.npy"}
    joined, hashes = (
        written - {"string-hashes.npy"},
        next(name for name in synced if name.startswith("string-hashes.npy")),
    )
    before = synced[: synced.index("totals.json.partial")]
    assert joined <= {name.removesuffix(".partial") for name in before}
    assert synced.index(hashes) < synced.index("manifest.json.partial")
    assert synced[-2:] == ["manifest.json.partial", "s"]  # and its name in the folder


def test_finished_store_is_left_as_it_is_but_for_its_index(
    ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded_store, output := tmp_path / "s")
    stamps = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    build_phrases(ccpr, repeated_text, output, *INDEX)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == stamps
    build_phrases(ccpr, repeated_text, output, "--index", "exact")
    assert not list(output.rglob("*.faiss")) and PhraseDatastore(output).section.index.backend == "exact"
    build_phrases(ccpr, repeated_text, output, *INDEX)
    assert contents(output) == contents(sharded_store)


def test_parts_share_a_folder(
    world: World, ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(world.datastore, one := tmp_path / "token-first")
    build_phrases(ccpr, repeated_text, one, *INDEX)
    shutil.copytree(sharded_store, two := tmp_path / "phrase-first")
    with pytest.raises(DatastoreError, match="has no token part"):
        TokenDatastore(two)
    call("build", *build_options(world, two))
    assert contents(one / "phrase") == contents(two / "phrase") == contents(sharded_store / "phrase")
    assert contents(one / "token") == contents(two / "token") == contents(world.datastore / "token")
    for folder in (one, two):
        assert TokenDatastore(folder).find_damage() == PhraseDatastore(folder).find_damage() == []
    with pytest.raises(DatastoreError, match="has no phrase part"):
        PhraseDatastore(world.datastore)


def test_builds_that_are_refused(
    ccpr: Ccpr, repeated_text: Path, sharded_store: Path, tmp_path: Path
) -> None:
    before, output = contents(sharded_store), tmp_path / "s"
    other = other_encoder(ccpr, tmp_path / "other")
    refused(
        build_phrases(ccpr, repeated_text, sharded_store, "--encoder", other, check=False),
        "built with another encoder",
    )
    (tmp_path / "other.txt").write_text("Other text.\n")
    refused(
        build_phrases(ccpr, tmp_path / "other.txt", sharded_store, check=False), "built with another corpus"
    )
    refused(
        build_phrases(ccpr, repeated_text, sharded_store, "--threshold", 0.6, check=False),
        "built with another segmentation",
    )
    refused(
        build_phrases(ccpr, repeated_text, sharded_store, "--segmentation", "all", check=False),
        "built with another segmentation",
    )
    assert contents(sharded_store) == before
    refused(build_phrases(ccpr, tmp_path / "no.txt", output, check=False), r"there is no text .*no\.txt")
    for kind in ("some", "ngram:", "ngram:x", "ngram:²", "ngram:-1"):
        refused(
            build_phrases(ccpr, repeated_text, output, "--segmentation", kind, check=False),
            "give learned, all, ngram:N such as ngram:5, or lexicon:FILE",
        )
    for option, value, pattern in (
        ("--segmentation", "ngram:0", "phrases of 0 to 0 words"), ("--max-words", 0, "phrases of 1 to 0 words"),
        ("--threshold", 1, "--threshold is 1.0: a probability"), ("--threshold", -0.1, "--threshold is -0.1"),
        ("--threshold", "nan", "--threshold is nan"), ("--chunk-sentences", 0, "--chunk-sentences is 0"),
        ("--index", "Nonsense", "--index"), ("--encoder", tmp_path / "no.pt", "there is no phrase encoder"),
        ("--encoder", DEMO / "ccpr", "ccpr is a folder: give a checkpoint"),
        ("--encoder", DEMO / "model.pt", "model.pt is not a phrase encoder with its tokenizer"),
    ):  # fmt: skip
        refused(build_phrases(ccpr, repeated_text, output, option, value, check=False), pattern)
    assert not output.exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    refused(
        build_phrases(ccpr, repeated_text, tmp_path / "home", check=False), "exists and is not a datastore"
    )
    refused(
        build_phrases(ccpr, repeated_text, tmp_path / "other.txt", check=False),
        "exists and is not a datastore",
    )
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_what_cannot_become_a_store_leaves_nothing_behind(
    ccpr: Ccpr, repeated_text: Path, tmp_path: Path
) -> None:
    output, bad = tmp_path / "s", tmp_path / "bad.txt"
    refused(
        build_phrases(ccpr, repeated_text, output, "--threshold", 0.999999, check=False),
        r"no phrase is left of 91 sentences with the segmentation learned and the threshold 0\.999999: lower that",
    )
    lines = repeated_text.read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join([*lines[:40], b"Gr\xfc\xdfe\n", *lines[40:]]))
    with patch.object(PhraseFinder, "find", side_effect=AssertionError("nothing is to be encoded in vain")):
        refused(build_phrases(ccpr, bad, output, check=False), r"bad\.txt, line 41: the bytes are not UTF-8")
    refused(
        build_phrases(ccpr, repeated_text, output, "--segmentation", "ngram:999", check=False),
        "no phrase is left of 91 sentences with the segmentation ngram:999: ask for fewer words",
    )
    bad.write_text("\n  \n")
    refused(build_phrases(ccpr, bad, output, check=False), r"bad\.txt: there is no text in it")
    assert not output.exists()
    build_phrases(ccpr, repeated_text, output)  # with what was wrong put right, the same output will do
