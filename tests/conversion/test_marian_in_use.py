"""A converted Marian model in use, from training data to corrections."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import sacrebleu

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.preprocessing import remembered
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import PROGRAM, ROOT, USER_DIR, assert_learned_as_built, call, output_of, write_lines
from tests.marian_models import TAGS, TINY, transformers, write_marian
from tests.small_models import random_encoders

pytestmark = pytest.mark.full

SHORT: dict[str, Any] = {"device": "cpu", "beam": 2, "max_len_b": 40}
OPTIONS = ["--cpu", "--beam", 2, "--max-len-b", 40]


def test_retrieval_translates_better_than_the_converted_model_alone(trained: Path, tuned: Path) -> None:
    """With the settings that tuning left."""
    rows = list(read_pairs(trained / "test.tsv"))
    base = Translator(trained / "model/model.pt", **SHORT)
    retrieval = Translator(datastore=tuned, **SHORT)
    scores = [
        sacrebleu.corpus_chrf(
            [one.text for one in system.translate(s for s, _ in rows)], [[t for _, t in rows]]
        ).score
        for system in (base, retrieval)
    ]
    assert scores[1] > 2 * scores[0], scores


def test_text_is_split_as_by_transformers(trained: Path) -> None:
    """Each side by its own SentencePiece model."""
    tokenizer = transformers().MarianTokenizer.from_pretrained(trained / "marian")
    rows = list(read_pairs(trained / "train.tsv"))[:50]
    pieces = [
        [tokenizer.convert_ids_to_tokens(ids)[:-1] for ids in encoded["input_ids"]]
        for encoded in (tokenizer([s for s, _ in rows]), tokenizer(text_target=[t for _, t in rows]))
    ]
    known = set(json.loads((trained / "marian/vocab.json").read_text(encoding="utf-8")))
    for language, wanted in zip(("de", "en"), pieces):
        lines = (trained / f"data-bin/text/train.{language}").read_text(encoding="utf-8").splitlines()
        found = [
            [piece if piece in known else "<unk>" for piece in line.split()] for line in lines[: len(rows)]
        ]
        assert found == wanted


@pytest.mark.parametrize("bpe", ["sentencepiece", "sentencepiece_pair"])
def test_fairseqs_own_commands_translate_the_same(
    trained: Path, tuned: Path, bpe: str, tmp_path: Path
) -> None:
    """fairseq-interactive without and fairseq-generate with the datastore, both as `Translator`."""
    model, rows = trained / "model", list(read_pairs(trained / "test.tsv"))
    words = [
        "--user-dir",
        USER_DIR,
        "--path",
        model / "model.pt",
        "-s",
        "de",
        "-t",
        "en",
        "--beam",
        2,
        "--cpu",
    ]
    words += ["--max-len-b", 40, "--bpe", bpe, "--sentencepiece-model", model / "source.spm"]
    words += ["--sentencepiece-target-model", model / "target.spm"] if bpe == "sentencepiece_pair" else []
    source = write_lines(tmp_path / "some.de", *(s for s, _ in rows))
    typed = output_of(call("fairseq-interactive", model, *words, "--input", source), "D")
    generating = ["--task", "translation_retrieval", "--datastore", tuned, "--gen-subset", "test", *words]
    generated = output_of(call("fairseq-generate", trained / "data-bin", *generating), "D")
    alone, retrieving = (
        [one.text for one in system.translate(s for s, _ in rows)]
        for system in (Translator(model / "model.pt", **SHORT), Translator(datastore=tuned, **SHORT))
    )
    assert [typed[number].split("\t", 1)[1] for number in range(len(rows))] == alone
    assert [generated[number].split("\t", 1)[1] for number in range(len(rows))] == retrieving != alone


def test_datastore_remembers_both_subword_models(trained: Path) -> None:
    kept = remembered(trained / "datastore")
    assert kept is not None and kept.options["bpe"] == "sentencepiece_pair"
    for name, file in (("sentencepiece_model", "source.spm"), ("sentencepiece_target_model", "target.spm")):
        assert Path(kept.options[name]).read_bytes() == (trained / "marian" / file).read_bytes()


def test_phrases_are_split_by_the_target_language(trained: Path, tmp_path: Path) -> None:
    """Retrieved text becomes the decoder's own pieces, and source text is read back without its pieces."""
    text = write_lines(
        tmp_path / "text", *(target for _, target in list(read_pairs(trained / "train.tsv"))[:40])
    )
    words = [
        "--encoder",
        random_encoders(tmp_path)["ccpr"],
        "--segmentation",
        "all",
        "--max-words",
        2,
        "--cpu",
        "--quiet",
    ]
    call("build phrases", text, "--output", tmp_path / "phrases", *words)
    system = Translator(
        trained / "model/model.pt",
        datastore=tmp_path / "phrases",
        device="cpu",
        max_len_b=20,
        phrases_min_similarity=0,
    )
    assert system.ensemble is not None and system.ensemble.find(PhraseMemory) is not None
    subwords = system.ensemble.find(PhraseMemory).candidates.subwords
    text = "Jesus therefore said to them, and they went out."
    target = system.task.bpe.target
    known = system.task.target_dictionary.indices
    assert [system.task.target_dictionary[i] for i in subwords.split(text).ids] == [
        piece if piece in known else "<unk>" for piece in target.encode(text).split()
    ]
    assert len(list(system.translate(["Jesus sprach zu ihnen."]))) == 1


@pytest.fixture(scope="module")
def tagged(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `trained`, of random weights, and of two target languages: each source sentence begins with a tag."""
    folder = tmp_path_factory.mktemp("tagged")
    write_marian(folder / "marian", tags=TAGS, spread=1.2, **TINY)
    call("convert", folder / "marian", "--output", folder / "model", "--source-tag", TAGS[0])
    write_lines(folder / "train.tsv", *map("\t".join, list(read_pairs(trained / "train.tsv"))[:20]))
    model, languages = ["--path", folder / "model/model.pt"], ["-s", "de", "-t", "en"]
    call("prepare", "--train", folder / "train.tsv", *languages, *model, "--output", folder / "data-bin")
    call("build tokens", folder / "data-bin", *model, "--output", folder / "datastore", "--cpu", "--quiet")
    return folder


@pytest.mark.parametrize("name", ["trained", "tagged"])
def test_what_is_learned_is_what_a_build_has(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(name)
    store = Path(shutil.copytree(folder / "datastore", tmp_path / "store"))
    assert_learned_as_built(store, list(read_pairs(folder / "train.tsv"))[:8])


def test_every_daily_command_takes_it(trained: Path, tuned: Path, tmp_path: Path) -> None:
    """Once each, on the datastore that was tuned; prepare, build and tune made it."""
    store, data_bin = Path(shutil.copytree(tuned, tmp_path / "store")), trained / "data-bin"
    (source, target), (other, _), *_ = read_pairs(trained / "test.tsv")
    words = ["--datastore", store, *OPTIONS]

    def translated() -> list[str]:
        text = write_lines(tmp_path / "in.txt", source, "", other)
        return call("translate", *words, "--input", text, "--quiet").stdout.splitlines()

    before = translated()
    expected = [one.text for one in Translator(datastore=store, **SHORT).translate([source, other])]
    assert before == [expected[0], "", expected[1]]
    compared = call("compare", data_bin, *words, "--gen-subset", "test").stdout
    assert "| base" in compared and "| retrieval" in compared
    call(
        "explain",
        data_bin,
        *words,
        "--gen-subset",
        "test",
        "--sentences",
        2,
        "--output",
        tmp_path / "page.html",
    )
    assert source.split()[0] in (tmp_path / "page.html").read_text(encoding="utf-8")

    assert "learned 1 pair (id 1)" in call("learn", *words, "--source", source, "--target", target).stdout
    assert call("memory", store).stdout.split("\t")[2:4] == [source, target]
    call("learn", *words, "--source", other, "--target", "What is not wanted.")
    assert "forgot 1 pair; 1 is left" in call("forget", store, 2).stdout
    assert "1 pair moved into it" in call("compact", store).stdout and translated()[2] == before[2]
    assert "health         good" in call("inspect", store).stdout
    model = ["--path", trained / "model/model.pt", "--cpu"]
    call("build tokens", data_bin, "--subset", "valid", *model, "--output", tmp_path / "other", "--quiet")
    merged = call(
        "merge", f"one={store}", f"two={tmp_path / 'other'}", "--output", tmp_path / "both", "--quiet"
    )
    assert "two (" in merged.stdout

    assert "nothing yet" in call("build memory", *model, "--output", tmp_path / "empty").stdout
    call("learn", "--datastore", tmp_path / "empty", "--cpu", "--quiet", trained / "test.tsv")
    remembering = Translator(datastore=tmp_path / "empty", **SHORT)
    assert [one.text for one in remembering.translate([source, other])] != before[::2]


def test_it_is_served(trained: Path, tuned: Path) -> None:
    pytest.importorskip("uvicorn")
    source = next(read_pairs(trained / "test.tsv"))[0]
    command = [*PROGRAM, "serve", "--datastore", tuned, *OPTIONS, "--port", 0]
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        asked = json.dumps({"q": source, "source": "de", "target": "en"}).encode()
        request = Request(f"{url}/translate", asked, {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as answer:
            answered = json.load(answer)
        process.terminate()
    (expected,) = Translator(datastore=tuned, **SHORT).translate([source])
    assert answered["translatedText"] == expected.text and process.returncode == 0
