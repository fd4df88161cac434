"""Methods of mining as a table: their scores of candidate pairs, their settings, tuning, and settings kept as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.candidates import NEAREST, Candidates, Evidence, best_first, best_of_rows
from fairseq_ccpr.lab.mining.encoded_text import WINDOW, EncodedText
from fairseq_ccpr.lab.mining.f1 import Answers, Matcher, decide, score, tuned_threshold
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.neighbours import DECIMALS, SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.rfr import ENTROPIES, OVER_SENTENCES, Grid, match_fragments, tune_fragments
from fairseq_ccpr.settings import inside, signature
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import write_json

RFR, MARGIN, MAX, TWO_WAY, LOGISTIC = "rfr", "margin", "max", "two-way", "logistic"
Settings = dict[str, Any]
WEIGHTS = ("margin", "votes", "alike", "length")  # of the features
RANGES = {
    "k": ("[1, inf)", "at least 1"),
    "keep": ("(0, 1]", "above 0 and at most 1"),
    "window": ("[1, inf)", "at least 1"),
}
LEARNED_FROM = 8  # candidates of each labelled source, those of the highest margins
RIDGE = 1.0
STEPS = 30


@dataclass(frozen=True)
class Kind:
    """What a method does, whatever its settings: a line of `METHODS`."""

    defaults: Settings
    # of C pairs, float64 [C]; None for RFR, which scores none
    score: Callable[[Evidence, Settings], np.ndarray] | None
    candidates: int = 16  # nearest sentences in either direction that are scored
    one_to_one: bool = True  # a sentence is in one pair only; otherwise each source takes the best target
    # words of the fragments that vote, and from one to the next: overlaps do no better
    window: int | None = None


def logistic(evidence: Evidence, settings: Settings) -> np.ndarray:
    """Compute the probability of each pair, sigmoid(w f + b)."""
    weights = np.array([settings[name] for name in WEIGHTS])
    return 1 / (1 + np.exp(-(features(evidence) @ weights + settings["bias"])))


# The threshold of logistic is not a half: where F1 counts, a doubtful pair is worth giving. Chosen on office
# and bible.
METHODS: dict[str, Kind] = {
    RFR: Kind({"k": 10, "beta": 75.0, "keep": 0.5, "threshold": 0.5, "window": WINDOW, "sentence_half": True,
               "entropy_over": OVER_SENTENCES}, None),
    # One more candidate, so that a neighbourhood is whole where a partner is taken out.
    MARGIN: Kind({"threshold": 1.0}, lambda evidence, _: evidence.margins(), NEAREST + 1, one_to_one=False),
    MAX: Kind({"threshold": 1.0}, lambda evidence, _: evidence.margins(), NEAREST + 1),
    TWO_WAY: Kind({"threshold": 0.5}, lambda evidence, _: evidence.mutual_votes(), window=WINDOW),
    LOGISTIC: Kind({"threshold": 0.3, "margin": 1.0, "votes": 1.0, "alike": 1.0, "length": -1.0, "bias": -3.0}, logistic,
                   window=WINDOW),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A way to find the translations of sentences: a name of `METHODS`, and settings."""

    name: str
    settings: Settings

    @classmethod
    def named(cls, name: str, **settings: Any) -> Method:
        """Take the defaults but for some settings."""
        return cls(name, METHODS[name].defaults | settings)

    def having(self, **settings: Any) -> Method:
        """Change some settings."""
        return Method(self.name, self.settings | settings)

    @property
    def kind(self) -> Kind:
        """The line of the table."""
        return METHODS[self.name]

    @property
    def threshold(self) -> float:
        """The score from which a pair is one."""
        return self.settings["threshold"]

    @property
    def window(self) -> int | None:
        """Words of the fragments that are needed; None where sentences are compared as wholes."""
        return self.settings.get("window", self.kind.window)

    @property
    def stride(self) -> int:
        """Words from one fragment to the next."""
        return self.kind.window or 1

    @property
    def centred(self) -> bool:
        """Whether keys are centred, each side by itself; those of RFR are as published."""
        return self.kind.score is not None

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Make the keys of a text, whose fragments have vectors if there is a window."""
        if self.kind.score is None:
            return text.fragment_keys(self.settings["sentence_half"])
        return text.sentence_keys()


def prepare(method: Method, sources: SearchableText, targets: SearchableText) -> Matcher:
    """Prepare to match any of the sources with the targets; both are searchable by the keys of this method."""
    if method.kind.score is None:
        return partial(match_fragments, sources, targets, method.settings)
    return PairMatcher(method, sources, targets)


def tune(
    method: Method, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
) -> tuple[Method, float]:
    """Choose the settings with the highest F1 on labelled sources: the method with these, and its F1."""
    if method.kind.score is None:
        settings, f1 = tune_fragments(sources, targets, method.settings, labels, grid)
        return method.having(**settings), f1
    return PairMatcher(method, sources, targets).tune(labels)


class PairMatcher:
    """Matches by the scores of the pairs of which either is among the nearest of the other; see `Matcher`."""

    def __init__(self, method: Method, sources: SearchableText, targets: SearchableText) -> None:
        self.sources, self.targets = sources, targets
        self.pairs = Candidates.find(sources, targets, method.kind.candidates)
        self.evidence = Evidence.gather(self.pairs, sources, targets, voting=method.window is not None)
        self._score_by(method)

    def _score_by(self, method: Method) -> None:
        self.method = method
        scores = self._scores(self.evidence)
        one_to_one = method.kind.one_to_one
        self.answers = (
            best_first(self.pairs, scores, self.targets.sentences)
            if one_to_one
            else best_of_rows(self.pairs, scores)
        )

    def _scores(self, evidence: Evidence) -> np.ndarray:
        assert self.method.kind.score is not None
        return self.method.kind.score(evidence, self.method.settings).round(DECIMALS)

    def scored_by(self, method: Method) -> PairMatcher:
        """Score the same pairs by a method that has the same candidates and window."""
        other = copy(self)
        other._score_by(method)
        return other

    def __call__(self, rows: np.ndarray, hidden: np.ndarray) -> Answers:
        """Look the answers up; where a target is hidden, score the others again, as the source then sees them.

        If one to one, the source takes the best target that no other source has a better claim to.
        """
        answers = Answers(self.answers.partners[rows], self.answers.scores[rows])
        asked = np.flatnonzero(hidden >= 0)
        if len(asked):
            pairs, evidence = self.hiding(rows[asked], hidden[asked])
            scores = self._scores(evidence)
            if self.method.kind.one_to_one:
                scores[self._taken(pairs, scores)] = -np.inf
            other = best_of_rows(pairs, scores)
            answers.partners[asked], answers.scores[asked] = other.partners, other.scores
        return answers

    def hiding(self, rows: np.ndarray, hidden: np.ndarray) -> tuple[Candidates, Evidence]:
        """Gather the candidates of some sources, int64 [n], without what is hidden from each (-1: nothing), int64 [n]."""
        pairs, places = self.pairs.select(rows, hidden)
        return pairs, self.evidence.hiding(pairs, places, self.sources, self.targets)

    def _taken(self, pairs: Candidates, scores: np.ndarray) -> np.ndarray:
        """Tell of which pairs the target is the answer of another source, with at least that score: bool [C]."""
        holders = np.full(self.targets.sentences, -1)
        answered = np.flatnonzero(self.answers.partners >= 0)
        holders[self.answers.partners[answered]] = answered
        holder = holders[pairs.columns]
        other = (holder >= 0) & (holder != pairs.sentences[pairs.rows])
        return other & (self.answers.scores[holder] >= scores)

    def tune(self, labels: Labels) -> tuple[Method, float]:
        """Choose the threshold by labelled sources; of logistic the weights instead, which take fewer labels than it does."""
        if self.method.name != LOGISTIC:
            threshold, f1 = tuned_threshold(self(labels.rows, labels.hidden), labels.gold)
            return self.method.having(threshold=threshold), f1
        pairs, evidence = self.hiding(labels.rows, labels.hidden)
        order = np.lexsort((-evidence.margins(), pairs.rows))
        chosen = order[np.arange(len(order)) - np.searchsorted(pairs.rows, pairs.rows) < LEARNED_FROM]
        right = (pairs.columns == labels.gold[pairs.rows])[chosen]
        weights = fit(features(evidence)[chosen], right).tolist()
        learned = self.method.having(**dict(zip((*WEIGHTS, "bias"), weights)))
        answers = self.scored_by(learned)(labels.rows, labels.hidden)
        return learned, score(decide(answers, learned.threshold), labels.gold).f1


def features(evidence: Evidence) -> np.ndarray:
    """Collect the features of each pair: float64 [C, 4]; 0 where there is no margin."""
    values = [evidence.margins(), evidence.mutual_votes(), evidence.alike_margins(), np.abs(evidence.lengths)]
    known = np.stack(values, axis=1)
    return np.where(np.isfinite(known), known, 0)


def fit(values: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Fit a logistic regression of features [n, m] by Newton's method, with a ridge on their weights when standardised.

    The result has the weights of the features as they are, and the bias: float64 [m + 1].
    """
    means, spreads = values.mean(axis=0), values.std(axis=0) + 1e-9
    inputs = np.column_stack([(values - means) / spreads, np.ones(len(values))])
    ridge = np.diag([*[RIDGE] * values.shape[1], 1e-3])  # a bias of its own, but a finite one
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (p - right) + ridge @ weights
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + ridge
        weights -= np.linalg.solve(curvature, gradient)
    scaled = weights[:-1] / spreads
    return np.append(scaled, weights[-1] - scaled @ means)


@dataclass(frozen=True)
class TunedSettings:
    """A method with its settings, and what they were chosen by."""

    method: Method
    encoder: str  # its fingerprint
    tuned: Mapping[str, Any] = field(default_factory=dict)  # on what, and how well they did

    def signature(self) -> str:
        """Name all that decides a result in one line."""
        values = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in self.method.settings.items()}
        return signature({"method": self.method.name, **values, "encoder": fingerprint.short(self.encoder)})

    def write(self, path: Path) -> None:
        """Write them atomically."""
        values = {
            "method": self.method.name,
            **self.method.settings,
            "encoder": self.encoder,
            "tuned": self.tuned,
        }
        write_json(path, values)

    @classmethod
    def read(cls, path: Path) -> TunedSettings:
        """Read and check a file."""
        if not path.is_file():
            raise ConfigurationError(f"there are no settings at {path}: make them with --tune GOLD_TSV")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            encoder, tuned = values.pop("encoder"), values.pop("tuned")
            method = Method.named(values.pop("method"), **values)
            for name, value in method.settings.items():
                _check(name, value, type(method.kind.defaults[name]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} holds no settings of fairseq-ccpr mine ({type(error).__name__}: {error}): make new ones with --tune"
            ) from None
        return cls(method, encoder, tuned)


def _check(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, (int, float) if kind is float else kind) or (
        kind is float and not math.isfinite(value)
    ):
        raise ValueError(f"{name} is {value!r}, and must be a {kind.__name__}")
    if name in RANGES and not inside(value, RANGES[name][0]):
        raise ValueError(f"{name} is {value}, and must be {RANGES[name][1]}")
    if name == "entropy_over" and value not in ENTROPIES:
        raise ValueError(f"{name} is {value}, and must be one of {', '.join(ENTROPIES)}")
