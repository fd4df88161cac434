"""Decoding with phrases as its options say: tuned settings, precision, what is logged, and what is refused."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.evaluation.grids import force_decode_text, limited, log_likelihood, with_settings
from fairseq_ccpr.evaluation.test_set import Decodings, SystemOutput, TranslationScores, batches
from fairseq_ccpr.evaluation.tune import Candidate
from fairseq_ccpr.storage.files import MANIFEST
from tests.decoding.phrase_ensembles import load_ensemble, mixed_and_phrase_vote, retrieving
from tests.helpers import call, edit_manifest, equal, refused
from tests.small_models import Ccpr, World, other_encoder


@pytest.mark.usefixtures("with_bf16")
def test_phrases_are_encoded_in_the_precision_of_the_translation(
    decode: Callable, phrases: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    decode(*phrases)
    assert ",bf16|" not in caplog.text
    decode(*phrases, "--precision", "bf16")
    assert ",bf16|" in caplog.text and "precision:bf16" in caplog.text


def options_in(words: list[str], wanted: list[str]) -> bool:
    """Whether a command line has these options with these values."""
    pairs = [*itertools.pairwise(words)]
    return all(pair in pairs for pair in zip(wanted[::2], wanted[1::2]))


@pytest.mark.full
@pytest.mark.parametrize("half", [True, False])
def test_tuning_chooses_tokens_and_phrases_together(
    world: World, joint: list[object], tmp_path: Path, half: bool
) -> None:
    """Where both translate best, with half the weight of phrases or with all of it, as some scores have it."""
    lambdas: list[float] = []

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        together = [one for one in tried if len(one.ensemble.voting) == 2]
        weights = {one.name: one.ensemble.find(PhraseMemory).settings.lambda_ for one in together}
        lambdas.extend(weights.values())
        bleu = dict.fromkeys((one.name for one in tried), 1.0) | {"base": 0.5}
        bleu |= {name: 3 - weight if half else 2 + weight for name, weight in weights.items()}
        scores = {n: TranslationScores(value, 0.0, "", "") for n, value in bleu.items()}
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    words = [*world.options("--no-progress-bar"), *map(str, joint)]
    shaping = ["--phrases-threshold", "0.4", "--retrieval-lambda-max", "0.8"]
    with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
        shown = call("tune", *words, *shaping, "--output", tmp_path / "options", "--decode", 3).stdout
    assert "285 settings" in shown and "entries" in shown and "phrases:" in shown
    chosen = (tmp_path / "options").read_text().split()
    assert "--tokens-k" in chosen and options_in(chosen, shaping)
    kept = float(chosen[chosen.index("--phrases-lambda") + 1])
    assert kept == (min(lambdas) if half else max(lambdas)) and min(lambdas) == 0.5 * lambdas[0]
    assert options_in(chosen, ["--phrases-consent", "12"])  # it is no better with the bound
    generated = call("fairseq-generate", *words, *chosen)
    assert "Generate test" in generated.stdout


def test_tuner_scores_equal_a_direct_computation(world: World, joint: list[object]) -> None:
    settings = ["--phrases-lambda", 0.6, "--phrases-k", 2]
    cfg, task, models, ensemble = load_ensemble(world, [*joint, *settings, "--phrases-min-similarity", 0.3])
    direct = []
    for sample in batches(cfg, task, models):
        mixed, _ = mixed_and_phrase_vote(ensemble, sample)
        targets = sample["target"][sample["target"].ne(task.target_dictionary.pad())]
        direct.append(mixed.gather(1, targets.unsqueeze(1)).squeeze(1))
    ensemble = ensemble.replacing(ensemble.find(PhraseMemory).remembering())
    phrases = ensemble.find(PhraseMemory)
    text = force_decode_text("test", list(batches(cfg, task, models)), ensemble)
    # few as they are, all are kept
    assert len(text.having(["tokens", "phrases"]).targets) == len(text.targets)
    other = with_settings(ensemble, replace(task.settings[TokenRetrievalSettings], temperature=5.0))
    beside = text.beside(phrases, other)
    votes = limited(
        other, {memory.name: beside.said(memory) for memory in (ensemble.find(TokenMemory), phrases)}
    )
    found = log_likelihood(text.mixture, text.log_probs, votes.values())
    assert float(found.mean()) == pytest.approx(float(torch.cat(direct).mean()), abs=1e-4)


def test_log_tells_of_both_memories(
    world: World, joint: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = [*world.options("--no-progress-bar"), *map(str, joint), "--tokens-log", tmp_path / "log"]
    call("fairseq-generate", *words)
    assert any("Lambda_max:0.9" in record.message for record in caplog.records)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any(line["phrases"] is not None and line["phrase_lambda"] > 0 for line in lines)
    assert any(line["neighbours"] for line in lines)


def test_what_does_not_fit_is_refused(
    world: World, ccpr: Ccpr, phrase_store: Path, phrases: list[object], tmp_path: Path
) -> None:
    def generate(*extra: object) -> object:
        return call("fairseq-generate", *world.options("--no-progress-bar"), *extra, check=False)

    refused(
        generate("--datastore", phrase_store),
        "cannot be split into .* --bpe sentencepiece and --sentencepiece-model",
    )
    refused(generate(*phrases, "--phrases-encoder", tmp_path / "none.pt"), "none.pt")
    refused(generate(*phrases, "--phrases-k", 0), "--phrases-k is 0")
    refused(generate(*phrases, "--phrases-lambda", 2), "--phrases-lambda is 2")
    refused(generate(*phrases, "--retrieval-lambda-max", 1), "--retrieval-lambda-max is 1")
    other = other_encoder(ccpr, tmp_path / "other")
    refused(
        generate(*phrases, "--phrases-encoder", other), "built with another encoder: they need [0-9a-f]{12}"
    )
    moved = tmp_path / "moved"
    shutil.copytree(phrase_store, moved)
    phrase = json.loads((moved / MANIFEST).read_text())["phrase"]
    edit_manifest(moved, phrase=phrase | {"encoder": str(tmp_path / "gone.pt")})
    given = [*phrases, "--datastore", moved]
    refused(generate(*given), "gone.pt, which is not there: say with --phrases-encoder")
    assert generate(*given, "--phrases-encoder", ccpr.checkpoint, "--beam", 1).returncode == 0


def test_nothing_found_is_said_once(
    decode: Callable, phrases: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    size = ["--batch-size", 4]
    with retrieving([], lambda source: 0):
        assert equal(decode(*phrases, *size), decode(*size, base=True))
    assert sum("no phrase was retrieved" in record.message for record in caplog.records) == 1
    assert PhraseCandidates.__module__ in {record.name for record in caplog.records}
