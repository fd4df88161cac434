"""Pairs held out to tune and to measure on, of which nothing nearly the same is left to build from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from fairseq_ccpr.storage.fingerprint import hash_bytes
from fairseq_ccpr.text.resemblance import NEAR, compared_words, highest_resemblance
from fairseq_ccpr.text.translation_memory import Pair


def rank_of_draw(pair: Pair) -> int:
    """Hash the words of a source: what is drawn depends neither on order nor on case and punctuation."""
    return hash_bytes(" ".join(compared_words(pair[0])).encode())


def hold_out(
    pairs: Sequence[Pair], wanted: Mapping[str, int], given: Sequence[Pair] = ()
) -> tuple[dict[str, list[Pair]], list[Pair], list[Pair]]:
    """Draw pairs for each name, and part those like them from what is left.

    Drawn are the pairs of the lowest hashes, the first of those with one source: the same as long as the text
    is the same, and nearly the same when it grows. Neither what is left nor a later draw has a pair of which
    source or target shares `NEAR` of its words with those of a pair drawn before.

    Args:
        wanted: how many, by name, in the order in which they are drawn.
        given: pairs that are held out already.

    Returns:
        The pairs drawn by name, fewer where there are no more; those left, in their order; those too like.
    """
    firsts = dict[int, int]()
    for i, pair in enumerate(pairs):
        firsts.setdefault(rank_of_draw(pair), i)
    ranked = (firsts[rank] for rank in sorted(firsts))
    waiting = (i for i in ranked if all(map(compared_words, pairs[i])))
    chosen = dict[str, list[int]]()
    for name, count in wanted.items():
        held = [*given, *(pairs[i] for some in chosen.values() for i in some)]
        chosen[name] = []
        while (more := count - len(chosen[name])) and (some := list(islice(waiting, more))):
            near = _near([pairs[i] for i in some], held)
            chosen[name] += [i for i, is_near in zip(some, near) if not is_near]
    drawn = {name: [pairs[i] for i in some] for name, some in chosen.items()}
    rest = sorted({*range(len(pairs))}.difference(*chosen.values()))
    near = _near([pairs[i] for i in rest], [*given, *(pair for some in drawn.values() for pair in some)])
    left, alike = ([pairs[i] for i, one in zip(rest, near) if one == is_near] for is_near in (False, True))
    return drawn, left, alike


def _near(pairs: Sequence[Pair], held: Sequence[Pair]) -> np.ndarray:
    sides = (nearly_in([pair[side] for pair in pairs], [pair[side] for pair in held]) for side in (0, 1))
    return np.logical_or(*sides)


def nearly_in(sentences: Sequence[str], held: Sequence[str]) -> np.ndarray:
    """Tell which sentences are nearly the same as one of those held out, bool [len(sentences)]."""
    near: np.ndarray = highest_resemblance(sentences, held) >= NEAR
    return near
