"""How much of a translation is copied from the text, and how much stands for nothing in the source; needs no references.

python scripts/recipes/faithfulness.py PAIRS.tsv TEXT.txt SOURCE.txt NAME=HYPOTHESES.txt ... [--lexicon TSV] [--encoder e5]

Printed are, of each system, words per sentence, and the share of

- words that are copied: in runs of five words and more that a line of TEXT, of the target language, has;
- content words that are unlinked: they go with no word of the source, neither in word alignments of PAIRS (twice, and in a
  hundredth of the sentences with the source word) nor in the lexicon (entries with one source word), nor begin like one, as
  names do. A content word has three letters, and PAIRS has it twice, but it is none of the 120 most frequent words there;
- sentences that are flagged: of their content words, three and at least half are unlinked.

Links compare the first five letters of words, and of parts of source words, which may be compounds. With --encoder, as of
`mine`, there is also the mean cosine of source and translation, each less the mean vector of its side.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.lab.accuracy.alignment_error import aligned_words
from fairseq_ccpr.lab.accuracy.copied_words import copied_words
from fairseq_ccpr.lab.sentence_encoders import load_sentence_encoder
from fairseq_ccpr.text.pairs import read_lines, read_pairs
from fairseq_ccpr.text.words import has_letters, word_spans

STEM, SHARE = 5, 0.01
LETTERS, TIMES, FREQUENT = 3, 2, 120


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name in ("pairs", "text", "source", "--lexicon"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--encoder")
    parser.add_argument("systems", nargs="+", type=lambda word: word.partition("=")[::2])
    options = parser.parse_args()
    sources = list(read_lines(options.source))
    content, lexicon = learned(options.pairs, options.lexicon)
    linked = [{of for stem in stems(line) for of in {stem, *lexicon[stem]}} for line in sources]
    written = {name: list(read_lines(Path(path))) for name, path in options.systems}
    for name, lines in written.items():
        if len(lines) != len(sources):
            sys.exit(f"{name} has {len(lines):,} lines and {options.source} has {len(sources):,}")
    systems = {name: list(map(plain, lines)) for name, lines in written.items()}
    copied = copied_words(systems, map(plain, read_lines(options.text)))
    encoder = load_sentence_encoder(options.encoder, torch.device("cpu")) if options.encoder else None
    table = [["", "words", "copied", "unlinked", "flagged", *(["cosine"] if encoder else [])]]
    for name, texts in systems.items():
        apart = [
            [word[:STEM] not in of for word in line if word in content] for line, of in zip(texts, linked)
        ]
        unlinked = sum(map(sum, apart)) / max(1, sum(map(len, apart)))
        flagged = np.mean([sum(one) >= max(3, len(one) / 2) for one in apart])
        row = [name, f"{sum(map(len, texts)) / len(texts):.1f}"]
        row += [f"{share:.1%}" for share in (copied[name], unlinked, flagged)]
        if encoder:
            one, two = (of - of.mean(0) for of in (encoder.encode(sources), encoder.encode(written[name])))
            lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
            row.append(f"{((one * two).sum(1) / lengths).mean():.3f}")
        table.append(row)
    print(markdown_table(table))


def learned(pairs: Path, dictionary: Path | None) -> tuple[set[str], dict[str, set[str]]]:
    """Learn which words of the target language are content words, and by the stem of a source word those that go with it."""
    counts, times, links = Counter[str](), Counter[str](), defaultdict[str, Counter[str]](Counter)
    for pair, found in aligned_words(pairs):
        source, target = pair.words()
        counts.update(plain(pair.target))
        times.update({word[:STEM] for word in source})
        for one, two in {(source[i][:STEM], target[j][:STEM]) for i, j in found}:
            links[one][two] += 1
    lexicon = defaultdict(
        set,
        {
            one: {two for two, n in of.items() if n >= max(TIMES, SHARE * times[one])}
            for one, of in links.items()
        },
    )
    for entry in read_pairs(dictionary) if dictionary else ():
        if len(source := plain(entry[0])) == 1:
            lexicon[source[0][:STEM]].update(word[:STEM] for word in plain(entry[1]))
    frequent = {word for word, _ in counts.most_common(FREQUENT)}
    return {
        word for word, n in counts.items() if n >= TIMES and len(word) >= LETTERS and word not in frequent
    }, lexicon


def plain(line: str) -> list[str]:
    return [line[start:end].lower() for start, end in word_spans(line) if has_letters(line[start:end])]


def stems(line: str) -> set[str]:
    """Cut the first letters of words, and of what may be the last part of a compound."""
    return {
        word[at : at + STEM] for word in plain(line) for at in (0, *range(STEM - 1, len(word) - STEM + 1))
    }


if __name__ == "__main__":
    main()
