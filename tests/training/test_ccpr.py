"""CCPR: its losses, what it is trained on, and its training, against plain references."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Ccpr, call, random_context, run, run_two_processes
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import refused
from torch import Tensor, nn

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.ccpr_criterion import CcprConfig, CcprCriterion
from fairseq_ccpr.models.context_encoder import ContextEncoder
from fairseq_ccpr.models.phrase_contrast_loss import alignment_losses, equal_candidates, segmentation_losses
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, of_ends
from fairseq_ccpr.phrases.contrast_dataset import PhraseContrastDataset
from fairseq_ccpr.phrases.contrast_draw import ContrastOptions, Occurrences
from fairseq_ccpr.phrases.length_batches import LengthBatches, Mixture
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.phrases.subwords import subword_bounds
from fairseq_ccpr.phrases.text_pairs import read_pairs
from fairseq_ccpr.phrases.tokenizers import load_tokenizer
from fairseq_ccpr.phrases.words import word_spans


def reference(sources, targets, scale, strings, contexts, any_context):
    """Equation 2 of the CCPR paper in float64, a phrase at a time: those equal to the right target are no negatives."""
    losses = []
    for i, x in enumerate(sources.double().numpy()):
        scores = scale * (targets.double().numpy() @ x)
        others = [
            j
            for j in range(len(scores))
            if strings[j] != strings[i] or (contexts[j] != contexts[i] and not any_context)
        ]
        losses.append(np.logaddexp.reduce(scores[[i, *others]]) - scores[i])
    return np.array(losses)


@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(1, 9), scale=st.sampled_from([1.0, 20.0, 100.0]), any_context=st.booleans(), seed=st.integers(0, 2**31)
)  # fmt: skip
def test_alignment_loss_equals_the_reference(k, scale, any_context, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (nn.functional.normalize(torch.randn(k, 5, generator=generator), dim=1) for _ in range(2))
    strings, contexts = (torch.randint(0, 3, (k,), generator=generator) for _ in range(2))
    excluded = equal_candidates(strings, contexts, any_context)
    found = alignment_losses(x, y, scale, excluded)
    wanted = reference(x, y, scale, strings.tolist(), contexts.tolist(), any_context)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-4)
    half = alignment_losses(x.bfloat16(), y.bfloat16(), scale, excluded)
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_the_same_string_is_a_negative_in_another_context_alone():
    strings, contexts = torch.tensor([7, 7, 7, 8]), torch.tensor([1, 1, 2, 1])
    apart = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(equal_candidates(strings, contexts), ~apart)
    apart[:3, :3] = False
    assert torch.equal(equal_candidates(strings, contexts, any_context=True), ~apart)


def test_segmentation_loss_equals_the_reference():
    logits, are_phrases = torch.tensor([-100.0, -1.5, 0.0, 2.0, 100.0]), torch.tensor([True, False, True, True, False])
    x, y = logits.double().numpy(), are_phrases.numpy()
    wanted = np.where(y, np.logaddexp(0, -x), np.logaddexp(0, x))
    np.testing.assert_allclose(segmentation_losses(logits, are_phrases).numpy(), wanted, rtol=1e-5)


def test_gradient_of_the_alignment_loss():
    x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    excluded = equal_candidates(torch.tensor([1, 1, 2, 3]), torch.tensor([1, 1, 1, 1]))
    assert torch.autograd.gradcheck(lambda a, b, s: alignment_losses(a, b, s, excluded), (x, y, scale))


def test_ends_are_multiplied_before_they_are_gathered():
    linear, states = nn.Linear(12, 5), torch.randn(3, 7, 6)
    spans = torch.tensor([[0, 1, 1], [2, 0, 6], [1, 3, 5], [1, 3, 6]])
    ends = torch.cat([states[spans[:, 0], spans[:, 1]], states[spans[:, 0], spans[:, 2]]], dim=1)
    torch.testing.assert_close(of_ends(linear, states, spans), linear(ends))
    assert of_ends(linear, states, spans[:0]).shape == (0, 5)


def make_dataset(ccpr: Ccpr, split: str = "valid", **changes: float) -> PhraseContrastDataset:
    options = {"phrases_per_sentence": 8, "different_context_fraction": 0.0, "max_subwords": 100, "seed": 1} | changes
    tokenizer = load_tokenizer(ccpr.context)
    return PhraseContrastDataset(PhrasePairs(ccpr.phrases / split), tokenizer, ContrastOptions(**options))


def untrained(ccpr: Ccpr) -> PhraseEncoder:
    torch.manual_seed(1)
    return PhraseEncoder(ContextEncoder.load(ccpr.context), 16, "cosine", 0.05).eval()


@pytest.mark.parametrize("mask_equal_strings", [False, True])
def test_criterion_adds_both_directions_and_segmentation(ccpr: Ccpr, mask_equal_strings: bool):
    dataset, model = make_dataset(ccpr), untrained(ccpr)
    sample = dataset.collater([dataset[i] for i in (0, 1, 0, *range(2, 20))])  # one sentence twice
    criterion = CcprCriterion(CcprConfig(segmentation_weight=0.5, mask_equal_strings=mask_equal_strings), None)
    loss, count, logged = criterion(model, sample)
    sides = sample["source"], sample["target"]
    outputs, scale = model(*sides)
    wanted = 0.0
    for one, other in ((0, 1), (1, 0)):
        equal = sides[other]["strings"].tolist(), sides[other]["contexts"].tolist(), mask_equal_strings
        with torch.no_grad():
            wanted += reference(outputs[one][0], outputs[other][0], float(scale), *equal).sum()
            phrases, others = outputs[one][1][:count].double(), outputs[one][1][count:].double()
            wanted -= 0.5 / 4 * (phrases.sigmoid().log().sum() + (-others).sigmoid().log().sum()).item()
    assert count == len(sides[0]["spans"]) == len(sides[1]["spans"])
    assert loss.item() == pytest.approx(wanted, rel=1e-5) and float(logged["loss"]) == loss.item()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def gradients_of_part(rank: int, folder: str, model: nn.Module, criterion: nn.Module, parts: list) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    loss, count, logged = criterion(model, parts[rank])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save((gradients, float(logged["loss"]), count), f"{folder}/{rank}")
    dist.destroy_process_group()


def gradient_of_two_processes(
    model: nn.Module, criterion: nn.Module, dataset: FairseqDataset, folder: Path
) -> dict[str, Tensor]:
    """Assert that two processes with unequal parts of a batch have its gradient; what that is."""
    samples = [dataset[i] for i in range(16)]
    loss, count, _ = criterion(model, dataset.collater(samples))
    loss.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    parts = [dataset.collater(samples[:6]), dataset.collater(samples[6:])]
    arguments = str(folder), model, criterion, parts
    torch.multiprocessing.start_processes(gradients_of_part, arguments, nprocs=2, start_method="fork")
    made = [torch.load(folder / str(rank)) for rank in range(2)]
    assert sum(of_part for _, _, of_part in made) == count
    assert sum(logged for _, logged, _ in made) == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in whole.items():
        together = made[0][0][name] + made[1][0][name]
        assert (together - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name
    return whole


def test_two_processes_have_the_gradient_of_one(ccpr: Ccpr, tmp_path: Path):
    criterion = CcprCriterion(CcprConfig(), None)
    assert "scale_offset" in gradient_of_two_processes(untrained(ccpr), criterion, make_dataset(ccpr), tmp_path)


def test_the_temperature_is_learned(ccpr: Ccpr):
    dataset, model = make_dataset(ccpr), untrained(ccpr)
    assert float(model.scale) == pytest.approx(20)
    fingerprint = model.fingerprint()
    optimizer = torch.optim.AdamW([model.scale_offset], lr=1e-4)
    batch = dataset.collater([dataset[i] for i in range(16)])
    for _ in range(10):
        optimizer.zero_grad()
        CcprCriterion(CcprConfig(), None)(model, batch)[0].backward()
        optimizer.step()
    assert 0.005 < abs(math.log(float(model.scale) / 20)) < 0.05  # by about 20 learning rates a step
    assert model.fingerprint() == fingerprint  # which is of what retrieval reads
    model.scale_offset.data.fill_(9)
    assert float(model.scale) == 100


def test_two_processes_train_one_encoder(ccpr: Ccpr, tmp_path: Path):
    log, _ = run_two_processes(*ccpr.training(tmp_path, 3, "--batch-size", 32))  # only the first process logs
    losses = re.findall(r"train_inner .* loss=([0-9.]+), .*bsz=([0-9]+)", log)
    assert len(losses) == 3 and "64" in [both for _, both in losses]
    assert len(accuracies(log)) == 1 and PhraseEncoder.load(tmp_path / "checkpoint_best.pt").dimension == 16


def accuracies(log: str) -> list[float]:
    """Of each validation, acc@1."""
    return [float(found) for found in re.findall(r"valid' subset .*?\| accuracy ([0-9.]+)", log)]


def test_phrases_are_drawn_anew_each_epoch(ccpr: Ccpr):
    dataset = make_dataset(ccpr, phrases_per_sentence=3)
    again = make_dataset(ccpr, phrases_per_sentence=3)
    first = [dataset[i] for i in range(20)]
    dataset.set_epoch(2)
    assert [dataset[i] for i in range(20)] != first == [again[i] for i in range(20)]
    again.set_epoch(2)
    assert [dataset[i] for i in range(20)] == [again[i] for i in range(20)]
    assert [make_dataset(ccpr, phrases_per_sentence=3, seed=2)[i] for i in range(20)] != first
    assert all(1 <= len(example.source.spans) <= 3 for example in first)


@pytest.mark.parametrize("mixed", [False, True])
def test_equal_lengths_come_in_another_order_each_epoch(ccpr: Ccpr, mixed: bool):
    def make() -> LengthBatches:
        sets = [make_dataset(ccpr, split) for split in ("train", "valid")]
        return Mixture(sets) if mixed else sets[0]

    dataset, again = make(), make()
    first = dataset.ordered_indices()
    assert np.array_equal(first, again.ordered_indices())
    dataset.set_epoch(2)
    second = dataset.ordered_indices()
    again.set_epoch(2)
    assert np.array_equal(second, again.ordered_indices())
    assert [dataset[i] for i in range(9)] == [again[i] for i in range(9)] != [make()[i] for i in range(9)]
    sizes = np.array([dataset.size(i) for i in range(len(dataset))])
    for order in (first, second):
        assert sorted(order) == list(range(len(dataset))) and (np.diff(sizes[order]) >= 0).all()
        equal = np.diff(sizes[order]) == 0
        assert equal.sum() > 50 and 0.3 < (np.diff(order)[equal] > 0).mean() < 0.7  # as often back as forth
    assert np.array_equal(sizes[first], sizes[second]) and (first != second).mean() > 0.5


def test_workers_follow_the_epoch(ccpr: Ccpr):
    dataset, same = (make_dataset(ccpr, phrases_per_sentence=2) for _ in range(2))
    task = FairseqTask(None)
    for epoch in (1, 2):
        batches = task.get_batch_iterator(dataset, max_sentences=16, num_workers=1, epoch=epoch)
        of_workers = [batch["source"]["strings"] for batch in batches.next_epoch_itr(shuffle=False)]
        same.set_epoch(epoch)
        whole = same.collater([same[i] for i in same.ordered_indices()])
        assert torch.equal(torch.cat(of_workers), whole["source"]["strings"])


def test_examples_hold_phrases_and_other_spans(ccpr: Ccpr):
    dataset = make_dataset(ccpr)
    pairs, others = dataset.pairs, 0
    for index in range(len(dataset)):
        number = int(dataset.sentences[index])
        sides = dataset[index].source, *dataset[index].targets
        phrases = [{tuple(row) for row in pairs.pairs_of(number)[:, c : c + 2].tolist()} for c in (1, 3)]
        for text, side, of_side in zip(pairs.sentence(number), sides, phrases, strict=True):
            assert side.subwords.text == text
            words = word_spans(text)
            all_spans = {(a, b) for i, (a, _) in enumerate(words) for _, b in words[i : i + 4]}
            bounds = {span: subword_bounds(side.subwords, *span) for span in all_spans}
            drawn = [{span for span in of_side if bounds[span] == ends} for ends in side.spans]
            assert all(
                string in {text[a:b] for a, b in spans} for string, spans in zip(side.strings, drawn, strict=True)
            )
            assert set(side.others) <= {bounds[span] for span in all_spans - of_side}
            assert not set(side.others) & {bounds[span] for span in of_side}
            assert len(set(side.others)) == len(side.others) <= len(side.spans)
            others += len(side.others)
        assert len({len(side.spans) for side in sides}) == 1
    assert others > 0.9 * sum(2 * len(dataset[i].source.spans) for i in range(len(dataset)))


def test_batches_number_sentences_and_pad(ccpr: Ccpr):
    dataset = make_dataset(ccpr)
    samples = [dataset[i] for i in (3, 0, 7)]
    batch = dataset.collater(samples)
    for side, name in enumerate(("source", "target")):
        of_side, sides = batch[name], [(sample.source, *sample.targets)[side] for sample in samples]
        assert of_side["tokens"].shape == (3, max(len(s.subwords.ids) for s in sides))
        expected = [[n, *span] for n, s in enumerate(sides) for span in s.spans]
        assert of_side["spans"].tolist() == expected
        assert of_side["others"].tolist() == [[n, *span] for n, s in enumerate(sides) for span in s.others]
        texts = [s.subwords.text for s in sides for _ in s.spans]
        strings = [string for s in sides for string in s.strings]
        for of_text, column in ((strings, "strings"), (texts, "contexts")):
            equal = [[a == b for b in of_text] for a in of_text]
            numbers = of_side[column]
            assert (numbers[:, None] == numbers).tolist() == equal
    assert batch["phrases"] == len(batch["source"]["spans"]) and batch["nsentences"] == 3
    assert dataset.collater([]) == dataset.collater([None]) == {}


def test_long_sentences_are_left_out_and_counted(ccpr: Ccpr):
    tokenizer, pairs = load_tokenizer(ccpr.context), PhrasePairs(ccpr.phrases / "valid")
    lengths = [max(len(tokenizer.encode(text).ids) for text in pairs.sentence(i)) for i in range(pairs.sentences)]
    with_pairs = [i for i in range(pairs.sentences) if len(pairs.pairs_of(i))]
    dataset = make_dataset(ccpr, max_subwords=50)
    assert dataset.sentences.tolist() == [i for i in with_pairs if lengths[i] <= 50]
    assert dataset.left_out == sum(lengths[i] > 50 for i in with_pairs) > 0
    order = dataset.ordered_indices()
    assert sorted(order) == list(range(len(dataset))) and (np.diff(dataset.sizes[order]) >= 0).all()


def other_contexts(pairs: PhrasePairs) -> dict[int, set[int]]:
    """For each row the rows of the same strings in other target sentences, by comparing all."""
    groups = defaultdict(list)
    for row, (number, a, b, c, d) in enumerate(pairs.pairs.tolist()):
        source, target = pairs.sentence(number)
        groups[source[a:b], target[c:d]].append((row, target))
    return {
        row: {other for other, elsewhere in rows if elsewhere != target}
        for rows in groups.values()
        for row, target in rows
    }


def test_occurrences_are_those_in_other_sentences(ccpr: Ccpr):
    pairs, rng = PhrasePairs(ccpr.phrases / "train"), np.random.default_rng(1)
    occurrences, wanted = Occurrences(pairs), other_contexts(pairs)
    assert sum(map(bool, wanted.values())) > 100
    for row, others in wanted.items():
        drawn = set(occurrences.draw(np.array([row] * 64), rng).tolist())
        assert drawn <= (others or {row})
        assert len(drawn) == max(1, len(others)) or len(others) > 4
    everything = np.arange(pairs.size)
    assert all(drawn in (wanted[row] or {row}) for row, drawn in enumerate(occurrences.draw(everything, rng).tolist()))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_targets_come_from_other_contexts(ccpr: Ccpr, fraction: float):
    dataset = make_dataset(ccpr, "train", different_context_fraction=fraction, max_subwords=1000)
    wanted = {
        tuple(dataset.pairs.pairs[row].tolist()): {dataset.pairs.sentence(dataset.pairs.pairs[o, 0])[1] for o in others}
        for row, others in other_contexts(dataset.pairs).items()
    }
    elsewhere = able = 0
    for index in range(100):
        number = int(dataset.sentences[index])
        source, target = dataset.pairs.sentence(number)
        of_sentence = {}
        for key in map(tuple, dataset.pairs.pairs_of(number).tolist()):
            _, a, b, c, d = key
            of_sentence.setdefault((source[a:b], target[c:d]), set()).update(wanted[key])
        example = dataset[index]
        assert example.source.subwords.text == source
        others = [(string, side.subwords.text) for side in example.targets for string in side.strings]
        for string, (other, text) in zip(example.source.strings, others, strict=True):
            able += bool(of_sentence[string, other])
            elsewhere += text != target
            assert text in {target} | of_sentence[string, other]
        texts = [side.subwords.text for side in example.targets]
        assert len(set(texts)) == len(texts) == len({text for _, text in others})
    assert able > 30
    assert elsewhere == 0 if fraction == 0 else elsewhere == able if fraction == 1 else 0.3 < elsewhere / able < 0.7


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_batches_are_as_large_as_asked_for_on_either_side(ccpr: Ccpr, fraction: float):
    most, sides = 900, ("source", "target")
    dataset = make_dataset(ccpr, "train", different_context_fraction=fraction)
    largest = []
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=most)
        assert np.array_equal(np.concatenate(batches), dataset.ordered_indices())
        tables = [dataset.collater([dataset[i] for i in batch]) for batch in batches]
        for batch, table in zip(batches, tables, strict=True):
            shapes = np.array([table[side]["tokens"].shape for side in sides])
            assert len(batch) == shapes[0, 0] == table["nsentences"]  # each source sentence once
            assert np.array_equal(shapes[:, 0], dataset.counts[batch].sum(axis=0))
            assert np.array_equal(shapes[:, 1], dataset.lengths[batch].max(axis=0))
            largest.append(shapes.prod(axis=1).max())
        for batch, following in itertools.pairwise(batches):
            table = dataset.collater([dataset[i] for i in (*batch, following[0])])
            assert max(table[side]["tokens"].numel() for side in sides) > most  # there was no room for another
    assert max(largest) <= most and np.mean(largest) > 0.8 * most
    assert (dataset.counts[:, 1].max() > 1) == (fraction > 0)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_fairseq_makes_batches_of_a_mixture(ccpr: Ccpr, fraction: float):
    sets = [make_dataset(ccpr, split, different_context_fraction=fraction) for split in ("train", "valid")]
    mixture, task = Mixture(sets), FairseqTask(None)
    limits = {"max_tokens": 300, "max_positions": 300, "ignore_invalid_inputs": True}  # the trainer gives both
    for epoch in (1, 2):
        batches = task.get_batch_iterator(mixture, epoch=epoch, required_batch_size_multiple=4, **limits)
        assert all(one.epoch == epoch for one in sets)
        taken = np.concatenate(batches.frozen_batches)
        tokens = [mixture.num_tokens(i) for i in range(len(mixture))]
        assert sorted(taken) == [i for i, count in enumerate(tokens) if count <= 300]
        assert (len(taken) == len(mixture)) == (fraction == 0)
        assert all(len(batch) < 4 or len(batch) % 4 == 0 for batch in batches.frozen_batches)
        assert max(map(len, batches.frozen_batches)) >= 8
        for batch in batches.next_epoch_itr():
            assert max(batch[side]["tokens"].numel() for side in ("source", "target")) <= 300
    few = mixture.batch_by_size(mixture.ordered_indices(), max_tokens=9999, max_sentences=7)
    assert {len(batch) for batch in few[:-1]} == {7} and sum(map(len, few)) == len(mixture)
    alone = mixture.batch_by_size(mixture.ordered_indices(), max_tokens=10)
    assert len(alone) == len(mixture)


@torch.no_grad()
def accuracy(model: PhraseEncoder, dataset: PhraseContrastDataset) -> float:
    """acc@1 of the phrases of a dataset, per cent: the nearest target has the right string in the right sentence."""
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    x, y = (model.vectors(model.context(batch[s]["tokens"]), batch[s]["spans"]) for s in ("source", "target"))
    found, target = (x @ y.T).argmax(dim=1), batch["target"]
    right = (target["strings"][found] == target["strings"]) & (target["contexts"][found] == target["contexts"])
    return 100 * right.double().mean().item()


def test_training_learns_to_find_translations(ccpr: Ccpr):
    model, dataset = PhraseEncoder.load(ccpr.checkpoint), make_dataset(ccpr)
    history = accuracies(ccpr.log)
    best = max(history)
    assert best > history[0] and best > 2 * accuracy(untrained(ccpr), dataset)
    assert accuracy(model, dataset) == pytest.approx(best, abs=0.1 * best)  # training is in bf16
    temperatures = re.findall(r"valid' subset .*?\| temperature ([0-9.]+)", ccpr.log)
    assert len(set(temperatures)) > 1


@torch.no_grad()
def test_training_learns_what_phrases_are(ccpr: Ccpr):
    model, dataset = PhraseEncoder.load(ccpr.checkpoint), make_dataset(ccpr)
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    for side in (batch["source"], batch["target"]):
        states = model.context(side["tokens"])
        phrases, others = (model.phrase_logits(states, side[name]).sigmoid() for name in ("spans", "others"))
        assert phrases.mean() > others.mean() + 0.1


@torch.no_grad()
def test_loaded_encoder_is_the_trained_one(ccpr: Ccpr, tmp_path: Path):
    loaded = PhraseEncoder.load(ccpr.checkpoint)
    trained = untrained(ccpr)
    trained.load_state_dict(torch.load(ccpr.checkpoint)["model"])
    batch = make_dataset(ccpr).collater([make_dataset(ccpr)[0]])["source"]
    for one, other in zip(loaded(batch)[0][0], trained(batch)[0][0], strict=True):
        assert torch.equal(one, other)
    assert loaded.dimension == 16 and loaded.fingerprint() == trained.fingerprint() != untrained(ccpr).fingerprint()
    folder = tmp_path / "moved"  # the directory that training started from is not needed
    shutil.copytree(ccpr.checkpoint.parent, folder)
    assert PhraseEncoder.load(folder / ccpr.checkpoint.name).fingerprint() == loaded.fingerprint()
    (folder / "dict.txt").write_text("a 1\n")
    with pytest.raises(CheckpointError, match="no phrase encoder for the tokenizer beside it"):
        PhraseEncoder.load(folder / ccpr.checkpoint.name)
    with pytest.raises(CheckpointError, match="there is no phrase encoder"):
        PhraseEncoder.load(folder / "nothing.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is no phrase encoder"):
        PhraseEncoder.load(ccpr.context / "model.pt")


def test_training_resumes_on_a_mixture(ccpr: Ccpr, tmp_path: Path):
    shutil.copytree(ccpr.checkpoint.parent, tmp_path / "run")
    words = ccpr.training(tmp_path / "run", 64, "--different-context-fraction", 0.5)
    words[1] = f"{ccpr.phrases}:{ccpr.phrases}"  # two sets
    log = run(*words).stdout
    assert "(epoch 5 @ 40 updates)" in log and "end of epoch 5" in log
    assert log.count("loading train data for epoch") == 1
    state: dict[str, Tensor] = torch.load(tmp_path / "run" / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 64


def test_the_recipe(ccpr: Ccpr, tmp_path: Path):
    (tmp_path / "verses.tsv.gz").write_bytes(gzip.compress(ccpr.pairs.read_bytes()))
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ENCODER": str(ccpr.context)}
    words = ["/bin/bash", ROOT / "scripts" / "recipes" / "train_ccpr.sh", tmp_path / "out", tmp_path / "verses.tsv.gz"]
    done = run(*words, tmp_path / "verses.tsv", check=False, **where)
    assert done.returncode == 2 and "two texts are called verses" in done.stderr and not (tmp_path / "out").exists()
    options = "--max-subwords", 100, "--phrase-dim", 8, "--num-workers", 0
    run(*words, "--", *options, UPDATES="2", VALID="40", **where)
    trained = PhraseEncoder.load(tmp_path / "out" / "checkpoints" / "checkpoint_best.pt")
    kept = PhraseEncoder.load(tmp_path / "out" / "phrase-encoder" / "ccpr.pt")
    assert kept.dimension == 8 and kept.fingerprint() == trained.fingerprint()
    assert PhrasePairs(tmp_path / "out" / "phrases" / "verses" / "valid").sentences == 40


def test_training_refuses_bad_input(ccpr: Ccpr, tmp_path: Path):
    def train(*extra: object) -> subprocess.CompletedProcess[str]:
        return call(*ccpr.training(tmp_path / "run", 1, *extra), check=False)

    refused(train("--max-subwords", 201), "--max-subwords is 201, but the encoder .* takes 200")
    refused(train("--different-context-fraction", 1.5), "--different-context-fraction is 1.5")
    refused(train("--phrases-per-sentence", 0), "--phrases-per-sentence is 0")
    refused(train("--phrase-dim", 0), "--phrase-dim is 0")
    refused(train("--phrase-temperature", 0), "--phrase-temperature is 0")
    refused(train("--encoder", tmp_path / "no"), "there is no encoder .*no: make one with convert_encoder.py")
    refused(train("--encoder", ""), "--encoder is not given: make one")
    random_context(list(itertools.islice(read_pairs(ccpr.pairs), 100)), other := tmp_path / "other")
    shutil.copytree(ccpr.checkpoint.parent, tmp_path / "done")
    refused(
        train("--encoder", other, "--save-dir", tmp_path / "done"), "done holds checkpoints with another tokenizer than"
    )
    assert PhraseEncoder.load(tmp_path / "done" / ccpr.checkpoint.name).dimension == 16  # and they are whole
    refused(train("--best-checkpoint-metric", "loss"), "give --best-checkpoint-metric accuracy")
    refused(train("--max-subwords", 5), "has no phrase pair in its valid part to work with")
