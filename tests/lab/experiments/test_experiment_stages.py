"""Stages of experiments: of some systems, of encoders and models that are trained, of trust, and of the shipped files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.lab.experiments.config import read_config
from fairseq_ccpr.lab.experiments.pipeline import Plan
from fairseq_ccpr.lab.experiments.stages import Runner, with_needs
from tests.helpers import ROOT, refused
from tests.lab.experiments.small_experiments import (
    execute_here,
    experiment,
    results_of,
    settings_of,
    to_do,
    write_config,
)  # fmt: skip
from tests.small_models import TINY, Ccpr, World

pytestmark = pytest.mark.full

SHIPPED = sorted((ROOT / "scripts" / "experiments").glob("*.yaml"))


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
    done = experiment(config, "--only", "knn", check=False)
    refused(done, "--only names 'knn', .*known are base, knn-mt, tenth, fixed")


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
    untuned = {"tune": False, "options": "--phrases-k 2"}
    settings["systems"] = {
        "base": {}, "phrases": {"phrases": phrases, **untuned}, "both": {"tokens": tokens, "phrases": phrases, **untuned},
        "text": {"phrases": phrases, "text": {"against": [str(ccpr.pairs)]}, **untuned},
    }  # fmt: skip
    experiment(write_config(config, settings))
    results = results_of(config)
    systems = results["domains"]["verses"]["systems"]
    assert systems["both"]["stores"]["phrases"] == systems["phrases"]["stores"]["phrases"]
    assert systems["both"]["stores"]["phrases"]["share"] == 0.5
    assert (
        "Lambda_max:" in systems["both"]["retrieval_signature"]
        and "k:8|" in systems["both"]["retrieval_signature"]
    )
    assert systems["text"]["stores"]["text"]["fingerprints"].keys() >= {"general", "target_dictionary"}
    assert (
        systems["text"]["retrieval_signature"].startswith("text:")
        or "|text:" in systems["text"]["retrieval_signature"]
    )
    built = ["encoder/pairs-bible", "encoder/train", "phrases/verses/phrases"]
    assert [name for name in results["stages"] if name.startswith(("encoder/", "phrases/"))] == built
    settings["train_encoder"]["updates"] = 5
    write_config(config, settings)
    assert to_do(config) == {
        "encoder/train", "phrases/verses/phrases", "decode/verses/phrases", "decode/verses/both", "decode/verses/text",
        "score/verses",
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
    assert before.keys() == after.keys() and any(
        not torch.equal(before[name], after[name]) for name in before
    )
    for domain, name in (("few", "tuned"), ("verses", "few-tuned")):
        assert model in " ".join(results["stages"][f"decode/{domain}/{name}"]["command"])
    of_model = few["both"]["stores"]["tokens"]["fingerprints"]["model"]
    assert of_model != TokenDatastore(world.datastore).section.fingerprints["model"]
    seeded = {**trained["fine_tune"], "options": f"{trained['fine_tune']['options']} --seed 2"}
    settings["systems"]["tuned"] = {"fine_tune": seeded, "domains": ["few"]}
    write_config(config, settings)
    again = {"fine-tune/few/tuned", "decode/few/tuned", "score/few", "score/few.against.tuned"}
    assert to_do(config, "--only", "tuned") == again


def test_failed_stage_is_named_with_its_log(world: World, tmp_path: Path) -> None:
    config = tmp_path / "bad" / "experiment.yaml"
    settings = settings_of(world, config.parent)
    settings["systems"]["fixed"]["options"] = "--tokens-k 0"
    write_config(config, settings)
    done = experiment(config, "--only", "fixed", check=False)
    refused(
        done,
        r"stage decode/verses/fixed failed with exit code 1 \(.*--tokens-k is 0.*\); its log is .*fixed\.log",
    )
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
    with patch("fairseq_ccpr.lab.experiments.stages.execute", execute_here):
        experiment(config)
    return config


TUNED, DECODED = "tune/litanies/trust", "decode/litanies/trust"


def remove_translations(out: Path) -> None:
    """Remove what made trust superfluous: the translations, and their scores."""
    shutil.rmtree(out / "decoded" / "litanies" / "trust")
    (out / "scores" / "litanies.json").unlink()


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_trust_that_is_not_what_tuning_left_is_learned_again(
    trusting: Path, tmp_path: Path, damage: str
) -> None:
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


def test_what_a_stage_needs_ran_after_it_so_it_runs_again(trusting: Path, tmp_path: Path) -> None:
    """As where translations were deleted and made again by other code, whose scores were kept."""
    config = Path(shutil.copytree(trusting.parent, tmp_path / "two")) / trusting.name
    stamp = config.parent / "out" / "stamps" / "decode.litanies.trust.json"
    about = json.loads(stamp.read_text()) | {"finished": "2999-01-01T00:00:00+00:00"}
    stamp.write_text(json.dumps(about))
    assert to_do(config) == {"score/litanies"}


def test_an_output_that_was_moved_decodes_with_the_trust_in_it(trusting: Path, tmp_path: Path) -> None:
    config = Path(shutil.copytree(trusting.parent, tmp_path / "two")) / trusting.name
    out = config.parent / "out"
    remove_translations(out)
    assert TUNED not in to_do(config)
    experiment(config)
    stamp = json.loads((out / "stamps" / "decode.litanies.trust.json").read_text())
    assert "OUTPUT/tuned/litanies/trust.options.trust" in stamp["command"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_have_stages(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    plan = Plan(config, path.parent, tmp_path)
    goals = [
        stage
        for domain in config.domains
        for stage in plan.comparisons(domain, config.systems_of(domain)).values()
    ]
    stages = with_needs(goals)
    assert len({stage.file_name for stage in stages}) == len(stages)  # office/mixed is not office.mixed
    assert Runner(path.parent, tmp_path).to_do(goals) == stages


def test_settings_of_a_domain_may_come_from_another(tmp_path: Path) -> None:
    shipped = next(path for path in SHIPPED if path.stem == "monolingual").read_text("utf-8")
    others = "tune_on: {office: koran1, koran1: office}, domains: [office, koran1]"
    path = tmp_path / "other.yaml"
    path.write_text(re.sub(r"(?m)^(  phrases: .*)also: .*$", rf"\1{others}}}", shipped), "utf-8")
    plan = Plan(read_config(path), path.parent, tmp_path)
    tuned = {domain: plan.tune("phrases", domain) for domain in ("office", "koran1")}
    assert [stage.name for stage in tuned.values()] == ["tune/koran1/phrases", "tune/office/phrases"]
    assert str(tmp_path / "stores" / "koran1" / "phrases.phrases") in tuned["office"].words
    elsewhere = plan.decode("office-clknn.trust", "software")
    assert {"tokens/office/clknn.trust", "tune/office/clknn.trust", "prepare/software"} <= {
        need.name for need in elsewhere.needs
    }


def test_text_is_translated_back_by_a_reverse_model(tmp_path: Path) -> None:
    path = next(path for path in SHIPPED if path.stem == "monolingual")
    plan = Plan(read_config(path), path.parent, tmp_path)
    built = {
        system: dict(plan.datastores(system, "office"))["tokens"] for system in ("back", "knn", "back+text")
    }
    words = built["back"].words
    place = words.index("--monolingual")
    assert words[place : place + 4] == [
        "--monolingual", "data/office.mono.en", "--reverse-model", "data/reverse.pt",
    ]  # fmt: skip
    assert "--monolingual" not in built["knn"].words and built["back+text"] is built["back"]
    assert {
        ("systems.back.tokens.reverse_model", "data/reverse.pt"),
        ("domains.office.monolingual", "data/office.mono.en"),
    } <= set(built["back"].inputs)
