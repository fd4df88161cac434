"""Phrase tables of given phrases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_continuation import NO_TOKEN, PhraseState, PhraseTable
from fairseq_ccpr.decoding.phrase_votes import Consent, PhraseVotes
from fairseq_ccpr.decoding.token_memory import DistributionView
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
    size, most = len(batch), max(1, *map(len, batch))
    longest = max([len(found.tokens) for sentence in batch for found in sentence], default=1)
    tokens = torch.full((size, most, longest), NO_TOKEN, dtype=torch.int32)
    lengths, begun, queries = torch.zeros(3, size, most, dtype=torch.long)
    scores = torch.zeros(size, most)
    for row, sentence in enumerate(batch):
        for lane, found in enumerate(sentence):
            tokens[row, lane, : len(found.tokens)] = torch.tensor(found.tokens)
            lengths[row, lane], queries[row, lane], scores[row, lane] = len(found.phrase), found.query, found.score
            begun[row, lane] = begun_after(found.phrase)
    return PhraseTable.of(tokens, lengths, begun, queries, scores, WordBorders(*borders))


def judge(votes: PhraseVotes, table: PhraseTable, state: PhraseState, log_probs: Tensor) -> Tensor:
    """What each phrase gives to the token it proposes, beside a model that says log p_NMT, fp32 [H, V]."""
    proposals = state.proposals()
    consent = Consent.of(DistributionView(log_probs, proposals.values))
    given: Tensor = votes(proposals, consent, votes.of_phrases(table)[state.rows])
    return given


def begun_after(phrase: list[int]) -> int:
    return next((n for n, token in enumerate(phrase, 1) if token != MARK), len(phrase))
