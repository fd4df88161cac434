"""Splits a dictionary into train, valid and test without shared strings; detects near-copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from scipy.cluster.hierarchy import DisjointSet

from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.words import word_spans

SHARES = {"train": 3, "valid": 1, "test": 1}
Pair = tuple[str, str]


def is_near_copy(source: str, target: str, most: float = 0.5) -> bool:
    """Check whether ROUGE-L exceeds `most` both ways: a common subsequence of more than that fraction of either side's words.

    >>> is_near_copy("Windows Server", "windows server"), is_near_copy("der Server", "the server")
    (True, False)
    """
    one, two = ([text[start:end].casefold() for start, end in word_spans(text)] for text in (source, target))
    common = _common_subsequence(one, two) if set(one) & set(two) else 0
    return common > most * max(len(one), len(two))


def _common_subsequence(one: list[str], two: list[str]) -> int:
    """Return the length of the longest common subsequence; too simple to need rapidfuzz."""
    lengths = [0] * (len(two) + 1)
    for word in one:
        before = 0
        for at, other in enumerate(two, 1):
            before, lengths[at] = lengths[at], before + 1 if word == other else max(lengths[at], lengths[at - 1])
    return lengths[-1]


def split_pairs(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Split 3 : 1 : 1, with no string in two splits, on either side and ignoring case.

    Pairs that share a string, directly or through other pairs, stay together. Groups are assigned from the largest down,
    equal ones in pseudo-random order, each to the split that lacks most. The result does not depend on the order of pairs.

    >>> {name: len(part) for name, part in split_pairs([(f"a{i}", f"b{i}") for i in range(10)]).items()}
    {'train': 6, 'valid': 2, 'test': 2}
    """
    groups: defaultdict[str, list[Pair]] = defaultdict(list)
    connected = DisjointSet(string.casefold() for pair in pairs for string in pair)
    for source, target in pairs:
        connected.merge(source.casefold(), target.casefold())
    for pair in sorted(pairs):
        groups[connected[pair[0].casefold()]].append(pair)
    lacking = {name: len(pairs) * share / sum(SHARES.values()) for name, share in SHARES.items()}
    parts: dict[str, list[Pair]] = {name: [] for name in SHARES}
    for group in sorted(groups.values(), key=lambda group: (-len(group), digest("\t".join(group[0])))):
        name = max(lacking, key=lambda split: lacking[split])
        lacking[name] -= len(group)
        parts[name] += group
    return parts
