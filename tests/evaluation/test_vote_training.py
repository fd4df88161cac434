"""How much phrases count, learned: from real phrases of a real datastore, alone and alongside tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.decoding.trust import load_trust
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.fit import ONE_HELD_OUT_IN, split
from fairseq_ccpr.evaluation.grids import HeldOut, force_decode_text, limited, log_likelihood
from fairseq_ccpr.evaluation.test_set import Decodings, SystemOutput, TranslationScores, batches, load
from fairseq_ccpr.evaluation.training import train_votes
from fairseq_ccpr.evaluation.tune import Candidate
from fairseq_ccpr.inference.resources import parse_generation
from tests.helpers import call
from tests.small_models import World


def text_of(world: World, words: list[object]) -> tuple[HeldOut, PhraseMemory, RetrievalEnsemble]:
    """What memories say of the test set's references, batch by batch, and the memory of phrases beside the others."""
    cfg = parse_generation(world.options("--no-progress-bar", *words, "--phrases-min-similarity", 0))
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    text = force_decode_text("test", list(batches(cfg, task, models)), ensemble)
    return text, ensemble.find(PhraseMemory), ensemble


@pytest.mark.parametrize("kind", ["phrases", "joint"])
def test_votes_are_better_than_their_start_on_sentences_held_out(
    world: World, kind: str, request: pytest.FixtureRequest
) -> None:
    text, memory, ensemble = text_of(world, request.getfixturevalue(kind))
    memory.votes.state.data += 2  # so eager that there is something to learn
    before = {name: value.clone() for name, value in memory.votes.state_dict().items()}
    trained: Any = train_votes(memory, ensemble, [text])
    learned = trained.votes
    assert all(torch.equal(before[name], value) for name, value in memory.votes.state_dict().items())
    assert not any(torch.isnan(value).any() for value in learned.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in learned.state_dict().items())

    _, (held_out,) = split([text], "votes")

    def likelihood(one: PhraseMemory) -> torch.Tensor:
        said = {other.name: held_out.said(other) for other in ensemble.replacing(one).voting}
        return log_likelihood(held_out.mixture, held_out.log_probs, limited(ensemble, said).values())

    def loss(one: PhraseMemory) -> torch.Tensor:
        with_it, without = likelihood(one), likelihood(one.scaled(0.0))
        return (without - with_it).clamp_min(0).mean() - with_it.mean()

    assert loss(trained) < loss(memory)


def test_votes_learn_that_attention_tells_what_is_right(world: World, phrases: list[object]) -> None:
    text, memory, ensemble = text_of(world, phrases)
    records = [one.records["phrases"] for one in text.texts]
    assert all(record.proposals.looked is not None for record in records)
    for one, record in zip(text.texts, records):
        right = record.proposals.values == one.targets.unsqueeze(1)
        record.proposals = record.proposals._replace(looked=torch.where(right, 0.0, -2.0))
    memory.votes.state.data += 2
    trained: Any = train_votes(memory, ensemble, [text])
    assert trained.votes.attention[0] > 0.5 and not memory.votes.attention.any()


def test_votes_of_other_features_are_refused(world: World, phrases: list[object]) -> None:
    task, models = load(parse_generation([*world.options("--no-progress-bar"), *map(str, phrases)]))
    votes = PhraseVotes().state_dict()
    for trained in (
        {**votes, "state": votes["state"][1:]},
        {n: x for n, x in votes.items() if n != "attention"},
    ):
        task.trained = {"phrases": trained}
        with pytest.raises(
            ConfigurationError, match="weighed phrases by other features: tune again, or give"
        ):
            task.build_ensemble(models)


def test_votes_go_with_trust_and_decode(world: World, phrases: list[object], tmp_path: Path) -> None:
    """Where trust translates best, as some scores have it."""

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        bleu = {one.name: 1.0 + (one.ensemble.trust is not None) for one in tried} | {"base": 0.5}
        scores = {n: TranslationScores(value, value, "", "") for n, value in bleu.items()}
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    words = [*world.options("--no-progress-bar"), *map(str, phrases)]
    with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
        call("tune", *words, "--output", tmp_path / "options")
    cfg = parse_generation([*words, *(tmp_path / "options").read_text().split()])
    task, models = load(cfg)
    votes = PhraseVotes()
    votes.load_state_dict(load_trust(tmp_path / "options.trust", task.parts).trained["phrases"])
    memory = task.build_ensemble(models).find(PhraseMemory)
    assert memory.votes.digest() == votes.digest()
    untrusted = (
        load(parse_generation([*words, "--trust", "none"]))[0].build_ensemble(models).find(PhraseMemory)
    )
    assert untrusted.votes.digest() != memory.votes.digest()


def test_sentences_held_out_are_those_of_trust_and_too_few_are_refused(
    world: World, phrases: list[object]
) -> None:
    text, memory, ensemble = text_of(world, phrases)
    (trained,), (judged,) = split([text], "votes")
    assert {int(n) % ONE_HELD_OUT_IN for n in judged.sentences} == {0}
    assert 0 not in {int(n) % ONE_HELD_OUT_IN for n in trained.sentences}
    with pytest.raises(
        ConfigurationError, match="test has too few sentences to learn votes from: give at least 6"
    ):
        train_votes(memory, ensemble, [judged])  # all of it is held out
