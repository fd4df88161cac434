"""Reads a BERT or XLM-R folder of Hugging Face: LaBSE, XLM-R, multilingual-e5."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.pretrained.bert import ROWS_BEFORE, BertShape, fairseq_arguments, fairseq_weights
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.pretrained.hub_folder import CONFIG, TOKENIZER_CONFIG, read_json, read_weights
from fairseq_ccpr.text.sentencepiece_model import SPECIALS, read_pieces
from fairseq_ccpr.text.sentencepiece_tokenizer import SentencePieceTokenizer
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.wordpiece_tokenizer import WordPieceSettings, WordPieceTokenizer

WORDPIECE_VOCABULARY = "vocab.txt"
ROWS_BEFORE_POSITIONS = {"bert": 0, "xlm-roberta": ROWS_BEFORE}  # by model type
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
LAYERS, HEADS = "num_hidden_layers", "num_attention_heads"  # which a config.json must have
# Models with a head besides the encoder have a prefix; old ones call a LayerNorm's weight gamma, and its bias beta.
RENAMED = {r"^(bert|roberta)\.": "", r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
BERT_SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")  # in the order of fairseq's <s> <pad> </s> <unk>
BERT_MASK = "[MASK]"
XLMR_SPECIALS = 4  # <s> <pad> </s> <unk> come before the pieces there too


def read_huggingface(folder: Path) -> ContextEncoder:
    """Read the encoder of a folder with config.json, weights, and a tokenizer's files.

    Raises:
        CheckpointError: another architecture, no weights, no tokenizer, or files that do not match.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in ROWS_BEFORE_POSITIONS:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give a translation model of type marian, or an encoder of type "
            f"{' or '.join(ROWS_BEFORE_POSITIONS)}"
        )
    activation, positions = config.get("hidden_act", "gelu"), config.get("position_embedding_type", "absolute")
    if activation not in ACTIVATIONS or positions != "absolute":
        raise CheckpointError(
            f"{folder / CONFIG} asks for activation '{activation}' and {positions} positions, and fairseq has "
            f"{', '.join(ACTIVATIONS)} and absolute ones"
        )
    for name in (LAYERS, HEADS):
        if not isinstance(config.get(name), int):
            raise CheckpointError(f"{folder / CONFIG} has no {name}: copy the model's whole folder again")
    tokenizer, rows = _read_tokenizer(folder)
    shape = BertShape(
        config[LAYERS], config[HEADS], config.get("layer_norm_eps", 1e-12), ACTIVATIONS[activation],
        ROWS_BEFORE_POSITIONS[kind], config.get("hidden_dropout_prob", 0.1),
        config.get("attention_probs_dropout_prob", 0.1),
    )  # fmt: skip
    weights = fairseq_weights(_renamed(read_weights(folder)), shape, rows)
    return ContextEncoder(fairseq_arguments(shape, weights), tokenizer, weights).eval()


def _read_tokenizer(folder: Path) -> tuple[SubwordTokenizer, list[int]]:
    """Read the tokenizer, and for each entry of its dictionary the row of the folder's embeddings."""
    model = folder / SentencePieceTokenizer.filename
    if model.is_file():
        return _read_sentencepiece(model)
    if (folder / WORDPIECE_VOCABULARY).is_file():
        return _read_wordpiece(folder)
    raise CheckpointError(
        f"{folder} has no tokenizer: it needs {model.name} (XLM-R, multilingual-e5) or {WORDPIECE_VOCABULARY} (BERT, LaBSE)"
    )


def _read_sentencepiece(path: Path) -> tuple[SubwordTokenizer, list[int]]:
    content = path.read_bytes()
    try:
        pieces = read_pieces(content)
        tokenizer = SentencePieceTokenizer(pieces[len(SPECIALS) :], content)
    except RuntimeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error})") from None
    if pieces[: len(SPECIALS)] != SPECIALS:
        raise CheckpointError(f"{path} begins with the pieces {pieces[:3]}: give the model of an XLM-R, <unk> <s> </s>")
    return tokenizer, list(range(len(tokenizer.dictionary)))


def _read_wordpiece(folder: Path) -> tuple[SubwordTokenizer, list[int]]:
    path = folder / WORDPIECE_VOCABULARY
    pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    row = {piece.rstrip("\r"): at for at, piece in enumerate(pieces)}
    if missing := [special for special in (*BERT_SPECIALS, BERT_MASK) if special not in row]:
        raise CheckpointError(f"{path} has no {missing[0]}: give the vocabulary of a BERT")
    settings = read_json(folder / TOKENIZER_CONFIG)
    lower = bool(settings.get("do_lower_case", True))
    accents = settings.get("strip_accents")
    symbols = [piece for piece in row if piece and piece not in (*BERT_SPECIALS, BERT_MASK)]
    tokenizer = WordPieceTokenizer(
        symbols,
        WordPieceSettings(lower, lower if accents is None else accents, settings.get("tokenize_chinese_chars", True)),
    )
    return tokenizer, [row[piece] for piece in (*BERT_SPECIALS, *symbols, BERT_MASK)]


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by today's names without a prefix."""
    for old, new in RENAMED.items():
        weights = {re.sub(old, new, name): tensor for name, tensor in weights.items()}
    return weights
