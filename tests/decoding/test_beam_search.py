"""Beam search by runs selects what fairseq's selects."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.search import BeamSearch

from fairseq_ccpr.building.token_build import load_model, load_task
from fairseq_ccpr.decoding import ensemble
from fairseq_ccpr.decoding.ensemble import EncodedBatch, RetrievalEnsemble, RunwiseBeamSearch
from fairseq_ccpr.decoding.options import MixtureSettings
from tests.small_models import World


@pytest.mark.parametrize(
    ("sentences", "beam", "words"), [(31, 5, 1000), (2, 4, 20_011), (9, 1, 15_001), (3, 5, 40)]
)
@pytest.mark.parametrize("ended", [False, True])
def test_it_selects_what_fairseq_selects(
    sentences: int, beam: int, words: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "SMALL", 0)
    lprobs, scores = (
        torch.randn(sentences, beam, words).log_softmax(dim=2),
        -7 * torch.rand(sentences, beam, 4),
    )
    if ended:  # as at the last step, where nothing but the end may be written
        end = lprobs[:, :, 2].clone()
        lprobs.fill_(-math.inf)[:, :, 2] = end
    for step in (0, 4):
        wanted = BeamSearch(Dictionary()).step(step, lprobs, scores[:, :, :step])
        found = RunwiseBeamSearch(Dictionary()).step(step, lprobs, scores[:, :, :step])
        possible = wanted[0] > -math.inf
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(a[possible], b[possible]) for a, b in zip(found[1:], wanted[1:]))


def test_an_encoding_is_copied_only_where_sentences_have_ended(world: World) -> None:
    model = load_model(
        str(world.model), load_task(world.data_bin, "de", "en"), torch.device("cpu"), fp16=False
    )
    ensemble = RetrievalEnsemble([model], [], model.decoder.padding_idx, MixtureSettings())
    outputs = ensemble.forward_encoder(
        {"src_tokens": torch.tensor([[5, 6, 2], [7, 8, 2]]), "src_lengths": torch.tensor([3, 3])}
    )
    beams = ensemble.reorder_encoder_out(outputs, torch.tensor([0, 0, 1, 1]))
    swapped = ensemble.reorder_encoder_out(beams, torch.tensor([1, 0, 2, 2]))
    encoded = [one[0]["encoder_out"][0] for one in (beams, swapped)]
    assert encoded[0] is encoded[1] and encoded[0].shape[1] == 4 and isinstance(swapped, EncodedBatch)
    rest = ensemble.reorder_encoder_out(swapped, torch.tensor([3, 2]))
    assert torch.equal(rest[0]["encoder_out"][0], encoded[0][:, 2:])
