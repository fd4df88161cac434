"""How often an element of HTML goes around the right words of a translation.

python scripts/recipes/markup_accuracy.py PHRASES.tsv MODEL [--words N]

PHRASES.tsv has columns as benchmarks/gold-phrases.tsv.xz: set, source, target, the characters a-b of a phrase in the source,
those of its translation in the target. For 50 sentences of 6 to 35 words, a phrase each, with N words or more, the target is
taken for the model's translation, so that only the place of the element is measured.
"""

import random
import sys
from pathlib import Path

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.inference.alignment import align, place_markup
from fairseq_ccpr.inference.system import Translation
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.sentences import Mark

SENTENCES = 50


def main() -> None:
    if len(sys.argv) not in (3, 5):
        sys.exit(__doc__.strip())
    path, model, least = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]) if len(sys.argv) == 5 else 1
    rows = [line.split("\t") for line in read_lines(path)]
    random.Random(1).shuffle(rows)
    chosen: dict[str, list[str]] = {}
    for row in rows:
        if 6 <= len(row[1].split()) <= 35 and len(row[5].split()) >= least and len(chosen) < SENTENCES:
            chosen.setdefault(row[1], row)
    translator = Translator(model, device="cpu")
    encode, symbols = translator.target_encoder(), translator.task.target_dictionary.symbols
    given = [
        Translation(source, target, 0.0, tuple(symbols[i] for i in encode(target).tolist()[:-1]))
        for source, target in (row[1:3] for row in chosen.values())
    ]
    exact = overlap = 0.0
    for alignment, row in zip(align(translator, given), chosen.values()):
        (first, stop), gold = (tuple(map(int, span.split("-"))) for span in row[3:5])
        before, inside, _ = "".join(
            map(str, place_markup(alignment, [Mark(first, stop, ["\0"], ["\0"])]))
        ).split("\0")
        start, end = (len(before), len(before) + len(inside))
        exact += (start, end) == gold
        overlap += 2 * max(0, min(end, gold[1]) - max(start, gold[0])) / (end - start + gold[1] - gold[0])
    count = len(chosen)
    table: list[list[object]] = [["words", "elements", "exact", "F1"]]
    table.append([least, count, f"{exact / count:.0%}", f"{overlap / count:.2f}"])
    print(markdown_table(table))


if __name__ == "__main__":
    main()
