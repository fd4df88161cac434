"""Kill processes that learn, forget and compact, at drawn moments, and check what they leave on disk."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.datastore.learnt import LEARNT, LearntStore
from fairseq_ccpr.datastore.learnt_records import NewPair
from fairseq_ccpr.datastore.token import TokenDatastore
from tests.helpers import contents

SECOND = 1_000_000  # added to the number of a pair for the one that is learnt together with it


def store_at(folder: Path) -> LearntStore:
    return LearntStore(TokenDatastore(folder))


def new_pair(number: int, dimension: int = 32) -> NewPair:
    """A pair of random content, which its number decides."""
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 12))
    keys = rng.standard_normal((length, dimension)).astype(np.float16)
    values = rng.integers(4, 400, length).astype(np.int32)
    return NewPair(f"Quelle {number} äöß", f"Target {number} 中", values, keys)


def same(store: LearntStore, pairs: dict[int, NewPair]) -> bool:
    """Whether a store has exactly these, in their order."""
    texts = [(one.id, one.source, one.target, one.tokens) for one in store.pairs.values()]
    wanted = [(number, one.source, one.target, len(one.values)) for number, one in pairs.items()]
    arrays = list(store.entries.values())
    return texts == wanted and all(
        np.array_equal(values, one.values) and np.array_equal(keys, one.keys)
        for (values, keys), one in zip(arrays, pairs.values())
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
    try:
        work(writing)
    finally:
        os._exit(0)


def kill_learning(folder: Path, kills: int, rng: np.random.Generator, dimension: int = 32) -> int:
    """Let one process after the other learn and forget where the one before was killed; no other file may change.

    Returns:
        How many changes were acknowledged.
    """
    before = contents(folder)
    pairs: dict[int, NewPair] = {}
    number, first_id, acknowledged = 0, 1, 0
    for _ in range(kills):
        said = killed(partial(_write_for_ever, folder, number, dimension), float(rng.uniform(0, 0.08)))
        store = store_at(folder)
        states = _possible(pairs, number, said, first_id, dimension)
        assert any(same(store, state) for state in states), (number, said, list(store.pairs))
        pairs = next(state for state in states if same(store, state))
        number = max([number, *(int(one.source.split()[1]) % SECOND for one in store.pairs.values())])
        if len(pairs) > 200:
            store.forget(list(pairs)[:150])
            pairs = dict(list(pairs.items())[150:])
        store.lock()  # cuts off what was not completely written, as the next writer would
        store.close()
        first_id, acknowledged = store.next_id, acknowledged + len(said)
    assert {name: content for name, content in contents(folder).items() if not name.startswith(LEARNT)} == before
    return acknowledged


def _write_for_ever(folder: Path, number: int, dimension: int, acknowledged: int) -> None:
    """Learn two pairs, and forget every third time one of them; write a byte after each that was acknowledged."""
    store = store_at(folder)
    while True:
        number += 1
        learnt = store.learn([new_pair(number, dimension), new_pair(number + SECOND, dimension)])
        os.write(acknowledged, b"l")
        if number % 3 == 0:
            store.forget(learnt[:1])
            os.write(acknowledged, b"f")


def _possible(
    pairs: dict[int, NewPair], number: int, said: bytes, first_id: int, dimension: int
) -> list[dict[int, NewPair]]:
    """What may be there after a kill: all that was acknowledged, and what was begun after that, none of it half."""
    now, ids = dict(pairs), first_id
    expected = (kind for n in range(number + 1, number + SECOND) for kind in ("lf" if n % 3 == 0 else "l"))
    for _, kind in zip(said, expected):
        if kind == "l":
            number, ids = number + 1, ids + 2
            now |= {ids - 2: new_pair(number, dimension), ids - 1: new_pair(number + SECOND, dimension)}
        else:
            del now[ids - 2]
    if next(expected) == "f":
        return [now, {n: pair for n, pair in now.items() if n != ids - 2}]
    one = {**now, ids: new_pair(number + 1, dimension)}
    return [now, one, {**one, ids + 1: new_pair(number + 1 + SECOND, dimension)}]


def kill_compacting(folder: Path, kills: int, rng: np.random.Generator, dimension: int = 32) -> set[int]:
    """Kill processes that compact copies of a datastore beside which something was learnt; all of it is there, or nothing.

    Returns:
        The generations that they left.
    """
    learning = store_at(folder)
    ids = learning.learn([new_pair(number, dimension) for number in range(1, 30)])
    learning.forget(ids[::4])
    learning.close()
    pairs = {number: new_pair(number, dimension) for number in ids if number not in ids[::4]}
    own = np.array(TokenDatastore(folder).keys)
    keys = np.concatenate([own, *(pair.keys for pair in pairs.values())])
    copy, names = folder.with_name("killed"), {path.name for path in folder.glob("*")} - {"token"} | {"token-1"}
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
            assert np.array_equal(found.datastore.keys, keys)
            assert [one.id for one in found.pairs.values()] == list(pairs) and not found.entries
        else:
            assert same(found, pairs) and np.array_equal(found.datastore.keys, own)
        _compact(copy)  # completes it, or starts over
        again = store_at(copy)
        assert np.array_equal(again.datastore.keys, keys) and [one.id for one in again.pairs.values()] == list(pairs)
        assert {path.name for path in copy.glob("*")} == names
    shutil.rmtree(copy)
    return generations


def _compact(folder: Path) -> None:
    compact_datastore(CompactSettings(folder, cpu=True, quiet=True))
