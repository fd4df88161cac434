"""A Marian model that was trained by `transformers`, converted and in use, once a test session."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO, call, write_lines
from tests.marian_models import train_marian


def short_rows(subset: str, count: int) -> list[tuple[str, str]]:
    """Short verses of the demo's text."""
    verses = (row for row in read_pairs(DEMO / f"bible.{subset}.tsv.xz") if len(row[1]) < 80)
    return list(itertools.islice(verses, count))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model as trained, converted, DATA_BIN, and a datastore of verses that it did not see."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(1)
    random.seed(1)
    words: list[object] = []
    for subset, count in (("train", 800), ("valid", 30), ("test", 30)):
        words += [
            f"--{subset}",
            write_lines(folder / f"{subset}.tsv", *map("\t".join, short_rows(subset, count))),
        ]
    train_marian(folder / "marian", short_rows("train", 400), 50)
    call("convert", folder / "marian", "--output", folder / "model")
    model = ["--path", folder / "model/model.pt"]
    call("prepare", *words, "-s", "de", "-t", "en", *model, "--output", folder / "data-bin")
    call("build tokens", folder / "data-bin", *model, "--output", folder / "datastore", "--cpu", "--quiet")
    return folder


@pytest.fixture(scope="session")
def tuned(trained: Path) -> Path:
    """The same datastore with settings chosen on held-out verses."""
    store = Path(shutil.copytree(trained / "datastore", trained / "tuned"))
    words = [trained / "data-bin", "--datastore", store, "--combiner", "fixed", "--decode", 1, "--beam", 2]
    shown = call("tune", *words, "--max-len-b", 40, "--cpu", "--no-progress-bar").stdout
    assert "nothing is better than the model alone" not in shown
    return store
