"""A step of beam search asks the device for no number: on a GPU every answer would be waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.sequence_generator import EnsembleModelWithAlignment
from torch import Tensor

from fairseq_ccpr.datastore.projection import KeyProjection
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.interpolation import interpolate_, limit_shares
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory, PhraseSettings
from fairseq_ccpr.decoding.side_stream import SideStream
from fairseq_ccpr.decoding.token_retriever import TokenRetrievalSettings, TokenRetriever
from fairseq_ccpr.search import ExactIndex
from tests.decoding.phrase_tables import make_table
from tests.torch_operations import NoRoundTrip, Operations, no_synchronisation


def make_retriever(metric: str, device: torch.device) -> TokenRetriever:
    """CLKNN with lambda* where keys are compared by inner product, else kNN-MT; the same each time."""
    torch.manual_seed(1)
    adapter = metric == "ip"
    keys = torch.nn.functional.normalize(torch.randn(900, 16), dim=1).half()
    projection = KeyProjection(torch.nn.Linear(24, 32), torch.nn.Linear(32, 16)).requires_grad_(False)
    datastore = SimpleNamespace(
        section=SimpleNamespace(projection="clknn" if adapter else None),
        open_index=lambda: ExactIndex(keys, metric),
        open_projection=lambda: projection if adapter else None,
        values=np.random.default_rng(0).integers(4, 7, 900).astype(np.int32),
    )
    return TokenRetriever(datastore, TokenRetrievalSettings(8, 0.5, 0.1, confidence=adapter), device)  # type: ignore[arg-type]


def make_phrases(gate: str, device: torch.device) -> PhraseMemory:
    """Two sentences, one of them without phrases."""
    sentence = [([5, 6, 4], 0, 0.9), ([5, 4], 0, 0.7), ([4], 1, 0.8)]
    candidates: Any = SimpleNamespace(table=lambda found, length: make_table([sentence, []], length))
    found: Any = [None, None]
    memory = PhraseMemory(candidates, PhraseSettings(gate=gate), device, find=lambda sources: found)
    memory.start(torch.zeros(2, 3, dtype=torch.long, device=device))
    memory.begin(3)
    return memory


def step(retriever: TokenRetriever, phrases: PhraseMemory, given: dict[str, Tensor]) -> Tensor:
    """What `RetrievalEnsemble.forward_decoder` adds to the model's own step, and the beam's reordering."""
    phrases.state.reorder(given["order"])
    phrases.state.advance(given["written"])
    of_tokens = retriever(given["states"])
    of_phrases = phrases.step(given["log_probs"], given["attention"])
    shares = limit_shares(of_tokens[2], of_phrases.share, 0.9)
    return interpolate_(given["log_probs"], (*of_tokens[:2], shares[0]), (*of_phrases[:2], shares[1]))


def inputs(metric: str, device: torch.device) -> dict[str, Tensor]:
    """Of six hypotheses, three a sentence, over a vocabulary of 7."""
    made = {
        "states": torch.randn(6, 24 if metric == "ip" else 16),
        "log_probs": torch.randn(6, 7).log_softmax(1),
        "attention": torch.rand(6, 3).softmax(1),
        "written": torch.tensor([5, 5, 4, 6, 6, 6]),
        "order": torch.tensor([1, 0, 0, 3, 5, 4]),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


@pytest.mark.parametrize("gate", ["consent", "attention"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@torch.no_grad()
def test_step_makes_no_round_trip(metric: str, gate: str) -> None:
    device = torch.device("cpu")
    retriever, phrases, given = make_retriever(metric, device), make_phrases(gate, device), inputs(metric, device)
    with NoRoundTrip():
        log_probs = step(retriever, phrases, given)
    torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(6))


@torch.no_grad()
def test_a_step_is_few_operations() -> None:
    """Beside the search."""
    device = torch.device("cpu")
    retriever, phrases, given = make_retriever("ip", device), make_phrases("consent", device), inputs("ip", device)
    found = retriever.search(given["states"], 8)
    with patch.object(retriever.index, "search", lambda queries, k: found), Operations() as operations:
        retriever(given["states"])
        of_tokens = operations.count
        step(retriever, phrases, given)
    assert 10 < of_tokens < 30 and operations.count - of_tokens < 125


@torch.no_grad()
def test_a_store_smaller_than_k_is_looked_up() -> None:
    """What is missing has a value of its own, which must not count."""
    keys, values = torch.randn(3, 24), np.array([5, 6, 5], np.int32)
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection=None), open_index=lambda: ExactIndex(keys, "l2"),
        open_projection=lambda: None, values=values,
    )  # fmt: skip
    retriever = TokenRetriever(datastore, TokenRetrievalSettings(8, 0.4, 10.0), torch.device("cpu"))
    states, log_probs = torch.randn(4, 24), torch.randn(4, 7).log_softmax(1)
    weights = (-(states[:, None] - keys).square().sum(2) / 10).softmax(dim=1)
    wanted = 0.6 * log_probs.exp()
    wanted[:, 5] += 0.4 * (weights[:, 0] + weights[:, 2])
    wanted[:, 6] += 0.4 * weights[:, 1]
    torch.testing.assert_close(interpolate_(log_probs, retriever(states)).exp(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("gate", ["consent", "attention"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@torch.no_grad()
def test_step_does_not_wait_for_a_gpu(metric: str, gate: str) -> None:
    device = torch.device("cuda")
    retriever, phrases = make_retriever(metric, device), make_phrases(gate, device)
    step(retriever, phrases, inputs(metric, device))  # compiles what there is to compile
    given = inputs(metric, device)
    with no_synchronisation():
        step(retriever, phrases, given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("gate", ["consent", "attention"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
@torch.no_grad()
def test_step_is_the_same_on_a_gpu(metric: str, gate: str) -> None:
    given = inputs(metric, torch.device("cpu"))
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        retriever, phrases = make_retriever(metric, device), make_phrases(gate, device)
        found.append(step(retriever, phrases, {name: tensor.to(device) for name, tensor in given.items()}).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


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


def test_decoding_makes_no_round_trip_of_its_own(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the ensemble adds to the models' step, in fairseq's beam search."""
    models, steps = EnsembleModelWithAlignment.forward_decoder, []

    def of_models(*args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return models(*args)

    def watched(name: str) -> Callable:
        method = getattr(RetrievalEnsemble, name)

        def watching(*args: Any) -> Any:
            steps.append(name)
            with NoRoundTrip():
                return method(*args)

        return watching

    monkeypatch.setattr(EnsembleModelWithAlignment, "forward_decoder", of_models)
    for name in ("forward_decoder", "_ask_tokens"):  # the one is asked by the other's models
        monkeypatch.setattr(RetrievalEnsemble, name, watched(name))
    decode("--beam", 3)
    assert steps and steps.count("_ask_tokens") == steps.count("forward_decoder")


def test_search_begins_before_the_projection_to_the_vocabulary(
    decode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    project, search = TransformerDecoderBase.output_layer, ExactIndex.search

    def projecting(*args: Any) -> Any:
        logits = project(*args)
        events.append("projected")
        return logits

    def searching(*args: Any) -> Any:
        events.append("searched")
        return search(*args)

    monkeypatch.setattr(TransformerDecoderBase, "output_layer", projecting)
    monkeypatch.setattr(ExactIndex, "search", searching)
    decode("--beam", 3)
    assert events and events == ["searched", "projected"] * (len(events) // 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@torch.no_grad()
def test_side_stream_waits_for_its_input_and_is_waited_for() -> None:
    side = SideStream()
    for number in range(1, 20):
        given = torch.full((1 << 24,), float(number), device="cuda")
        with side.taking(given):
            made = (given * 2).cumsum(0)
        del given
        other = torch.zeros(1 << 24, device="cuda")  # may take the memory that was given up
        side.join()
        assert made[:4].tolist() == [2.0 * number * n for n in range(1, 5)] and not other.any()
