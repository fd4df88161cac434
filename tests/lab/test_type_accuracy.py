"""Accuracy of phrase types, by layers and sentences."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from fairseq_ccpr.lab.accuracy import type_accuracy
from fairseq_ccpr.lab.accuracy.phrase_systems import SentenceSystem
from fairseq_ccpr.lab.accuracy.type_accuracy import (
    OrthogonalTypes,
    TransformerTypes,
    TypeResult,
    load_type_system,
)
from fairseq_ccpr.lab.plots import draw_types
from fairseq_ccpr.lab.xpr.lexicon import Lexicon
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.text.subwords import subword_bounds
from tests.helpers import call, refused
from tests.small_models import Ccpr, Xpr

pytestmark = pytest.mark.full


def evaluate(xpr: Xpr, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    words = ["--data", f"mine={xpr.lexicon / 'test'}", "--cpu", "--quiet", *extra]
    return call("evaluate types", *words, check=check)


def test_evaluation_of_layers_and_sentences(xpr: Xpr, ccpr: Ccpr, tmp_path: Path) -> None:
    done = evaluate(
        xpr, "--encoder", f"raw={xpr.context}", f"map=orthogonal:{xpr.context}", f"xpr={xpr.checkpoint}",
        f"ccpr={ccpr.checkpoint}", "--train", xpr.lexicon / "train", "--sentences", 0, 2, 4, "--layers", 1, 2,
        "--json", tmp_path / "found.json", "--plot", tmp_path / "found.png",
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert len(found) == 3 * (2 + 2 + 2 + 1)
    settings = {one["system"]: one["training"] for one in found}
    assert settings == {"raw": "unsupervised", "map": "supervised", "xpr": "supervised", "ccpr": "other"}
    assert done.stdout.count("| mine |") == len(found) and "data mine:" in done.stdout
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    encoder, lexicon = XprEncoder.load(xpr.checkpoint), Lexicon(xpr.lexicon / "test")
    (own,) = (one for one in found if (one["system"], one["layer"], one["sentences"]) == ("xpr", 2, 4))
    assert own["forward"] == pytest.approx(forward_accuracy(encoder, lexicon, 4), abs=0.01)
    # the layer it was trained on
    again = evaluate(xpr, "--encoder", f"xpr={xpr.checkpoint}", "--sentences", 4)
    assert f"| {own['forward']:.1f} | {own['backward']:.1f} |" in again.stdout


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ([(2, 0), (2, 4)], ["example sentences"]), ([(1, 4), (2, 4)], ["layer"]), ([(2, 4)], ["example sentences"]),
        ([(1, 0), (1, 4), (2, 0), (2, 4)], ["example sentences", "layer"]),
    ],
)  # fmt: skip
def test_the_picture_shows_what_varies(
    settings: list[tuple[int, int]], drawn: list[str], tmp_path: Path
) -> None:
    results = [TypeResult("de-en", "raw", "unsupervised", *setting, 50.0, 60.0) for setting in settings]
    results.append(TypeResult("de-en", "muse", "other", 0, settings[0][1], 40.0, 50.0))
    with patch.object(Figure, "savefig", autospec=True) as saved:
        draw_types(results, tmp_path / "types.png")
    figure = saved.call_args.args[0]
    assert [axes.get_xlabel() for axes in figure.axes] == drawn
    assert [line.get_label() for line in figure.axes[0].lines] == ["de-en, raw", "de-en, muse"]


@torch.no_grad()
def forward_accuracy(encoder: XprEncoder, lexicon: Lexicon, count: int) -> float:
    """acc@1 of the source phrases, one by one, each of their first sentences by itself."""
    sides = []
    for types in lexicon.sides:
        vectors = []
        for number in range(len(types)):
            means = []
            for place in range(types.counts[number]):
                text, start, end = types.example(number, place)
                subwords = encoder.context.tokenizer.encode(text)
                if len(means) < count and (bounds := subword_bounds(subwords, start, end)) is not None:
                    states = encoder.states(torch.tensor([subwords.ids]))
                    means.append(states[0, bounds[0] : bounds[1] + 1].mean(0))
            assert means
            vectors.append(encoder.project(torch.stack(means).mean(0, keepdim=True))[0])
        sides.append(torch.stack(vectors))
    gold = {(p, q) for p, q in lexicon.pairs.tolist()}
    nearest = (sides[0] @ sides[1].T).argmax(1).tolist()
    return 100 * sum((p, q) in gold for p, q in enumerate(nearest)) / len(nearest)


def test_orthogonal_mapping_undoes_a_rotation(xpr: Xpr) -> None:
    rotation, _ = torch.linalg.qr(torch.randn(32, 32))

    class Rotated(TransformerTypes):
        def __init__(self) -> None:
            self.fingerprint = "x"

        def encode(self, lexicon, counts, show):
            generator = torch.Generator().manual_seed(1)
            y = nn.functional.normalize(torch.randn(len(lexicon.sides[1]), 32, generator=generator), dim=1)
            x = torch.zeros(len(lexicon.sides[0]), 32)
            rows = torch.from_numpy(lexicon.pairs.astype(np.int64))
            x[rows[:, 0]] = y[rows[:, 1]] @ rotation
            return {(1, 4): (x, y)}

    lexicon = Lexicon(xpr.lexicon / "valid")
    source, target = OrthogonalTypes(Rotated(), [Lexicon(xpr.lexicon / "train")]).encode(lexicon, [4], False)[
        1, 4
    ]
    last = dict(lexicon.pairs.tolist())
    assert all(float(source[p] @ target[q]) > 0.7 for p, q in last.items())


def test_a_sentence_encoder_sees_the_phrase_or_its_sentences(
    xpr: Xpr, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(texts: list[str]) -> np.ndarray:
        assert len(texts) <= 64
        return np.array([[len(text), ord(text[0]), text.count("e")] for text in texts])

    monkeypatch.setattr(type_accuracy, "load_muse", lambda device: SentenceSystem(encode, "fake", device))
    lexicon = Lexicon(xpr.lexicon / "valid")
    found = load_type_system("muse", None, [], torch.device("cpu"), False).encode(lexicon, [0, 1, 3], False)
    types = lexicon.sides[0]
    for number in range(0, len(types), 5):
        texts = [types.example(number, place)[0] for place in range(types.counts[number])]
        for count in (0, 1, 3):
            wanted = encode(texts[:count] or [types.phrases[number]]).sum(axis=0)
            np.testing.assert_allclose(found[0, count][0][number], wanted / np.linalg.norm(wanted), rtol=1e-5)


def test_evaluation_refuses_bad_input(xpr: Xpr, tmp_path: Path) -> None:
    def fails(*extra: object) -> subprocess.CompletedProcess[str]:
        return evaluate(xpr, *extra, check=False)

    refused(fails("--encoder", tmp_path / "no"), "there is no encoder '.*no': give a checkpoint")
    refused(fails("--encoder", f"orthogonal:{xpr.context}"), "learns from phrase pairs: give --train")
    refused(fails("--encoder", xpr.context, "--sentences", -1), "--sentences has -1")
    refused(fails("--encoder", xpr.context, "--layers", 3), "layer 3 of an encoder of 2 layers")
    refused(
        fails("--encoder", xpr.context, "--json", tmp_path / "no" / "a.json"), "--json .*there is no folder"
    )
    refused(fails("--encoder", xpr.context, "--train", xpr.lexicon), "give one of its folders, such as train")
