"""Rivals sentence by sentence: which pairs they take, that updates help and nothing of them is left, what SK-MT mixes."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.token_memory import confidence_weight
from fairseq_ccpr.text.pairs import read_pairs
from scripts.recipes.per_sentence import SkMt, Tuning, by_first_distance, nearest
from tests.helpers import ROOT, run
from tests.small_models import World

pytestmark = pytest.mark.full

NAMES = {"alone", "tune-and-reset", "SK-MT", "subset kNN-MT", "datastore"}


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


def test_sk_mt_mixes_the_two_nearest_states_of_the_pairs(translator: Translator, world: World) -> None:
    """With the very pair among them its reference is likely; without pairs the model is left alone."""
    pairs = list(itertools.islice(read_pairs(world.folder / "test.tsv"), 3))
    rival = SkMt(translator, temperature=5.0)
    reference, plain = rival.batch(pairs[:1]), translator.alone
    assert reference is not None and rival.system.ensemble is not None
    with torch.no_grad():
        queries = rival.memory.capture.force_decode(reference["net_input"])[0]
        log_probs, _ = plain.force_models(reference)
        for read in (pairs, pairs[1:], []):
            rival.read(read)
            text = rival.system.ensemble.force_decode(reference)
            mixed = text.mixed([text.records["tokens"].vote(rival.memory, False)])
            for at, (query, target) in enumerate(zip(queries, reference["target"][0])):
                expected = log_probs[0, at, target].exp()
                if read:
                    distances = (rival.keys - query).double().square().sum(1)
                    near, entries = distances.sort()
                    shares = (-near[:2] / 5.0).softmax(0)
                    voted = (shares * (rival.values[entries[:2]] == target)).sum()
                    weight = (1 - near[0] / 5.0).clamp(0, 0.9999)
                    expected = (1 - weight) * expected + weight * voted
                assert mixed[at].exp().item() == pytest.approx(expected.item(), abs=2e-3)
            if len(read) == 3:
                assert mixed.exp().min() > 0.5
    scores = torch.tensor([[-25.0, -50.0], [-200.0, -300.0]])
    weights = by_first_distance(scores, scores.long(), None, SkMt(translator).memory.settings)
    assert weights.tolist() == [0.75, 0.0]


def test_subset_knn_mt_mixes_all_entries_where_there_are_few(translator: Translator, world: World) -> None:
    pairs = list(itertools.islice(read_pairs(world.folder / "test.tsv"), 3))
    rival = SkMt(translator, confidence_weight, k=512, lambda_=0.5, temperature=5.0)
    reference = rival.batch(pairs[:1])
    assert reference is not None and rival.system.ensemble is not None
    with torch.no_grad():
        queries = rival.memory.capture.force_decode(reference["net_input"])[0]
        rival.read(pairs)
        text = rival.system.ensemble.force_decode(reference)
        mixed = text.mixed([text.records["tokens"].vote(rival.memory, False)]).exp()
    distances = torch.cdist(queries.double(), rival.keys.double()).square()
    assert len(rival.values) < 512
    shares = (-distances / 5.0).softmax(1)
    voted = (shares * (rival.values == reference["target"][0][:, None])).sum(1)
    assert torch.allclose(mixed.double(), 0.5 * text.log_probs.exp().double() + 0.5 * voted, atol=2e-3)


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
        ROOT / "scripts/recipes/per_sentence.py", tmp_path / "model.pt", *texts, tmp_path / "out", *words
    ).stdout
    assert "of 2 validation sentences" in done and "| system | BLEU | chrF | seconds |" in done
    assert all(f"\n| {name} | " in done for name in NAMES)
    results = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))
    assert {row["system"] for row in results["rows"]} >= NAMES
    assert all(row["seconds"] > 0 and row["BLEU"] >= 0 for row in results["rows"])
    chosen = rows["test"][:8:2]
    alone = (tmp_path / "out/alone.txt").read_text(encoding="utf-8").splitlines()
    assert alone == [one.text for one in translator.translate([source for source, _ in chosen])]
    assert (tmp_path / "out/reference.txt").read_text(encoding="utf-8").splitlines() == [
        row[1] for row in chosen
    ]
