"""Texts fall into sentences, and stay whole around them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.sentences import Segments


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\t", []),
        ("Es ist gut", ["Es ist gut"]),
        ("Es ist gut. Es ist so!  „Ja?“ Nein.", ["Es ist gut.", "Es ist so!", "„Ja?“", "Nein."]),
        (
            "Am 3. Oktober kam Dr. Maier, z. B. mit J. S. Bach.",
            ["Am 3. Oktober kam Dr. Maier, z. B. mit J. S. Bach."],
        ),
        ("Was?! so sagte er... und ging.", ["Was?! so sagte er... und ging."]),
        ("Eins\r\nzwei", ["Eins", "zwei"]),
        ("起初。神創造天地！地是空虛", ["起初。", "神創造天地！", "地是空虛"]),
        (
            "起初．神創造天地．Ｎｏ．１や３．５は．１．２．数",
            ["起初．", "神創造天地．", "Ｎｏ．１や３．５は．", "１．２．数"],
        ),
        ("यह घर है। वह बड़ा है॥ क्या?", ["यह घर है।", "वह बड़ा है॥", "क्या?"]),
        ("هل هذا بيت؟! نعم.", ["هل هذا بيت؟!", "نعم."]),
        ("یہ گھر ہے۔ وہ بڑا ہے۔", ["یہ گھر ہے۔", "وہ بڑا ہے۔"]),
        ("Սա տուն է։ Այն մեծ է։", ["Սա տուն է։", "Այն մեծ է։"]),
        ("သည်အိမ်။ ကြီးသည်။", ["သည်အိမ်။", "ကြီးသည်။"]),
        ("ይህ ቤት ነው። ትልቅ ነው።", ["ይህ ቤት ነው።", "ትልቅ ነው።"]),
        ("នេះជាផ្ទះ។ វាធំ។", ["នេះជាផ្ទះ។", "វាធំ។"]),
        ("Τι είναι; Ένα σπίτι\u037e Ναι.", ["Τι είναι;", "Ένα σπίτι\u037e", "Ναι."]),
        ("Ein Haus; ein Tier.", ["Ein Haus; ein Tier."]),
        ("Titel\u2028Er kam.\u2029Dann", ["Titel", "Er kam.", "Dann"]),
        ("Siehe Abb. 3. Das Bild zeigt Art. 5 Abs. 2.", ["Siehe Abb. 3. Das Bild zeigt Art. 5 Abs. 2."]),
        (
            "Es kostet 3 Mio. 500 sind wenig. Das ist Art. Er kam.",
            ["Es kostet 3 Mio. 500 sind wenig.", "Das ist Art.", "Er kam."],
        ),
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


@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("文件。窗户！", ["A file.", "Windows!"], "A file. Windows!"),
        ("文件。」窗户", ["“A file.”", "Windows"], "“A file.” Windows"),
        ("文件。窗户！", ["ファイル。", "窓！"], "ファイル。窓！"),
        ("文件。窗户！", ["文件。”", "窗户"], "文件。”窗户"),
        ("文件。\n窗户。 门", ["A file.", "A window.", "A door"], "A file.\nA window. A door"),
        ("文件。窗户", ["", "A window"], "A window"),
    ],
)
def test_sentences_are_parted_where_the_target_has_spaces(
    text: str, translations: list[str], joined: str
) -> None:
    assert Segments.of(text).join(translations) == joined
    assert Page.of(f"<p>{text}</p><p>{text}</p>").join(translations * 2) == f"<p>{joined}</p>" * 2


def test_markup_and_attributes_part_them_as_well() -> None:
    page = Page.of("<b>文件。</b>窗户。<i title='门。门'>是</i>。")
    joined = page.join(["Door.", "Door", "A file.", "Windows.", [*page.marks[4][0].before, "Is", "</i>."]])
    assert joined == '<b>A file.</b> Windows. <i title="Door. Door">Is</i>.'


@pytest.mark.parametrize("part", [".", "１． ", '."', "。", "!?", "a. ", "a\n", " . ", "„“"])
def test_no_text_takes_more_than_its_share_of_time(part: str) -> None:
    """Ten times the text takes about ten times the time; a hundred times would be five minutes."""
    start = time.process_time()
    Segments.of(part * (400_000 // len(part)))
    assert time.process_time() - start < 20
