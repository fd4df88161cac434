"""Phrases inside beam search, with and without tokens: the invariants, on real models."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fairseq_ccpr.decoding.breakdown import break_down
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.text.pairs import read_pairs
from tests.decoding.phrase_ensembles import load_ensemble, mixed_and_phrase_vote, retrieving
from tests.helpers import call, equal, refused
from tests.small_models import PAIRS, World

SEARCHES = [
    [],
    ["--lenpen", 0.5, "--nbest", 3],
    ["--prefix-size", 2],
    ["--sampling", "--sampling-topk", 5, "--nbest", 5],
    ["--diverse-beam-groups", 5],
    ["--beam", 1],
    ["--score-reference"],
]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_share_of_zero_equals_stock_fairseq_and_token_retrieval_to_the_bit(
    decode: Callable, phrases: list[object], joint: list[object], search: list
) -> None:
    assert equal(decode(*phrases, *search, "--phrases-lambda", 0), decode(*search, base=True))
    assert equal(decode(*joint, *search, "--phrases-lambda", 0), decode(*search, "--tokens-lambda", 0.4))


def test_parts_in_two_folders_are_as_in_one(
    world: World, decode: Callable, both: Path, phrase_store: Path, joint: list[object]
) -> None:
    apart = [*joint, "--datastore", f"{world.datastore}:{phrase_store}"]
    assert equal(decode(*apart), decode(*joint))
    twice = call(
        "fairseq-generate", *world.options(*joint, "--datastore", f"{world.datastore}:{both}"), check=False
    )
    refused(twice, "--datastore names two token parts, in .*datastore and in .*both")


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_phrases_change_every_kind_of_search(decode: Callable, phrases: list[object], search: list) -> None:
    changed = decode(*phrases, *search, "--phrases-lambda", 0.9)
    assert not equal(changed, decode(*search, base=True), tolerance=1e-2)


def test_no_phrases_at_all_is_token_retrieval_to_the_bit(decode: Callable, joint: list[object]) -> None:
    with retrieving([], lambda source: 0):
        assert equal(decode(*joint), decode("--tokens-lambda", 0.4))


def test_tokens_without_weight_leave_phrases_as_they_are_alone_to_the_bit(
    decode: Callable, phrases: list[object], joint: list[object]
) -> None:
    alone = decode(*phrases, "--phrases-k", 3)
    assert equal(decode(*joint, "--tokens-lambda", 0), alone) and not equal(decode(*joint), alone)


@pytest.mark.parametrize("kind", ["phrases", "joint"])
def test_phrases_do_not_depend_on_the_batch(
    decode: Callable, kind: str, request: pytest.FixtureRequest
) -> None:
    words = [*request.getfixturevalue(kind), "--phrases-lambda", 0.8]
    together = decode(*words, "--batch-size", 32)
    for size in (1, 7):
        assert equal(decode(*words, "--batch-size", size), together, tolerance=3e-3)


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the model attends to count for phrases."""
    begin = PhraseVotes.__init__

    def begin_attentive(votes: PhraseVotes) -> None:
        begin(votes)
        votes.attention.data = torch.linspace(1.5, 0.5, len(votes.attention))

    monkeypatch.setattr(PhraseVotes, "__init__", begin_attentive)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("looking", [False, True])
def test_scores_of_beam_search_are_those_of_one_pass_over_what_it_wrote(
    world: World,
    decode: Callable,
    joint: list[object],
    looking: bool,
    members: int,
    request: pytest.FixtureRequest,
) -> None:
    """Prefixes, coverage and attention follow the beam, and the batch as it shrinks."""
    words = [*joint, "--phrases-lambda", 0.8]
    words += ["--path", f"{world.model}:{world.other_model}"] if members > 1 else []
    if looking:
        without = decode(*words)
        request.getfixturevalue("attentive")
    found = decode(*words)
    assert not looking or not equal(found, without, tolerance=1e-2)
    options = ["--max-tokens", 2000, "--gen-subset", "test", *words]
    cfg, task, models, ensemble = load_ensemble(world, options)
    coming = 0
    for sample in batches(cfg, task, models):
        best = [found[i][0] for i in sample["id"].tolist()]
        traced = break_down(ensemble, sample, [one["tokens"] for one in best], task.target_dictionary)
        assert torch.allclose(traced.mixed, torch.cat([one["positional_scores"] for one in best]), atol=3e-3)
        weights = sum(vote.weight for vote in traced.votes)
        assert weights.max() <= 0.9 + 1e-6
        said = [vote.log_prob(traced.text.targets) for vote in traced.votes]
        terms = [vote.weight.log() + p for vote, p in zip(traced.votes, said)]
        mixed = torch.stack([torch.log1p(-weights) + traced.text.log_probs, *terms]).logsumexp(dim=0)
        assert torch.allclose(mixed, traced.mixed, atol=1e-4)
        coming += int((said[1] > -1).sum())
    assert coming > 10


def test_probabilities_sum_to_one_and_phrases_give_none_to_specials(
    world: World, joint: list[object]
) -> None:
    cfg, task, models, ensemble = load_ensemble(world, [*joint, "--phrases-lambda", 0.9])
    dictionary = task.target_dictionary
    for sample in batches(cfg, task, models):
        mixed, said = mixed_and_phrase_vote(ensemble, sample)
        assert torch.allclose(mixed.exp().sum(dim=1), torch.ones(len(mixed)), atol=1e-4)
        for special in (dictionary.pad(), dictionary.bos(), dictionary.eos(), dictionary.unk()):
            assert said.log_probs[said.values == special].eq(float("-inf")).all()
        once = torch.zeros(len(said.values), len(dictionary)).scatter(1, said.values, said.log_probs.exp())
        some = said.weight > 0
        assert some.any() and torch.allclose(once[some].sum(dim=1), torch.ones(int(some.sum())), atol=1e-4)


def test_phrases_of_the_references_help_and_those_of_other_sentences_do_not(
    world: World, decode: Callable, phrases: list[object]
) -> None:
    pairs = list(read_pairs(world.folder / "test.tsv"))
    words = [*phrases, "--phrases-lambda", 0.8, "--beam", 5]
    cfg = parse_generation(world.options("--no-progress-bar", *words))
    task, _ = load(cfg)
    references = {i: task.dataset("test").tgt[i] for i in range(PAIRS["test"])}

    def overlap(found: dict) -> float:
        """Share of the references' tokens that the hypotheses have."""
        common = sum(len(set(references[i].tolist()) & set(found[i][0]["tokens"].tolist())) for i in found)
        return common / sum(len(set(tokens.tolist())) for tokens in references.values())

    base = overlap(decode(base=True))
    sources = [source for source, _ in pairs]

    def number(text: str) -> int:
        """Which sentence it is, though unknown pieces are missing from it."""
        return sources.index(difflib.get_close_matches(text, sources, 1, 0)[0])

    targets = [target for _, target in pairs]
    with retrieving(targets, number):
        helped = overlap(decode(*words))
    random.Random(1).shuffle(targets)
    with retrieving(targets, number):
        shuffled = overlap(decode(*words))
    # Words of other verses are among a reference's as well, in some tiny models more than in others.
    assert helped > base + 0.1 and shuffled - base < (helped - base) / 3, (base, helped, shuffled)


def test_ensembles_take_phrases_beside_tokens(world: World, decode: Callable, joint: list[object]) -> None:
    members = ["--path", f"{world.other_model}:{world.model}"]
    assert equal(decode(*joint, *members, "--phrases-lambda", 0), decode(*members, "--tokens-lambda", 0.4))
    changed = decode(*joint, *members, "--phrases-lambda", 0.9)
    assert not equal(changed, decode(*members, "--tokens-lambda", 0.4), tolerance=1e-2)
