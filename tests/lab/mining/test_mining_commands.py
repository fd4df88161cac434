"""The commands that mine and that measure mining: settings from a file, an experiment, questions, what they refuse."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.lab.experiments.config import read_config
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.mining.benchmark import evaluate_pairs
from fairseq_ccpr.lab.mining.encoded_text import RememberedVectors
from fairseq_ccpr.lab.mining.methods import Method, TunedSettings
from fairseq_ccpr.lab.mining.trial import MiningBenchmarkSettings, draw_samples
from fairseq_ccpr.lab.sentence_encoders import StoredVectors
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call, refused, write_lines
from tests.lab.mining.toy_text import ToyEncoder, random_pairs
from tests.small_models import World

pytestmark = pytest.mark.full


def vectors_folder(folder: Path, texts: Path) -> Path:
    """What a user makes with an encoder of another kind."""
    folder.mkdir()
    lines = texts.read_text(encoding="utf-8").splitlines()
    np.save(folder / "vectors.npy", 3 * ToyEncoder().encode(lines).astype(np.float64))
    (folder / "texts.txt").write_text(texts.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two texts of which half belongs together, labelled pairs, and vectors of all."""
    folder = tmp_path_factory.mktemp("mining")
    pairs = random_pairs(np.random.default_rng(2), 240)
    write_lines(folder / "gold.tsv", *(f"{source}\t{target}" for source, target in pairs[:90]))
    write_lines(folder / "de.txt", *sorted(source for source, _ in pairs[90:190]))
    write_lines(folder / "en.txt", *sorted(target for _, target in pairs[140:]))
    write_lines(folder / "pairs.tsv", *(f"{source}\t{target}" for source, target in pairs))
    words = [
        "--source",
        folder / "de.txt",
        "--target",
        folder / "en.txt",
        "--list-texts",
        folder / "texts.txt",
    ]
    shown = call("mine", *words, "--tune", folder / "gold.tsv").stdout
    assert re.search(r"texts.txt: [\d,]+ texts", shown)
    vectors_folder(folder / "vectors", folder / "texts.txt")
    return folder


def command(made: Path, tmp_path: Path, *more: object) -> list[object]:
    words: list[object] = ["mine", "--source", made / "de.txt", "--target", made / "en.txt"]
    words += [
        "--encoder",
        made / "vectors",
        "--settings",
        tmp_path / "s.json",
        "--output",
        tmp_path / "mined.tsv",
    ]
    return [*words, "--quiet", *more]


def fails(message: str, *words: object) -> None:
    refused(call(*words, check=False), message)


@pytest.mark.parametrize("method", ["rfr", "margin", "logistic"])
def test_the_command_tunes_and_mines_again_from_the_file(made: Path, tmp_path: Path, method: str) -> None:
    words = command(made, tmp_path)
    shown = call(*words, "--tune", made / "gold.tsv", "--method", method).stdout
    assert (
        f"method:{method}|" in shown
        and "90 sources, 90 of them paired, and 90 times without a partner, among 90 targets" in shown
    )
    assert re.search(
        r"100 different targets with [\d,]+ keys, in .* s .encoding \d+ s, indexing \d+ s, search \d+ s, voting \d+ s.,",
        shown,
    )
    first = (tmp_path / "mined.tsv").read_bytes()
    again = call(*words).stdout
    assert (tmp_path / "mined.tsv").read_bytes() == first and again.splitlines()[-1] == shown.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mined.tsv", "s.json"]
    known = set(read_pairs(made / "pairs.tsv"))
    found = list(read_pairs(tmp_path / "mined.tsv"))
    assert len(found) > 25 and len(known & set(found)) > 0.7 * len(found)
    tuned = TunedSettings.read(tmp_path / "s.json")
    assert tuned.method.name == method and tuned.tuned["paired"] == tuned.tuned["negatives"] == 90
    other = tmp_path / "other.json"
    TunedSettings(tuned.method.having(threshold=9.0 if method == "margin" else 0.999), tuned.encoder).write(
        other
    )
    call(*words, "--settings", other)
    assert len((tmp_path / "mined.tsv").read_bytes()) < len(first)


def test_without_labels(made: Path, tmp_path: Path) -> None:
    words: list[object] = ["mine", "--source", made / "de.txt", "--target", made / "en.txt", "--quiet"]
    words += ["--encoder", made / "vectors", "--output", tmp_path / "mined.tsv"]
    known = set(read_pairs(made / "pairs.tsv"))
    for method in ("max", "margin", "two-way", "rfr"):
        shown = call(*words, "--method", method).stdout
        share = re.search(r"without labels: (\d+)% of the sources seem to have a partner", shown)
        assert share and abs(int(share[1]) - 50) < 25 and f"method:{method}|" in shown
        found = list(read_pairs(tmp_path / "mined.tsv"))
        assert len(found) > 25 and len(known & set(found)) > 0.6 * len(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mined.tsv"]
    fails("--method logistic learns from labelled pairs: give --tune", *words, "--method", "logistic")
    fails("--tune chooses settings: give --settings", *words, "--tune", made / "gold.tsv")
    fails("there are no settings at .*no.json", *words, "--settings", tmp_path / "no.json")


def test_a_warning_where_hardly_anything_pairs(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = set((made / "en.txt").read_text(encoding="utf-8").splitlines())
    alone = [
        source for source, target in list(read_pairs(made / "pairs.tsv"))[90:190] if target not in targets
    ]
    others = write_lines(tmp_path / "others.txt", *alone)
    words = ["--encoder", made / "vectors", "--output", tmp_path / "mined.tsv", "--quiet", "--method", "max"]
    call("mine", "--source", made / "de.txt", "--target", made / "en.txt", *words)
    assert "estimated poorly" not in caplog.text
    call("mine", "--source", others, "--target", made / "en.txt", *words)
    assert "estimated poorly where so few sources have a partner" in caplog.text


def test_a_warning_where_nothing_can_be_rejected(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = next(iter(read_pairs(made / "pairs.tsv")))
    one = write_lines(tmp_path / "one.txt", target)
    gold = write_lines(tmp_path / "gold.tsv", f"{source}\t{target}")
    call(*command(made, tmp_path, "--target", one, "--tune", gold))
    assert (
        "gold.tsv gives 0 sources that can be answered wrongly, and a threshold takes 20 at least"
        in caplog.text
    )
    pairs = list(read_pairs(made / "pairs.tsv"))
    for count, warned in ((12, True), (30, False)):
        caplog.clear()
        write_lines(gold, *map("\t".join, pairs[:count]), f"{pairs[100][0]}\t")
        call(*command(made, tmp_path, "--tune", gold))
        assert (f"gold.tsv gives {count + 1} sources" in caplog.text) == warned


def test_mined_pairs_become_a_data_bin(made: Path, tmp_path: Path, world: World) -> None:
    plain = [
        "mine",
        "--source",
        made / "de.txt",
        "--target",
        made / "en.txt",
        "--encoder",
        made / "vectors",
        "--quiet",
    ]
    assert "method:two-way|" in call(*plain, "--output", tmp_path / "mined.tsv").stdout  # unless told
    shown = call(*command(made, tmp_path, "--tune", made / "gold.tsv")).stdout
    assert "method:logistic|" in shown
    words = ["--train", tmp_path / "mined.tsv", "-s", "de", "-t", "en", "--sentencepiece-model", world.spm]
    call("prepare", *words, "--dict", world.data_bin / "dict.en.txt", "--output", tmp_path / "bin")
    assert (tmp_path / "bin" / "train.de-en.en.bin").stat().st_size > 0
    write_lines(tmp_path / "three.tsv", "a\tb\tc")
    words = ["--train", tmp_path / "three.tsv", *words[2:], "--dict", world.data_bin / "dict.en.txt"]
    fails("has no pair .1: a line has 3 columns", "prepare", *words, "--output", tmp_path / "no")


def test_an_experiment_mines(tmp_path: Path) -> None:
    path = ROOT / "scripts" / "experiments" / "mined.yaml"
    plan = Plan(read_config(path), path.parent, tmp_path)
    data = plan.data("logistic").needs[0]
    mining = data.needs[0]
    assert mining.words[0] == "mine" and {"--tune", "--encoder"} <= set(mining.words)
    assert str(mining.outputs[0]) in data.words and "--train" in data.words
    assert {key for key, _ in mining.inputs} == {
        f"domains.logistic.text.mine.{name}" for name in ("source", "target", "tune")
    }
    unlabelled = plan.data("two-way").needs[0].needs[0]
    assert not {"--tune", "--settings"} & {*unlabelled.words} and len(unlabelled.outputs) == 1
    text = path.read_text(encoding="utf-8")
    both = tmp_path / "both.yaml"
    both.write_text(text.replace("      mine: {", "      train: a.tsv\n      mine: {"), encoding="utf-8")
    fails("domains.two-way.text needs train or mine, and not both", "experiment run", both, "--dry-run")
    both.write_text(text.replace("--method max", "--settings a.json"), encoding="utf-8")
    fails("mine.options has --settings", "experiment run", both, "--dry-run")


def evaluation(made: Path, *more: object) -> list[object]:
    words = ["evaluate mining", "--pairs", f"toy={made / 'pairs.tsv'}", "--encoder", f"mine={made / 'all'}"]
    return [*words, "--size", 60, "--tuning-size", 30, "--quiet", *more]


@pytest.fixture(scope="module")
def all_vectors(made: Path) -> Path:
    for number, side in enumerate(("s.txt", "t.txt")):
        write_lines(made / side, *(row[number] for row in read_pairs(made / "pairs.tsv")))
    words = ["--source", made / "s.txt", "--target", made / "t.txt", "--list-texts", made / "every.txt"]
    call("mine", *words)
    return vectors_folder(made / "all", made / "every.txt")


def test_the_evaluation(made: Path, all_vectors: Path, tmp_path: Path) -> None:
    words = evaluation(made, "--ablations", "--tuning-sets", 2, "--curve", 0, 0.5, 0.9)
    shown = call(*words, "--plot", tmp_path / "c.png", "--json", tmp_path / "r.json").stdout
    assert call(*words).stdout == shown
    assert "| set | encoder | system | F1 | precision | recall | p | F1 without labels |" in shown
    assert "| 0% | 50% | 90% |" in shown and " ± " in shown
    assert "RFR, fragment alone" in shown and "RFR, no entropy filter" in shown
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    done = json.loads((tmp_path / "r.json").read_text())
    assert done["signature"] in shown
    rows = {(r["system"], r["non_pairing"], r["tuning_set"]): r for r in done["results"]}
    assert len(rows) == len(done["results"]) == 8 * 4
    assert (
        rows["RFR", 0.0, 0]["f1"] > 0.6 and rows["RFR", 0.5, 0]["p"] <= 1 and rows["max", 0.5, 0]["p"] is None
    )
    assert rows["two-way", 0.5, 0]["unlabelled_f1"] > 0.6 < rows["logistic", 0.5, 1]["f1"]
    assert rows["RFR, no entropy filter", 0.5, 0]["settings"]["keep"] == 1
    assert not rows["RFR, fragment alone", 0.5, 0]["settings"]["sentence_half"]
    untuned = rows["at-1.0", 0.5, 0]
    assert untuned["settings"]["threshold"] == 1 and untuned["f1"] == untuned["unlabelled_f1"]
    assert untuned["f1"] == rows["at-1.0", 0.5, 1]["f1"]
    few = evaluation(made, "--systems", "two-way", "--draws", 2)
    shown = call(*few, "--json", tmp_path / "r.json").stdout
    assert "over 2 tests and 1 tuning sets" in shown and "RFR" not in shown and "margin" not in shown
    done = json.loads((tmp_path / "r.json").read_text())
    assert [(r["system"], r["draw"]) for r in done["results"]] == [
        (s, n) for n in (0, 1) for s in ("max", "two-way")
    ]
    one = call(*evaluation(made, "--systems", "two-way")).stdout
    assert "| toy | mine | two-way |" in shown and "p, Holm" in shown
    first = [f"{100 * r['f1']:.1f}" for r in done["results"] if r["draw"] == 0]
    assert all(f"| {value} |" in one for value in first)


def test_draws_out_of_a_pool_encode_each_text_once(made: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    class Counting(ToyEncoder):
        def encode(self, texts: list[str]) -> np.ndarray:
            seen.extend(texts)
            return super().encode(texts)

    settings = MiningBenchmarkSettings(size=60, tuning_size=20, pool=130, draws=3, systems=["two-way"])
    samples = draw_samples(made / "pairs.tsv", settings)
    numbers = [set(sample.numbers.tolist()) for sample in samples]
    assert len(set().union(*numbers)) == 130 and numbers[0] != numbers[1]
    encoder = RememberedVectors(Counting())
    results = [
        result
        for draw, sample in enumerate(samples)
        for result in evaluate_pairs("toy", sample, draw, "", encoder, True)
    ]
    assert len(results) == 6 and len(seen) == len(set(seen))
    plain = [*evaluate_pairs("toy", samples[1], 1, "", ToyEncoder(), True)]
    assert [one.record() for one in results[2:4]] == [one.record() for one in plain]
    with pytest.raises(ConfigurationError, match="--pool is 100, and each test needs 120 pairs"):
        draw_samples(made / "pairs.tsv", replace(settings, pool=100))


def test_questions_and_paragraphs(made: Path, all_vectors: Path, tmp_path: Path) -> None:
    pairs = list(read_pairs(made / "pairs.tsv"))[:20]
    write_lines(tmp_path / "p.tsv", *(f"p{n}\t{target}" for n, (_, target) in enumerate(pairs)))
    write_lines(tmp_path / "q.tsv", *(f"p{n}\t{source}" for n, (source, _) in enumerate(pairs)))
    words = evaluation(made, "--questions", tmp_path / "q.tsv", "--paragraphs", tmp_path / "p.tsv")
    shown = call(*words).stdout
    assert "paragraphs that answer questions" in shown and "| questions | mine | RFR |" in shown
    for path, line, message in (
        ("q.tsv", "p99\tbao", "has a question on 'p99', and .*p.tsv has no such paragraph"),
        ("p.tsv", "p0\tbao", "has two paragraphs 'p0'"), ("p.tsv", "x\t...", "line 21: there is no word in '...'"),
    ):  # fmt: skip
        before = (tmp_path / path).read_text(encoding="utf-8")
        (tmp_path / path).write_text(before + line + "\n", encoding="utf-8")
        fails(message, *words)
        (tmp_path / path).write_text(before, encoding="utf-8")
    fails("--questions and --paragraphs belong together", *words[:-2])


def test_bad_input(made: Path, tmp_path: Path) -> None:
    words = command(made, tmp_path)
    fails("no settings at .*s.json: make them with --tune", *words)
    (tmp_path / "s.json").write_text('{"method": "rfr", "keep": 2}')
    fails("s.json holds no settings of fairseq-ccpr mine .KeyError: 'encoder'.: make new ones", *words)
    TunedSettings(Method.named("rfr", keep=2.0), "x").write(tmp_path / "s.json")
    fails("keep is 2.0, and must be above 0 and at most 1", *words)
    for beta in ("75", math.nan):
        TunedSettings(Method.named("rfr", beta=beta), "x").write(tmp_path / "s.json")
        fails("beta is ('75'|nan), and must be a float", *words)
    fails("--method margin is for --tune", *words, "--method", "margin")
    fails("--output .* is a folder: give a file", *words, "--output", tmp_path)
    fails("m.tsv.gz: give a file for plain text", *words, "--output", tmp_path / "m.tsv.gz")
    TunedSettings(Method.named("rfr"), "elsewhere").write(tmp_path / "s.json")
    fails("was tuned with the encoder elsewhere, and --encoder .*vectors is", *words)
    (tmp_path / "s.json").unlink()
    words += ["--tune", made / "gold.tsv"]
    empty = write_lines(tmp_path / "empty.txt")
    fails("empty.txt has no sentence with a word in it", *words, "--source", empty)
    fails("signs.txt has no sentence", *words, "--target", write_lines(tmp_path / "signs.txt", "...", ""))
    fails("there is no file .*no.txt", *words, "--source", tmp_path / "no.txt")
    (tmp_path / "bytes.txt").write_bytes(b"good\n\xff\xfe\n")
    fails("bytes.txt, line 2: the bytes are not UTF-8", *words, "--source", tmp_path / "bytes.txt")
    fails("empty.txt has no pair", *words, "--tune", empty)
    fails("no encoder 'none': give muse, e5, the folder", *words, "--encoder", "none")
    fails("--output .*x.tsv: there is no folder", *words, "--output", tmp_path / "no" / "x.tsv")
    other = write_lines(tmp_path / "other.txt", "a text without a vector")
    fails("has no vector for 'a text without a vector': .*--list-texts", *words, "--source", other)
    assert not list(tmp_path.glob("mined*"))
    fails("give --encoder and --output, or --list-texts", "mine", *words[1:5])
    many = evaluation(made, "--size", 900)
    fails(r"pairs.tsv has \d+ pairs of different words, and the test needs 1,395: give more", *many)
    fails("--curve has 1.0: a fraction of sentences", *evaluation(made, "--curve", 1))
    fails("--plot draws the fractions of --curve", *evaluation(made, "--plot", tmp_path / "x.png"))


def test_vectors_that_do_not_fit(made: Path, tmp_path: Path) -> None:
    folder = vectors_folder(tmp_path / "v", write_lines(tmp_path / "t.txt", "a", "b"))
    assert StoredVectors(folder).encode(["b", "a"]).shape == (2, 24)
    for wrong in (np.zeros((3, 4)), np.zeros(2), np.zeros((2, 4), np.int64)):
        np.save(folder / "vectors.npy", wrong)
        fails("texts.txt has 2 lines: give a row of", *command(made, tmp_path, "--encoder", folder))
    (folder / "vectors.npy").write_bytes(b"no array")
    fails("vectors.npy is no .npy file of numbers", *command(made, tmp_path, "--encoder", folder))
    vectors = np.ones((2, 4), np.float32)
    vectors[1, 2] = np.nan
    np.save(folder / "vectors.npy", vectors)
    assert StoredVectors(folder).encode(["a"]).shape == (1, 4)
    with pytest.raises(DatastoreError, match="row 1, has NaN or an infinity in the vector of 'b'"):
        StoredVectors(folder).encode(["a", "b"])
