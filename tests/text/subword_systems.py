"""Tokenizers and subwords of fairseq, learned from verses, and dictionaries of their symbols."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import sentencepiece
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE

from fairseq_ccpr.text.decoder_subwords import DecoderSubwords
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.schemes import MOSES
from fairseq_ccpr.text.words import kinds_of
from tests.helpers import DEMO


@functools.cache
def verses() -> list[str]:
    rows = itertools.islice(read_pairs(DEMO / "bible.train.tsv.xz"), 600)
    return [text for _, text in rows] + ["Häuser über 中国人 ½ … and 12 & 'x' \"y\""] * 20


@functools.cache
def spm(pieces: int = 500, **options: object) -> SentencepieceBPE:
    """fairseq's SentencePiece with a model of these options; it wants a file, which is not needed here."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(verses()), model_writer=model, vocab_size=pieces, minloglevel=2, **options
    )
    bpe = SentencepieceBPE.__new__(SentencepieceBPE)
    bpe.sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    bpe.enable_sampling, bpe.alpha = False, None
    return bpe


class ThreeLetters:
    """BPE as subword-nmt and fastBPE write it: pieces of three letters at most."""

    bpe_symbol = "@@ "

    def encode(self, text: str) -> str:
        words = [[word[at : at + 3] for at in range(0, len(word), 3)] for word in text.split(" ") if word]
        return " ".join("@@ ".join(pieces) for pieces in words)

    def decode(self, text: str) -> str:
        return (text + " ").replace(self.bpe_symbol, "").rstrip()


class LittleMoses(MosesTokenizer):
    """fairseq's Moses where sacremoses is not installed: parts signs from words and escapes them."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def encode(self, text: str) -> str:
        written = {character: unit for unit, character in MOSES.items()}
        kinds = kinds_of(text)
        return " ".join(
            "".join(
                f" {written.get(c, c)} " if kind == "p" else c for c, kind in zip(text, kinds) if c >= " "
            ).split()
        )

    def decode(self, text: str) -> str:
        return unescape(text)


@functools.cache
def real_bpe() -> SubwordNMTBPE:
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe")
    codes = io.StringIO()
    learn_bpe.learn_bpe(iter(verses()), codes, 300)
    bpe = SubwordNMTBPE.__new__(SubwordNMTBPE)
    bpe.bpe = pytest.importorskip("subword_nmt.apply_bpe").BPE(io.StringIO(codes.getvalue()))
    bpe.bpe_symbol = "@@ "
    return bpe


def real_moses(**options: Any) -> MosesTokenizer:
    pytest.importorskip("sacremoses")
    return MosesTokenizer(MosesTokenizerConfig(**options))


def little_moses(**options: Any) -> MosesTokenizer:
    return LittleMoses(MosesTokenizerConfig(**options))


def unescape(text: str) -> str:
    for unit in sorted(MOSES, key="&amp;".__eq__):  # the ampersand last
        text = text.replace(unit, MOSES[unit])
    return text


def dictionary_of(symbols: Iterable[str]) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


def symbols_of(tokenizer: Any, bpe: Any, text: str) -> list[str]:
    """As fairseq-interactive and fairseq-preprocess split a line."""
    text = tokenizer.encode(text) if tokenizer is not None else text
    return (bpe.encode(text) if bpe is not None else text).split()


@functools.cache
def corpus_symbols(tokenizer: Any, bpe: Any) -> list[str]:
    return list(dict.fromkeys(symbol for text in verses() for symbol in symbols_of(tokenizer, bpe, text)))


def decoder_subwords(tokenizer: Any, bpe: Any) -> DecoderSubwords:
    """With the symbols of the verses."""
    return DecoderSubwords(tokenizer, bpe, dictionary_of(corpus_symbols(tokenizer, bpe)))


class Given:
    """BPE that splits as it is told."""

    bpe_symbol = "@@ "

    def __init__(self, encoded: str) -> None:
        self.encoded = encoded

    def encode(self, _: str) -> str:
        return self.encoded


def encode_line(dictionary: Dictionary, symbols: list[str]) -> torch.Tensor:
    ids = dictionary.encode_line(" ".join(symbols), add_if_not_exist=False).long()
    return torch.cat([torch.full((3,), dictionary.pad()), ids])  # as in a batch, where padding is on the left
