"""Sentence pairs read from files."""

from __future__ import annotations

import csv
import lzma
from collections import Counter
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import SAMPLED_ROWS, TextPairs, read_pairs, read_standard_input, read_together


def test_pairs_are_read_from_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("ä\tb\nc\td\n", encoding="utf-8")
    with lzma.open(tmp_path / "a.tsv.xz", "wt", encoding="utf-8") as stream:
        stream.write("ä\tb\nc\td\n")
    assert (
        list(read_pairs(tmp_path / "a.tsv"))
        == list(read_pairs(tmp_path / "a.tsv.xz"))
        == [("ä", "b"), ("c", "d")]
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [(b"a\tb\tc\n", "line 2: 3 columns"), (b"alone\n", "line 2: 1 column,"), (b"\xff\ta\n", "not UTF-8")],
)
def test_bad_pairs_are_named_by_their_line(tmp_path: Path, line: bytes, sentence: str) -> None:
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n" + line)
    with pytest.raises(ConfigurationError, match=sentence):
        list(read_pairs(tmp_path / "a.tsv"))


LINE_ENDS = "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def test_what_other_readers_take_for_line_ends_is_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Der{'Hund'.join(LINE_ENDS)}bellt\tb\r\nc\td".encode()
    (tmp_path / "a.tsv").write_bytes(text)
    pairs = [(f"Der {'Hund '.join([''] * len(LINE_ENDS))}bellt", "b"), ("c", "d")]
    assert list(read_pairs(tmp_path / "a.tsv")) == pairs
    assert next(read_together(tmp_path / "a.tsv", tmp_path / "a.tsv")) == ("\t".join(pairs[0]),) * 2
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text)))
    assert list(read_standard_input()) == ["\t".join(pair) for pair in pairs]


def test_a_line_that_is_too_long_is_refused_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairseq_ccpr.text.pairs.LONGEST_LINE", 20)
    (tmp_path / "a.tsv").write_text("a\tb\n" + 50 * "x" + "\tb\n" + 17 * "c" + "\td\n", encoding="utf-8")
    with pytest.raises(
        ConfigurationError, match=r"a.tsv, line 2 is longer than 20 bytes, as no sentence is: divide it"
    ):
        list(read_pairs(tmp_path / "a.tsv"))
    skipped = Counter[str]()
    assert list(read_pairs(tmp_path / "a.tsv", skipped=skipped)) == [("a", "b"), (17 * "c", "d")]
    assert skipped == {"a line is longer than 20 bytes, as no sentence is": 1}


@pytest.mark.parametrize(
    ("text", "pairs", "left_out"),
    [
        ('"Erste Zeile\nZweite"\t"First\n\nand second"\nGut.\tGood.\n', [("Erste Zeile Zweite", "First  and second")], 0),
        ('"Er sagte ""ja""."\t"He said ""yes""."\n"Ja, ja"\tYes\n',
         [('Er sagte "ja".', 'He said "yes".'), ("Ja, ja", "Yes")], 0),
        ('"Er sagte "Halt\nund ging"\tHe said\n', [], 2),  # where marks inside were not doubled
        ('Ruf\t"He said "stop\nand left"\n', [], 2),
        ('"Er sagte ""ja""."\tx\n"offen\tx\n' + '"a"\t"b"\n' * 9, [('Er sagte "ja".', "x"), *[("a", "b")] * 9], 1),
        ('"Halt," rief er.\t"Stop," he cried.\n"Halt!"\t"Stop!"\n',
         [('"Halt," rief er.', '"Stop," he cried.'), ('"Halt!"', '"Stop!"')], 0),
        ('"Ich gehe.\t"I go.\nUnd komme."\tAnd come.\n', [('"Ich gehe.', '"I go.'), ('Und komme."', "And come.")], 0),
        ('Er sagte:\t"I go.\n\n\nEr ging.\tHe went."\n', [("Er sagte:", '"I go.'), ("Er ging.", 'He went."')], 2),
        ('5" Rohr\t5" pipe\n"\t""\n', [('5" Rohr', '5" pipe'), ('"', '""')], 0),
        ('"Er kam, sah."\tHe came.\n"Ja, gut."\t"Yes, good."\n',  # as Excel saves text
         [("Er kam, sah.", "He came."), ("Ja, gut.", "Yes, good.")], 0),
        ('"Ja, gut."\t"Yes, good."\n"Ja, ja."\t"Yes."\n', [('"Ja, gut."', '"Yes, good."'), ('"Ja, ja."', '"Yes."')], 0),
        ('"Ja, gut."\t"Yes, good."\n"Ja, ja."\tYes, yes.\n', [('"Ja, gut."', '"Yes, good."'), ('"Ja, ja."', "Yes, yes.")], 0),
        ('a, b\t"c, d"\n' * SAMPLED_ROWS + '"Er\nkam"\t"He came"\n"""a"" b"\t"c"\n"a"\tb\n',
         [("a, b", '"c, d"'), ("Er kam", "He came"), ('"a" b', "c"), ('"a"', "b")], 0),
    ],
)  # fmt: skip
def test_quoted_cells_are_read_and_marks_of_prose_are_kept(
    tmp_path: Path, text: str, pairs: list[tuple[str, str]], left_out: int
) -> None:
    (tmp_path / "a.tsv").write_text(text + "Gut.\tGood.\n", encoding="utf-8", newline="\n")
    skipped = Counter[str]()
    assert list(dict.fromkeys(read_pairs(tmp_path / "a.tsv", skipped=skipped))) == [
        *dict.fromkeys([*pairs, ("Gut.", "Good.")])
    ]
    assert skipped.total() == left_out


CELLS = st.text(
    st.sampled_from('a "\n.,b\t') | st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]),
    min_size=1,
    max_size=8,
)


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6), every=st.booleans())
def test_what_a_spreadsheet_saves_is_read_as_it_was_or_left_out(
    tmp_path: Path, rows: list[tuple[str, str]], every: bool
) -> None:
    """Python's writer of tables is the oracle, with all cells in quotes or those that need it; tabs are no text of a cell."""
    rows = [(one.replace("\t", "") + "x", two.replace("\t", "") + "x") for one, two in rows]
    rows.append(('der "Halt"\nrief', "x"))
    with (tmp_path / "a.tsv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(
            file, "excel-tab", lineterminator="\n", quoting=csv.QUOTE_ALL if every else csv.QUOTE_MINIMAL
        ).writerows(rows)
    read = list(read_pairs(tmp_path / "a.tsv", skipped=Counter()))
    assert read == [
        tuple(cell.replace("\n", " ").replace("\ufeff", "").replace("\x85", " ") for cell in row)
        for row in rows
    ]


def test_what_is_no_pair_is_counted_but_never_where_lines_belong_together(tmp_path: Path) -> None:
    for name, content in (
        ("a", b"a\n\xff\nc\n"),
        ("b", b"1\n2\n\n"),
        ("c.tsv", b"a\tb\n\nc\td\te\n"),
        ("al", b"0-0\n\n\n"),
    ):
        (tmp_path / name).write_bytes(content)
    a, b, table, alignments = (tmp_path / name for name in ("a", "b", "c.tsv", "al"))
    skipped = Counter[str]()
    assert list(read_together(a, b, skipped)) == [("a", "1"), ("c", "")] and skipped == {
        "a line is not UTF-8": 1
    }
    assert list(TextPairs(pairs=table).read(skipped)) == [("a", "b", None), ("", "", None)]
    assert skipped["a line has 3 columns, and a pair has 2"] == 1
    for text, sentence in (
        (TextPairs(a, b, None, alignments), "a, line 2: the bytes"),
        (TextPairs(None, None, table, alignments), "line 3: 3 columns"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            list(text.read(skipped))
    (tmp_path / "a").write_bytes(b"\xff\n")
    with pytest.raises(ConfigurationError, match=r"a has 1 lines and .*b has 3"):
        list(read_together(a, b, skipped))
