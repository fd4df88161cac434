"""Two generators of one model, which take turns step by step in one thread: neither hears of the other's queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.evaluation.test_set import load
from tests.small_models import World

STEPS = 12


def configured(world: World, words: list[object]) -> Any:
    parser = options.get_generation_parser()
    return convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, input_args=world.options(*words))
    )


@torch.no_grad()
def steps(ensemble: RetrievalEnsemble, sample: dict[str, Any], end: int) -> Iterator[Tensor]:
    """Translate greedily; gives log p [B, V] of each step."""
    encoded = ensemble.forward_encoder(
        {name: sample["net_input"][name] for name in ("src_tokens", "src_lengths")}
    )
    states: list[dict[str, Any]] = [{} for _ in range(ensemble.models_size)]
    tokens = torch.full((len(sample["id"]), 1), end)
    for _ in range(STEPS):
        log_probs, _ = ensemble.forward_decoder(tokens, encoded, states)
        yield log_probs.clone()
        tokens = torch.cat([tokens, log_probs.argmax(dim=1, keepdim=True)], dim=1)


def test_generators_that_take_turns_do_what_each_does_alone(world: World, joint: list[object]) -> None:
    cfg = configured(world, joint)
    task, models = load(cfg)
    other, _ = load(
        other_cfg := configured(
            world, [*joint, "--tokens-k", 3, "--tokens-lambda", 0.7, "--phrases-lambda", 0.5]
        )
    )
    generators = [
        task.build_generator(models, cfg.generation),
        other.build_generator(models, other_cfg.generation),
    ]
    batches = task.get_batch_iterator(task.dataset("test"), max_sentences=4).next_epoch_itr(shuffle=False)
    samples = [next(batches), next(batches)]
    end = task.target_dictionary.eos()
    asked = [(one.model, sample) for one, sample in zip(generators, samples)]
    alone = [list(steps(ensemble, sample, end)) for ensemble, sample in asked]
    turns = zip(*(steps(ensemble, sample, end) for ensemble, sample in asked))
    for together, wanted in zip(turns, zip(*alone), strict=True):
        assert all(map(torch.equal, together, wanted))
    switched = list(steps(generators[1].model, samples[0], end))
    assert not torch.equal(switched[-1], alone[0][-1])  # the other settings say something else
