"""Whether a difference between systems may be chance: paired bootstrap over what they were asked (Koehn, 2004)."""

from __future__ import annotations

import numpy as np

SEED = 1
INTERVAL = 2.5, 97.5  # percentiles


def resample(hits: np.ndarray, totals: np.ndarray, sets: list[np.ndarray], samples: int) -> np.ndarray:
    """Shares over items drawn anew from each set, the same ones for every system; each set has the same weight.

    Args:
        hits: [N, Q], what counts for each system and item.
        totals: integers [N, Q], out of how many; where all of them together are 0, the share is 0.
        sets: the items of each.
        samples: how often.

    Returns:
        fp64 [samples, N].
    """
    rng = np.random.default_rng(SEED)
    shares = np.zeros((samples, len(hits)))
    for of_set in sets:
        for sample in range(samples):
            drawn = rng.choice(of_set, len(of_set))
            shares[sample] += hits[:, drawn].sum(axis=1) / totals[:, drawn].sum(axis=1).clip(1)
    return shares / len(sets)


def p_value(resampled: np.ndarray, number: int) -> float:
    """The chance of a difference to the first system as large as that of this one between equal systems, two-sided.

    Args:
        resampled: of `resample`.
        number: of the system.

    >>> p_value(np.array([[0.0, 1.0], [0.25, 1.0], [0.0, 0.75]]), 1)
    0.25
    """
    differences = resampled[:, number] - resampled[:, 0]
    mean = differences.mean()
    beyond = (np.abs(differences - mean) >= abs(mean)).sum()
    return float((beyond + 1) / (len(differences) + 1))
