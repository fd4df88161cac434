"""The house stays within its bounds: how much there is, and how often a decision stands twice."""

from __future__ import annotations

import pytest

from scripts.measures import BOUNDS, measured


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return measured()


def test_every_room_has_a_bound(found: dict[str, list[str]]) -> None:
    assert found.keys() == BOUNDS.keys()


@pytest.mark.parametrize("measure", BOUNDS)
def test_no_measure_is_above_its_bound(found: dict[str, list[str]], measure: str) -> None:
    number, most = len(found[measure]), BOUNDS[measure]
    assert number <= most, (
        f"{measure}: {number:,}, at most {most:,} in scripts/measures.py, which prints where"
    )
