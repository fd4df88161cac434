"""How well the model's own probability finds the translations in which a judge found errors.

python scripts/recipes/judged_confidence.py benchmarks/judged.tsv office=office.jsonl koran1=koran1.jsonl ...

Each file is what `fairseq-ccpr translate --path MODEL --output-format jsonl` writes of the test set, without a datastore: its
mean log p of a sentence is compared with the sheet's columns of the model alone. Prints, of each text and kind of
error, its number and AUC: the chance that a sentence with it is less probable than one without.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

from fairseq_ccpr.evaluation.confidence import measured

ERRORS = "base_missing", "base_wrong_term", "base_hallucinated"


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[2:]):
        sys.exit(__doc__.strip())
    with Path(sys.argv[1]).open(encoding="utf-8") as sheet:
        judged = list(csv.DictReader(sheet, delimiter="\t"))
    for name, file in (word.split("=", 1) for word in sys.argv[2:]):
        scores = [
            np.mean(json.loads(line)["token_scores"] or [0.0])
            for line in Path(file).read_text("utf-8").splitlines()
        ]
        rows = [row for row in judged if row["domain"] == name]
        improbable = -np.array([scores[int(row["line"]) - 1] for row in rows])
        for error in (*ERRORS, "any"):
            found = np.array(["1" in [row[one] for one in ERRORS if error in (one, "any")] for row in rows])
            auc = measured(improbable, found)[0]
            print(name, error.removeprefix("base_"), found.sum(), f"{auc:.2f}", sep="\t")


if __name__ == "__main__":
    main()
