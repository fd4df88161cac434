"""A tiny XLM-R and a tiny BERT of Hugging Face, once a test session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.bert_folders import POSITIONS, random_bert, write_folder
from tests.small_models import VOCABULARY, train_unigram


@pytest.fixture(scope="session")
def xlmr(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny XLM-R of Hugging Face, with a head's prefix, and its weights without."""
    model = train_unigram(300)
    # rows to spare, as e5 has them
    weights = random_bert(rows=302 + 5, position_rows=POSITIONS + 2, token_types=1)
    folder = tmp_path_factory.mktemp("xlmr") / "folder"
    named = {f"roberta.{name}": tensor for name, tensor in weights.items()}
    write_folder(folder, "xlm-roberta", named | {"lm_head.bias": torch.zeros(302)}, layer_norm_eps=1e-5)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    return folder, weights


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny lower-casing BERT of Hugging Face, in old names, and its weights."""
    weights = random_bert(len(VOCABULARY), POSITIONS, token_types=2)
    folder = tmp_path_factory.mktemp("bert") / "folder"
    old = {
        n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t
        for n, t in weights.items()
    }
    write_folder(folder, "bert", old, layer_norm_eps=1e-2)  # an eps that would show
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder, weights
