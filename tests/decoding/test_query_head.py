"""Queries of phrases from the translation model's own states."""

from __future__ import annotations

import copy
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_retriever import query_segmentation
from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.models.key_layer import EncodedSources
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation, candidate_spans
from fairseq_ccpr.models.query_head import QueryHead, load_query_head
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import collate
from tests.helpers import USER_DIR, call, refused, run
from tests.small_models import Ccpr, World, other_encoder

ACCURACY = re.compile(r"valid on 'valid' subset .*cosine ([\d.]+) \| accuracy ([\d.]+)")


@dataclass
class Trained:
    """A head, and what its training logged."""

    checkpoint: Path
    log: str


def training(world: World, ccpr: Ccpr, save_dir: Path, updates: int, *extra: object) -> list[object]:
    words = (
        f"--user-dir {USER_DIR} --task phrase_queries --arch phrase_query_head --criterion query_distillation --cpu "
    )
    words += "--head-dim 32 --head-attention-heads 2 --dropout 0 --optimizer adam --lr 5e-3 --max-tokens 1500 "
    words += "--num-workers 0 "
    words += (
        "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-format simple --valid-sentences 40"
    )
    of_models = ["--translation-model", world.model, "--phrase-encoder", ccpr.checkpoint, "--text", ccpr.pairs]
    where = ["--save-dir", save_dir, "--max-update", updates, "--no-epoch-checkpoints"]
    return ["fairseq-train", world.data_bin, *words.split(), *of_models, *where, *extra]


@pytest.fixture(scope="module")
def trained(world: World, ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("queries")
    log = run(*training(world, ccpr, folder, 60)).stdout
    return Trained(folder / "checkpoint_best.pt", log)


@pytest.fixture
def encoder(world: World) -> Any:
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(world.model)], arg_overrides={"data": str(world.data_bin)}
    )
    return models[0].encoder.eval()


@pytest.fixture
def head(trained: Trained, encoder: Any) -> QueryHead:
    return load_query_head(trained.checkpoint, [encoder])


def sentences(ccpr: Ccpr, count: int) -> list[str]:
    return [source for source, _ in read_pairs(ccpr.pairs)][:count]


def test_training_comes_near_to_the_phrase_encoder(trained: Trained, ccpr: Ccpr, head: QueryHead) -> None:
    found = [tuple(map(float, one)) for one in ACCURACY.findall(trained.log)]
    assert len(found) > 1 and found[-1][0] > found[0][0] + 0.05 and found[-1][1] > 3 * found[0][1]
    teacher = PhraseEncoder.load(ccpr.checkpoint)
    assert head.teacher == teacher.fingerprint() and head.dimension == teacher.dimension
    texts, everything = sentences(ccpr, 30), Segmentation("all", max_words=3)
    wanted, given = (PhraseFinder(one, everything).find(texts) for one in (teacher, head))
    rows = {tuple(span): row for row, span in enumerate(wanted.spans.tolist())}
    pairs = [(rows[tuple(span)], row) for row, span in enumerate(given.spans.tolist()) if tuple(span) in rows]
    of_teacher, of_head = map(list, zip(*pairs))
    cosines = (wanted.vectors[of_teacher] * given.vectors[of_head]).sum(dim=1)
    shuffled = (wanted.vectors[of_teacher[::-1]] * given.vectors[of_head]).sum(dim=1)
    assert cosines.mean() > shuffled.mean() + 0.2


def test_vectors_are_those_of_a_plain_reference(head: QueryHead, encoder: Any, ccpr: Ccpr) -> None:
    """In float64, one sentence and one span at a time, with the formula as the docstring has it."""
    text = sentences(ccpr, 1)[0]
    subwords = head.context.tokenizer.encode(text)
    found = PhraseFinder(head, Segmentation("all", max_words=3)).find([text])
    with torch.no_grad():
        states = encoder(
            torch.tensor([subwords.ids[1:]]), torch.tensor([len(subwords.ids) - 1]), return_all_hiddens=True
        )
        layers = states["encoder_states"]
        own = torch.cat([layers[0], layers[len(layers) // 2], states["encoder_out"][0]], dim=2)[:, 0].double()
        plain = in_float64(head)
        mixed = torch.cat([torch.zeros(1, own.size(1), dtype=torch.float64), own])
        h = plain.norm(plain.layer(plain.mix(mixed)[None]))[0]
        spans = candidate_spans(subwords, 1, 3)
        rows = {(start, end): (first, last) for start, end, first, last in spans.tolist()}
        assert len(rows) == len(found.spans) > 3
        for (_, start, end), probability, vector in zip(found.spans.tolist(), found.probabilities, found.vectors):
            first, last = rows[start, end]
            ends = torch.cat([h[first], h[last]])
            wanted = plain.align_out(torch.nn.functional.gelu(plain.align(ends)))
            assert torch.allclose(vector.double(), wanted / wanted.norm(), atol=1e-4)
            logit = plain.segment_out(torch.nn.functional.gelu(plain.segment(ends)))
            assert abs(probability.item() - torch.sigmoid(logit).item()) < 1e-4


def in_float64(head: QueryHead) -> Any:
    """Return copies of the layers of a head."""
    names = ("mix", "layer", "norm", "align", "align_out", "segment", "segment_out")
    return SimpleNamespace(**{name: copy.deepcopy(getattr(head, name)).double() for name in names})


def test_results_do_not_depend_on_the_batch(head: QueryHead, ccpr: Ccpr) -> None:
    texts = sentences(ccpr, 12)
    finder = PhraseFinder(head, Segmentation("learned", 0.5, 3))
    together = finder.find(texts)
    for number, text in enumerate(texts):
        alone, rows = finder.find([text]), together.spans[:, 0] == number
        assert np.array_equal(alone.spans[:, 1:], together.spans[rows, 1:])
        assert torch.allclose(alone.vectors, together.vectors[torch.from_numpy(rows)], atol=1e-5)


def test_half_precision_changes_little(head: QueryHead, trained: Trained, encoder: Any, ccpr: Ccpr) -> None:
    """Of the weights, as fairseq trains on a GPU, and of the computation."""
    texts, everything = sentences(ccpr, 8), Segmentation("all", max_words=3)
    wanted = PhraseFinder(head, everything).find(texts)
    for other in (
        load_query_head(trained.checkpoint, [copy.deepcopy(encoder).half()], bf16=True),
        load_query_head(trained.checkpoint, [encoder]).half(),
        load_query_head(trained.checkpoint, [encoder], bf16=True),
    ):
        found = PhraseFinder(other, everything).find(texts)
        assert np.array_equal(found.spans, wanted.spans)
        assert (found.vectors * wanted.vectors).sum(dim=1).min() > 0.99


def test_decoding_asks_with_it(
    trained: Trained, world: World, phrase_store: Path, phrases: list[object], tmp_path: Path, decode: Callable
) -> None:
    (tmp_path / "in.txt").write_text("Und Gott sprach zu Noah.\n", encoding="utf-8")
    words = [
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "--input",
        tmp_path / "in.txt",
        "--cpu",
        "--max-len-b",
        45,
    ]
    shown = call("translate", *words, *phrases, "--phrase-queries", trained.checkpoint)
    assert re.search(r"query:all>0\.5<=3words,head:[0-9a-f]{12}\|k:3\|", shown.stderr)
    own, by_head = (
        {n: hypotheses[0]["score"].item() for n, hypotheses in decode(*phrases, *extra).items()}
        for extra in ([], ["--phrase-queries", trained.checkpoint])
    )
    assert own.keys() == by_head.keys() and own != by_head


def test_what_is_retrieved_is_what_the_head_asks_for(
    trained: Trained, world: World, head: QueryHead, phrases: list[object]
) -> None:
    words = world.options(*phrases, "--phrase-queries", trained.checkpoint)
    cfg = parse_generation(words)
    task, models = load(cfg)
    memory = task.build_ensemble(models).memory("phrases")
    retriever = memory.candidates.retriever
    assert isinstance(retriever.encoder, PhraseEncoder)  # for what is learned
    texts = ["Und Gott sprach zu Noah.", "Er ging hinaus."]
    found = PhraseFinder(head, retriever.finder.segmentation).find(texts)
    scores, _ = ExactIndex(torch.from_numpy(np.array(retriever.datastore.keys)).float(), "ip").search(found.vectors, 1)
    retrieved = [phrase for sentence in retriever.retrieve(texts) for phrase in sentence]
    assert [(texts[n][a:b]) for n, a, b in found.spans.tolist()] == [phrase.string for phrase in retrieved]
    for query, score in zip(retrieved, scores[:, 0].tolist()):
        assert not query.retrieved or abs(query.retrieved[0].score - score) < 1e-2


def test_states_that_the_model_has_are_read(head: QueryHead, encoder: Any, ccpr: Ccpr) -> None:
    """On whichever side the padding is; where the model has other subwords they are computed."""
    texts = sentences(ccpr, 9)
    texts[4] = texts[4] + " " + texts[5]
    finder, pad = PhraseFinder(head, Segmentation("all", max_words=3)), head.context.tokenizer.pad
    wanted = finder.find(texts)
    ids = [torch.tensor(head.context.tokenizer.encode(text).ids[1:]) for text in texts]
    for left in (True, False):
        tokens = data_utils.collate_tokens(ids, pad, left_pad=left)
        with torch.no_grad():
            states = head.context.join(encoder(tokens, tokens.ne(pad).sum(dim=1), return_all_hiddens=True))
        encoded = EncodedSources(tokens, states, pad)
        order = random.sample(range(len(texts)), len(texts))
        asked = [head.context.tokenizer.encode(texts[row]) for row in order]
        known, computed = encoded.states_of(collate(asked, pad), order), head.context(collate(asked, pad))
        assert known is not None
        for row, one in enumerate(asked):
            assert torch.allclose(known[row, : len(one.ids)], computed[row, : len(one.ids)], atol=1e-5)
        assert encoded.states_of(collate(asked, pad), order[::-1]) is None
        found = finder.find(texts, encoded)
        assert np.array_equal(found.spans, wanted.spans)
        assert torch.allclose(found.vectors, wanted.vectors, atol=1e-4)
        others = finder.find(texts[::-1], encoded)
        assert torch.equal(others.vectors, finder.find(texts[::-1]).vectors)


def test_decoding_encodes_a_sentence_once(trained: Trained, world: World, phrases: list[object]) -> None:
    task, models = load(parse_generation(world.options(*phrases, "--phrase-queries", trained.checkpoint)))
    ensemble = task.build_ensemble(models)
    encoded: list[int] = []
    # fairseq calls no forward hook of the encoder itself
    models[0].encoder.layers[0].register_forward_hook(lambda *_: encoded.append(1))
    task.load_dataset("test")
    sample = next(iter(task.get_batch_iterator(task.dataset("test"), max_sentences=5).next_epoch_itr()))
    outputs = ensemble.forward_encoder({k: v for k, v in sample["net_input"].items() if k != "prev_output_tokens"})
    begun = outputs.batches[0]
    assert encoded == [1] and outputs[0]["encoder_states"] == []
    again = ensemble.memory("phrases").begin(sample["net_input"]["src_tokens"])
    again.encoded([], [])
    assert encoded == [1, 1]
    for own, other in zip(begun.phrases, again.phrases):
        assert np.array_equal(own.candidates.tokens, other.candidates.tokens) and len(own.candidates.lengths)


def test_agreement_with_the_phrase_encoder(
    trained: Trained, world: World, ccpr: Ccpr, head: QueryHead, phrase_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(texts := sentences(ccpr, 12)) + "\n", encoding="utf-8")
    words = [world.data_bin, world.model, phrase_store, trained.checkpoint, tmp_path / "in.txt"]
    shown = run("scripts/recipes/query_agreement.py", *words).stdout
    segmentation = query_segmentation(PhraseDatastore(phrase_store), PhraseSettings().threshold)
    teacher = PhraseEncoder.load(ccpr.checkpoint)
    ours, theirs = (
        dict(zip(map(tuple, found.spans.tolist()), found.vectors))
        for found in (PhraseFinder(one, segmentation).find(texts) for one in (head, teacher))
    )
    both = ours.keys() & theirs.keys()
    assert f"phrases found by the head: {len(both) / len(theirs):.0%} of {len(theirs):,}" in shown
    cosine = float(torch.stack([ours[span] @ theirs[span] for span in both]).mean())
    assert abs(float(re.search(r"cosine of the vectors: ([\d.]+)", shown)[1]) - cosine) < 0.006
    same, first = (int(percent) for percent in re.findall(r"same.*?: (\d+)%", shown))
    assert 0 < same <= 100 and 0 <= first <= 100


def test_sampling_without_a_weight_is_that_without_phrases(
    trained: Trained, phrases: list[object], decode: Callable
) -> None:
    sampled = ["--sampling", "--beam", 1, "--nbest", 1, "--seed", 3]
    with_head = decode(*phrases, *sampled, "--phrase-queries", trained.checkpoint, "--phrase-lambda", 0)
    plain = decode(*phrases, *sampled, "--phrase-lambda", 0)
    assert all(torch.equal(one[0]["tokens"], plain[number][0]["tokens"]) for number, one in with_head.items())


def test_an_ensemble_may_have_its_model_anywhere(trained: Trained, world: World, phrases: list[object]) -> None:
    both = f"{world.other_model}:{world.model}"
    task, models = load(
        parse_generation(world.options(*phrases, "--phrase-queries", trained.checkpoint, "--path", both))
    )
    asking = task.build_ensemble(models).memory("phrases").candidates.retriever.finder.encoder
    alone = load_query_head(trained.checkpoint, [models[1].encoder])
    assert isinstance(asking, QueryHead) and asking.context.fingerprint() == alone.context.fingerprint()


def test_tuning_remembers_it_and_none_turns_it_off(
    trained: Trained, world: World, phrase_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shutil.copytree(phrase_store, tmp_path / "store")
    words = ["--path", world.model, "--cpu", "--max-len-b", 25, "--quiet"]
    monkeypatch.chdir(trained.checkpoint.parent)  # a relative path is kept as an absolute one
    tune = ["tune", world.data_bin, "--subset", "test", "--datastore", store, *words[:-1], "--no-progress-bar"]
    call(*tune, "--combiner", "fixed", "--decode", 1, "--phrase-queries", trained.checkpoint.name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("Und Gott sprach zu Noah.\n", encoding="utf-8")
    asked = ["translate", "--data", world.data_bin, "--datastore", store, "--input", tmp_path / "in.txt", *words]
    assert "head:" in call(*asked).stderr
    assert "head:" not in call(*asked, "--phrase-queries", "none").stderr


def test_what_it_cannot_work_with_is_refused(
    trained: Trained, world: World, ccpr: Ccpr, encoder: Any, phrases: list[object], tmp_path: Path
) -> None:
    def decoded(path: object, *extra: object) -> Any:
        words = [*phrases, "--phrase-queries", path, *extra]
        return call("fairseq-generate", *world.options(*words), check=False)

    refused(decoded(tmp_path / "none.pt"), "there is no query head .*none.pt: train one with")
    no_checkpoint = tmp_path / "text.pt"
    no_checkpoint.write_text("no checkpoint\n")
    for path in (ccpr.checkpoint, world.model, no_checkpoint):
        refused(decoded(path), f"{path.name}(: | is no query head)")
    refused(
        decoded(trained.checkpoint, "--path", world.other_model), "was trained for another translation model, or other"
    )
    other = Ccpr(ccpr.pairs, ccpr.context, ccpr.phrases, other_encoder(ccpr, tmp_path / "other"), "")
    call(*training(world, other, tmp_path / "of-other", 1))
    refused(decoded(tmp_path / "of-other/checkpoint_last.pt"), "imitates the phrase encoder .*: train one for theirs")
    again = training(world, ccpr, tmp_path / "of-other", 2)
    refused(call(*again, check=False), "of-other holds a query head of another translation model or phrase encoder")
    state = torch.load(trained.checkpoint)
    del state["model"]["mix.bias"]
    torch.save(state, tmp_path / "of-other/damaged.pt")
    with pytest.raises(CheckpointError, match=r"damaged\.pt is no query head"):
        load_query_head(tmp_path / "of-other/damaged.pt", [encoder])


def test_bad_training_input(world: World, ccpr: Ccpr, tmp_path: Path) -> None:
    def trains(*extra: object) -> Any:
        return call(*training(world, ccpr, tmp_path / "run", 1, *extra), check=False)

    refused(trains("--text", ""), "--text is missing")
    refused(trains("--text", tmp_path / "no.txt"), "--text: there is no file .*no.txt")
    refused(
        trains("--valid-sentences", 300),
        "--text has 300 sentences, of which --valid-sentences holds out 300: give more",
    )
    refused(
        trains("--head-dim", 30, "--head-attention-heads", 4), "--head-dim is 30, and --head-attention-heads 4: give"
    )
    refused(trains("--valid-sentences", 0), "--valid-sentences is 0: give at least 1")
    refused(trains("--best-checkpoint-metric", "loss"), "validates by retrieval accuracy")
    refused(trains("--phrase-encoder", tmp_path / "no.pt"), "there is no phrase encoder .*no.pt")
    refused(trains("--translation-model", tmp_path / "no.pt"), "there is no checkpoint .*no.pt")
    (tmp_path / "bare").mkdir()
    bare = training(world, ccpr, tmp_path / "run", 1)
    bare[1] = tmp_path / "bare"
    refused(call(*bare, check=False), "bare does not have the subwords of one SentencePiece model")
    bare[1] = tmp_path / "nowhere"
    refused(call(*bare, check=False), "there is no folder .*nowhere: give what fairseq-ccpr prepare wrote")
