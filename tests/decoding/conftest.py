"""What the tests of decoding share: scores that are checked, and a text memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding import mixture, phrase_votes, token_memory
from fairseq_ccpr.search import live
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, run, write_lines
from tests.small_models import World, subword_options


@pytest.fixture
def check_rescoring(
    world: World, decode: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., None]:
    """Check that `--score-reference` force-decodes what beam search built step by step, and gives its scores."""

    def check(*settings: object) -> None:
        folder = tmp_path_factory.mktemp("rescored")
        found = decode(*settings)
        symbols = TokenDatastore(world.datastore).read_symbols()
        hypotheses = [
            " ".join(symbols[t] for t in found[i][0]["tokens"].tolist()[:-1]) for i in sorted(found)
        ]
        (folder / "test.en").write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
        (folder / "test.de").write_bytes((world.data_bin / "text" / "test.de").read_bytes())
        dictionary = world.data_bin / "dict.en.txt"
        run("fairseq-preprocess", "-s", "de", "-t", "en", "--srcdict", dictionary, "--tgtdict", dictionary,
            "--testpref", folder / "test", "--destdir", folder / "bin")  # fmt: skip
        words = [str(folder / "bin"), *world.options(*settings, "--score-reference")[1:]]
        shown = call("fairseq-generate", *words).stdout
        scores = {int(i): float(s) for i, s in re.findall(r"^H-(\d+)\t(\S+)\t", shown, flags=re.MULTILINE)}
        for i, hypotheses_of_sentence in found.items():
            assert abs(scores[i] - hypotheses_of_sentence[0]["score"].item() / np.log(2)) < 5e-3

    return check


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are free on a CPU; here they are not."""
    for module in (mixture, phrase_votes, token_memory, live):
        monkeypatch.setattr(module, "sync_is_free", lambda device: False)


@pytest.fixture(scope="module")
def references(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The references of the test set, and of the held-out sentences, as a text."""
    rows = [target for name in ("test", "valid") for _, target in read_pairs(world.folder / f"{name}.tsv")]
    return write_lines(tmp_path_factory.mktemp("references") / "text", *rows)


@pytest.fixture(scope="module")
def build_text(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a text part; alone, or in a copy of the datastore."""

    def build(text: Path, alone: bool = True, *options: object) -> Path:
        output = tmp_path_factory.mktemp("text") / "store"
        if not alone:
            shutil.copytree(world.datastore, output)
        where = ["--path", world.model, "--data", world.data_bin, *subword_options(world), "--output", output]
        call("build text", text, *where, *options)
        return output

    return build


@pytest.fixture(scope="module")
def general(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [target for _, target in read_pairs(world.folder / "train.tsv")]
    return write_lines(tmp_path_factory.mktemp("general") / "text", *rows)


@pytest.fixture(scope="module")
def only_text(build_text: Callable, references: Path, general: Path) -> Path:
    return build_text(references, True, "--against", general)
