"""Steps of hypotheses that share what they attend to, against the decoder's own incremental forward passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fairseq.models.bart import BARTModel
from fairseq.models.bart.model import bart_base_architecture
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules import LayerNorm, MultiheadAttention, TransformerDecoderLayer
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.device import BF16, FP32
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture
from fairseq_ccpr.models.marian import MarianModel, marian_architecture
from fairseq_ccpr.models.step_decoder import STEPS_AT_FIRST, StepDecoder
from tests.random_transformers import WORDS, sources, transformer

LENGTHS, BEAM = [9, 2, 5, 1], 3
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
KINDS: dict[str, Callable[[], Any]] = {
    "post-norm": transformer,
    "pre-norm": partial(transformer, **PRE_NORM),
    "learned positions": partial(transformer, encoder_learned_pos=True, decoder_learned_pos=True),
    "no positions": partial(transformer, no_token_positional_embeddings=True),
    "normalised embeddings": partial(transformer, layernorm_embedding=True, no_scale_embedding=True),
    "shared embeddings": partial(transformer, share_all_embeddings=True),
    "widths of their own": partial(
        transformer, encoder_embed_dim=24, decoder_input_dim=12, decoder_output_dim=20, **PRE_NORM
    ),
    "marian": partial(transformer, kind=MarianModel, architecture=marian_architecture, activation_fn="swish"),
    "bart": partial(transformer, kind=BARTModel, architecture=bart_base_architecture),
}  # fmt: skip


def both_ways(
    model: Any, steps: int, given: dict[str, Tensor], decoder: StepDecoder | None = None
) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Logits [H, V] and attention [H, S] of random hypotheses, in steps and as fairseq computes them.

    Hypotheses change places at each step, and a sentence leaves at each tenth.
    """
    decoder = decoder or StepDecoder.of(model)
    assert decoder is not None
    encoded = model.encoder.forward_torchscript(given)
    state, incremental = decoder.begin(encoded), {}
    rows = torch.arange(len(given["src_tokens"])).repeat_interleave(BEAM)
    state.reorder(rows)
    encoded = model.encoder.reorder_encoder_out(encoded, rows)
    tokens = torch.full((len(rows), 1), 2)
    for step in range(steps):
        logits, extra = model.decoder(tokens, encoder_out=encoded, incremental_state=incremental)
        yield decoder.step(tokens, state), (logits[:, -1], extra["attn"][0][:, -1])
        sentences = torch.arange(len(tokens) // BEAM)
        if step % 10 == 9:
            sentences = sentences[torch.randperm(len(sentences))[1:].sort().values]
        order = (sentences.unsqueeze(1) * BEAM + torch.randint(BEAM, (len(sentences), BEAM))).flatten()
        tokens = torch.cat([tokens[order], torch.randint(4, WORDS, (len(order), 1))], dim=1)
        state.reorder(order)
        model.decoder.reorder_incremental_state_scripting(incremental, order)
        encoded = model.encoder.reorder_encoder_out(encoded, order)


@pytest.mark.parametrize("left_pad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_compute_what_the_decoder_computes(kind: str, left_pad: bool) -> None:
    model = KINDS[kind]()
    for ours, wanted in both_ways(model, STEPS_AT_FIRST + 3, sources(LENGTHS, left_pad=left_pad)):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_sources_of_one_length_are_all_seen() -> None:
    for ours, wanted in both_ways(transformer(), 3, sources([4, 4])):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)


class OtherAttention(MultiheadAttention):
    """As linear attention would be."""


class OtherLayer(TransformerDecoderLayer):
    """As that of latent depth."""

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + 2 * x


class OtherDecoder(TransformerDecoderBase):
    """As that of a pointer generator."""

    def output_layer(self, features: Tensor) -> Tensor:
        return 2 * super().output_layer(features)


def within_layers(change: Callable[[Any], None]) -> Callable[[], Any]:
    """Return what makes a model whose last layer has something else."""

    def make() -> Any:
        model = transformer()
        change(model.decoder.layers[-1])
        return model

    return make


def with_class(find: Callable[[Any], Any], kind: type) -> Callable[[], Any]:
    """Return what makes a model of which a part is of another class."""

    def make() -> Any:
        model = transformer()
        find(model).__class__ = kind
        return model

    return make


OTHERS: dict[str, Callable[[], Any]] = {
    "adaptive softmax": partial(transformer, adaptive_softmax_cutoff="40,90", adaptive_softmax_dropout=0),
    "cross and self-attention in one": partial(
        transformer, cross_self_attention=True, no_cross_attention=True
    ),
    "norm of attention": within_layers(lambda layer: setattr(layer, "attn_ln", LayerNorm(16))),
    "scaled heads": within_layers(lambda layer: setattr(layer, "c_attn", torch.nn.Parameter(torch.rand(2)))),
    "norm of the feed-forward block": within_layers(
        lambda layer: setattr(layer, "ffn_layernorm", LayerNorm(24))
    ),
    "scaled residual": within_layers(
        lambda layer: setattr(layer, "w_resid", torch.nn.Parameter(torch.rand(16)))
    ),
    "another attention": with_class(lambda model: model.decoder.layers[0].self_attn, OtherAttention),
    "another residual": with_class(lambda model: model.decoder.layers[0], OtherLayer),
    "another output": with_class(lambda model: model.decoder, OtherDecoder),
}


@pytest.mark.parametrize("kind", OTHERS)
@torch.no_grad()
def test_what_is_not_plain_goes_on_with_fairseqs_decoder(kind: str) -> None:
    """Also beside a model that is plain."""
    model, given, tokens = OTHERS[kind](), sources(LENGTHS), torch.full((len(LENGTHS), 1), 2)
    assert StepDecoder.of(model) is None and StepDecoder.of(object()) is None
    plain = transformer()
    each = []
    for one in (model, plain):
        output = one.decoder(tokens, encoder_out=one.encoder.forward_torchscript(given), incremental_state={})
        each.append(one.get_normalized_probs(output, log_probs=True, sample=None)[:, -1])
    ensemble = RetrievalEnsemble([model, plain], [], 1, MixtureSettings())
    found, _ = ensemble.forward_decoder(tokens, ensemble.forward_encoder(given), [{}, {}])
    torch.testing.assert_close(found.exp(), torch.stack(each).exp().mean(dim=0))


@torch.no_grad()
def test_parameters_that_change_in_place_are_seen() -> None:
    model, given = transformer(), sources(LENGTHS)
    before = [ours for ours, _ in both_ways(model, 2, given)]
    assert StepDecoder.of(model) is StepDecoder.of(model)
    layer = model.decoder.layers[0]
    for part in (layer.self_attn.v_proj.weight, layer.fc1.bias, model.decoder.output_projection.weight):
        part.mul_(-1)
        for (ours, _), (wanted, _) in both_ways(model, 2, given):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)
    assert not torch.allclose(ours, before[-1][0], atol=1e-2)


def test_a_model_that_is_given_up_is_freed() -> None:
    model = transformer()
    assert StepDecoder.of(model) is not None
    gone = weakref.ref(model.decoder.layers[0].fc1.weight)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("layer", KEY_LAYERS)
@pytest.mark.parametrize("settings", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])
@torch.no_grad()
def test_keys_are_heard_as_from_the_decoder(layer: str, settings: dict[str, bool]) -> None:
    model, heard = transformer(**settings), []
    capture = KeyCapture(model, layer)
    with capture.telling(lambda states: heard.append(states.clone())):
        for _ in both_ways(model, 3, sources(LENGTHS)):
            theirs, ours = heard
            assert ours.shape == (len(ours), 1, 16)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
            heard.clear()


@pytest.mark.parametrize("settings", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])
@torch.no_grad()
def test_products_in_bfloat16_round_and_nothing_else(settings: dict[str, bool]) -> None:
    model, given = transformer(**settings), sources(LENGTHS)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    decoder = StepDecoder.of(model, bf16=True)
    for (ours, shares), (wanted, all_shares) in both_ways(model, 4, given, decoder):
        spread = float(wanted.std())
        assert 0 < (ours.float() - wanted).abs().max() < 0.15 * spread
        assert (ours.float() - wanted).square().mean().sqrt() < 0.03 * spread
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(len(shares)))
        torch.testing.assert_close(shares, all_shares, rtol=0, atol=0.05)
    ensemble = RetrievalEnsemble([model], [], 1, MixtureSettings())
    tokens, found = torch.full((len(LENGTHS), 1), 2), []
    for ensemble.precision in (FP32, BF16):
        found.append(ensemble.forward_decoder(tokens, ensemble.forward_encoder(given), [{}])[0])
    assert all(one.dtype == torch.float32 for one in found) and not torch.equal(*found)
    assert (found[0] - found[1]).abs().mean() < 0.1
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_model_of_16_bits_is_decoded_in_its_own(dtype: torch.dtype) -> None:
    model, given = transformer(), sources(LENGTHS)
    for (ours, _), (wanted, _) in both_ways(model.to(dtype), 2, given):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=0.05, atol=0.2)
