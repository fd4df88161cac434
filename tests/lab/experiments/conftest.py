"""Stages of experiments run in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.lab.experiments.small_experiments import execute_here


@pytest.fixture(autouse=True)
def in_process(request: pytest.FixtureRequest) -> Iterator[None]:
    if "processes" in request.keywords:
        yield
        return
    with patch("fairseq_ccpr.lab.experiments.stages.execute", execute_here):
        yield
