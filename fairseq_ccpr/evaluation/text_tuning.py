"""Tuning the text memory: alpha by the likelihood of held-out references, then token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.memory import Step
from fairseq_ccpr.decoding.mixture import SILENT, Distribution
from fairseq_ccpr.decoding.options import TextSettings
from fairseq_ccpr.decoding.text_memory import Observed, TextMemory, TextWeight
from fairseq_ccpr.device import one_thread
from fairseq_ccpr.evaluation.grids import TOKENS, TextWorth, Worth, spread
from fairseq_ccpr.evaluation.trust_training import HARM, HELD_OUT, keep_best
from fairseq_ccpr.timing import progress_over

ALPHAS = 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8
BETA = 1.0  # references are likelier with 0.5, but translations are better with 1
UPDATES, EVERY, RATE, DECAY, SEED = 400, 20, 0.02, 1e-2, 1


class Reference(NamedTuple):
    """What the model and the text say before N reference tokens of a text."""

    observed: Observed  # H = N
    targets: Tensor  # int64 [N]
    model: Tensor  # fp32 [N], log p_NMT of them
    sentences: Tensor  # int64 [N]
    named: Tensor  # int64, places of the targets among the observed tokens

    def log_likelihood(self, alpha: Tensor, beta: float) -> Tensor:
        """Compute log p of the references, fp32 [N], with alpha fp32 [N]."""
        fused = self.observed.fused(alpha, beta).index_select(0, self.named)
        return self.model.index_copy(0, self.observed.rows[self.named], fused)


@torch.no_grad()
def observe_text(
    name: str, samples: Sequence[Any], ensemble: RetrievalEnsemble, memory: TextMemory, most: int, quiet: bool
) -> Reference:
    """Force-decode references, and look up what the text says before each token."""
    memory, parts, sentences = memory.at(ensemble.snapshot()), [], 0
    some = spread(list(samples), sum(int(sample["ntokens"]) for sample in samples), most)
    for sample in progress_over(some, f"{name}, text", "token", lambda one: int(one["ntokens"]), quiet):
        given = sample["net_input"]["prev_output_tokens"], sample["target"], ensemble.force_models(sample)[0]
        previous, target, log_probs = (one[:, ensemble.forced :] for one in given)
        real = target.ne(ensemble.pad)
        for place in range(target.size(1)):
            some_rows = real[:, place].nonzero().squeeze(1)
            step = Step(previous[some_rows, : place + 1], Distribution(log_probs[some_rows, place]))
            targets = target[some_rows, place]
            model = step.model.log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).clamp_min(SILENT)
            found = Observed(*(part.cpu() for part in memory.observe(step)))
            parts.append((found, targets.cpu(), model.cpu(), some_rows.cpu() + sentences))
        sentences += len(target)
    each, *others = zip(*parts)
    observed, (targets, said, numbers) = Observed.joined(list(each)), map(torch.cat, others)
    is_target = (observed.tokens == targets[observed.rows]) & (observed.model > float("-inf"))
    return Reference(observed, targets, said, numbers, is_target.nonzero().squeeze(1))


@one_thread()
def tune_text(memory: TextMemory, texts: Sequence[Reference], trusting: bool) -> TextMemory:
    """Choose alpha by the likelihood of the first text, and train what moves alpha on all of them.

    The loss of a text is its mean -log p; of one of another domain also what its tokens lose against the
    model alone. All texts count alike, and the state that is best on sentences held out is kept.

    Args:
        texts: the first is of the datastore's own domain.
        trusting: whether to train; otherwise alpha is the same everywhere.
    """
    own, beta = texts[0], BETA if memory.datastore.section.general else 0.0
    alpha = max(
        ALPHAS, key=lambda one: float(own.log_likelihood(torch.full_like(own.model, one), beta).mean())
    )
    memory = replace(memory, settings=TextSettings(alpha, beta), weight=TextWeight().requires_grad_(False))
    return replace(memory, weight=_trained(memory.settings, texts)) if trusting else memory


def _trained(settings: TextSettings, texts: Sequence[Reference]) -> TextWeight:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        weight = TextWeight()
    held_out = [text.sentences % HELD_OUT == 0 for text in texts]
    features = torch.cat([text.observed.features for text in texts])
    weight.mean.copy_(features.mean(0))
    weight.scale.copy_(features.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(weight.parameters(), lr=RATE, weight_decay=DECAY)

    def loss(rows_of: Sequence[Tensor]) -> Tensor:
        losses = []
        for place, (text, rows) in enumerate(zip(texts, rows_of)):
            likelihood = text.log_likelihood(settings.alpha * weight(text.observed.features), settings.beta)[
                rows
            ]
            lost = (
                HARM * (text.model[rows] - likelihood).clamp_min(0) if place else torch.zeros_like(likelihood)
            )
            losses.append((lost - likelihood).mean())
        return torch.stack(losses).mean()

    trained = [~rows for rows in held_out]
    keep_best(weight, range(UPDATES + 1), EVERY, loss, held_out, lambda: trained, optimizer)
    return weight.requires_grad_(False)


def with_tuned_text(
    ensemble: RetrievalEnsemble, texts: Mapping[str, Sequence[Any]], trusting: bool, quiet: bool
) -> tuple[RetrievalEnsemble, dict[str, TextWorth]]:
    """Tune the text memory of an ensemble, where it has one: the ensemble without trust, and what the text is worth.

    Args:
        texts: batches of held-out sentences by name, the first of the datastore's own domain.
    """
    memory = ensemble.find(TextMemory)
    if memory is None:
        return ensemble, {}
    most = [TOKENS, *[TOKENS // (len(texts) - 1)] * (len(texts) - 1)] if len(texts) > 1 else [TOKENS]
    seen = [
        observe_text(name, one, ensemble, memory, size, quiet)
        for (name, one), size in zip(texts.items(), most)
    ]
    tuned = tune_text(memory, seen, trusting)
    worth = {}
    for name, text in zip(texts, seen):
        alpha = tuned.settings.alpha * tuned.weight(text.observed.features) * text.observed.found
        found = Worth.measure(
            text.model, text.log_likelihood(alpha, tuned.settings.beta), {memory.name: alpha}
        )
        worth[name] = TextWorth(float(text.model.mean()), {memory.name: found})
    return ensemble.replacing(replace(tuned, weight=tuned.weight.to(memory.special.device))), worth


def scaled_text(ensemble: RetrievalEnsemble, factor: float) -> RetrievalEnsemble:
    """Return an ensemble whose text weighs so many times as much, and the same trust."""
    memory = ensemble.find(TextMemory)
    assert memory is not None  # or there is nothing to scale
    settings = replace(memory.settings, alpha=factor * memory.settings.alpha)
    return ensemble.replacing(replace(memory, settings=settings), trust=ensemble.trust)
