"""The weights of a Marian model by fairseq's names, all of them used and none left out.

The names inside layers are the same. Rows of embeddings are put in fairseq's order. <s>, which Marian does not have, gets the
row that Marian's decoder starts from, and a bias that makes it impossible.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_ccpr.conversion.marian_settings import MarianSettings
from fairseq_ccpr.conversion.marian_vocabulary import Vocabulary
from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.marian import MarianModel, marian_architecture

BEFORE = "model."  # their names begin so
SHARED = "model.shared.weight"
BIAS = "final_logits_bias"
PROJECTION = "lm_head.weight"
IMPOSSIBLE = -1e4  # a logit whose probability is 0, and which fp16 can hold
SIDES = ("encoder", "decoder")


def convert_weights(
    marian: dict[str, Tensor], settings: MarianSettings, vocabularies: tuple[Vocabulary, Vocabulary], folder: Path
) -> tuple[Namespace, dict[str, Tensor]]:
    """Return fairseq's settings of the model, and its weights in fp32.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is none of a Marian Transformer.
    """
    arguments = settings.fairseq_arguments()
    left = dict(marian)
    converted = _embeddings(left, settings, vocabularies, folder)
    for side in SIDES:
        positions = left.pop(f"{BEFORE}{side}.embed_positions.weight", None)
        if positions is None:
            positions = sinusoids(settings.max_positions, settings.sizes["d_model"])
        converted[f"{side}.embed_positions.weight"] = _after_padding(positions)
    layers = {
        name: tensor for name, tensor in left.items() if name.startswith(tuple(f"{BEFORE}{s}.layers." for s in SIDES))
    }
    converted |= {name.removeprefix(BEFORE): tensor for name, tensor in layers.items()}
    others = sorted(set(left) - set(layers))
    return arguments, _loaded(converted, others, arguments, vocabularies, folder)


def _embeddings(
    left: dict[str, Tensor], settings: MarianSettings, vocabularies: tuple[Vocabulary, Vocabulary], folder: Path
) -> dict[str, Tensor]:
    """Take the embeddings and the projection to the vocabulary out of `left`."""
    source, target = vocabularies
    shared = left.pop(SHARED, None) if settings.shared else None
    found: dict[str, Tensor] = {}
    for side in SIDES:
        own = left.pop(f"{BEFORE}{side}.embed_tokens.weight", None)
        found[side] = _one(shared, own, f"{BEFORE}{side}.embed_tokens.weight", folder)
    if settings.shared:
        found["decoder"] = _one(found["encoder"], found["decoder"], f"{BEFORE}decoder.embed_tokens.weight", folder)
    own = left.pop(PROJECTION, None)
    found[PROJECTION] = _one(found["decoder"] if settings.tied else None, own, PROJECTION, folder)
    bias = left.pop(BIAS, torch.zeros(1, len(target.symbols))).reshape(-1, 1)
    checked = [
        (source, found["encoder"], "the encoder's embedding"),
        (target, found["decoder"], "the decoder's embedding"),
    ]
    for vocabulary, tensor, name in [*checked, (target, found[PROJECTION], PROJECTION), (target, bias, BIAS)]:
        vocabulary.check_rows(len(tensor), name)
    if settings.start >= len(target.symbols):
        raise CheckpointError(
            f"{folder} starts its decoder from the entry {settings.start:,} of {len(target.symbols):,} "
            "(decoder_start_token_id): copy the model's whole folder again"
        )
    order = [settings.start, *target.rows]
    moved = bias[order].flatten()
    moved[0] = IMPOSSIBLE
    return {
        # The encoder never sees <s>: where its embeddings are the decoder's, the row is shared with it.
        "encoder.embed_tokens.weight": found["encoder"][[settings.start if settings.shared else 0, *source.rows]],
        "decoder.embed_tokens.weight": found["decoder"][order],
        "decoder.output_projection.weight": found[PROJECTION][order],
        "decoder.output_projection.bias": moved,
    }


def _one(given: Tensor | None, own: Tensor | None, name: str, folder: Path) -> Tensor:
    """Return the tensor that stands for both: the one it is tied to, or its own."""
    if given is None and own is None:
        raise CheckpointError(f"the weights of {folder} have no {name}: copy the model's whole folder again")
    if given is None:
        assert own is not None  # see above
        return own
    if own is not None and not torch.equal(given, own):
        raise CheckpointError(
            f"the weights of {folder} have a {name} of its own, which config.json says is tied to another: they are not of "
            "one model; copy the model's whole folder again"
        )
    return given


def sinusoids(count: int, width: int) -> Tensor:
    """Compute Marian's position embeddings, fp32 [count, width]: sines in the first half, cosines in the second.

    >>> (100 * sinusoids(2, 4)).round().tolist()
    [[0.0, 0.0, 100.0, 100.0], [84.0, 1.0, 54.0, 100.0]]
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10000**exponents
    return torch.cat([angles.sin(), angles.cos()[:, : width // 2]], dim=1).float()


def _after_padding(positions: Tensor) -> Tensor:
    """Put the rows before a position table that fairseq counts from."""
    before = positions.new_zeros(Dictionary().pad() + 1, positions.size(1))
    return torch.cat([before, positions])


def _loaded(
    converted: dict[str, Tensor], others: list[str], arguments: Namespace, vocabularies: tuple[Vocabulary, Vocabulary],
    folder: Path,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the weights of fairseq's model once all that were converted are in it, and nothing else was there."""
    source, target = (vocabulary.dictionary() for vocabulary in vocabularies)
    task: Any = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    full = Namespace(**vars(arguments))
    marian_architecture(full)
    model = MarianModel.build_model(full, task)
    wanted = model.state_dict()
    converted |= {name: tensor for name, tensor in wanted.items() if name.endswith(".version")}
    if unknown := sorted(set(converted) - set(wanted)) + others:
        raise CheckpointError(
            f"{folder} has weights that no Marian Transformer has ({', '.join(unknown[:3])}): SSRU decoders, guided "
            "alignment and other variants cannot be converted"
        )
    if missing := sorted(set(wanted) - set(converted)):
        raise CheckpointError(f"the weights of {folder} have no {missing[0]}: copy the model's whole folder again")
    for name, tensor in converted.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} in the weights of {folder} is {tuple(tensor.shape)}, and config.json asks for "
                f"{tuple(wanted[name].shape)}: they are not of one model; copy the model's whole folder again"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} in the weights of {folder} has NaN or infinite values: copy it again")
    model.load_state_dict({name: tensor.float() for name, tensor in converted.items()}, strict=True)
    return dict(model.state_dict())
