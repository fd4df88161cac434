"""A step of beam search asks the device for no number: on a GPU every answer would be waited for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fairseq_ccpr.datastore.token import KeyProjection
from fairseq_ccpr.decoding import phrase_votes
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.gate import Gate
from fairseq_ccpr.decoding.mixture import Distribution, Mixture, Said, Vote
from fairseq_ccpr.decoding.options import MixtureSettings, PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseState, PhraseVotes
from fairseq_ccpr.decoding.token_memory import TokenBatch, TokenMemory
from fairseq_ccpr.decoding.token_retriever import Neighbours, TokenRetriever
from fairseq_ccpr.decoding.trust import LearnedTrust, Trust
from fairseq_ccpr.lab.speed.decoding_speed import Operations
from fairseq_ccpr.models import step_decoder
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.models.step_decoder import StepDecoder, StepState
from fairseq_ccpr.search import ExactIndex, exact
from tests.decoding.phrase_tables import Found, make_table
from tests.helpers import BOTH, adaptive_trust, vote
from tests.small_models import World
from tests.torch_operations import NoRoundTrip, Traced, no_synchronisation
from tests.vectors import multiplied

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def make_retriever(metric: str, device: torch.device) -> TokenRetriever:
    """That of CLKNN where keys are compared by inner product, else of kNN-MT; the same each time."""
    torch.manual_seed(1)
    adapter = metric == "ip"
    keys = torch.nn.functional.normalize(torch.randn(900, 16), dim=1).half()
    projection = KeyProjection(torch.nn.Linear(24, 32), torch.nn.Linear(32, 16)).requires_grad_(False)
    datastore = SimpleNamespace(
        section=SimpleNamespace(projection="clknn" if adapter else None),
        open_index=lambda device: ExactIndex(keys, metric).to(device),
        open_projection=lambda: projection if adapter else None,
        values=np.random.default_rng(0).integers(4, 7, 900).astype(np.int32),
    )
    return TokenRetriever(datastore, device)  # type: ignore[arg-type]


def make_ensemble(
    metric: str,
    device: torch.device,
    *,
    batch: int = 2,
    lanes: int = 3,
    k: int = 8,
    trusting: bool = False,
    attentive: bool = False,
) -> RetrievalEnsemble:
    """A tiny Transformer of random weights with both memories, and trust in them; every second sentence has no phrases."""
    retriever = make_retriever(metric, device)
    dictionary = Dictionary()
    for symbol in "abc":
        dictionary.add_symbol(symbol)
    width = 24 if metric == "ip" else 16
    sizes = {"embed_dim": width, "ffn_embed_dim": 32, "layers": 1, "attention_heads": 2}
    arguments = Namespace(
        **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    base_architecture(arguments)
    model = TransformerModel.build_model(arguments, task).eval().to(device)
    found = [Found([5, 6, 4], 0, 0.9), Found([5, 4], 0, 0.7)]
    sentence = [*found, *(Found([4, 5], 1, 0.8 - lane / 100) for lane in range(lanes - 2))]
    sentences = [sentence if not number % 2 else [] for number in range(batch)]
    covering = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0]], bool)
    candidates: Any = SimpleNamespace(
        start=lambda sources, *_: lambda: [None] * batch,
        table=lambda found: make_table(sentences, covering=[covering] * batch),
        remote=False, check=lambda phrases: None,
    )  # fmt: skip
    votes = PhraseVotes().requires_grad_(False).to(device)
    votes.attention += attentive
    phrases = PhraseMemory(candidates, PhraseSettings(), votes, device)
    settings = TokenRetrievalSettings(k, 0.5, 0.1, confidence=metric == "ip")
    tokens = TokenMemory(KeyCapture(model, "decoder_output"), retriever, settings, dictionary.unk())
    trust = None
    if trusting:
        trust = LearnedTrust(BOTH)
        torch.nn.init.normal_(trust.gate.output.weight)
        trust.requires_grad_(False).to(device)
    return RetrievalEnsemble([model], [tokens, phrases], dictionary.pad(), MixtureSettings(), trust)


@torch.no_grad()
def two_steps(
    ensemble: RetrievalEnsemble, device: torch.device, batch: int = 2, beam: int = 3
) -> Iterator[Tensor]:
    """The distribution [H, 7] after the beginning, and after a token each, when hypotheses have changed places."""
    sources = torch.tensor([[5, 6, 2], [4, 6, 2]], device=device).repeat(batch // 2, 1)
    lengths = torch.full((batch,), 3, device=device)
    encoded = ensemble.forward_encoder({"src_tokens": sources, "src_lengths": lengths})
    copies = torch.arange(batch, device=device).repeat_interleave(beam)
    encoded, states = ensemble.reorder_encoder_out(encoded, copies), [{}]
    begin = torch.full((batch * beam, 1), 2, device=device)
    places, written = torch.tensor([[1, 0, 0, 0, 2, 1], [5, 5, 4, 6, 6, 6]], device=device).repeat(
        1, batch * beam // 6
    )
    yield ensemble.forward_decoder(begin, encoded, states)[0]
    order = copies * beam + places
    ensemble.reorder_incremental_state(states, order)
    encoded = ensemble.reorder_encoder_out(encoded, order)
    yield ensemble.forward_decoder(torch.cat([begin, written[:, None]], dim=1), encoded, states)[0]


@contextmanager
def unwatched() -> Iterator[None]:
    """Neither a mode of torch nor CUDA's own check sees what is done here."""
    cuda = torch.cuda.is_available()
    level = torch.cuda.get_sync_debug_mode() if cuda else 0
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
    try:
        with _disable_current_modes():
            yield
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode(level)


def within(
    context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, run within a context each time."""

    def run(*args: Any, **named: Any) -> Any:
        with context():
            return function(*args, **named)

    return run


@contextmanager
def watching(
    watch: Callable[[], AbstractContextManager[Any]], steps: bool = True, search: bool | None = None
) -> Iterator[None]:
    """Watch all that an ensemble does in its steps, with or without its models', and the search like them."""
    telling = KeyCapture.telling

    def watched(capture: KeyCapture, listener: Callable[[], None]) -> AbstractContextManager[None]:
        return telling(capture, within(watch, listener))  # which is called in the midst of the models' step

    with ExitStack() as patches:
        for place, name, context in (
            (RetrievalEnsemble, "step", watch), (RetrievalEnsemble, "reorder_encoder_out", watch),
            (SinusoidalPositionalEmbedding, "forward", unwatched),  # which looks at the host's numbers
            *([] if steps else [(StepDecoder, "step", unwatched), (StepState, "reorder", unwatched)]),
            *([] if (steps if search is None else search) else [(ExactIndex, "search", unwatched)]),
        ):  # fmt: skip
            patches.enter_context(patch.object(place, name, within(context, getattr(place, name))))
        patches.enter_context(patch.object(KeyCapture, "telling", watched))
        yield


class Deaf(Mixture):
    """Leaves the model's distribution as it is."""

    def mix(self, model: Distribution, votes: Sequence[Vote]) -> Distribution:
        return model

    def of_targets(self, log_p: Tensor, said: Sequence[Said]) -> Tensor:
        return log_p


@torch.no_grad()
def test_votes_are_combined_by_the_mixture_alone() -> None:
    """In beam search and at given targets."""
    ensemble = make_ensemble("l2", CPU)
    plain = ensemble.with_memories([], None)
    mixed, alone = list(two_steps(ensemble, CPU)), list(two_steps(plain, CPU))
    ensemble.mixture = Deaf()
    assert all(map(torch.equal, two_steps(ensemble, CPU), alone)) and not torch.equal(mixed[1], alone[1])
    sources, targets = torch.tensor([[5, 6, 2], [4, 6, 2]]), torch.tensor([[5, 4, 2], [6, 6, 2]])
    net_input = {"src_tokens": sources, "src_lengths": torch.full((2,), 3)}
    sample = {"net_input": net_input | {"prev_output_tokens": targets.roll(1, dims=1)}, "target": targets}
    text = ensemble.force_decode(sample)
    votes = ensemble.decided(text, ensemble.votes(text))
    assert len(votes) == 2 and torch.equal(text.mixed(votes), text.log_probs)
    assert text.whole is not None
    before = text.whole.log_probs.clone()
    assert torch.equal(ensemble.mixed(text.whole, votes), before)


@pytest.mark.parametrize("attentive", [False, True])
@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_step_makes_no_round_trip(metric: str, trusting: bool, attentive: bool) -> None:
    ensemble = make_ensemble(metric, CPU, trusting=trusting, attentive=attentive)
    with watching(NoRoundTrip):
        for log_probs in two_steps(ensemble, CPU):
            torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(6))


@pytest.mark.parametrize("kind", [LearnedTrust, adaptive_trust()])
def test_trust_in_tokens_makes_no_round_trip(kind: type[Trust]) -> None:
    ensemble = make_ensemble("ip", CPU)
    tokens = [ensemble.find(TokenMemory)]
    trust = kind.untrained(tokens, small=False)
    with watching(NoRoundTrip):
        list(two_steps(ensemble.with_memories(tokens, trust), CPU))


@pytest.mark.parametrize(
    "place", [(TokenBatch, "search"), (PhraseState, "advance"), (PhraseState, "reorder")]
)
def test_round_trip_of_a_memory_is_seen(place: tuple[type, str]) -> None:
    real = getattr(*place)

    def asking(self: Any, given: Tensor, *others: Any) -> Any:
        given.sum().item()
        return real(self, given, *others)

    with (
        patch.object(*place, asking),
        watching(NoRoundTrip),
        pytest.raises(AssertionError, match="asks the device"),
    ):
        list(two_steps(make_ensemble("l2", CPU), CPU))


def test_round_trip_of_trust_is_seen() -> None:
    with (
        patch.object(Gate, "forward", lambda gate, features: features[:, :2] * features.sum().item()),
        watching(NoRoundTrip),
        pytest.raises(AssertionError, match="asks the device"),
    ):
        list(two_steps(make_ensemble("l2", CPU, trusting=True), CPU))


@torch.no_grad()
def test_a_step_with_attention_is_the_same_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where phrases that begin alike are one proposal."""
    plain, there = (
        list(two_steps(make_ensemble("l2", CPU, lanes=9, attentive=attentive), CPU))
        for attentive in (False, True)
    )
    monkeypatch.setattr(phrase_votes, "sync_is_free", lambda device: True)
    here = list(two_steps(make_ensemble("l2", CPU, lanes=9, attentive=True), CPU))
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain[1], there[1], atol=1e-3)


def operations(phrases: bool = True, trusting: bool = False, attentive: bool = False, **sizes: int) -> int:
    """How many there are in a step, besides the models' own and the search."""
    beam = sizes.pop("beam", 3)
    ensemble = make_ensemble("ip", CPU, trusting=trusting, attentive=attentive, **sizes)
    counted = Operations()
    if not phrases:
        ensemble = ensemble.with_memories([ensemble.find(TokenMemory)], None)
    steps = two_steps(ensemble, CPU, sizes.get("batch", 2), beam)
    next(steps)
    with watching(lambda: counted, steps=False):
        next(steps)
    return counted.count


@pytest.mark.parametrize("trusting, attentive", [(False, False), (True, False), (False, True)])
def test_a_step_has_as_many_operations_whatever_its_sizes(trusting: bool, attentive: bool) -> None:
    """On a GPU each is a kernel to launch."""
    count = operations(trusting=trusting, attentive=attentive)
    for sizes in ({"k": 32}, {"lanes": 24}, {"beam": 6}, {"batch": 8}):
        assert operations(trusting=trusting, attentive=attentive, **sizes) == count, sizes
    assert 0 < operations(phrases=False) < count
    assert not attentive or count - operations() <= 10


def test_trust_adds_few_operations_to_a_step() -> None:
    assert 0 < operations(trusting=True) - operations() < 200


def traced_step(metric: str, trusting: bool, rows: int, seed: int) -> list[object]:
    """All that a step does besides its models, with a search in a GPU's form and tiles, by a model of this seed."""
    torch.manual_seed(seed)
    ensemble, traced = make_ensemble(metric, CPU, trusting=trusting), Traced()
    ensemble.find(TokenMemory).retriever.index.by_runs = True
    with patch.multiple(exact, products=multiplied, GPU_NUMBERS=6 * rows):
        steps = two_steps(ensemble, CPU)
        next(steps)
        with watching(lambda: traced, steps=False, search=True):
            next(steps)
    return traced.notes


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("rows", [256, 1 << 20])
def test_a_step_is_the_same_whatever_the_numbers_are(metric: str, rows: int, trusting: bool) -> None:
    """No shape and no number of the host's depends on what is found, in one tile or four: a step could be replayed."""
    first, *others = (traced_step(metric, trusting, rows, seed) for seed in range(3))
    assert len(first) > 100 and all(other == first for other in others)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_hypotheses_beyond_those_there_are_change_nothing(metric: str) -> None:
    """So that one replay serves all numbers of hypotheses up to its own."""
    retriever, states = make_retriever(metric, CPU), torch.randn(5, 24 if metric == "ip" else 16)
    retriever.index.by_runs = True
    with patch.object(exact, "products", multiplied):
        alone, padded = (
            retriever.search(torch.nn.functional.pad(states, (0, 0, 0, more)), 8) for more in (0, 3)
        )
    assert torch.equal(padded.ids[:5], alone.ids) and torch.equal(padded.values[:5], alone.values)
    torch.testing.assert_close(padded.scores[:5], alone.scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_knowing_that_none_is_missing_changes_nothing(metric: str, trusting: bool) -> None:
    """It is not known where the store names the unknown token, and not so where it is smaller than k."""
    ensemble = make_ensemble(metric, CPU, trusting=trusting)
    certain = list(two_steps(ensemble, CPU))
    with patch.object(TokenRetriever, "always_finds", lambda *_: False):
        unsure = list(two_steps(ensemble, CPU))
    assert torch.equal(certain[0], unsure[0])
    torch.testing.assert_close(certain[1], unsure[1], rtol=1e-6, atol=1e-6)
    retriever = make_retriever(metric, CPU)
    known = [retriever.always_finds(k, unknown) for k, unknown in ((900, 3), (901, 3), (8, 5), (8, 3))]
    assert known == [True, False, False, True]


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("number", ["nan", "inf"])
@torch.no_grad()
def test_a_query_that_is_no_number_changes_nothing(metric: str, number: str) -> None:
    """Also where it is taken as known that no neighbour is missing: it has no weight, and others have theirs."""
    ensemble = make_ensemble(metric, CPU)
    tokens = ensemble.find(TokenMemory)
    assert tokens.retriever.always_finds(tokens.asked_for, tokens.unknown)
    ensemble, alone = ensemble.with_memories([tokens], None), ensemble.with_memories([], None)
    right, plain = list(two_steps(ensemble, CPU))[1], list(two_steps(alone, CPU))[1]
    real, calls = TokenRetriever.project, []

    def overflowing(retriever: TokenRetriever, states: Tensor) -> Tensor:
        keys = real(retriever, states).clone()
        if calls:  # at the second step
            keys[1] = float(number)
        calls.append(keys)
        return keys

    with patch.object(TokenRetriever, "project", overflowing):
        step = list(two_steps(ensemble, CPU))[1]
    assert len(calls) == 2 and step.isfinite().all()
    assert torch.equal(step[1], plain[1]) and not torch.equal(right[1], plain[1])
    others = [0, *range(2, len(step))]
    torch.testing.assert_close(step[others], right[others])


class Choosy(TokenRetriever):
    """One of somebody's own, that leaves neighbours out."""

    def search(self, queries: Tensor, k: int) -> Neighbours:
        found = super().search(queries, k)
        return found.without(found.scores < found.scores[:, :1])


def test_another_search_may_leave_neighbours_out() -> None:
    ensemble = make_ensemble("l2", CPU)
    memory = ensemble.find(TokenMemory)
    choosy = Choosy(memory.retriever.datastore, CPU)
    steps = list(two_steps(ensemble.replacing(replace(memory, retriever=choosy)), CPU))
    assert all(step.isfinite().all() for step in steps) and not choosy.always_finds(8, 3)


@torch.no_grad()
def test_a_store_smaller_than_k_is_looked_up() -> None:
    """What is missing has a value of its own, which must not count."""
    keys, values = torch.randn(3, 24), np.array([5, 6, 5], np.int32)
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection=None), open_index=lambda device: ExactIndex(keys, "l2").to(device),
        open_projection=lambda: None, values=values,
    )  # fmt: skip
    settings = TokenRetrievalSettings(8, 0.4, 10.0, confidence=False)
    capture: Any = None
    memory = TokenMemory(capture, TokenRetriever(datastore, torch.device("cpu")), settings, 3)
    states, log_probs = torch.randn(4, 24), torch.randn(4, 7).log_softmax(1)
    weights = (-(states[:, None] - keys).square().sum(2) / 10).softmax(dim=1)
    wanted = 0.6 * log_probs.exp()
    wanted[:, 5] += 0.4 * (weights[:, 0] + weights[:, 2])
    wanted[:, 6] += 0.4 * weights[:, 1]
    mixed = Mixture().mix(Distribution(log_probs), [vote(memory, states, log_probs)])
    torch.testing.assert_close(mixed.log_probs.exp(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_step_does_not_wait_for_a_gpu(metric: str) -> None:
    device = torch.device("cuda")
    ensemble = make_ensemble(metric, device)
    list(two_steps(ensemble, device))  # compiles what there is to compile
    steps = two_steps(ensemble, device)
    next(steps)
    with watching(no_synchronisation):
        next(steps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_step_is_the_same_on_a_gpu(metric: str) -> None:
    here, there = (
        [step.cpu() for step in two_steps(make_ensemble(metric, device), device)]
        for device in (CPU, torch.device("cuda"))
    )
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool((x > 0).any()),
        lambda x: x.masked_fill_(x > 0, 0).unique(), lambda x: x.index_put_((x > 0,), torch.zeros(())),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long)),
    ],
)  # fmt: skip
def test_round_trips_are_seen(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError), NoRoundTrip():
        asks(torch.randn(4))


def test_decoding_makes_no_round_trip_of_its_own(decode: Callable, joint: list[object]) -> None:
    """All that the ensemble does in its steps, in beam search with tokens and phrases."""
    watches: list[NoRoundTrip] = []

    def watch() -> NoRoundTrip:
        watches.append(NoRoundTrip())
        return watches[-1]

    with watching(watch):
        decode(*joint, "--beam", 3, "--max-len-b", 9)
    assert len(watches) > 20  # at each of ten steps the queries, the step, and the reordering before the next


def test_search_begins_before_the_projection_to_the_vocabulary(
    world: World, decode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    multiply, search = step_decoder.linear, ExactIndex.search

    def multiplying(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = multiply(x, weight, bias)
        events.extend(["projected"] * (len(weight) == words))
        return product

    def searching(*args: Any) -> Any:
        events.append("searched")
        return search(*args)

    words = len((world.data_bin / "dict.en.txt").read_text().splitlines()) + 4
    monkeypatch.setattr(step_decoder, "linear", multiplying)
    monkeypatch.setattr(ExactIndex, "search", searching)
    decode("--beam", 3)
    assert events and events == ["searched", "projected"] * (len(events) // 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@torch.no_grad()
def test_second_stream_waits_for_its_input_and_is_waited_for() -> None:
    capture: Any = SimpleNamespace(telling=lambda search: nullcontext())
    memory: Any = SimpleNamespace(capture=capture)
    batch = TokenBatch(memory, memory, memory, memory)
    for number in range(1, 20):
        given = torch.full((1 << 24,), float(number), device="cuda")
        with batch.listening(), batch._on_second_stream(given):
            made = (given * 2).cumsum(0)
        del given
        other = torch.zeros(1 << 24, device="cuda")  # may take the memory that was given up
        assert made[:4].tolist() == [2.0 * number * n for n in range(1, 5)] and not other.any()


def test_batches_search_on_one_stream(monkeypatch) -> None:
    """The allocator keeps what was freed for each stream, a gigabyte of scores in large searches."""
    made: list[torch.device] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: made.append(device) or stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    queries: Any = SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 99), record_stream=lambda stream: None
    )
    for _ in range(40):
        nothing: Any = None
        with TokenBatch(nothing, nothing, nothing, nothing)._on_second_stream(queries):
            pass
    assert made == [queries.device]
