"""How much of translations is copied from a text, against a plain reference."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fairseq_ccpr.evaluation import copying
from fairseq_ccpr.evaluation.copying import STRETCH, copied


def plain(translations: list[np.ndarray], text: list[int], stretch: int) -> float:
    known = {tuple(text[at : at + stretch]) for at in range(len(text) - stretch + 1)}
    marked = 0
    for one in translations:
        ids = one.tolist()
        marked += len(
            {
                i
                for at in range(len(ids) - stretch + 1)
                if tuple(ids[at : at + stretch]) in known
                for i in range(at, at + stretch)
            }
        )
    return marked / max(1, sum(map(len, translations)))


@pytest.mark.parametrize("stretch", [STRETCH, 5])
@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_the_share_is_that_of_a_plain_count(block: int, stretch: int, rng: np.random.Generator) -> None:
    text = rng.integers(4, 9, 400)
    systems = {
        "random": [rng.integers(4, 9, n) for n in (0, 3, 40, 200)],
        "half": [np.concatenate([rng.integers(4, 9, 20), text[at : at + 30]]) for at in (0, 100, 370)],
        "whole": [text[60:90], text[:STRETCH]],
        "nothing": [],
    }
    with patch.object(copying, "BLOCK", block):
        found = copied(systems, text.astype(np.uint16), stretch)
    assert found == {
        name: pytest.approx(plain(each, text.tolist(), stretch)) for name, each in systems.items()
    }
    assert found["whole"] == 1 and found["nothing"] == 0 and 0.4 < found["half"] < 1


def test_translations_shorter_than_a_run_copy_nothing(rng: np.random.Generator) -> None:
    text = rng.integers(4, 9, 40)
    assert copied({"short": [text[: STRETCH - 1]]}, text) == {"short": 0}


def test_an_empty_text_has_nothing(rng: np.random.Generator) -> None:
    assert copied({"one": [rng.integers(4, 9, 40)]}, np.zeros(0, np.int32)) == {"one": 0}


def test_a_text_is_read_once_for_all_systems_and_a_block_at_a_time(rng: np.random.Generator) -> None:
    read = list[int]()

    class Watched(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            read.append(len(found))
            return np.asarray(found)

    text = rng.integers(4, 9, 1000)
    systems = {name: [rng.integers(4, 9, 60)] for name in "abc"}
    with patch.object(copying, "BLOCK", 100):
        found = copied(systems, text.view(Watched))
    assert found == copied(systems, text) and any(found.values())
    assert len(read) == 10 and max(read) == 100 + STRETCH - 1
