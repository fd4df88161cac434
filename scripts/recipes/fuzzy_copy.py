"""A translation memory as translators use it: sentences whose source nearly stands in the training text get its translation.

python scripts/recipes/fuzzy_copy.py TRAIN.tsv SOURCE.txt TRANSLATION.txt [LEAST] > OUTPUT.txt

The similarity of two sources is 1 - (edit distance in words) / (length of the longer one). From LEAST on (0.85), the
translation of the most similar training source is copied; other sentences keep their line of TRANSLATION.txt, a system's. It
prints on the standard error how many were copied. `fairseq-ccpr compare --results-path` writes source.txt and base.txt.
"""

import sys
from pathlib import Path

import numpy as np

from fairseq_ccpr.text.pairs import read_lines, read_pairs
from fairseq_ccpr.text.resemblance import resemblances

CANDIDATES = 16  # training sources that share most words, of which the most similar one is chosen


def similarity(one: list[str], two: list[str]) -> float:
    """Compute 1 - (edit distance in words) / (length of the longer one).

    >>> similarity("open the file".split(), "open a file".split())
    0.6666666666666667
    """
    row = list(range(len(two) + 1))
    for i, word in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(two, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return 1 - row[-1] / max(len(one), len(two), 1)


def main() -> None:
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__.strip())
    pairs = list(read_pairs(Path(sys.argv[1])))
    sources, translations = (list(read_lines(Path(path))) for path in sys.argv[2:4])
    if len(sources) != len(translations):
        sys.exit(
            f"{sys.argv[2]} has {len(sources):,} lines and {sys.argv[3]} {len(translations):,}: give as many"
        )
    least, copied = float(sys.argv[4]) if len(sys.argv) == 5 else 0.85, 0
    for first, block in resemblances(sources, [source for source, _ in pairs]):
        for row, similarities in enumerate(block.tocsr()):
            nearest = similarities.indices[np.argsort(-similarities.data, kind="stable")[:CANDIDATES]]
            words = sources[first + row].split()
            best = max(((similarity(words, pairs[i][0].split()), -i) for i in nearest), default=(0.0, 0))
            if best[0] >= least:
                translations[first + row], copied = pairs[-best[1]][1], copied + 1
    print(*translations, sep="\n")
    print(f"{copied:,} of {len(sources):,} sentences copied (similarity {least:g} or more)", file=sys.stderr)


if __name__ == "__main__":
    main()
