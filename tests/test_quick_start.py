"""The quick start of in-process commands gives the configuration that fairseq's own gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from fairseq import options
from fairseq.dataclass import utils

from tests import quick_start
from tests.small_models import World


@pytest.mark.parametrize(
    "words", [[], ["--beam", 7, "--sampling", "--temperature", 0.3, "--bpe", "sentencepiece", "--quiet"]]
)
def test_it_composes_what_hydra_composes(world: World, words: list[object]) -> None:
    parsed = options.parse_args_and_arch(options.get_generation_parser(), input_args=world.options(*words))
    found = utils.convert_namespace_to_omegaconf(parsed)
    theirs = {"compose": quick_start.hydra_compose, "initialize": quick_start.hydra_initialize}
    with patch.multiple(utils, **theirs):
        wanted = utils.convert_namespace_to_omegaconf(parsed)
    assert repr(found) == repr(wanted) and found.dataset.num_workers == 0
