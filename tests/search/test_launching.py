"""A kernel that cannot be launched: one warning, and the search goes on in torch."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from fairseq_ccpr.search import ExactIndex, TorchIvfIndex, torch_ivf_build
from fairseq_ccpr.search.fused_tiling import BUCKET, Tiling
from fairseq_ccpr.search.launching import LaunchError, ScoringIndex, warn_of_launch
from tests.search.test_fused_search import check
from tests.vectors import DEVICE


@pytest.fixture
def warnings(caplog) -> pytest.LogCaptureFixture:
    """What is said of launches."""
    warn_of_launch.cache_clear()
    caplog.set_level(logging.WARNING, logger="fairseq_ccpr")
    return caplog


def refuse(*_: object) -> None:
    """A launch that fails."""
    raise LaunchError("a kernel of exact search cannot run here (OutOfResources)")


def refusing(index: ScoringIndex) -> ScoringIndex:
    """The index with kernels that a device refuses."""
    index.steps = SimpleNamespace(BUCKET=BUCKET, bucket_maxima=refuse, bucket_scores=refuse)
    return index


def lists_of(keys: torch.Tensor) -> TorchIvfIndex:
    """An index of four lists, of which three are searched."""
    list_of = torch.arange(len(keys)) % 4
    lists, place_of = torch_ivf_build.lay_out(
        list_of, torch.stack([keys[list_of == n].float().mean(0) for n in range(4)])
    )
    lists.keys[place_of] = keys
    return TorchIvfIndex(lists, "l2", 3, fused=False)


@pytest.mark.parametrize("make", [lambda keys: ExactIndex(keys, "l2"), lists_of])
def test_refused_kernels_are_replaced_by_torch_with_one_warning(make, warnings) -> None:
    keys, queries = torch.randn(900, 16).half(), torch.randn(7, 16)
    wanted = make(keys).search(queries, 8)
    first, second = (refusing(make(keys)) for _ in range(2))
    for index in (first, second, first):  # one warning for all indexes, and none again
        found = index.search(queries, 8)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    [message] = warnings.messages
    assert message.startswith("a kernel of exact search cannot run here (OutOfResources): searching in torch")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_triton_without_a_gpu_is_such_a_case(warnings) -> None:
    """Without the interpreter, Triton refuses to launch anything on a CPU: a failure that is no pretence."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.search.test_kernel_limits import kernels

    index = ExactIndex(keys := torch.randn(300, 16).half(), "ip", fused=False)
    index.steps = kernels()
    queries = torch.randn(3, 16)
    assert torch.equal(index.search(queries, 4)[1], ExactIndex(keys, "ip").search(queries, 4)[1])
    assert "searching in torch" in warnings.messages[0]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
def test_tiles_that_are_too_large_are_such_a_case(warnings, monkeypatch) -> None:
    fused = pytest.importorskip("fairseq_ccpr.search.fused", reason="Triton is not installed")
    monkeypatch.setattr(fused, "choose_tiling", lambda *_: Tiling(128, 128, 12, 8))
    check(torch.randn(20_000, 128).half(), torch.randn(240, 128), 8, "l2", True)
    assert "OutOfResources" in warnings.messages[0]


def test_broken_triton_is_not_used(warnings, monkeypatch) -> None:
    from fairseq_ccpr.search import launching, tiled

    monkeypatch.setattr(launching, "can_fuse", lambda keys: True)
    monkeypatch.setattr(launching, "FUSED", "fairseq_ccpr.search.no_such_module")
    assert ExactIndex(torch.randn(3, 4).half(), "l2").steps is tiled
    assert warnings.messages[0].startswith("Triton cannot be imported (ModuleNotFoundError")
