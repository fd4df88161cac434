"""BLEU and chrF of translations, by sacrebleu, with its signatures."""

from __future__ import annotations

from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF


@dataclass(frozen=True)
class TranslationScores:
    """Scores of one system's output, and how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score(hypotheses: list[str], references: list[str]) -> TranslationScores:
    """Score detokenised text by BLEU and chrF, one reference each.

    >>> score(["the cat sat on the mat"], ["the cat sat on the mat"]).bleu
    100.0
    """
    bleu, chrf = BLEU(), CHRF()
    results = [metric.corpus_score(hypotheses, [references]).score for metric in (bleu, chrf)]
    return TranslationScores(
        round(results[0], 2), round(results[1], 2), bleu.get_signature().format(), chrf.get_signature().format()
    )


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """Score one sentence by chrF.

    >>> sentence_chrf("a cat", "a cat")
    100.0
    """
    return CHRF().sentence_score(hypothesis, [reference]).score
