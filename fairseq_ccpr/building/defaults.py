"""The settings that suit a token datastore where nothing was tuned, measured on some of its own tokens.

Each is asked for as in decoding, without the entries of its own sentence, and of others with the same target:
it stands for a token of new text. Letters: N tokens, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.source_index import SentenceMemory, SourceIndex
from fairseq_ccpr.datastore.token import FAMILIAR, hash_targets
from fairseq_ccpr.decoding.mixture import target_log_probabilities
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_memory import DEEP, LIKENESSES
from fairseq_ccpr.decoding.token_retriever import Neighbours, best_neighbours
from fairseq_ccpr.search import Index

ASKED_TOKENS, SEED = 1024, 1
LEAST = 10_000  # entries: held-out tokens of fewer find less than text that these are meant for
OWN = 64  # entries beyond k that are asked for, as those of the own sentence are among the nearest
LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
# of how much worse than the nearest the last neighbour is
FACTORS = tuple(2 ** (i / 2) for i in range(-10, 5))
FLOOR = 0.01  # p of any token, where the model is not loaded

# From N rows, their keys and their values to log p_NMT of these, fp32 [N].
LogProbs = Callable[[np.ndarray, np.ndarray, np.ndarray], Tensor]


def measure_defaults(
    index: Index,
    keys: np.ndarray,
    values: np.ndarray,
    provenance: np.ndarray,
    model: LogProbs | None = None,
    sources: SourceIndex | None = None,
) -> dict[str, float]:
    """Choose T, with the model lambda, with the sources gamma, under which its own tokens are likeliest.

    Args:
        keys: fp16 [N, d], which `index` is of.
        values, provenance: int32 [N] and [N, 2], as in the datastore.
        sources: of the sentences; None: gamma is not measured.

    Returns:
        `temperature`, `lambda_` and `likeness`, as far as they could be measured: nothing of too few tokens.
    """
    if len(keys) < LEAST:
        return {}
    rows = np.sort(np.random.default_rng(SEED).choice(len(keys), min(ASKED_TOKENS, len(keys)), replace=False))
    k = TokenRetrievalSettings.k
    depth = k if sources is None else DEEP
    scores, ids = index.search(torch.from_numpy(keys[rows]).float(), depth + OWN)
    near = ids.clamp_min(0).numpy()
    target_hashes = hash_targets(values, provenance)
    own = target_hashes[provenance[near, 0]] == target_hashes[provenance[rows, :1]]
    own = torch.from_numpy(own) | (ids < 0)
    scores, order = scores.masked_fill(own, float("-inf")).topk(min(depth, scores.size(1)), dim=1)
    found = Neighbours(ids.gather(1, order), scores, torch.from_numpy(values[near]).long().gather(1, order))
    if sources is not None:
        found = found._replace(
            likeness=_likeness(sources, provenance[rows, 0], provenance[found.ids.clamp_min(0), 0])
        )
    targets = torch.from_numpy(values[rows]).long().unsqueeze(1)
    whole = (scores[:, :k] > float("-inf")).all(dim=1)
    found, targets = found.changed(lambda part: part[whole]), targets[whole]
    spread = float((found.scores[:, 0] - found.scores[:, :k][:, -1]).median())
    if not spread > 0:  # as of no tokens
        return {}
    known = torch.full((len(rows),), FLOOR).log() if model is None else model(rows, keys[rows], values[rows])
    best: dict[tuple[float, float, float], float] = {}
    for temperature, likeness in product(
        (factor * spread for factor in FACTORS), LIKENESSES if sources else (0.0,)
    ):
        near_ones, _ = best_neighbours(found, TokenRetrievalSettings(k, 1.0, temperature, likeness=likeness))
        said = target_log_probabilities(near_ones.scores, near_ones.values == targets, temperature)
        for one in LAMBDAS if model is not None else (0.5,):
            mixed = torch.logaddexp(known[whole] + np.log(1 - one), said + np.log(one))
            best[temperature, likeness, one] = float(mixed.mean())
    temperature, likeness, lambda_ = max(best, key=lambda point: best[point])
    measured = {"temperature": float(f"{temperature:.2g}")}
    measured |= {"lambda_": lambda_} if model is not None else {}
    if sources is None:
        return measured
    familiar = float(np.quantile(_own_likeness(sources, target_hashes, provenance[rows, 0]), 0.01))
    return measured | {"likeness": likeness, FAMILIAR: float(f"{familiar:.3f}")}


def _own_likeness(sources: SourceIndex, target_hashes: np.ndarray, sentences: np.ndarray) -> list[float]:
    """Compute how much sentences, int [n], are like the most alike one with another target."""
    memory, found = SentenceMemory(sources, [], np.empty(0, np.int64)), []
    for number in np.unique(sentences).tolist():
        sims = memory.likeness([sources.source(number)]).sims[0]
        near = np.argpartition(sims, -min(OWN, len(sims)))[-OWN:]
        near = near[sources.hashes[near] != 0]
        found.append(float(sims[near][target_hashes[near] != target_hashes[number]].max(initial=0.0)))
    return found


def _likeness(sources: SourceIndex, asked: np.ndarray, found: np.ndarray) -> Tensor:
    """Compare the sentences of tokens, int [N], with those of their neighbours, [N, n]: fp32 [N, n]."""
    memory = SentenceMemory(sources, [], np.empty(0, np.int64))
    rows = (memory.likeness([sources.source(one)]).sims[0, some] for one, some in zip(asked.tolist(), found))
    return torch.from_numpy(np.stack(list(rows))).float()
