"""Calibrating confidence on held-out translations, and measuring how far it can be relied on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fairseq_ccpr.evaluation.test_set import BASE, Decodings, sentence_chrf
from fairseq_ccpr.inference.confidence import Confidence, Features, ScoredText
from fairseq_ccpr.text.words import word_spans

LEAST_OF_EACH = 10  # to calibrate on: sentences, or words, that are right, and that are wrong
BINS = 10  # of equal width, of the calibration error
WEAKLY = 100.0  # how much less the coefficients are kept small than scikit-learn does unasked


class Bin(NamedTuple):
    """How many confidences are in one of `BINS`, at least one, their mean, and which share of them is right."""

    number: int
    claimed: float
    right: float


class Rated(NamedTuple):
    """N translations, or N words of them, and which are right."""

    features: list[Features]
    right: np.ndarray  # bool [N]


def calibrate(decodings: Decodings, name: str, conditions: Mapping[str, str]) -> Confidence | str:
    """Fit confidence, to hold under these conditions, to the translations of one system; or tell why not."""
    texts, references = _texts(decodings, name)
    each = [sentence_chrf(one.text, other) for one, other in zip(texts, references)]
    chrf = float(np.median(each or [0.0]))
    fitted = []
    for what, rated in zip(("sentences", "words"), rate(texts, references, chrf)):
        right, wrong = int(rated.right.sum()), int((~rated.right).sum())
        if min(right, wrong) < LEAST_OF_EACH:
            return (
                f"of the decoded {what} {right:,} are right and {wrong:,} wrong, and it takes "
                f"{LEAST_OF_EACH} of each: tune on more pairs"
            )
        fitted.append(_fitted(rated))
        if fitted[-1][1] < 0:
            return f"of the decoded {what} the more probable ones are worse: tune on more pairs"
    sentence, word = fitted
    return Confidence(sentence, word, chrf, conditions)


def rate(texts: Sequence[ScoredText], references: Sequence[str], chrf: float) -> tuple[Rated, Rated]:
    """Compare translations with their references.

    Returns:
        the sentences, right from a chrF on, and the words, right where the reference has them, and as often.
    """
    right = [sentence_chrf(one.text, other) >= chrf for one, other in zip(texts, references)]
    features, found = [], []
    for one, reference in zip(texts, references):
        left = Counter(reference[start:end] for start, end in word_spans(reference))
        for word, own in one.words:
            if own is not None:
                features.append(own)
                found.append(left[word] > 0)
            left[word] -= 1
    sentences = Rated([one.sentence for one in texts], np.array(right, dtype=bool))
    return sentences, Rated(features, np.array(found, dtype=bool))


def measure(decodings: Decodings, name: str, confidence: Confidence) -> dict[str, dict[str, Any]]:
    """Measure confidence on the translations of one system, of `sentences` and of `words`.

    Returns:
        their `number`; which share is `right`; `auc`, the chance that one of what is right is higher than
        one of what is wrong; `error`, the expected calibration error, by how much confidence and the share
        of what is right differ, in the mean of `BINS`; both of the uncalibrated `probability`;
        `model_auc`, of the uncalibrated probability of what the model alone translates; and the `bins`
        that are not empty, of confidence and of that probability.
    """
    texts, references = _texts(decodings, name)
    sure = (
        [confidence.of_sentence(one) for one in texts],
        [p for one in texts for _, p in confidence.of_words(one) if p is not None],
    )
    every = rate(texts, references, confidence.chrf), rate(*_texts(decodings, BASE), confidence.chrf)
    found = {}
    for what, own, rated, alone in zip(("sentences", "words"), sure, *every):
        claims = {"": np.array(own), "probability_": _probable(rated)}
        (auc, error), raw = (measured(one, rated.right) for one in claims.values())
        found[what] = {
            "number": len(own), "right": round(float(rated.right.mean()), 4), "auc": auc, "error": error,
            "probability_auc": raw[0], "probability_error": raw[1],
            "model_auc": measured(_probable(alone), alone.right)[0],
            **{f"{name}bins": _rounded(binned(one, rated.right)) for name, one in claims.items()},
        }  # fmt: skip
    return found


def confidence_table(worths: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Write what `measure` found as rows of cells, beside the probability that was not calibrated."""
    rows = [
        [
            "confidence in",
            "number",
            "right",
            "AUC",
            "error",
            "AUC uncalibrated",
            "error uncalibrated",
            "AUC model alone",
        ]
    ]
    for name, worth in worths.items():
        number, right, *others = (one for one in worth.values() if not isinstance(one, list))
        rows.append([name, f"{number:,}", f"{right:.0%}", *(f"{one:.3f}" for one in others)])
    return rows


def _texts(decodings: Decodings, name: str) -> tuple[list[ScoredText], list[str]]:
    ids, system = sorted(decodings.references), decodings.systems[name]
    texts = [decodings.to_scored(system.ids[i], system.scores[i]) for i in ids]
    return texts, [decodings.references[i] for i in ids]


def _fitted(rated: Rated) -> tuple[float, ...]:
    from sklearn.linear_model import LogisticRegression  # imported late: it takes a second

    fitted = LogisticRegression(C=WEAKLY).fit(np.array(rated.features), rated.right)
    return float(fitted.intercept_[0]), *map(float, fitted.coef_[0])


def _probable(rated: Rated) -> np.ndarray:
    return np.exp([first for first, _ in rated.features])


def measured(confidences: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return AUC and expected calibration error of N confidences, fp [N], for what is right, bool [N].

    >>> measured(np.array([0.05, 0.55, 0.55, 0.95]), np.array([False, False, True, True]))
    (0.875, 0.05)
    """
    from sklearn.metrics import roc_auc_score

    auc = float(roc_auc_score(right, confidences)) if 0 < right.sum() < len(right) else float("nan")
    off = sum(one.number * abs(one.claimed - one.right) for one in binned(confidences, right))
    return round(auc, 4), round(off / len(right), 4)


def binned(confidences: np.ndarray, right: np.ndarray) -> list[Bin]:
    """Return those of `BINS` that N confidences, fp [N], are in, for what is right, bool [N].

    >>> binned(np.array([0.25, 0.25, 1.0]), np.array([False, True, True]))
    [Bin(number=2, claimed=0.25, right=0.5), Bin(number=1, claimed=1.0, right=1.0)]
    """
    places = np.minimum(confidences * BINS, BINS - 1).astype(int)
    members = [places == place for place in range(BINS)]
    return [
        Bin(int(one.sum()), float(confidences[one].mean()), float(right[one].mean()))
        for one in members
        if one.any()
    ]


def _rounded(bins: list[Bin]) -> list[dict[str, float]]:
    return [{name: round(value, 4) for name, value in one._asdict().items()} for one in bins]
