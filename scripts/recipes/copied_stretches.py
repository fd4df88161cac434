"""How much of a translation follows stretches of the datastore's own sentences.

python scripts/recipes/copied_stretches.py LOG DATASTORE

LOG is what fairseq-generate --tokens-log wrote with the token datastore DATASTORE. Printed is, for 1, 8 and all of the logged
neighbours, of how many tokens per neighbour is the word after a neighbour of the token before, in the same sentence.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

from fairseq_ccpr.datastore.token import TokenDatastore


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    places = TokenDatastore(sys.argv[2]).provenance
    with Path(sys.argv[1]).open(encoding="utf-8") as stream:
        tokens = [json.loads(line) for line in stream]
    pairs = [(one, two) for one, two in pairwise(tokens) if one["sentence"] == two["sentence"]]
    deepest = max((len(token["neighbours"]) for token in tokens), default=0)
    for k in sorted({1, min(8, deepest), deepest}):
        found = [
            {
                (number, place + offset)
                for number, place in places[[n["entry"] for n in token["neighbours"][:k]]].tolist()
            }
            for pair in pairs
            for token, offset in zip(pair, (1, 0))
        ]
        follow = sum(not one.isdisjoint(two) for one, two in zip(found[::2], found[1::2]))
        print(f"nearest {k}: {follow / max(1, len(pairs)):.1%} of {len(pairs):,} tokens follow a stretch")


if __name__ == "__main__":
    main()
