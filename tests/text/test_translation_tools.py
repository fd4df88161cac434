"""What translation tools say of a translation: only what is confirmed is read, as it is once all changes are accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.translation_memory import read_memory

NAMESPACES = 'xmlns:sdl="http://sdl.com" xmlns:mq="MQXliff" xmlns:m="http://www.memsource.com/mxlf/2.0"'
PAIR = ("Die Lampe", "The lamp")
UNIT = "<trans-unit {0}><source>Die Lampe</source><target {1}>The lamp</target>{2}</trans-unit>"
LEVEL = '<sdl:seg-defs><sdl:seg id="1" {0}/></sdl:seg-defs>'
TWO_SEGMENTS = (
    '<trans-unit><seg-source><mrk mtype="seg" mid="1">Eins</mrk><mrk mtype="seg" mid="2">Zwei</mrk></seg-source>'
    '<source>Eins Zwei</source><target><mrk mtype="seg" mid="1">One</mrk><mrk mtype="seg" mid="2">Two</mrk></target>'
    '<sdl:seg-defs><sdl:seg id="1" conf="Translated" origin="mt"/><sdl:seg id="2" conf="{0}"/></sdl:seg-defs></trans-unit>'
)


def xliff_1(*units: str) -> str:
    return f'<xliff version="1.2" {NAMESPACES}><file><body>{"".join(units)}</body></file></xliff>'


def segment(state: str, source: str = PAIR[0], target: str = PAIR[1]) -> str:
    return f"<unit><segment {state}><source>{source}</source><target>{target}</target></segment></unit>"


def xliff_2(*units: str) -> str:
    return f'<xliff version="2.1" srcLang="de" trgLang="en"><file>{"".join(units)}</file></xliff>'


def read(path: Path, text: str, unconfirmed: bool = False) -> tuple[list[tuple[str, str]], Counter[str]]:
    path.write_text(text, encoding="utf-8", newline="\n")
    skipped = Counter[str]()
    return list(read_memory(path, "de", "en", skipped, unconfirmed)), skipped


STATES = {  # by where it is said: what is confirmed, what is not
    ("", 'state="{}"', ""): (
        "translated final signed-off",
        "new needs-translation needs-adaptation needs-l10n needs-review-translation needs-review-adaptation x-mine",
    ),
    ("", 'state-qualifier="{}"', ""): ("exact-match leveraged-tm id-match", "leveraged-mt mt-suggestion rejected-grammar"),
    ("", 'state="final" state-qualifier="{}"', ""): ("leveraged-mt", "rejected-spelling"),
    ('approved="{}"', "", ""): ("yes", "no"),
    ('approved="{}"', 'state="translated"', ""): ("yes no", ""),
    ('approved="yes"', 'state="{}"', ""): ("final", "needs-review-translation"),
    ('mq:status="{}"', "", ""): (
        "ManuallyConfirmed Reviewer1Confirmed Proofread",
        "NotStarted PartiallyEdited PreTranslated MachineTranslated AssembledFromFragments Rejected",
    ),
    ('m:confirmed="{}" m:trans-origin="mt"', "", ""): ("1 2", "0"),
    ("", "", LEVEL.format('conf="{}" origin="mt"')): (
        "Translated ApprovedTranslation ApprovedSignOff", "Draft RejectedTranslation RejectedSignOff Unspecified",
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", STATES)
def test_only_what_is_confirmed_is_read(tmp_path: Path, place: tuple[str, str, str]) -> None:
    for confirmed, states in zip((True, False), STATES[place]):
        for state in states.split():
            text = xliff_1(UNIT.format(*(part.format(state) for part in place)))
            pairs, skipped = read(tmp_path / "a.sdlxliff", text)
            assert (pairs == [PAIR] and not skipped) if confirmed else (not pairs and skipped.total() == 1)
            assert confirmed or ("not confirmed: " in (reason := next(iter(skipped))) and state in reason)
            assert read(tmp_path / "a.mxliff", text, unconfirmed=True) == ([PAIR], {})


def test_a_file_that_says_nothing_is_read_whole_and_otherwise_defaults_hold(tmp_path: Path) -> None:
    plain = UNIT.format("", "", "")
    assert read(tmp_path / "a.xlf", xliff_1(plain)) == ([PAIR], {})
    assert read(tmp_path / "a.xlf", xliff_1(plain, UNIT.format("", 'state="final"', ""))) == ([PAIR] * 2, {})
    assert read(tmp_path / "a.xlf", xliff_1(UNIT.format("", "", LEVEL.format("")))) == (
        [], {"not confirmed: conf is unspecified": 1},
    )  # fmt: skip
    for told, name in (('mq:status="Proofread"', "status"), ('m:confirmed="1"', "confirmed")):
        found = read(tmp_path / "a.xlf", xliff_1(plain, UNIT.format(told, "", "")))
        assert found == ([PAIR], {f"not confirmed: {name} is missing": 1})
    assert read(tmp_path / "a.xlf", xliff_2(segment(""))) == ([PAIR], {})
    for state in ("translated", "reviewed", "final"):  # initial by default, once one is named
        found = read(
            tmp_path / "a.xlf", xliff_2(segment(""), segment(f'state="{state}"'), segment('state="initial"'))
        )
        assert found == ([PAIR], {"not confirmed: state is missing": 1, "not confirmed: state is initial": 1})
    for level, pairs in (
        ("Draft", [("Eins", "One")]),
        ("ApprovedSignOff", [("Eins", "One"), ("Zwei", "Two")]),
    ):
        assert read(tmp_path / "a.xlf", xliff_1(TWO_SEGMENTS.format(level)))[0] == pairs
    unit = '<tu>{0}<tuv xml:lang="de"><seg>Die Lampe</seg></tuv><tuv xml:lang="en"><seg>The lamp</seg></tuv></tu>'
    levels = (
        unit.format(f'<prop type="x-ConfirmationLevel">{one}</prop>') for one in ("Draft", "Translated")
    )
    found = read(tmp_path / "a.tmx", f"<tmx><body>{''.join(levels)}</body></tmx>")
    assert found == ([PAIR], {"not confirmed: conf is Draft": 1})


@pytest.mark.parametrize(
    "target",
    [
        'The lamp <mrk mtype="x-sdl-deleted" sdl:revid="1">shines</mrk><mrk mtype="x-sdl-added">glows</mrk> red.',
        'The lamp <mrk mtype="x-sdl-feedback-deleted">sh<g id="1">ine</g>s </mrk><mrk mtype="x-sdl-feedback-added">glows'
        '</mrk> red.',
        'The <mrk mtype="x-sdl-comment" sdl:cid="7">lamp</mrk> <mrk type="my:deleted">shines</mrk>glows red.',
        "The lamp <del>shines</del><ins>glows</ins> red.<note>Really red?</note><mq:comment>yes</mq:comment>",
        'The lamp <mrk type="comment" value="bright?">glows</mrk> red.',
    ],
)  # fmt: skip
def test_tracked_changes_are_accepted_and_comments_are_no_text(tmp_path: Path, target: str) -> None:
    text = xliff_1(UNIT.format("", "", "").replace("The lamp", target))
    assert read(tmp_path / "a.xlf", text)[0] == [(PAIR[0], "The lamp glows red.")]
    assert read(
        tmp_path / "b.xlf", xliff_2(segment("", target=target)).replace("sdl:", "").replace("mq:", "")
    )[0] == [(PAIR[0], "The lamp glows red.")]


def test_a_copy_of_its_source_is_no_translation_but_names_are(tmp_path: Path) -> None:
    names = [
        "Computer",
        "Microsoft Visual Studio Code",
        "ISO 9001:2015",
        "const x = 5; return x;",
        "Der Spiegel",
    ]
    copies = ["Die Tür klemmt seit gestern.", "Siehe Seite 5", "Schrauben fest anziehen"]
    units = [
        UNIT.replace("Die Lampe", text).replace("The lamp", text).format("", "", "")
        for text in names + copies
    ]
    pairs, skipped = read(tmp_path / "a.xlf", xliff_1(*units))
    assert pairs == [(name, name) for name in names] and skipped == {
        "its target is its source once more": len(copies)
    }
    assert read(tmp_path / "a.tsv", "".join(f"{text}\t{text.upper()}\n" for text in copies))[0] == []


def test_of_variants_the_newest_and_of_targets_the_one_in_the_language(tmp_path: Path) -> None:
    variant = '<tuv xml:lang="{0}" {1}><seg>{2}</seg></tuv>'
    of_german = variant.format("de", "", "Die Lampe")
    dates = [
        ('changedate="20240301T000000Z"', "new"),
        ('creationdate="20200301T000000Z"', "old"),
        ("", "undated"),
    ]
    for first, second in ((0, 1), (1, 0), (0, 2), (2, 1)):
        both = "".join(variant.format("en-GB", *dates[one]) for one in (first, second))
        pairs, skipped = read(tmp_path / "a.tmx", f"<tmx><body><tu>{both}{of_german}</tu></body></tmx>")
        assert pairs == [("Die Lampe", dates[min(first, second)][1])] and skipped.total() == 1
    both = '<target xml:lang="en">The lamp</target><target xml:lang="fr">La lampe</target>'
    assert read(tmp_path / "a.xlf", xliff_1(f"<trans-unit><source>Die Lampe</source>{both}</trans-unit>"))[
        0
    ] == [PAIR]


def test_codes_that_phrase_writes_into_the_text_are_codes(tmp_path: Path) -> None:
    marks = {"1": "&lt;b&gt;", "2": "&lt;br/&gt;", "3": "%s"}
    metadata = "".join(
        f'<m:mark id="{one}"><m:content>{content}</m:content></m:mark>' for one, content in marks.items()
    )
    source, target = "Die {1>rote&lt;1}{2}Lampe{3}dort {0}", "The {1>red&lt;1}{2}lamp{3}there {0}"
    unit = UNIT.format('m:confirmed="1"', "", f"<m:tunit-metadata>{metadata}</m:tunit-metadata>")
    text = xliff_1(unit.replace("Die Lampe", source).replace("The lamp", target))
    expected = [("Die rote Lampe dort {0}", "The red lamp there {0}")]
    assert read(tmp_path / "a.mxliff", text)[0] == expected


def test_no_break_spaces_are_kept_and_a_code_in_a_word_is_none_in_the_other_language(tmp_path: Path) -> None:
    text = "Seite\u00a05 \u202f!\u00a0"
    assert (
        read(tmp_path / "a.xlf", xliff_1(UNIT.replace("Die Lampe", text).format("", "", "")))[0][0][0]
        == text.strip()
    )
    unit = UNIT.replace("Die Lampe", 'Donau<x id="1"/>dampfer').format("", "", "")
    assert read(tmp_path / "a.xlf", xliff_1(unit))[0] == [("Donaudampfer", "The lamp")]


def test_a_table_in_the_wrong_order_is_refused(tmp_path: Path) -> None:
    row = "This is a sentence in English.\tDas ist ein Satz auf Deutsch.\n"
    with pytest.raises(
        ConfigurationError, match=r"a\.tsv has English before German, .*: exchange the two columns"
    ):
        read(tmp_path / "a.tsv", row * 12)
    assert len(read(tmp_path / "a.tsv", row * 2)[0]) == 2  # of which little can be told


TEXTS = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Z"], exclude_characters='<>&"{}\ufeff\ufffe\uffff'),
    min_size=1,
)
SAYINGS = {
    place: {**dict.fromkeys(yes.split(), True), **dict.fromkeys(no.split(), False)}
    for place, (yes, no) in STATES.items()
}


@given(data=st.data())
def test_any_mixture_of_states_changes_and_variants_is_told_apart(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Of any units: what is read and what is counted are all of them, and what is read is what was accepted of it."""
    units, expected = [], []
    for number in range(data.draw(st.integers(1, 6))):
        place = data.draw(
            st.sampled_from([one for one in SAYINGS if "mq:" not in one[0] and "m:" not in one[0]])
        )
        state = data.draw(st.sampled_from(list(SAYINGS[place])))
        deleted, added = data.draw(TEXTS), data.draw(TEXTS)
        target = f'T{number} <mrk mtype="x-sdl-deleted">{deleted}</mrk><mrk mtype="x-sdl-added">{added}</mrk>'
        unit = UNIT.replace("Die Lampe", f"S{number}").replace("The lamp", "@")
        units.append(unit.format(*(part.format(state) for part in place)).replace("@", target))
        expected += [(f"S{number}", f"T{number} {added}")] if SAYINGS[place][state] else []
    pairs, skipped = read(tmp_path / "a.xlf", xliff_1(*units))
    assert pairs == expected and skipped.total() == len(units) - len(expected)
