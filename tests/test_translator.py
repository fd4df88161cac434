"""`Translator` and `fairseq-ccpr translate`: text to translation, by what the datastore remembers."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerModel

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.preprocessing import (
    FILE,
    PREPROCESSING,
    Preprocessing,
    read_preprocessing,
    remember,
    remembered,
)
from fairseq_ccpr.datastore.tuned import TUNED
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.storage.files import write_checked_json
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import PROGRAM, ROOT, call, own_bytes, refused, run
from tests.small_models import World, build

SHORT = {"max_len_b": 45, "device": "cpu", "knn_temperature": 5}


@pytest.fixture(scope="module")
def sentences(world: World) -> list[str]:
    return [source for source, _ in read_pairs(world.folder / "test.tsv")]


@pytest.fixture(scope="module")
def translator(world: World) -> Translator:
    return Translator(datastore=world.datastore, **SHORT)  # the datastore remembers all else


def texts(translator: Translator, sentences: Any) -> list[str]:
    return [one.text for one in translator.translate(sentences)]


def hypotheses(printed: str) -> list[str]:
    """What fairseq-generate printed, in the order of the test set."""
    rows = [line.split("\t") for line in printed.splitlines() if line.startswith("D-")]
    return [row[2] for row in sorted(rows, key=lambda row: int(row[0][2:]))]


def test_translations_are_those_of_fairseq_generate(world: World, translator: Translator, sentences: list[str]) -> None:
    words = [*world.options("--batch-size", 1), "--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    translator.cfg.dataset.batch_size = 1
    try:
        assert texts(translator, sentences) == hypotheses(call("fairseq-generate", *words).stdout)
    finally:
        translator.cfg.dataset.batch_size = None
    assert all(
        one.score < 0 and len(one.token_scores) == len(one.tokens) + 1 for one in translator.translate(sentences)
    )


def test_without_a_datastore_the_model_translates_alone(
    world: World, translator: Translator, sentences: list[str], decode: Callable
) -> None:
    alone = Translator(world.model, data=world.data_bin, **{k: v for k, v in SHORT.items() if k != "knn_temperature"})
    assert alone.signature is None and texts(alone, sentences) != texts(translator, sentences)
    silent = Translator(world.model, datastore=world.datastore, knn_lambda=0, **SHORT)
    assert texts(silent, sentences) == texts(alone, sentences)


def test_order_empty_and_long_sentences(translator: Translator, sentences: list[str]) -> None:
    long = "Wort " * 10_000
    given = [sentences[0], "", long, " \t ", sentences[1]]
    made = list(translator.translate(iter(given)))
    assert [one.source for one in made] == given
    assert [one.text for one in made[1:4]] == ["", "", ""]
    assert [bool(one.fault) for one in made] == [False, False, True, False, False]
    assert "tokens, and the model takes" in made[2].fault
    assert [made[0].text, made[4].text] == texts(translator, sentences[:2])
    assert list(translator.translate([])) == [] and texts(translator, ["", " "]) == ["", ""]
    with pytest.raises(ConfigurationError, match="a list of sentences, not one string"):
        next(iter(translator.translate("Guten Morgen.")))


def test_sentences_are_read_a_window_at_a_time(translator: Translator, sentences: list[str]) -> None:
    read = []

    def stream() -> Iterator[str]:
        for sentence in sentences:
            read.append(sentence)
            yield sentence

    first = next(iter(translator.translate(stream(), window=4)))
    assert first.source == sentences[0] and len(read) == 4


def test_threads_and_translators_do_not_mix_their_queries(
    world: World, translator: Translator, sentences: list[str]
) -> None:
    other = Translator(datastore=world.datastore, knn_lambda=0.9, beam=2, **SHORT)
    wanted = [texts(translator, sentences), texts(other, sentences)]
    assert wanted[0] != wanted[1]
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        found[number] = texts((translator, other)[number % 2], sentences)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == wanted * 2


def test_alternatives_and_other_options_of_fairseq(world: World, sentences: list[str]) -> None:
    several = Translator(datastore=world.datastore, nbest=3, beam=4, lenpen=0.6, **SHORT)
    (made,) = several.translate(sentences[:1])
    scores = [made.score, *(one.score for one in made.alternatives)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    for named, sentence in (
        ({"baem": 5}, "no option --baem; did you mean --beam"),
        ({"knn_kk": 5}, "no option --knn-kk; did you mean --knn-k"),
        ({"knn_k": 0}, "--knn-k is 0"),
        ({"baem": None}, "no option baem; did you mean beam"),
        ({"knn_confidence": True}, "--knn-confidence needs keys of length 1"),
        ({"beam": "wide"}, "beam.*wide"),
        ({"beam": 0}, "--beam is 0: at least 1 is needed"),
        ({"score_reference": True}, "--score-reference is for fairseq-generate alone"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            Translator(datastore=world.datastore, **named)
    with pytest.raises(ConfigurationError, match="precision is int8: choose one of fp32"):
        Translator(datastore=world.datastore, precision="int8")


def test_bf16_is_the_same_model(world: World, translator: Translator, sentences: list[str]) -> None:
    half = Translator(datastore=world.datastore, precision="bf16", **SHORT)
    assert next(half.models[0].parameters()).dtype == torch.bfloat16
    assert half.signature == translator.signature
    alike = [
        a.token_scores[0] - b.token_scores[0]
        for a, b in zip(half.translate(sentences), translator.translate(sentences))
    ]
    assert sum(map(abs, alike)) / len(alike) < 0.2


def test_explanation_of_a_sentence(translator: Translator, sentences: list[str], tmp_path: Path) -> None:
    explanation = translator.explain(sentences[:2], neighbours=4)
    assert [one.source for one in explanation.sentences] == sentences[:2]
    assert [one.translation for one in explanation.sentences] == texts(translator, sentences[:2])
    assert all(token.neighbours for one in explanation.sentences for token in one.tokens)
    explanation.save(tmp_path / "page.html")
    assert sentences[0] in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(translator.explain(sentences[0]).sentences) == 1
    with pytest.raises(ConfigurationError, match="all are empty"):
        translator.explain([" "])


# ---- what is found and what is missing


def test_resources_are_found_beside_the_model(world: World, sentences: list[str], tmp_path: Path) -> None:
    model = Path(shutil.copy(world.model, tmp_path / "model.pt"))
    with pytest.raises(
        ConfigurationError, match=r"model\.pt does not say which languages it translates: give -s and -t"
    ):
        Translator(model)
    languages = {"source_lang": "de", "target_lang": "en"}
    with pytest.raises(ConfigurationError, match=r"no dict\.de\.txt and dict\.en\.txt next to .*model\.pt"):
        Translator(model, **languages)
    for name in ("dict.de.txt", "dict.en.txt"):
        shutil.copy(world.data_bin / name, tmp_path)
    with pytest.raises(ConfigurationError, match=r"is in subwords .*--bpe sentencepiece"):
        Translator(model, **languages)
    joins_alone = Translator(model, **languages, post_process="sentencepiece", device="cpu")
    with pytest.raises(ConfigurationError, match=r"is in subwords .*--bpe sentencepiece"):
        texts(joins_alone, ["Guten Morgen."])
    shutil.copy(world.spm, tmp_path / "sentencepiece.bpe.model")
    alone = {"max_len_b": 45, "device": "cpu", **languages}
    beside = texts(Translator(model, **alone), sentences[:3])
    assert beside == texts(Translator(world.model, data=world.data_bin, **alone), sentences[:3])
    shutil.copy(world.data_bin / "dict.de.txt", tmp_path / "spm.model")
    with pytest.raises(ConfigurationError, match=r"two subword models that differ, .*spm.model and .*bpe.model"):
        Translator(model, **languages)


def test_a_subword_model_that_differs_from_the_remembered_one_is_refused(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copy(world.model, tmp_path / "model.pt"))
    other = tmp_path / "spm.model"
    shutil.copy(ROOT / "datastores/demo/spm.model", other)
    with pytest.raises(ConfigurationError, match="two subword models that differ"):
        Translator(model, datastore=world.datastore)
    wrong = Translator(model, datastore=world.datastore, sentencepiece_model=other, device="cpu", max_len_b=5)
    with caplog.at_level("WARNING"):
        texts(wrong, ["Es werde Licht, und es ward Licht."] * 2)
    assert caplog.text.count("are not in the source dictionary") == 1
    demo = {"path": ROOT / "datastores/demo/model.pt", "data": ROOT / "datastores/demo", "device": "cpu"}
    with pytest.raises(ConfigurationError, match="of the model's dictionary is in the SentencePiece model"):
        Translator(**demo, sentencepiece_model=world.spm)
    assert Translator(model, datastore=world.datastore, sentencepiece_model=world.spm, device="cpu")


def test_other_models_and_languages_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="built with another model"):
        Translator(world.other_model, datastore=world.datastore, device="cpu")
    with pytest.raises(ConfigurationError, match=r"is for de to en, and not for en to de: leave out -s"):
        Translator(world.model, datastore=world.datastore, source_lang="en", target_lang="de")
    with pytest.raises(ConfigurationError, match=r"there is no checkpoint .*none.pt"):
        Translator(tmp_path / "none.pt", datastore=world.datastore)
    with pytest.raises(DatastoreError, match=r"there is no datastore at .*nowhere: no such directory"):
        Translator(datastore=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="or the model's checkpoint with --path"):
        Translator(data=world.data_bin)
    with pytest.raises(CheckpointError, match="no fairseq model for these dictionaries"):
        Translator(shutil.copy(ROOT / "datastores/demo/model.pt", tmp_path), data=world.data_bin, device="cpu")
    moved = tmp_path / "moved"
    shutil.copytree(world.datastore, moved)
    (moved / PREPROCESSING / "spm.model").write_bytes(b"damaged")
    with pytest.raises(DatastoreError, match=r"spm\.model"):
        Translator(world.model, datastore=moved)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"datastore": None, "path": "MODEL", "task": "translation"}, "--task translation does not retrieve"),
        ({"device": "gpu"}, "device gpu cannot be used"),
        ({"constraints": "ordered"}, "--constraints is for fairseq-generate alone"),
        ({"datastore": None, "path": "MODEL", "data": "DATA", "knn_k": 3}, "--knn-k has no effect without a datastore"),
        ({"bpe": "sentencepiece", "sentencepiece_model": "DAMAGED"}, "subwords cannot be loaded"),
        ({"datastore": None, "path": "DAMAGED"}, "is no checkpoint of fairseq"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(world: World, tmp_path: Path, named: dict, sentence: str) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(world.model.read_bytes()[:1000])
    paths = {"MODEL": world.model, "DAMAGED": damaged, "DATA": world.data_bin}
    given = {"datastore": world.datastore, "device": "cpu", **{n: paths.get(v, v) for n, v in named.items()}}
    with pytest.raises((ConfigurationError, CheckpointError), match=sentence):
        Translator(**given)


def test_a_tokenizer_needs_no_languages_and_a_small_batch_holds_one_sentence(
    world: World, sentences: list[str]
) -> None:
    both = Translator(datastore=world.datastore, tokenizer="moses", moses_no_escape=True, max_tokens=3, **SHORT)
    assert all(texts(both, sentences[:2])) and both.preprocessing.options["moses_no_escape"] is True


def test_what_is_remembered_is_what_was_given(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sentencepiece").write_text("no subword model")  # of the name of an option's value
    pair = f"{world.model}:{world.other_model}"
    options = {"bpe": "sentencepiece", "sentencepiece_model": str(world.spm), "moses_no_escape": True}
    store = tmp_path / "store"
    shutil.copytree(world.datastore, store)
    remember(Preprocessing(world.data_bin, "de", "en", options, pair), store)
    found = remembered(store)
    assert found is not None and found.model == pair and found.options["moses_no_escape"] is True
    names = {path.name for path in (store / PREPROCESSING).iterdir()}
    assert names == {"dict.de.txt", "dict.en.txt", "spm.model", FILE}
    del options["moses_no_escape"]
    remember(Preprocessing(world.data_bin, "de", "en", options, pair), store)
    assert len(Translator(datastore=store, device="cpu").models) == 2


def test_fairseqs_hub_refuses_to_translate_without_the_datastore(world: World) -> None:
    folder, data = str(world.model.parent), str(world.data_bin)
    for named in ({"task": "translation_retrieval"}, {"datastore": str(world.datastore)}):
        with pytest.raises(
            ConfigurationError, match=r"from_pretrained does not retrieve: use fairseq_ccpr\.Translator"
        ):
            TransformerModel.from_pretrained(folder, world.model.name, data_name_or_path=data, **named)
    assert TransformerModel.from_pretrained(folder, world.model.name, data_name_or_path=data) is not None


# ---- tuning


def test_tuned_settings_stay_with_the_datastore(world: World, sentences: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    build(world, store, "--subset", "valid", "test")
    common = ["--datastore", store, "--cpu", "--no-progress-bar", "--max-len-b", 45]
    before = texts(Translator(datastore=store, max_len_b=45, device="cpu"), sentences)
    shown = call("tune", world.data_bin, *common, "--subset", "test", "--decode", 2).stdout
    assert str(store / TUNED) in shown and (store / "tuned.png").stat().st_size > 1000
    found = Translator(datastore=store, max_len_b=45, device="cpu")
    options = dict(pair.split(":") for pair in found.signature.split("|") if pair.count(":") == 1)
    assert "trust:learned-" in found.signature and texts(found, sentences) != before
    inspected = call("inspect", store).stdout
    assert f"translates     de to en, by {world.model}" in inspected and "subwords       sentencepiece" in inspected
    assert "tuned, token   retriever:TokenRetriever|" in inspected
    # fairseq-generate takes them as well, unless told otherwise
    words = [*world.options("--datastore", store, "--batch-size", 1), *call_bpe(world)]
    del words[words.index("--knn-temperature") : words.index("--knn-temperature") + 2]
    found.cfg.dataset.batch_size = 1
    assert hypotheses(call("fairseq-generate", *words).stdout) == texts(found, sentences)
    told = Translator(datastore=store, knn_lambda=0.3, device="cpu").signature
    assert "|lambda:0.3|" in told and f"|k:{options['k']}|" in told
    assert "|k:8|lambda:0.5|T:10.0|" in Translator(datastore=store, untuned=True, device="cpu").signature
    # and they are not those of another datastore
    (store / TUNED).write_text((store / TUNED).read_text().replace('"k": ', '"k": 1'))
    with pytest.raises(DatastoreError, match=r"tuned\.json is damaged"):
        Translator(datastore=store, device="cpu")


def call_bpe(world: World) -> list[object]:
    return ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]


def test_settings_of_other_keys_are_not_taken(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    build(world, store, "--subset", "valid")
    build(world, other, "--subset", "test")
    call("tune", world.data_bin, "--datastore", store, "--cpu", "--no-progress-bar", "--decode", 1, "--max-len-b", 20)
    shutil.copy(store / TUNED, other / TUNED)
    with caplog.at_level("WARNING"):
        signature = Translator(datastore=other, device="cpu").signature
    assert "|k:8|lambda:0.5|T:10.0|" in signature and "tune again" in caplog.text
    tuned = json.loads((store / TUNED).read_text())["tuned"]
    tuned["token"]["settings"]["knn"]["of_old"] = 0.3
    write_checked_json(store / TUNED, {"format_version": 1, "tuned": tuned})
    with caplog.at_level("WARNING"):
        signature = Translator(datastore=store, device="cpu").signature
    assert (
        "|k:8|lambda:0.5|T:10.0|" in signature
        and "unknown to this one (of_old): the tuned settings are not used; tune again" in caplog.text
    )


def test_where_retrieval_does_not_help_tuning_silences_it(world: World, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    pairs = [f"{source}\tthe of and to in that he\n" for source, _ in read_pairs(world.folder / "valid.tsv")]
    (tmp_path / "foreign.tsv").write_text("".join(pairs), encoding="utf-8")
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--dict",
        world.data_bin / "dict.en.txt",
        "--bpe",
        "sentencepiece",
        "--sentencepiece-model",
        world.spm,
    ]
    call("prepare", "--train", tmp_path / "foreign.tsv", *words, "--output", tmp_path / "data")
    call("build tokens", tmp_path / "data", "--path", world.model, "--output", foreign, "--cpu", "--quiet")
    shown = call(
        "tune", world.data_bin, "--datastore", foreign, "--cpu", "--no-progress-bar", "--decode", 2, "--knn-k", 4
    ).stdout  # fmt: skip
    scores = {name: float(bleu) for bleu, name in re.findall(r"^ *(\d+\.\d\d)  (.+)$", shown, re.MULTILINE)}
    silenced = scores.pop("base") >= max(scores.values())
    assert silenced == ("better than the model alone" in shown)
    assert silenced == ("|lambda:0.0|" in Translator(datastore=foreign, device="cpu").signature)


# ---- the command


def translate(*words: object, typed: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
    line = [*PROGRAM, "translate", *map(str, words), "--cpu", "--max-len-b", "45"]
    done = subprocess.run(line, input=typed, capture_output=True, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def test_text_goes_from_standard_input_to_standard_output(
    world: World, translator: Translator, sentences: list[str]
) -> None:
    typed = "".join(f"{sentence}\n" for sentence in [*sentences[:3], "", *sentences[3:5]]).encode()
    done = translate("--datastore", world.datastore, "--knn-temperature", 5, typed=typed)
    lines = done.stdout.decode().split("\n")
    assert lines == [*texts(translator, sentences[:3]), "", *texts(translator, sentences[3:5]), ""]
    assert b"retrieval signature: retriever:TokenRetriever|" in done.stderr


def called(monkeypatch: pytest.MonkeyPatch, typed: bytes, *words: object) -> Any:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    return call("translate", *words, "--cpu", "--max-len-b", 45, "--quiet", check=False)


def test_files_and_json(world: World, sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text(sentences[0] + "\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text(f"\n{sentences[1]}", encoding="utf-8")
    words = ["--input", tmp_path / "one.txt", tmp_path / "two.txt", "--output-format", "jsonl", "--nbest", 2]
    done = called(monkeypatch, b"", "--datastore", world.datastore, *words)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["source"] for row in rows] == [sentences[0], "", sentences[1]]
    assert rows[0]["score"] < 0 and len(rows[0]["alternatives"]) == 1 and rows[1]["tokens"] == []
    refused(called(monkeypatch, b"", "--datastore", world.datastore, "--input", "none.txt"), "no file none.txt")


def test_bad_text_is_named_by_its_line(world: World, sentences: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = sentences[0].encode()
    done = called(monkeypatch, good + b"\n\xff\xfe\n", "--datastore", world.datastore)
    refused(done, "the standard input, line 2: the bytes are not UTF-8")
    done = called(monkeypatch, b"Wort " * 10_000 + b"\n" + good, "--datastore", world.datastore)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 2 and done.stdout.splitlines()[1]
    assert "line 1 has no translation: " in done.stderr and "Traceback" not in done.stderr
    with_mark = called(monkeypatch, b"\xef\xbb\xbf" + good, "--datastore", world.datastore)
    assert with_mark.stdout == called(monkeypatch, good, "--datastore", world.datastore).stdout


def test_memory_of_a_long_run_is_flat(both: Path, sentences: list[str]) -> None:
    translator = Translator(datastore=both, **SHORT, phrase_k=3)
    held = []
    for rounds in (4, 16):
        for _ in range(rounds):
            texts(translator, sentences)
        held.append(own_bytes())
    assert held[1] - held[0] < 8 << 20


def test_a_closed_pipe_ends_it_quietly(world: World, sentences: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{sentences[0]}\n" * 300, encoding="utf-8")
    line = [*PROGRAM, "translate", "--datastore", world.datastore, "--input", tmp_path / "in.txt", "--cpu", "--quiet"]
    words = [*map(str, line), "--buffer-size", "1", "--output-format", "jsonl", "--max-len-b", "5"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait() == 141 and "Traceback" not in said and "Broken" not in said


def test_prepared_data_remembers_its_subwords(world: World) -> None:
    remembered = read_preprocessing(world.data_bin)
    assert remembered is not None and (world.data_bin / FILE).is_file()
    assert remembered.options["bpe"] == "sentencepiece" and (remembered.source_lang, remembered.target_lang) == (
        "de",
        "en",
    )
    shown = run("fairseq-ccpr", "compare", world.data_bin, "--path", world.model, "--cpu", "--max-len-b", 20).stdout
    assert "| base |" in shown  # subwords and languages are known
