"""How many of a domain's terms the translations of several systems have.

python scripts/recipes/domain_terms.py TRAINING.tsv GENERAL.txt SOURCE.txt REFERENCE.txt NAME=HYPOTHESES.txt ...

A term is a source word of 4 letters or more that TRAINING, sentence pairs of the domain, has at least 10 times, and the word
that most of its links in their word alignment go to. That word is typical of the domain: at least 3 times as frequent there
as in GENERAL, other text in the target language, and not among the 1,000 most frequent words of GENERAL, which any model
knows. A term occurs in a sentence whose source has it and whose reference has its translation; case does not count.

Each system is compared with the first; intervals are of 95%, by bootstrap over sentences. How often a term is in a
translation by chance is counted in the translation of another sentence, half a test set away.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.lab.accuracy.alignment_error import aligned_words
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, resample
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans

LETTERS, TIMES, SHARE = 4, 10, 0.5
TYPICAL, KNOWN = 3, 1000
SAMPLES = 1000


def main() -> None:
    if len(sys.argv) < 6 or not all("=" in word for word in sys.argv[5:]):
        sys.exit(__doc__.strip())
    training, general, source, reference = map(Path, sys.argv[1:5])
    texts = {name: Path(path) for name, _, path in (word.partition("=") for word in sys.argv[5:])}
    paths = [source, reference, *texts.values()]
    sources, references, *hypotheses = read = [
        [set(words(line)) for line in read_lines(path)] for path in paths
    ]
    for path, lines in zip(paths, read):
        if len(lines) != len(sources):
            sys.exit(
                f"{path} has {len(lines):,} lines and {source} has {len(sources):,}: give files of the same sentences"
            )
    terms = typical(training, general)
    wanted = [
        sorted({terms[word] for word in terms.keys() & one} & two) for one, two in zip(sources, references)
    ]
    total = sum(map(len, wanted))
    if not total:
        sys.exit(f"{source} and {reference} share no term of {training}: give sentences of the same domain")
    print(f"{len(terms):,} terms, {total:,} occurrences in {len(sources):,} sentences")
    found = [written(wanted, lines) for lines in hypotheses]
    apart = len(sources) // 2
    chance = [written(wanted, lines[apart:] + lines[:apart]) for lines in hypotheses]
    hits, totals = (
        np.array([[sum(of) for of in one] for one in found]),
        [[len(of) for of in wanted]] * len(found),
    )
    shares = resample(hits, np.array(totals), [np.arange(len(sources))], SAMPLES)
    first, *others = (np.array([hit for of in one for hit in of]) for one in found)
    has, misses = first.sum(), (~first).sum()
    print(f"{next(iter(texts))} writes {has:,} of them and misses {misses:,}\n")
    table = [["", "terms written", "by chance", "difference", "gained of the missed", "lost of the written"]]
    rows = [
        [name, f"{hit / total:.1%}", f"{sum(map(sum, one)) / total:.1%}"]
        for name, hit, one in zip(texts, hits.sum(1), chance)
    ]
    table.append([*rows[0], "", "", ""])
    for row, here, resampled in zip(rows[1:], others, shares.T[1:]):
        low, high = 100 * np.percentile(resampled - shares[:, 0], INTERVAL)
        gained, lost = (here & ~first).sum(), (first & ~here).sum()
        difference = f"{100 * (here.mean() - first.mean()):+.1f} ({low:+.1f} to {high:+.1f})"
        table.append([*row, difference, f"{gained / max(1, misses):.0%}", f"{lost / max(1, has):.0%}"])
    print(markdown_table(table))


def words(text: str) -> list[str]:
    return [text[start:end].lower() for start, end in word_spans(text)]


def written(wanted: list[list[str]], lines: list[set[str]]) -> list[list[bool]]:
    return [[term in have for term in of] for of, have in zip(wanted, lines)]


def typical(training: Path, general: Path) -> dict[str, str]:
    links: dict[str, Counter[str]] = defaultdict(Counter)
    times: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for pair, linked in aligned_words(training):
        sides = pair.words()
        for counts, side in zip(times, sides):
            counts.update(side)
        for one, two in linked:
            links[sides[0][one]][sides[1][two]] += 1
    elsewhere = Counter(word for line in read_lines(general) for word in words(line))
    known = {word for word, _ in elsewhere.most_common(KNOWN)}
    scale = TYPICAL * times[1].total() / elsewhere.total()
    terms = {}
    for word, of in links.items():
        target, count = of.most_common(1)[0]
        if len(word) < LETTERS or not (word.isalpha() and target.isalpha()) or times[0][word] < TIMES:
            continue
        if (
            count > SHARE * of.total()
            and target not in known
            and times[1][target] >= scale * elsewhere[target]
        ):
            terms[word] = target
    return terms


if __name__ == "__main__":
    main()
