"""Experiments: what they find, what runs again, what is refused, their page."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from sacrebleu.metrics import BLEU, CHRF

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.lab.experiments.results import as_page, check_of_base
from fairseq_ccpr.text.words import word_spans
from tests.helpers import begin, call, refused
from tests.lab.experiments.small_experiments import (
    execute_here,
    experiment,
    results_of,
    settings_of,
    to_do,
    write_config,
)  # fmt: skip
from tests.small_models import World

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an experiment that was run."""
    config = tmp_path_factory.mktemp("experiments") / "one" / "experiment.yaml"
    write_config(config, settings_of(world, config.parent))
    with patch("fairseq_ccpr.lab.experiments.stages.execute", execute_here):
        shown = experiment(config).stdout
    assert "[1/17] " in shown and "17 stages run" in shown and "| tenth |" in shown
    return config


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed; it is as done as the first."""
    return Path(shutil.copytree(made.parent, tmp_path / "two")) / made.name


def test_experiment_finds_what_its_commands_find(world: World, made: Path, tmp_path: Path) -> None:
    results, out = results_of(made), made.parent / "out"
    verses = results["domains"]["verses"]
    assert list(verses["systems"]) == ["base", "knn-mt", "tenth", "fixed"]
    assert list(results["domains"]["few"]["systems"]) == ["base", "knn-mt"] and verses["sentences"] == 20
    knn, tenth, fixed = (verses["systems"][name] for name in ("knn-mt", "tenth", "fixed"))
    words = [*world.options("--no-progress-bar", "--beam", 2, "--max-len-b", 30), "--bpe", "sentencepiece"]
    words += ["--sentencepiece-model", world.spm, "--results-path", tmp_path]
    shown = call("compare", *words, *knn["tuned"]["options"].split()).stdout
    texts = {"base": "base.txt", "knn-mt": "retrieval.txt"}
    for name, file in texts.items():
        assert (tmp_path / file).read_bytes() == (out / "decoded" / "verses" / name / file).read_bytes()
        assert f"{verses['systems'][name]['scores']['BLEU']:.2f}" in shown
    assert knn["stores"]["tokens"]["entries"] == TokenDatastore(world.datastore).section.size
    assert knn["speed"] > 0 and "retriever:TokenRetriever" in knn["retrieval_signature"]
    assert knn["stores"] == fixed["stores"] and fixed["tuned"] is None  # the store was built once
    assert "tokens/verses/knn-mt" in fixed["stages"] and "k:2|" in fixed["retrieval_signature"]
    assert tenth["stores"]["tokens"]["share"] == 0.1 and tenth["tuned"]["on"] == "few"
    assert str(out) not in tenth["tuned"]["options"]
    trusted = "--trust" in tenth["tuned"]["options"]
    assert (
        trusted == ("trust:learned-" in tenth["retrieval_signature"])
        and "--trust" not in knn["tuned"]["options"]
    )
    assert set(tenth["against"]) == {"base", "knn-mt"} and set(knn["against"]) == {"base"}
    difference = tenth["against"]["knn-mt"]["BLEU"]["difference"]
    assert difference == pytest.approx(tenth["scores"]["BLEU"] - knn["scores"]["BLEU"], abs=0.02)
    assert all((out / stage["log"]).read_text() for stage in results["stages"].values())
    assert results["versions"]["fairseq-ccpr"] and results["config"]["title"] == "A & B"
    commits = {stage["commit"] for stage in results["stages"].values()} - {""}
    assert results["commit"] == ", ".join(sorted(commits))
    assert not list(out.rglob("*.begun")) and not list(out.rglob("*.partial"))


def test_results_have_length_what_is_copied_and_the_translations(made: Path) -> None:
    few, out = results_of(made)["domains"]["few"], made.parent / "out"
    reference = (made.parent / "test.en").read_text(encoding="utf-8").splitlines()
    with lzma.open(out / "outputs/few.tsv.xz", "rt", encoding="utf-8") as stream:
        columns = list(zip(*(line.rstrip("\n").split("\t") for line in stream)))
    assert [path.name for path in (out / "outputs").iterdir()] == [
        "few.tsv.xz"
    ]  # the other is not for publishing
    names = {"base": "base", "knn-mt": "retrieval"}
    assert [column[0] for column in columns] == ["reference", *names] and [*columns[0][1:]] == reference
    for (name, file), column in zip(names.items(), columns[1:]):
        assert "\n".join([*column[1:], ""]) == (out / f"decoded/few/{name}/{file}.txt").read_text()
        found, bleu = few["systems"][name], BLEU().corpus_score(column[1:], [reference])
        assert found["brevity"] == round(bleu.bp, 3) and found["length"] == round(
            bleu.sys_len / bleu.ref_len, 3
        )
        plus = CHRF(word_order=2).corpus_score(column[1:], [reference])
        assert found["scores"]["chrF++"] == round(plus.score, 2)
    assert few["unlike"]["text"] == "valid.en" and 0 < few["unlike"]["sentences"] <= few["sentences"]
    assert few["systems"]["knn-mt"]["unlike"]["against"]["base"]["BLEU"]["p"] <= 1
    text = (made.parent / "valid.en").read_text(encoding="utf-8").splitlines()
    assert (
        few["copied"].keys() == {"reference", *names}
        and "copied" not in results_of(made)["domains"]["verses"]
    )
    assert few["copied"]["reference"] == pytest.approx(share_in_runs(reference, text), abs=1e-4)


def test_score_files_of_before_are_read_for_what_all_of_them_have(copied: Path) -> None:
    """A system that is new has all systems scored, and comparisons of before stay done."""
    (path,) = (
        one
        for one in (copied.parent / "out").rglob("*.json")
        if "verses" in str(one) and _compares(one, "knn-mt")
    )
    table = json.loads(path.read_text(encoding="utf-8"))
    del table["signatures"]["chrF++"]
    table["rows"] = [{key: row[key] for key in row if "chrF++" not in key} for row in table["rows"]]
    path.write_text(json.dumps(table), encoding="utf-8")
    assert "0 stages run" in experiment(copied).stdout
    systems = results_of(copied)["domains"]["verses"]["systems"]
    assert all(one["scores"].keys() == {"BLEU", "chrF", "TER"} for one in systems.values())
    assert systems["tenth"]["against"]["knn-mt"].keys() == {"BLEU", "chrF", "TER"}
    few = results_of(copied)["domains"]["few"]["systems"]
    assert all("chrF++" in one["scores"] for one in few.values())


def _compares(path: Path, first: str) -> bool:
    found = json.loads(path.read_text(encoding="utf-8"))
    return isinstance(found, dict) and "signatures" in found and found["rows"][0]["system"] == first


def share_in_runs(lines: list[str], text: list[str]) -> float:
    """The share of words in runs of five that the text has."""
    sentences = [[line[a:b].lower() for a, b in word_spans(line)] for line in [*text, *lines]]
    known = {tuple(one[i : i + 5]) for one in sentences[: len(text)] for i in range(len(one) - 4)}
    places = [
        {i + k for i in range(len(one) - 4) if tuple(one[i : i + 5]) in known for k in range(5)}
        for one in sentences[len(text) :]
    ]
    return sum(map(len, places)) / sum(map(len, sentences[len(text) :]))


def test_second_run_runs_nothing(made: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns for path in (made.parent / "out").rglob("*") if path.suffix != ".json"
    }
    assert "0 stages run, 17 were done" in experiment(made).stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_what_has_changed_runs_again_with_what_depends_on_it(world: World, copied: Path) -> None:
    assert to_do(copied) == set()  # though it was moved
    settings = yaml.safe_load(copied.read_text())
    changed = {
        "systems.fixed.options": ("--tokens-k 4", {"decode/verses/fixed"}),
        "systems.tenth.tune_on": ("verses", {"tune/verses/tenth", "decode/verses/tenth"}),
        "systems.tenth.tokens.share": (
            0.2,
            {"tokens/verses/tenth", "tokens/few/tenth", "tune/few/tenth", "decode/verses/tenth"},
        ),
        "bootstrap_samples": (30, set()),
    }
    for key, (value, wanted) in changed.items():
        *parents, last = key.split(".")
        holder = settings
        for name in parents:
            holder = holder[name]
        before, holder[last] = holder[last], value
        write_config(copied, settings)
        assert {name for name in to_do(copied) if not name.startswith("score/")} == wanted, key
        holder[last] = before
    write_config(copied, settings)
    (copied.parent / "test.en").write_text((copied.parent / "test.en").read_text() + "\n", encoding="utf-8")
    assert to_do(copied, "--only", "knn-mt") == {
        "prepare/few", "tokens/few/knn-mt", "tune/few/knn-mt", "decode/few/base", "decode/few/knn-mt", "score/few",
        "score/verses",  # without tenth, which was tuned on what has changed
    }  # fmt: skip


def test_changed_option_changes_its_results_alone(copied: Path) -> None:
    settings, before = yaml.safe_load(copied.read_text()), results_of(copied)
    settings["systems"]["fixed"]["options"] = "--tokens-k 1 --tokens-lambda 0.9"
    settings["description"] = "other"
    write_config(copied, settings)
    shutil.rmtree(copied.parent / "out" / "stores" / "few")  # nothing needs it any more
    shown = experiment(copied).stdout
    assert re.findall(r"\[\d/\d\] (\S+)", shown) == ["decode/verses/fixed", "score/verses"]
    after = results_of(copied)
    assert after["description"] == "other" and after["domains"]["few"] == before["domains"]["few"]
    assert after["domains"]["verses"]["systems"]["fixed"] != before["domains"]["verses"]["systems"]["fixed"]
    assert after["domains"]["verses"]["systems"]["tenth"] == before["domains"]["verses"]["systems"]["tenth"]


@pytest.mark.processes
def test_killed_run_resumes_and_equals_an_uninterrupted_one(world: World, made: Path, tmp_path: Path) -> None:
    config = tmp_path / "killed" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    settings["systems"]["knn-mt"]["tokens"]["options"] += " --chunk-tokens 200"
    del settings["domains"]["few"], settings["systems"]["tenth"], settings["systems"]["fixed"]
    write_config(config, settings)
    words = ["fairseq-ccpr experiment run", config, "--output", config.parent / "out", "--only", "knn-mt"]
    process = begin(*words, err=tmp_path / "said")
    store = config.parent / "out" / "stores" / "verses" / "tokens.knn-mt"
    shards = store / "token.partial" / "done"
    lock = config.parent / "out" / "lock"
    while process.is_alive() and not (lock.exists() and lock.read_text()):
        time.sleep(0.001)
    locked_out = experiment(config, check=False)  # before the build begins: it might end meanwhile
    child = int(lock.read_text())
    while process.is_alive() and (not shards.exists() or len(list(shards.iterdir())) < 5):
        time.sleep(0.001)
    process.terminate()
    process.join()
    assert process.exitcode == 130 and "interrupted" in (tmp_path / "said").read_text()
    refused(locked_out, rf"another run is at work in .*out \(process {child}\)")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    done = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert len(done) >= 5 and not (store / "manifest.json").exists()
    with patch("fairseq_ccpr.lab.experiments.stages.execute", execute_here):
        experiment(config)
    stamp = json.loads((config.parent / "out" / "stamps" / "tokens.verses.knn-mt.json").read_text())
    assert stamp["resumed"]
    theirs = made.parent / "out" / "stores" / "verses" / "tokens.knn-mt"
    assert np.array_equal(TokenDatastore(store).values, TokenDatastore(theirs).values)
    found, wanted = (results_of(path)["domains"]["verses"]["systems"]["knn-mt"] for path in (config, made))
    assert found["scores"] == wanted["scores"] and found["tuned"] == wanted["tuned"]


BAD = [
    ({"modle": {}}, "no setting modle; known are model, domains, systems"),
    ({"systems": {"knn-mt": {"tokens": {"shar": 1}}}}, r"no setting systems\.knn-mt\.tokens\.shar; known are options, share"),
    ({"model": {"path": None}}, r"model\.path"),
    ({"systems": {"a/b": None}}, "systems.a/b: give a name"),
    ({"systems": {"base": {"tokens": {}}}}, "domains.verses has no base model"),
    ({"systems": {"fixed": {"domains": ["verse"]}}}, "fixed.domains is 'verse', .*no such domain; known are verses, few"),
    ({"systems": {"tenth": {"tune_on": "all"}}}, "systems.tenth.tune_on is 'all', and there is no such domain"),
    ({"systems": {"tenth": {"tune_on": {"verses": "all"}}}}, "systems.tenth.tune_on is 'all', and there is no such domain"),
    ({"systems": {"tenth": {"against": "tenth"}}}, "systems.tenth.against is 'tenth', and there is no such other system"),
    ({"systems": {"fixed": {"tune_on": "few"}}}, "systems.fixed has tune_on, but tune is false"),
    ({"systems": {"fixed": {"also": ["few"]}}}, "systems.fixed has also, but tune is false"),
    ({"systems": {"tenth": {"also": ["all"]}}}, "systems.tenth.also is 'all', and there is no such domain"),
    ({"systems": {"tenth": {"tokens": {"share": 0}}}}, "a share is 0; give more than 0"),
    ({"systems": {"tenth": {"tokens": {"share": "much"}}}}, "systems.tenth.tokens.share: Value 'much'"),
    ({"systems": {"fixed": {"options": "--output x"}}}, "systems.fixed.options has --output, which the experiment sets"),
    ({"systems": {"fixed": {"options": "--a 'b"}}}, "systems.fixed.options cannot be split"),
    ({"systems": {"knn-mt": {"phrases": {}}}}, "systems.knn-mt.phrases needs an encoder"),
    ({"encoder": "e.pt", "systems": {"knn-mt": {"phrases": {}}}}, "phrases needs text: give domains.verses.monolingual"),
    ({"systems": {"knn-mt": {"text": {}}}}, "text needs text: give domains.verses.monolingual"),
    ({"systems": {"knn-mt": {"tokens": {"reverse_model": "r.pt"}}}}, "tokens.reverse_model needs text: give domains.verses"),
    ({"systems": {"knn-mt": {"tokens": {"raw": "base"}}}}, "tokens.raw is 'base', and there is no such"),
    ({"domains": {"few": {"data_bin": "x"}}}, "domains.few needs data_bin or text, and not both"),
    ({"model": {"dictionary": []}}, "domains.few.text needs model.subwords and model.dictionary"),
    ({"systems": {"fixed": {"fine_tune": {"minutes": 1}}}}, "fixed.fine_tune needs model.training_options, with --arch"),
    ({"model": {"training_options": "--arch a"}, "systems": {"fixed": {"fine_tune": {"minutes": 0}}}},
     "systems.fixed.fine_tune.minutes is 0: give more than 0"),
    ({"model": {"training_options": "--arch a"},
      "systems": {"fixed": {"fine_tune": {"minutes": 1}, "tokens": {"raw": "knn-mt"}}}},
     "systems.fixed.tokens.raw is 'knn-mt', which is of another model: give both the same fine_tune"),
    ({"encoder": "e.pt", "train_encoder": {"texts": {"a": "b"}}}, "encoder and train_encoder exclude each other"),
    ({"title": "${nowhere}"}, "title: Interpolation key 'nowhere' not found"),
    ({"title": "${oc.env:NO_SUCH_VARIABLE}"}, "title: .*NO_SUCH_VARIABLE"),
]  # fmt: skip


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with others in their places."""
    found = dict(settings)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if nested else value
    return found


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=lambda value: str(value)[:40])
def test_bad_settings_are_refused(made: Path, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    config = write_config(tmp_path / "bad.yaml", merged(yaml.safe_load(made.read_text()), changes))
    done = call("experiment run", config, "--dry-run", check=False)
    refused(done, r"bad\.yaml: .*" + sentence)


def test_bad_files_are_refused(made: Path, tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    bad = {"a: [": "bad.yaml, line 1: this is no YAML", "- a": "holds no settings", "": "is missing"}
    for text, sentence in bad.items():
        config.write_text(text)
        refused(call("experiment run", config, check=False), sentence)
    config.write_bytes(b"\xff\xfe\xff")
    refused(call("experiment run", config, check=False), "bad.yaml")
    refused(call("experiment run", tmp_path / "no.yaml", check=False), "no.yaml: No such file")
    settings = yaml.safe_load(made.read_text())
    settings["model"]["path"] = "gone.pt"
    write_config(config, settings)
    done = call("experiment run", config, "--output", tmp_path / "out", check=False)
    refused(
        done, r": gone\.pt \(model\.path\), valid\.de \(domains\.few\.text\.valid\), valid\.en .*test\.en"
    )
    assert not (tmp_path / "out").exists()
    refused(
        call("experiment run", made, "--output", config, check=False), "bad.yaml is a file: give a folder"
    )


class Outline(HTMLParser):
    """What a page has, and whether each element that begins also ends."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_is_a_page_and_a_text(made: Path, tmp_path: Path) -> None:
    out = made.parent / "out"
    call("experiment report", out, out, "--output", tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "results.md").read_text()
    outline = Outline(page)
    assert outline.open == []
    bleu = results_of(made)["domains"]["verses"]["systems"]["tenth"]["scores"]["BLEU"]
    assert (
        f"| tenth | {bleu:.2f} | " in text
        and "| tenth | knn-mt | " in text
        and "**The base model has" in text
    )
    assert (
        "A & B" in outline.text
        and f"{bleu:.2f}" in outline.text
        and "published are 99.00 (nowhere)" in outline.text
    )
    assert (
        "--tokens-k 2" in outline.text
        and "tuned on few" in outline.text
        and "bs:20|seed:12345" in outline.text
    )
    assert not re.search(r"https?:|//|url\(|@import|<script", page)
    call("experiment report", out)
    assert (out / "report.html").stat().st_size < len(page) and (out / "results.md").exists()


def test_report_keeps_text_as_text_and_checks_the_base(made: Path) -> None:
    results = results_of(made)
    results["title"] = "</title><script>alert(1)</script> /* content */"
    results["description"] = "<b>& 'so' on"
    verses = results["domains"]["verses"]
    verses["systems"]["<i>"] = verses["systems"].pop("fixed")
    outline = Outline(as_page([results]))
    assert outline.open == [] and "<b>& 'so' on" in outline.text and outline.text.count(results["title"]) >= 2
    assert not {"img", "script"} & {tag for tag, _, _ in outline.attributes}
    assert check_of_base(results["domains"]["few"]) is None
    verses["published"]["bleu"] = verses["systems"]["base"]["scores"]["BLEU"] + 0.4
    sentence, good = check_of_base(verses)
    assert good and "-0.40, within the tolerance of 0.5." in sentence


def test_report_refuses_what_is_no_result(made: Path, tmp_path: Path) -> None:
    out = made.parent / "out"
    done = call("experiment report", tmp_path, check=False)
    refused(done, "there is no .*results.json: give the output of fairseq-ccpr experiment run")
    refused(
        call("experiment report", out, "--output", tmp_path / "no", check=False), "there is no such folder"
    )
    for text, sentence in (("{", "is damaged"), ('{"title": "a"}', "of another version")):
        (tmp_path / "results.json").write_text(text)
        refused(call("experiment report", tmp_path, check=False), sentence)
        assert not (tmp_path / "report.html").exists()
