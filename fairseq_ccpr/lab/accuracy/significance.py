"""Paired bootstrap of systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric

SEED = 12345  # of translations: sacrebleu's own, and so are the resamples
ACCURACY_SEED = 1
INTERVAL = 2.5, 97.5  # percentiles


@dataclass
class SystemsComparison:
    """A row per system, the first being the baseline, and how it was computed."""

    # system; for each metric its score, and against the baseline difference, interval, p; BLEU's brevity penalty, and
    # the length of the translation by the reference's
    rows: list[dict[str, Any]]
    signatures: dict[str, str]


def compare_systems(
    systems: dict[str, list[str]],
    references: list[list[str]],
    samples: int,
    tokenizer: str = BLEU.TOKENIZER_DEFAULT,
) -> SystemsComparison:
    """Score systems, and test each against the first by paired bootstrap resampling (Koehn, 2004) as sacrebleu does.

    Args:
        tokenizer: sacrebleu's, for BLEU; with another than its default TER also divides Chinese and Japanese.
    """
    asian = tokenizer != BLEU.TOKENIZER_DEFAULT
    metrics: dict[str, Metric] = {
        "BLEU": BLEU(references=references, tokenize=tokenizer),
        "chrF": CHRF(references=references),
        "chrF++": CHRF(references=references, word_order=2),
        "TER": TER(references=references, normalized=asian, asian_support=asian),
    }
    lines = len(references[0])
    drawn = np.random.default_rng(SEED).choice(lines, size=(samples, lines), replace=True)
    rows: list[dict[str, Any]] = [
        {"system": name, **_length(metrics["BLEU"], hypotheses)} for name, hypotheses in systems.items()
    ]
    signatures = {}
    for name, metric in metrics.items():
        results = [_score(metric, hypotheses, drawn) for hypotheses in systems.values()]
        for row, (score, resampled) in zip(rows, results):
            row[name] = round(score, 2)
            row |= {
                f"{name} {what}": value for what, value in _against(results[0], (score, resampled)).items()
            }
        for what in ("difference", "interval", "p"):
            rows[0][f"{name} {what}"] = None
        signature = metric.get_signature()
        signature.update("seed", str(SEED))
        signature.update("bs", samples)
        signatures[name] = signature.format()
    return SystemsComparison(rows, signatures)


def _length(bleu: Metric, hypotheses: list[str]) -> dict[str, float]:
    found = bleu._compute_score_from_stats(np.sum(bleu._extract_corpus_statistics(hypotheses, None), 0))
    return {"brevity": round(found.bp, 3), "length": round(found.sys_len / max(1, found.ref_len), 3)}


def _score(metric: Metric, hypotheses: list[str], drawn: np.ndarray) -> tuple[float, np.ndarray]:
    """Score a system: in all, and on resamples of the lines, int [samples, lines]: [samples]."""
    statistics = np.array(metric._extract_corpus_statistics(hypotheses, None), dtype="float32")
    scores = [metric._compute_score_from_stats(statistics[sample].sum(0)).score for sample in drawn]
    return float(metric._compute_score_from_stats(statistics.astype("float64").sum(0)).score), np.array(
        scores
    )


def _against(baseline: tuple[float, np.ndarray], system: tuple[float, np.ndarray]) -> dict[str, Any]:
    difference, differences = system[0] - baseline[0], system[1] - baseline[1]
    beside = np.abs(differences) - np.abs(differences).mean()
    # For translations that are all the same, sacrebleu's count finds none, and a p of nearly 0.
    p = (np.sum(beside > abs(difference)) + 1) / (len(beside) + 1) if difference else 1.0
    interval = np.percentile(differences, INTERVAL)
    return {
        "difference": round(difference, 2),
        "interval": [round(float(end), 2) for end in interval],
        "p": round(float(p), 4),
    }


def resample(hits: np.ndarray, totals: np.ndarray, sets: list[np.ndarray], samples: int) -> np.ndarray:
    """Resample each system's accuracy, macro-averaged over sets; systems share the resampled items.

    Hits out of totals are [N, Q], of each system and item; where all totals of a resample are 0, its accuracy
    is 0. The result is fp64 [samples, N].
    """
    rng = np.random.default_rng(ACCURACY_SEED)
    accuracies = np.zeros((samples, len(hits)))
    for items in sets:
        for sample in range(samples):
            drawn = rng.choice(items, len(items))
            accuracies[sample] += hits[:, drawn].sum(axis=1) / totals[:, drawn].sum(axis=1).clip(1)
    return accuracies / len(sets)


def p_value(resampled: np.ndarray, number: int) -> float:
    """Return how likely equal systems are to differ by as much as this one and the first, two-sided."""
    differences = resampled[:, number] - resampled[:, 0]
    mean = differences.mean()
    beyond = (np.abs(differences - mean) >= abs(mean)).sum()
    return float((beyond + 1) / (len(differences) + 1))
