"""Translation memories of other tools: pairs of the languages are read, others counted, nothing is expanded."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.learning import text_fault, tidy
from fairseq_ccpr.text.translation_memory import SignedPair, read_memory, tmx_lines

TMX = """<?xml version="1.0" encoding="{encoding}"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="*all*"><note>of the header</note></header><body>
<tu tuid="1"><note>a note</note><prop type="x">p</prop>
  <tuv xml:lang="DE-AT"><seg>Grüß <bpt i="1">&lt;b&gt;</bpt>Gott<ept i="1">&lt;/b&gt;</ept>,
     <hi>Welt</hi> &amp; mehr<ph><sub>beside</sub></ph>!</seg></tuv>
  <tuv xml:lang="en_GB"><prop type="y">q</prop><seg>Hello, world &#38; more!</seg></tuv>
  <tuv xml:lang="fr"><seg>Bonjour</seg></tuv></tu>
<tu><tuv lang="en"><seg>Good morning.</seg></tuv><tuv lang="de"><seg>Guten Morgen.</seg></tuv></tu>
<tu><tuv xml:lang="fr"><seg>Oui</seg></tuv><tuv xml:lang="en"><seg>Yes</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg> </seg></tuv><tuv xml:lang="en"><seg>Nothing</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg>Ja</seg></tuv><tuv xml:lang="en"><seg>Yes</seg></tuv><tuv xml:lang="en"><seg>Yeah</seg></tuv></tu>
</body></tmx>
"""
OF_TMX = [
    ("Grüß Gott, Welt & mehr!", "Hello, world & more!"),
    ("Guten Morgen.", "Good morning."),
    ("Ja", "Yeah"),
]
OLDER = "older than another variant of its language, or before it"

XLIFF_1 = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a" source-language="de-DE" target-language="en-US" datatype="plaintext"><body><group>
<trans-unit id="1" approved="yes"><source>Das <g id="1">Haus</g><x id="2"/> ist <ph id="3">%s</ph>groß.</source>
  <seg-source><mrk mtype="seg" mid="1">not this</mrk></seg-source>
  <target state="translated"><mrk mtype="seg" mid="1">The <g id="1">house</g> is big.</mrk></target>
  <alt-trans><source>Das Auto</source><target>The car</target></alt-trans></trans-unit>
<trans-unit id="2"><source>Offen</source></trans-unit>
<trans-unit id="3"><source>Neu</source><target state="needs-translation">Neu</target></trans-unit>
<trans-unit id="4"><source>Leer</source><target/></trans-unit>
</group></body></file></xliff>
"""
XLIFF_2 = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="de" trgLang="en"><file id="f">
<unit id="1"><originalData><data id="d">&lt;br/&gt;</data></originalData>
<segment state="final"><source>Ein <pc id="1">Satz</pc><ph id="2" dataRef="d"/>.</source>
  <target>A <pc id="1">sentence</pc>.</target></segment>
<ignorable><source> </source></ignorable>
<segment state="initial"><source>Noch einer.</source><target>Noch einer.</target></segment>
<segment><source>Und<cp hex="001A"/>noch</source><target>And<cp hex="001A"/>more</target></segment></unit></file></xliff>
"""


def read(path: Path, text: str | bytes, *languages: str) -> tuple[list[tuple[str, str]], Counter[str]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    skipped: Counter[str] = Counter()
    return list(read_memory(path, *(languages or ("de", "en")), skipped)), skipped


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_tmx(tmp_path: Path, encoding: str) -> None:
    pairs, skipped = read(tmp_path / "m.tmx", TMX.format(encoding=encoding).encode(encoding))
    assert pairs == OF_TMX and skipped == {"not in both de and en": 1, "without text": 1, OLDER: 1}
    turned, _ = read(tmp_path / "m.tmx", TMX.format(encoding=encoding).encode(encoding), "en", "de")
    assert turned == [(target, source) for source, target in OF_TMX]


def test_packed_files_are_read_and_a_long_one_piece_by_piece(tmp_path: Path) -> None:
    for name, pack in (("m.TMX.gz", gzip.compress), ("m.tmx.gz", lzma.compress), ("m.tmx", bz2.compress)):
        assert read(tmp_path / name, pack(TMX.format(encoding="utf-8").encode()))[0] == OF_TMX
    pairs = [(f"Satz {n} <&> äöü", f'sentence "{n}" 中') for n in range(3000)]
    lines = tmx_lines("de", "en", ((str(n), *pair, 0, "") for n, pair in enumerate(pairs)))
    assert read(tmp_path / "long.tmx", "\n".join(lines)) == (pairs, Counter())


@pytest.mark.parametrize(
    ("dates", "kept"),
    [
        (("", ""), ["one", "two"]),
        (("20200101T000000Z", "20240101T000000Z"), ["one", "two"]),
        (("20240101T000000Z", "20200101T000000Z"), ["one"]),
        (("20240101T000000Z", "20240101T000000Z"), ["one", "two"]),
        (("20240101T000000Z", ""), ["one", "two"]),
    ],
)
def test_the_newest_translation_of_a_source_is_the_last(
    tmp_path: Path, dates: tuple[str, str], kept: list[str]
) -> None:
    """Later pairs replace earlier ones where they are learned."""
    old = 'creationdate="20010101T000000Z"'
    dated = [
        tu("eins", text).replace("<tu>", f'<tu {old} changedate="{date}">')
        for text, date in zip(("one", "two"), dates)
    ]
    of_side = [
        tu("eins", text).replace('<tuv xml:lang="en">', f'<tuv xml:lang="en" {old} changedate="{date}">')
        for text, date in zip(("one", "two"), dates)
    ]
    for units in (dated, of_side) if all(dates) else ([one.replace(old, "") for one in dated],):
        pairs, skipped = read(tmp_path / "a.tmx", tmx(*units, tu("zwei", "two")))
        assert pairs == [*(("eins", text) for text in kept), ("zwei", "two")]
        left_out = "older by its date than another translation of the same source"
        assert skipped == ({left_out: 1} if len(kept) == 1 else {})


def test_what_is_exported_is_xml_for_others(tmp_path: Path) -> None:
    root = ElementTree.fromstring("\n".join(tmx_lines("de", "en", [("7", "a < b & c", '"d"', 0, "")])))
    assert root.get("version") == "1.4" and [unit.get("tuid") for unit in root.iter("tu")] == ["7"]
    assert [segment.text for segment in root.iter("seg")] == ["a < b & c", '"d"']


def test_who_made_a_pair_and_when(tmp_path: Path) -> None:
    signed = [("1", "eins", "one", 1_700_000_000, 'Änne "A"'), ("2", "zwei", "two", 0, "")]
    lines = [*tmx_lines("de", "en", signed)]
    assert 'creationdate="20231114T221320Z"' in lines[4] and "creation" not in lines[5]
    said = 'creationdate="20010101T000000Z" creationid="Bo" changedate="20240101T000000Z" changeid="Cy"'
    lines[6:6] = [tu("drei", "three").replace('<tuv xml:lang="en">', f'<tuv xml:lang="en" {said}>')]
    lines[7:7] = [tu("vier", "four").replace("<tu>", '<tu creationdate="19000101T000000Z" creationid="Di">')]
    pairs, _ = read(tmp_path / "a.tmx", "\n".join(lines))
    found = [(*pair, pair.time, pair.author) for pair in pairs if isinstance(pair, SignedPair)]
    assert found == [one[1:] for one in signed] + [
        ("drei", "three", 1_704_067_200, "Cy"),
        ("vier", "four", 0, "Di"),
    ]


@pytest.mark.parametrize(
    ("of_unit", "of_side", "time", "author"),
    [
        ('creationid="A"', 'changedate="20240131T1230Z"', 1_706_704_200, "A"),
        ('creationid="A" creationdate="20240131"', 'changeid="B"', 1_706_659_200, "A"),
        (
            'changedate="20240131T143000+0200" changeid="B"',
            'creationdate="20240131T12" creationid="A"',
            1_706_704_200,
            "B",
        ),
        (
            'changedate="20200101" changeid="B" creationdate="202401311230" creationid="A"',
            "",
            1_706_704_200,
            "A",
        ),
        ('changeid="B" creationid="A"', 'creationdate="yesterday"', 0, "B"),
    ],
)
def test_forms_of_dates_and_whose_they_are(
    tmp_path: Path, of_unit: str, of_side: str, time: int, author: str
) -> None:
    unit = (
        tu("eins", "one")
        .replace("<tu>", f"<tu {of_unit}>")
        .replace('xml:lang="en"', f'xml:lang="en" {of_side}')
    )
    (pair,), _ = read(tmp_path / "a.tmx", tmx(unit))
    assert isinstance(pair, SignedPair) and (pair.time, pair.author) == (time, author)


def test_xliff(tmp_path: Path) -> None:
    pairs, skipped = read(tmp_path / "p.xlf", XLIFF_1)
    assert pairs == [("Das Haus ist groß.", "The house is big.")]
    assert skipped == {
        "not translated": 1, "without text": 1, "not confirmed: state is needs-translation": 1,
    }  # fmt: skip
    pairs, skipped = read(tmp_path / "p.xliff", XLIFF_2)
    assert pairs == [("Ein Satz.", "A sentence.")]
    assert skipped == {"not confirmed: state is initial": 1, "not confirmed: state is missing": 1}
    for text, language in ((XLIFF_1, "en-US"), (XLIFF_2, "en")):
        pairs, skipped = read(tmp_path / "p.xlf", text, "de", "fr")
        assert not pairs and skipped[f"its target is in {language}, not fr"] >= 2


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "a.tmx",
            '<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>',
            "declares the entity 'a'",
        ),
        (
            "a.tmx",
            '<!DOCTYPE tmx [<!ENTITY a SYSTEM "file:///etc/passwd">]><tmx>&a;</tmx>',
            "declares the entity 'a'",
        ),
        (
            "a.tmx",
            '<!DOCTYPE tmx [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]><tmx/>',
            "declares the entity 'p'",
        ),
        ("a.tmx", "<tmx><body>", "is no well-formed XML .*it ends before </tmx>"),
        (
            "a.tmx",
            '<?xml version="1.0" encoding="klingon"?><tmx/>',
            "names the encoding 'klingon', which is not known",
        ),
        (
            "a.tmx",
            '<?xml version="1.0" encoding="hex"?><tmx/>',
            "names the encoding 'hex', which is not known",
        ),
        ("a.tmx", b"<tmx>\xff\xfe</tmx>", "is no well-formed XML"),
        ("a.tmx", "", "is no well-formed XML"),
        ("a.tmx", XLIFF_1, "is no TMX: it begins with the element 'xliff'"),
        ("a.xlf", "<tmx/>", "is no XLIFF: it begins with the element 'tmx'"),
        ("a.tmx.gz", gzip.compress(b"<tmx/>", mtime=0)[:-4], "is damaged"),
        ("a.tmx", b"PK\3\4", "is a ZIP archive: unpack it"),
        ("a.docx", "", "is no TSV, TMX or XLIFF file by its name"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | bytes, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read(tmp_path / name, text)


def test_lines_of_a_tsv_that_are_no_pair_are_counted(tmp_path: Path) -> None:
    lines = (
        b"a\tb\n",
        b"one\ttwo\tthree\n",
        b"\xff\tx\n",
        b"\n",
        b"alone\n",
        b"1\t2\t3\n",
        b"c\td\t0.5\n",
        b"x\t\xe4\n",
    )
    pairs, skipped = read(tmp_path / "m.tsv", b"".join(lines))
    assert pairs == [("a", "b"), ("c", "d")]
    assert skipped == {
        "a line has 3 columns, and a pair has 2": 2, "a line has 1 columns, and a pair has 2": 1, "a line is empty": 1,
        "a line is not UTF-8": 2,
    }  # fmt: skip
    assert read(tmp_path / "m.tsv.gz", gzip.compress(b"".join(lines))) == (pairs, skipped)


def test_a_missing_file_and_an_external_document_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_memory(tmp_path / "none.tmx", "de", "en", Counter())
    text = '<!DOCTYPE tmx SYSTEM "file:///etc/passwd">' + tmx(
        tu("a&root;b", "c"), tu("d&uuml;&nbsp;&lt;&amp;", "&LT;")
    )
    pairs, skipped = read(tmp_path / "a.tmx", text)  # nothing was fetched
    assert pairs == [("dü\u00a0<&", "<")]
    assert skipped == {"is damaged: undefined entity &root;, as in line 2 of a.tmx": 1}


def tu(source: str, target: str) -> str:
    return (
        f'<tu><tuv xml:lang="de"><seg>{source}</seg></tuv><tuv xml:lang="en"><seg>{target}</seg></tuv></tu>'
    )


def tmx(*units: str) -> str:
    return "\n".join(["<tmx><header/><body>", *units, "</body></tmx>"])


def unit(source: str, target: str, seg_source: str = "") -> str:
    return f"<trans-unit><source>{source}</source>{seg_source}<target>{target}</target></trans-unit>"


def xliff(*units: str, attributes: str = 'source-language="de" target-language="en"') -> str:
    return "\n".join([f"<xliff version='1.2'><file {attributes}><body>", *units, "</body></file></xliff>"])


def xliff_2(content: str, attributes: str = 'srcLang="de" trgLang="en"') -> str:
    return f"<xliff version='2.0' {attributes}><file><unit>{content}</unit></file></xliff>"


OF_TWO = '<mrk mtype="seg" mid="0">Das Haus ist alt.</mrk> <mrk mtype="seg" mid="1">Es ist groß.</mrk>'


@pytest.mark.parametrize(
    ("target", "pairs"),
    [
        ('<mrk mtype="seg" mid="0">The house is old.</mrk> <mrk mtype="seg" mid="1"></mrk>',
         [("Das Haus ist alt.", "The house is old.")]),
        ('<g id="1"><mrk mtype="seg" mid="1">It is big.</mrk><x id="2"/><mrk mtype="seg" mid="0">The house is <mrk '
         'mtype="term">old</mrk>.</mrk></g>',
         [("Das Haus ist alt.", "The house is old."), ("Es ist groß.", "It is big.")]),
        ('<mrk mtype="seg">The house is old.</mrk><mrk mtype="seg">It is big.</mrk>',
         [("Das Haus ist alt. Es ist groß.", "The house is old. It is big.")]),
        ("It is old and big.", [("Das Haus ist alt. Es ist groß.", "It is old and big.")]),
    ],
)  # fmt: skip
def test_segments_are_paired_by_their_ids(tmp_path: Path, target: str, pairs: list[tuple[str, str]]) -> None:
    whole = re.sub("<[^>]*>", "", OF_TWO)
    for text in (unit(OF_TWO, target), unit(whole, target, f"<seg-source>{OF_TWO}</seg-source>")):
        assert read(tmp_path / "a.xlf", xliff(text))[0] == pairs


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ('<ph x="1">&lt;br/&gt;</ph>', " "), ('<ph type="lb"/>', " "), ("<ph> </ph>", " "), ("<ph>\\n</ph>", " "),
        ("<ut>{\\line }</ut>", " "), ("<bpt i='1'>&lt;p class='x'&gt;</bpt>", " "), ('<ph type="image"/>', " "),
        ('<x id="1" ctype="lb"/>', " "), ('<x id="1" ctype="x-html-br"/>', " "), ('<x equiv-text="&lt;br&gt;"/>', " "),
        ('<ph id="1" type="fmt" subType="xlf:lb"/>', " "), ('<ph disp="&#xA;"/>', " "), ('<ph dataRef="d"/>', " "),
        ('<x id="1"/>', " "), ('<ph dataRef="e"/>', ""), ("<ph>%s<sub>beside</sub></ph>", " "), ("<!-- x --><?y z?>", ""),
        ('<ph>&lt;mq:ch val="&#160;" /&gt;</ph>', " "), ('<ph>&lt;mq:ch val="&amp;#9;" /&gt;</ph>', " "),
        ('<ph>&lt;mq:rxt displaytext="x" val="\\n" /&gt;</ph>', " "), ('<g id="1"/>', ""), ("<ph>&lt;/b&gt;</ph>", ""),
        ("<ut>{\\b </ut>", ""), ('<it pos="end">x</it>', ""),
        ('<bpt i="1">&lt;b&gt;</bpt>', ""), ("<![CDATA[<br/>]]>", "<br/>"),
    ],
)  # fmt: skip
def test_codes_that_separate_words_become_a_space(tmp_path: Path, code: str, shown: str) -> None:
    data = '<originalData><data id="d">&lt;br/&gt;</data><data id="e">&lt;b&gt;</data></originalData>'
    segment = f"<segment><source>Zeile{code}zwei{code}.</source><target>Line{code}two</target></segment>"
    expected = [(f"Zeile{shown}zwei{shown.strip()}.", f"Line{shown}two")]
    assert read(tmp_path / "a.xlf", xliff_2(data + segment))[0] == expected
    if "dataRef" not in code:
        assert read(tmp_path / "a.tmx", tmx(tu(f"Zeile{code}zwei{code}.", f"Line{code}two")))[0] == expected
        assert (
            read(tmp_path / "a.xlf", xliff(unit(f"Zeile{code}zwei{code}.", f"Line{code}two")))[0] == expected
        )


def test_languages_are_those_of_the_text_or_of_the_file(tmp_path: Path) -> None:
    french = "its target is in fr, not en"
    said = '<trans-unit><source xml:lang="de">{0}</source><target xml:lang="{1}">{0}</target></trans-unit>'
    units = [said.format(language, language) for language in ("fr", "en-US")]
    pairs, skipped = read(tmp_path / "a.xlf", xliff(*units, attributes='source-language="de"'))
    assert pairs == [("en-US", "en-US")] and skipped == {french: 1}
    segment = "<segment><source>Ja</source><target xml:lang='{}'>x</target></segment>"
    of_2 = (
        segment.format("en")
        + segment.format("fr")
        + "<ignorable><source>.</source><target>.</target></ignorable>"
    )
    assert read(tmp_path / "a.xlf", xliff_2(of_2, 'srcLang="de"')) == ([("Ja", "x")], {french: 1})
    files = xliff(unit("eins", "one")) + xliff(unit("deux", "deux"), attributes='target-language="fr"')
    files = files.replace("</xliff><xliff version='1.2'>", "").replace(
        "</xliff>", "<file source-language='de'><body><group translate='no'>" + unit("Name", "Name") + "</group>"
        + unit("drei", "three") + '</body></file><file target-language="en>' + unit("x", "x") + "</file></xliff>"
    )  # fmt: skip
    pairs, skipped = read(tmp_path / "a.xlf", files)
    assert pairs == [("eins", "one"), ("drei", "three")]
    assert (
        skipped[french]
        == skipped["not to be translated"]
        == skipped["its source is in a damaged <file>, not de"]
        == 1
    )


@pytest.mark.parametrize(
    "encoding",
    ["gb2312", "shift_jis", "utf8", "windows-1251", "UTF-16", "UTF-16LE", "UTF-32BE", "UTF-8-SIG", "EUC-KR"],
)
def test_every_encoding_of_the_codec_registry_is_read(tmp_path: Path, encoding: str) -> None:
    text = "Текст" if "1251" in encoding else "日本" if encoding != "EUC-KR" else "한국"
    content = f'<?xml version="1.0" encoding="{encoding.removesuffix("-SIG")}"?>\n' + tmx(tu(text, "text"))
    assert read(tmp_path / "a.tmx", content.encode(encoding)) == ([(text, "text")], {})
    assert read(tmp_path / "a.tmx", tmx(tu(text, "text")).encode())[0] == [(text, "text")]
    content = content.replace(encoding.removesuffix("-SIG"), "UTF-16")  # by its declaration alone
    assert read(tmp_path / "a.tmx", content.encode())[0] == [(text, "text")]


DAMAGE = [
    "&#x1F;", "\x1f", "\x00", "a & b", "a < b", "<b>", "</seg>", "</tu>", "<!-- ", "<![CDATA[ ", "<? ", "&foo;", "&ü;",
    '<ph x="1>', "<ph x=1/>", "\ufffe", "</tu><tu>", "<ph", "]]>", "--><!-- -- -->",
]  # fmt: skip


@pytest.mark.parametrize("damage", [*DAMAGE, b"\xe4"])
@pytest.mark.parametrize(
    ("name", "one", "all_of", "file"), [("tu", tu, tmx, "a.tmx"), ("trans-unit", unit, xliff, "a.xlf")]
)
def test_a_damaged_unit_costs_itself_alone(
    tmp_path: Path, name: str, one: Callable[..., str], all_of: Callable[..., str], file: str, damage: str | bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = [("eins", "one"), ("zwei@", "two"), ("drei", "three <!-- <tu> --><![CDATA[!]]>"), ("vier", "four")]
    there = damage if isinstance(damage, bytes) else damage.replace("tu>", f"{name}>").encode()
    text = all_of(*(one(*row) for row in rows)).encode().replace(b"@", there)
    for block in (1, 1 << 16):
        monkeypatch.setattr("fairseq_ccpr.text.translation_memory.UNPACKED_BYTES", block)
        pairs, skipped = read(tmp_path / file, text)
        assert pairs == [("eins", "one"), ("drei", "three !"), ("vier", "four")]
        assert (
            all(re.match(rf"is damaged: .*, as in line 3 of {file}", reason) for reason in skipped)
            and skipped
        )


def test_a_long_comment_between_blocks_and_a_unit_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_ccpr.text.translation_memory.UNPACKED_BYTES", 64)
    monkeypatch.setattr("fairseq_ccpr.text.translation_memory.LONGEST_UNIT", 2000)
    hidden = f"<!-- {tu('x', 'y') * 10} -->\n<![CDATA[{tu('x', 'y')}]]>"
    text = tmx(tu("eins", "one"), hidden, tu("x" * 3000, "y"), tu("zwei", "two"))
    pairs, skipped = read(tmp_path / "a.tmx", text)
    assert pairs == [("eins", "one"), ("zwei", "two")]
    assert skipped == {"longer than 2,000 characters, as no unit is": 1}


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.tmx.gz", "a.tsv.gz"])
def test_a_packed_file_takes_no_more_memory_than_it_may(tmp_path: Path, name: str) -> None:
    """In a process of its own, which may have little more than Python itself."""
    long, rows = "x" * 100_000_000, [("eins", "one"), ("zwei", "two")]
    text = tmx(*(tu(*row) for row in (rows[0], (long, "y"), rows[1])))
    if name == "a.tsv.gz":
        text = "".join(f"{one}\t{two}\n" for one, two in (rows[0], (long, "y"), rows[1]))
    (tmp_path / name).write_bytes(gzip.compress(text.encode(), 1))
    code = f"""
import resource
from collections import Counter
from pathlib import Path
from fairseq_ccpr.text.translation_memory import read_memory
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
skipped = Counter()
print(list(read_memory(Path({str(tmp_path / name)!r}), "de", "en", skipped)), sum(skipped.values()))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 70_000, skipped
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{rows} 1\n", done.stderr


# lone surrogates and control characters among them
@given(row=st.tuples(*[st.text(st.characters(), max_size=12)] * 2))
@example(("a\rb", "\x1fc\u2028.")).via("line ends")
@example(("\ufffe", "\ud800")).via("no characters of XML")
@example(("<&>]]>\"'\x85", "&uuml;&amp;uuml;")).via("markup")
@example(("\ufeffa", "b\ufeff")).via("byte order marks")
def test_any_text_that_goes_in_comes_out_or_is_refused_by_name(tmp_path: Path, row: tuple[str, str]) -> None:
    tidied = (tidy(row[0].replace("\ufeff", "")), tidy(row[1].replace("\ufeff", "")))
    of_tsv = "\t".join(side.replace("\t", " ").replace("\n", " ") for side in row).encode(
        "utf-8", "surrogatepass"
    )
    of_xliff = xliff(unit(*map(escape, row))).encode("utf-8", "surrogatepass")
    texts = {"a.tsv": b"\n" + of_tsv, "a.xlf": of_xliff}
    try:
        texts["a.tmx"] = "\n".join(tmx_lines("de", "en", [("7", *row, 0, "")])).encode()
        assert len(ElementTree.fromstring(texts["a.tmx"])) == 2
    except ConfigurationError as error:
        assert re.search(r"the pair 7 has the character U\+[0-9A-F]{4}, which XML cannot carry", str(error))
        assert text_fault(*tidied) or "" in tidied
    for name, content in texts.items():
        pairs, skipped = read(tmp_path / name, content)
        del skipped["a line is empty"]
        assert (
            [(tidy(source), tidy(target)) for source, target in pairs] == [tidied]
            if not skipped
            else not pairs
        )
        assert not skipped or text_fault(*tidied) or (name == "a.xlf" and "is damaged" in str(skipped))


def test_what_comes_before_the_end_of_a_cut_file_is_read(tmp_path: Path) -> None:
    text = tmx(*(tu(f"Satz {number}", "x") for number in range(20)))
    path = tmp_path / "a.tmx"
    path.write_text(text[: text.index("Satz 15")], encoding="utf-8")
    found = []
    with pytest.raises(ConfigurationError, match="it ends before </tmx>"):
        found.extend(read_memory(path, "de", "en", Counter()))
    assert len(found) == 15
