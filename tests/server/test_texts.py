"""Texts fall into sentences, and stay whole around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.server.texts import HTML, TEXT, Segments


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


def test_html_is_divided_at_its_tags() -> None:
    page = '<!DOCTYPE html><p title="a>b">Eins &amp; zwei. Drei &lt;<b>vier</b></p><script>if (a < b) "Fünf."</script><br/>'
    segments = Segments.of(page, HTML)
    assert segments.sentences == ["Eins & zwei.", "Drei <", "vier"]
    assert segments.join(segments.sentences) == page
    assert segments.join(["<i>", "&amp;", ""]).startswith(
        '<!DOCTYPE html><p title="a>b">&lt;i&gt; &amp;amp;<b></b></p>'
    )
    assert Segments.of(page, TEXT).join(Segments.of(page, TEXT).sentences) == page


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ('A<span translate="no">Neue Datei</span>B', ["A", "B"]),
        ("<p TRANSLATE='No'>A<b>B</b></p><i class='x notranslate'>C</i>D", ["D"]),
        ('<div translate="no">A<p>B<b translate="yes">C<i>D</i></b>E</p><b translate>F</b></div>', ["C", "D", "F"]),
        ('<p translate="no">A<img src="x">B<br/></p>C', ["C"]),
        ("<code>A</code><pre>B<b>C</b></pre><kbd>D</kbd><samp>E</samp><var>F</var>G", ["G"]),
        ('<code translate="yes">A</code><span class="notranslated">B</span>', ["A", "B"]),
        ('<ul translate="no"><li>A<li>B</ul><ul><li class="notranslate">C<li>D</ul>', ["D"]),
        ('<p translate="no">A<p>B<tr><td translate="no">C<tr><td>D', ["B", "D"]),
        ('</b><b><i translate="no">A</b>B</i>C', ["B", "C"]),
        ('<script translate="yes">"A."</script><style>B</style>', []),
        ('<span translate="no" translate="yes">A &lt; B</span>', []),
    ],
)
def test_html_that_is_not_to_be_translated_is_kept(page: str, sentences: list[str]) -> None:
    segments = Segments.of(page, HTML)
    assert segments.sentences == sentences and segments.join(sentences) == page


@given(st.text(st.sampled_from("aB .<>!-/&;\"'=\n")))
def test_any_text_can_be_read_as_html(text: str) -> None:
    segments = Segments.of(text, HTML)
    segments.join(["" for _ in segments.sentences])
