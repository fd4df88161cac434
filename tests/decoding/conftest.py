"""Options of decoding with phrases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_models import World, subword_options


@pytest.fixture(scope="session")
def phrases(world: World, phrase_store: Path) -> list[object]:
    """Options of decoding with the phrases alone."""
    return ["--datastore", phrase_store, *subword_options(world), "--phrase-k", 3]


@pytest.fixture(scope="session")
def joint(world: World, both: Path) -> list[object]:
    """Options of decoding with tokens and phrases."""
    return ["--datastore", both, *subword_options(world), "--phrase-k", 3, "--knn-lambda", 0.4]
