"""Options of decoding with phrases."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding import mixture, phrase_votes, token_memory
from tests.helpers import call, run
from tests.small_models import World


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
    for module in (mixture, phrase_votes, token_memory):
        monkeypatch.setattr(module, "sync_is_free", lambda device: False)
