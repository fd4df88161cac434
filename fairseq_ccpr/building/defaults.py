"""The settings that suit a token datastore where nothing was tuned, measured on some of its own tokens.

Each is asked for as in decoding, without the entries of its own sentence, and of others with the same target: it stands for
a token of new text. Letters: N tokens, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import target_log_probabilities
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.search import Index

QUERIES, SEED = 1024, 1
COMPARED = 64  # tokens of a sentence that tell it from others
LEAST = 10_000  # entries: held-out tokens of fewer find less than text that these are meant for
OWN = 64  # entries beyond k that are asked for, as those of the own sentence are among the nearest
LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 10))
FACTORS = tuple(2 ** (i / 2) for i in range(-10, 5))  # of how much worse than the nearest the last neighbour is
FLOOR = 0.01  # p of any token, where the model is not loaded

# From N rows, their keys and their values to log p_NMT of these, fp32 [N].
LogProbs = Callable[[np.ndarray, np.ndarray, np.ndarray], Tensor]


def measure_defaults(
    index: Index, keys: np.ndarray, values: np.ndarray, provenance: np.ndarray, model: LogProbs | None = None
) -> dict[str, float]:
    """Choose T, and with the model lambda, under which a sample of the datastore's own tokens is likeliest.

    Args:
        keys: fp16 [N, d], which `index` is of.
        values, provenance: int32 [N] and [N, 2], as in the datastore.

    Returns:
        `temperature` and `lambda_`, as far as they could be measured: nothing of too few tokens.
    """
    if len(keys) < LEAST:
        return {}
    rows = np.sort(np.random.default_rng(SEED).choice(len(keys), min(QUERIES, len(keys)), replace=False))
    k = TokenRetrievalSettings.k
    scores, ids = index.search(torch.from_numpy(keys[rows]).float(), k + OWN)
    near = ids.clamp_min(0).numpy()
    texts = _texts(values, provenance, np.concatenate([rows[:, None], near], axis=1))
    own = torch.from_numpy(texts[:, 1:] == texts[:, :1]) | (ids < 0)
    scores, order = scores.masked_fill(own, float("-inf")).topk(min(k, scores.size(1)), dim=1)
    matches = torch.from_numpy(values[near] == values[rows, None]).gather(1, order)
    whole = (scores > float("-inf")).all(dim=1)
    scores, matches = scores[whole], matches[whole]
    spread = float((scores[:, 0] - scores[:, -1]).median())
    if not spread > 0:  # as of no tokens
        return {}
    known = torch.full((len(rows),), FLOOR).log() if model is None else model(rows, keys[rows], values[rows])
    best: dict[tuple[float, float], float] = {}
    for temperature in (factor * spread for factor in FACTORS):
        said = target_log_probabilities(scores, matches, temperature)
        for one in LAMBDAS if model is not None else (0.5,):
            mixed = torch.logaddexp(known[whole] + np.log(1 - one), said + np.log(one))
            best[temperature, one] = float(mixed.mean())
    temperature, lambda_ = max(best, key=lambda point: best[point])
    measured = {"temperature": float(f"{temperature:.2g}")}
    return measured | ({"lambda_": lambda_} if model is not None else {})


def _texts(values: np.ndarray, provenance: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Hash the target sentence that each row is of, uint64 as `rows`: the same where the tokens are."""
    places = np.arange(COMPARED)
    weights = np.random.default_rng(SEED).integers(1, 2**63, COMPARED, dtype=np.uint64)
    first, which = np.unique(rows - provenance[rows, 1], return_inverse=True)
    spans = np.minimum(first[:, None] + places, len(values) - 1)
    inside = (provenance[spans, 0] == provenance[first, :1]) & (provenance[spans, 1] == places)
    hashes = ((values[spans].astype(np.uint64) + 1) * weights * inside).sum(axis=1, dtype=np.uint64)
    return np.asarray(hashes[which].reshape(rows.shape))
