"""Documents keep their form: what is not text stays to the byte, and markup goes with its words."""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.dom.minidom import parseString
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text import office
from fairseq_ccpr.text.formats import FORMATS, open_document
from tests.text.test_html import written

WORDS = {
    "Das": "The", "kleine": "small", "Haus": "house", "ist": "is", "alt": "old", "Ende": "End", "Zelle": "Cell",
    "Ein": "One", "Satz": "sentence", "Note": "Note", "und": "and", "Link": "link",
}  # fmt: skip
BOLD = "<w:rPr><w:b/></w:rPr>"


def run(text: str, style: str = "") -> str:
    return f'<w:r w:rsidR="00A1">{style}<w:t xml:space="preserve">{text}</w:t></w:r>'


WORD = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n<w:document xmlns:w="w" xmlns:r="r" xmlns:wp="wp"><w:body>'
    f'<w:p w:rsidR="00A1"><w:pPr><w:jc w:val="left"/></w:pPr>{run("Das ")}<w:proofErr w:type="spellStart"/>'
    f"{run('klei', BOLD)}{run('ne', BOLD)}{run(' Ha')}{run('us ist alt.')}"
    "<w:r><w:drawing><wp:posOffset>12</wp:posOffset></w:drawing></w:r></w:p>"
    f'<w:p><w:hyperlink r:id="rId1">{run("Link", BOLD)}</w:hyperlink>{run(" und Haus")}<w:r><w:tab/></w:r>'
    f"{run('Ende &amp; 3')}</w:p>"
    '<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText> PAGE </w:instrText></w:r>'
    f'<w:r><w:fldChar w:fldCharType="separate"/></w:r>{run("3")}<w:r><w:fldChar w:fldCharType="end"/></w:r>'
    f'<w:bookmarkStart w:id="1"/>{run("Ende", BOLD)}<w:bookmarkEnd w:id="1"/>{run(" und Haus")}</w:p>'
    f'<w:p><w:sdt><w:sdtPr><w:id w:val="1"/></w:sdtPr><w:sdtContent>{run("Zelle")}</w:sdtContent></w:sdt></w:p>'
    f"<w:p>{run('Ein Satz')}<w:r><w:pict><w:txbxContent><w:p>{run('Note')}</w:p></w:txbxContent></w:pict></w:r></w:p>"
    "</w:body></w:document>"
)
OPEN = (
    '<?xml version="1.0" encoding="UTF-8"?><office:document-content xmlns:office="o" xmlns:text="t" xmlns:dc="d">'
    "<office:body>"
    '<text:h text:outline-level="1">Ende</text:h><text:p text:style-name="P1">Das <text:span text:style-name="T1">kleine'
    '</text:span><text:s text:c="2"/>Haus<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Note'
    "</text:p></text:note-body></text:note></text:p><text:p>Ein Satz<text:line-break/>Haus &lt; 3</text:p>"
    "<text:p><text:s/>Ende <text:s/>Ende<text:number>Haus</text:number></text:p><text:p/>"
    "<office:annotation><dc:date>2026-11-28T10:00</dc:date><text:p>Zelle</text:p></office:annotation>"
    "</office:body></office:document-content>"
)
PO = """msgid ""
msgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"

# Haus
#: a.c:1
msgid "Das Haus\\n"
msgstr ""

msgid "Ein Haus"
msgid_plural "Das Haus"
msgstr[0] ""
msgstr[1] "by hand"

#, fuzzy
msgid "Satz"
msgstr "read by nobody"

#, c-format
msgid "Ende\\n"
"kleine %d {0}"
msgstr ""

msgid "&Das %(n)s Stück <b>Haus</b> 3 < 4"
msgstr ""

msgid "Ende"
msgstr "kept"
"""


MARKDOWN = """---
title: Das Haus
---
# Das *kleine* Haus #

Das **kleine** [Haus](haus.md "Das") ist alt\\*.
Ein Satz mit `Haus` und <b>Ende</b><br>Zelle
> Das Haus
> ist alt. Ende&nbsp;und
Ende

![Ein Haus](haus.png) <https://haus.org> https://haus.org/Das. [Link] M&auml;rz[^1]  \
Ende

| Das | Haus \\| Zelle |
|:--|--|
| `a \\| b` | ~~Das~~ *kleine* |

1. Haus
   - [ ] Zelle

         Das Haus

```text
Das Haus
```
<div>
Das Haus
</div>

Ende
----

[Link]: haus.md
[^1]: Note
"""
TRANSLATED = """---
title: Das Haus
---
# The *small* house #

The **small** [house](haus.md "Das") is old\\*.
One sentence mit `Haus` and <b>End</b><br>Cell
> The house is old. End\u00a0and End

![One house](haus.png) <https://haus.org> https://haus.org/Das. [link] März[^1]  \
End

| The | house \\| Cell |
|:--|--|
| `a \\| b` | ~~The~~ *small* |

1. house
   - [ ] Cell

         Das Haus

```text
Das Haus
```
<div>
Das Haus
</div>

End
----

[Link]: haus.md
[^1]: Note
"""


def zipped(path: Path, **files: str) -> Path:
    with ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "first, and not compressed")
        for name, text in files.items():
            archive.writestr(f"{name.replace('__', '/')}.xml", text)
        archive.writestr("picture.png", bytes(range(256)))
    return path


def through(path: Path, words: dict[str, str], order: list[int] | None = None) -> Path:
    """Translate a document word by word."""
    made, document = path.with_name(f"made{path.suffix}"), open_document(path)
    texts = ((one, number) for one in document.segments for number in range(len(one.sentences)))
    document.save([written(one, number, words, order) for one, number in texts], made)
    return made


def texts(xml: str) -> list[str]:
    """The text of each paragraph, bold in asterisks."""
    assert parseString(xml)
    found = []
    for paragraph in re.findall(r"<w:p[ >].*?</w:p>", xml):
        runs = re.findall(
            r"<w:r(?: [^>]*)?>(<w:rPr>.*?</w:rPr>)?<w:t [^>]*>(.*?)</w:t></w:r>|<w:(tab)/>", paragraph
        )
        found.append(
            "".join("\t" if tab else f"*{text}*" if "w:b" in style else text for style, text, tab in runs)
        )
    return found


def test_word(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.docx", word__document=WORD, word__styles="<a>Haus</a>", word__footnotes=WORD)
    sentences = [one for text in open_document(path).segments for one in text.sentences]
    assert sentences[: len(sentences) // 2] == [
        "Das kleine Haus ist alt.", "Link und Haus", "Ende & 3", "Ende und Haus", "Zelle", "Ein Satz", "Note"
    ]  # fmt: skip
    with ZipFile(path) as before, ZipFile(through(path, WORDS)) as after:
        assert before.namelist() == after.namelist()
        for name in before.namelist():
            if name not in ("word/document.xml", "word/footnotes.xml"):
                assert before.read(name) == after.read(name)
        xml = after.read("word/document.xml").decode()
    assert texts(xml)[:2] == ["The *small* house is old.", "*link* and house\tEnd &amp; 3"]
    kept = ("posOffset>12<", "<w:hyperlink ", " PAGE ", "<w:sdtContent><w:r>", ">One sentence<", ">Note<")
    assert [*map(xml.count, kept)] == [1] * 6
    with ZipFile(through(path, WORDS, order=[4, 3, 2, 1, 0, 5])) as after:
        assert texts(after.read("word/document.xml").decode())[0] == "old is house *small* The ."


def test_word_keeps_what_is_not_text(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.docx", word__document=WORD)
    with ZipFile(through(path, {})) as after:
        again = after.read("word/document.xml").decode()
    wanted, again = (re.sub('<w:proofErr[^>]*>|(?<=<w:r) w:rsidR="00A1"', "", one) for one in (WORD, again))
    for style, one, two in ((BOLD, "klei", "ne"), ("", " Ha", "us")):  # adjacent runs of one format are one
        wanted = wanted.replace(f'{one}</w:t></w:r><w:r>{style}<w:t xml:space="preserve">{two}', one + two)
    assert again == wanted


def test_open_document(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.odt", content=OPEN, meta="<a>Haus</a>")
    with ZipFile(through(path, {})) as after:
        assert after.read("content.xml").decode() == OPEN.replace('<text:s text:c="2"/>', " ")
    with ZipFile(through(path, WORDS)) as after:
        xml = after.read("content.xml").decode()
    assert (
        parseString(xml)
        and ">End</text:h>" in xml
        and "One sentence<text:line-break/>house &lt; 3</text:p>" in xml
    )
    assert 'The <text:span text:style-name="T1">small</text:span> house<text:note>' in xml
    assert "<dc:date>2026-11-28T10:00</dc:date><text:p>Cell<" in xml and "citation>1<" in xml
    assert "<text:s/>End <text:s/>End<text:number>Haus</text:number>" in xml


def test_fields_and_ranges_stay_whole(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.docx", word__document=WORD)
    with ZipFile(through(path, WORDS, order=[2, 1, 0])) as after:
        xml = after.read("word/document.xml").decode()
    field = WORD[WORD.index('<w:r><w:fldChar w:fldCharType="begin"') : WORD.index("<w:bookmarkStart")]
    bold = f'<w:bookmarkStart w:id="1"/><w:r>{BOLD}<w:t xml:space="preserve">End</w:t></w:r><w:bookmarkEnd w:id="1"/>'
    assert field.replace(' w:rsidR="00A1"', "") in xml.replace(' w:rsidR="00A1"', "") and bold in xml
    assert texts(xml)[2] == "3house and *End*"
    contents = WORD.replace('<w:r><w:fldChar w:fldCharType="begin"/></w:r>', "", 1).replace(
        run("Link", BOLD), '<w:r><w:fldChar w:fldCharType="begin"/></w:r>', 1
    )
    with ZipFile(through(zipped(path, word__document=contents), WORDS)) as after:
        again = after.read("word/document.xml").decode()
    start, end = contents.index("<w:hyperlink "), contents.index('<w:bookmarkStart w:id="1"/>')
    assert parseString(again) and contents[start:end] in again and "End</w:t>" in again  # over two paragraphs


def test_gettext(tmp_path: Path) -> None:
    pytest.importorskip("polib")
    path = tmp_path / "a.po"
    path.write_text(PO, encoding="latin-1")
    made = through(path, {**WORDS, "Stück": "pieces €"}).read_text(encoding="utf-8")
    assert 'msgid "Das Haus\\n"\nmsgstr "The house\\n"' in made and made.count(" fuzzy\n") == 4
    assert 'msgstr "kept"' in made and 'msgstr "read by nobody"' in made and "# Haus\n#: a.c:1" in made
    assert made.count('msgstr[0] ""') == 1 and 'msgstr[1] "by hand"' in made and "charset=UTF-8" in made
    assert (
        'msgstr "&The %(n)s pieces € <b>house</b> 3 < 4"' in made
        and 'msgstr ""\n"End\\n"\n"small %d {0}"' in made
    )


def test_markdown(tmp_path: Path) -> None:
    pytest.importorskip("markdown_it")
    path = tmp_path / "a.md"
    path.write_bytes(MARKDOWN.replace("\n", "\r\n").encode())
    assert through(path, WORDS).read_bytes().decode() == TRANSLATED.replace("\n", "\r\n")


def test_pages_in_markdown_keep_all_but_their_prose(tmp_path: Path) -> None:
    """The project's own pages: every word of them, and where each is changed, all that is no prose."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    folder = Path(__file__).parents[2]
    path = tmp_path / "a.md"

    def kept(text: str) -> list[object]:
        tokens = [one for token in parser.parse(text) for one in (token, *(token.children or ()))]
        own = ("fence", "code_block", "html_block", "code_inline")
        return sorted(
            (one.type, one.content * (one.type in own), str(one.attrs))
            for one in tokens
            if one.type not in ("text", "softbreak", "inline")
        )

    for page in [*folder.glob("docs/*.md"), folder / "README.md"]:
        text = page.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        same = through(path, {}).read_text(encoding="utf-8")
        assert sorted("".join(same.split())) == sorted("".join(text.split())), page
        words = dict.fromkeys(re.findall(r"[a-z]{3,}", text), "Wort")
        changed = through(path, words).read_text(encoding="utf-8")
        assert kept(changed) == kept(text), page
        assert changed.count("Wort") > 100


def test_translations_that_would_be_markup_are_escaped(tmp_path: Path) -> None:
    pytest.importorskip("markdown_it")
    path, made = tmp_path / "a.md", tmp_path / "b.md"
    path.write_text("Eins\n\nZwei 2 * 3\n\n| a | b |\n|-|-|\n| Drei | vier |\n", encoding="utf-8")
    document = open_document(path)
    document.save(["1. One <b>", "two 2 * 3", "a", "b", "three | 3", "`four`"], made)
    escaped = "1\\. One \\<b\\>\n\ntwo 2 * 3\n\n| a | b |\n|-|-|\n| three \\| 3 | \\`four\\` |\n"
    assert made.read_text(encoding="utf-8") == escaped


LINES = ["Das", "Haus ist alt ", " \xa0", "\u3000", "\u2003Ende", "\x85", "\x1c", "# Das", "Das #", "- Haus", "",
         "    Das", "| Das | Haus |\n|-|-|", "| Das\0 | Ende\xa0|", "---", "==", "> \u2003", "Das \\*", "[Haus]"]  # fmt: skip


@given(st.lists(st.sampled_from(LINES)))
def test_no_space_or_line_misplaces_a_translation(lines: list[str]) -> None:
    pytest.importorskip("markdown_it")
    text = "\n".join([*lines, "", "[Haus]: x"])
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.md")
        path.write_bytes(text.encode())
        same, changed = (through(path, words).read_bytes().decode() for words in ({}, {"Das": "The"}))

    def essence(text: str) -> str:  # quotations become lazy
        return "".join(text.replace("\0", "\ufffd").replace(">", "").split())

    assert essence(same) == essence(text)
    assert essence(changed.replace("The", "Das")) == essence(text)
    assert lines != ["\u3000", "Das"] or "The" in changed


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("\xa0\nDas Haus ist alt\n", "\xa0\nThe house is old\n"),
        ("Das\n\n\u3000\nDas Haus\n\nHaus\n", "The\n\n\u3000\nThe house\n\nhouse\n"),
        ("> \u2003\n> *Das\n> Haus* \u2003\n", "> \u2003\n> *The house* \u2003\n"),
        ("# Das\0Haus\n\n| Das\0 | x |\n|-|-|\n", "# The\ufffdhouse\n\n| The\ufffd | x |\n|-|-|\n"),
        (
            "[Haus], [*Haus*][] und [Satz], [Ort][]\n\n![Haus] ist\n\n[haus]: x\n[*haus*]: y\n[satz]: z\n[ort]: z\n",
            "[house][Haus], [*house*][*Haus*] and [sentence][Satz], [Ort][]\n\n![house][Haus] is\n\n"
            "[haus]: x\n[*haus*]: y\n[satz]: z\n[ort]: z\n",
        ),
        ("` ` Das Haus\n", "` ` The house\n"),
        ("---\n\nDas Haus\n\n---\n\nDas\n", "---\n\nThe house\n\n---\n\nThe\n"),
        ("---\nDas Haus\n---\nDas\n", "---\nThe house\n---\nThe\n"),
        ("---\n# Das\nHaus: Das\n\n...\nDas\n", "---\n# Das\nHaus: Das\n\n...\nThe\n"),
        (
            "Das $a_{Haus} * b*$ und $$\nHaus\n$$ ist *alt*, $5 und $6, 5 $ und 6$ Haus\n",
            "The $a_{Haus} * b*$ and $$\nHaus\n$$ is *old*, $5 and $6, 5 $ and 6$ house\n",
        ),
        (
            "Das Haus\n: Haus\n:   Das **Haus**\n\n`x`: Haus",
            "The house\n: house\n:   The **house**\n\n`x`: house",
        ),
    ],
)
def test_forms_of_markdown(tmp_path: Path, text: str, made: str) -> None:
    pytest.importorskip("markdown_it")
    path = tmp_path / "a.md"
    path.write_bytes(text.encode())
    assert through(path, WORDS).read_bytes().decode() == made


def test_translations_show_what_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("markdown_it")
    path, made = tmp_path / "a.md", tmp_path / "b.md"
    path.write_text("Eins\n\nZwei\n\nDrei\n\n# Vier #\n\nFünf\n\n- *sechs* und\n", encoding="utf-8")
    open_document(path).save(["&copy; *one", "&amp;lt; two", r"\* three", "C #", "$five$", "six"], made)
    text = "\\&copy; \\*one\n\n\\&amp;lt; two\n\n\\\\\\* three\n\n# C \\# #\n\n\\$five\\$\n\n- *sechs* und\n"
    assert made.read_text(encoding="utf-8") == text
    said = "blocks that stay untranslated, as Markdown would read other markup: 1, of line 11"
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [f"{path}: {said}"]


@pytest.mark.parametrize(
    "hostile",
    [
        "<w:p>" * 150 + "</w:p>" * 150,
        "<w:p><w:pPr></w:pPr><w:r></w:r>" * 20_000 + "</w:p>" * 20_000,
        "<w:p><w:pPr>" * 20_000,
        "<w:p>" + "<w:r><w:rPr><w:rPrChange>" * 20_000,
        "<w:p>" + "<w:sdt><w:sdtPr/>" * 20_000,
        "<w:p>" + "<w:r><w:t>a</w:t></w:r>x<!-- <w:p> -->" * 20_000 + "</w:p>",
        "<w:p>" + '<w:bookmarkStart w:id="1"/><w:r><w:t>a</w:t></w:r>' * 5_000 + "</w:p>",
        '<w:p><w:r><w:fldChar w:fldCharType="begin"/></w:r></w:p>' * 5_000,
    ],
)
def test_no_document_takes_long(tmp_path: Path, hostile: str) -> None:
    path = zipped(tmp_path / "a.docx", word__document=f"<w:document>{hostile}</w:document>")
    start = time.process_time()
    try:
        through(path, {})
    except ConfigurationError as error:
        assert re.search("deep|mismatched tag", str(error))
    assert time.process_time() - start < 10


def test_archives_that_are_damaged_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.docx", word__document="\ufeff" + WORD)
    with ZipFile(through(path, {})) as after:
        assert after.read("word/document.xml").decode().startswith("\ufeff<?xml")
    for most, said in (("MOST_OF_TEXT", "more than 0 MiB of text"), ("MOST_OF_ALL", "more than 0 MiB$")):
        with monkeypatch.context() as patch, pytest.raises(ConfigurationError, match=said):
            patch.setattr(office, most, 0)
            open_document(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(bytes(range(200)), bytes(200)))
    with pytest.raises(ConfigurationError, match=r"picture\.png in it is damaged"):
        open_document(path)
    latin = WORD.replace("UTF-8", "ISO-8859-1")
    for xml, said in ((latin, "its XML is in ISO-8859-1"), (f"<!DOCTYPE a>{WORD[55:]}", "document type")):
        with pytest.raises(ConfigurationError, match=said):
            open_document(zipped(path, word__document=xml))


def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    for suffix in (".docx", ".odt", ".html", ".po", ".md"):
        path = tmp_path / f"a{suffix}"
        path.write_bytes(b"\xff\xfe no document")
        with pytest.raises(ConfigurationError, match=f"a{suffix} is no readable {suffix} file"):
            open_document(path)
    with pytest.raises(ConfigurationError, match="it has no text in it"):
        open_document(zipped(tmp_path / "b.docx", content=OPEN))
    with pytest.raises(ConfigurationError, match="is no document that is known"):
        open_document(tmp_path / "a.pdf")
    assert {*FORMATS} >= {".docx", ".odt", ".html", ".po", ".txt"}
