"""Translation memories of other tools: pairs of the languages are read, others counted, nothing is expanded."""

from __future__ import annotations

import gzip
import lzma
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.translation_memory import read_memory, tmx_lines

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
OF_TMX = [("Grüß Gott, Welt & mehr!", "Hello, world & more!"), ("Guten Morgen.", "Good morning."), ("Ja", "Yes")]

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
    assert pairs == OF_TMX and skipped == {"not in both de and en": 1, "without text": 1}
    turned, _ = read(tmp_path / "m.tmx", TMX.format(encoding=encoding).encode(encoding), "en", "de")
    assert turned == [(target, source) for source, target in OF_TMX]


def test_packed_files_are_read_and_a_long_one_piece_by_piece(tmp_path: Path) -> None:
    for name, pack in (("m.TMX.gz", gzip.compress), ("m.tmx.xz", lzma.compress)):
        assert read(tmp_path / name, pack(TMX.format(encoding="utf-8").encode()))[0] == OF_TMX
    pairs = [(f"Satz {n} <&> äöü", f'sentence "{n}" 中') for n in range(3000)]
    lines = tmx_lines("de", "en", ((str(n), *pair) for n, pair in enumerate(pairs)))
    assert read(tmp_path / "long.tmx", "\n".join(lines)) == (pairs, Counter())


def test_what_is_exported_is_xml_for_others(tmp_path: Path) -> None:
    root = ElementTree.fromstring("\n".join(tmx_lines("de", "en", [("7", "a < b & c", '"d"')])))
    assert root.get("version") == "1.4" and [unit.get("tuid") for unit in root.iter("tu")] == ["7"]
    assert [segment.text for segment in root.iter("seg")] == ["a < b & c", '"d"']


def test_xliff(tmp_path: Path) -> None:
    pairs, skipped = read(tmp_path / "p.xlf", XLIFF_1)
    assert pairs == [("Das Haus ist groß.", "The house is big.")]
    assert skipped == {"not translated": 2, "without text": 1}
    pairs, skipped = read(tmp_path / "p.xliff", XLIFF_2)
    assert pairs == [("Ein Satz.", "A sentence."), ("Und noch", "And more")] and skipped == {"not translated": 1}
    for text in (XLIFF_1, XLIFF_2):
        with pytest.raises(ConfigurationError, match=r"p\.xlf has en(-US)? as target-language, and the model has fr"):
            read(tmp_path / "p.xlf", text, "de", "fr")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.tmx", '<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>', "declares the entity 'a'"),
        ("a.tmx", '<!DOCTYPE tmx [<!ENTITY a SYSTEM "file:///etc/passwd">]><tmx>&a;</tmx>', "declares the entity 'a'"),
        ("a.tmx", '<!DOCTYPE tmx [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]><tmx/>', "declares the entity 'p'"),
        ("a.tmx", "<tmx><body>", "is no well-formed XML"),
        ("a.tmx", b"<tmx>\xff\xfe</tmx>", "is no well-formed XML"),
        ("a.tmx", "", "is no well-formed XML"),
        ("a.tmx", XLIFF_1, "is no TMX: it begins with the element 'xliff'"),
        ("a.xlf", "<tmx/>", "is no XLIFF: it begins with the element 'tmx'"),
        ("a.tmx.gz", "<tmx/>", "is damaged, or not what its name says"),
        ("a.docx", "", "is no TSV, TMX or XLIFF file by its name"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str | bytes, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read(tmp_path / name, text)


def test_lines_of_a_tsv_that_are_no_pair_are_counted(tmp_path: Path) -> None:
    lines = b"a\tb\n", b"one\ttwo\tthree\n", b"\xff\tx\n", b"\n", b"alone\n", b"1\t2\t3\n", b"c\td\t0.5\n", b"x\t\xe4\n"
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
    units = '<tu><tuv lang="de"><seg>a&root;b</seg></tuv><tuv lang="en"><seg>c</seg></tuv></tu>'
    text = f'<!DOCTYPE tmx SYSTEM "file:///etc/passwd"><tmx><body>{units}</body></tmx>'
    assert read(tmp_path / "a.tmx", text)[0] == [("ab", "c")]  # the reference is left out, and nothing was fetched
