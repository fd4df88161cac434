"""Make what `fairseq-ccpr demo` translates, and the small datastore that it ships with.

python scripts/recipes/demo_datastore.py

The verses are the first twenty of Mark 10 that bible.test.tsv.xz has. All of bible.train.tsv.xz would be 505 MB of keys: the
datastore has the 110 verses of it that share most with the twenty, as decoding would hardly find anything of the others.
"""

import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from shutil import copytree, rmtree

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.text.pairs import read_pairs

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "datastores/demo"
FIRST, VERSES, KEPT = 956, 20, 110
# Of knn.options, tuned for the whole text.
SETTINGS = {"k": 64, "lambda_": 0.8, "temperature": 30.0, "likeness": 8.0}


def ngrams(sentence: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", sentence.lower())
    return {tuple(words[at : at + n]) for n in (1, 2, 3) for at in range(len(words) - n + 1)}


def nearest(pairs: list[tuple[str, str]], verses: list[tuple[str, str]]) -> list[int]:
    """The pairs whose sources share the rarest n-grams with the verses, each verse in turn."""
    of_pair = [ngrams(source) for source, _ in pairs]
    counts = Counter(one for found in of_pair for one in found)
    rarity = {one: math.log(len(pairs) / count) for one, count in counts.items()}
    ranked = []
    for source, _ in verses:
        wanted = ngrams(source)
        shared = [sum(rarity[one] for one in found & wanted) for found in of_pair]
        ranked.append(sorted(range(len(pairs)), key=[-one for one in shared].__getitem__))
    chosen = dict.fromkeys(i for in_place in zip(*ranked) for i in in_place)
    return sorted(islice(chosen, KEPT))


def run(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "fairseq_ccpr", *map(str, words)], check=True)


def main() -> None:
    verses = list(islice(read_pairs(DEMO / "bible.test.tsv.xz"), FIRST, FIRST + VERSES))
    pairs = list(read_pairs(DEMO / "bible.train.tsv.xz"))
    tables = {"verses": verses, "train": [pairs[i] for i in nearest(pairs, verses)]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, rows in tables.items():
            lines = "".join(f"{source}\t{target}\n" for source, target in rows)
            (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
        languages, built = ["-s", "de", "-t", "en"], folder / "built"
        common = ["--path", DEMO / "model.pt", "--output"]
        run("prepare", *languages, "--train", folder / "train.tsv", *common, folder / "data-bin")
        run("build", "tokens", folder / "data-bin", *common, built, "--index", "exact")
        rmtree(built / "preprocessing")  # model and subwords lie in the folder above
        write_tuned({"token": TokenDatastore(built)}, {"tokens": SETTINGS}, "that of the whole text")
        rmtree(DEMO / "ready", ignore_errors=True)
        copytree(built, DEMO / "ready")
        (folder / "verses.tsv").replace(DEMO / "verses.tsv")


if __name__ == "__main__":
    main()
