"""Phrase pairs: text, alignments and stores that are refused."""

from __future__ import annotations

import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from tests.helpers import call, edit_manifest
from tests.phrases.small_language import extract, refused


def test_bad_text_is_refused(text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(text, bad)
    output = tmp_path / "phrases"
    (bad / "text.en").write_text("one\ntwo\n")
    refused(extract(bad, output, check=False), r"text\.de has 400 lines and .*text\.en has 2")
    (bad / "text.en").write_bytes(b"\xff\xfe\n" + b"\n" * 399)
    refused(extract(bad, output, check=False), r"text\.en is UTF-16: convert it with iconv")
    (bad / "text.en").write_bytes(b"\xff\n" + b"\n" * 399)
    refused(
        extract(bad, output, check=False), "no sentence pair for 'train'.*1 a line is not UTF-8, 399 empty"
    )
    (bad / "text.en").write_text("\n" * 400)
    refused(extract(bad, output, check=False), "no sentence pair for 'train'.*400 empty")
    refused(extract(text, output, "--valid", 400, check=False), "no sentence pair for 'train'.*held out: 400")
    refused(
        extract(text, output, "--max-edge-share", 1e-9, check=False),
        "no phrase pair is left in 'train': .*--max-edge-share 1e-09",
    )
    refused(extract(text, output, "--max-edge-share", 0, check=False), "--max-edge-share is 0.0")
    refused(extract(text, output, "--max-phrase-words", 0, check=False), "--max-phrase-words is 0")
    refused(extract(text, output, "--max-words", 201, check=False), "up to 200 words")
    refused(extract(text, output, "--valid", 0, check=False), "--valid is 0")
    refused(extract(text, output, "--pairs", text / "text.tsv", check=False), "or as --pairs")
    refused(extract(text, text, check=False), "exists: give a new folder")
    refused(extract(tmp_path, output, check=False), r"there is no file .*text\.de")
    words = ["--source", bad, "--target", text / "text.en", "--output", output]
    refused(call("extract", *words, check=False), "bad is no regular file: .* not pipes")
    (bad / "text.tsv").write_text("\ttwo\nthree\n")
    (bad / "links").write_text("\n0-0\n")
    words = ["--pairs", bad / "text.tsv", "--output", output, "--quiet"]
    refused(
        call("extract", *words, "--alignments", bad / "links", check=False), r"text\.tsv, line 2: 1 column,"
    )
    refused(
        call("extract", *words, check=False),
        r"skipped: 1 a line has 1 columns, and a pair has 2, 1 empty|1 empty, 1 a line",
    )
    (bad / "text.tsv.xz").write_bytes(lzma.compress(b"ein\tone\n")[:-9])
    refused(
        call("extract", "--pairs", bad / "text.tsv.xz", "--output", output, "--quiet", check=False),
        r"text\.tsv\.xz is damaged",
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_bad_alignments_are_refused(text: Path, tmp_path: Path) -> None:
    output, links = tmp_path / "phrases", tmp_path / "links"

    def with_links(content: str, *extra: object) -> subprocess.CompletedProcess[str]:
        links.write_text(content)
        return extract(text, output, "--alignments", links, *extra, check=False)

    refused(
        with_links("0-0\n" * 399 + "0-6\n"),
        r"links, line 400: the link 0-6 points beyond .* 6 source and 6 target",
    )
    refused(with_links("0-0\n0:1\n" + "0-0\n" * 398), "links, line 2: '0:1' is no link")
    refused(with_links("0-0\n" * 3), r"links has fewer lines than .*text\.de")
    refused(with_links("0-0\n" * 401), r"text\.de has fewer lines than .*links")
    refused(with_links("0-0\n" * 400, "--valid-pairs", text / "text.tsv"), "leave out --valid-pairs")


def test_store_refuses_what_is_not_whole(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "phrases"
    extract(text, output)
    train = output / "train"
    whole = (train / "manifest.json").read_bytes()

    def opening_fails(pattern: str, **changes: object) -> None:
        (train / "manifest.json").write_bytes(whole)
        edit_manifest(train, **changes)
        with pytest.raises(DatastoreError, match=pattern):
            PhrasePairs(train)

    opening_fails("format version 9.*upgrade", format_version=9)
    for version in (0, -1, "2", 1.5, None):
        opening_fails(
            f"damaged .it has format version {version!r}, and the first is 1", format_version=version
        )
    opening_fails("holds no phrase pairs", kind="else")
    opening_fails("names other files", files={})
    opening_fails("manifest says int32", size=1)
    (train / "manifest.json").write_text("[]")
    with pytest.raises(DatastoreError, match=r"manifest\.json is damaged"):
        PhrasePairs(train)
    (train / "manifest.json").write_bytes(whole)
    content = (train / "pairs.npy").read_bytes()
    (train / "pairs.npy").write_bytes(content[:-1] + b"x")
    with pytest.raises(DatastoreError, match=r"is damaged \(pairs\.npy: the bytes have changed"):
        PhrasePairs(train).check()
    (train / "pairs.npy").write_bytes(content[:-4])
    with pytest.raises(DatastoreError, match=r"pairs\.npy is damaged: .* bytes found"):
        PhrasePairs(train)
    with pytest.raises(DatastoreError, match="such as train"):
        PhrasePairs(output)
    with pytest.raises(DatastoreError, match="no phrase pairs at"):
        PhrasePairs(tmp_path / "nowhere")
    output.rename(tmp_path / "phrases.partial")
    with pytest.raises(DatastoreError, match="unfinished"):
        PhrasePairs(output)
