"""Phrase tables of given phrases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import Candidates, PhraseState, PhraseTable, PhraseVotes, Proposals
from fairseq_ccpr.text.decoder_subwords import WordBorders

MARK = 1  # stands for one without a letter


class Found(NamedTuple):
    """A retrieved phrase."""

    phrase: list[int]
    query: int
    score: float


NOWHERE = np.zeros((2, 64), bool)  # no word is unfinished after a token, and no token goes on with one


def make_table(
    batch: list[list[Found]], borders: np.ndarray = NOWHERE, covering: Sequence[np.ndarray] = ()
) -> PhraseTable:
    """The phrases of each sentence, with the borders of words, bool [2, V], and the source's subwords that each has."""
    made = []
    for sentence in batch:
        queries, scores = (
            np.array([one.query for one in sentence], int),
            np.array([one.score for one in sentence], np.float32),
        )
        made.append(Candidates.of([one.phrase for one in sentence], queries, queries, scores))
    letters = np.arange(borders.shape[1]) != MARK
    return PhraseTable.of(made, letters, WordBorders(*borders)).covering_sources(covering)


def weigh(
    votes: PhraseVotes, proposals: Proposals, log_probs: Tensor, prior: Tensor, bound: float = 12.0
) -> Tensor:
    """What proposals give to their tokens, in a memory of these votes that has --phrases-consent."""
    no_candidates: Any = None
    memory = PhraseMemory(no_candidates, PhraseSettings(consent=bound), votes, torch.device("cpu"))
    return memory.weigh(proposals, Distribution(log_probs).view(proposals.values), prior)


def judge(
    votes: PhraseVotes,
    table: PhraseTable,
    state: PhraseState,
    log_probs: Tensor,
    bound: float = 12.0,
    looked: Tensor | None = None,
) -> Tensor:
    """What each phrase gives to the token it proposes, where a model says log p_NMT, fp32 [H, V]."""
    return weigh(votes, state.proposals(looked), log_probs, votes.prior(table)[state.rows], bound)


def begun_after(phrase: list[int]) -> int:
    return next((n for n, token in enumerate(phrase, 1) if token != MARK), len(phrase))
