"""Retrieval inside beam search: the invariants, on a real model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import sacrebleu
import torch

from fairseq_ccpr.building.token_build import load_model, load_task
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_retriever import Neighbours, TokenRetriever
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.search.faiss_index import automatic_factory
from tests.helpers import ROOT, call, equal, output_of, run
from tests.small_models import PAIRS, World, build

SEARCHES = [
    [],
    ["--lenpen", 0.5, "--nbest", 3],
    ["--no-repeat-ngram-size", 2],
    ["--prefix-size", 2],
    ["--sampling", "--sampling-topk", 5, "--nbest", 5],
    ["--diverse-beam-groups", 5],
    ["--diversity-rate", 0.5],
    ["--match-source-len"],
    ["--beam", 1],
    ["--unkpen", 3, "--min-len", 4],
    ["--temperature", 1.3],
    ["--print-alignment"],
    ["--score-reference"],
]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_share_of_zero_equals_stock_fairseq_to_the_bit(decode: Callable, search: list) -> None:
    assert equal(decode(*search, "--knn-lambda", 0), decode(*search, base=True))


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_retrieval_changes_every_kind_of_search(decode: Callable, search: list) -> None:
    assert not equal(decode(*search, "--knn-lambda", 0.8), decode(*search, base=True), tolerance=1e-2)


def test_retrieval_does_not_depend_on_the_batch(decode: Callable) -> None:
    together = decode("--knn-lambda", 0.6)
    for size in (1, 7):
        assert equal(decode("--knn-lambda", 0.6, "--batch-size", size), together, tolerance=2e-3)


@pytest.mark.parametrize("parameters, bounds", [("", (90, 100.1)), ("nprobe=1,k_factor_rf=1", (0, 60))])
def test_translations_of_the_default_index_are_nearly_those_of_exact_search(
    world: World, tmp_path: Path, parameters: str, bounds: tuple[float, float]
) -> None:
    """BLEU of the one against the other, with its own search parameters and with some that find too little."""
    shutil.copytree(world.datastore, copied := tmp_path / "copied")
    section = TokenDatastore(copied).section
    factory = automatic_factory(section.size, section.dimension, "l2")
    build(world, copied, "--index", factory, "--index-parameters", parameters)
    exact, approximate = (
        output_of(call("fairseq-generate", *world.options("--datastore", folder, "--knn-lambda", 0.8)), "H")
        for folder in (world.datastore, copied)
    )
    texts = [[translations[number].split("\t")[1] for number in sorted(exact)] for translations in (exact, approximate)]
    bleu = sacrebleu.corpus_bleu(texts[1], [texts[0]], tokenize="none", force=True).score
    assert bounds[0] <= bleu < bounds[1]


def test_scores_equal_a_dense_float64_computation(world: World, decode: Callable) -> None:
    """p(y_t | x, y_<t) of what beam search wrote, computed again by brute force over the whole store and vocabulary."""
    k, lam, temperature = 8, 0.6, 5.0
    found = decode("--knn-k", k, "--knn-lambda", lam, "--batch-size", 1)
    store = TokenDatastore(world.datastore)
    keys = np.asarray(store.keys, dtype=np.float64)
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    dataset = task.dataset("test")
    model = load_model(str(world.model), task, torch.device("cpu"), fp16=False)
    for sentence in (0, 11, PAIRS["test"] - 1):
        best = found[sentence][0]
        item = dataset[sentence]
        sample = dataset.collater([{**item, "target": best["tokens"]}])
        with torch.no_grad():
            features, _ = model(**sample["net_input"], features_only=True)
            p = model.decoder.output_layer(features)[0].double().softmax(1).numpy()
        for t, token in enumerate(best["tokens"].tolist()):
            distances = ((keys - features[0, t].double().numpy()) ** 2).sum(1)
            nearest = np.argsort(distances, kind="stable")[:k]
            weights = np.exp(-(distances[nearest] - distances[nearest[0]]) / temperature)
            retrieved = weights[store.values[nearest] == token].sum() / weights.sum()
            wanted = np.log((1 - lam) * p[t, token] + lam * retrieved)
            assert abs(best["positional_scores"][t].item() - wanted) < 5e-3


def test_scoring_a_hypothesis_gives_the_score_beam_search_gave(check_rescoring: Callable) -> None:
    check_rescoring("--knn-lambda", 0.6)


def test_ensembles_mix_with_the_member_the_datastore_belongs_to(world: World, decode: Callable) -> None:
    single = decode("--knn-lambda", 1, "--beam", 1)
    for members in (f"{world.model}:{world.other_model}", f"{world.other_model}:{world.model}"):
        path = ["--path", members]
        assert equal(decode(*path, "--knn-lambda", 0), decode(*path, base=True))
        alone = decode(*path, "--knn-lambda", 1, "--beam", 1)
        assert all(torch.equal(alone[i][0]["tokens"], single[i][0]["tokens"]) for i in single)


def test_datastore_of_the_answers_gives_the_answers(world: World, decode: Callable, tmp_path: Path) -> None:
    """An oracle: with the test pairs themselves in the store, retrieval writes the references, the model does not."""
    build(world, tmp_path / "oracle", "--subset", "test")
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    targets = task.dataset("test").tgt

    def right(found: dict) -> int:
        return sum(torch.equal(found[i][0]["tokens"], targets[i]) for i in found)

    whole = ["--max-len-b", 45]
    keen = ["--datastore", tmp_path / "oracle", "--knn-lambda", 0.95, "--knn-k", 4, "--knn-temperature", 0.5]
    assert right(decode(*keen, *whole)) >= 0.6 * PAIRS["test"]
    assert right(decode(*whole, base=True)) <= 0.2 * PAIRS["test"]


def test_one_search_a_sentence_at_the_first_step(decode: Callable) -> None:
    sizes = []
    search = TokenRetriever.search

    def watched(self: TokenRetriever, queries: torch.Tensor, k: int) -> Neighbours:
        sizes.append(len(queries))
        return search(self, queries, k)

    with patch.object(TokenRetriever, "search", watched):
        decode("--batch-size", 8, "--beam", 5)
    assert sizes[0] == 8 and sizes[1] == 40


def test_more_neighbours_than_the_store_has(world: World, decode: Callable, tmp_path: Path) -> None:
    build(world, tmp_path / "small", "--subset", "valid")
    size = TokenDatastore(tmp_path / "small").section.size
    store = ["--datastore", tmp_path / "small", "--beam", 1, "--batch-size", 4]
    assert equal(decode(*store, "--knn-k", size + 50), decode(*store, "--knn-k", size), tolerance=1e-5)


def signature(world: World, *extra: object) -> str:
    """What a decoding logs of its retrieval."""
    parsed = parse_generation(world.options(*extra))
    task, models = load(parsed)
    return task.build_generator(models, parsed.generation).model.signature()


def output(text: str, kind: str) -> dict[int, str]:
    """The lines of fairseq's output of one kind, by sentence."""
    return {int(i): rest for i, rest in re.findall(rf"^{kind}-(\d+)\t(.*)$", text, flags=re.MULTILINE)}


def test_interactive_equals_generate_and_takes_empty_lines(world: World, tmp_path: Path) -> None:
    settings = ["--knn-lambda", 0.6, "--knn-k", 4]
    generated = call("fairseq-generate", *world.options(*settings, "--batch-size", 4)).stdout
    pieces = (world.data_bin / "text" / "test.de").read_text(encoding="utf-8").splitlines()
    (tmp_path / "input").write_text("\n".join([*pieces, "", pieces[0]]) + "\n", encoding="utf-8")
    words = world.options(*settings, "--input", tmp_path / "input", "--buffer-size", 64, "--batch-size", 4)
    typed = run("fairseq-interactive", *words)
    texts = {i: line.split("\t", 1)[1] for i, line in output(typed.stdout, "H").items()}
    assert len(texts) == PAIRS["test"] + 2 and texts[0] == texts[PAIRS["test"] + 1]
    assert {i: line.split("\t", 1)[1] for i, line in output(generated, "H").items()}.items() <= texts.items()
    assert "retrieval signature: retriever:TokenRetriever|" in typed.stdout + typed.stderr
    assert "|k:4|lambda:0.6|T:5.0|lambda*:no|" in typed.stdout + typed.stderr


def test_approximate_index_translates_like_the_exact_one(world: World, decode: Callable, tmp_path: Path) -> None:
    build(world, tmp_path / "ivf", "--index", "IVF32,Flat", "--index-parameters", "nprobe=32")
    same = decode("--datastore", tmp_path / "ivf", "--knn-lambda", 0.6)
    assert equal(same, decode("--knn-lambda", 0.6), tolerance=5e-3)


def test_last_ffn_input_is_what_the_decoder_queries_with(world: World, decode: Callable, tmp_path: Path) -> None:
    """An oracle store finds every reference token at distance zero only if queries are read where keys were."""
    build(world, tmp_path / "ffn", "--subset", "test", "--key-layer", "last_ffn_input")
    found = decode("--datastore", tmp_path / "ffn", "--knn-lambda", 1, "--knn-k", 1, "--score-reference")
    assert np.mean([(h[0]["positional_scores"] > -1e-3).float().mean().item() for h in found.values()]) > 0.99


def test_share_of_one_can_end_a_sentence_whatever_the_policy(world: World) -> None:
    """At the greatest length only </s> may follow, and it need not be among the neighbours."""
    words = user_dir_options(world, "--knn-lambda", 1, "--max-len-b", 3)
    assert len(output(run("fairseq-generate", *words).stdout, "H")) == PAIRS["test"]


def user_dir_options(world: World, *extra: object) -> list[str]:
    """Options of fairseq-generate for the worked example."""
    words = [w if w != str(ROOT / "fairseq_ccpr") else str(ROOT / "user_dir") for w in world.options(*extra)]
    words[words.index("translation_retrieval")] = "translation_agreement"
    return words


def test_worked_example_of_a_user_dir(world: World) -> None:
    done = run("fairseq-generate", *user_dir_options(world))
    assert "|weight:agreement_weight|" in done.stdout + done.stderr
    assert output(done.stdout, "H") != output(call("fairseq-generate", *world.options()).stdout, "H")


def test_half_precision_model_is_the_same_model(world: World) -> None:
    words = world.options("--knn-lambda", 0.6, "--beam", 1)
    whole, half = (
        {
            number: line.split("\t")
            for number, line in output(call("fairseq-generate", *words, *extra).stdout, "H").items()
        }
        for extra in ([], ["--fp16"])
    )
    same = [number for number, (_, text) in whole.items() if half[number][1] == text]
    assert len(same) >= 0.8 * PAIRS["test"]
    for number in same:
        assert float(half[number][0]) == pytest.approx(float(whole[number][0]), abs=0.05)
