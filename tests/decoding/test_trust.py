"""Learned trust inside the decoder: what it can never break, and which files of it are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fairseq_ccpr.datastore.manifest import TEXT
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.mixture import (
    Distribution,
    Mixture,
    ModelEvidence,
    Vote,
    merge_equal,
    neighbour_log_probabilities,
)
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseEvidence
from fairseq_ccpr.decoding.retrieval_task import find_parts
from fairseq_ccpr.decoding.token_features import (
    Course,
    TokenEvidence,
    along_sentences,
    first_occurrences,
    observed,
)
from fairseq_ccpr.decoding.trust import (
    LearnedTrust,
    Trust,
    TrustDescription,
    TrustStep,
    feature_names,
    load_trust,
    needs_of,
    reweigh,
    save_trust,
    trust_features,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.lab.speed.decoding_speed import SpeedTest
from fairseq_ccpr.storage import fingerprint
from tests.decoding.phrase_ensembles import load_ensemble
from tests.decoding.test_phrase_decoding import SEARCHES
from tests.helpers import BOTH, TOKENS, adaptive_trust, call, equal, refused, run
from tests.small_models import World, build

SEED = 20261123


def parts_of(folder: Path) -> dict[str, TokenDatastore | PhraseDatastore]:
    kinds = {"token": TokenDatastore, "phrase": PhraseDatastore}
    return {name: kinds[name](found) for name, found in find_parts(str(folder)).items()}


def randomised(trust: Trust, scale: float = 0.5) -> Trust:
    torch.manual_seed(SEED)
    for parameter in trust.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return trust


def write(
    trust: Trust,
    folder: Path,
    path: Path,
    settings: dict | None = None,
    trained: dict | None = None,
    **changes: object,
) -> Path:
    parts = parts_of(folder)
    described = TrustDescription(
        trust.KIND, trust.arguments(), needs_of(parts), {name: part.keys_fingerprint for name, part in parts.items()},
        settings or {},
    )  # fmt: skip
    for name, value in changes.items():
        object.__setattr__(described, name, value)
    save_trust(trust, trained or {}, described, path)
    return path


@pytest.fixture(scope="module")
def random_trust(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trust in the tokens that was drawn at random."""
    trust = LearnedTrust(TOKENS)
    randomised(trust)
    return write(trust, world.datastore, tmp_path_factory.mktemp("trust") / "random.trust")


@pytest.fixture(scope="module")
def joint_trust(both: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in tokens and phrases."""
    trust = randomised(LearnedTrust(BOTH))
    return write(trust, both, tmp_path_factory.mktemp("trust") / "joint.trust")


def test_trust_of_another_weight_is_warned_of(
    world: World, random_trust: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that do not say which weight they were trained with are taken as they are."""
    path = write(LearnedTrust(TOKENS), world.datastore, tmp_path / "t", weight="my_weight")
    words = [*world.options("--no-progress-bar"), "--beam", 1, "--trust"]
    warned = "trained with the weight my_weight, and --task has confidence_weight: tune again"
    call("compare", *words, random_trust)
    assert "trained with the weight" not in caplog.text
    call("compare", *words, path)
    assert warned in caplog.text


def test_trust_of_another_retriever_or_memory_is_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*world.options("--no-progress-bar"), "--beam", 1, "--trust"]
    model = fingerprint.short(TokenDatastore(world.datastore).section.fingerprints["model"])
    faults = (
        ("retriever", "Mine", "TokenRetriever"),
        ("memory tokens", "MyMemory", "TokenMemory"),
        ("model", "0123", model),
    )
    for what, mine, ours in faults:
        path = write(LearnedTrust(TOKENS), world.datastore, tmp_path / "t", classes={what: mine})
        call("compare", *words, path)
        assert f"trust was trained with the {what} {mine}, and this is {ours}: tune again" in caplog.text


def test_trust_of_other_features_is_refused(world: World, tmp_path: Path) -> None:
    words = [*world.options("--no-progress-bar"), "--beam", 1, "--trust"]
    names = list(TOKENS["tokens"])
    for features in ([*names[1:], names[0]], [*names, "mine"], names[:-1]):
        path = write(LearnedTrust({"tokens": features}), world.datastore, tmp_path / "t")
        told = "trained with other features of tokens than --task translation_retrieval has: tune again"
        refused(call("compare", *words, path, check=False), told)


def test_a_network_of_zeros_changes_nothing_to_the_bit(
    world: World, both: Path, decode: Callable, joint: list, tmp_path: Path
) -> None:
    zero = write(LearnedTrust(TOKENS), world.datastore, tmp_path / "zero.trust")
    assert equal(decode("--tokens-lambda", 0.6, "--trust", zero), decode("--tokens-lambda", 0.6))
    zero = write(LearnedTrust(BOTH), both, tmp_path / "joint.trust")
    assert equal(decode(*joint, "--trust", zero), decode(*joint))


def test_phrases_that_tuning_left_out_are_not_retrieved(
    world: World, decode: Callable, joint: list, tmp_path: Path
) -> None:
    """Trust in the tokens alone, with a weight of phrases of 0, goes with a datastore that has both."""
    trust, silent = randomised(LearnedTrust(TOKENS)), {"phrases": {"lambda_": 0.0}}
    alone = write(trust, world.datastore, tmp_path / "alone.trust", silent)
    assert equal(decode(*joint, "--trust", alone), decode("--tokens-lambda", 0.4, "--trust", alone))
    done = run("fairseq-generate", *world.options(*joint, "--trust", alone))
    assert " phrases:" not in done.stdout + done.stderr and "trust:learned-" in done.stdout + done.stderr
    refused(
        call(
            "fairseq-generate", *world.options(*joint, "--trust", alone, "--phrases-lambda", 0.5), check=False
        ),
        "--phrases-lambda is 0.5, but tuning left phrases out and learned trust in the tokens alone: give --trust none",
    )
    other = write(trust, world.datastore, tmp_path / "other.trust")
    refused(
        call("fairseq-generate", *world.options(*joint, "--trust", other), check=False),
        "is trust in token parts, but --datastore has token and phrase",
    )


@pytest.mark.parametrize("search", [*SEARCHES, ["--temperature", 1.3]], ids=str)
def test_no_weight_stays_none_to_the_bit(decode: Callable, random_trust: Path, search: list) -> None:
    assert equal(decode(*search, "--tokens-lambda", 0, "--trust", random_trust), decode(*search, base=True))
    changed = decode(*search, "--tokens-lambda", 0.6, "--trust", random_trust)
    assert not equal(changed, decode(*search, "--tokens-lambda", 0.6), tolerance=1e-2)


def test_trust_does_not_depend_on_the_batch(
    decode: Callable, joint: list, random_trust: Path, joint_trust: Path
) -> None:
    for words in (["--tokens-lambda", 0.6, "--trust", random_trust], [*joint, "--trust", joint_trust]):
        assert equal(decode(*words, "--batch-size", 3), decode(*words), tolerance=2e-3)


def test_scoring_a_hypothesis_gives_the_score_beam_search_gave(
    check_rescoring: Callable, random_trust: Path
) -> None:
    """Running means are carried along the beam, and computed at once over given targets."""
    check_rescoring("--tokens-lambda", 0.6, "--trust", random_trust)


def test_the_same_with_phrases(check_rescoring: Callable, joint: list, joint_trust: Path) -> None:
    check_rescoring(*joint, "--trust", joint_trust)


def test_half_precision_changes_scores_little(
    decode: Callable, joint: list, random_trust: Path, joint_trust: Path
) -> None:
    """Features are computed in single precision, whatever the models are in."""
    for words in (["--tokens-lambda", 0.6, "--trust", random_trust], [*joint, "--trust", joint_trust]):
        whole, half = (decode(*words, "--score-reference", *precision) for precision in ([], ["--fp16"]))
        differences = [
            half[i][0]["positional_scores"].float() - one[0]["positional_scores"] for i, one in whole.items()
        ]
        assert float(torch.cat(differences).abs().median()) < 0.01 and bool(
            torch.cat(differences).isfinite().all()
        )
        beams = decode(*words, "--fp16", "--beam", 3)
        assert all(bool(hypothesis["score"].isfinite()) for found in beams.values() for hypothesis in found)


def test_ensembles_work(world: World, decode: Callable, random_trust: Path) -> None:
    words = ["--tokens-lambda", 0.6, "--trust", random_trust, "--beam", 2]
    path = ["--path", f"{world.other_model}:{world.model}"]
    assert not equal(decode(*words, *path), decode(*path, "--beam", 2, base=True), tolerance=1e-2)


def evidence(count: int, k: int, phrases: int = 0, ruled_out: tuple[int, ...] = ()) -> TrustStep:
    """Random evidence, some neighbours missing and values repeated; the last row found nothing."""
    torch.manual_seed(SEED)
    print("seed", SEED)
    scores = torch.rand(count, k).sort(dim=1, descending=True).values
    scores[torch.rand(count, k) < 0.2] = float("-inf")
    scores[-1] = float("-inf")
    values = torch.randint(4, 9, (count, k))
    log_probs = neighbour_log_probabilities(scores, values, 0.1)
    distribution = torch.randn(count, 12).log_softmax(dim=1)
    distribution[:, ruled_out] = -torch.inf
    course = Course(
        torch.randn(count), torch.randn(count, 2), 1.0 + torch.arange(count), torch.rand(count, 1)
    )
    tokens = TokenEvidence(
        scores, values, torch.rand(count, k), log_probs, distribution.gather(1, values), course
    )
    weights = (torch.rand(count, 1) * (scores.amax(dim=1, keepdim=True) > float("-inf"))).float()
    votes = [Vote(values, log_probs, weights[:, 0], tokens)]
    if phrases:
        proposed = torch.randint(4, 12, (count, phrases))
        merged = merge_equal(torch.rand(count, phrases).softmax(dim=1), proposed).log()
        mass = torch.rand(count) * (torch.arange(count) % 3 > 0)
        merged = merged.masked_fill(mass.unsqueeze(1) == 0, float("-inf"))
        seen = PhraseEvidence(
            proposed, merged, distribution.gather(1, proposed), mass, torch.rand(count), torch.rand(count)
        )
        votes.append(Vote(proposed, merged, 0.4 * mass, seen))
        weights = torch.cat([weights * 0.5, 0.4 * mass.unsqueeze(1)], dim=1)
    return TrustStep(ModelEvidence(*distribution.max(dim=1)), votes, weights)


@pytest.mark.parametrize("ruled_out", [(4,), tuple(range(4, 12))], ids=["one", "all that is retrieved"])
def test_a_token_that_the_model_rules_out_leaves_numbers(ruled_out: tuple[int, ...]) -> None:
    step = evidence(40, 8, phrases=6, ruled_out=ruled_out)
    features = trust_features(step.model, step.votes)
    below = features[:, feature_names(BOTH).index("model of favourite")]
    # nothing was found in the last row
    assert features.isfinite().all() and below[-1] == 0 and below.max() > 75
    trust = randomised(LearnedTrust(BOTH))
    trust.prepare(features)
    weights = trust(step).weights
    assert weights.isfinite().all() and (weights[-1, 0] == 0) and bool((weights.sum(dim=1) <= 1).all())


def rename(step: TrustStep, names: torch.Tensor) -> TrustStep:
    """The same evidence in a vocabulary whose tokens have other numbers."""
    votes = [
        vote._replace(values=names[vote.values], evidence=vote.evidence._replace(values=names[vote.values]))
        for vote in step.votes
    ]
    return step._replace(model=step.model._replace(favourite=names[step.model.favourite]), votes=votes)


def at(step: TrustStep, order: torch.Tensor) -> TrustStep:
    tokens, phrases = (vote.evidence for vote in step.votes)
    course = Course(*(part[order] for part in tokens.course[:-1]))
    evidence = (
        TokenEvidence(*(part[order] for part in tokens[:5]), course),
        PhraseEvidence(*(p[order] for p in phrases)),
    )
    votes = [vote.select(order)._replace(evidence=one) for vote, one in zip(step.votes, evidence)]
    return TrustStep(ModelEvidence(*(part[order] for part in step.model)), votes, step.weights[order])


def test_features_follow_the_hypotheses_and_do_not_name_tokens() -> None:
    step = evidence(40, 8, phrases=6)
    features = trust_features(step.model, step.votes)
    assert features.shape == (40, len(feature_names(BOTH))) and bool(features.isfinite().all())
    order = torch.randperm(40)
    moved = at(step, order)
    assert torch.equal(trust_features(moved.model, moved.votes), features[order])
    renamed = rename(step, torch.randperm(12) + 100)
    assert torch.allclose(trust_features(renamed.model, renamed.votes), features)


@pytest.mark.parametrize("k", [1, 5, 64])
def test_features_equal_a_plain_computation(k: int) -> None:
    step = evidence(30, k)
    tokens: Any = step.votes[0].evidence
    names, features = feature_names(TOKENS), trust_features(step.model, step.votes)
    found = dict(zip(names, features.T.tolist()))
    for row in range(30):
        pairs = [(s, v) for s, v in zip(tokens.scores[row].tolist(), tokens.values[row].tolist()) if s > -9]
        best_first = sorted((s for s, _ in pairs), reverse=True)
        at = min(4, len(pairs)) - 1
        assert found["score 4"][row] == pytest.approx(best_first[at] if pairs else 0, abs=1e-6)
        if not pairs:
            assert found["found"][row] == found["overlap"][row] == found["agreement"][row] == 0
            continue
        weights = torch.tensor([s for s, _ in pairs], dtype=torch.float64).div(0.1).softmax(dim=0).tolist()
        of_token: dict[int, float] = {}
        for weight, (_, value) in zip(weights, pairs):
            of_token[value] = of_token.get(value, 0) + weight
        assert found["highest p_tok"][row] == pytest.approx(max(of_token.values()), abs=1e-5)
        entropy = -sum(p * torch.tensor(p).log().item() for p in of_token.values())
        assert found["entropy of p_tok"][row] == pytest.approx(entropy, abs=1e-4)


def test_agreement_equals_a_plain_loop() -> None:
    step = evidence(60, 8, phrases=6)
    features = dict(zip(feature_names(BOTH), trust_features(step.model, step.votes).T.tolist()))
    rows = [
        [dict(zip(*row)) for row in zip(vote.values.tolist(), vote.log_probs.exp().tolist())]
        for vote in step.votes
    ]
    for row, (tokens, phrases) in enumerate(zip(*rows)):
        one, other = (max(said, key=said.__getitem__) for said in (tokens, phrases))
        there = tokens[one] > 0 and phrases[other] > 0
        assert features["tokens and phrases agree"][row] == (there and one == other)
        assert features["tokens say favourite of phrases"][row] == pytest.approx(there * tokens.get(other, 0))


@pytest.mark.parametrize("hidden", [0, 5])
def test_the_network_is_its_formula_and_its_attributions_are_slopes(hidden: int) -> None:
    trust = randomised(LearnedTrust(BOTH, hidden), 2.0).double()
    inputs = trust.inputs(evidence(60, 8, phrases=6)).double().index_fill(1, torch.tensor([3]), 0.5)
    trust.prepare(inputs)
    z, output = (
        ((3 * inputs - inputs.mean(0)) / inputs.std(0).clamp_min(1e-3)).clamp(-4, 4),
        trust.gate.output.weight,
    )
    y = trust.gate.hidden(z).tanh() if hidden else z
    slopes = (output * (1 - y.square()).unsqueeze(1)) @ trust.gate.hidden.weight if hidden else output
    torch.testing.assert_close(trust.gate(3 * inputs), (y @ output.T + trust.gate.output.bias).clamp(-6, 6))
    torch.testing.assert_close(trust.gate.attributions(3 * inputs), (slopes * z.unsqueeze(1)).detach())
    LearnedTrust(**trust.arguments()).load_state_dict(trust.state_dict())


def test_first_occurrences_equal_a_plain_loop() -> None:
    values = torch.randint(0, 6, (50, 20), generator=torch.Generator().manual_seed(SEED))
    plain = [[value not in row[:i] for i, value in enumerate(row)] for row in values.tolist()]
    assert first_occurrences(values).tolist() == plain


def test_neighbours_of_the_unknown_token_alone_are_as_none() -> None:
    scores = torch.linspace(0.9, 0.1, 16).expand(2, 16).clone()
    scores[0, :8] = -torch.inf  # the nearest, while others are left
    seen = observed(scores, torch.zeros(2, 16).long(), torch.zeros(2).long())
    assert seen.isfinite().all() and seen[0].tolist() == [0, 0, 0, 1] and seen[1, 2] == 1


def test_running_means_equal_a_plain_loop() -> None:
    torch.manual_seed(SEED)
    lengths = [4, 1, 7]
    positions = torch.cat([torch.arange(n) for n in lengths])
    scores, values = torch.randn(12, 9).sort(dim=1, descending=True).values, torch.randint(0, 3, (12, 9))
    scores[5] = float("-inf")
    favourite = torch.randint(0, 3, (12,))
    seen = observed(scores, values, favourite)
    course = Course.of(torch.zeros(12), along_sentences(seen, positions), torch.zeros(12, 1))
    start = 0
    for length in lengths:
        for t in range(length):
            rows = range(start, start + t + 1)
            some = [i for i in rows if scores[i, 0] > float("-inf")]
            agreement = sum(float(values[i, 0] == favourite[i]) for i in some) / max(1, len(some))
            assert float(course.running[start + t, 1]) == pytest.approx(agreement, abs=1e-5)
            assert float(course.length[start + t]) == t + 1
        start += length


@pytest.mark.parametrize("kind", [LearnedTrust, adaptive_trust()])
def test_what_trust_decides_is_a_distribution(kind: type[Trust]) -> None:
    phrases = kind is LearnedTrust
    step = evidence(60, 8, phrases=6 if phrases else 0)
    trust = randomised(LearnedTrust(BOTH) if phrases else kind(TOKENS, neighbours=8, temperature=0.1))  # type: ignore[call-arg]
    trust.prepare(trust.inputs(step))
    weights, spread = trust(step)
    assert bool((weights >= 0).all()) and bool((weights.sum(dim=1) < 1 + 1e-6).all())
    assert not weights[step.weights == 0].any()
    if spread is not None:
        found = step.weights[:, 0] > 0
        assert torch.allclose(spread[found].sum(dim=1), torch.ones(int(found.sum())), atol=1e-5)
        assert not spread[step.votes[0].log_probs == float("-inf")].any()


def test_weights_equal_the_equation_in_float64() -> None:
    torch.manual_seed(SEED)
    weights, a = torch.rand(100, 2, dtype=torch.float64) / 2, torch.randn(100, 2, dtype=torch.float64) * 3
    odds = torch.cat([1 - weights.sum(dim=1, keepdim=True), weights * a.exp()], dim=1)
    assert torch.allclose(reweigh(weights, a), (odds / odds.sum(dim=1, keepdim=True))[:, 1:])
    assert torch.equal(reweigh(weights, torch.zeros_like(a)), weights)


def test_trust_comes_after_lambda_max_in_float64(world: World, joint: list, joint_trust: Path) -> None:
    """Weights are bounded, then their odds against the model multiplied: only 1 bounds what trust decides."""
    words = [*joint, "--phrases-lambda", 1, "--retrieval-lambda-max", 0.5, "--trust", joint_trust]
    cfg, task, models, ensemble = load_ensemble(world, words)
    sums = []
    for sample in batches(cfg, task, models):
        text = ensemble.force_decode(sample)
        votes = ensemble.votes(text)
        asked = torch.stack([vote.weight for vote in votes], dim=1).double()
        tokens, total = asked[:, :1], asked.sum(dim=1, keepdim=True)
        bounded = torch.where(total > 0, asked * (tokens.clamp_min(0.5) / total).clamp_max(1), asked)
        limited = [vote._replace(weight=weight.float()) for vote, weight in zip(votes, bounded.unbind(dim=1))]
        a = ensemble.trust.gate(trust_features(text.likeliest, limited)).double()
        odds = torch.cat([1 - bounded.sum(dim=1, keepdim=True), bounded * a.exp()], dim=1)
        decided = torch.stack([vote.weight for vote in ensemble.decided(text, votes)], dim=1).double()
        torch.testing.assert_close(decided, odds[:, 1:] / odds.sum(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)
        sums.append(
            torch.cat([total, bounded.sum(dim=1, keepdim=True), decided.sum(dim=1, keepdim=True)], dim=1)
        )
    most = torch.cat(sums).amax(dim=0).tolist()
    assert most[0] > 0.9 and most[1] == pytest.approx(0.5) and 0.6 < most[2] <= 1


def test_other_models_layers_metrics_and_features_are_refused(
    world: World, both: Path, random_trust: Path, decode: Callable, tmp_path: Path
) -> None:
    trust = LearnedTrust(TOKENS)
    needs = needs_of(parts_of(world.datastore))
    for name, said in needs.items():
        wrong = write(trust, world.datastore, tmp_path / "wrong.trust", needs=needs | {name: f"not {said}"})
        refused(generate(world, wrong), f"wrong.trust was trained with another {name} .*--trust none")
    of_before: dict[str, Any] = {"arguments": {"tokens": True, "phrases": False, "hidden": 32}}
    for name, old in (("0.2", of_before), ("since", {"settings": {"knn": {"k": 4}}})):
        path = write(trust, world.datastore, tmp_path / f"{name}.trust", **old)
        refused(generate(world, path), f"{name}.trust was trained by an earlier version .*: tune again")
    other = LearnedTrust(TOKENS)
    other.gate.names = "highest p_NMT of 2", *other.gate.names[1:]
    path = write(other, world.datastore, tmp_path / "other.trust")
    refused(
        generate(world, path), "with other features than this version has .highest p_NMT, highest p_NMT of 2."
    )
    joint = write(LearnedTrust(BOTH), both, tmp_path / "joint.trust")
    refused(generate(world, joint), "trust in token and phrase parts, but --datastore has token")


def test_trust_is_in_the_parts_that_tuning_used(
    world: World, both: Path, joint_trust: Path, tmp_path: Path
) -> None:
    parts, tokens = parts_of(both), LearnedTrust(TOKENS)
    few = write(tokens, world.datastore, tmp_path / "few.trust")
    with pytest.raises(
        ConfigurationError, match="is trust in token parts, but --datastore has token and phrase"
    ):
        load_trust(few, parts)
    left_out = write(
        tokens, world.datastore, tmp_path / "left-out.trust", {PhraseSettings.PREFIX: {"lambda_": 0}}
    )
    assert load_trust(left_out, parts).trust.memories.keys() == {"tokens"}
    with pytest.raises(
        ConfigurationError, match="is trust in token and phrase parts, but --datastore has token:"
    ):
        load_trust(joint_trust, {"token": parts["token"]})
    with_text = parts | {TEXT: parts["phrase"]}  # text that was added later waits for tuning
    assert load_trust(joint_trust, with_text).trust.memories.keys() == {"tokens", "phrases"}


def test_benchmarks_decode_with_it(world: World, random_trust: Path) -> None:
    cfg = parse_generation(world.options("--no-progress-bar", "--trust", random_trust))
    test = SpeedTest(cfg, *load(cfg), {"trusted": str(world.datastore)})
    test.resize(400, "IVF16,Flat")
    assert test.generators["trusted"].model.trust is not None
    signature = test.signatures["trusted, 400 keys"]
    assert "trust:learned" in signature and "|entries:400|" in signature and "|index:IVF16,Flat" in signature


def test_damaged_and_missing_files_are_refused(world: World, random_trust: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.trust"
    cut.write_bytes(random_trust.read_bytes()[:-100])
    refused(generate(world, cut), "cut.trust is damaged")
    with safe_open(random_trust, framework="pt") as stream:
        metadata = stream.metadata()
        tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - no mapping
    tensors["output.bias"] += 1
    save_file(tensors, tmp_path / "changed.trust", metadata=metadata)
    refused(generate(world, tmp_path / "changed.trust"), "changed.trust is damaged.*checksum")
    refused(generate(world, tmp_path / "none.trust"), "none.trust is missing")
    refused(generate(world, world.spm), "damaged, or no file of trust")


def generate(world: World, trust: Path) -> object:
    return call("fairseq-generate", *world.options("--trust", trust), check=False)


def test_trust_of_other_text_warns_and_its_settings_are_taken(world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "other", "--subset", "valid")
    settings = {"tokens": {"k": 3, "lambda_": 0.4, "temperature": 7.0}}
    path = write(LearnedTrust(TOKENS), world.datastore, tmp_path / "a.trust", settings)
    words = [word for word in world.options() if word not in ("--tokens-temperature", "5")]
    done = run("fairseq-generate", *words, "--datastore", tmp_path / "other", "--trust", path)
    shown = done.stdout + done.stderr
    assert (
        "trained with other token keys" in shown
        and "|k:3|lambda:0.4|T:7.0|" in shown
        and "trust:learned-" in shown
    )


def test_a_file_says_what_it_is(random_trust: Path) -> None:
    with safe_open(random_trust, framework="pt") as stream:
        described = json.loads(stream.metadata()["trust"])
    assert described["kind"] == "learned" and described["needs"]["metric"] == "l2"


def test_mixture_with_a_spread_sums_to_one() -> None:
    step = evidence(30, 8)
    trust = randomised(adaptive_trust()(TOKENS, neighbours=8, temperature=0.1))
    trust.prepare(trust.inputs(step))
    weights, spread = trust(step)
    assert spread is not None
    values = step.votes[0].values
    log_probs = torch.randn(30, 12).log_softmax(dim=1)
    vote = Vote(values, merge_equal(spread, values).log(), weights[:, 0])
    assert torch.allclose(
        Mixture().mix(Distribution(log_probs), [vote]).log_probs.exp().sum(dim=1), torch.ones(30), atol=1e-5
    )


def test_the_page_shows_trust_beside_phrases(
    world: World, joint: list, joint_trust: Path, tmp_path: Path
) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, joint), "--trust", joint_trust, "--sentences", 3]
    call("explain", *words, "--output", tmp_path / "page.html")
    assert re.search(r'"trust_saw":\s*\[\s*\{', (tmp_path / "page.html").read_text())
