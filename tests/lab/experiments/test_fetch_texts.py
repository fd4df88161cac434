"""Fetching texts: Debian packages made here, of a few pages and verses, become sentence pairs in three parts."""

from __future__ import annotations

import doctest
import hashlib
import io
import lzma
import tarfile
from pathlib import Path

import pytest

from scripts.recipes import fetch_texts
from tests.helpers import ROOT, run

pytestmark = pytest.mark.full

HELP = "./usr/share/libreoffice/help"
TEX = "./usr/share/texlive/texmf-dist/tex"
PAGE = """<html><head><title>{0}</title></head><body><h1 id="hd_1">{0}</h1>
<p id="par_1" class="paragraph">{1}<br>&amp; <span class="menuitem">{2}</span>.</p>
<ul><li id="li_1">{3}<p id="par_2">{4}</p></li></ul><p>no id</p><p id="par_3"></p><p id="par_4">ID_{5}</p>
<script>var p = "<p id='par_9'>no text</p>";</script></body></html>"""


def deb(path: Path, files: dict[str, str]) -> None:
    """Write a Debian package: an ar archive whose members begin at even places."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(b"!<arch>\n")
        for name, body in (
            ("debian-binary", b"2.0\n"),
            ("control.tar.xz", b"odd"),
            ("data.tar.xz", lzma.compress(content.getvalue())),
        ):
            stream.write(
                f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(body):<10}`\n".encode()
                + body
                + b"\n" * (len(body) % 2)
            )


def fetch(name: str, output: Path) -> dict[str, list[tuple[str, ...]]]:
    """Run the recipe; returns the pairs of each part."""
    done = run(ROOT / "scripts/recipes/fetch_texts.py", name, output)
    assert (
        done.stdout.count(": figures will differ, because a package in") == 4
    )  # these texts are not the known ones
    lines = {
        part: (output / f"{name}.{part}.tsv").read_text(encoding="utf-8").splitlines()
        for part in ("train", "valid", "test")
    }
    return {part: [tuple(line.split("\t")) for line in some] for part, some in lines.items()}


def help_package(output: Path, language: str, pages: dict[str, str]) -> None:
    name, version, _ = fetch_texts.OFFICE[language]
    files = {f"{HELP}/{language}/{page}": text for page, text in pages.items()}
    deb(output / "packages" / f"{name}_{version.replace(':', '%3a')}_all.deb", files)


def test_elements_are_those_with_an_id_each_with_its_own_text() -> None:
    texts = fetch_texts.elements(PAGE.format("Druck", "Eins", "Datei", "außen", "innen", 7))
    assert texts == {
        "hd_1": "Druck",
        "par_1": "Eins & Datei.",
        "li_1": "außen",
        "par_2": "innen",
        "par_4": "ID_7",
    }
    assert fetch_texts.elements('<p id="a">one<p id="b">two</p></p><p id="a">again</p>') == {
        "b": "two",
        "a": "one",
    }
    assert fetch_texts.elements('<td id="a">open<p id="b">inner</td>') == {"b": "inner", "a": "open"}


@pytest.mark.parametrize("name, language", [("office", "de"), ("office-fr", "fr")])
def test_office_is_joined_by_page_and_id(name: str, language: str, tmp_path: Path) -> None:
    source = {
        "text/a.html": PAGE.format(
            "Druckvorschau", "Öffnet sie. Schließt sie.", "Datei", "Nur hier", "Klicken Sie!", 1
        ),
        "text/b.html": PAGE.format(
            "Druckvorschau", "Noch etwas", "Datei", "LibreOffice", "Ein Satz. Zwei.", 2
        ),
        "noscript.html": PAGE.format("a", "b", "c", "d", "e", 3),
    }
    english = {
        "text/a.html": PAGE.format("Print Preview", "Opens it. Closes it.", "File", "", "Click!", 1),
        "text/b.html": PAGE.format(
            "Print Preview", "Something else", "File", "LibreOffice", "One sentence; two.", 2
        ),
        "noscript.html": PAGE.format("f", "g", "h", "i", "j", 3),
    }
    help_package(tmp_path, language, source)
    help_package(tmp_path, "en-US", english)
    parts = fetch(name, tmp_path)
    english_lines = (tmp_path / f"{name}.mono.en").read_text(encoding="utf-8").splitlines()
    assert english_lines == list(dict.fromkeys(target for _, target in parts["train"]))
    found = {pair for pairs in parts.values() for pair in pairs}
    assert found == {
        ("Druckvorschau", "Print Preview"),
        ("Öffnet sie.", "Opens it."),
        ("Schließt sie.", "Closes it."),
        ("& Datei.", "& File."),
        ("Noch etwas & Datei.", "Something else & File."),
        ("Klicken Sie!", "Click!"),
        ("Ein Satz. Zwei.", "One sentence; two."),
    }  # neither what one language lacks nor what is the same in both


def test_a_file_with_another_checksum_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {line.split()[1]: line.split()[0] for line in fetch_texts.CHECKSUMS.read_text().splitlines()}
    endings = ("test.tsv", "valid.tsv", "train.tsv", "mono.en")
    assert known.keys() == {f"{name}.{ending}" for name in fetch_texts.SIZES for ending in endings}
    path, sums = tmp_path / "office.mono.en", tmp_path / "texts.sha256"
    path.write_text("Print Preview\n", encoding="utf-8")
    monkeypatch.setattr(fetch_texts, "CHECKSUMS", sums)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text(f"{digest}  office.mono.en\n", encoding="utf-8")
    assert fetch_texts.compared(path) == "as texts.sha256 has it"
    sums.write_text(f"{known[path.name]}  office.mono.en\n", encoding="utf-8")
    told = fetch_texts.compared(path)
    assert f"checksum {digest} where texts.sha256 has {known[path.name]}: figures will differ" in told


def test_the_examples_are_true() -> None:
    done = doctest.testmod(fetch_texts)
    assert done.failed == 0 and done.attempted >= 4


def verse_file(texts: list[str]) -> str:
    numerals = ["i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x"]
    lines = [
        rf"\qt@newcmd\qurantrans@xx@{numerals[i]}{{{text}\qt@no{{({i + 1})}}}}%"
        for i, text in enumerate(texts)
    ]
    return "%% a comment\n" + "\n".join(lines) + "\n"


def test_koran1_is_joined_by_verse_and_parted_by_verse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]
    german = {
        who: verse_file([rf"\basmalahde ``{who} {word}''" for word in words])
        for who in ("de", "deii", "deiii", "deiv")
    }
    arabic = {
        f"{TEX}/latex/quran/qurantext-{who}.translation.def": text
        for who, text in {
            "de": german["de"],
            "en": verse_file([f"verse {n}" for n in range(10)]),
            "fr": "x",
        }.items()
    }
    others = {
        f"{TEX}/xelatex/quran-de/qurantext-{who}.translation.def": german[who]
        for who in ("deii", "deiii", "deiv")
    }
    for (name, version, _), files in ((fetch_texts.KORAN, arabic), (fetch_texts.KORAN_GERMAN, others)):
        deb(tmp_path / "packages" / f"{name}_{version}_all.deb", files)
    monkeypatch.setitem(fetch_texts.SIZES, "koran1", {"test": 3, "valid": 2})
    train, held_out = fetch_texts.koran(tmp_path / "packages")
    parts = fetch_texts.split(train, held_out, fetch_texts.SIZES["koran1"])
    assert {part: len(pairs) for part, pairs in parts.items()} == {"test": 3, "valid": 2, "train": 20}
    assert parts == fetch_texts.split(train, held_out, fetch_texts.SIZES["koran1"])  # the same each time
    assert all(source.startswith('"deii ') for part in ("test", "valid") for source, _ in parts[part])
    assert {source.split()[0].strip('"') for source, _ in parts["train"]} == set(german)
    numbers = {part: {int(target.split()[1]) for _, target in pairs} for part, pairs in parts.items()}
    assert set.union(*numbers.values()) == set(range(10)) and sum(map(len, numbers.values())) == 10
    assert all(
        source.split()[1].strip('"') == words[int(target.split()[1])]
        for pairs in parts.values()
        for source, target in pairs
    )


def test_no_side_of_a_held_out_pair_is_in_training() -> None:
    pairs = {str(n): (f"Satz {n}", f"Sentence {n}") for n in range(30)}
    pairs |= {f"again {n}": (f"SATZ {n}!", f"other {n}") for n in range(30)}
    parts = fetch_texts.split(
        {place: [pair] for place, pair in pairs.items()}, pairs, {"test": 10, "valid": 10}
    )
    held = {
        fetch_texts.folded(pair[side])
        for part in ("test", "valid")
        for pair in parts[part]
        for side in (0, 1)
    }
    assert not any(fetch_texts.folded(text) in held for pair in parts["train"] for text in pair)
    both = {fetch_texts.folded(pair[0]) for pair in parts["test"]} & {
        fetch_texts.folded(pair[0]) for pair in parts["valid"]
    }
    assert not both and 20 < len(parts["train"]) < 40


def test_what_is_no_package_is_told(tmp_path: Path) -> None:
    name, version, _ = fetch_texts.OFFICE["de"]
    path = tmp_path / "packages" / f"{name}_{version.replace(':', '%3a')}_all.deb"
    path.parent.mkdir()
    path.write_text("<html>not found</html>")
    done = run(ROOT / "scripts/recipes/fetch_texts.py", "office", tmp_path, check=False)
    assert done.returncode and f"{path} is no Debian package: delete it" in done.stderr
    path.unlink()
    done = run(ROOT / "scripts/recipes/fetch_texts.py", "office", tmp_path, check=False, PATH="/nowhere")
    assert done.returncode and f"put the package, of Debian 12, there as {path}" in done.stderr
