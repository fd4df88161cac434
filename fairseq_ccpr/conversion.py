"""Marian models as Hugging Face stores them (settings, vocabulary, weights), converted to fairseq checkpoints."""

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
from fairseq_ccpr.models.marian import ARCHITECTURE, SILU, MarianModel, marian_architecture
from fairseq_ccpr.models.pretrained.huggingface import CONFIG, TOKENIZER_CONFIG, read_json, read_weights
from fairseq_ccpr.storage.files import scratch_directory
from fairseq_ccpr.text.sentencepiece import PAIR

MARIAN = "marian"  # the model_type of config.json
POSITIONS = 512  # where a config does not say
ACTIVATIONS = {
    "swish": SILU, "silu": SILU, "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}  # fmt: skip
SIZES = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim",
    "decoder_ffn_dim",
)  # fmt: skip
# Options by which older configs describe other Transformer variants; off if absent.
OTHERWISE = ("normalize_before", "normalize_embedding", "add_final_layer_norm")


@dataclass(frozen=True)
class MarianSettings:
    """The settings in config.json.

    Attributes:
        sizes: of the Transformer, by the names of `SIZES`.
        activation: of the feed-forward blocks, by fairseq's name.
        scaled: whether embeddings are multiplied by the root of their width.
        shared: whether encoder and decoder share their embeddings.
        tied: whether the decoder's embeddings are the weights of its projection to the vocabulary.
        start: the id that the decoder starts from.
    """

    sizes: Mapping[str, int]
    activation: str
    scaled: bool
    shared: bool
    tied: bool
    start: int
    max_positions: int
    dropouts: Mapping[str, float]

    def fairseq_arguments(self) -> Namespace:
        """Return fairseq's settings of the model."""
        sides = {
            f"{side}_{ours}": self.sizes[f"{side}_{theirs}"]
            for side in ("encoder", "decoder")
            for ours, theirs in (
                ("layers", "layers"), ("attention_heads", "attention_heads"), ("ffn_embed_dim", "ffn_dim"),
            )
        }  # fmt: skip
        width = self.sizes["d_model"]
        return Namespace(
            arch=ARCHITECTURE,
            encoder_embed_dim=width,
            decoder_embed_dim=width,
            activation_fn=self.activation,
            no_scale_embedding=not self.scaled,
            share_all_embeddings=self.shared and self.tied,
            share_decoder_input_output_embed=self.tied,
            encoder_learned_pos=True,
            decoder_learned_pos=True,
            max_source_positions=self.max_positions,
            max_target_positions=self.max_positions,
            **sides,
            **self.dropouts,
        )


def is_marian(folder: Path) -> bool:
    """Tell whether a folder holds a Marian model as Hugging Face stores it."""
    return (folder / CONFIG).is_file() and read_json(folder / CONFIG).get("model_type") == MARIAN


def read_settings(folder: Path) -> MarianSettings:
    """Read config.json.

    Raises:
        CheckpointError: it is missing or damaged, or describes a Transformer that cannot be converted.
    """
    path = folder / CONFIG
    config = read_json(path)
    if (kind := config.get("model_type")) != MARIAN:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give one of type '{MARIAN}', such as OPUS-MT's"
        )
    if different := [name for name in OTHERWISE if config.get(name)]:
        raise CheckpointError(
            f"{path} asks for {different[0]}, with which Marian's own models are not built: it cannot be converted"
        )
    activation = config.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path} asks for the activation '{activation}': only {', '.join(ACTIVATIONS)} can be converted"
        )
    sizes = {name: _size(path, config, name) for name in SIZES}
    for side in ("encoder", "decoder"):
        if sizes["d_model"] % sizes[f"{side}_attention_heads"]:
            raise CheckpointError(
                f"{path} has a d_model of {sizes['d_model']}, which {sizes[f'{side}_attention_heads']} heads cannot share: "
                "copy the model's whole folder again"
            )
    dropouts = {name: float(config.get(name) or 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")}
    return MarianSettings(
        sizes, ACTIVATIONS[activation], bool(config.get("scale_embedding", False)),
        bool(config.get("share_encoder_decoder_embeddings", True)), bool(config.get("tie_word_embeddings", True)),
        _size(path, config, "decoder_start_token_id", least=0),
        _size(path, config, "max_position_embeddings") if "max_position_embeddings" in config else POSITIONS, dropouts,
    )  # fmt: skip


def _size(path: Path, config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < least:
        raise CheckpointError(f"{path} has no {name}, or none that is a number: copy the model's whole folder again")
    return value


SOURCE_VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
PAD, EOS, UNKNOWN = SPECIALS = ("<pad>", "</s>", "<unk>")  # in the order of fairseq's <s> <pad> </s> <unk>
_TAG = re.compile(r">>[\w-]+<<")


@dataclass(frozen=True)
class Vocabulary:
    """One side's symbols by their row in the weights.

    Attributes:
        path: of its file.
        symbols: all of them, by id.
    """

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
            symbol = self.symbols[row]
            # A line of dict.txt cannot hold white space, and some vocabularies have a word that reads <s>. No text is split
            # into these, so another name does; the row stays, and with it the probabilities.
            plain = symbol == "".join(symbol.split()) and symbol != made.bos_word and symbol
            made.add_symbol(symbol if plain else _free_name(row, names))
        return made

    def check_rows(self, rows: int, name: str) -> None:
        """Check that a tensor has a row for each symbol, and no others.

        Raises:
            CheckpointError: it does not.
        """
        if rows != len(self.symbols):
            raise CheckpointError(
                f"{self.path} has {len(self.symbols):,} entries, and {name} has {rows:,}: they are not of one model; copy "
                "the model's whole folder again"
            )


def read_vocabularies(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Read the vocabularies of source and target, which are the same unless the tokenizer says otherwise.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    separate = False
    if (folder / TOKENIZER_CONFIG).is_file():
        separate = bool(read_json(folder / TOKENIZER_CONFIG).get("separate_vocabs", False))
    source = _read(folder / SOURCE_VOCABULARY)
    return source, _read(folder / TARGET_VOCABULARY) if separate else source


def _read(path: Path) -> Vocabulary:
    ids: Mapping[str, object] = read_json(path)
    symbols = {number: symbol for symbol, number in ids.items() if isinstance(number, int)}
    if len(symbols) != len(ids) or sorted(symbols) != list(range(len(ids))):
        raise CheckpointError(f"{path} does not number its {len(ids):,} entries from 0 on, each once: copy it again")
    if missing := [symbol for symbol in SPECIALS if symbol not in ids]:
        raise CheckpointError(f"{path} has no {missing[0]}: give the vocabulary of a Marian model")
    return Vocabulary(path, [symbols[number] for number in range(len(symbols))])


def _free_name(row: int, taken: set[str]) -> str:
    name = f"<marian:{row}>"
    while name in taken:
        name += ">"
    return name


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


SETTINGS = "special:model.yml"  # the array of a model.npz that holds its settings as text
NATIVE = ("*.npz", "*.alphas.bin", "*.intgemm*.bin", "*decoder.yml")
SELF_ATTENTION = "self-attention"


def refuse_native(folder: Path) -> None:
    """Refuse a folder that holds a model as Marian or Bergamot store it.

    Raises:
        CheckpointError: it does.
    """
    files = sorted(path for kind in NATIVE for path in folder.glob(kind))
    if not files:
        return
    for path in files:
        settings = _settings(path) if path.suffix == ".npz" else {}
        decoder = settings.get("transformer-decoder-autoreg", SELF_ATTENTION)
        if decoder != SELF_ATTENTION:
            cell = str(settings.get("dec-cell", decoder)).upper()
            raise CheckpointError(
                f"{path} has a decoder of {cell} cells in place of self-attention, as the students of Bergamot and Firefox "
                "have: it cannot be converted; give its teacher, or another Transformer"
            )
        if settings.get("transformer-tied-layers"):
            raise CheckpointError(f"{path} has layers that are tied to each other: it cannot be converted")
    raise CheckpointError(
        f"{files[0]} is in Marian's own format: convert it with transformers' "
        "convert_marian_to_pytorch.py, and give that folder; SSRU decoders (Bergamot, Firefox) cannot be converted"
    )


def _settings(path: Path) -> Mapping[str, Any]:
    """Read the settings inside a model.npz; none of a file that is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            text = arrays[SETTINGS].tobytes().decode("utf-8").rstrip("\0") if SETTINGS in arrays else ""
        settings = yaml.safe_load(text)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


CHECKPOINT = "model.pt"
SOURCE_PIECES, TARGET_PIECES = "source.spm", "target.spm"
ENOUGH_KNOWN = 0.5  # fraction of a SentencePiece model that its own vocabulary has at least


@dataclass(frozen=True)
class Direction:
    """The languages of a converted model; None: as its folder says.

    Attributes:
        tag: what names the target language in front of a source sentence, in a model of several target languages.
    """

    source: str | None
    target: str | None
    tag: str | None


@dataclass(frozen=True)
class Converted:
    """A converted model."""

    source: str
    target: str
    tag: str
    arguments: Namespace
    parameters: int


def convert_marian(folder: Path, output: Path, direction: Direction) -> Converted:
    """Write checkpoint, dictionaries and SentencePiece models to `output`, which appears when it is complete.

    Raises:
        CheckpointError: a file is missing or damaged, they do not go together, or the model cannot be converted.
        ConfigurationError: the languages are not known.
    """
    settings = read_settings(folder)
    vocabularies = read_vocabularies(folder)
    for name, vocabulary in zip((SOURCE_PIECES, TARGET_PIECES), vocabularies):
        _check_pieces(folder / name, vocabulary)
    source, target = _languages(folder, direction)
    tag = _tag(vocabularies[0].tags, target, direction.tag)
    arguments, weights = convert_weights(read_weights(folder), settings, vocabularies, folder)
    options: dict[str, Any] = {
        "bpe": PAIR,
        "sentencepiece_model": str(folder / SOURCE_PIECES),
        "sentencepiece_target_model": str(folder / TARGET_PIECES),
        **({"source_tag": tag} if tag else {}),
    }
    output = output.resolve()
    with scratch_directory(output) as partial:
        for language, vocabulary in zip((source, target), vocabularies):
            vocabulary.dictionary().save(str(partial / f"dict.{language}.txt"))
        torch.save(_checkpoint(arguments, weights, source, target), partial / CHECKPOINT)
        Preprocessing(partial, source, target, options).save(partial)
        for name in (SOURCE_PIECES, TARGET_PIECES):
            shutil.copymode(partial / CHECKPOINT, partial / name)  # downloads may be read-only
        partial.replace(output)
    parameters = sum(tensor.numel() for tensor in {tensor.data_ptr(): tensor for tensor in weights.values()}.values())
    return Converted(source, target, tag, arguments, parameters)


def _languages(folder: Path, direction: Direction) -> tuple[str, str]:
    """Return source and target language: those given, or else those of the folder's tokenizer."""
    told = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    source, target = direction.source or told.get("source_lang"), direction.target or told.get("target_lang")
    if not source or not target:
        raise ConfigurationError(f"{folder} does not say which languages it translates: give -s and -t")
    if source == target:
        raise ConfigurationError(f"source and target language are both {source}: give -s and -t")
    return str(source), str(target)


def _tag(known: list[str], target: str, given: str | None) -> str:
    """Return the tag of the target language: the one given, or the only one, or that of its name; else nothing."""
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
        f"the model translates into {len(known)} languages, and none is called {target}: choose one with --source-tag, such "
        f"as {', '.join(known[:5])}"
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
            f"only {known:.0%} of the pieces of {path} are in {vocabulary.path.name}: they are not of one model; copy the "
            "model's whole folder again"
        )


def _checkpoint(arguments: Namespace, weights: dict[str, Tensor], source: str, target: str) -> dict[str, Any]:
    """Make a checkpoint in the format of fairseq's trainer, without what only training needs."""
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "num_updates": 0}
    task = {
        "task": "translation",
        "data": ".",
        "source_lang": source,
        "target_lang": target,
        "criterion": "cross_entropy",
    }
    return {
        "args": Namespace(**task, **vars(arguments)),
        "model": weights,
        "optimizer_history": [history | {"lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
