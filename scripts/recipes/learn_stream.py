"""What a memory gains while a text is translated and corrected, sentence by sentence: translate, see the reference, learn it.

python scripts/recipes/learn_stream.py DATASTORE PAIRS.tsv [--most N] [NAME=VALUE ...]

DATASTORE is copied first, and stays as it is; fairseq-ccpr build memory makes an empty one. NAME=VALUE are options of
decoding, such as knn_k=4. Printed are BLEU and chrF of each tenth of the text, of the model alone and with what was learnt
before each sentence; the recall of words of the references that the model alone does not write, by how often the text had
them before (R0, R1, R2+); and how long learning took.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.evaluation.translation.scores import score
from fairseq_ccpr.text.pairs import read_pairs


def main() -> None:
    words = sys.argv[1:]
    if len(words) < 2:
        sys.exit(__doc__.strip())
    most = int(words.pop(words.index("--most") + 1)) if "--most" in words else None
    store, pairs, *named = (word for word in words if word != "--most")
    options: dict[str, Any] = dict(word.split("=", 1) for word in named)
    rows = list(islice(read_pairs(Path(pairs)), most))
    sources, references = [source for source, _ in rows], [reference for _, reference in rows]
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(store, Path(folder) / "store")
        translator = Translator(datastore=copy, **options)
        alone = [one.text for one in Translator(datastore=copy, **(options | {"knn_lambda": 0})).translate(sources)]
        stream: list[str] = []
        seconds = []
        for source, reference in rows:
            stream.extend(one.text for one in translator.translate([source]))
            start = time.perf_counter()
            translator.learn(source, reference)
            seconds.append(time.perf_counter() - start)
        print(translator.signature)
    print(
        markdown_table(
            [["sentences", "alone", "stream", "alone, chrF", "stream, chrF"], *curve(alone, stream, references)]
        )
    )
    for name, (found, count) in sorted(recall(alone, stream, references).items()):
        print(f"{name}: {found / max(1, count):.1%} of {count:,} words")
    print("learning took {:.0f} ms, 95 in 100 at most {:.0f} ms".format(*1000 * np.quantile(seconds, [0.5, 0.95])))


def curve(alone: list[str], stream: list[str], references: list[str]) -> list[list[object]]:
    """Score each tenth, and all."""
    ends = [len(references) * tenth // 10 for tenth in range(11)]
    parts: list[slice[Any, Any, Any]] = [slice(a, b) for a, b in pairwise(ends) if b > a] + [slice(None)]
    rows: list[list[object]] = []
    for part in parts:
        scores = [score(texts[part], references[part]) for texts in (alone, stream)]
        name = f"{part.start + 1} to {part.stop}" if part.stop else "all"
        rows.append([name, *(one.bleu for one in scores), *(one.chrf for one in scores)])
    return rows


def recall(alone: list[str], stream: list[str], references: list[str]) -> dict[str, tuple[int, int]]:
    """Count words of references that the model alone does not write, and how many of them were written with the memory."""
    seen: Counter[str] = Counter()
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for plain, written, reference in zip(alone, stream, references):
        words = set(reference.split())
        for word in words - set(plain.split()):
            name = f"R{min(seen[word], 2)}{'+' * (seen[word] > 1)}"
            found, count = counts[name]
            counts[name] = found + (word in written.split()), count + 1
        seen.update(words)
    return counts


if __name__ == "__main__":
    main()
