"""The recipe that draws confidence: what it gathers of comparisons, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fairseq_ccpr.evaluation.confidence import binned
from tests.helpers import run

RECIPE = "scripts/recipes/reliability.py"


def compared(folder: Path, **confidence: Any) -> Path:
    """Write what `compare` does of a datastore."""
    scores = {"bleu": 1.0, "chrf": 2.0, "bleu_signature": "b", "chrf_signature": "c"}
    rows = [{"system": "base", **scores}, {"system": "retrieval", **scores, "bleu": 3.0, **confidence}]
    folder.mkdir()
    (folder / "comparison.json").write_text(
        json.dumps({"commit": "abc", "retrieval_signature": "r", "rows": rows})
    )
    return folder


def test_comparisons_are_gathered_and_drawn(tmp_path: Path) -> None:
    claims = np.array([0.05, 0.55, 0.55, 1.0])
    bins = [one._asdict() for one in binned(claims, np.array([False, False, True, True]))]
    kinds = {
        kind: {"auc": 0.9, "bins": bins, "probability_bins": bins[:1]} for kind in ("sentences", "words")
    }
    texts = {name: compared(tmp_path / name, confidence=kinds) for name in ("one", "two")}
    named = [f"{name}={folder}" for name, folder in texts.items()]
    file, picture, again = (tmp_path / name for name in ("confidence.json", "a.png", "b.png"))
    assert not run(RECIPE, file, picture, *named).stderr
    found = json.loads(file.read_text())["texts"]
    scores = {"bleu": 1.0, "chrf": 2.0, "bleu_signature": "b", "chrf_signature": "c"}
    of_run = {"commit": "abc", "retrieval_signature": "r"}
    assert [*found] == ["one", "two"] and found["one"] | {"bleu": 1.0} == {**of_run, **scores, **kinds}
    assert found["one"]["bleu"] == 3.0, "of the datastore, and not of the model alone"
    assert run(RECIPE, file, again).returncode == 0
    with Image.open(picture) as one, Image.open(again) as other:
        assert one.tobytes() == other.tobytes() and one.width > 600
    refused = run(RECIPE, file, picture, f"three={compared(tmp_path / 'three')}", check=False)
    assert refused.returncode == 1 and "has no confidence: tune without --output" in refused.stderr
    assert json.loads(file.read_text())["texts"].keys() == texts.keys()
