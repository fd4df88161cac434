"""Sentence pairs read from files."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from fairseq_ccpr.building.preparation import read_pairs
from fairseq_ccpr.errors import ConfigurationError


def test_pairs_are_read_from_plain_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("ä\tb\nc\td\n", encoding="utf-8")
    with lzma.open(tmp_path / "a.tsv.xz", "wt", encoding="utf-8") as stream:
        stream.write("ä\tb\nc\td\n")
    assert list(read_pairs(tmp_path / "a.tsv")) == list(read_pairs(tmp_path / "a.tsv.xz")) == [("ä", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [(b"a\tb\tc\n", "line 2: 3 columns"), (b"alone\n", "line 2: 1 column,"), (b"\xff\ta\n", "not UTF-8")],
)
def test_bad_pairs_are_named_by_their_line(tmp_path: Path, line: bytes, sentence: str) -> None:
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n" + line)
    with pytest.raises(ConfigurationError, match=sentence):
        list(read_pairs(tmp_path / "a.tsv"))
