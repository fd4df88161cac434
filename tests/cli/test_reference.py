"""What is generated from parsers, dataclasses and docstrings is kept up to date, or made with the site."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fairseq_ccpr
from fairseq_ccpr.cli import COMMANDS, declared, load, print_help
from scripts import reference
from tests.helpers import ROOT


def test_the_options_that_are_kept_are_up_to_date() -> None:
    kept = reference.OPTIONS.read_text(encoding="utf-8")
    assert reference.options() == kept, (
        f"{reference.OPTIONS.name} is out of date: run python scripts/reference.py"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_command_and_is_what_its_parser_says(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_help(name)
    assert capsys.readouterr().out == load(name).parser().format_help()


def test_help_shows_what_a_command_reads() -> None:
    shown = {
        name: {option for _, options, *_ in said["own"] for option in options}
        for name, said in declared().items()
    }
    decoding = {
        "--beam",
        "--lenpen",
        "--tokens-k",
        "--trust",
        "--glossary",
        "--phrases-lambda",
        "--text-alpha",
        "--nbest",
    }
    for name in ("build text", "build monolingual", "build memory", "learn"):
        assert (
            shown[name] & (decoding | {"--untuned", "--replace-unk"}) == set() and "--bpe" in shown[name]
        ), name
    assert shown["build memory"] & {"--datastore"} == set() and "--datastore" in shown["learn"]
    assert shown["tune"] & {"--trust", "--glossary", "--nbest"} == set() and "--tokens-k" in shown["tune"]
    assert shown["translate"] >= decoding | {"--replace-unk"}


@pytest.mark.parametrize(
    ("words", "loads"), [("translate --help", False), ("--help", False), ("completion bash", None)]
)
def test_a_reader_that_leaves_ends_a_command_silently(words: str, loads: bool | None) -> None:
    """And help is there before torch is imported."""
    code = f"import sys; sys.argv[1:] = {words.split()}; from fairseq_ccpr.cli import main\n"
    code += f"try: main()\nfinally: assert {loads} is None or ('torch' in sys.modules) == {loads}"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as left:
        done = subprocess.run([sys.executable, "-c", code], stdout=left, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_site_has_the_reference_and_the_files_of_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from scripts import docs

    docs.gather(tmp_path / "pages")
    assert (tmp_path / "pages/benchmarks/judged.tsv").is_file()
    commands, python = (
        (tmp_path / f"pages/docs/reference/{name}.md").read_text(encoding="utf-8")
        for name in ("commands", "python")
    )
    assert [name for name in COMMANDS if f"\n### {name}\n" not in commands] == []
    assert [name for name in reference.CLASSES if f"\n## {name}\n" not in python] == []
    assert set(reference.CLASSES) <= set(dir(fairseq_ccpr))
    files = [path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.json")]
    assert len(files) > 5 and all(
        json.loads((tmp_path / "pages" / path).read_text("utf-8")) for path in files
    )
    assert (tmp_path / "pages/docs/images/step.svg").is_file() and (tmp_path / "pages/README.md").is_file()
    names = ["benchmarks/a.json", "benchmarks/results/b.json", "benchmarks/judged.tsv"]
    hidden = ["benchmarks/c.tsv.xz", "benchmarks/results/office.tsv", "benchmarks/results/outputs/d.json"]
    for name in (*names, *hidden):  # of the last, texts may be others'
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text("{}", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", tmp_path / "house"], check=True)
    listed = ["git", "ls-files", "--others", "--", *docs.FILES, *docs.RESULTS]
    found = subprocess.check_output(listed, cwd=tmp_path / "house", text=True).splitlines()
    assert sorted(found) == sorted(names)
