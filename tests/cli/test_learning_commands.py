"""`fairseq-ccpr build memory`, `learn`, `memory` and `forget`: from nothing to a memory, and back."""

from __future__ import annotations

import gzip
import random
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import LEARNED, LearnedStore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, contents, files_up_to, refused
from tests.small_models import World, subword_options


@pytest.fixture(scope="module")
def rows(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


@pytest.fixture(scope="module")
def empty(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "empty"
    words = [
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "-s",
        "de",
        "-t",
        "en",
        *subword_options(world),
        "--cpu",
    ]
    shown = call("build memory", *words, "--output", folder).stdout
    assert "empty: nothing yet, for entries of width 32" in shown
    refused(call("build memory", *words, "--output", folder, check=False), "empty exists: give a new folder")
    return folder


@pytest.fixture
def store(empty: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(empty, tmp_path / "store"))


def test_an_empty_memory_is_healthy_and_says_nothing(
    world: World, empty: Path, rows: list[tuple[str, str]]
) -> None:
    shown = call("inspect", empty).stdout
    assert "entries        0 (keys fp16, 32 wide" in shown and "health         good" in shown
    alone = Translator(world.model, data=world.data_bin, device="cpu", max_len_b=25)
    memory = Translator(datastore=empty, device="cpu", max_len_b=25)
    sentences = [source for source, _ in rows[:5]]
    assert [one.token_scores for one in memory.translate(sentences)] == [
        one.token_scores for one in alone.translate(sentences)
    ]
    assert "|entries:0|keys:decoder_output+unit|" in str(memory.signature) and "learned" not in str(
        memory.signature
    )


def test_a_full_disk_is_told_before_anything_is_acknowledged(
    store: Path, rows: list[tuple[str, str]]
) -> None:
    (source, target), (other, translation) = rows[:2]
    words = ["--datastore", store, "--cpu"]
    with files_up_to(100):
        done = call("learn", *words, "--source", source, "--target", target, check=False)
    refused(done, r"learnt cannot be written \(.*\): nothing was changed; free some space")
    assert not LearnedStore(TokenDatastore(store)).pairs
    call("learn", *words, "--source", source, "--target", target)
    path = store / LEARNED / "0.journal"
    before = path.read_bytes()
    with files_up_to(len(before) + 300):
        done = call("learn", *words, "--source", other, "--target", translation, check=False)
    refused(done, r"0.journal cannot be written \(.*\): nothing was added to it; free some space")
    assert path.read_bytes() == before
    assert "learned 1 pair (id 2)" in call("learn", *words, "--source", other, "--target", translation).stdout


def test_a_first_pair_counts_where_it_is_near_and_nowhere_else(
    store: Path, rows: list[tuple[str, str]]
) -> None:
    translator = Translator(datastore=store, device="cpu", max_len_b=45)
    sentences = [source for source, _ in rows[:6]]
    before = [one.text for one in translator.translate(sentences)]
    translator.learn(*rows[0])
    after = [one.text for one in translator.translate(sentences)]
    assert after[0] == rows[0][1] != before[0]
    explained = translator.explain(sentences[0]).sentences[0].tokens
    assert all(token.neighbours[0].learned == 1 for token in explained)


def test_from_a_pair_and_files_and_back(store: Path, rows: list[tuple[str, str]], tmp_path: Path) -> None:
    words = ["--datastore", store, "--cpu", "--quiet"]
    source, target = rows[0]
    assert "learned 1 pair (id 1)\n" in call("learn", *words, "--source", source, "--target", target).stdout
    lines = [f"{one}\t{two}\n" for one, two in rows[:8]]
    (tmp_path / "m.tsv").write_text("".join([*lines, "Ein Satz\t \n", "Wort\t世界你好\n"]), encoding="utf-8")
    done = call("learn", *words, tmp_path / "m.tsv")
    assert "learned 7 pairs (ids 2 to 8); 1 were there already" in done.stdout
    assert (
        "left out 1: its target is empty" in done.stdout and "left out 1: half of its target" in done.stdout
    )
    assert "learned        8 pairs" in call("inspect", store).stdout

    shown = [line.split("\t") for line in call("memory", store).stdout.splitlines()]
    assert [int(line[0]) for line in shown] == list(range(8, 0, -1))
    assert shown[-1][:5] == ["1", "2", source, target, ""] and shown[-1][6:] == [""]
    learned = datetime.fromisoformat(shown[-1][5])
    assert 0 <= (datetime.now(UTC) - learned).total_seconds() < 600
    word = target.split()[0].upper()
    some = call("memory", store, word, "--most", 2).stdout.splitlines()
    assert 1 <= len(some) <= 2 and all(word.lower() in line.lower() for line in some)

    assert "8 pairs" in call("memory", store, "--export", tmp_path / "m.tmx").stdout
    signed = (tmp_path / "m.tmx").read_text(encoding="utf-8")
    theirs = re.sub('creationdate="[^"]*"', 'creationdate="20010203T040506Z" creationid="Änne"', signed)
    (tmp_path / "theirs.tmx").write_text(theirs, encoding="utf-8")
    call("learn", *words, tmp_path / "theirs.tmx")
    shown = [line.split("\t")[5:] for line in call("memory", store).stdout.splitlines()]
    assert shown == [["2001-02-03T04:05:06Z", "Änne"]] * 8
    call("memory", store, "--export", tmp_path / "m.tmx")
    assert (tmp_path / "m.tmx").read_text(encoding="utf-8") == theirs
    call("memory", store, "--export", tmp_path / "n.tmx", "-s", "deu_Latn", "-t", "zho_Hant")
    assert 'srclang="de"' in (text := (tmp_path / "n.tmx").read_text()) and 'xml:lang="zh-Hant"' in text
    again = Path(shutil.copytree(store, tmp_path / "again"))
    shutil.rmtree(again / LEARNED)
    assert (
        "learned 8 pairs"
        in call("learn", "--datastore", again, "--cpu", "--quiet", tmp_path / "m.tmx").stdout
    )
    of_both = [
        [(one.source, one.target) for one in LearnedStore(TokenDatastore(f)).pairs.values()]
        for f in (store, again)
    ]
    assert (
        of_both[0] == of_both[1] == [(" ".join(one.split()), " ".join(two.split())) for one, two in rows[:8]]
    )

    forgotten = call("forget", store, 3, 1)
    assert (
        forgotten.stdout.startswith(f"3\t{rows[2][0]}\t{rows[2][1]}\n1\t")
        and "forgot 2 pairs; 6 are left" in forgotten.stdout
    )
    refused(
        call("forget", store, 3, check=False),
        "there is no pair 3 among what was learned into .*: it was forgotten",
    )
    assert "forgot 6 pairs; 0 are left" in call("forget", store, "--all").stdout
    assert not call("memory", store).stdout


def test_a_correction_of_a_correction_and_a_damaged_journal(store: Path, rows: list[tuple[str, str]]) -> None:
    words, (source, target) = ["--datastore", store, "--cpu", "--quiet"], rows[0]
    call("learn", *words, "--source", source, "--target", target)
    again = call("learn", *words, "--source", source, "--target", rows[1][1])
    assert again.stdout == "learned 1 pair (id 2); 1 replaced an earlier translation of its source\n"
    call("learn", *words, "--source", *rows[2][:1], "--target", rows[2][1])
    shown = call("memory", store).stdout.splitlines()
    assert [line.split("\t")[:5] for line in shown[1:]] == [
        ["2", "1", source, rows[1][1], ""], ["1", "1", source, target, "replaced by 2"]
    ]  # fmt: skip
    assert "2 pairs" in call("memory", store, "--export", store / "m.tmx").stdout
    assert "learned        2 pairs, in addition to them; 1 replaced by them" in call("inspect", store).stdout
    forgotten = call("forget", store, 2).stdout.splitlines()
    assert forgotten[1:] == [f"1 counts again\t{source}\t{target}", "forgot 1 pair; 2 are left"]

    assert "0.journal is whole: 2 pairs" in call("memory", store, "--repair").stdout
    path = store / LEARNED / "0.journal"
    damaged = path.read_bytes().replace(rows[2][1].encode(), rows[2][1].swapcase().encode())
    path.write_bytes(damaged)
    assert call("memory", store, check=False).returncode == 1
    repaired = call("memory", store, "--repair").stdout
    assert "0.journal: 1 record is missing" in repaired
    assert repaired.endswith(f"saved 1 pair; the damaged bytes are in {path}.damaged-1\n")
    assert call("memory", store).stdout.split("\t")[:5] == ["1", "1", source, target, ""]


def test_bad_lines_are_left_out_and_a_damaged_file_says_what_was_learned(
    store: Path, rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = ["--datastore", store, "--cpu", "--quiet"]
    lines = [f"{one}\t{two}\n".encode() for one, two in rows[:3]]
    (tmp_path / "m.tsv").write_bytes(lines[0] + b"a\tb\tc\n" + lines[1] + b"W\xf6rter\twords\n" + lines[2])
    done = call("learn", *words, tmp_path / "m.tsv")
    assert done.stdout.splitlines() == [
        "learned 3 pairs (ids 1 to 3)",
        "left out 1: a line is not UTF-8",
        "left out 1: a line has 3 columns, and a pair has 2",
    ]
    packed = gzip.compress(b"".join(lines) + bytes(random.randrange(97, 123) for _ in range(9000)))
    (tmp_path / "cut.tsv.gz").write_bytes(packed[:-2000])
    cut = call("learn", *words, tmp_path / "m.tsv", tmp_path / "cut.tsv.gz", check=False)
    refused(cut, "cut.tsv.gz is damaged")
    assert cut.stdout.startswith("learned 0 pairs; 3 were there already, and are counted\n")


def test_what_cannot_work_is_refused(world: World, store: Path, tmp_path: Path) -> None:
    words = ["--datastore", store, "--cpu", "--quiet"]
    refused(
        call("learn", *words, check=False), "there is nothing to learn: give files, or --source and --target"
    )
    refused(call("learn", *words, "--source", "eins", check=False), "--source and --target go together")
    refused(call("learn", *words, tmp_path / "none.tmx", check=False), "there is no file .*none.tmx")
    refused(call("learn", "--path", world.model, "--data", world.data_bin, *subword_options(world), "--cpu",
                 "--source", "eins", "--target", "one", check=False), "learning needs a token datastore")  # fmt: skip
    refused(call("forget", store, check=False), "say what to forget: give ids, or --all")
    nothing = call("learn", *words, "--source", "eins", "--target", " ", check=False)
    assert nothing.returncode == 1 and "learned 0 pairs\nleft out 1: its target is empty" in nothing.stdout
    pair = f"{world.model}:{world.other_model}"
    several = [
        "--path",
        pair,
        "--data",
        world.data_bin,
        *subword_options(world),
        "--output",
        tmp_path / "two",
    ]
    refused(
        call("build memory", *several, "--cpu", check=False),
        "an ensemble of 2 models, and a datastore belongs to one",
    )


def test_damage_is_told_by_inspect_and_memory(store: Path, rows: list[tuple[str, str]]) -> None:
    words = ["--datastore", store, "--cpu", "--quiet"]
    for source, target in rows[:2]:
        call("learn", *words, "--source", source, "--target", target)
    path = store / LEARNED / "0.journal"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(rows[1][0].encode()) + 5])
    before = contents(store)
    shown = call("inspect", store, check=False)
    assert shown.returncode == 1 and re.search(
        r"damaged        .*0.journal: 1 record is missing, [\d,]+ bytes are damaged", shown.stdout
    )
    listed = call("memory", store, check=False)
    assert listed.returncode == 1 and len(listed.stdout.splitlines()) == 1
    assert contents(store) == before
