"""A Marian model that was trained by `transformers`, converted and in use, once a test session."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO, call, write_lines
from tests.marian_models import train_marian


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model as trained, converted, and a datastore of verses that it did not see."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(1)
    random.seed(1)
    verses = (row for row in read_pairs(DEMO / "bible.train.tsv.xz") if len(row[1]) < 80)
    rows = list(itertools.islice(verses, 800))
    train_marian(folder / "marian", rows[:400], 50)
    write_lines(folder / "train.tsv", *map("\t".join, rows))
    call("convert", folder / "marian", "--output", folder / "model")
    model = ["--path", folder / "model/model.pt"]
    call("prepare", "--train", folder / "train.tsv", "-s", "de", "-t", "en", *model, "--output", folder / "data-bin")
    call("build tokens", folder / "data-bin", *model, "--output", folder / "datastore", "--cpu", "--quiet")
    return folder
