"""Training XPR: its options, the accuracy that it is judged by, its checkpoints, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.lab.xpr import type_vectors
from fairseq_ccpr.lab.xpr.lexicon import Lexicon
from fairseq_ccpr.lab.xpr.type_vectors import find_translations, type_means
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder, span_means
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import subword_bounds
from tests.helpers import accuracies, call, refused, run, run_two_processes
from tests.lab.small_xpr import make_model
from tests.small_models import Xpr

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


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

    means = [
        type_means(encode, encoder.context.tokenizer, side, [count], 60, CPU)[0, 0] for side in lexicon.sides
    ]
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
        return torch.stack(
            [span_means(states, spans) for states in encoder.context.states_of_layers(tokens, [1, 2])]
        )

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
