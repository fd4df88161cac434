"""Phrase tables of given phrases."""

from __future__ import annotations

import torch

from fairseq_ccpr.decoding.phrase_continuation import NO_TOKEN, PhraseTable


def make_table(batch: list[list[tuple[list[int], int, float]]], source_length: int = 3) -> PhraseTable:
    """The phrases of each sentence, best first within each source phrase."""
    size, most = len(batch), max(1, *map(len, batch))
    longest = max([len(phrase) for sentence in batch for phrase, _, _ in sentence], default=1)
    tokens = torch.full((size, most, longest), NO_TOKEN, dtype=torch.int32)
    lengths, entered, queries, ranks = torch.zeros(4, size, most, dtype=torch.long)
    scores = torch.zeros(size, most)
    for row, sentence in enumerate(batch):
        for lane, (phrase, query, score) in enumerate(sentence):
            tokens[row, lane, : len(phrase)] = torch.tensor(phrase)
            lengths[row, lane], queries[row, lane], scores[row, lane] = len(phrase), query, score
            entered[row, lane] = begun_after(phrase)
            better = sum(q == query and (s, -i) > (score, -lane) for i, (_, q, s) in enumerate(sentence))
            ranks[row, lane] = better
    attended = torch.rand(size, 3, source_length) < 0.5
    return PhraseTable.of(tokens, lengths, entered, queries, scores, ranks, attended)


MARK = 1  # stands for one without a letter


def begun_after(phrase: list[int]) -> int:
    return next((n for n, token in enumerate(phrase, 1) if token != MARK), len(phrase))
