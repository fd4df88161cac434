"""A converted Marian model in use, from training data to corrections."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.preprocessing import remembered
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO, call, output_of, write_lines
from tests.marian_models import TAGS, TINY, transformers, write_marian
from tests.small_models import random_encoders


def test_retrieval_translates_better_than_the_converted_model_alone(trained: Path) -> None:
    rows = [row for row in read_pairs(DEMO / "bible.test.tsv.xz") if len(row[1]) < 80][:30]
    base = Translator(trained / "model/model.pt", device="cpu", beam=2, max_len_b=40)
    retrieval = Translator(datastore=trained / "datastore", device="cpu", beam=2, max_len_b=40, knn_lambda=0.8)
    scores = [
        sacrebleu.corpus_chrf([one.text for one in system.translate(s for s, _ in rows)], [[t for _, t in rows]]).score
        for system in (base, retrieval)
    ]
    assert scores[1] > scores[0] + 5, scores


def test_text_is_split_and_joined_as_by_transformers(trained: Path) -> None:
    """Each side by its own SentencePiece model, in DATA_BIN, in translation, and in fairseq-interactive."""
    tokenizer = transformers().MarianTokenizer.from_pretrained(trained / "marian")
    rows = list(read_pairs(trained / "train.tsv"))[:50]
    pieces = [
        [tokenizer.convert_ids_to_tokens(ids)[:-1] for ids in encoded["input_ids"]]
        for encoded in (tokenizer([s for s, _ in rows]), tokenizer(text_target=[t for _, t in rows]))
    ]
    for language, wanted in zip(("de", "en"), pieces):
        lines = (trained / f"data-bin/text/train.{language}").read_text(encoding="utf-8").splitlines()
        known = set(json.loads((trained / "marian/vocab.json").read_text(encoding="utf-8")))
        found = [[piece if piece in known else "<unk>" for piece in line.split()] for line in lines[: len(rows)]]
        assert found == wanted
    ours = Translator(trained / "model/model.pt", device="cpu", beam=1, max_len_b=20)
    written = [one.text for one in ours.translate(s for s, _ in rows[:8])]
    words = [
        trained / "model",
        "--user-dir",
        "fairseq_ccpr",
        "--path",
        trained / "model/model.pt",
        "-s",
        "de",
        "-t",
        "en",
    ]
    words += ["--bpe", "sentencepiece", "--sentencepiece-model", trained / "model/source.spm", "--beam", 1, "--cpu"]
    source = write_lines(trained / "some.de", *(s for s, _ in rows[:8]))
    typed = output_of(call("fairseq-interactive", *words, "--max-len-b", 20, "--input", source), "D")
    assert [typed[number].split("\t", 1)[1] for number in range(8)] == written


def test_datastore_remembers_both_subword_models(trained: Path) -> None:
    kept = remembered(trained / "datastore")
    assert kept is not None and kept.options["bpe"] == "sentencepiece_pair"
    for name, file in (("sentencepiece_model", "source.spm"), ("sentencepiece_target_model", "target.spm")):
        assert Path(kept.options[name]).read_bytes() == (trained / "marian" / file).read_bytes()


def test_phrases_are_split_by_the_target_language(trained: Path, tmp_path: Path) -> None:
    """Retrieved text becomes the decoder's own pieces, and source text is read back without its pieces."""
    text = write_lines(tmp_path / "text", *(target for _, target in list(read_pairs(trained / "train.tsv"))[:40]))
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
        trained / "model/model.pt", datastore=tmp_path / "phrases", device="cpu", max_len_b=20, phrase_min_similarity=0
    )
    assert system.ensemble is not None and system.ensemble.phrases is not None
    subwords = system.ensemble.phrases.candidates.subwords
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
def test_what_is_learnt_is_what_a_build_has(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> None:
    """Sentences of the datastore, learnt again: the same values, and the same keys but for the company in their batch."""
    folder = request.getfixturevalue(name)
    store = Path(shutil.copytree(folder / "datastore", tmp_path / "store"))
    translator, datastore = Translator(datastore=store, device="cpu"), TokenDatastore(store)
    rows = list(read_pairs(folder / "train.tsv"))[:8]
    numbers = translator.learn_all(rows)
    assert translator.ensemble is not None and translator.ensemble.tokens is not None
    learnt = translator.ensemble.tokens.learnt
    assert learnt is not None
    for sentence, number in enumerate(numbers):
        assert isinstance(number, int)
        values, keys = learnt.store.entries[number]
        own = datastore.provenance[:, 0] == sentence
        assert values.tolist() == datastore.values[own].tolist() and len(values) > 3
        np.testing.assert_allclose(keys, datastore.keys[own], rtol=1e-2, atol=1e-2)
