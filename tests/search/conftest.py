"""Exact search in torch and in Triton."""

from __future__ import annotations

import os

import pytest

from fairseq_ccpr.search import exact
from tests.vectors import DEVICE


@pytest.fixture(scope="module")
def triton():
    """Where there is no GPU, kernels are interpreted, if that is asked for before they are defined."""
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    yield pytest.importorskip("triton", reason="Triton is not installed")
    if DEVICE.type == "cpu":
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(params=["torch", "torch in runs", "triton"])
def fused(request, monkeypatch):
    """Whether the search is Triton's; that of torch with all scores kept, as of few keys, and without."""
    if request.param == "torch in runs":
        monkeypatch.setattr(exact, "KEPT_NUMBERS", 0)
    if request.param == "triton":
        request.getfixturevalue("triton")
    return request.param == "triton"
