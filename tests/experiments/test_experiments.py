"""Experiments: their stages, what they find, what runs again, what is refused, their page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.experiments.config import read_config
from fairseq_ccpr.experiments.pipeline import Plan
from fairseq_ccpr.experiments.report_page import Report, as_page
from fairseq_ccpr.experiments.stages import Runner, with_needs
from fairseq_ccpr.experiments.tables import check_of_base
from tests.helpers import PROGRAM, ROOT, call, refused
from tests.small_models import TINY, Ccpr, World

SHIPPED = sorted((ROOT / "scripts" / "experiments").glob("*.yaml"))


def execute_here(words: list[str], folder: Path, log: IO[str], lock: IO[str]) -> int:
    """A stage in this process, which spares it the imports."""
    command = "fairseq-train" if words[1] == "fairseq_cli.train" else ""  # of ours, the words begin with the name
    assert not lock.closed
    with contextlib.chdir(folder):
        done = call(command, *words[2:], check=False)
    log.write(done.stdout + done.stderr)
    return done.returncode


@pytest.fixture(autouse=True)
def in_process(request: pytest.FixtureRequest) -> Iterator[None]:
    if "processes" in request.keywords:
        yield
        return
    with patch("fairseq_ccpr.experiments.stages.execute", execute_here):
        yield


def write_config(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def settings_of(world: World, folder: Path) -> dict[str, Any]:
    """A domain that is binarised, one of two files a subset, paths relative to the folder; kNN-MT with all and with less."""
    folder.mkdir(parents=True)
    shutil.copy(world.spm, folder / "spm.model")
    for subset in ("valid", "test"):
        rows = (world.folder / f"{subset}.tsv").read_text(encoding="utf-8").splitlines()[:12]
        for side, language in enumerate(("de", "en")):
            text = "".join(row.split("\t")[side] + "\n" for row in rows)
            (folder / f"{subset}.{language}").write_text(text, encoding="utf-8")
    store = "--index exact --cpu --max-tokens 1500"
    return {
        "title": "A & B",
        "model": {
            "path": str(world.model), "source_lang": "de", "target_lang": "en",
            "subwords": "--bpe sentencepiece --sentencepiece-model spm.model",
            "dictionary": [str(world.data_bin / "dict.en.txt")], "options": "--cpu --beam 2 --max-len-b 30",
        },
        "domains": {
            "verses": {"data_bin": str(world.data_bin), "published_bleu": 99.0, "published_in": "nowhere"},
            "few": {"text": {"train": str(world.folder / "valid.tsv"), "valid": "valid", "test": "test"},
                    "references": ["test.en"]},
        },
        "tune_options": "--combiner fixed --decode 1",
        "bootstrap_samples": 20,
        "systems": {
            "base": None,
            "knn-mt": {"tokens": {"options": store}},
            "tenth": {
                "tokens": {"options": store, "share": 0.1}, "tune_on": "few", "against": "knn-mt", "domains": ["verses"],
                "tune_options": "--combiner learned", "also": ["verses"],
            },
            "fixed": {"tokens": {"options": store}, "tune": False, "options": "--knn-k 2", "domains": ["verses"]},
        },
    }  # fmt: skip


def experiment(config: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run an experiment into the folder `out` next to its file."""
    return call("experiment run", config, "--output", config.parent / "out", *extra, check=check)


def to_do(config: Path, *extra: object) -> set[str]:
    """The stages that would run."""
    return set(re.findall("^# (.*): to do$", experiment(config, "--dry-run", *extra).stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an experiment that was run."""
    config = tmp_path_factory.mktemp("experiments") / "one" / "experiment.yaml"
    write_config(config, settings_of(world, config.parent))
    with patch("fairseq_ccpr.experiments.stages.execute", execute_here):
        shown = experiment(config).stdout
    assert "[1/17] " in shown and "17 stages run" in shown and "| tenth |" in shown
    return config


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed; it is as done as the first."""
    return Path(shutil.copytree(made.parent, tmp_path / "two")) / made.name


def results_of(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "out" / "results.json").read_text(encoding="utf-8"))


def test_experiment_finds_what_its_commands_find(world: World, made: Path, tmp_path: Path) -> None:
    results, out = results_of(made), made.parent / "out"
    verses = results["domains"]["verses"]
    assert list(verses["systems"]) == ["base", "knn-mt", "tenth", "fixed"]
    assert list(results["domains"]["few"]["systems"]) == ["base", "knn-mt"] and verses["sentences"] == 40
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
    trusted = "--trust" in tenth["tuned"]["options"]
    assert trusted == ("trust:learned-" in tenth["retrieval_signature"]) and "--trust" not in knn["tuned"]["options"]
    assert set(tenth["against"]) == {"base", "knn-mt"} and set(knn["against"]) == {"base"}
    difference = tenth["against"]["knn-mt"]["BLEU"]["difference"]
    assert difference == pytest.approx(tenth["scores"]["BLEU"] - knn["scores"]["BLEU"], abs=0.02)
    assert all((out / stage["log"]).read_text() for stage in results["stages"].values())
    assert results["versions"]["fairseq-ccpr"] and results["config"]["title"] == "A & B"
    assert not list(out.rglob("*.begun")) and not list(out.rglob("*.partial"))


def test_second_run_runs_nothing(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (made.parent / "out").rglob("*") if path.suffix != ".json"}
    assert "0 stages run, 17 were done" in experiment(made).stdout
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_what_has_changed_runs_again_with_what_depends_on_it(world: World, copied: Path) -> None:
    assert to_do(copied) == set()  # though it was moved
    settings = yaml.safe_load(copied.read_text())
    changed = {
        "systems.fixed.options": ("--knn-k 4", {"decode/verses/fixed"}),
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
    settings["systems"]["fixed"]["options"] = "--knn-k 1 --knn-lambda 0.9"
    settings["description"] = "other"
    write_config(copied, settings)
    shutil.rmtree(copied.parent / "out" / "stores" / "few")  # nothing needs it any more
    shown = experiment(copied).stdout
    assert re.findall(r"\[\d/\d\] (\S+)", shown) == ["decode/verses/fixed", "score/verses"]
    after = results_of(copied)
    assert after["description"] == "other" and after["domains"]["few"] == before["domains"]["few"]
    assert after["domains"]["verses"]["systems"]["fixed"] != before["domains"]["verses"]["systems"]["fixed"]
    assert after["domains"]["verses"]["systems"]["tenth"] == before["domains"]["verses"]["systems"]["tenth"]


def test_only_some_systems(world: World, tmp_path: Path) -> None:
    config = tmp_path / "new" / "experiment.yaml"
    write_config(config, settings_of(world, config.parent))
    assert to_do(config, "--only", "base") == {
        "decode/verses/base", "prepare/few", "decode/few/base", "score/verses", "score/few",
    }  # fmt: skip
    assert "decode/verses/knn-mt" in to_do(config, "--only", "tenth")  # which it is compared with
    assert not (config.parent / "out").exists()
    experiment(config, "--only", "base")
    assert list(results_of(config)["domains"]["verses"]["systems"]) == ["base"]
    refused(
        experiment(config, "--only", "knn", check=False), "--only names 'knn', .*known are base, knn-mt, tenth, fixed"
    )


def test_phrases_of_an_encoder_that_is_trained_beside_tokens(
    world: World, ccpr: Ccpr, mono: Path, tmp_path: Path
) -> None:
    config = tmp_path / "phrases" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    del settings["domains"]["few"]
    settings["domains"]["verses"]["monolingual"] = [str(mono)]
    settings["train_encoder"] = {
        "texts": {"bible": str(ccpr.pairs)}, "start_from": str(ccpr.context), "updates": 4,
        "extract_options": "--valid 60 --aligner fast-align --max-edge-share 0.02",
        "options": "--cpu --batch-size 24 --max-subwords 100 --phrase-dim 16 --num-workers 0 --save-interval-updates 4",
    }  # fmt: skip
    tokens = {"options": "--index exact --cpu"}
    phrases = {"options": "--segmentation all --max-words 2 --cpu", "share": 0.5}
    untuned = {"tune": False, "options": "--phrase-k 2"}
    settings["systems"] = {
        "base": {}, "phrases": {"phrases": phrases, **untuned}, "both": {"tokens": tokens, "phrases": phrases, **untuned},
    }  # fmt: skip
    experiment(write_config(config, settings))
    results = results_of(config)
    systems = results["domains"]["verses"]["systems"]
    assert systems["both"]["stores"]["phrases"] == systems["phrases"]["stores"]["phrases"]
    assert systems["both"]["stores"]["phrases"]["share"] == 0.5
    assert "Lambda_max:" in systems["both"]["retrieval_signature"] and "k:8|" in systems["both"]["retrieval_signature"]
    built = ["encoder/pairs-bible", "encoder/train", "phrases/verses/phrases"]
    assert [name for name in results["stages"] if name.startswith(("encoder/", "phrases/"))] == built
    settings["train_encoder"]["updates"] = 5
    write_config(config, settings)
    assert to_do(config) == {
        "encoder/train", "phrases/verses/phrases", "decode/verses/phrases", "decode/verses/both", "score/verses",
    }  # fmt: skip


def test_models_that_are_fine_tuned_with_and_without_a_datastore(world: World, tmp_path: Path) -> None:
    """Trained on the pairs of the domain whose datastores would be used; a datastore alongside has that model's keys."""
    config = tmp_path / "tuned" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    settings["model"]["training_options"] = f"--task translation_cpu_bf16 --arch transformer {TINY}"
    trained = {"fine_tune": {"minutes": 5, "options": "--cpu --max-update 4 --lr 1e-3 --max-tokens 1500"}}
    tokens = {"tokens": {"options": "--index exact --cpu"}, "tune": False}
    settings["systems"] = {
        "tuned": {**trained, "domains": ["few"]}, "base": {},
        "both": {**trained, **tokens, "against": "tuned", "domains": ["few"]},
        "few-tuned": {**trained, "stores_from": "few", "domains": ["verses"]},
    }  # fmt: skip
    experiment(write_config(config, settings))
    results, out = results_of(config), config.parent / "out"
    few, verses = (results["domains"][name]["systems"] for name in ("few", "verses"))
    assert list(few) == ["base", "tuned", "both"] and list(verses) == ["base", "few-tuned"]
    assert few["both"]["against"].keys() == {"base", "tuned"}
    [trained_once] = [name for name in results["stages"] if name.startswith("fine-tune/")]
    assert trained_once == "fine-tune/few/few-tuned"  # named for the first that needs it
    model = "models/few/few-tuned/checkpoint_best.pt"
    before, after = (torch.load(path)["model"] for path in (world.model, out / model))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    for domain, name in (("few", "tuned"), ("verses", "few-tuned")):
        assert model in " ".join(results["stages"][f"decode/{domain}/{name}"]["command"])
    assert (
        few["both"]["stores"]["tokens"]["fingerprints"]["model"]
        != TokenDatastore(world.datastore).section.fingerprints["model"]
    )
    seeded = {**trained["fine_tune"], "options": f"{trained['fine_tune']['options']} --seed 2"}
    settings["systems"]["tuned"] = {"fine_tune": seeded, "domains": ["few"]}
    write_config(config, settings)
    assert to_do(config, "--only", "tuned") == {
        "fine-tune/few/tuned",
        "decode/few/tuned",
        "score/few",
        "score/few/tuned",
    }


def test_failed_stage_is_named_with_its_log(world: World, tmp_path: Path) -> None:
    config = tmp_path / "bad" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    settings["systems"]["fixed"]["options"] = "--knn-k 0"
    write_config(config, settings)
    done = experiment(config, "--only", "fixed", check=False)
    refused(done, r"stage decode/verses/fixed failed with exit code 1 \(.*--knn-k is 0.*\); its log is .*fixed\.log")
    assert "[3/4] decode/verses/fixed" in done.stdout
    assert "tokens/verses/knn-mt" not in to_do(config, "--only", "fixed")


@pytest.fixture(scope="module")
def trusting(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an experiment that was run, whose tuning left trust."""
    config = tmp_path_factory.mktemp("trusting") / "one" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    lines = [f"{'und der Herr, ' * (number % 5 + 1)}\tthe of and to in that he\n" for number in range(300)]
    for name, some in (("train", lines), ("valid", lines), ("test", lines[:10])):
        (config.parent / f"{name}.tsv").write_text("".join(some), encoding="utf-8")
    text = {name: f"{name}.tsv" for name in ("train", "valid", "test")}
    settings["domains"] = {"litanies": {"text": text}}
    settings["tune_options"] = ""
    settings["systems"] = {"base": {}, "trust": {"tokens": {"options": "--index exact --cpu"}}}
    write_config(config, settings)
    with patch("fairseq_ccpr.experiments.stages.execute", execute_here):
        experiment(config)
    return config


TUNED, DECODED = "tune/litanies/trust", "decode/litanies/trust"


def remove_translations(out: Path) -> None:
    """Remove what made trust superfluous: the translations, and their scores."""
    shutil.rmtree(out / "decoded" / "litanies" / "trust")
    (out / "scores" / "litanies.json").unlink()


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_trust_that_is_not_what_tuning_left_is_learned_again(trusting: Path, tmp_path: Path, damage: str) -> None:
    config = Path(shutil.copytree(trusting.parent, tmp_path / "two")) / trusting.name
    out = config.parent / "out"
    trust = out / "tuned" / "litanies" / "trust.options.trust"
    before = trust.read_bytes()
    trust.unlink() if damage == "missing" else trust.write_bytes(before[:-1])
    assert to_do(config) == set()  # what is decoded needs it no more
    remove_translations(out)
    assert {TUNED, DECODED} <= to_do(config)
    experiment(config)
    assert to_do(config) == set()
    learned, wanted = load(trust.read_bytes()), load(before)
    assert all(torch.equal(learned[name], tensor) for name, tensor in wanted.items())


def test_an_output_that_was_moved_decodes_with_the_trust_in_it(trusting: Path, tmp_path: Path) -> None:
    config = Path(shutil.copytree(trusting.parent, tmp_path / "two")) / trusting.name
    out = config.parent / "out"
    remove_translations(out)
    assert TUNED not in to_do(config)
    experiment(config)
    stamp = json.loads((out / "stamps" / "decode.litanies.trust.json").read_text())
    assert "OUTPUT/tuned/litanies/trust.options.trust" in stamp["command"]


@pytest.mark.processes
def test_killed_run_resumes_and_equals_an_uninterrupted_one(world: World, made: Path, tmp_path: Path) -> None:
    config = tmp_path / "killed" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    settings["systems"]["knn-mt"]["tokens"]["options"] += " --chunk-tokens 200"
    del settings["domains"]["few"], settings["systems"]["tenth"], settings["systems"]["fixed"]
    write_config(config, settings)
    words = [*PROGRAM, "experiment", "run", config, "--output", config.parent / "out", "--only", "knn-mt"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    store = config.parent / "out" / "stores" / "verses" / "tokens.knn-mt"
    shards = store / "token.partial" / "done"
    while process.poll() is None and (not shards.exists() or len(list(shards.iterdir())) < 5):
        time.sleep(0.001)
    locked_out = experiment(config, check=False)
    child = int((config.parent / "out" / "lock").read_text())
    process.terminate()
    _, said = process.communicate()
    assert process.returncode == 130 and "interrupted" in said
    refused(locked_out, rf"another run is at work in .*out \(process {child}\)")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    done = {path: path.stat().st_mtime_ns for path in shards.iterdir()}
    assert len(done) >= 5 and not (store / "manifest.json").exists()
    with patch("fairseq_ccpr.experiments.stages.execute", execute_here):
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
    for text, sentence in (
        ("a: [", "bad.yaml, line 1: this is no YAML"),
        ("- a", "holds no settings"),
        ("", "is missing"),
    ):
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
        done, r"relative to .*: gone\.pt \(model\.path\), valid\.de \(domains\.few\.text\.valid\), valid\.en .*test\.en"
    )
    assert not (tmp_path / "out").exists()
    refused(call("experiment run", made, "--output", config, check=False), "bad.yaml is a file: give a folder")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_have_stages(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    plan = Plan(config, path.parent, tmp_path)
    goals = [
        stage for domain in config.domains for stage in plan.comparisons(domain, config.systems_of(domain)).values()
    ]
    stages = with_needs(goals)
    assert len({stage.name for stage in stages}) == len(stages)
    assert Runner(path.parent, tmp_path).to_do(goals) == stages


def test_settings_of_a_domain_may_come_from_another(tmp_path: Path) -> None:
    path = next(path for path in SHIPPED if path.stem == "domains")
    plan = Plan(read_config(path), path.parent, tmp_path)
    tuned = {domain: plan.tune("phrases", domain) for domain in ("office", "koran")}
    assert [stage.name for stage in tuned.values()] == ["tune/koran/phrases", "tune/office/phrases"]
    assert str(tmp_path / "stores" / "koran" / "phrases.phrases") in tuned["office"].words
    elsewhere = plan.decode("office-clknn", "software")
    assert {"tokens/office/clknn", "tune/office/clknn", "prepare/software"} <= {need.name for need in elsewhere.needs}


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
    assert f"| tenth | {bleu:.2f} | " in text and "| tenth | knn-mt | " in text and "**The base model has" in text
    assert "A & B" in outline.text and f"{bleu:.2f}" in outline.text and "published are 99.00 (nowhere)" in outline.text
    assert "--knn-k 2" in outline.text and "tuned on few" in outline.text and "bs:20|seed:12345" in outline.text
    pictures = [value for tag, name, value in outline.attributes if (tag, name) == ("img", "src")]
    assert len(pictures) == 6 and all(value.startswith("data:image/png;base64,iVBOR") for value in pictures)
    assert not re.search(r"https?:|//|url\(|@import|<script", re.sub("data:image/png;base64,[A-Za-z0-9+/=]+", "", page))
    call("experiment report", out)
    assert (out / "report.html").stat().st_size < len(page) and (out / "results.md").exists()


def test_report_keeps_text_as_text_and_checks_the_base(made: Path) -> None:
    results = results_of(made)
    results["title"] = "</title><script>alert(1)</script> /* content */"
    results["description"] = "<b>& 'so' on"
    verses = results["domains"]["verses"]
    verses["systems"]["<i>"] = verses["systems"].pop("fixed")
    outline = Outline(as_page([Report(made.parent / "nowhere", results)]))
    assert (
        outline.open == []
        and "<b>& 'so' on" in outline.text
        and not [t for t, _, _ in outline.attributes if t == "img"]
    )
    assert outline.text.count(results["title"]) >= 2 and "script" not in {tag for tag, _, _ in outline.attributes}
    assert check_of_base(results["domains"]["few"]) is None
    verses["published"]["bleu"] = verses["systems"]["base"]["scores"]["BLEU"] + 0.4
    sentence, good = check_of_base(verses)
    assert good and "-0.40, within the tolerance of 0.5." in sentence


def test_report_refuses_what_is_no_result(made: Path, tmp_path: Path) -> None:
    out = made.parent / "out"
    refused(
        call("experiment report", tmp_path, check=False),
        "there is no .*results.json: give the output of fairseq-ccpr experiment run",
    )
    refused(call("experiment report", out, "--output", tmp_path / "no", check=False), "there is no such folder")
    for text, sentence in (("{", "is damaged"), ('{"title": "a"}', "of another version")):
        (tmp_path / "results.json").write_text(text)
        refused(call("experiment report", tmp_path, check=False), sentence)
        assert not (tmp_path / "report.html").exists()
