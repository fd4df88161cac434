"""Phrases in the subwords of a translation model: the ids its decoder would write, or none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.space_tokenizer import SpaceTokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_votes import Candidates
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords, Pieces, after_sign
from fairseq_ccpr.text.words import SPACE, kinds_of, word_spans
from tests.text.subword_systems import (
    Given,
    ThreeLetters,
    corpus_symbols,
    decoder_subwords,
    dictionary_of,
    encode_line,
    little_moses,
    real_bpe,
    real_moses,
    spm,
    symbols_of,
    unescape,
    verses,
)

MIXED = "   \u3000\u00a0\u200b\ttheLordandßäöüé,.'\"-&|<>[]@½…ﬁｔe\u0301中国人한ไท😀👍\U0001f3fd☃▁#;\x00\x85"
ANY_TEXT = st.text(st.one_of(st.sampled_from(MIXED), st.characters(exclude_categories=["Cs"])), max_size=30)
WORDS = [
    "the",
    "Lord",
    "said,",
    '"Go',
    'forth!"',
    "&amp;",
    "it's",
    "man-made",
    "中国人。",
    "Häuser",
    "½",
    "😀",
    "@-@",
    "x@@",
]
LIKE_TEXT = st.lists(st.sampled_from([*WORDS, " ", "…"]), max_size=12).map(" ".join)
TEXT = st.one_of(ANY_TEXT, LIKE_TEXT)
SYSTEMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "unigram": lambda: (None, spm()),
    "bpe": lambda: (None, spm(model_type="bpe")),
    "bytes": lambda: (None, spm(700, byte_fallback=True)),
    "identity": lambda: (None, spm(normalization_rule_name="identity", remove_extra_whitespaces=False)),
    "suffix": lambda: (None, spm(treat_whitespace_as_suffix=True)),
    "merged": lambda: (None, spm(split_by_unicode_script=False, split_by_number=False)),
    "phrases": lambda: (None, spm(model_type="bpe", split_by_whitespace=False)),
    "moses and unigram": lambda: (little_moses(), spm()),
    "space and unigram": lambda: (SpaceTokenizer(), spm()),
    "words": lambda: (None, None),
    "moses words": lambda: (little_moses(), None),
    "three letters": lambda: (None, ThreeLetters()),
    "moses and three letters": lambda: (little_moses(), ThreeLetters()),
    "subword-nmt": lambda: (None, real_bpe()),
    "moses": lambda: (real_moses(), real_bpe()),
    "moses without escapes": lambda: (
        real_moses(moses_no_escape=True, moses_no_dash_splits=True),
        real_bpe(),
    ),
}


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    tokenizer, bpe = SYSTEMS[request.param]()
    corpus_symbols(tokenizer, bpe)
    return tokenizer, bpe


def plain(bpe: Any, text: str) -> str:
    """Text as the subwords have it, spaces aside."""
    text = bpe.sp.normalize(text) if isinstance(bpe, SentencepieceBPE) else text
    return "".join(c for c, kind in zip(text, kinds_of(text)) if kind != SPACE and c != "▁")


def read(system: tuple[Any, Any], dictionary: Dictionary, ids: list[int]) -> str:
    """What ids say, spaces aside; not by Moses' own decoder, which is no exact inverse."""
    tokenizer, bpe = system
    if isinstance(bpe, SentencepieceBPE):
        pieces = [dictionary[i] for i in ids]
        text = bpe.sp.decode(pieces) if "<0x" in "".join(pieces) else "".join(pieces)
    else:
        text = dictionary.string(ids)
        text = bpe.decode(text) if bpe is not None else text
    return plain(None, unescape(text) if isinstance(tokenizer, MosesTokenizer) else text)


@given(text=TEXT, seed=st.integers(0, 99))
@example(text="  the  Lord ä😀b ½ ", seed=0)
@example(text="中½ … 国人 e\u0301 ﬁ ｔｈｅ ﷺ¨", seed=1)
@example(text="a\x00b\u200bc\u00add\x85e \u3000 f", seed=2)
@example(text="☃☃ ☃a x@@ @@ @@y a ▁ b", seed=3)
def test_phrases_are_what_the_sentence_is_made_of(system: tuple[Any, Any], text: str, seed: int) -> None:
    symbols = symbols_of(*system, text)
    subwords = decoder_subwords(*system)
    dictionary = subwords.dictionary
    for symbol in symbols:
        dictionary.add_symbol(symbol)  # so that nothing is unknown
    pieces = subwords.split(text)
    assert [dictionary[i] for i in pieces.ids] == [s if dictionary.index(s) > 3 else "<unk>" for s in symbols]
    assert list(pieces.starts) == sorted(pieces.starts) and list(pieces.ends) == sorted(pieces.ends)
    assert all(0 <= start <= len(text) + 1 >= end >= start for start, end in zip(pieces.starts, pieces.ends))
    words = word_spans(text)
    for (start, _), (_, end) in itertools.combinations_with_replacement(words[:12], 2):
        ids = subwords.slice(pieces, start, end)
        spans = list(zip(pieces.starts, pieces.ends))
        cut = any(begin < border < stop for begin, stop in spans for border in (start, end))
        assert (ids is None) == (cut or not any(start <= begin < stop <= end for begin, stop in spans))
        if ids is not None:
            assert read(system, dictionary, ids) == plain(system[1], text[start:end])
    # Phrases that follow one another are the sentence, less what stands for spaces between them.
    rng = random.Random(seed)
    whole: list[int] = []
    chosen: list[tuple[int, int]] = []
    rest = words
    while rest:
        ends = [n for n, (_, end) in enumerate(rest, 1) if subwords.slice(pieces, rest[0][0], end)]
        if not ends:
            return  # a sign that has become space, or what was not found
        size = rng.choice(ends)
        chosen.append((rest[0][0], rest[size - 1][1]))
        whole += subwords.slice(pieces, *chosen[-1]) or []
        rest = rest[size:]
    parts = zip(pieces.ids, pieces.starts)
    assert whole == [i for i, at in parts if any(start <= at < end for start, end in chosen)]


@pytest.mark.parametrize(
    "name", ["unigram", "bpe", "merged", "suffix", "moses and unigram", "three letters", "words"]
)
def test_words_begin_and_go_on_where_they_do_in_text(name: str) -> None:
    subwords = decoder_subwords(*SYSTEMS[name]())
    borders, seen = subwords.borders, {True: 0, False: 0}
    for text in [*verses()[:100], 'Open "file menu" (in the "house") of 3 lords']:
        pieces = subwords.split(text)
        begins = {start for start, _ in word_spans(text)}
        for one, other, before, at in zip(pieces.ids, pieces.ids[1:], pieces.starts, pieces.starts[1:]):
            if before == at or subwords.dictionary.unk() in (one, other):
                continue  # pieces of what Moses writes for one character, or unknown ones
            inside = bool(borders.unfinished[one] & borders.going_on[other])
            if at in begins:
                assert not inside, (text, subwords.dictionary[one], subwords.dictionary[other])
            elif 0 < at < len(text) and {*kinds_of(text[at - 1 : at + 1])} == {"w"}:
                assert inside, (text, subwords.dictionary[one], subwords.dictionary[other])
            seen[inside] += 1
    assert seen[False] and bool(seen[True]) == (name != "words")
    assert not any(markers[: subwords.dictionary.nspecial].any() for markers in borders)


@pytest.mark.parametrize("rest", [" of God", ", of God", ""])
@pytest.mark.parametrize(
    "name", ["unigram", "bpe", "moses and unigram", "three letters", "moses and three letters"]
)
def test_phrases_after_a_quote_are_written_as_after_a_space_and_the_reverse(name: str, rest: str) -> None:
    """In two sentences that differ by the quote; the phrases of both are found wherever they are written."""
    subwords, phrase = decoder_subwords(*SYSTEMS[name]()), "the house"
    sentences = [f"Go to the house{rest}", f'Go to "the house{rest}']
    spans = [(text.index(phrase), text.index(phrase) + len(phrase)) for text in sentences]
    candidates: Any = PhraseCandidates(None, lambda: subwords, None)  # type: ignore[arg-type]
    own = [subwords.slice(subwords.split(text), *span) or [] for text, span in zip(sentences, spans)]
    if (name, rest[:1]) == ("three letters", ","):
        assert not own[0]  # a piece has the end of the word and the comma
        return
    assert own[0]
    counted = subwords.pieces

    def variants(number: int, sign: bool) -> list[list[int]]:
        """All ways to write the phrase of a sentence where its source phrase stands after a sign, or not."""
        one = np.zeros(1, int)
        alone = Candidates.of(own[number : number + 1], one, one, one)
        of = candidates.with_variants(
            alone, np.array([sign]), lambda query, rank: (sentences[number], *spans[number])
        )
        return [row[:n].tolist() for row, n in zip(of.tokens, of.lengths)]

    if name in ("unigram", "bpe"):
        assert own[0] != own[1] and variants(0, False) == own[:1]
        assert variants(0, True) == own and variants(1, False) == variants(1, True) == own[::-1]
    else:
        assert "moses" not in name or own[0] == own[1]
        assert not subwords.scheme.marks_beginnings or variants(0, True) == own[:1]
    # Counted in each variant, a sign that the dictionary lacks would make it a foreign dictionary.
    assert subwords.pieces == counted
    assert [after_sign(sentences[n], at) for n, at in ((0, spans[0][0]), (1, spans[1][0]), (0, 0))] == [
        False,
        True,
        False,
    ]


def placed(pieces: Pieces, text: str) -> bool:
    """Whether all pieces were found in a text."""
    return not pieces.ends or pieces.ends[-1] <= len(text)


def test_in_plain_text_all_is_placed_and_most_words_have_ids(system: tuple[Any, Any]) -> None:
    subwords = decoder_subwords(*system)
    words = given = 0
    for text in verses()[:100]:
        pieces = subwords.split(text)
        spans = word_spans(text)
        assert placed(pieces, text)
        slices = [subwords.slice(pieces, *span) for span in spans]
        words, given = words + len(spans), given + len(slices) - slices.count(None)
        assert subwords.slice(pieces, spans[0][0], spans[-1][1]) is not None
    assert given > 0.6 * words and subwords.unknown == 0


def test_pieces_of_sentencepiece_and_their_characters() -> None:
    subwords = decoder_subwords(None, spm())
    text = "  the  Lord 中 said."
    pieces = subwords.split(text)
    symbols = [subwords.dictionary[i] for i in pieces.ids]
    surfaces = [text[start:end] for start, end in zip(pieces.starts, pieces.ends)]
    assert list(zip(symbols, surfaces)) == [
        ("▁the", "the"), ("▁Lord", "Lord"), ("▁", ""), ("中", "中"), ("▁said", "said"), (".", ".")
    ]  # fmt: skip

    def phrase(string: str) -> list[str] | None:
        start = text.index(string)
        ids = subwords.slice(pieces, start, start + len(string))
        return None if ids is None else [subwords.dictionary[i] for i in ids]

    assert phrase("the") == ["▁the"]
    assert phrase("中") == ["▁", "中"]  # the blank that the decoder writes before it
    assert phrase("Lord 中 said") == ["▁Lord", "▁", "中", "▁said"]
    assert phrase("said.") == ["▁said", "."]
    assert phrase("Lor") is phrase("aid") is None
    assert subwords.slice(pieces, 0, len(text)) == list(pieces.ids)
    assert subwords.slice(pieces, 5, 7) is None  # spaces


@pytest.mark.parametrize(
    ("encoded", "phrase", "expected"),
    [
        ("say no@@ , then", "no", ["no@@"]),
        ("say no@@ , then", "no,", ["no@@", ","]),
        ("say no, then", "no", None),  # one piece of word and comma
        ("say no, then", "no,", ["no,"]),
        ("s@@ ay no, th@@ en", "say no,", ["s@@", "ay", "no,"]),
        ("say no , then", "no", ["no"]),
        ("say no , </s>", "then", None),
        ("say no , what then", "say no", ["say", "no"]),
        ("say no , what then", "then", None),  # the rest is not what the text says
        ("say no , what then", "say no, then", None),
        ("say not , then", "say", ["say"]),
        ("say not , then", "no", None),
    ],
)
def test_borders_of_phrases(encoded: str, phrase: str, expected: list[str] | None) -> None:
    text = "say no, then"
    dictionary = dictionary_of(encoded.split())
    subwords = DecoderSubwords(None, Given(encoded), dictionary)
    start = text.index(phrase)
    ids = subwords.slice(subwords.split(text), start, start + len(phrase))
    assert (None if ids is None else [dictionary[i] for i in ids]) == expected


def test_unknown_pieces_and_markers_are_no_phrase() -> None:
    dictionary = dictionary_of(["say", "</s>", "no"])
    subwords = DecoderSubwords(None, None, dictionary)
    pieces = subwords.split("say </s> yes no")
    assert list(pieces.ids) == [
        dictionary.index("say"),
        dictionary.unk(),
        dictionary.unk(),
        dictionary.index("no"),
    ]
    assert subwords.slice(pieces, 0, 3) and subwords.slice(pieces, 13, 15)
    assert (
        subwords.slice(pieces, 4, 8) is subwords.slice(pieces, 9, 12) is subwords.slice(pieces, 0, 15) is None
    )
    assert (subwords.pieces, subwords.unknown) == (4, 2)


@pytest.mark.parametrize("moses", [little_moses, real_moses])
def test_moses_is_undone(moses: Callable[..., MosesTokenizer]) -> None:
    text = 'It\'s a well-known "fact" & [so] on &amp; on, A|B <c>.'
    tokenizer = moses()
    dictionary = dictionary_of(tokenizer.encode(text).split())
    subwords = DecoderSubwords(tokenizer, None, dictionary)
    pieces = subwords.split(text)
    assert placed(pieces, text)
    for start, end in word_spans(text):
        ids = subwords.slice(pieces, start, end)
        assert ids and unescape(dictionary.string(ids)).replace(" ", "") == text[start:end]
    assert read((tokenizer, None), dictionary, list(pieces.ids)) == text.replace(" ", "")


def test_source_text_is_recovered(system: tuple[Any, Any]) -> None:
    subwords = decoder_subwords(*system)
    bpe = system[1]
    for text in verses()[:50]:
        found = subwords.recover(
            subwords.dictionary, encode_line(subwords.dictionary, symbols_of(*system, text))
        )
        if "<0x" in found:
            continue  # fairseq's decoding does not put bytes together
        assert plain(bpe, found) == plain(bpe, text)
        assert found == text or system[0] is not None


@given(text=TEXT)
@example(text="  the  Lord ä😀b ½ ")
@example(text="中½ … 国人 e\u0301 ﬁ ｔｈｅ ﷺ¨")
def test_subwords_of_a_source_are_found_in_its_text(system: tuple[Any, Any], text: str) -> None:
    """As those of a target, here in the same language; padding and markers stand for nothing."""
    subwords = decoder_subwords(*system)
    ids = encode_line(subwords.dictionary, symbols_of(*system, text)).tolist()
    found, pieces = subwords.place_source(subwords.dictionary, ids, text), subwords.split_unchecked(text)
    assert found is not None and [place for place, _, _ in found] == [*range(3, len(ids) - 1)]
    for wanted, part in ((pieces.starts, 1), (pieces.ends, 2)):
        assert tuple(itertools.accumulate((one[part] for one in found), max)) == wanted
    assert subwords.place_source(subwords.dictionary, ids, f"{text} the") is None


@pytest.mark.parametrize("tags", [(), ("__de__",)])
def test_a_tag_before_a_source_stands_for_nothing(tags: tuple[str, ...]) -> None:
    """Whether it is the task's or the subwords'."""
    dictionary = dictionary_of(["__de__", "the", "Lord"])
    subwords = DecoderSubwords(None, None, dictionary, tags)
    ids = [dictionary.pad(), *map(dictionary.index, ["__de__", "the", "Lord", "</s>"])]
    assert subwords.place_source(dictionary, ids, "the Lord") == [(2, 0, 3), (3, 4, 8)]
    assert subwords.place_source(dictionary, ids[:2], "") == []
