"""One step of a fairseq Transformer decoder for all hypotheses of a beam, with the model's own modules.

fairseq copies the keys and values of all hypotheses at each step, those of the source too. Here hypotheses of
a sentence share them: what they attend to is stored once, in the order in which it was computed, and a mask
says which of it belongs to the past of which hypothesis.

Letters: B sentences, n hypotheses of each, H = B n, S source subwords, t steps so far, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn
from torch.nn.functional import linear

STEPS_AT_FIRST = 32  # that room is made for; later for twice as many
ROWS = 64  # that weights are laid out for; others are multiplied as well
MADE = "_step_decoders"  # attribute of a decoder, with the ones made of it
METHODS = ("forward", "extract_features", "output_layer")
EXTRAS = ("c_attn", "attn_ln", "ffn_layernorm", "w_resid")  # of layers, which no translation model has


class Product:
    """Multiplies with the weights of linear layers side by side, in their dtype or in bfloat16.

    In bfloat16 the weights are laid out beforehand as the processor multiplies them, where torch can.
    """

    def __init__(self, modules: list[Any], precision: torch.dtype) -> None:
        weight, bias = modules[0].weight.detach(), modules[0].bias
        if len(modules) > 1:
            weight = torch.cat([one.weight.detach() for one in modules])
            bias = torch.cat([one.bias.detach() for one in modules])
        low = precision != weight.dtype
        self.packed = low and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.weight = weight.to(precision)
        self.bias = bias.detach().to(precision) if bias is not None else None
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)
        self.hooks = modules[-1]._forward_pre_hooks if len(modules) == 1 else {}
        self.module = modules[-1]

    def __call__(self, x: Tensor) -> Tensor:
        for hook in tuple(self.hooks.values()):
            changed = hook(self.module, (x,))
            x = x if changed is None else changed[0] if isinstance(changed, tuple) else changed
        if self.packed:
            made: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.bfloat16(), self.weight, self.bias, "none", [], ""
            )
            return made
        return linear(x.to(self.weight.dtype), self.weight, self.bias)


class LayerProducts(NamedTuple):
    """The products of a layer."""

    queries_keys_values: Product
    heard: Product
    source_queries: Product
    source_heard: Product
    fc1: Product
    fc2: Product


class StepDecoder:
    """Computes what a decoder computes, but for rounding, for the last token of each hypothesis.

    Hooks of the decoder's `fc1` and `output_projection` see what they see in fairseq.

    Args:
        precision: of the products with weights; all else is computed in the dtype of the model.
    """

    def __init__(self, decoder: Any, precision: torch.dtype) -> None:
        # weakly, as what is known of a decoder would keep it alive
        self.decoder: Callable[[], Any] = ref(decoder)
        self.width = decoder.layers[0].self_attn.head_dim
        self.layers = [
            LayerProducts(
                *(
                    Product(modules, precision)
                    for modules in (
                        [one.self_attn.q_proj, one.self_attn.k_proj, one.self_attn.v_proj],
                        [one.self_attn.out_proj],
                        [one.encoder_attn.q_proj],
                        [one.encoder_attn.out_proj],
                        [one.fc1],
                        [one.fc2],
                    )
                )
            )
            for one in decoder.layers
        ]
        self.output = Product([decoder.output_projection], precision)

    @classmethod
    def of(cls, model: Any, bf16: bool = False) -> StepDecoder | None:
        """Return the step decoder of a model; None where its decoder computes anything else than fairseq's own.

        Args:
            bf16: whether products with weights are computed in bfloat16, whatever the dtype of the model.
        """
        if not is_plain(model):
            return None
        decoder: Any = model.decoder
        precision = torch.bfloat16 if bf16 else decoder.output_projection.weight.dtype
        # An optimiser that changes parameters as `data` leaves their versions, and changes all of them.
        ends = decoder.layers[0].self_attn.q_proj.weight, decoder.layers[-1].fc1.weight
        now: tuple[Any, ...] = tuple(
            (one.data_ptr(), one._version, one.dtype) for one in decoder.parameters()
        )
        now = *now, *(float(one[0, 0]) for one in ends)
        made: dict[torch.dtype, Any] = vars(decoder).setdefault(MADE, {})
        if made.get(precision, (None,))[0] != now:
            made[precision] = now, cls(decoder, precision)
        found: StepDecoder = made[precision][1]
        return found

    def begin(self, encoded: dict[str, list[Tensor]]) -> StepState:
        """Begin a batch with what fairseq's encoder gives."""
        states, padding = encoded["encoder_out"][0].transpose(0, 1), encoded["encoder_padding_mask"]
        hidden = padding[0] if padding and padding[0].any() else None
        sources = []
        for attention in (layer.encoder_attn for layer in self.decoder().layers):
            states = states.to(attention.k_proj.weight.dtype)  # of an encoder in another precision
            keys, values = attention.k_proj(states), attention.v_proj(states)
            sources.append((self._split(keys).transpose(2, 3).contiguous(), self._split(values).contiguous()))
        return StepState(sources, hidden)

    def _split(self, states: Tensor) -> Tensor:
        """Split states [B, T, d] into heads, [B, heads, T, d / heads]: fp32 on CPUs, which attend faster in it."""
        states = states.float() if states.is_cpu else states
        return states.unflatten(2, (-1, self.width)).transpose(1, 2)

    def step(self, tokens: Tensor, state: StepState) -> tuple[Tensor, Tensor]:
        """Compute the logits of the next token [H, V], and the last layer's mean attention, fp32 [H, S].

        Args:
            tokens: int64 [H, t], the hypotheses so far.
        """
        decoder = self.decoder()
        x, seen = self._embed(tokens), state.grow()
        for i, (layer, products) in enumerate(zip(decoder.layers, self.layers)):
            before = layer.normalize_before
            y = layer.self_attn_layer_norm(x) if before else x
            new = self._split(products.queries_keys_values(y).unflatten(0, (-1, state.beam)))
            queries, keys, values = new.chunk(3, dim=1)
            heard, _ = attend(queries, *state.keep(i, keys, values), seen)
            x = x + products.heard(heard)
            x = x if before else layer.self_attn_layer_norm(x)
            y = layer.encoder_attn_layer_norm(x) if before else x
            queries = self._split(products.source_queries(y).unflatten(0, (-1, state.beam)))
            heard, shares = attend(queries, *state.sources[i], state.visible)
            x = x + products.source_heard(heard)
            x = x if before else layer.encoder_attn_layer_norm(x)
            y = (layer.final_layer_norm(x) if before else x).unsqueeze(0)  # time first, as in fairseq
            x = x + products.fc2(layer.activation_fn(products.fc1(y))).squeeze(0)
            x = x if before else layer.final_layer_norm(x)
        x = decoder.layer_norm(x) if decoder.layer_norm is not None else x
        x = decoder.project_out_dim(x) if decoder.project_out_dim is not None else x
        return self.output(x.unsqueeze(1)).squeeze(1), shares.mean(dim=1).flatten(0, 1).float()

    def _embed(self, tokens: Tensor) -> Tensor:
        decoder = self.decoder()
        given = tokens if (rename := getattr(decoder, "given", None)) is None else rename(tokens)
        x = decoder.embed_scale * decoder.embed_tokens(given[:, -1])
        x = decoder.project_in_dim(x) if decoder.project_in_dim is not None else x
        if decoder.embed_positions is not None:
            x = x + decoder.embed_positions(given, incremental_state={})[:, -1]
        return decoder.layernorm_embedding(x) if decoder.layernorm_embedding is not None else x


def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend to keys, transposed, [B, heads, d', T]: what was heard [B n, heads d'], and the shares [B, heads, n, T].

    Args:
        queries: fp32 [B, heads, n, d'].
        values: fp32 [B, heads, T, d'].
        seen: 0 for what counts, -inf for what does not, [B, 1, n or 1, T]; None: all counts.
    """
    scores = (queries * keys.size(2) ** -0.5) @ keys
    shares = (scores if seen is None else scores.add_(seen)).softmax(dim=3)
    return (shares @ values).transpose(1, 2).flatten(2).flatten(0, 1), shares


class StepState:
    """What the hypotheses of a batch attend to.

    Args:
        sources: keys, transposed, [B, heads, d', S], and values [B, heads, S, d'] of the sources in each layer.
        hidden: bool [B, S], True at padding; None without padding.
    """

    def __init__(self, sources: list[tuple[Tensor, Tensor]], hidden: Tensor | None) -> None:
        self.sources, self.beam, self.steps = sources, 1, 0
        self.visible = torch.zeros_like(hidden, dtype=torch.float32) if hidden is not None else None
        if hidden is not None and self.visible is not None:
            self.visible = self.visible.masked_fill_(hidden, float("-inf"))[:, None, None]
        # keys and values of each layer in the order of steps, as those of the sources, with room for more
        self.past: list[tuple[Tensor, Tensor]] = []
        # 0 where a hypothesis has something in its past, else -inf: [H, room]
        self.seen = sources[0][0].new_empty(0)

    def reorder(self, order: Tensor) -> None:
        """Let hypothesis i continue what hypothesis order[i] was, int64 [H']: sentences may end, or first grow beams."""
        sentences = len(self.sources[0][0])
        if not self.steps:
            self.beam = len(order) // sentences
            return
        self.seen = self.seen.index_select(0, order)
        if len(order) < sentences * self.beam:
            rows = order[:: self.beam] // self.beam
            self.sources, self.past = (
                [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in both]
                for both in (self.sources, self.past)
            )
            self.visible = self.visible.index_select(0, rows) if self.visible is not None else None

    def grow(self) -> Tensor:
        """Make room for a step; returns what each hypothesis sees, [B, 1, n, steps * n]."""
        begin, beam = self.steps * self.beam, self.beam
        self.steps += 1
        if begin == self.seen.size(-1):
            self._make_room(max(2 * begin, STEPS_AT_FIRST * beam))
        seen = self.seen.view(-1, beam, self.seen.size(1))[:, :, : begin + beam]
        seen[:, :, begin:].diagonal(dim1=1, dim2=2).zero_()
        return seen.unsqueeze(1)

    def _make_room(self, room: int) -> None:
        keys, used = self.sources[0][0], self.seen.size(-1)
        sentences, heads, width, _ = keys.shape
        past = self.past or [(keys[..., :0], keys.transpose(2, 3)[:, :, :0])] * len(self.sources)
        self.past = [
            (
                torch.cat([old_keys, keys.new_empty(sentences, heads, width, room - used)], dim=3),
                torch.cat([old_values, keys.new_empty(sentences, heads, room - used, width)], dim=2),
            )
            for old_keys, old_values in past
        ]
        fresh = keys.new_full((sentences * self.beam, room - used), float("-inf"))
        self.seen = torch.cat([self.seen.view(len(fresh), used), fresh], dim=1)

    def keep(self, layer: int, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, heads, n, d'] of a step; returns all so far."""
        keys, values = self.past[layer]
        end = self.steps * self.beam
        keys[..., end - self.beam : end], values[:, :, end - self.beam : end] = (
            new_keys.transpose(2, 3),
            new_values,
        )
        return keys[..., :end], values[:, :, :end]


def is_plain(model: Any) -> bool:
    """Tell whether a model's decoder is of the parts that `StepDecoder` computes, and nothing changes their results."""
    decoder: Any = getattr(model, "decoder", None)
    return (
        isinstance(decoder, TransformerDecoderBase)
        and _has(decoder, TransformerDecoderBase, *METHODS)
        and (
            _has(decoder, TransformerDecoderBase, "extract_features_scriptable") or hasattr(decoder, "given")
        )
        and all(
            type(one).get_normalized_probs.__module__.startswith("fairseq.models") for one in (model, decoder)
        )
        and decoder.adaptive_softmax is None
        and decoder.quant_noise is None
        and not any(getattr(one, "apply_during_inference", False) for one in decoder.modules())
        and not decoder.cross_self_attention
        and _are_linear([decoder.output_projection])
        and all(_is_plain_layer(layer) for layer in decoder.layers)
    )


def _has(module: Any, base: type, *methods: str) -> bool:
    return all(getattr(type(module), name) is getattr(base, name) for name in methods)


def _is_plain_layer(layer: Any) -> bool:
    attentions: list[Any] = [getattr(layer, name, None) for name in ("self_attn", "encoder_attn")]
    return (
        isinstance(layer, TransformerDecoderLayerBase)
        and not any(_is_changed(one) for one in (layer, *attentions))
        and _has(layer, TransformerDecoderLayerBase, "forward", "residual_connection")
        and not any(getattr(layer, name, None) is not None for name in EXTRAS)
        and _are_linear([layer.fc1, layer.fc2])
        and all(
            type(one) is MultiheadAttention
            and one.bias_k is None
            and not one.add_zero_attn
            and _are_linear([one.q_proj, one.k_proj, one.v_proj, one.out_proj])
            and one.q_proj.bias is not None
            for one in attentions
        )
    )


def _are_linear(modules: list[Any]) -> bool:
    return all(type(one) is nn.Linear and not one._forward_hooks for one in modules)


def _is_changed(module: Any) -> bool:
    return bool(
        module is None or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )
