"""Texts fall into sentences, and stay whole around them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.text.sentences import Segments


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\t", []),
        ("Es ist gut", ["Es ist gut"]),
        ("Es ist gut. Es ist so!  „Ja?“ Nein.", ["Es ist gut.", "Es ist so!", "„Ja?“", "Nein."]),
        ("Am 3. Oktober kam Dr. Maier, z. B. mit J. S. Bach.", ["Am 3. Oktober kam Dr. Maier, z. B. mit J. S. Bach."]),
        ("Was?! so sagte er... und ging.", ["Was?! so sagte er... und ging."]),
        ("Eins\r\nzwei", ["Eins", "zwei"]),
        ("起初。神創造天地！地是空虛", ["起初。", "神創造天地！", "地是空虛"]),
    ],
)
def test_sentences_are_found(text: str, sentences: list[str]) -> None:
    assert Segments.of(text).sentences == sentences


@given(st.text(st.sampled_from('aÄ .!?„“"\n\r\t。3<>&;/-')))
def test_a_text_is_whole_around_its_sentences(text: str) -> None:
    segments = Segments.of(text)
    assert segments.join(segments.sentences) == text
    assert all(one and one == one.strip() for one in segments.sentences)
    again = Segments.of("\n".join(segments.sentences))
    assert again.sentences == segments.sentences


@pytest.mark.parametrize("part", [".", '."', "。", "!?", "a. ", "a\n", " . ", "„“"])
def test_no_text_takes_more_than_its_share_of_time(part: str) -> None:
    """Ten times the text takes about ten times the time; a hundred times would be five minutes."""
    start = time.process_time()
    Segments.of(part * (400_000 // len(part)))
    assert time.process_time() - start < 20
