"""A dictionary where there is none: the phrase pairs of aligned text that translate each other more often than not.

python scripts/recipes/phrase_table.py PHRASE_PAIRS COUNT > pairs.tsv

PHRASE_PAIRS is a folder that fairseq-ccpr extract made (its train part). Written are source phrase, tab, target phrase, of
those that were aligned COUNT times at least and in more than half of what either was aligned with, most frequent first:
what fairseq-ccpr lexicon --pairs takes.
"""

import sys
from collections import Counter

from fairseq_ccpr.phrases.pair_store import PhrasePairs


def main() -> None:
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit(__doc__.strip())
    store, least = PhrasePairs(sys.argv[1]), int(sys.argv[2])
    pairs: Counter[tuple[str, str]] = Counter()
    for number in range(store.sentences):
        source, target = store.sentence(number)
        for _, start, end, target_start, target_end in store.pairs_of(number).tolist():
            pairs[source[start:end], target[target_start:target_end]] += 1
    sources, targets = Counter[str](), Counter[str]()
    for (source, target), count in pairs.items():
        sources[source] += count
        targets[target] += count
    for (source, target), count in pairs.most_common():
        if count >= least and 2 * count > max(sources[source], targets[target]):
            print(source, target, sep="\t")


if __name__ == "__main__":
    main()
