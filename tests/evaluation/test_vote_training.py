"""How much phrases count, learned: from real phrases of a real datastore, alone and alongside tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.decoding.trust_file import load_trust
from fairseq_ccpr.evaluation.translation.test_set import batches, load
from fairseq_ccpr.evaluation.tuning import vote_training
from fairseq_ccpr.evaluation.tuning.held_out import force_decode_text
from fairseq_ccpr.evaluation.tuning.phrase_grid import References
from fairseq_ccpr.evaluation.tuning.vote_training import HELD_OUT, VotingText, learn_votes
from fairseq_ccpr.inference.arguments import parse_generation
from tests.helpers import call
from tests.small_models import World


def text_of(world: World, words: list[object]) -> tuple[VotingText, object]:
    """What phrases propose at the test set's references, and the memory they come from."""
    cfg = parse_generation(world.options("--no-progress-bar", *words, "--phrase-min-similarity", 0))
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    held_out = force_decode_text("test", list(batches(cfg, task, models)), ensemble, 8)
    settings = task.token_settings if held_out.tokens is not None else None
    references = References.of(held_out, settings, 0.9)
    return VotingText(held_out.phrases, held_out.sentences, references), ensemble.phrases


@pytest.mark.parametrize("kind", ["phrases", "joint"])
def test_votes_are_better_than_their_start_on_sentences_held_out(
    world: World, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vote_training, "UPDATES", 60)
    text, memory = text_of(world, request.getfixturevalue(kind))
    before = {name: value.clone() for name, value in memory.votes.state_dict().items()}
    learned = learn_votes(memory, [text])
    assert all(torch.equal(before[name], value) for name, value in memory.votes.state_dict().items())
    assert not any(torch.isnan(value).any() for value in learned.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in learned.state_dict().items())

    def loss(one: object) -> float:
        _, judged = text.split()
        found, without = map(torch.cat, zip(*(text.log_likelihoods(one, batch) for batch in judged)))
        return float((without - found).clamp_min(0).mean() - found.mean())

    assert loss(replace(memory, votes=learned)) < loss(memory)


def test_votes_go_with_trust_and_decode(world: World, phrases: list[object], tmp_path: Path) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, phrases)]
    call("tune", *words, "--output", tmp_path / "options")
    cfg = parse_generation([*words, *(tmp_path / "options").read_text().split()])
    task, models = load(cfg)
    trust, _ = load_trust(tmp_path / "options.trust", task.parts)
    assert isinstance(trust, LearnedTrust) and trust.votes is not None
    memory = task.build_ensemble(models).phrases
    assert memory.votes.digest() == trust.votes.digest()
    untrusted = load(parse_generation([*words, "--trust", "none"]))[0].build_ensemble(models).phrases
    assert untrusted.votes.digest() != memory.votes.digest()


def test_sentences_held_out_are_those_of_trust_and_too_few_teach_nothing(world: World, phrases: list[object]) -> None:
    text, memory = text_of(world, phrases)
    trained, judged = text.split()
    assert {int(n) % HELD_OUT for batch in judged for n in text.sentences[batch.rows]} == {0}
    assert 0 not in {int(n) % HELD_OUT for batch in trained for n in text.sentences[batch.rows]}
    all_held_out = replace(text, sentences=torch.zeros_like(text.sentences))
    learned = learn_votes(memory, [all_held_out])
    assert learned.digest() == memory.votes.digest() and learned is not memory.votes
