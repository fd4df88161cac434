"""Shards and merged datastores: the same as built at once; what is added or taken out is exactly that."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from tests.helpers import call, contents, refused, run
from tests.small_models import Ccpr, World, build, build_options

SMALL = ("--chunk-tokens", 300, "--subset", "valid", "test")


def merge(*words: object, check: bool = True):
    return call("merge", *words, "--quiet", "--index", "exact", check=check)


def phrase_options(ccpr: Ccpr, text: Path, output: Path) -> list[object]:
    return [
        "phrases", text, "--encoder", ccpr.checkpoint, "--output", output, "--segmentation", "all", "--max-words", 3,
        "--chunk-sentences", 32, "--index", "exact", "--cpu", "--quiet",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tokens(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datastores of two subsets together, of either, and two shards of both."""
    folder = tmp_path_factory.mktemp("tokens")
    build(world, folder / "whole", *SMALL)
    for number in range(2):
        build(world, folder / f"shard{number}", *SMALL, "--num-shards", 2, "--shard-id", number)
    for subset in ("valid", "test"):
        build(world, folder / subset, "--subset", subset)
    merge(folder / "valid", folder / "test", "--output", folder / "both")
    return folder


@pytest.fixture(scope="module")
def phrases(ccpr: Ccpr, mono: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phrases of a text, of its two shards, and of two halves that have 50 sentences in common."""
    folder = tmp_path_factory.mktemp("phrases")
    lines = list(dict.fromkeys(mono.read_text(encoding="utf-8").splitlines()))
    for name, part in {"whole": [*lines, *lines[:9]], "one": lines[:150], "two": lines[100:]}.items():
        (folder / f"{name}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
        call("build", *phrase_options(ccpr, folder / f"{name}.txt", folder / name))
    for number in range(2):
        options = phrase_options(ccpr, folder / "whole.txt", folder / f"shard{number}")
        call("build", *options, "--num-shards", 2, "--shard-id", number)
    merge(folder / "one", folder / "two", "--output", folder / "both")
    return folder


@pytest.mark.parametrize("kind", ["tokens", "phrases"])
def test_shards_merged_equal_one_build(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every byte, the manifest's too, in whatever order they are given."""
    folder = request.getfixturevalue(kind)
    for order in ((0, 1), (1, 0)):
        merge(*(folder / f"shard{i}" for i in order), "--output", tmp_path / str(order))
        assert contents(tmp_path / str(order)) == contents(folder / "whole")


@pytest.mark.full
def test_two_processes_find_the_same_phrases_as_one(ccpr: Ccpr, phrases: Path, tmp_path: Path) -> None:
    run(
        "torchrun",
        "--nproc-per-node",
        2,
        "-m",
        "fairseq_ccpr",
        "build",
        *phrase_options(ccpr, phrases / "whole.txt", tmp_path / "two"),
    )
    assert contents(tmp_path / "two") == contents(phrases / "whole")


def test_token_datastores_are_appended(tokens: Path) -> None:
    one, two, both = (TokenDatastore(tokens / name) for name in ("valid", "test", "both"))
    for array in ("keys", "values"):
        parts = [getattr(store, array) for store in (one, two)]
        assert np.array_equal(getattr(both, array), np.concatenate(parts))
    assert np.array_equal(
        both.provenance, np.concatenate([one.provenance, two.provenance + np.array([24, 0])])
    )
    assert both.section.subsets == {"valid/valid": 24, "test/test": 20}
    assert "health         good" in call("inspect", tokens / "both").stdout


def test_a_sentence_of_two_texts_is_there_once(phrases: Path) -> None:
    one, two, both = (PhraseDatastore(phrases / name) for name in ("one", "two", "both"))
    found = {both.phrase(entry) for entry in range(both.section.size)}
    assert found == {store.phrase(entry) for store in (one, two) for entry in range(store.section.size)}
    assert len(found) == both.section.size < one.section.size + two.section.size
    assert [s.size for s in both.section.sources] == [one.section.size, two.section.size]
    assert np.array_equal(both.open_sources().sum(axis=0), [one.section.sentences, two.section.sentences])
    assert "health         good" in call("inspect", phrases / "both").stdout


def test_removal_leaves_exactly_the_rest(tokens: Path, phrases: Path, tmp_path: Path) -> None:
    for folder, first, second in ((tokens, "valid", "test"), (phrases, "one", "two")):
        merge(folder / "both", "--remove", second, "--output", tmp_path / first)
        assert contents(tmp_path / first) == contents(folder / first)
    merge(tokens / "both", "--remove", "valid", "--output", tmp_path / "test")
    assert contents(tmp_path / "test") == contents(tokens / "test")
    # Sentences that both have stand where the first has them, and have its keys.
    merge(phrases / "both", "--remove", "one", "--output", tmp_path / "two")
    left, two = PhraseDatastore(tmp_path / "two"), PhraseDatastore(phrases / "two")
    assert left.section.size == two.section.size and left.section.fingerprints == two.section.fingerprints
    keys = {two.phrase(entry): two.keys[entry] for entry in range(two.section.size)}
    wanted = [keys[left.phrase(entry)] for entry in range(left.section.size)]
    np.testing.assert_allclose(left.keys.astype(np.float32), np.array(wanted, np.float32), atol=5e-3)


def test_a_third_text_is_added_and_names_last(tokens: Path, world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "more", "--subset", "test", "valid")
    said = merge(tokens / "both", f"laws={tmp_path / 'more'}", "--output", tmp_path / "three").stdout
    assert "valid (" in said and "laws (" in said
    merge(tmp_path / "three", "--remove", "laws", "--output", tmp_path / "both")
    assert contents(tmp_path / "both") == contents(tokens / "both")


def test_a_stopped_merge_leaves_nothing(tokens: Path, tmp_path: Path) -> None:
    words = tokens / "valid", tokens / "test", "--output", tmp_path / "both"
    with patch("fairseq_ccpr.building.part.describe_files", side_effect=KeyboardInterrupt):
        assert merge(*words, check=False).returncode == 130
    assert not list(tmp_path.iterdir())
    (tmp_path / "both.partial" / "token").mkdir(parents=True)  # of a run that was killed
    merge(*words)
    assert contents(tmp_path / "both") == contents(tokens / "both")


def test_what_does_not_go_together_is_refused(
    world: World, ccpr: Ccpr, tokens: Path, phrases: Path, tmp_path: Path
) -> None:
    out = ("--output", tmp_path / "out")
    foreign = [
        world.other_model if word == world.model else word
        for word in build_options(world, tmp_path / "other")
    ]
    call("build", *foreign, "--subset", "test")
    differs = r"valid and .*other cannot be merged: model is \w{12} in the first, and \w{12} in the second"
    refused(merge(tokens / "valid", tmp_path / "other", *out, check=False), differs)
    options = phrase_options(ccpr, phrases / "two.txt", tmp_path / "words")
    call("build", *options, "--max-words", 2)
    refused(
        merge(phrases / "one", tmp_path / "words", *out, check=False), "the segmentation is .*in the second"
    )
    refused(
        merge(tokens / "shard0", tokens / "valid", *out, check=False), "one of 2 shards, .* are missing: 1"
    )
    shutil.copytree(tokens / "shard0", tmp_path / "again")
    shards = tokens / "shard0", tmp_path / "again", tokens / "shard1"
    refused(merge(*shards, *out, check=False), r"shard0 and .*again hold the same text \(shard 0\)")
    short = build(
        world, tmp_path / "short", *SMALL, "--chunk-tokens", 200, "--num-shards", 2, "--shard-id", 1
    )
    assert short.returncode == 0
    unlike = merge(tokens / "shard0", tmp_path / "short", *out, check=False)
    refused(
        unlike,
        "shard0 is one of 2 shards in chunks of 300, and .*short one of 2 in chunks of 200: build all with the same",
    )
    refused(merge(tokens / "both", tokens / "test", *out, check=False), "hold the same text: give each once")
    refused(merge(tokens / "valid", "--output", tmp_path / "o", check=False), "alone cannot be merged")
    shutil.copytree(tokens / "valid", tokens / "again.partial")
    twice = merge(tokens / "valid", tokens / "test", "--output", tokens / "valid", check=False)
    refused(twice, "is, or is in, .*valid, which is read")
    within = merge(tokens / "again.partial", tokens / "test", "--output", tokens / "again", check=False)
    refused(within, "is, or is in, .*again.partial, which is read")
    refused(
        merge(tokens / "both", "--remove", "laws", *out, check=False), "the texts of .*both are valid, test"
    )
    refused(merge(tokens / "both", "--remove", "test", "valid", *out, check=False), "nothing would be left")
    refused(merge(tokens / "test", tokens / "valid", "--output", phrases / "one", check=False), "exists")
    assert not (tmp_path / "out").exists()


def test_impossible_shards_are_refused(world: World, tmp_path: Path) -> None:
    words = ("--num-shards", 2, "--shard-id")
    refused(build(world, tmp_path / "s", *words, 2, check=False), "--shard-id is 2, and --num-shards 2")
    refused(
        build(world, tmp_path / "s", *words, 0, check=False),
        "--chunk-tokens cuts the text into 1: give up to 1 shards",
    )
    refused(
        build(world, tmp_path / "s", *words, 0, "--adapter", "clknn", check=False),
        "needs all states together",
    )
    options = build_options(world, tmp_path / "s")
    options[options.index("exact")] = "Flat"
    refused(call("build", *options, *words, 0, check=False), "a shard has no index")
    assert not (tmp_path / "s").exists()
