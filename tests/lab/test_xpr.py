"""XPR: the examples it is trained on, its loss, momentum encoder and head, against plain references."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fairseq_ccpr.lab.xpr.lexicon import Lexicon, usable_examples
from fairseq_ccpr.lab.xpr.model import TrainedXprEncoder, XprEncoderConfig, pool
from fairseq_ccpr.lab.xpr.training import XpcoConfig, XpcoCriterion, false_negatives
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.tokenizers import load_tokenizer
from fairseq_ccpr.training.phrase_contrast import alignment_losses
from tests.helpers import call
from tests.lab.small_xpr import make_dataset, make_model
from tests.small_models import Xpr
from tests.training.two_processes import gradient_of_two_processes

pytestmark = pytest.mark.full


def reference_loss(queries, candidates, scale, own, others):
    """Equation 3 in float64, a pair at a time: a candidate that shares a string with the pair is no negative."""
    total = 0.0
    for i, x in enumerate(queries.double().numpy()):
        scores = scale * (candidates.double().numpy() @ x)
        rows = [j for j in range(len(scores)) if j == i or not {*own[i]} & {*others[j]}]
        total += np.logaddexp.reduce(scores[rows]) - scores[i]
    return total


@given(k=st.integers(1, 8), queue=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_loss_equals_the_reference(k: int, queue: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (nn.functional.normalize(torch.randn(n, 5, generator=generator), dim=1) for n in (k, k + queue))
    strings = torch.randint(0, 4, (k + queue, 2), generator=generator)
    found = alignment_losses(x, y, 1 / 0.06, false_negatives(strings[:k], strings)).sum()
    wanted = reference_loss(x, y, 1 / 0.06, strings[:k].tolist(), strings.tolist())
    assert found.item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


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
                fast[a : a + 16],
                torch.cat([slow[16 - a : 32 - a], older[1 - a // 16]]),
                1 / 0.06,
                own,
                own + names,
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
    trained = [
        p for n, p in model.named_parameters() if not n.startswith("momentum.") and "embed_positions" not in n
    ]
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
            assert (
                len(
                    TrainedXprEncoder.build_model(XprEncoderConfig(encoder=str(xpr.context)), None)
                    .head[2]
                    .bias
                )
                == width
            )
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
    options = [
        "--save-interval-updates",
        1,
        "--update-freq",
        frequency,
        "--disable-validation",
        "--queue",
        24,
    ]
    for updates in (2, 4):
        call(*xpr.training(tmp_path, updates, *options))
    found = {
        torch.load(path)["optimizer_history"][-1]["num_updates"]: path
        for path in tmp_path.glob("checkpoint*.pt")
    }
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


def test_pooled_vectors_equal_a_plain_loop(xpr: Xpr) -> None:
    encoder, dataset = make_model(xpr, momentum=0).eval(), make_dataset(xpr)
    encoder.load_state_dict(XprEncoder.load(xpr.checkpoint).state_dict())
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


def test_a_cut_sentence_keeps_its_phrase(xpr: Xpr) -> None:
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
            (one,) = usable_examples(tokenizer, 0, types.phrases[number], [(text, start, stop)], 1, limit)
            if len(phrase) > limit:
                assert one.subwords.text == types.phrases[number]
                continue
            ids = one.subwords.ids
            assert len(ids) - 2 == min(len(whole.ids) - 2, limit)
            assert ids[one.first : one.last + 1] == phrase
            inner = ids[1 : one.first] + phrase + ids[one.last + 1 : -1]
            at = bounds[0] - (one.first - 1)
            assert inner == whole.ids[at : at + len(inner)] and [ids[0], ids[-1]] == [whole.ids[0], end]
            before, after = one.first - 1, len(ids) - 2 - one.last
            assert abs(before - after) < 2 or at == 1 or at + len(inner) == len(whole.ids) - 1
            assert one.subwords.starts == sorted(one.subwords.starts) and len(one.subwords.ends) == len(ids)
            moved += at > 1
    assert moved > 3
