"""Pairs held out to tune and to measure on, of which nothing nearly the same is left to build from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fairseq_ccpr.storage.fingerprint import hash_bytes
from fairseq_ccpr.text.resemblance import NEAR, compared_words, highest_resemblance
from fairseq_ccpr.text.translation_memory import Pair


def rank_of_draw(pair: Pair) -> int:
    """Hash the words of a source: what is drawn depends neither on order nor on case and punctuation."""
    return hash_bytes(" ".join(compared_words(pair[0])).encode())


def hold_out(
    pairs: Sequence[Pair], wanted: Mapping[str, int]
) -> tuple[dict[str, list[Pair]], list[Pair], list[Pair]]:
    """Draw pairs for each name, and part those like them from what is left.

    Drawn are the pairs of the lowest hashes, the first of those with one source: the same as long as the text
    is the same, and nearly the same when it grows. Neither what is left nor a later draw has a pair of which
    source or target shares `NEAR` of its words with those of a pair drawn before.

    Args:
        wanted: how many, by name, in the order in which they are drawn.

    Returns:
        The pairs drawn by name, fewer where there are no more; those left, in their order; those too like.
    """
    ranks = [rank_of_draw(pair) for pair in pairs]
    left, drawn, alike = list(range(len(pairs))), dict[str, list[Pair]](), list[int]()
    for name, count in wanted.items():
        firsts = dict[int, int]()
        for i in left:
            if all(map(compared_words, pairs[i])):
                firsts.setdefault(ranks[i], i)
        chosen = [firsts[rank] for rank in sorted(firsts)[:count]]
        drawn[name] = [pairs[i] for i in chosen]
        kept = sorted({*left} - {*chosen})
        near = np.zeros(len(kept), bool)
        for side in (0, 1):
            near |= nearly_in([pairs[i][side] for i in kept], [pair[side] for pair in drawn[name]])
        alike += [i for i, is_near in zip(kept, near) if is_near]
        left = [i for i, is_near in zip(kept, near) if not is_near]
    return drawn, [pairs[i] for i in left], [pairs[i] for i in sorted(alike)]


def nearly_in(sentences: Sequence[str], held: Sequence[str]) -> np.ndarray:
    """Tell which sentences are nearly the same as one of those held out, bool [len(sentences)]."""
    near: np.ndarray = highest_resemblance(sentences, held) >= NEAR
    return near
