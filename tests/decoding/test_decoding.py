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

from fairseq_ccpr import Translator
from fairseq_ccpr.building.token_build import load_model, load_task
from fairseq_ccpr.datastore.source_index import SentenceMemory
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_memory import DEEP, TokenMemory
from fairseq_ccpr.decoding.token_retriever import Neighbours, TokenRetriever
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.search.faiss_index import automatic_factory
from fairseq_ccpr.text.pairs import read_pairs
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
def test_share_of_zero_equals_the_model_alone_to_the_bit(decode: Callable, search: list) -> None:
    """And that is stock fairseq, but for rounding."""
    assert equal(decode(*search, "--tokens-lambda", 0), decode(*search, base=True))
    assert equal(decode(*search, base=True), decode(*search, stock=True), tolerance=1e-4)


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_retrieval_changes_every_kind_of_search(decode: Callable, search: list) -> None:
    assert not equal(decode(*search, "--tokens-lambda", 0.8), decode(*search, base=True), tolerance=1e-2)


@pytest.mark.parametrize("likeness", [0, 6])
def test_retrieval_does_not_depend_on_the_batch(decode: Callable, likeness: float) -> None:
    words = ["--tokens-lambda", 0.6, "--tokens-likeness", likeness]
    together = decode(*words)
    for size in (1, 7):
        assert equal(decode(*words, "--batch-size", size), together, tolerance=2e-3)


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
        output_of(
            call("fairseq-generate", *world.options("--datastore", folder, "--tokens-lambda", 0.8)), "H"
        )
        for folder in (world.datastore, copied)
    )
    texts = [
        [translations[number].split("\t")[1] for number in sorted(exact)]
        for translations in (exact, approximate)
    ]
    bleu = sacrebleu.corpus_bleu(texts[1], [texts[0]], tokenize="none", force=True).score
    assert bounds[0] <= bleu < bounds[1]


@pytest.mark.parametrize("likeness", [0.0, 6.0])
def test_scores_equal_a_dense_float64_computation(world: World, decode: Callable, likeness: float) -> None:
    """p(y_t | x, y_<t) of what beam search wrote, computed again by brute force over the whole store and vocabulary."""
    k, lam, temperature = 8, 0.6, 5.0
    found = decode("--tokens-k", k, "--tokens-lambda", lam, "--tokens-likeness", likeness, "--batch-size", 1)
    store = TokenDatastore(world.datastore)
    assert store.source_index is not None
    sentences = SentenceMemory(store.source_index, [], np.empty(0, np.int64))
    keys = np.asarray(store.keys, dtype=np.float64)
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    dataset = task.dataset("test")
    model = load_model(str(world.model), task, torch.device("cpu"), fp16=False)
    for sentence in (0, 11, PAIRS["test"] - 1):
        best = found[sentence][0]
        item = dataset[sentence]
        sims = sentences.likeness([task.source_subwords(item["source"])]).sims[0].astype(np.float64)
        sample = dataset.collater([{**item, "target": best["tokens"]}])
        with torch.no_grad():
            features, _ = model(**sample["net_input"], features_only=True)
            p = model.decoder.output_layer(features)[0].double().softmax(1).numpy()
        for t, token in enumerate(best["tokens"].tolist()):
            distances = ((keys - features[0, t].double().numpy()) ** 2).sum(1)
            nearest = np.argsort(distances, kind="stable")[: DEEP if likeness else k]
            logits = -distances[nearest] / temperature + likeness * (sims[store.provenance[nearest, 0]] - 1)
            best_k = np.argsort(-logits, kind="stable")[:k]
            nearest, weights = nearest[best_k], np.exp(logits[best_k] - logits.max())
            retrieved = weights[store.values[nearest] == token].sum() / weights.sum()
            wanted = np.log((1 - lam) * p[t, token] + lam * retrieved)
            assert abs(best["positional_scores"][t].item() - wanted) < 5e-3


@pytest.mark.parametrize("likeness", [0, 6])
def test_scoring_a_hypothesis_gives_the_score_beam_search_gave(
    check_rescoring: Callable, likeness: float
) -> None:
    check_rescoring("--tokens-lambda", 0.6, "--tokens-likeness", likeness)


def test_what_was_learned_is_like_its_source_and_forgotten_as_if_it_never_was(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    """Its sentence counts as one of the datastore's own does, which no longer counts itself if its source is the same."""
    folder = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    words = ["--datastore", folder, "--tokens-lambda", 0.6, "--tokens-likeness", 6, "--beam", 2]
    before = decode(*words)
    with Translator(datastore=folder, device="cpu", tokens_likeness=6) as translator:
        own = TokenDatastore(folder)
        first, _ = next(iter(read_pairs(world.folder / "train.tsv")))
        source = translator.task.read_as(first).ids
        learned = translator.learn(first, "He came.").id
        memory = translator.ensemble.find(TokenMemory).learned
        rows = torch.arange(own.section.size, own.section.size + memory.entries.index.size)
        sims, best = memory.entries.sentences.likeness([np.array(source)])
        assert (
            best.tolist() == pytest.approx([1.0])
            and (sims[0, memory.entries.sentences_of(rows)] == best).all()
        )
        assert not equal(decode(*words), before)
        translator.forget(learned)
    assert equal(decode(*words), before)


def test_ensembles_mix_with_the_member_the_datastore_belongs_to(world: World, decode: Callable) -> None:
    single = decode("--tokens-lambda", 1, "--beam", 1)
    for members in (f"{world.model}:{world.other_model}", f"{world.other_model}:{world.model}"):
        path = ["--path", members]
        assert equal(decode(*path, "--tokens-lambda", 0), decode(*path, base=True))
        alone = decode(*path, "--tokens-lambda", 1, "--beam", 1)
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
    keen = [
        "--datastore",
        tmp_path / "oracle",
        "--tokens-lambda",
        0.95,
        "--tokens-k",
        4,
        "--tokens-temperature",
        0.5,
    ]
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
    assert equal(decode(*store, "--tokens-k", size + 50), decode(*store, "--tokens-k", size), tolerance=1e-5)


def signature(world: World, *extra: object) -> str:
    """What a decoding logs of its retrieval."""
    parsed = parse_generation(world.options(*extra))
    task, models = load(parsed)
    return task.build_generator(models, parsed.generation).model.signature()


def output(text: str, kind: str) -> dict[int, str]:
    """The lines of fairseq's output of one kind, by sentence."""
    return {int(i): rest for i, rest in re.findall(rf"^{kind}-(\d+)\t(.*)$", text, flags=re.MULTILINE)}


def test_interactive_equals_generate_and_takes_empty_lines(world: World, tmp_path: Path) -> None:
    settings = ["--tokens-lambda", 0.6, "--tokens-k", 4]
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


def test_approximate_index_translates_like_the_exact_one(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    build(world, tmp_path / "ivf", "--index", "IVF32,Flat", "--index-parameters", "nprobe=32")
    same = decode("--datastore", tmp_path / "ivf", "--tokens-lambda", 0.6)
    assert equal(same, decode("--tokens-lambda", 0.6), tolerance=5e-3)


def test_last_ffn_input_is_what_the_decoder_queries_with(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    """An oracle store finds every reference token at distance zero only if queries are read where keys were."""
    build(world, tmp_path / "ffn", "--subset", "test", "--key-layer", "last_ffn_input")
    found = decode(
        "--datastore", tmp_path / "ffn", "--tokens-lambda", 1, "--tokens-k", 1, "--score-reference"
    )
    assert np.mean([(h[0]["positional_scores"] > -1e-3).float().mean().item() for h in found.values()]) > 0.99


def test_share_of_one_can_end_a_sentence_whatever_the_policy(world: World) -> None:
    """At the greatest length only </s> may follow, and it need not be among the neighbours."""
    words = user_dir_options(world, "--tokens-lambda", 1, "--max-len-b", 3)
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
    words = world.options("--tokens-lambda", 0.6, "--beam", 1)
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
