"""Words and subwords of any text: nothing lost, nothing twice, each where it belongs."""

from __future__ import annotations

import functools
import itertools
import pickle
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.sentencepiece import read_pieces
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate, subword_bounds
from fairseq_ccpr.text.tokenizers import (
    SentencePieceTokenizer,
    WordPieceSettings,
    WordPieceTokenizer,
    load_tokenizer,
)
from fairseq_ccpr.text.words import SPACE, has_letters, kinds_of, word_spans
from tests.helpers import DEMO
from tests.small_models import VOCABULARY, sentencepiece_tokenizer

MIXED = " \u3000\u200b\tabzAZß,.…!'\"(-¿%$ｆＦ½㍿ﷺéе́\u0301\u0308"
MIXED += "中国東京かなカナ한국ไทยที่नमस्ते😀👍\U0001f3fd❤\ufe0f\u200d\u00ad\u2581\x00\x85"
ANY_TEXT = st.text(st.one_of(st.sampled_from(MIXED), st.characters(exclude_categories=["Cs"])), max_size=30)
# Characters that are one character to SentencePiece, spaces aside: there each piece's span can be read back.
PLAIN_TEXT = st.text(st.sampled_from("  abcdelordthnsiABC,.;!é中国ｆＦ한\u3000\t☃"), max_size=40)


@functools.cache
def wordpiece_tokenizer() -> WordPieceTokenizer:
    symbols = [piece for piece in VOCABULARY if not piece.startswith("[")]
    return WordPieceTokenizer(
        symbols, WordPieceSettings(lower_case=True, strip_accents=True, split_ideographs=True)
    )


@pytest.fixture(scope="module", params=[sentencepiece_tokenizer, wordpiece_tokenizer])
def tokenizer(request: pytest.FixtureRequest) -> SubwordTokenizer:
    return request.param()


def surfaces(subwords: Subwords) -> list[str]:
    return [subwords.text[start:end] for start, end in zip(subwords.starts, subwords.ends)][1:-1]


@given(text=ANY_TEXT)
@example(text="  Hello  world \n")
@example(text="…½ \N{ZERO WIDTH SPACE} ﷺ")
def test_spans_are_ordered_and_hold_every_word(tokenizer: SubwordTokenizer, text: str) -> None:
    subwords = tokenizer.encode(text)
    assert len(subwords.ids) == len(subwords.starts) == len(subwords.ends)
    assert (subwords.ids[0], subwords.ids[-1]) == (tokenizer.dictionary.bos(), tokenizer.dictionary.eos())
    assert (subwords.starts[0], subwords.ends[0], subwords.starts[-1], subwords.ends[-1]) == (
        0,
        0,
        len(text),
        len(text),
    )
    assert subwords.starts == sorted(subwords.starts) and subwords.ends == sorted(subwords.ends)
    assert all(start <= end for start, end in zip(subwords.starts, subwords.ends))
    for start, end in word_spans(text):
        bounds = subword_bounds(subwords, start, end)
        touching = [
            i
            for i, span in enumerate(zip(subwords.starts, subwords.ends))
            if span[0] < end and span[1] > start
        ]
        pieces = [text[subwords.starts[i] : start] + text[end : subwords.ends[i]] for i in touching]
        if not touching or any(map(has_letters, pieces)):
            assert bounds is None
        elif bounds is not None:
            assert bounds == (touching[0], touching[-1])


@given(text=ANY_TEXT)
@example(text="“(Don't — 3.5%!)”... ")
@example(text="C++ ❤\ufe0f👍\U0001f3fd!! é\u0301.")
def test_words_hold_every_character_but_spaces(text: str) -> None:
    spans = word_spans(text)
    kinds = kinds_of(text)
    assert all(0 <= start < end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    covered = {i for span in spans for i in range(*span)}
    assert covered == {i for i, kind in enumerate(kinds) if kind != SPACE}


@given(text=PLAIN_TEXT)
def test_a_piece_reads_as_its_characters_do(text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    for piece, start, end in tokenizer.split(text):
        assert tokenizer.processor.normalize(text[start:end]).lstrip("▁") == piece.lstrip("▁")
        assert not text[start:end] or kinds_of(text[start:end])[0] != SPACE != kinds_of(text[start:end])[-1]


@given(
    words=st.lists(
        st.text(st.sampled_from("abcdelordthnsi'é한ｆ-"), min_size=1, max_size=8), min_size=1, max_size=6
    )
)
def test_every_word_between_spaces_has_bounds(tokenizer: SubwordTokenizer, words: list[str]) -> None:
    text = "  ".join(words)
    subwords = tokenizer.encode(text)
    for start, end in word_spans(text):
        if has_letters(text[start:end]):
            assert subword_bounds(subwords, start, end) is not None
    first, last = subword_bounds(subwords, 0, len(text)) or (0, 0)
    assert not any(surfaces(subwords)[: first - 1])  # a blank of its own, if anything
    assert last == len(subwords.ids) - 2


def subwords_of(text: str, *surfaces: str) -> Subwords:
    """Subwords of given surfaces, which follow one another in the text; a space before one is no part of it."""
    starts, ends, at = [0], [0], 0
    for surface in surfaces:
        at = text.index(surface, at)
        starts.append(at)
        at += len(surface)
        ends.append(at)
    size = len(text)
    return Subwords(text, list(range(len(starts) + 1)), [*starts, size], [*ends, size])


def test_bounds_of_spans() -> None:
    glued = subwords_of("say (no). 中国人", "say", "(n", "o", ").", "中国", "人")
    assert subword_bounds(glued, 0, 3) == (1, 1)
    assert subword_bounds(glued, 5, 7) == (2, 3)  # the word has the piece that holds its bracket too
    assert subword_bounds(glued, 4, 5) is None  # and the bracket alone has none
    assert subword_bounds(glued, 7, 8) == (4, 4)  # signs share a piece
    assert subword_bounds(glued, 0, 9) == (1, 4)
    assert subword_bounds(glued, 10, 11) is None  # half of a piece of two words
    assert subword_bounds(glued, 10, 12) == (5, 5)
    assert subword_bounds(glued, 11, 13) is None
    assert subword_bounds(glued, 10, 13) == (5, 6)
    assert subword_bounds(glued, 3, 4) is None  # a space
    cut = glued.cut(2)
    assert cut.ids == [0, 1, 2, 7]
    assert subword_bounds(cut, 0, 3) == (1, 1)
    assert subword_bounds(cut, 5, 7) is None  # its end was cut off
    assert subword_bounds(cut, 10, 12) is None
    assert glued.cut(6) is glued


def test_a_blank_of_its_own_belongs_to_no_word() -> None:
    tokenizer = sentencepiece_tokenizer()
    subwords = tokenizer.encode("the 中")
    assert surfaces(subwords) == ["the", "", "中"]
    assert subword_bounds(subwords, 4, 5) == (3, 3)
    assert subword_bounds(subwords, 0, 3) == (1, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ﬁ the", ["ﬁ", "ﬁ", "the"]),
        ("½ the", ["½", "the"]),
        ("e\u0301 the", ["e\u0301", "the"]),
        ("ｔｈｅ  ｔｈｅ　", ["ｔｈｅ", "ｔｈｅ"]),
        ("", []),
    ],
)
def test_spans_through_normalisation(text: str, expected: list[str]) -> None:
    tokenizer = sentencepiece_tokenizer()
    found = [surface for surface in surfaces(tokenizer.encode(text)) if surface]
    assert found == expected


def test_collate_pads_on_the_right(tokenizer: SubwordTokenizer) -> None:
    batch = [tokenizer.encode(text) for text in ("the lord", "", "the")]
    tokens = collate(batch, tokenizer.pad)
    assert tokens.dtype == torch.int64 and tokens.shape == (3, max(len(s.ids) for s in batch))
    for row, subwords in zip(tokens.tolist(), batch):
        assert row == subwords.ids + [tokenizer.pad] * (len(row) - len(subwords.ids))


def test_tokenizers_come_back_from_disk_and_from_other_processes(
    tokenizer: SubwordTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    text = "The lord, said ½ 中 \N{SNOWMAN}"
    for again in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert again.encode(text) == tokenizer.encode(text)


def test_bpe_is_not_pruned() -> None:
    tokenizer = sentencepiece_tokenizer()
    path = DEMO / "spm.model"
    symbols = read_pieces(path.read_bytes())[3:]
    with pytest.raises(ConfigurationError, match="BPE, which needs all its pieces"):
        SentencePieceTokenizer(symbols, path.read_bytes()).restrict({"a"})
    smaller = tokenizer.restrict({"▁the"})
    assert len(smaller.symbols) == 2 and "▁the" in smaller.symbols  # and the one of the lowest score


def test_pruning_without_protobuf_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sentencepiece, "sentencepiece_model_pb2", raising=False)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    tokenizer = sentencepiece_tokenizer()
    assert list(tokenizer.split("the"))
    with pytest.raises(ConfigurationError, match=r"needs protobuf .*pip install .*protobuf"):
        tokenizer.restrict({"▁the"})
