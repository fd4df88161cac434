"""What `Translator` needs and finds: beside the model, in the datastore, tuned settings; and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq.models.transformer import TransformerModel

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.preprocessing import (
    PREPROCESSING,
    PREPROCESSING_FILE,
    Preprocessing,
    read_preprocessing,
    remember,
    remembered,
)
from fairseq_ccpr.datastore.tuned import TUNED
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.storage.files import write_checked_json
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call, hypotheses, run, texts
from tests.small_models import World, build


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
    alone = {"max_len_b": 25, "device": "cpu", **languages}
    beside = texts(Translator(model, **alone), sentences[:3])
    assert beside == texts(Translator(world.model, data=world.data_bin, **alone), sentences[:3])
    shutil.copy(world.data_bin / "dict.de.txt", tmp_path / "spm.model")
    with pytest.raises(
        ConfigurationError, match=r"two subword models that differ, .*spm.model and .*bpe.model"
    ):
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
        Translator(
            shutil.copy(ROOT / "datastores/demo/model.pt", tmp_path), data=world.data_bin, device="cpu"
        )
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
        *(
            (
                {"datastore": None, "path": "MODEL", "data": "DATA", name: value},
                f"--{name.replace('_', '-')} has no effect",
            )
            for name, value in (
                ("tokens_k", 3),
                ("phrases_k", 1),
                ("text_alpha", 0.2),
                ("text_beta", 1),
                ("store_timeout", 3),
                ("retrieval_lambda_max", 0.5),
                ("tokens_guard", True),
            )
        ),
        ({"bpe": "sentencepiece", "sentencepiece_model": "DAMAGED"}, "subwords cannot be loaded"),
        ({"datastore": None, "path": "DAMAGED"}, "is truncated"),
        ({"datastore": None, "path": "DIVERGED", "data": "DATA"}, "hold NaN or infinity"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(
    world: World, tmp_path: Path, named: dict, sentence: str
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(world.model.read_bytes()[:1000])
    diverged = tmp_path / "diverged.pt"
    state = torch.load(world.model, map_location="cpu")
    state["model"]["decoder.layers.0.fc1.bias"][0] = torch.nan
    torch.save(state, diverged)
    paths = {"MODEL": world.model, "DAMAGED": damaged, "DATA": world.data_bin, "DIVERGED": diverged}
    given = {"datastore": world.datastore, "device": "cpu", **{n: paths.get(v, v) for n, v in named.items()}}
    with pytest.raises((ConfigurationError, CheckpointError), match=sentence):
        Translator(**given)


def test_what_is_remembered_is_what_was_given(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert names == {"dict.de.txt", "dict.en.txt", "spm.model", PREPROCESSING_FILE}
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


def test_tuned_settings_stay_with_the_datastore(world: World, sentences: list[str], tmp_path: Path) -> None:
    store = tmp_path / "store"
    build(world, store, "--subset", "valid", "test")
    common = ["--datastore", store, "--cpu", "--no-progress-bar", "--max-len-b", 25]
    before = texts(Translator(datastore=store, max_len_b=25, device="cpu"), sentences)
    shown = call("tune", world.data_bin, *common, "--subset", "test", "--decode", 2).stdout
    assert str(store / TUNED) in shown
    found = Translator(datastore=store, max_len_b=25, device="cpu")
    options = dict(pair.split(":") for pair in found.signature.split("|") if pair.count(":") == 1)
    assert "trust:learned-" in found.signature and texts(found, sentences) != before
    inspected = call("inspect", store).stdout
    assert (
        f"translates     de to en, by {world.model}" in inspected
        and "subwords       sentencepiece" in inspected
    )
    assert "tuned, token   retriever:TokenRetriever|" in inspected
    # fairseq-generate takes them as well, unless told otherwise
    words = [*world.options("--datastore", store, "--batch-size", 1), *call_bpe(world)]
    del words[words.index("--tokens-temperature") : words.index("--tokens-temperature") + 2]
    found.cfg.dataset.batch_size = 1
    assert hypotheses(call("fairseq-generate", *words).stdout) == texts(found, sentences)
    told = Translator(datastore=store, tokens_lambda=0.3, device="cpu").signature
    assert "|lambda:0.3|" in told and f"|k:{options['k']}|" in told
    assert "|k:8|lambda:0.5|T:10.0|" in Translator(datastore=store, untuned=True, device="cpu").signature
    # and they are not those of another datastore
    (store / TUNED).write_text((store / TUNED).read_text().replace('"k": ', '"k": 1'))
    with pytest.raises(DatastoreError, match=r"tuned\.json is damaged"):
        Translator(datastore=store, device="cpu")


def call_bpe(world: World) -> list[object]:
    return ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]


@pytest.mark.full
def test_settings_of_other_keys_are_not_taken(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    build(world, store, "--subset", "valid")
    build(world, other, "--subset", "test")
    call(
        "tune",
        world.data_bin,
        "--datastore",
        store,
        "--cpu",
        "--no-progress-bar",
        "--decode",
        1,
        "--max-len-b",
        20,
    )
    shutil.copy(store / TUNED, other / TUNED)
    with caplog.at_level("WARNING"):
        signature = Translator(datastore=other, device="cpu").signature
    assert "|k:8|lambda:0.5|T:10.0|" in signature and "tune again" in caplog.text
    tuned = json.loads((store / TUNED).read_text())["tuned"]
    tuned["token"]["settings"]["tokens"]["of_old"] = 0.3
    write_checked_json(store / TUNED, {"format_version": 1, "tuned": tuned})
    with caplog.at_level("WARNING"):
        signature = Translator(datastore=store, device="cpu").signature
    assert (
        "|k:8|lambda:0.5|T:10.0|" in signature
        and "unknown to this one (of_old): the tuned settings are not used; tune again" in caplog.text
    )
    tuned["token"]["settings"] = {"knn": {"k": 3}}  # as the options were called before
    write_checked_json(store / TUNED, {"format_version": 1, "tuned": tuned})
    with caplog.at_level("WARNING"):
        assert "|k:8|lambda:0.5|" in Translator(datastore=store, device="cpu").signature
    assert "unknown to this one (k): the tuned settings are not used; tune again" in caplog.text


@pytest.mark.full
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
        "tune", world.data_bin, "--datastore", foreign, "--cpu", "--no-progress-bar", "--decode", 2, "--tokens-k", 4
    ).stdout  # fmt: skip
    _, shown_of_all = shown.split("\nall of ")
    rows = [line for line in shown_of_all.splitlines() if re.match(r" +\d+\.\d\d +\d+\.\d\d ", line)]
    scores = {row.rsplit("  ", 1)[1]: sum(map(float, row.split()[:2])) for row in rows}
    silenced = scores.pop("base") >= max(scores.values())
    assert silenced == ("better than the model alone" in shown)
    assert silenced == ("|lambda:0.0|" in Translator(datastore=foreign, device="cpu").signature)


def test_prepared_data_remembers_its_subwords(world: World) -> None:
    remembered = read_preprocessing(world.data_bin)
    assert remembered is not None and (world.data_bin / PREPROCESSING_FILE).is_file()
    assert remembered.options["bpe"] == "sentencepiece" and (
        remembered.source_lang,
        remembered.target_lang,
    ) == ("de", "en")
    shown = run(
        "fairseq-ccpr", "compare", world.data_bin, "--path", world.model, "--cpu", "--max-len-b", 20
    ).stdout
    assert "| base |" in shown  # subwords and languages are known
