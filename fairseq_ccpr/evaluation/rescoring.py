"""Tuning memories that act on the model's distribution, before others vote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.memory import Memory, RescoringRecord, Step
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.evaluation.fit import FOREIGN_HARM, Training, fit, lost, split
from fairseq_ccpr.evaluation.grids import HELD_OUT_TOKENS, TextWorth, Worth, spread
from fairseq_ccpr.timing import progress_over

CPU = torch.device("cpu")  # where held-out text is weighed
OF_RESCORING = Training("weights", updates=400, every=20, rate=0.02, weight_decay=1e-2)


class RescoredText(NamedTuple):
    """N reference tokens of a text, some of which count."""

    name: str
    foreign: bool  # of another domain: it must not lose
    sentences: Tensor  # int64 [n], of those that count
    record: RescoringRecord  # of all
    rows: Tensor  # int64 [n]

    def select(self, rows: Tensor) -> RescoredText:
        """Let some of those that count."""
        return self._replace(sentences=self.sentences[rows], rows=self.rows[rows])

    def draw(self, count: int, generator: torch.Generator) -> RescoredText:
        """Draw them all."""
        return self


def tune_rescoring(
    ensemble: RetrievalEnsemble, texts: Mapping[str, Sequence[Any]], trusting: bool, quiet: bool
) -> tuple[RetrievalEnsemble, dict[str, TextWorth]]:
    """Tune the memories that act on the model; returns the ensemble without trust, and their worth on each text.

    Args:
        texts: batches of held-out sentences by name, the first of the datastore's own domain.
        trusting: whether to train what moves their weights; otherwise these are the same everywhere.
    """
    worth: dict[str, TextWorth] = {}
    device = next(ensemble.models[0].parameters()).device
    for memory in ensemble.memories:
        if memory.alternatives():
            shares = [HELD_OUT_TOKENS, *[HELD_OUT_TOKENS // max(1, len(texts) - 1)] * (len(texts) - 1)]
            seen = [
                _record(name, samples, ensemble, memory, most, quiet, place > 0)
                for place, ((name, samples), most) in enumerate(zip(texts.items(), shares))
            ]
            tuned = _tuned(memory, seen, trusting)
            for text in seen:
                record, weights = text.record, {memory.name: text.record.weight(tuned)}
                measured = Worth.measure(record.model, record.log_likelihood(tuned), weights)
                worth[text.name] = TextWorth(float(record.model.mean()), {memory.name: measured})
            ensemble = ensemble.replacing(tuned.on(device))
    return ensemble, worth


@torch.no_grad()
def _record(
    name: str,
    samples: Sequence[Any],
    ensemble: RetrievalEnsemble,
    memory: Memory,
    most: int,
    quiet: bool,
    foreign: bool,
) -> RescoredText:
    """Force-decode references, and record what a memory makes of the model's distributions."""
    sentences: list[Tensor] = []
    some = spread(list(samples), sum(int(sample["ntokens"]) for sample in samples), most)

    def steps() -> Iterator[tuple[Step, Tensor]]:
        begun = 0
        for sample in progress_over(
            some, f"{name}, {memory.name}", "token", lambda one: int(one["ntokens"]), quiet
        ):
            given = (
                sample["net_input"]["prev_output_tokens"],
                sample["target"],
                ensemble.force_models(sample)[0],
            )
            previous, target, log_probs = (one[:, ensemble.forced :] for one in given)
            real = target.ne(ensemble.pad)
            for place in range(target.size(1)):
                rows = real[:, place].nonzero().squeeze(1)
                sentences.append(rows.cpu() + begun)
                step = Step(previous[rows, : place + 1], Distribution(log_probs[rows, place]))
                yield step, target[rows, place]
            begun += len(target)

    record = memory.at(ensemble.snapshot()).recorded(steps())
    numbers = torch.cat(sentences)
    return RescoredText(name, foreign, numbers, record, torch.arange(len(numbers)))


@one_thread()
def _tuned(memory: Memory, texts: Sequence[RescoredText], trusting: bool) -> Memory:
    """Choose settings by the likelihood of the first text, and train what moves the weight on all of them.

    The loss of a text is its mean -log p; of one of another domain also what its tokens lose against the
    model alone.
    """
    own = texts[0].record
    memory = max(memory.alternatives(), key=lambda one: float(own.log_likelihood(one).mean()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        begun = memory.trainable([text.record for text in texts]) if trusting else None
    if begun is None:
        return memory
    trained, module = begun

    def loss(text: RescoredText) -> Tensor:
        likelihood = text.record.log_likelihood(trained)[text.rows]
        return lost(likelihood, text.record.model[text.rows], FOREIGN_HARM * text.foreign)

    fit(module, loss, split(texts, OF_RESCORING.what), OF_RESCORING)
    return trained
