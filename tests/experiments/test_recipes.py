"""The recipes that no other test runs: what they print, on real models and phrase pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from tests.helpers import run
from tests.small_models import Ccpr, World


def test_a_dictionary_of_aligned_text(ccpr: Ccpr) -> None:
    store = PhrasePairs(ccpr.phrases / "train")
    counts: Counter[tuple[str, str]] = Counter()
    for number in range(store.sentences):
        source, target = store.sentence(number)
        counts.update((source[a:b], target[c:d]) for _, a, b, c, d in store.pairs_of(number).tolist())
    lines = run("scripts/recipes/phrase_table.py", store.directory, 2).stdout.splitlines()
    written = [tuple(line.split("\t")) for line in lines]
    expected = {
        pair
        for pair, count in counts.items()
        if count >= 2
        and all(2 * count > sum(n for other, n in counts.items() if other[side] == pair[side]) for side in (0, 1))
    }
    assert set(written) == expected and len(written) == len(expected) > 5
    assert [counts[pair] for pair in written] == sorted(map(counts.get, written), reverse=True)
    assert "extract_phrases.py" in run("scripts/recipes/phrase_table.py", check=False).stderr


def test_stretches_of_the_datastore(world: World, decode: Callable, tmp_path: Path) -> None:
    log = tmp_path / "log"
    decode("--knn-k", 4, "--knn-lambda", 0.6, "--knn-log", log)
    shown = run("scripts/recipes/copied_stretches.py", log, world.datastore).stdout.splitlines()
    places = [tuple(place) for place in TokenDatastore(world.datastore).provenance.tolist()]
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    follow = pairs = 0
    for before, line in zip(lines, lines[1:]):
        if before["sentence"] == line["sentence"]:
            pairs += 1
            number, place = places[before["neighbours"][0]["entry"]]
            follow += places[line["neighbours"][0]["entry"]] == (number, place + 1)
    assert shown[0] == f"nearest 1: {follow / pairs:.1%} of {pairs:,} tokens follow a stretch" and len(shown) == 2
