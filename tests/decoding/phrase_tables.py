"""Phrase tables of given phrases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.phrase_continuation import FlatPhrases, PhraseState, PhraseTable
from fairseq_ccpr.decoding.phrase_votes import Consent, PhraseVotes
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
    flat = [found for sentence in batch for found in sentence]
    columns = [(len(one.tokens), len(one.phrase), begun_after(one.phrase), one.query) for one in flat]
    extents, lengths, prefixes, queries = np.array(columns, np.int64).reshape(-1, 4).T
    tokens = np.array([token for one in flat for token in one.tokens], np.int32)
    scores = np.array([one.score for one in flat], np.float32)
    counts = np.array([len(sentence) for sentence in batch])
    phrases = FlatPhrases(tokens, extents, lengths, prefixes, queries, scores)
    return PhraseTable.of(counts, phrases, WordBorders(*borders))


def judge(votes: PhraseVotes, table: PhraseTable, state: PhraseState, log_probs: Tensor) -> Tensor:
    """What each phrase gives to the token it proposes, where a model says log p_NMT, fp32 [H, V]."""
    proposals = state.proposals()
    consent = Consent.of(Distribution(log_probs).view(proposals.values))
    given: Tensor = votes(proposals, consent, votes.of_phrases(table)[state.rows])
    return given


def begun_after(phrase: list[int]) -> int:
    return next((n for n, token in enumerate(phrase, 1) if token != MARK), len(phrase))
