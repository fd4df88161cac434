"""Tune-and-reset: which pairs it takes, that a few updates help, and that nothing of them is left."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.text.pairs import read_pairs
from scripts.recipes.tune_and_reset import Tuning, nearest
from tests.helpers import ROOT, run
from tests.small_models import World

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def translator(world: World) -> Translator:
    return Translator(world.model, data=world.data_bin, device="cpu")


def words(text: str) -> set[str]:
    return {word.strip(",.;:!?\"'").casefold() for word in text.split()} - {""}


def test_the_nearest_pairs_are_those_that_share_most_words(world: World) -> None:
    pairs = [pair for pair in read_pairs(world.folder / "train.tsv") if pair[0].replace(" ", "").isalpha()]
    pairs = [(f"{source} Haus Stein", target) for source, target in pairs[:80]] or pytest.fail(
        "no simple sources"
    )
    sentences = [f"{source} Feld" for source, _ in pairs[:5]] + ["Zzz"]

    def similarity(one: str, two: str) -> float:
        return len(words(one) & words(two)) / len(words(one) | words(two))

    found = nearest(sentences, pairs, 3)
    for sentence, near in zip(sentences, found):
        # sorted keeps the order of equal ones
        order = sorted(pairs, key=lambda pair: -similarity(sentence, pair[0]))
        assert near == [pair for pair in order[:3] if similarity(sentence, pair[0]) > 0]
    assert found[-1] == []


def test_updates_help_their_pairs_and_leave_nothing(translator: Translator, world: World) -> None:
    weights = [each.detach().clone() for each in translator.models[0].parameters()]
    pairs = list(itertools.islice(read_pairs(world.folder / "test.tsv"), 4))
    sources = [source for source, _ in pairs]
    alone = [one.text for one in translator.translate(sources)]
    tuning = Tuning(translator)
    batch = tuning.batch(pairs)
    assert batch is not None
    costs = [tuning.cost(batch).item()]
    costs += [tuning.cost(batch).item() for _ in tuning.updates(pairs, 3e-3, 6)]
    assert costs == sorted(costs, reverse=True) and len(costs) == 7
    tuned = [one.text for one in translator.translate(sources)]
    once = [each.detach().clone() for each in translator.models[0].parameters()]
    list(tuning.updates(pairs[:1], 1e-2, 2))  # of another sentence in between
    list(tuning.updates(pairs, 3e-3, 6))
    assert all(map(torch.equal, once, translator.models[0].parameters()))
    tuning.reset()
    assert all(map(torch.equal, weights, translator.models[0].parameters()))
    assert [one.text for one in translator.translate(sources)] == alone != tuned


def test_the_cost_is_that_of_the_plain_model_without_padding(translator: Translator, world: World) -> None:
    tuning = Tuning(translator)
    short, long = sorted(
        itertools.islice(read_pairs(world.folder / "test.tsv"), 6), key=lambda pair: len(pair[1])
    )[::5]
    both, *each = (tuning.batch(rows) for rows in ([short, long], [short], [long]))
    assert both is not None
    together = tuning.cost(both).item()
    assert together == pytest.approx(
        sum(tuning.cost(one).item() for one in each if one is not None), rel=1e-2
    )
    logits = translator.models[0](**both["net_input"])[0]
    likely = logits.log_softmax(-1).gather(-1, both["target"][..., None])[..., 0]
    expected = -likely[both["target"] != translator.task.target_dictionary.pad()].sum().item()
    assert together == pytest.approx(expected, rel=1e-2)  # bf16 against fp32


def test_pairs_that_are_too_long_are_left_out(translator: Translator) -> None:
    tuning, long = Tuning(translator), ("Haus " * 2000, "house " * 2000)
    kept = tuning.batch([long, ("Haus", "house")])
    assert kept is not None and kept["nsentences"] == 1
    assert tuning.batch([long]) is None and list(tuning.updates([long], 1e-3, 2)) == [1, 2]


def test_the_recipe_reports_all_systems(world: World, translator: Translator, tmp_path: Path) -> None:
    rows = {name: list(read_pairs(world.folder / f"{name}.tsv")) for name in ("train", "valid", "test")}
    for name, most in {"train": 100, "valid": 2, "test": 8}.items():
        lines = "".join(f"{source}\t{target}\n" for source, target in rows[name][:most])
        (tmp_path / f"{name}.tsv").write_text(lines, encoding="utf-8")
    texts = [tmp_path / f"{name}.tsv" for name in rows]
    for path in (world.spm, *world.data_bin.glob("dict.*")):  # a model's folder, as the demo's
        shutil.copy(path, tmp_path)
    state = torch.load(world.model)
    state["cfg"]["task"] |= {"source_lang": "de", "target_lang": "en"}
    torch.save(state, tmp_path / "model.pt")
    words = ["--most", 4, "--datastore", world.datastore, "--tokens-k", 4, "--no-tokens-confidence"]
    done = run(
        ROOT / "scripts/recipes/tune_and_reset.py", tmp_path / "model.pt", *texts, tmp_path / "out", *words
    ).stdout
    assert (
        "of 2 validation sentences" in done and "| 4 sentences | BLEU | chrF | seconds per sentence |" in done
    )
    assert all(f"\n| {name} | " in done for name in ("alone", "tune-and-reset", "datastore"))
    chosen = rows["test"][:8:2]
    alone = (tmp_path / "out/alone.txt").read_text(encoding="utf-8").splitlines()
    assert alone == [one.text for one in translator.translate([source for source, _ in chosen])]
    assert (tmp_path / "out/reference.txt").read_text(encoding="utf-8").splitlines() == [
        row[1] for row in chosen
    ]
