"""XPR: example sentences, what it is trained on, its momentum encoder and loss, against plain references."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Ccpr, World, Xpr, call, run, run_two_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import refused
from test_ccpr import gradient_of_two_processes
from torch import nn

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.errors import CheckpointError, DatastoreError
from fairseq_ccpr.evaluation import type_systems
from fairseq_ccpr.evaluation.phrase_systems import SentenceSystem
from fairseq_ccpr.evaluation.type_systems import OrthogonalTypes, TransformerTypes, load_type_system
from fairseq_ccpr.models import type_vectors
from fairseq_ccpr.models.context_encoder import ContextEncoder
from fairseq_ccpr.models.phrase_contrast_loss import alignment_losses
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.models.type_vectors import find_translations, type_means
from fairseq_ccpr.models.xpco_criterion import XpcoConfig, XpcoCriterion, false_negatives
from fairseq_ccpr.models.xpr_encoder import XprEncoder, XprEncoderConfig, pool, span_means
from fairseq_ccpr.phrases.lexicon_build import LexiconCounts, draw
from fairseq_ccpr.phrases.lexicon_dataset import LexiconDataset
from fairseq_ccpr.phrases.lexicon_split import is_near_copy, split_pairs
from fairseq_ccpr.phrases.lexicon_store import Lexicon
from fairseq_ccpr.phrases.subwords import subword_bounds
from fairseq_ccpr.phrases.text_pairs import read_lines, read_pairs
from fairseq_ccpr.phrases.text_samples import digest_of
from fairseq_ccpr.phrases.tokenizers import load_tokenizer
from fairseq_ccpr.phrases.words import word_spans

SPLITS = "train", "valid", "test"
CPU = torch.device("cpu")


def plain_examples(lines: list[str], phrase: str, most: int) -> list[tuple[str, int, int]]:
    """Every sentence against the phrase: whole words, ten characters more, those of lowest digest, the first place."""
    found = {}
    for line in lines:
        starts, ends = zip(*word_spans(line)) if line.strip() else ((), ())
        places = [
            (a, a + len(phrase)) for a in starts if a + len(phrase) in ends and line[a : a + len(phrase)] == phrase
        ]
        if places and len(line) >= len(phrase) + 10:
            found[line] = places[0]
    return [(line, *found[line]) for line in sorted(found, key=digest_of)[:most]]


def test_examples_equal_a_brute_force_search(xpr: Xpr):
    for split, side in itertools.product(SPLITS, (0, 1)):
        types, lines = Lexicon(xpr.lexicon / split).sides[side], list(read_lines(xpr.texts[side]))
        for number in range(0, len(types), 7):
            stored = [types.example(number, place) for place in range(types.counts[number])]
            assert stored and stored == plain_examples(lines, types.phrases[number], 6)


def test_pairs_are_those_with_examples_and_no_string_is_in_two_splits(xpr: Xpr):
    lines = [list(read_lines(path)) for path in xpr.texts]
    wanted = {
        pair
        for pair in read_pairs(xpr.pairs)
        if not is_near_copy(*pair) and all(plain_examples(lines[side], pair[side], 1) for side in (0, 1))
    }
    found, strings = [], []
    for split in SPLITS:
        lexicon = Lexicon(xpr.lexicon / split)
        lexicon.check()
        found.append({(lexicon.sides[0].phrases[p], lexicon.sides[1].phrases[q]) for p, q in lexicon.pairs.tolist()})
        strings.append({string.casefold() for pair in found[-1] for string in pair})
    assert set().union(*found) == wanted and sum(map(len, found)) == len(wanted)
    assert not any(one & two for one, two in itertools.combinations(strings, 2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60, unique=True))
def test_split_shares_no_string_and_loses_no_pair(numbers: list[tuple[int, int]]):
    pairs = [(f"a{p}", f"{'A' if q < 3 else 'b'}{q}") for p, q in numbers]  # the case of a letter makes no other string
    parts = split_pairs(pairs)
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    assert parts == split_pairs(pairs[::-1])
    strings = [{string.casefold() for pair in part for string in pair} for part in parts.values()]
    assert not any(one & two for one, two in itertools.combinations(strings, 2))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40, unique=True), st.integers(1, 30))
def test_no_translation_is_lost_between_phrases_that_are_drawn(numbers: list[tuple[int, int]], limit: int):
    pairs = [(f"a{p}", f"b{q}") for p, q in numbers]
    counts = LexiconCounts()
    chosen = draw(pairs, limit, counts)
    sources, targets = ({pair[side] for pair in chosen} for side in (0, 1))
    assert set(chosen) == {pair for pair in pairs if pair[0] in sources and pair[1] in targets}
    assert min(limit, len(pairs)) <= len(chosen) == len(pairs) - counts.not_drawn
    assert set(draw(pairs, max(1, limit // 2), LexiconCounts())) <= set(chosen)
    assert draw(pairs, None, counts) == pairs and counts.not_drawn == 0


@pytest.mark.parametrize(
    ("source", "target", "copy"),
    [
        ("a b c", "A b c", True),
        ("a b", "a c", False),
        ("a b c", "b c", True),
        ("a b", "b a", False),
        ("x", "y z", False),
    ],
)
def test_near_copies(source: str, target: str, copy: bool):
    assert is_near_copy(source, target) is copy


def build(
    xpr: Xpr, output: Path, pairs: str, text: str | None = None, *extra: object
) -> subprocess.CompletedProcess[str]:
    """Build a lexicon of other pairs, or other text on both sides."""
    table, other = output.with_suffix(".tsv"), output.with_suffix(".txt")
    table.write_text(pairs, encoding="utf-8")
    other.write_text(text or "", encoding="utf-8")
    texts = xpr.texts if text is None else (other, other)
    words = ["--pairs", table, "--source-text", texts[0], "--target-text", texts[1], "--output", output, *extra]
    return call("build_lexicon_dataset", *words, check=False)


TEXT = "\n".join(f"the quick {w} is here today" for w in "abcdefghijklmno") + "\n\n"
PAIRS = "".join(f"quick {w}\t{w} is\n" for w in "abcdefghijklmno")


def test_bad_pairs_are_counted(xpr: Xpr, tmp_path: Path):
    extra = "quick a\ta is\n\n...\tx\nquick Zebra\tquick zebra\nno such\ta is\nquick a\tis here\n"
    done = build(xpr, tmp_path / "one", PAIRS + extra, TEXT)
    assert done.returncode == 0, done.stderr
    assert (
        "21 phrase pairs: 2 without letters, 1 repeated and 1 near-copies left out; 1 without an example" in done.stdout
    )
    lexicons = [Lexicon(tmp_path / "one" / split) for split in SPLITS]
    assert sum(len(lexicon.pairs) for lexicon in lexicons) == 16  # one to many is kept
    kept = build(xpr, tmp_path / "two", PAIRS + extra, TEXT, "--keep-phrases-alone", "--limit", 17, "--examples", 40)
    assert kept.returncode == 0, kept.stderr
    sides = [side for split in SPLITS for side in Lexicon(tmp_path / "two" / split).sides]
    assert sorted({int(count) for side in sides for count in side.counts}) == [0, 1, 15]  # fewer than asked for


def test_builds_that_are_refused_leave_nothing(xpr: Xpr, tmp_path: Path):
    refused(
        build(xpr, tmp_path / "a", PAIRS, "\n\n"), "leaves no phrase pair for 'train': 15 read.*15 without an example"
    )
    refused(build(xpr, tmp_path / "b", "a\tb\tc\n", TEXT), "3 columns")
    refused(build(xpr, tmp_path / "c", PAIRS, TEXT, "--examples", 0), "--examples is 0")
    refused(build(xpr, xpr.lexicon, PAIRS, TEXT), "--output .* exists")
    refused(build(xpr, tmp_path / "d", "", TEXT), "0 read")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    refused(build(xpr, tmp_path / "e", PAIRS, TEXT, "--source-text", tmp_path / "no"), "there is no file .*no")


def test_a_lexicon_is_checked(xpr: Xpr, tmp_path: Path):
    with pytest.raises(
        DatastoreError, match=r"there are no lexicon phrases at .*give one of its folders, such as train"
    ):
        Lexicon(xpr.lexicon)
    with pytest.raises(DatastoreError, match="holds no lexicon phrases"):
        Lexicon(xpr.context.parent / "phrases" / "train")


def test_pooled_vectors_equal_a_plain_loop(xpr: Xpr):
    encoder, dataset = XprEncoder.load(xpr.checkpoint), make_dataset(xpr)
    batch = dataset.collater([dataset[i] for i in range(9)])
    with torch.no_grad():
        found, _ = encoder(batch["tables"], 18)
        pooled = pool(batch["tables"], 18, encoder.states)
    of_phrase = defaultdict(list)
    for table in batch["tables"]:
        for tokens, (_, first, last), phrase in zip(
            table["tokens"], table["spans"].tolist(), table["phrases"].tolist()
        ):
            tokens = tokens[tokens != encoder.context.tokenizer.pad]
            with torch.no_grad():
                states = encoder.context(tokens[None])[0].double()
            of_phrase[phrase].append(sum(states[at] for at in range(first, last + 1)) / (last + 1 - first))
    assert sorted(of_phrase) == list(range(18))
    for phrase, means in of_phrase.items():
        mean = (sum(means) / len(means)).float()
        torch.testing.assert_close(pooled[phrase], mean, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            vector = encoder.head(mean)
        torch.testing.assert_close(found[phrase], vector / vector.norm(), rtol=1e-4, atol=1e-5)


def make_dataset(xpr: Xpr, split: str = "train", sentences: int = 3, max_subwords: int = 60) -> LexiconDataset:
    return LexiconDataset([Lexicon(xpr.lexicon / split)], load_tokenizer(xpr.context), sentences, max_subwords, 1)


def test_examples_of_a_batch_have_their_phrases(xpr: Xpr):
    dataset = make_dataset(xpr, max_subwords=199)
    lexicon, drawn = dataset.lexicons[0], []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        drawn.append([])
        for index in range(0, len(dataset), 5):
            strings, examples, number = dataset[index]
            assert number == index
            for side, of_side in enumerate(examples):
                phrase = int(lexicon.pairs[index, side])
                assert strings[side] == lexicon.sides[side].phrases[phrase]
                texts = [one.subwords.text for one in of_side]
                assert len(set(texts)) == len(texts) == min(3, lexicon.sides[side].counts[phrase])
                for one in of_side:
                    start, end = one.subwords.starts[one.first], one.subwords.ends[one.last]
                    assert strings[side] in one.subwords.text[start : end + 1]
                drawn[-1].append(texts)
    assert drawn[0] == drawn[2] != drawn[1]
    orders = []
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        orders.append(dataset.ordered_indices().tolist())
    assert orders[0] != orders[1] and sorted(orders[0]) == list(range(len(dataset)))


@pytest.mark.parametrize(("sentences", "max_subwords"), [(0, 60), (3, 1)])
def test_without_a_sentence_the_phrase_stands_alone(xpr: Xpr, sentences: int, max_subwords: int):
    dataset = make_dataset(xpr, "train", sentences, max_subwords)
    strings, examples, _ = dataset[4]
    alone = [of_side for string, of_side in zip(strings, examples) if of_side[0].subwords.text == string]
    assert len(alone) == 2 or max_subwords == 1
    for (one,) in alone:
        assert (one.first, one.last) == (1, len(one.subwords.ids) - 2)


def reference_loss(queries, candidates, scale, own, others):
    """Equation 3 in float64, a pair at a time: a candidate that shares a string with the pair is no negative."""
    total = 0.0
    for i, x in enumerate(queries.double().numpy()):
        scores = scale * (candidates.double().numpy() @ x)
        rows = [j for j in range(len(scores)) if j == i or not {*own[i]} & {*others[j]}]
        total += np.logaddexp.reduce(scores[rows]) - scores[i]
    return total


@settings(max_examples=60, deadline=None)
@given(k=st.integers(1, 8), queue=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_loss_equals_the_reference(k: int, queue: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, y = (nn.functional.normalize(torch.randn(n, 5, generator=generator), dim=1) for n in (k, k + queue))
    strings = torch.randint(0, 4, (k + queue, 2), generator=generator)
    found = alignment_losses(x, y, 1 / 0.06, false_negatives(strings[:k], strings)).sum()
    wanted = reference_loss(x, y, 1 / 0.06, strings[:k].tolist(), strings.tolist())
    assert found.item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def make_model(xpr: Xpr, momentum: float = 0.9, queue: int = 0, dimension: int = 16) -> XprEncoder:
    torch.manual_seed(1)
    context = ContextEncoder.load(xpr.context, dropout=0.0)
    return XprEncoder(context, context.layers, dimension, momentum, queue).train()


@pytest.mark.parametrize("queue", [0, 40])
def test_criterion_equals_the_reference(xpr: Xpr, queue: int):
    model, dataset = make_model(xpr, queue=queue), make_dataset(xpr)
    with torch.no_grad():
        for parameter in model.momentum.encoder.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    criterion = XpcoCriterion(XpcoConfig(), None)
    seen = [[], [], []]
    for start in (0, 16, 32):
        batch = dataset.collater([dataset[i] for i in range(start, start + 16)])
        with torch.no_grad():
            fast, slow = model(batch["tables"], 32)
        loss, count, _ = criterion(model, batch)
        own = batch["strings"].T.tolist()
        older = [torch.cat(side[-3:])[-queue:] if side and queue else torch.empty(0, 16) for side in seen[:2]]
        names = seen[2][-queue:] if queue else []
        # In a queue the oldest go first; the order of candidates does not matter.
        wanted = sum(
            reference_loss(
                fast[a : a + 16], torch.cat([slow[16 - a : 32 - a], older[1 - a // 16]]), 1 / 0.06, own, own + names
            )
            for a in (0, 16)
        )
        assert count == 16 and loss.item() == pytest.approx(wanted, rel=1e-4)
        seen[0].append(slow[:16])
        seen[1].append(slow[16:])
        seen[2] += own


def test_gradients_never_reach_the_momentum_encoder(xpr: Xpr):
    model, dataset = make_model(xpr), make_dataset(xpr)
    batch = dataset.collater([dataset[i] for i in range(8)])
    loss, _, _ = XpcoCriterion(XpcoConfig(), None)(model, batch)
    loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in model.momentum.parameters())
    trained = [p for n, p in model.named_parameters() if not n.startswith("momentum.") and "embed_positions" not in n]
    assert all(p.grad is not None for p in trained if p.requires_grad)
    # Without a momentum encoder the gradient flows through both sides.
    plain = make_model(xpr, momentum=0.0)
    vectors, candidates = plain(batch["tables"], 16)
    assert vectors is candidates and candidates.requires_grad


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_processes_have_the_gradient_of_one(xpr: Xpr, tmp_path: Path, momentum: float):
    model, criterion = make_model(xpr, momentum), XpcoCriterion(XpcoConfig(), None)
    assert "head.0.weight" in gradient_of_two_processes(model, criterion, make_dataset(xpr), tmp_path)


def test_head_starts_as_a_rotation(xpr: Xpr):
    pooled = torch.randn(40, 32)
    for width in (32, 16, 48):  # all of it, a part, more than there is
        encoder = XprEncoder(ContextEncoder.load(xpr.context), 2, width)
        with torch.no_grad():
            vectors, sums = encoder.head(pooled), encoder.head(pooled[:20] + pooled[20:])
        linear = torch.allclose(sums, vectors[:20] + vectors[20:], rtol=1e-4, atol=1e-4)
        assert linear == (width <= 32)
        if width == 32:  # the default
            assert len(XprEncoder.build_model(XprEncoderConfig(encoder=str(xpr.context)), None).head[2].bias) == width
            torch.testing.assert_close(vectors @ vectors.T, pooled @ pooled.T, rtol=1e-4, atol=1e-4)


def test_momentum_encoder_keeps_its_precision(xpr: Xpr):
    model = make_model(xpr, momentum=0.999, queue=4).half()
    slow = list(model.momentum.encoder.parameters())
    assert all(p.dtype == torch.float32 for p in slow) and model.head[0].weight.dtype == torch.float16
    before = slow[-1].clone()
    with torch.no_grad():
        model.head[2].bias.add_(0.01)
    model.follow()
    torch.testing.assert_close(slow[-1], before.lerp(model.head[2].bias.float(), 0.001), rtol=0, atol=1e-7)
    assert not model.train().momentum.encoder.training


def parts(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The encoder and the momentum encoder of a checkpoint, by the same names."""
    weights = torch.load(path)["model"]
    inner = "momentum.encoder."
    slow = {name.removeprefix(inner): weight for name, weight in weights.items() if name.startswith(inner)}
    return {name: weights[name] for name in slow}, slow


@pytest.mark.parametrize("frequency", [1, 3])
def test_momentum_is_exact_after_steps_and_after_resuming(xpr: Xpr, tmp_path: Path, frequency: int):
    """theta_m from the checkpoints of each update, the last ones of a second run that resumes."""
    options = ["--save-interval-updates", 1, "--update-freq", frequency, "--disable-validation", "--queue", 24]
    for updates in (2, 4):
        call(*xpr.training(tmp_path, updates, *options))
    found = {torch.load(path)["optimizer_history"][-1]["num_updates"]: path for path in tmp_path.glob("checkpoint*.pt")}
    assert sorted(found) == [1, 2, 3, 4]
    checkpoints = [found[update] for update in sorted(found)]
    _, expected = parts(checkpoints[0])
    for path in checkpoints[1:]:
        fast, slow = parts(path)
        expected = {name: expected[name].lerp(fast[name], 1 - 0.9) for name in fast}
        assert any(not torch.equal(fast[name], slow[name]) for name in fast)
        for name, weight in slow.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    state = torch.load(checkpoints[-1])
    if frequency == 1:
        assert int(state["model"]["momentum.enqueued"]) == 4 * 32
    assert state["task_state"]["trained_on"] == ["de-en"]


def accuracies(log: str) -> list[float]:
    return [float(found) for found in re.findall(r"valid' subset .*?\| accuracy ([0-9.]+)", log)]


def test_training_learns_to_find_translations(xpr: Xpr):
    history = accuracies(xpr.log)
    encoder, lexicon = XprEncoder.load(xpr.checkpoint), Lexicon(xpr.lexicon / "valid")
    found, untrained = (acc(model, lexicon, 4) for model in (encoder, make_model(xpr).eval()))
    assert found > 2 * untrained
    assert found == pytest.approx(max(history), abs=5)  # training is in bf16


def acc(encoder: XprEncoder, lexicon: Lexicon, count: int) -> float:
    """acc@1 by pairs, per cent, with a plain search."""

    def encode(tokens, spans):
        return span_means(encoder.states(tokens), spans)[None]

    means = [type_means(encode, encoder.context.tokenizer, side, [count], 60, CPU)[0, 0] for side in lexicon.sides]
    with torch.no_grad():
        x, y = (encoder.project(of_side) for of_side in means)
    gold = [{q for p, q in lexicon.pairs.tolist() if p == number} for number in range(len(x))]
    back = [{p for p, q in lexicon.pairs.tolist() if q == number} for number in range(len(y))]
    forward, backward = ((x @ y.T).argmax(1).tolist(), (y @ x.T).argmax(1).tolist())
    right = [forward[p] in gold[p] for p, _ in lexicon.pairs.tolist()] + [
        backward[q] in back[q] for _, q in lexicon.pairs.tolist()
    ]
    return 100 * sum(right) / len(right)


def test_type_means_are_those_of_the_first_sentences(xpr: Xpr, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type_vectors, "BLOCK", 7)
    encoder, types = XprEncoder.load(xpr.checkpoint), Lexicon(xpr.lexicon / "valid").sides[0]
    tokenizer = encoder.context.tokenizer

    def encode(tokens, spans):
        return torch.stack([span_means(states, spans) for states in encoder.context.states_of_layers(tokens, [1, 2])])

    found = type_means(encode, tokenizer, types, [0, 1, 3, 50], 60, CPU)
    assert found.shape == (4, 2, len(types), 32)
    for number in range(0, len(types), 5):
        vectors = []
        for text, start, end in (types.example(number, i) for i in range(types.counts[number])):
            subwords = tokenizer.encode(text).cut(60)
            if (bounds := subword_bounds(subwords, start, end)) is not None:
                with torch.no_grad():
                    vectors.append(encode(torch.tensor([subwords.ids]), torch.tensor([[0, *bounds]]))[:, 0])
        for row, count in ((1, 1), (2, 3), (3, 50)):
            if vectors:
                torch.testing.assert_close(
                    found[row, :, number], torch.stack(vectors[:count]).mean(0), rtol=1e-4, atol=1e-5
                )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_any_translation_counts_and_ties_do_not(n: int, c: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (n, 3), generator=generator).float()
    candidates = torch.randint(-1, 2, (c, 3), generator=generator).float()
    gold = torch.rand(n, c, generator=generator) < 0.4
    gold[:, 0] |= ~gold.any(dim=1)
    found = find_translations(queries, candidates, gold.nonzero())
    for row, scores in enumerate(queries @ candidates.T):
        best = [at for at, score in enumerate(scores.tolist()) if score == scores.max()]
        assert bool(found[row]) == all(gold[row, at] for at in best)


def test_several_language_pairs_train_together(xpr: Xpr, tmp_path: Path):
    words = ["-s", "en", "-t", "de", "--limit", 60]
    call(
        "build_lexicon_dataset", "--pairs", flipped(xpr.pairs, tmp_path / "flipped.tsv"), "--source-text", xpr.texts[1],
        "--target-text", xpr.texts[0], "--output", tmp_path / "other", *words,
    )  # fmt: skip
    line = xpr.training(tmp_path / "run", 2)
    line[1] = f"{xpr.lexicon}:{tmp_path / 'other'}"
    call(*line)
    assert XprEncoder.load(tmp_path / "run" / "checkpoint_last.pt").trained_on == ["de-en", "en-de"]


def flipped(pairs: Path, output: Path) -> Path:
    output.write_text("".join(f"{q}\t{p}\n" for p, q in read_pairs(pairs)), encoding="utf-8")
    return output


def test_two_processes_train_one_encoder(xpr: Xpr, tmp_path: Path):
    log, _ = run_two_processes(*xpr.training(tmp_path, 2, "--queue", 100))
    assert len(accuracies(log)) == 1 and XprEncoder.load(tmp_path / "checkpoint_best.pt").dimension == 16
    assert int(torch.load(tmp_path / "checkpoint_last.pt")["model"]["momentum.enqueued"]) == 2 * 2 * 32


def test_ablations_train(xpr: Xpr, tmp_path: Path):
    plain = ["--sentences", 0, "--encoder-momentum", 0, "--phrase-dim", 0, "--layer", 1]
    call(*xpr.training(tmp_path, 1, *plain))
    encoder = XprEncoder.load(tmp_path / "checkpoint_last.pt")
    assert (encoder.layer, encoder.dimension, list(encoder.head.parameters())) == (1, 32, [])
    assert encoder.fingerprint() != XprEncoder.load(xpr.checkpoint).fingerprint()


def test_checkpoints_are_told_apart(xpr: Xpr, tmp_path: Path):
    assert isinstance(load_phrase_encoder(xpr.checkpoint), XprEncoder)
    with pytest.raises(CheckpointError, match="a XprEncoder rather than a PhraseEncoder"):
        PhraseEncoder.load(xpr.checkpoint)
    half = tmp_path / "half"
    half.mkdir()
    for path in xpr.checkpoint.parent.iterdir():
        if path.suffix != ".pt":
            (half / path.name).write_bytes(path.read_bytes())
    run("scripts/recipes/halve_checkpoint.py", xpr.checkpoint, half / "xpr.pt")
    assert XprEncoder.load(half / "xpr.pt").fingerprint() == XprEncoder.load(xpr.checkpoint).fingerprint()
    assert not [name for name in torch.load(half / "xpr.pt")["model"] if name.startswith("momentum")]


def test_training_refuses_bad_input(xpr: Xpr, tmp_path: Path):
    def train(*extra: object) -> subprocess.CompletedProcess[str]:
        return call(*xpr.training(tmp_path / "run", 1, *extra), check=False)

    refused(train("--sentences", -1), "--sentences is -1")
    refused(train("--encoder-momentum", 1), "--encoder-momentum is 1")
    refused(train("--encoder-momentum", 0, "--queue", 8), "--queue is 8: .* only with a momentum encoder")
    refused(train("--layer", 3), "--layer is 3, but the encoder .* has 2 layers")
    refused(train("--contrast-temperature", 0), "--contrast-temperature is 0")
    refused(train("--max-tokens", 100), "--max-tokens has no meaning here.*--batch-size")
    refused(train("--max-subwords", 201), "--max-subwords is 201, but the encoder .* takes 200")
    refused(train("--encoder", ""), "--encoder is not given")
    line = xpr.training(tmp_path / "run", 1)
    line[1] = xpr.lexicon / "train"
    refused(call(*line, check=False), "there are no lexicon phrases at")


def evaluate(xpr: Xpr, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    words = ["--task", "xpr", "--data", f"mine={xpr.lexicon / 'test'}", "--cpu", "--quiet", *extra]
    return call("evaluate_phrases", *words, check=check)


def test_evaluation_of_layers_and_sentences(xpr: Xpr, ccpr: Ccpr, tmp_path: Path):
    done = evaluate(
        xpr, "--encoder", f"raw={xpr.context}", f"map=orthogonal:{xpr.context}", f"xpr={xpr.checkpoint}",
        f"ccpr={ccpr.checkpoint}", "--train", xpr.lexicon / "train", "--sentences", 0, 2, 4, "--layers", 1, 2,
        "--json", tmp_path / "found.json", "--plot", tmp_path / "found.png",
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert len(found) == 3 * (2 + 2 + 2 + 1)
    settings = {one["system"]: one["training"] for one in found}
    assert settings == {"raw": "unsupervised", "map": "supervised", "xpr": "supervised", "ccpr": "other"}
    assert done.stdout.count("| mine |") == len(found) and "data mine:" in done.stdout
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    encoder, lexicon = XprEncoder.load(xpr.checkpoint), Lexicon(xpr.lexicon / "test")
    (own,) = (one for one in found if (one["system"], one["layer"], one["sentences"]) == ("xpr", 2, 4))
    assert own["forward"] == pytest.approx(forward_accuracy(encoder, lexicon, 4), abs=0.01)
    again = evaluate(xpr, "--encoder", f"xpr={xpr.checkpoint}", "--sentences", 4)  # the layer it was trained on
    assert f"| {own['forward']:.1f} | {own['backward']:.1f} |" in again.stdout


@torch.no_grad()
def forward_accuracy(encoder: XprEncoder, lexicon: Lexicon, count: int) -> float:
    """acc@1 of the source phrases, one by one, each of their first sentences by itself."""
    sides = []
    for types in lexicon.sides:
        vectors = []
        for number in range(len(types)):
            means = []
            for place in range(types.counts[number]):
                text, start, end = types.example(number, place)
                subwords = encoder.context.tokenizer.encode(text)
                if len(means) < count and (bounds := subword_bounds(subwords, start, end)) is not None:
                    states = encoder.states(torch.tensor([subwords.ids]))
                    means.append(states[0, bounds[0] : bounds[1] + 1].mean(0))
            assert means
            vectors.append(encoder.project(torch.stack(means).mean(0, keepdim=True))[0])
        sides.append(torch.stack(vectors))
    gold = {(p, q) for p, q in lexicon.pairs.tolist()}
    nearest = (sides[0] @ sides[1].T).argmax(1).tolist()
    return 100 * sum((p, q) in gold for p, q in enumerate(nearest)) / len(nearest)


def test_orthogonal_mapping_undoes_a_rotation(xpr: Xpr):
    rotation, _ = torch.linalg.qr(torch.randn(32, 32))

    class Rotated(TransformerTypes):
        def __init__(self) -> None:
            self.fingerprint = "x"

        def encode(self, lexicon, counts, show):
            generator = torch.Generator().manual_seed(1)
            y = nn.functional.normalize(torch.randn(len(lexicon.sides[1]), 32, generator=generator), dim=1)
            x = torch.zeros(len(lexicon.sides[0]), 32)
            rows = torch.from_numpy(lexicon.pairs.astype(np.int64))
            x[rows[:, 0]] = y[rows[:, 1]] @ rotation
            return {(1, 4): (x, y)}

    lexicon = Lexicon(xpr.lexicon / "valid")
    source, target = OrthogonalTypes(Rotated(), [Lexicon(xpr.lexicon / "train")]).encode(lexicon, [4], False)[1, 4]
    last = dict(lexicon.pairs.tolist())
    assert all(float(source[p] @ target[q]) > 0.7 for p, q in last.items())


def test_a_sentence_encoder_sees_the_phrase_or_its_sentences(xpr: Xpr, monkeypatch: pytest.MonkeyPatch):
    def encode(texts: list[str]) -> np.ndarray:
        assert len(texts) <= 64
        return np.array([[len(text), ord(text[0]), text.count("e")] for text in texts])

    monkeypatch.setattr(type_systems, "load_muse", lambda device: SentenceSystem(encode, "fake", device))
    lexicon = Lexicon(xpr.lexicon / "valid")
    found = load_type_system("muse", None, [], CPU, False).encode(lexicon, [0, 1, 3], False)
    types = lexicon.sides[0]
    for number in range(0, len(types), 5):
        texts = [types.example(number, place)[0] for place in range(types.counts[number])]
        for count in (0, 1, 3):
            wanted = encode(texts[:count] or [types.phrases[number]]).sum(axis=0)
            np.testing.assert_allclose(found[0, count][0][number], wanted / np.linalg.norm(wanted), rtol=1e-5)


def test_evaluation_refuses_bad_input(xpr: Xpr, tmp_path: Path):
    def fails(*extra: object) -> subprocess.CompletedProcess[str]:
        return evaluate(xpr, *extra, check=False)

    refused(fails("--encoder", tmp_path / "no"), "there is no encoder '.*no': give a checkpoint")
    refused(fails("--encoder", f"orthogonal:{xpr.context}"), "learns from phrase pairs: give --train")
    refused(fails("--encoder", xpr.context, "--sentences", -1), "--sentences has -1")
    refused(fails("--encoder", xpr.context, "--layers", 3), "layer 3 of an encoder of 2 layers")
    refused(fails("--encoder", xpr.context, "--json", tmp_path / "no" / "a.json"), "--json .*there is no folder")
    refused(fails("--encoder", xpr.context, "--train", xpr.lexicon), "give one of its folders, such as train")


@pytest.fixture(scope="module")
def dictionary(xpr: Xpr, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phrases of both languages."""
    path = tmp_path_factory.mktemp("dictionary") / "pairs.tsv"
    path.write_bytes(xpr.pairs.read_bytes())
    return path


@pytest.fixture(scope="module")
def store(xpr: Xpr, dictionary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("types") / "store"
    call(
        "build_datastore", "phrases", xpr.texts[1], "--encoder", xpr.checkpoint, "--output", output, "--segmentation",
        f"lexicon:{dictionary}", "--cpu", "--quiet", "--shard-sentences", 64,
    )  # fmt: skip
    return output


@torch.no_grad()
def test_store_has_one_entry_a_string(xpr: Xpr, dictionary: Path, store: Path):
    datastore, encoder = PhraseDatastore(store), XprEncoder.load(xpr.checkpoint)
    wanted = {phrase for pair in read_pairs(dictionary) for phrase in pair}
    means, first = defaultdict(list), {}
    for text in dict.fromkeys(read_lines(xpr.texts[1])):
        subwords = encoder.context.tokenizer.encode(text)
        states, seen = encoder.states(torch.tensor([subwords.ids]))[0], set()
        words = word_spans(text)
        for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
            start, end = words[i][0], words[j][1]
            bounds = subword_bounds(subwords, start, end)
            if j - i < 7 and (string := text[start:end]) in wanted - seen and bounds is not None:
                seen.add(string)
                means[string].append(states[bounds[0] : bounds[1] + 1].mean(0))
                first.setdefault(string, (string, text, start, end))
    entries = [datastore.phrase(row) for row in range(datastore.section.size)]
    assert {entry[0] for entry in entries} == set(means) and len(entries) == len(means) > 100
    assert all(entry == first[entry[0]] for entry in entries)
    assert max(map(len, means.values())) > 5
    for row, (string, *_) in enumerate(entries):
        vector = encoder.project(torch.stack(means[string]).mean(0, keepdim=True))[0]
        torch.testing.assert_close(torch.from_numpy(datastore.keys[row]).float(), vector, rtol=0, atol=3e-3)
    assert not datastore.find_damage()


def retrieve(xpr: Xpr, store: Path, *extra: object) -> str:
    text = "\n".join(list(read_lines(xpr.texts[0]))[:8])
    words = ["scripts/retrieve_phrases.py", store, "--encoder", xpr.checkpoint, "--cpu", *extra]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_store_of_types_is_neither_built_in_shards_nor_merged(xpr: Xpr, store: Path, tmp_path: Path):
    out = "--output", tmp_path / "new"
    words = "phrases", xpr.texts[1], "--encoder", xpr.checkpoint, *out, "--num-shards", 2, "--shard-id", 0, "--cpu"
    refused(call("build_datastore", *words, check=False), "makes one entry of all places of a string")
    refused(call("merge_datastores", store, store, *out, check=False), "two datastores are called 'store'")
    refused(call("merge_datastores", store, f"again={store}", *out, check=False), "one entry a string")
    assert not (tmp_path / "new").exists()


def test_retrieval_asks_for_the_words_of_the_lexicon(xpr: Xpr, dictionary: Path, store: Path):
    wanted = {phrase for pair in read_pairs(dictionary) for phrase in pair}
    done = retrieve(xpr, store, "--format", "json")
    queries = [query for line in done.splitlines() if line.startswith("{") for query in json.loads(line)["phrases"]]
    assert queries and {query["string"] for query in queries} <= wanted
    assert re.search(r"query:lexicon:[0-9a-f]{12}>", done) and str(dictionary) not in done


def test_decoder_uses_a_store_of_types(xpr: Xpr, world: World, store: Path):
    words = [
        world.data_bin,
        "--user-dir",
        "fairseq_ccpr",
        "--task",
        "translation_retrieval",
        "-s",
        "de",
        "-t",
        "en",
        "--path",
    ]
    words += [world.model, "--datastore", store, "--cpu", "--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    done = call("fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2)
    other = call("fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2, "--phrase-segmentation", "all")
    assert other.stdout != done.stdout
    refused(
        call("fairseq-generate", *words, "--phrase-segmentation", "learned", check=False),
        "--segmentation learned asks for an encoder that has learnt what a phrase is",
    )


def test_stores_of_types_that_are_refused(xpr: Xpr, tmp_path: Path):
    def fails(kind: str) -> subprocess.CompletedProcess[str]:
        words = ["phrases", xpr.texts[1], "--encoder", xpr.checkpoint, "--output", tmp_path / "out", "--cpu", "--quiet"]
        return call("build_datastore", *words, "--segmentation", kind, check=False)

    refused(fails("learned"), "has not: give lexicon:FILE, all or ngram:N")
    refused(fails(f"lexicon:{tmp_path / 'no'}"), "there is no lexicon .*no")
    (tmp_path / "empty").write_text("\n\t\n")
    refused(fails(f"lexicon:{tmp_path / 'empty'}"), "is empty: give a file of one phrase a line")
    (tmp_path / "other").write_text("xyzzy\n")
    refused(fails(f"lexicon:{tmp_path / 'other'}"), "no phrase is left .*give a lexicon of its language")
    refused(fails("lexicon:"), "give learned, all, ngram:N such as ngram:5, or lexicon:FILE")
    assert not (tmp_path / "out").exists()


def test_the_recipe(xpr: Xpr, tmp_path: Path):
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ENCODER": str(xpr.context)}
    words = ["/bin/bash", ROOT / "scripts" / "recipes" / "train_xpr.sh", tmp_path / "out", xpr.lexicon, "--"]
    options = "--max-subwords", 60, "--phrase-dim", 8, "--sentences", 2
    run(*words, *options, UPDATES="2", PAIRS="32", **where)
    trained = XprEncoder.load(tmp_path / "out" / "checkpoints" / "checkpoint_best.pt")
    kept = XprEncoder.load(tmp_path / "out" / "phrase-encoder" / "xpr.pt")
    assert kept.dimension == 8 and kept.fingerprint() == trained.fingerprint() and kept.trained_on == ["de-en"]
