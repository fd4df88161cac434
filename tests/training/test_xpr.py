"""XPR: what it is trained on, its momentum encoder and loss, against plain references."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.evaluation.accuracy.type_systems import _xpr_types
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.span_encoder import load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder, XprEncoderConfig, pool, span_means
from fairseq_ccpr.phrases import type_vectors
from fairseq_ccpr.phrases.lexicon_store import Lexicon
from fairseq_ccpr.phrases.type_examples import usable_examples
from fairseq_ccpr.phrases.type_vectors import find_translations, type_means
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.tokenizers import load_tokenizer
from fairseq_ccpr.training.lexicon_dataset import LexiconDataset
from fairseq_ccpr.training.phrase_contrast_loss import alignment_losses
from fairseq_ccpr.training.xpco_criterion import XpcoConfig, XpcoCriterion, false_negatives
from tests.helpers import accuracies, call, refused, run, run_two_processes
from tests.small_models import Xpr
from tests.training.two_processes import gradient_of_two_processes

CPU = torch.device("cpu")


def test_pooled_vectors_equal_a_plain_loop(xpr: Xpr) -> None:
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


def test_examples_of_a_batch_have_their_phrases(xpr: Xpr) -> None:
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
def test_without_a_sentence_the_phrase_stands_alone(xpr: Xpr, sentences: int, max_subwords: int) -> None:
    dataset = make_dataset(xpr, "train", sentences, max_subwords)
    strings, examples, _ = dataset[4]
    alone = [of_side for string, of_side in zip(strings, examples) if of_side[0].subwords.text == string]
    assert len(alone) == 2 or max_subwords == 1
    for (one,) in alone:
        assert (one.first, one.last) == (1, len(one.subwords.ids) - 2)


@pytest.mark.parametrize("marked", [False, True])
def test_a_cut_sentence_keeps_its_phrase(xpr: Xpr, marked: bool) -> None:
    """All that fits is used, wherever the phrase stands, and as much of the sentence as there is room for."""
    tokenizer, types = load_tokenizer(xpr.context), Lexicon(xpr.lexicon / "train").sides[0]
    end, moved = tokenizer.dictionary.eos(), 0
    for number in range(0, len(types), 7):
        text, start, stop = types.example(number, 0)
        whole = tokenizer.encode(text)
        if (bounds := subword_bounds(whole, start, stop)) is None:
            continue
        phrase = whole.ids[bounds[0] : bounds[1] + 1]
        for limit in (3, 5, 8, len(whole.ids), len(whole.ids) + 2):
            (one,) = usable_examples(tokenizer, 0, types.phrases[number], [(text, start, stop)], 1, limit, marked)
            if len(phrase) > limit - 2 * marked:
                assert one.subwords.text == types.phrases[number]
                continue
            ids = one.subwords.ids
            assert len(ids) - 2 == min(len(whole.ids) - 2 + 2 * marked, limit)
            assert ids[one.first : one.last + 1] == ([end, *phrase, end] if marked else phrase)
            inner = ids[1 : one.first] + phrase + ids[one.last + 1 : -1]
            at = bounds[0] - (one.first - 1)
            assert inner == whole.ids[at : at + len(inner)] and [ids[0], ids[-1]] == [whole.ids[0], end]
            before, after = one.first - 1, len(ids) - 2 - one.last
            assert abs(before - after) < 2 or at == 1 or at + len(inner) == len(whole.ids) - 1
            assert one.subwords.starts == sorted(one.subwords.starts) and len(one.subwords.ends) == len(ids)
            moved += at > 1
    assert moved > 3


def test_training_with_marked_phrases(xpr: Xpr, tmp_path: Path) -> None:
    call(*xpr.training(tmp_path / "run", 1, "--mark-phrases"))
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    encoder, plain = XprEncoder.load(checkpoint), XprEncoder.load(xpr.checkpoint)
    assert encoder.marked and not plain.marked
    lexicon, found = Lexicon(xpr.lexicon / "valid"), {}
    for marked in (True, False):
        encoder.marked = marked
        system = _xpr_types(encoder, None)
        found[marked] = system.encode(lexicon, [0, 2], False), system.fingerprint
    (one, digest), (other, other_digest) = found[True], found[False]
    layer = encoder.layer
    assert digest != other_digest and torch.equal(one[layer, 0][0], other[layer, 0][0])  # alone, it has no marks
    assert not torch.allclose(one[layer, 2][0], other[layer, 2][0], atol=1e-3)
    words = [
        "build phrases",
        xpr.texts[0],
        "--encoder",
        checkpoint,
        "--segmentation",
        "all",
        "--output",
        tmp_path / "store",
    ]
    refused(call(*words, check=False), "checkpoint_last.pt was trained with --mark-phrases, .*: give an encoder that")


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
def test_loss_equals_the_reference(k: int, queue: int, seed: int) -> None:
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
def test_criterion_equals_the_reference(xpr: Xpr, queue: int) -> None:
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


def test_gradients_never_reach_the_momentum_encoder(xpr: Xpr) -> None:
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
def test_two_processes_have_the_gradient_of_one(xpr: Xpr, tmp_path: Path, momentum: float) -> None:
    model, criterion = make_model(xpr, momentum), XpcoCriterion(XpcoConfig(), None)
    assert "head.0.weight" in gradient_of_two_processes(model, criterion, make_dataset(xpr), tmp_path)


def test_head_starts_as_a_rotation(xpr: Xpr) -> None:
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


def test_momentum_encoder_keeps_its_precision(xpr: Xpr) -> None:
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
def test_momentum_is_exact_after_steps_and_after_resuming(xpr: Xpr, tmp_path: Path, frequency: int) -> None:
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


def test_training_learns_to_find_translations(xpr: Xpr) -> None:
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


def test_type_means_are_those_of_the_first_sentences(xpr: Xpr, monkeypatch: pytest.MonkeyPatch) -> None:
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
            subwords = tokenizer.encode(text)
            if (bounds := subword_bounds(subwords, start, end)) is not None:
                subwords, before = subwords.around(*bounds, 60)
                bounds = bounds[0] - before, bounds[1] - before
                with torch.no_grad():
                    vectors.append(encode(torch.tensor([subwords.ids]), torch.tensor([[0, *bounds]]))[:, 0])
        for row, count in ((1, 1), (2, 3), (3, 50)):
            if vectors:
                torch.testing.assert_close(
                    found[row, :, number], torch.stack(vectors[:count]).mean(0), rtol=1e-4, atol=1e-5
                )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31))
def test_any_translation_counts_and_ties_do_not(n: int, c: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (n, 3), generator=generator).float()
    candidates = torch.randint(-1, 2, (c, 3), generator=generator).float()
    gold = torch.rand(n, c, generator=generator) < 0.4
    gold[:, 0] |= ~gold.any(dim=1)
    found = find_translations(queries, candidates, gold.nonzero())
    for row, scores in enumerate(queries @ candidates.T):
        best = [at for at, score in enumerate(scores.tolist()) if score == scores.max()]
        assert bool(found[row]) == all(gold[row, at] for at in best)


def test_several_language_pairs_train_together(xpr: Xpr, tmp_path: Path) -> None:
    words = ["-s", "en", "-t", "de", "--limit", 60]
    call(
        "lexicon", "--pairs", flipped(xpr.pairs, tmp_path / "flipped.tsv"), "--source-text", xpr.texts[1],
        "--target-text", xpr.texts[0], "--output", tmp_path / "other", *words,
    )  # fmt: skip
    line = xpr.training(tmp_path / "run", 2)
    line[1] = f"{xpr.lexicon}:{tmp_path / 'other'}"
    call(*line)
    assert XprEncoder.load(tmp_path / "run" / "checkpoint_last.pt").trained_on == ["de-en", "en-de"]


def flipped(pairs: Path, output: Path) -> Path:
    output.write_text("".join(f"{q}\t{p}\n" for p, q in read_pairs(pairs)), encoding="utf-8")
    return output


def test_two_processes_train_one_encoder(xpr: Xpr, tmp_path: Path) -> None:
    log, _ = run_two_processes(*xpr.training(tmp_path, 2, "--queue", 100))
    assert len(accuracies(log)) == 1 and XprEncoder.load(tmp_path / "checkpoint_best.pt").dimension == 16
    assert int(torch.load(tmp_path / "checkpoint_last.pt")["model"]["momentum.enqueued"]) == 2 * 2 * 32


def test_ablations_train(xpr: Xpr, tmp_path: Path) -> None:
    plain = ["--sentences", 0, "--encoder-momentum", 0, "--phrase-dim", 0, "--layer", 1]
    call(*xpr.training(tmp_path, 1, *plain))
    encoder = XprEncoder.load(tmp_path / "checkpoint_last.pt")
    assert (encoder.layer, encoder.dimension, list(encoder.head.parameters())) == (1, 32, [])
    assert encoder.fingerprint() != XprEncoder.load(xpr.checkpoint).fingerprint()


def test_checkpoints_are_told_apart(xpr: Xpr, tmp_path: Path) -> None:
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


def test_training_refuses_bad_input(xpr: Xpr, tmp_path: Path) -> None:
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
