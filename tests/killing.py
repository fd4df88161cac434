"""Kill processes that learn, forget and compact, at drawn moments, or flip bits, and check what is on disk then."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.building.rewrite import CompactSettings, compact_datastore
from fairseq_ccpr.datastore.learned import HEADER, LEARNED, PHRASE_IDENTITY, LearnedStore, NewPair, PairPhrases
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.storage.journal import Journal
from tests.helpers import contents

SECOND = 1_000_000  # added to the number of a pair for the one that is learned together with it


def store_at(folder: Path) -> LearnedStore:
    return LearnedStore(TokenDatastore(folder))


def new_pair(number: int, dimension: int = 32, width: int = 0) -> NewPair:
    """A pair of random content, which its number decides, with phrases whose keys are so wide, or without."""
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 12))
    keys = rng.standard_normal((length, dimension)).astype(np.float16)
    values = rng.integers(4, 400, length).astype(np.int32)
    target, phrases = f"Target {number} 中", None
    if width:
        places = [span for span in ([0, 6], [0, len(target)], [7, len(target)]) if rng.random() < 0.8]
        spans = np.array(places, np.int32).reshape(-1, 2)
        phrases = PairPhrases(spans, rng.standard_normal((len(spans), width)).astype(np.float16))
    return NewPair(f"Quelle {number} äöß", target, values, keys, phrases)


def maker(folder: Path) -> Callable[[int], NewPair]:
    """Make the pairs that can be learned alongside a datastore, with phrases where it has a phrase part."""
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    width = manifest.phrase.dimension if manifest.phrase is not None else 0
    return partial(new_pair, dimension=manifest.token.dimension, width=width)


def same(store: LearnedStore, pairs: dict[int, NewPair]) -> bool:
    """Whether a store has exactly these, in their order."""
    texts = [(one.id, one.source, one.target, one.tokens) for one in store.pairs.values()]
    wanted = [(number, one.source, one.target, len(one.values)) for number, one in pairs.items()]
    arrays, found = list(store.entries.values()), store.phrases
    with_phrases = {number: one.phrases for number, one in pairs.items() if one.phrases is not None}
    return (
        texts == wanted
        and all(
            np.array_equal(values, one.values) and np.array_equal(keys, one.keys)
            for (values, keys), one in zip(arrays, pairs.values())
        )
        and found.keys() == with_phrases.keys()
        and all(
            np.array_equal(found[n].spans, one.spans) and np.array_equal(found[n].keys, one.keys)
            for n, one in with_phrases.items()
        )
    )


def killed(work: Callable[[int], object], seconds: float) -> bytes:
    """Run a function in a process that is killed after some seconds; return what it wrote to the file it was given."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _work_and_exit(work, writing)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as stream:
        return stream.read()


def _work_and_exit(work: Callable[[int], object], writing: int) -> NoReturn:
    tqdm.set_lock(threading.RLock())  # the default one is shared with the parent, which would wait for ever for it
    try:
        work(writing)
    finally:
        os._exit(0)


def kill_learning(folder: Path, kills: int, rng: np.random.Generator) -> int:
    """Let one process after the other learn and forget where the one before was killed; no other file may change.

    Returns:
        How many changes were acknowledged.
    """
    before, make = contents(folder), maker(folder)
    pairs: dict[int, NewPair] = {}
    number, first_id, acknowledged = 0, 1, 0
    for _ in range(kills):
        said = killed(partial(_write_for_ever, folder, number, make), float(rng.uniform(0, 0.08)))
        store = store_at(folder)
        states = _possible(pairs, number, said, first_id, make)
        assert any(same(store, state) for state in states), (number, said, list(store.pairs))
        pairs = next(state for state in states if same(store, state))
        number = max([number, *(int(one.source.split()[1]) % SECOND for one in store.pairs.values())])
        if len(pairs) > 200:
            store.forget(list(pairs)[:150])
            pairs = dict(list(pairs.items())[150:])
        store.lock()  # cuts off what was not completely written, as the next writer would
        store.close()
        first_id, acknowledged = store.next_id, acknowledged + len(said)
    assert {name: content for name, content in contents(folder).items() if not name.startswith(LEARNED)} == before
    return acknowledged


def _write_for_ever(folder: Path, number: int, make: Callable[[int], NewPair], acknowledged: int) -> None:
    """Learn two pairs, and forget every third time one of them; write a byte after each that was acknowledged."""
    store = store_at(folder)
    while True:
        number += 1
        learned = store.learn([make(number), make(number + SECOND)])
        os.write(acknowledged, b"l")
        if number % 3 == 0:
            store.forget(learned[:1])
            os.write(acknowledged, b"f")


def _possible(
    pairs: dict[int, NewPair], number: int, said: bytes, first_id: int, make: Callable[[int], NewPair]
) -> list[dict[int, NewPair]]:
    """What may be there after a kill: all that was acknowledged, and what was begun after that, none of it half."""
    now, ids = dict(pairs), first_id
    expected = (kind for n in range(number + 1, number + SECOND) for kind in ("lf" if n % 3 == 0 else "l"))
    for _, kind in zip(said, expected):
        if kind == "l":
            number, ids = number + 1, ids + 2
            now |= {ids - 2: make(number), ids - 1: make(number + SECOND)}
        else:
            del now[ids - 2]
    if next(expected) == "f":
        return [now, {n: pair for n, pair in now.items() if n != ids - 2}]
    one = {**now, ids: make(number + 1)}
    return [now, one, {**one, ids + 1: make(number + 1 + SECOND)}]


def flip_bits(folder: Path, flips: int, rng: np.random.Generator) -> None:
    """Flip bits of a journal, one at a time: each is noticed, and costs what the record says that it hits."""
    learning, make = store_at(folder), maker(folder)
    changes = [
        *(("learn", n) for n in range(1, 13)),
        ("again", 3),
        ("forget", 5),
        ("forget", 8),
        ("learn", 13),
        ("again", 1),
    ]
    for change, number in changes:
        learning.forget([number]) if change == "forget" else learning.learn([make(number)])
    learning.close()
    states = [_without(changes, missing, make) for missing in range(len(changes))]
    states.append(_without(changes, None, make))
    whole, ends = learning.path.read_bytes(), [0]
    hit: list[int] = []  # the change that each record is
    for record in Journal(learning.path).read():
        ends.append(ends[-1] + 32 + len(record))
        hit.append(-1 if record[0] in (HEADER, PHRASE_IDENTITY) else sum(one >= 0 for one in hit))
    assert ends[-1] == len(whole) and len(changes) == max(hit) + 1
    for place in rng.integers(len(whole), size=flips).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        learning.path.write_bytes(damaged)
        found = LearnedStore(learning.datastore)
        pairs, counts = states[hit[bisect_right(ends, place) - 1]]
        assert found.damage and found.next_id > 13 and same(found, pairs), place
        assert [pair.count for pair in found.pairs.values()] == counts, place
    learning.path.write_bytes(whole)


def _without(
    changes: list[tuple[str, int]], missing: int | None, make: Callable[[int], NewPair]
) -> tuple[dict[int, NewPair], list[int]]:
    """The pairs, and how often each was learned, if all but one of the changes are made."""
    counts: dict[int, int] = {}
    for change, number in changes[:missing] + (changes[missing + 1 :] if missing is not None else []):
        if change == "learn":
            counts[number] = 1
        elif change == "forget":
            counts.pop(number, None)
        elif number in counts:
            counts[number] += 1
    return {number: make(number) for number in counts}, list(counts.values())


def kill_compacting(folder: Path, kills: int, rng: np.random.Generator) -> set[int]:
    """Kill processes that compact copies of a datastore alongside which something was learned; all is there, or nothing.

    Returns:
        The generations that they left.
    """
    learning, make = store_at(folder), maker(folder)
    ids = learning.learn([make(number) for number in range(1, 30)])
    learning.forget(ids[::4])
    learning.close()
    pairs = {number: make(number) for number in ids if number not in ids[::4]}
    before = keys_at(folder)
    tokens = [pair.keys for pair in pairs.values()]
    phrases = [pair.phrases.keys for pair in pairs.values() if pair.phrases is not None]
    after = [np.concatenate([own, *new]) for own, new in zip(before, (tokens, phrases))]
    moved = {name: f"{name}-1" for name in ("token", "phrase")}
    copy, names = folder.with_name("killed"), {moved.get(name, name) for name in _names(folder)}
    start = time.monotonic()
    _compact(Path(shutil.copytree(folder, copy)))
    seconds, generations = time.monotonic() - start, set()
    for _ in range(kills):
        shutil.rmtree(copy)
        shutil.copytree(folder, copy)
        killed(lambda writing: _compact(copy), float(rng.uniform(0, 1.2 * seconds)))
        found = store_at(copy)
        generations.add(found.datastore.section.generation)
        if found.datastore.section.generation:
            assert all(map(np.array_equal, keys_at(copy), after)) and not (found.entries or found.phrases)
            assert [one.id for one in found.pairs.values()] == list(pairs)
        else:
            assert same(found, pairs) and all(map(np.array_equal, keys_at(copy), before))
        _compact(copy)  # completes it, or starts over
        assert all(map(np.array_equal, keys_at(copy), after)) and list(store_at(copy).pairs) == list(pairs)
        assert _names(copy) == names
    shutil.rmtree(copy)
    return generations


def _names(folder: Path) -> set[str]:
    """Names in a folder, less those of what decoding writes, which another generation of phrases does away with."""
    return {path.name for path in folder.glob("*") if not path.name.startswith("subwords-")}


def keys_at(folder: Path) -> list[np.ndarray]:
    """The keys of a datastore's tokens, and of its phrases where it has some."""
    keys = [np.array(TokenDatastore(folder).keys)]
    if Manifest.read(folder).phrase is not None:
        keys.append(np.array(PhraseDatastore(folder).keys))
    return keys


def _compact(folder: Path) -> None:
    compact_datastore(CompactSettings(folder, cpu=True, quiet=True))
