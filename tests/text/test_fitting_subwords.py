"""Subwords of a translation model and its dictionaries: those that fit, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary, encoders
from fairseq.data.encoders.characters import Characters
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_retriever import RetrievedEntries
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.decoder_subwords import ENOUGH_PIECES, DecoderSubwords
from tests.helpers import DEMO
from tests.text.subword_systems import (
    Given,
    ThreeLetters,
    corpus_symbols,
    decoder_subwords,
    dictionary_of,
    encode_line,
    little_moses,
    real_moses,
    spm,
    symbols_of,
    verses,
)


@pytest.mark.parametrize("moses", [little_moses, real_moses])
def test_moses_follows_the_language_of_the_text(moses: Callable[..., MosesTokenizer]) -> None:
    """fairseq's own encodes source text and decodes target text."""
    given = moses(source_lang="fr", target_lang="en", moses_no_escape=True)
    used = DecoderSubwords(given, None, dictionary_of(["it", "'s"])).tokenizer
    assert (used.cfg.source_lang, used.cfg.target_lang, used.cfg.moses_no_escape) == ("en", "fr", True)
    if moses is real_moses:
        assert (given.encode("it's"), used.encode("it's")) == ("it' s", "it 's")
        assert (given.decode("l' eau"), used.decode("l' eau")) == ("l' eau", "l'eau")


def test_a_subword_model_of_another_dictionary_is_noticed() -> None:
    dictionary = dictionary_of(corpus_symbols(None, spm(300)))
    subwords = DecoderSubwords(None, spm(900), dictionary)
    with pytest.raises(
        ConfigurationError, match=r"^[1-9]\d% of the pieces .* --bpe does not match it; give the --sent"
    ):
        for text in verses():
            subwords.split(text)
    assert ENOUGH_PIECES <= subwords.pieces < ENOUGH_PIECES + 300
    few = decoder_subwords(None, spm())
    for text in [*verses()[:100], "☃ ☃ ☃"]:  # unknown signs here and there are no error
        few.split(text)
    assert few.pieces > ENOUGH_PIECES and few.unknown == 3


def test_source_text_is_not_asked_of_the_target_dictionary() -> None:
    source, target = (
        dictionary_of(corpus_symbols(None, spm())),
        dictionary_of(["▁of", "▁another", "▁language"]),
    )
    subwords = DecoderSubwords(None, spm(), target)
    one = RetrievedEntries(
        np.array([[0, 0, 3]], np.int32), np.ones(1, np.float32), np.array([[-1]]), np.zeros((1, 1))
    )
    nothing: Any = SimpleNamespace(
        start=lambda texts, *_: lambda: one, datastore=SimpleNamespace(spans=np.empty((0, 3)))
    )
    candidates = PhraseCandidates(nothing, lambda: subwords, source)
    for text in verses()[:200]:
        symbols = symbols_of(None, subwords.scheme.bpe, text)
        [found] = candidates.start(encode_line(source, symbols)[None])()
        assert not len(found.candidates.lengths)
    assert subwords.pieces == 0


def test_unknown_pieces_leave_their_sign_in_recovered_text() -> None:
    subwords = decoder_subwords(None, spm())
    source = dictionary_of(["▁the", "▁Lord"])
    assert subwords.recover(source, encode_line(source, ["▁the", "▁", "☃", "▁Lord"])) == "the⁇⁇ Lord"


@pytest.mark.parametrize(
    ("bpe", "made_by", "message"),
    [
        (None, spm, "pieces of SentencePiece, so give --bpe sentencepiece and --sentencepiece-model"),
        (ThreeLetters, spm, "pieces of SentencePiece, so give"),
        (
            None,
            ThreeLetters,
            r"pieces of BPE, so give --bpe subword_nmt \(or fastbpe\) and --bpe-codes, and --tokenizer",
        ),
        (spm, ThreeLetters, "pieces of BPE, so give"),
        (spm, None, "whole words, so leave out --bpe"),
    ],
)
def test_options_that_do_not_fit_the_symbols(bpe: Any, made_by: Any, message: str) -> None:
    given, fitting = bpe and bpe(), made_by and made_by()
    symbols = symbols_of(None, fitting, verses()[0])
    dictionary = dictionary_of(corpus_symbols(None, fitting))
    with pytest.raises(
        ConfigurationError, match=rf"^the target text cannot be split .*\): they are {message}"
    ):
        DecoderSubwords(None, given, dictionary)
    subwords = decoder_subwords(None, given)
    with pytest.raises(ConfigurationError) as caught:
        subwords.recover(dictionary, encode_line(dictionary, symbols))
    assert str(caught.value).startswith(
        f"the source text cannot be recovered from its subwords ({' '.join(symbols)[:60]}): they are "
    )


def test_words_fit_bpe_that_splits_none() -> None:
    dictionary = dictionary_of(["the", "Lord"])
    subwords = DecoderSubwords(None, Given("the Lord"), dictionary)
    assert subwords.split("the Lord").ids == (dictionary.index("the"), dictionary.index("Lord"))


def test_bpe_whose_pieces_cannot_be_placed_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="the subwords of Characters: the model needs to have --bpe sentencepiece"
    ):
        DecoderSubwords(None, Characters(), dictionary_of("abc"))


def test_options_as_fairseq_reads_them() -> None:
    parser = options.get_generation_parser(default_task="translation")
    words = ["data-bin", "-s", "de", "-t", "en", "--tokenizer", "space", "--bpe", "sentencepiece"]
    words += ["--sentencepiece-model", str(DEMO / "spm.model")]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=words))
    dictionary = Dictionary.load(str(DEMO / "dict.en.txt"))
    subwords = DecoderSubwords(
        encoders.build_tokenizer(cfg.tokenizer), encoders.build_bpe(cfg.bpe), dictionary
    )
    text = "She said to him, Not so."
    pieces = subwords.split(text)
    assert subwords.unknown == 0
    ids = subwords.slice(pieces, text.index("said"), text.index(", Not")) or []
    assert subwords.recover(dictionary, torch.tensor(ids)) == "said to him"
