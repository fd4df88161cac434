"""Converted Marian models against transformers: the same probabilities, and the same translations."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, LanguagePairDataset

from fairseq_ccpr.building.token_build import load_model, load_task
from tests.helpers import call
from tests.marian_models import POSITIONS, write_marian

SENTENCES = 250  # of each of four models: 1,000
KINDS: dict[str, dict[str, Any]] = {
    "small, swish, one vocabulary": {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 48, "activation_function": "swish",
    },
    "middle, relu, not scaled": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 32, "activation_function": "relu", "scale_embedding": False,
    },
    "large, silu, two vocabularies": {
        "d_model": 64, "encoder_layers": 4, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "activation_function": "silu", "separate": True,
    },
    "small, gelu, nothing tied": {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "activation_function": "gelu", "separate": True,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


class Pair:
    """A model of transformers, and the same converted."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.theirs = write_marian(folder / "marian", spread=1.2, **settings)
        call("convert", folder / "marian", "--output", folder / "model")
        self.task = load_task(folder / "model", "de", "en")
        self.ours = load_model(str(folder / "model/model.pt"), self.task, torch.device("cpu"), fp16=False)
        self.rows = [
            self._rows(folder / "marian" / name, dictionary)
            for name, dictionary in zip(
                ("vocab.json", "target_vocab.json" if settings.get("separate") else "vocab.json"),
                (self.task.source_dictionary, self.task.target_dictionary),
            )
        ]

    @staticmethod
    def _rows(path: Path, dictionary: Dictionary) -> torch.Tensor:
        """For each entry of fairseq's dictionary after <s>, its id in transformers."""
        import json

        ids = json.loads(path.read_text(encoding="utf-8"))
        return torch.tensor([ids[symbol] for symbol in dictionary.symbols[1:]])

    def sample(self, sentences: list[torch.Tensor], targets: list[torch.Tensor]) -> dict[str, Any]:
        """Both sides in fairseq's ids, as fairseq batches them."""
        source, target = self.task.source_dictionary, self.task.target_dictionary
        lengths = [len(ids) for ids in sentences], [len(ids) for ids in targets]
        dataset = LanguagePairDataset(
            sentences,
            lengths[0],
            source,
            targets,
            lengths[1],
            target,
            left_pad_source=True,
            left_pad_target=False,
        )
        return dataset.collater([dataset[number] for number in range(len(sentences))])

    def to_theirs(self, side: int, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[side][ids - 1]

    def inputs(self, sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same source sentences as transformers batches them."""
        rows = [self.to_theirs(0, ids) for ids in sentences]
        ids = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=self.theirs.config.pad_token_id
        )
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.size(1)) < lengths[:, None]).long()}


def random_sentences(
    rng: np.random.Generator, dictionary: Dictionary, count: int, most: int
) -> list[torch.Tensor]:
    """Random pieces, and the end of the sentence."""
    lengths = rng.integers(1, most, count)
    ids = [rng.integers(dictionary.nspecial, len(dictionary), length) for length in lengths]
    return [torch.tensor([*sentence, dictionary.eos()]) for sentence in ids]


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(7)
    return Pair(tmp_path_factory.mktemp("pair"), **KINDS[request.param])


@torch.no_grad()
def test_probabilities_are_those_of_transformers(pair: Pair, rng: np.random.Generator) -> None:
    sentences = random_sentences(rng, pair.task.source_dictionary, SENTENCES, 40)
    targets = random_sentences(rng, pair.task.target_dictionary, SENTENCES, 40)
    worst = 0.0
    for start in range(0, SENTENCES, 50):
        some = slice(start, start + 50)
        sample = pair.sample(sentences[some], targets[some])
        found = pair.ours.get_normalized_probs(pair.ours(**sample["net_input"]), log_probs=True)
        given = sample["net_input"]["prev_output_tokens"].clone()
        given[:, 0] = pair.task.target_dictionary.unk()  # in place of fairseq's </s>; see below
        theirs = pair.to_theirs(1, given)
        theirs[:, 0] = pair.theirs.config.decoder_start_token_id
        order = sample["id"].tolist()  # fairseq sorts a batch by length
        inputs = pair.inputs([sentences[some][number] for number in order])
        logits = pair.theirs(**inputs, decoder_input_ids=theirs).logits
        wanted = logits.log_softmax(dim=2)[:, :, pair.rows[1]]
        real = sample["target"] != pair.task.target_dictionary.pad()
        worst = max(worst, (found[:, :, 1:] - wanted)[real].abs().max().item())
        assert found[:, :, 0].max() < -1000  # <s> is no symbol of Marian's
        assert len(set(wanted[real].argmax(dim=1).tolist())) > 3  # they differ
    assert worst < 1e-5, worst


@pytest.mark.parametrize("beam", [1, 4])
@torch.no_grad()
def test_translations_are_those_of_transformers(pair: Pair, rng: np.random.Generator, beam: int) -> None:
    """As far as sentences end by themselves: at the greatest length fairseq writes </s> as the last token, and counts it."""
    sentences, longest = random_sentences(rng, pair.task.source_dictionary, SENTENCES, 15), 25
    generated = pair.theirs.generate(
        **pair.inputs(sentences), num_beams=beam, max_length=longest + 2, do_sample=False, early_stopping=True,
        bad_words_ids=[[pair.theirs.config.decoder_start_token_id]],
    )  # fmt: skip
    generator = pair.task.build_base_generator(
        [pair.ours], Namespace(beam=beam, min_len=0, max_len_a=0, max_len_b=longest)
    )
    sample = pair.sample(sentences, sentences)
    ended = 0
    for number, found in zip(sample["id"].tolist(), pair.task.inference_step(generator, [pair.ours], sample)):
        all_ended = max(len(hypothesis["tokens"]) for hypothesis in found) <= longest
        if all_ended or beam == 1:
            ours = pair.to_theirs(1, found[0]["tokens"])[:longest]
            assert torch.equal(ours, generated[number, 1 : len(ours) + 1]), number
        ended += all_ended
    assert ended >= SENTENCES / 15


def test_positions_beyond_the_table_are_refused(pair: Pair) -> None:
    assert pair.ours.max_positions() == (POSITIONS, POSITIONS)
