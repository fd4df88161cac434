"""Marian models as Hugging Face stores them (settings, vocabulary, weights) become fairseq checkpoints."""

from __future__ import annotations

import re
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from fairseq.data import Dictionary
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, did_you_mean
from fairseq_ccpr.models.checkpoint import as_checkpoint
from fairseq_ccpr.models.marian import ARCHITECTURE, SILU, MarianModel, marian_architecture
from fairseq_ccpr.models.pretrained.huggingface import CONFIG, TOKENIZER_CONFIG, read_json, read_weights
from fairseq_ccpr.storage.files import scratch_directory
from fairseq_ccpr.text.schemes import SENTENCEPIECE_PAIR

MARIAN = "marian"  # the model_type of config.json
ACTIVATIONS = {
    "swish": SILU, "silu": SILU, "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}  # fmt: skip
SIZES = {  # fairseq's name of a size, and that of Hugging Face
    "encoder_layers": "encoder_layers", "encoder_attention_heads": "encoder_attention_heads",
    "encoder_ffn_embed_dim": "encoder_ffn_dim", "encoder_embed_dim": "d_model",
    "max_source_positions": "max_position_embeddings", "decoder_layers": "decoder_layers",
    "decoder_attention_heads": "decoder_attention_heads", "decoder_ffn_embed_dim": "decoder_ffn_dim",
    "decoder_embed_dim": "d_model", "max_target_positions": "max_position_embeddings",
}  # fmt: skip
CONFIG_DEFAULTS: Mapping[str, Any] = {  # of what a config.json may leave out
    "activation_function": "gelu", "scale_embedding": False, "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
COPY_AGAIN = "copy the model's whole folder again"
# Options by which older configs describe other Transformer variants; off if absent.
OTHERWISE = ("normalize_before", "normalize_embedding", "add_final_layer_norm")
SOURCE_VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
SPECIALS = ("<pad>", "</s>", "<unk>")  # in the order of fairseq's <s> <pad> </s> <unk>
_TAG = re.compile(r">>[\w-]+<<")
BEFORE = "model."  # their names begin so
BIAS = "final_logits_bias"
LM_HEAD = "lm_head.weight"
IMPOSSIBLE = -1e4  # a logit whose probability is 0, and which fp16 can hold
SIDES = ("encoder", "decoder")
SETTINGS = "special:model.yml"  # the array of a model.npz that holds its settings as text
NATIVE = ("*.npz", "*.alphas.bin", "*.intgemm*.bin", "*decoder.yml")
SELF_ATTENTION = "self-attention"
CHECKPOINT = "model.pt"
SOURCE_PIECES, TARGET_PIECES = "source.spm", "target.spm"
ENOUGH_KNOWN = 0.5  # fraction of a SentencePiece model that its own vocabulary has at least


def is_marian(folder: Path) -> bool:
    """Tell whether a folder holds a Marian model as Hugging Face stores it."""
    return (folder / CONFIG).is_file() and read_json(folder / CONFIG).get("model_type") == MARIAN


def read_settings(folder: Path) -> tuple[Namespace, bool, int]:
    """Read config.json: fairseq's settings, whether embeddings are shared, the decoder's first symbol."""
    path = folder / CONFIG
    config = {**CONFIG_DEFAULTS, **read_json(path)}
    if (kind := config.get("model_type")) != MARIAN:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give one of type '{MARIAN}', such as OPUS-MT's"
        )
    if different := [name for name in OTHERWISE if config.get(name)]:
        raise CheckpointError(
            f"{path} asks for {different[0]}, with which Marian's own models are not built: it cannot be "
            "converted"
        )
    activation = config["activation_function"]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path} asks for the activation '{activation}': only {', '.join(ACTIVATIONS)} can be converted"
        )
    sizes = {ours: _size(path, config, theirs) for ours, theirs in SIZES.items()}
    for side in SIDES:
        width, heads = sizes[f"{side}_embed_dim"], sizes[f"{side}_attention_heads"]
        if width % heads:
            raise CheckpointError(
                f"{path} has a d_model of {width}, which {heads} heads cannot share: {COPY_AGAIN}"
            )
    shared, tied = bool(config["share_encoder_decoder_embeddings"]), bool(config["tie_word_embeddings"])
    return Namespace(
        arch=ARCHITECTURE, activation_fn=ACTIVATIONS[activation],
        no_scale_embedding=not config["scale_embedding"], share_all_embeddings=shared and tied,
        share_decoder_input_output_embed=tied, encoder_learned_pos=True, decoder_learned_pos=True,
        **sizes,
        **{name: float(config.get(name) or 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")},
    ), shared, _size(path, config, "decoder_start_token_id", least=0)  # fmt: skip


def _size(path: Path, config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < least:
        raise CheckpointError(f"{path} has no {name}, or none that is a number: {COPY_AGAIN}")
    return value


@dataclass(frozen=True)
class Vocabulary:
    """One side's symbols, by their row in the weights."""

    path: Path
    symbols: list[str]

    @property
    def tags(self) -> list[str]:
        """The symbols that name a target language in front of a source sentence, such as >>deu<<."""
        return [symbol for symbol in self.symbols if _TAG.fullmatch(symbol)]

    @property
    def rows(self) -> list[int]:
        """For each entry of fairseq's dictionary after <s>, its row in the weights."""
        special = [self.symbols.index(symbol) for symbol in SPECIALS]
        return special + [row for row in range(len(self.symbols)) if row not in special]

    def dictionary(self) -> Dictionary:
        """Make fairseq's dictionary: <s>, which Marian lacks, and then `rows`."""
        made = Dictionary()
        names = set(self.symbols)
        for row in self.rows[len(SPECIALS) :]:
            symbol, other = self.symbols[row], f"<marian:{row}>"
            while other in names:
                other += ">"
            # A line of dict.txt cannot hold white space, and some vocabularies have a word that reads <s>. No
            # text is split into these, so another name does; the row stays, and with it the probabilities.
            plain = symbol == "".join(symbol.split()) and symbol != made.bos_word and symbol
            made.add_symbol(symbol if plain else other)
        return made


def read_vocabularies(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Read the vocabularies of source and target, which are the same unless the tokenizer says otherwise."""
    source, path = _read(folder / SOURCE_VOCABULARY), folder / TOKENIZER_CONFIG
    separate = path.is_file() and read_json(path).get("separate_vocabs")
    return source, _read(folder / TARGET_VOCABULARY) if separate else source


def _read(path: Path) -> Vocabulary:
    ids: Mapping[str, object] = read_json(path)
    symbols = {number: symbol for symbol, number in ids.items() if isinstance(number, int)}
    if len(symbols) != len(ids) or sorted(symbols) != list(range(len(ids))):
        raise CheckpointError(
            f"{path} does not number its {len(ids):,} entries from 0 on, each once: copy it again"
        )
    if missing := [symbol for symbol in SPECIALS if symbol not in ids]:
        raise CheckpointError(f"{path} has no {missing[0]}: give the vocabulary of a Marian model")
    return Vocabulary(path, [symbols[number] for number in range(len(symbols))])


def convert_weights(
    marian: dict[str, Tensor],
    arguments: Namespace,
    shared: bool,
    start: int,
    vocabularies: tuple[Vocabulary, Vocabulary],
    folder: Path,
) -> dict[str, Tensor]:
    """Return the weights of fairseq's model, in fp32."""
    left = dict(marian)
    converted = _embeddings(
        left, arguments.share_decoder_input_output_embed, shared, start, vocabularies, folder
    )
    for side in SIDES:
        positions = left.pop(f"{BEFORE}{side}.embed_positions.weight", None)
        if positions is None:
            positions = sinusoids(arguments.max_source_positions, arguments.encoder_embed_dim)
        # fairseq counts from the next row
        before = positions.new_zeros(Dictionary().pad() + 1, positions.size(1))
        converted[f"{side}.embed_positions.weight"] = torch.cat([before, positions])
    layers = [name for name in left if name.startswith(tuple(f"{BEFORE}{side}.layers." for side in SIDES))]
    converted |= {name.removeprefix(BEFORE): left.pop(name) for name in layers}
    return _loaded(converted, sorted(left), arguments, vocabularies, folder)


def _embeddings(
    left: dict[str, Tensor],
    tied: bool,
    shared: bool,
    start: int,
    vocabularies: tuple[Vocabulary, Vocabulary],
    folder: Path,
) -> dict[str, Tensor]:
    source, target = vocabularies

    def take(name: str, other: Tensor | None, tensor: Tensor | None) -> Tensor:
        if other is not None and tensor is not None and not torch.equal(other, tensor):
            raise CheckpointError(
                f"the weights of {folder} have a {name} of its own, which config.json says is tied to "
                f"another: they are not of one model; {COPY_AGAIN}"
            )
        if (found := tensor if other is None else other) is None:
            raise CheckpointError(f"the weights of {folder} have no {name}: {COPY_AGAIN}")
        return found

    both = left.pop("model.shared.weight", None) if shared else None
    names = [f"{BEFORE}{side}.embed_tokens.weight" for side in SIDES]
    encoder, decoder = (take(name, both, left.pop(name, None)) for name in names)
    if shared:
        decoder = take(names[1], encoder, decoder)
    projection = take(LM_HEAD, decoder if tied else None, left.pop(LM_HEAD, None))
    bias = left.pop(BIAS, torch.zeros(1, len(target.symbols))).reshape(-1, 1)
    for vocabulary, tensor, name in (
        (source, encoder, "the encoder's embedding"),
        (target, decoder, "the decoder's embedding"),
        (target, projection, LM_HEAD),
        (target, bias, BIAS),
    ):
        if len(tensor) != len(vocabulary.symbols):
            raise CheckpointError(
                f"{vocabulary.path} has {len(vocabulary.symbols):,} entries, and {name} has {len(tensor):,}: "
                f"they are not of one model; {COPY_AGAIN}"
            )
    if start >= len(target.symbols):
        raise CheckpointError(
            f"{folder} starts its decoder from the entry {start:,} of {len(target.symbols):,} "
            f"(decoder_start_token_id): {COPY_AGAIN}"
        )
    order = [start, *target.rows]
    moved = bias[order].flatten()
    moved[0] = IMPOSSIBLE
    return {
        # The encoder never sees <s>: where its embeddings are the decoder's, the row is shared with it.
        "encoder.embed_tokens.weight": encoder[[start if shared else 0, *source.rows]],
        "decoder.embed_tokens.weight": decoder[order],
        "decoder.output_projection.weight": projection[order],
        "decoder.output_projection.bias": moved,
    }


def sinusoids(count: int, width: int) -> Tensor:
    """Compute Marian's position embeddings, fp32 [count, width]: sines in the first half, then cosines.

    >>> (100 * sinusoids(2, 4)).round().tolist()
    [[0.0, 0.0, 100.0, 100.0], [84.0, 1.0, 54.0, 100.0]]
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10000**exponents
    return torch.cat([angles.sin(), angles.cos()[:, : width // 2]], dim=1).float()


def _loaded(
    converted: dict[str, Tensor],
    others: list[str],
    arguments: Namespace,
    vocabularies: tuple[Vocabulary, Vocabulary],
    folder: Path,
) -> dict[str, Tensor]:
    source, target = (vocabulary.dictionary() for vocabulary in vocabularies)
    task: Any = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    full = Namespace(**vars(arguments))
    marian_architecture(full)
    model = MarianModel.build_model(full, task)
    untrained = model.state_dict()
    converted |= {name: tensor for name, tensor in untrained.items() if name.endswith(".version")}
    if unknown := sorted(set(converted) - set(untrained)) + others:
        raise CheckpointError(
            f"{folder} has weights that no Marian Transformer has ({', '.join(unknown[:3])}): SSRU decoders, "
            "guided alignment and other variants cannot be converted"
        )
    if missing := sorted(set(untrained) - set(converted)):
        raise CheckpointError(f"the weights of {folder} have no {missing[0]}: {COPY_AGAIN}")
    for name, tensor in converted.items():
        if tensor.shape != untrained[name].shape:
            raise CheckpointError(
                f"{name} in the weights of {folder} is {tuple(tensor.shape)}, and config.json asks for "
                f"{tuple(untrained[name].shape)}: they are not of one model; {COPY_AGAIN}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} in the weights of {folder} has NaN or infinite values: copy it again"
            )
    model.load_state_dict({name: tensor.float() for name, tensor in converted.items()}, strict=True)
    return dict(model.state_dict())


def refuse_native(folder: Path) -> None:
    """Refuse a folder that holds a model as Marian or Bergamot store it."""
    files = sorted(path for kind in NATIVE for path in folder.glob(kind))
    if not files:
        return
    for path in files:
        settings = _settings(path) if path.suffix == ".npz" else {}
        decoder = settings.get("transformer-decoder-autoreg", SELF_ATTENTION)
        if decoder != SELF_ATTENTION:
            cell = str(settings.get("dec-cell", decoder)).upper()
            raise CheckpointError(
                f"{path} has a decoder of {cell} cells in place of self-attention, as the students of "
                "Bergamot and Firefox have: it cannot be converted; give its teacher, or another Transformer"
            )
        if settings.get("transformer-tied-layers"):
            raise CheckpointError(f"{path} has layers that are tied to each other: it cannot be converted")
    raise CheckpointError(
        f"{files[0]} is in Marian's own format: convert it with transformers' "
        "convert_marian_to_pytorch.py, and give that folder; SSRU decoders (Bergamot, Firefox) cannot be "
        "converted"
    )


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            text = arrays[SETTINGS].tobytes().decode("utf-8").rstrip("\0") if SETTINGS in arrays else ""
        settings = yaml.safe_load(text)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def convert_marian(
    folder: Path, output: Path, source: str | None, target: str | None, source_tag: str | None
) -> str:
    """Write checkpoint, dictionaries and SentencePiece models to `output`, which appears when it is complete.

    The languages, and the tag that names the target language in front of a source sentence, are by default
    the folder's.

    Returns:
        A description, such as de-en|layers:6+6|width:512|activation:swish|parameters:74,410,496.
    """
    arguments, shared, start = read_settings(folder)
    vocabularies = read_vocabularies(folder)
    for name, vocabulary in zip((SOURCE_PIECES, TARGET_PIECES), vocabularies):
        _check_pieces(folder / name, vocabulary)
    known = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    source, target = source or known.get("source_lang"), target or known.get("target_lang")
    if not source or not target:
        raise ConfigurationError(f"{folder} does not say which languages it translates: give -s and -t")
    if source == target:
        raise ConfigurationError(f"source and target language are both {source}: give -s and -t")
    tag = _tag(vocabularies[0].tags, target, source_tag)
    weights = convert_weights(read_weights(folder), arguments, shared, start, vocabularies, folder)
    pieces = {"sentencepiece_model": SOURCE_PIECES, "sentencepiece_target_model": TARGET_PIECES}
    options = {"bpe": SENTENCEPIECE_PAIR} | {option: str(folder / name) for option, name in pieces.items()}
    options |= {"source_tag": tag} if tag else {}
    output = output.resolve()
    with scratch_directory(output) as partial:
        for language, vocabulary in zip((source, target), vocabularies):
            vocabulary.dictionary().save(str(partial / f"dict.{language}.txt"))
        task = {"task": "translation", "data": ".", "source_lang": source, "target_lang": target}
        trained = Namespace(**task, criterion="cross_entropy", **vars(arguments))
        torch.save(as_checkpoint(trained, weights, "CrossEntropyCriterion"), partial / CHECKPOINT)
        Preprocessing(partial, source, target, options).save(partial)
        for name in (SOURCE_PIECES, TARGET_PIECES):
            shutil.copymode(partial / CHECKPOINT, partial / name)  # downloads may be read-only
        partial.replace(output)
    parameters = sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    tagged = f"|tag:{tag}" if tag else ""
    return (
        f"{source}-{target}{tagged}|layers:{arguments.encoder_layers}+{arguments.decoder_layers}|"
        f"width:{arguments.encoder_embed_dim}|activation:{arguments.activation_fn}|parameters:{parameters:,}"
    )


def _tag(known: list[str], target: str, given: str | None) -> str:
    if given is not None:
        if given not in known:
            several = did_you_mean(given, known) or f": it has {', '.join(known[:5]) or 'none'}"
            raise ConfigurationError(f"--source-tag {given} is not in the model's vocabulary{several}")
        return given
    if len(known) <= 1:
        return known[0] if known else ""
    if f">>{target}<<" in known:
        return f">>{target}<<"
    raise ConfigurationError(
        f"the model translates into {len(known)} languages, but not into {target}: choose one with "
        f"--source-tag, such as {', '.join(known[:5])}"
    )


def _check_pieces(path: Path, vocabulary: Vocabulary) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}: copy the model's whole folder")
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise CheckpointError(f"{path} is no SentencePiece model: copy it again") from None
    pieces = set(processor.id_to_piece(list(range(len(processor)))))
    known = len(pieces & set(vocabulary.symbols)) / max(1, len(pieces))
    if known < ENOUGH_KNOWN:
        raise CheckpointError(
            f"only {known:.0%} of the pieces of {path} are in {vocabulary.path.name}: they are not of one "
            "model; copy the model's whole folder again"
        )
