"""Phrase tables of given phrases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.phrase_votes import Candidates, Consent, PhraseState, PhraseTable, PhraseVotes
from fairseq_ccpr.text.decoder_subwords import WordBorders

MARK = 1  # stands for one without a letter


class Found(NamedTuple):
    """A retrieved phrase."""

    phrase: list[int]
    query: int
    score: float
    after: list[int]  # what follows it in its sentence

    @property
    def tokens(self) -> list[int]:
        return self.phrase + self.after


NOWHERE = np.zeros((2, 64), bool)  # no word is unfinished after a token, and no token goes on with one


def make_table(batch: list[list[Found]], borders: np.ndarray = NOWHERE) -> PhraseTable:
    """The phrases of each sentence, with the borders of words, bool [2, V]."""
    made = []
    for sentence in batch:
        queries, scores = (
            np.array([one.query for one in sentence], int),
            np.array([one.score for one in sentence], np.float32),
        )
        made.append(Candidates.of([(one.phrase, one.after) for one in sentence], queries, queries, scores))
    letters = np.arange(borders.shape[1]) != MARK
    return PhraseTable.of(made, letters, WordBorders(*borders))


def judge(votes: PhraseVotes, table: PhraseTable, state: PhraseState, log_probs: Tensor) -> Tensor:
    """What each phrase gives to the token it proposes, where a model says log p_NMT, fp32 [H, V]."""
    proposals = state.proposals()
    consent = Consent.of(Distribution(log_probs).view(proposals.values))
    given: Tensor = votes(proposals, consent, votes.prior(table)[state.rows])
    return given


def begun_after(phrase: list[int]) -> int:
    return next((n for n, token in enumerate(phrase, 1) if token != MARK), len(phrase))
