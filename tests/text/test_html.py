"""HTML falls into sentences, stays whole around them, and its markup lands on the words that it belongs to."""

from __future__ import annotations

import re
import time
from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_ccpr.inference.alignment import Alignment, place_markup
from fairseq_ccpr.text.html import Page

TAG = re.compile(r"</?[a-z][^>]*>")


def translated(page: Page, words: dict[str, str] | None = None, order: list[int] | None = None) -> str:
    """Translate word by word, in another order if one is given, each word aligned with its own."""
    return page.join([written(page, number, words or {}, order) for number in range(len(page.sentences))])


def written(page: Page, number: int, words: dict[str, str], order: list[int] | None) -> object:
    source = page.sentences[number]
    found = [*re.finditer(r"\w+|[^\w\s]", source)]
    places = order if order is not None and len(order) == len(found) else [*range(len(found))]
    text, spans = "", []
    for place_ in places:
        word, gap = words.get(found[place_][0], found[place_][0]), " "
        if place_ == 0 or found[place_].start() == found[place_ - 1].end() or not text:
            gap = "" if not text or order is None else " "
        if order is None:
            gap = source[found[place_ - 1].end() if place_ else 0 : found[place_].start()]
        text += gap
        spans.append((len(text), len(text) + len(word)))
        text += word

    def share(start: int, stop: int) -> list[float]:
        past = next((one.end() for one in found if one.end() > start), stop)
        stop = max(stop, past if stop <= start + 1 else stop)
        return [float(found[n].start() < stop and found[n].end() > start) for n in places]

    if not page.marks.get(number):
        return text
    return place_markup(Alignment(source, text, spans, share), page.marks[number])


def test_html_is_divided_at_blocks_and_keeps_its_markup() -> None:
    page = '<!DOCTYPE html><p title="a>b">Eins &amp; zwei. Drei &lt;<b>vier</b></p><script>if (a < b) "Fünf."</script><br/>'
    segments = Page.of(page)
    assert segments.sentences == ["a>b", "Eins & zwei.", "Drei <vier"]
    assert translated(segments) == page.replace("a>b", "a&gt;b")
    assert segments.join(['"', "<i>", "&amp;"]).startswith(
        '<!DOCTYPE html><p title="&quot;">&lt;i&gt; &amp;amp;</p><script>'
    )


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("<p>Das <b>kleine</b> Haus.<br>Es ist so.</p>", ["Das kleine Haus.", "Es ist so."]),
        ("<td>Eins\n  zwei<td>drei", ["Eins   zwei", "drei"]),
        ("Neu: <x id='1'/>Datei <g id=2>öffnen</g>. <ph/>Ja.", ["Neu: Datei öffnen.", "Ja."]),
        ("a <!-- b. C --> d <![CDATA[ e ]]> f <?php g ?> h", ["a  d  f  h"]),
        ("Text <![ hier", ["Text"]),
        ("1 < 2 <3", ["1 < 2 <3"]),
        ("<a @click='x > 1' :b=\"c\">Los</a>!", ["Los!"]),
        ("<b>A. B</b> c <i>D", ["A. B c D"]),
        ("Er kam. <b>Sie ging. Und</b> dann?", ["Er kam.", "Sie ging.", "Und dann?"]),
        (
            "<img alt='Ein Haus.' src=a><a title=\"Mehr &quot;x&quot;\" href=b>Los</a>",
            ["Ein Haus.", 'Mehr "x"', "Los"],
        ),
        ("<img alt=Haus><input placeholder='Name' value='x'><b alt=''></b>", ["Haus", "Name"]),
    ],
)
def test_sentences_of_html(page: str, sentences: list[str]) -> None:
    segments = Page.of(page)
    assert segments.sentences == sentences
    assert Counter(TAG.findall(translated(segments))) == Counter(TAG.findall(page)) or "alt=" in page


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ('A <span translate="no">Neue Datei</span> B', ["A Neue Datei B"]),
        ("<p TRANSLATE='No'>A<b>B</b></p><i class='x notranslate'>C</i>D", ["CD"]),
        (
            '<div translate="no">A<p>B<b translate="yes">C <i>D</i></b>E</p><b translate>F</b></div>',
            ["C D", "F"],
        ),
        ('<p translate="no">A<img src="x" alt="Y">B<br/></p>C', ["C"]),
        ("<code>A</code><pre>B<b>C</b></pre><kbd>D</kbd> <samp>E</samp> <var>F</var> G", ["D E F G"]),
        ("<p><code>A. B</code></p><p><code>A</code>, <kbd>B</kbd>.</p>", []),
        ('<code translate="yes">A</code> <span class="notranslated">B</span>', ["A B"]),
        ('<ul translate="no"><li>A<li>B</ul><ul><li class="notranslate">C<li>D</ul>', ["D"]),
        ('<p translate="no">A<p>B<tr><td translate="no">C<tr><td>D', ["B", "D"]),
        ('<script translate="yes">"A."</script><style>B</style>', []),
        ('<span translate="no" translate="yes">A &lt; B</span>', []),
        (f"Gib <code>{'a' * 200}</code> ein.", ["Gib  ein."]),
    ],
)
def test_html_that_is_not_to_be_translated_is_kept(page: str, sentences: list[str]) -> None:
    segments = Page.of(page)
    assert segments.sentences == sentences
    assert translated(segments).replace(" ", "") == page.replace(" ", "")


@pytest.mark.parametrize(
    ("page", "order", "wanted"),
    [
        ("Das <b>kleine Haus</b> da.", [3, 1, 2, 0, 4], "da <b>kleine Haus</b> Das ."),
        ("Das <b>kleine Haus</b> da.", [1, 0, 2, 3, 4], "<b>kleine</b> Das Haus da ."),  # a word in between
        ("<b>Ich</b> gehe <i>heute</i>.", [2, 1, 0, 3], "<i>heute</i> gehe <b>Ich</b> ."),
        ("<a>Ich <b>gehe</b></a> heute.", [2, 1, 0, 3], "heute <a><b>gehe</b> Ich</a> ."),
        ("Ich <img> gehe heute.", [2, 1, 0, 3], "heute <img>gehe Ich ."),
        ("<b>Er kam. Sie</b> ging heute.", [2, 0, 1, 3], "<b>Er kam . heute Sie</b> ging ."),
        ("Gib <code>a b</code> ein.", [3, 0, 1, 2, 4], "ein Gib <code>a b</code> ."),
    ],
)
def test_markup_follows_its_words(page: str, order: list[int], wanted: str) -> None:
    segments = Page.of(page)
    assert translated(segments, order=order) == wanted


def test_what_is_kept_replaces_what_the_model_made_of_it() -> None:
    segments = Page.of("Gib <code>a &lt; b</code> ein.")
    assert segments.sentences == ["Gib a < b ein."]
    words = {"a": "one", "b": "other", "ein": "in", "Gib": "Put"}
    assert translated(segments, words) == "Put <code>a &lt; b</code> in."
    copied = Page.of("Öffne <code>open</code> mit open.")
    assert translated(copied, {"Öffne": "opens", "mit": "open"}) == "opens <code>open</code> open open."


MARKUP = ("<b>", "</b>", "<i>", "</i>", "<img>", "<x/>", "<p>", "</p>", "<code>", "</code>")
TEXT = ("a", "b ", "Ja. ", "。", "&lt;")


@given(st.lists(st.sampled_from([*MARKUP, *TEXT, " "]), max_size=14), st.randoms())
def test_every_tag_comes_once_and_elements_stay_inside_each_other(pieces: list[str], random: Random) -> None:
    text = "".join(pieces)
    segments = Page.of(text)
    orders = [[*range(n)] for n in range(8)]
    for order in orders:
        random.shuffle(order)
    written_page = segments.join(
        [
            written(segments, n, {}, orders[min(len(one.split()), 7)])
            for n, one in enumerate(segments.sentences)
        ]
    )
    assert Counter(TAG.findall(written_page)) == Counter(TAG.findall(text))
    if balanced(text):
        assert balanced(written_page)


def balanced(page: str) -> bool:
    open_ = []
    for tag in TAG.findall(page):
        if tag.startswith("</"):
            if not open_ or open_.pop() != tag[2:-1]:
                return False
        elif tag not in ("<img>", "<x/>"):
            open_.append(tag[1:-1])
    return not open_


@given(st.text(st.sampled_from("aB .<>!-/&;\"'=\n[")))
def test_any_text_can_be_read_as_html(text: str) -> None:
    segments = Page.of(text)
    segments.join(["" for _ in segments.sentences])
    assert all(one and one == one.strip() for one in segments.sentences)


@pytest.mark.parametrize(
    "part",
    [
        "<", "<a ", "</", "<!--", "<?", "<a b='", "<a b=\"'", "<a b= ", "<b>a", "a</i>", "a<i>", "<p>", "<code>a", "&",
        "<script>", "<li>a</b>", "<b>a</b> ", "<b title='a'>", "<u><![CDATA[", "a. ", " a",
    ],
)  # fmt: skip
def test_no_page_takes_more_than_its_share_of_time(part: str) -> None:
    start = time.process_time()
    Page.of(part * (100_000 // len(part)))
    Page.of("<a" + part * (100_000 // len(part)))
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    "page",
    [
        "<script src=/js/>var x=1;</script><p>Hallo.</p><code>x</code>",
        "Siehe <a href=https://example.org/>das Haus</a>",
        "<a href=/>Haus</a> und <br/> Hof",
    ],
)
def test_a_slash_of_an_attribute_ends_no_element(page: str) -> None:
    assert translated(Page.of(page)) == page


INLINE = st.recursive(
    st.sampled_from(["Wort ", "x", ". Und ", "! ", " ", "<img/>", "(neu) ", "<code>y. Z</code>"]),
    lambda inside: st.tuples(st.sampled_from("abiu"), st.lists(inside, max_size=4)).map(
        lambda one: f"<{one[0]}>{''.join(one[1])}</{one[0]}>"
    ),
    max_leaves=12,
)


@given(st.lists(INLINE, max_size=8).map("".join), st.randoms(use_true_random=False))
@example("<b>Wir haben. Du und das Brot</b> <i>gegessen er. Er ging.</i>", Random(4))
@example("<b>A. Brot</b> <i><img/><u></u></i> da <u>drei. Vier</u>", Random(1))
def test_what_is_well_formed_stays_so(content: str, random: Random) -> None:
    """Whatever the order of the translation's words: each element once and closed, whichever sentences it spans."""
    page = Page.of(f"<p>{content}</p>")
    sentences = []
    for number, source in enumerate(page.sentences):
        order = [*range(len(re.findall(r"\w+|[^\w\s]", source)))]
        random.shuffle(order)
        sentences.append(written(page, number, {}, order))
    translation = page.join(sentences)
    open_elements = []
    for tag in TAG.findall(translation):
        if not tag.startswith("</"):
            open_elements += [tag[1:-1]] * (not tag.endswith("/>"))
        else:
            assert open_elements.pop() == tag[2:-1], translation
    assert not open_elements
    assert Counter(TAG.findall(translation)) == Counter(TAG.findall(f"<p>{content}</p>"))
