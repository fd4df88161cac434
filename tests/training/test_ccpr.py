"""CCPR: its losses and its training, against plain references."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, project_ends
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.pair_build import edge_rule
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.training.contrast_dataset import PhraseContrastDataset
from fairseq_ccpr.training.phrase_contrast import (
    CcprConfig,
    CcprCriterion,
    alignment_losses,
    equal_candidates,
    segmentation_losses,
)
from tests.helpers import ROOT, accuracies, call, refused, run, run_two_processes
from tests.small_models import Ccpr, random_context
from tests.training.two_processes import gradient_of_two_processes


def reference(sources, targets, scale, sides):
    """Equation 2 of the CCPR paper in float64, a phrase at a time: other right translations are no negatives.

    Args:
        sides: strings and contexts of one side's phrases, and of the other's.
    """
    losses = []
    for i, x in enumerate(sources.double().numpy()):
        scores = scale * (targets.double().numpy() @ x)
        others = [
            j
            for j in range(len(scores))
            if all(strings[j] != strings[i] or contexts[j] != contexts[i] for strings, contexts in sides)
        ]
        losses.append(np.logaddexp.reduce(scores[[i, *others]]) - scores[i])
    return np.array(losses)


@given(k=st.integers(1, 9), scale=st.sampled_from([1.0, 20.0, 100.0]), seed=st.integers(0, 2**31))
def test_alignment_loss_equals_the_reference(k, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (nn.functional.normalize(torch.randn(k, 5, generator=generator), dim=1) for _ in range(2))
    sides = [[torch.randint(0, 3, (k,), generator=generator) for _ in range(2)] for _ in range(2)]
    excluded = equal_candidates(*sides[0]) | equal_candidates(*sides[1])
    found = alignment_losses(x, y, scale, excluded)
    wanted = reference(x, y, scale, [[part.tolist() for part in side] for side in sides])
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-4)
    half = alignment_losses(x.bfloat16(), y.bfloat16(), scale, excluded)
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_the_same_string_is_a_negative_in_another_context_alone() -> None:
    strings, contexts = torch.tensor([7, 7, 7, 8]), torch.tensor([1, 1, 2, 1])
    apart = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(equal_candidates(strings, contexts), ~apart)


def test_segmentation_loss_equals_the_reference() -> None:
    logits, are_phrases = (
        torch.tensor([-100.0, -1.5, 0.0, 2.0, 100.0]),
        torch.tensor([True, False, True, True, False]),
    )
    x, y = logits.double().numpy(), are_phrases.numpy()
    wanted = np.where(y, np.logaddexp(0, -x), np.logaddexp(0, x))
    np.testing.assert_allclose(segmentation_losses(logits, are_phrases).numpy(), wanted, rtol=1e-5)


def test_gradient_of_the_alignment_loss() -> None:
    x, y = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    excluded = equal_candidates(torch.tensor([1, 1, 2, 3]), torch.tensor([1, 1, 1, 1]))
    assert torch.autograd.gradcheck(lambda a, b, s: alignment_losses(a, b, s, excluded), (x, y, scale))


def test_ends_are_multiplied_before_they_are_gathered() -> None:
    linear, states = nn.Linear(12, 5), torch.randn(3, 7, 6)
    spans = torch.tensor([[0, 1, 1], [2, 0, 6], [1, 3, 5], [1, 3, 6]])
    ends = torch.cat([states[spans[:, 0], spans[:, 1]], states[spans[:, 0], spans[:, 2]]], dim=1)
    torch.testing.assert_close(project_ends(linear, states, spans), linear(ends))
    assert project_ends(linear, states, spans[:0]).shape == (0, 5)


def untrained(ccpr: Ccpr) -> PhraseEncoder:
    torch.manual_seed(1)
    return PhraseEncoder(ContextEncoder.load(ccpr.context), 16, "cosine", 0.05).eval()


def test_criterion_adds_both_directions_and_segmentation(ccpr: Ccpr) -> None:
    dataset, model = ccpr.dataset(), untrained(ccpr)
    sample = dataset.collater([dataset[i] for i in (0, 1, 0, *range(2, 20))])  # one sentence twice
    sample["source"]["others"] = sample["source"]["others"][5:]  # as short sentences have fewer than phrases
    criterion = CcprCriterion(CcprConfig(segmentation_weight=0.5), None)
    loss, count, logged = criterion(model, sample)
    sides = sample["source"], sample["target"]
    outputs, scale = model(*sides)
    spans = sum(len(logits) for _, logits in outputs)
    wanted, equal = 0.0, [(side["strings"].tolist(), side["contexts"].tolist()) for side in sides]
    for one, other in ((0, 1), (1, 0)):
        with torch.no_grad():
            wanted += reference(outputs[one][0], outputs[other][0], float(scale), equal).sum()
            phrases, others = outputs[one][1][:count].double(), outputs[one][1][count:].double()
            wanted -= (
                0.5 * count / spans * (phrases.sigmoid().log().sum() + (-others).sigmoid().log().sum()).item()
            )
    assert count == len(sides[0]["spans"]) == len(sides[1]["spans"]) and spans < 4 * count
    assert loss.item() == pytest.approx(wanted, rel=1e-5) and float(logged["loss"]) == loss.item()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_other_right_translations_of_a_phrase_are_no_negatives() -> None:
    """'Datei' as 'file' and as 'new file', 'file' of 'Datei' and of 'Datei.', and an unrelated pair: one sentence."""
    sides: list[dict[str, Tensor]] = [
        {"strings": torch.tensor(numbers), "contexts": torch.ones(4, dtype=torch.long)}
        for numbers in ([1, 1, 2, 3], [5, 6, 5, 7])
    ]
    vectors = [nn.functional.normalize(torch.randn(4, 6), dim=1) for _ in sides]

    def model(*_: object) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        return [(of_side, torch.zeros(4)) for of_side in vectors], torch.tensor(10.0)

    sample = {"source": sides[0], "target": sides[1], "phrases": 4, "ntokens": 1, "nsentences": 1}
    loss = CcprCriterion(CcprConfig(segmentation_weight=0.0), None)(model, sample)[0]
    logits = 10 * vectors[0] @ vectors[1].T
    negatives = {0: [3], 1: [2, 3], 2: [1, 3], 3: [0, 1, 2]}
    wanted = sum(
        of_pairs[i, [i, *others]].logsumexp(dim=0) - of_pairs[i, i]
        for of_pairs in (logits, logits.T)
        for i, others in negatives.items()
    )
    torch.testing.assert_close(loss, wanted)


def test_two_processes_have_the_gradient_of_one(ccpr: Ccpr, tmp_path: Path) -> None:
    criterion = CcprCriterion(CcprConfig(), None)
    assert "scale_offset" in gradient_of_two_processes(untrained(ccpr), criterion, ccpr.dataset(), tmp_path)


def test_the_temperature_is_learned(ccpr: Ccpr) -> None:
    dataset, model = ccpr.dataset(), untrained(ccpr)
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


@pytest.mark.full
def test_two_processes_train_one_encoder(ccpr: Ccpr, tmp_path: Path) -> None:
    log, _ = run_two_processes(*ccpr.training(tmp_path, 3, "--batch-size", 32))  # only the first process logs
    losses = re.findall(r"train_inner .* loss=([0-9.]+), .*bsz=([0-9]+)", log)
    assert len(losses) == 3 and "64" in [both for _, both in losses]
    assert len(accuracies(log)) == 1 and PhraseEncoder.load(tmp_path / "checkpoint_best.pt").dimension == 16


@torch.no_grad()
def accuracy(model: PhraseEncoder, dataset: PhraseContrastDataset) -> float:
    """acc@1 of the phrases of a dataset, per cent: the nearest target has the right string in the right sentence."""
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    x, y = (model.vectors(model.context(batch[s]["tokens"]), batch[s]["spans"]) for s in ("source", "target"))
    found, target = (x @ y.T).argmax(dim=1), batch["target"]
    right = (target["strings"][found] == target["strings"]) & (
        target["contexts"][found] == target["contexts"]
    )
    return 100 * right.double().mean().item()


def test_training_learns_to_find_translations(ccpr: Ccpr) -> None:
    model, dataset = PhraseEncoder.load(ccpr.checkpoint), ccpr.dataset()
    history = accuracies(ccpr.log)
    best = max(history)
    assert best > history[0] and best > 2 * accuracy(untrained(ccpr), dataset)
    assert accuracy(model, dataset) == pytest.approx(best, abs=0.1 * best)  # training is in bf16
    temperatures = re.findall(r"valid' subset .*?\| temperature ([0-9.]+)", ccpr.log)
    assert len(set(temperatures)) > 1


def test_a_checkpoint_keeps_the_rule_of_its_phrases_and_an_older_one_is_named(
    ccpr: Ccpr, tmp_path: Path
) -> None:
    settings = PhrasePairs(ccpr.phrases / "train").manifest.settings
    shutil.copytree(ccpr.checkpoint.parent, tmp_path / "old")
    old = tmp_path / "old" / ccpr.checkpoint.name
    state = torch.load(old)
    del state["task_state"]["edges"]
    torch.save(state, old)
    for checkpoint, wanted in ((ccpr.checkpoint, edge_rule(settings)), (old, "own")):
        encoder = PhraseEncoder.load(checkpoint)
        assert encoder.edges == wanted
        assert PhraseFinder(encoder, Segmentation()).description == f"learned>0.7<=7words,edges:{wanted}"
        assert "edges" not in PhraseFinder(encoder, Segmentation("all")).description
    assert edge_rule(settings) != "own"


@torch.no_grad()
def test_a_student_is_loaded_as_any_other_phrase_encoder(ccpr: Ccpr, tmp_path: Path) -> None:
    """Without the lab, which trains it; its options do not name the similarity."""
    checkpoint = shutil.copytree(ccpr.checkpoint.parent, tmp_path / "student") / ccpr.checkpoint.name
    state = torch.load(checkpoint)
    state["cfg"]["model"] = {"_name": "phrase_student", "layers": 2}
    torch.save(state, checkpoint)
    assert PhraseEncoder.load(checkpoint).fingerprint() == PhraseEncoder.load(ccpr.checkpoint).fingerprint()


def test_training_learns_what_phrases_are(ccpr: Ccpr) -> None:
    model, dataset = PhraseEncoder.load(ccpr.checkpoint), ccpr.dataset()
    batch = dataset.collater([dataset[i] for i in range(len(dataset))])
    for side in (batch["source"], batch["target"]):
        states = model.context(side["tokens"])
        phrases, others = (model.phrase_logits(states, side[name]).sigmoid() for name in ("spans", "others"))
        assert phrases.mean() > others.mean() + 0.1


@torch.no_grad()
def test_loaded_encoder_is_the_trained_one(ccpr: Ccpr, tmp_path: Path) -> None:
    loaded = PhraseEncoder.load(ccpr.checkpoint)
    trained = untrained(ccpr)
    trained.load_state_dict(torch.load(ccpr.checkpoint)["model"])
    batch = ccpr.dataset().collater([ccpr.dataset()[0]])["source"]
    for one, other in zip(loaded(batch)[0][0], trained(batch)[0][0], strict=True):
        assert torch.equal(one, other)
    assert (
        loaded.dimension == 16
        and loaded.fingerprint() == trained.fingerprint() != untrained(ccpr).fingerprint()
    )
    folder = tmp_path / "moved"  # the directory that training started from is not needed
    shutil.copytree(ccpr.checkpoint.parent, folder)
    assert PhraseEncoder.load(folder / ccpr.checkpoint.name).fingerprint() == loaded.fingerprint()
    (folder / "dict.txt").write_text("a 1\n")
    with pytest.raises(CheckpointError, match="no phrase encoder for the tokenizer next to it"):
        PhraseEncoder.load(folder / ccpr.checkpoint.name)
    with pytest.raises(CheckpointError, match="there is no phrase encoder"):
        PhraseEncoder.load(folder / "nothing.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt is no phrase encoder"):
        PhraseEncoder.load(ccpr.context / "model.pt")


@pytest.mark.full
def test_training_resumes_on_a_mixture(ccpr: Ccpr, tmp_path: Path) -> None:
    shutil.copytree(ccpr.checkpoint.parent, tmp_path / "run")
    words = ccpr.training(tmp_path / "run", 64, "--different-context-fraction", 0.5)
    words[1] = f"{ccpr.phrases}:{ccpr.phrases}"  # two sets
    log = run(*words).stdout
    assert "(epoch 5 @ 40 updates)" in log and "end of epoch 5" in log
    assert log.count("loading train data for epoch") == 1
    state: dict[str, Tensor] = torch.load(tmp_path / "run" / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 64


@pytest.mark.full
def test_the_recipe(ccpr: Ccpr, tmp_path: Path) -> None:
    (tmp_path / "verses.tsv.gz").write_bytes(gzip.compress(ccpr.pairs.read_bytes()))
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ENCODER": str(ccpr.context)}
    words = [
        "/bin/bash",
        ROOT / "scripts" / "recipes" / "train_ccpr.sh",
        tmp_path / "out",
        tmp_path / "verses.tsv.gz",
    ]
    done = run(*words, tmp_path / "verses.tsv", check=False, **where)
    assert (
        done.returncode == 2
        and "two texts are called verses" in done.stderr
        and not (tmp_path / "out").exists()
    )
    options = "--max-subwords", 100, "--phrase-dim", 8, "--num-workers", 0
    run(*words, "--", *options, UPDATES="2", VALID="40", **where)
    trained = PhraseEncoder.load(tmp_path / "out" / "checkpoints" / "checkpoint_best.pt")
    kept = PhraseEncoder.load(tmp_path / "out" / "phrase-encoder" / "ccpr.pt")
    assert kept.dimension == 8 and kept.fingerprint() == trained.fingerprint()
    assert PhrasePairs(tmp_path / "out" / "phrases" / "verses" / "valid").sentences == 40


def test_training_refuses_bad_input(ccpr: Ccpr, tmp_path: Path) -> None:
    def train(*extra: object) -> subprocess.CompletedProcess[str]:
        return call(*ccpr.training(tmp_path / "run", 1, *extra), check=False)

    refused(train("--max-subwords", 201), "--max-subwords is 201, but the encoder .* takes 200")
    refused(train("--different-context-fraction", 1.5), "--different-context-fraction is 1.5")
    refused(train("--phrases-per-sentence", 0), "--phrases-per-sentence is 0")
    refused(train("--phrase-dim", 0), "--phrase-dim is 0")
    refused(train("--phrase-temperature", 0), "--phrase-temperature is 0")
    refused(
        train("--encoder", tmp_path / "no"), "there is no encoder .*no: make one with fairseq-ccpr convert"
    )
    refused(train("--encoder", ""), "--encoder is not given: make one")
    random_context(list(itertools.islice(read_pairs(ccpr.pairs), 100)), other := tmp_path / "other")
    shutil.copytree(ccpr.checkpoint.parent, tmp_path / "done")
    refused(
        train("--encoder", other, "--save-dir", tmp_path / "done"),
        "done holds checkpoints with another tokenizer than",
    )
    assert PhraseEncoder.load(tmp_path / "done" / ccpr.checkpoint.name).dimension == 16  # and they are whole
    refused(train("--best-checkpoint-metric", "loss"), "give --best-checkpoint-metric accuracy")
    refused(train("--max-subwords", 5), "has no phrase pair in its valid part to work with")
