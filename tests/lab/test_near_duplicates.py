"""Near-duplicates of a test set in a training text, and scores without them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from pytest import Config

from fairseq_ccpr.text.resemblance import BLOCK, highest_resemblance
from tests.helpers import call, refused

pytestmark = pytest.mark.full


def test_resemblance_equals_that_of_all_pairs(pytestconfig: Config) -> None:
    rng = random.Random(pytestconfig.getoption("seed"))
    words = [f"word{i}" for i in range(12)]
    draw = [[rng.choice(words) for _ in range(rng.randint(0, 6))] for _ in range(BLOCK + 40)]
    text = [[rng.choice(words) for _ in range(rng.randint(0, 6))] for _ in range(90)]

    def jaccard(one: set[str], two: set[str]) -> float:
        return len(one & two) / len(one | two) if one & two else 0.0

    wanted = [max(jaccard(set(sentence), set(line)) for line in text) for sentence in draw]
    got = highest_resemblance(
        [" ".join(s).title() + "!" for s in draw], ["... " + ", ".join(s) for s in text]
    )
    assert np.allclose(got, wanted) and 0 < np.mean(got >= 0.7) < 1
    assert (
        highest_resemblance(["one"], []).tolist() == [0.0] and highest_resemblance([], ["one"]).tolist() == []
    )


def test_systems_are_scored_without_near_duplicates(tmp_path: Path) -> None:
    reference = [f"the cat number {i} sat on the mat of house {chr(97 + i)}" for i in range(20)]
    copies = [line if i < 10 else line.replace("sat", "lay") for i, line in enumerate(reference)]
    other = [line.replace("cat", "dog") for line in reference]
    for name, lines in {"reference": reference, "copies": copies, "other": other}.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    train = tmp_path / "train.tsv"
    train.write_text(
        "".join(f"Quelle {i}\t{line.upper()}!\n" for i, line in enumerate(reference[:10])) + "leer\t\n"
    )
    words = [tmp_path / "reference.txt", tmp_path / "other.txt", tmp_path / "copies.txt"]
    shown = call("evaluate systems", *words, "--unlike", train, "--json", tmp_path / "out.json").stdout
    assert "10 sentences without a near-duplicate in" in shown
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["unlike"]["sentences"] == 10 and results["unlike"]["below"] == 0.7
    (_, all_of_it), (_, rest) = results["rows"], results["unlike"]["rows"]
    assert all_of_it["BLEU difference"] > 0 > rest["BLEU difference"]
    failed = call("evaluate systems", *words, "--unlike", tmp_path / "reference.txt", check=False)
    refused(failed, "every reference has a near-duplicate there")
    refused(
        call("evaluate systems", *words, "--unlike", tmp_path / "no.tsv", check=False),
        r"no\.tsv cannot be read",
    )
