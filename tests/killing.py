"""Kill processes that learn, forget and compact, at drawn moments, or flip bits, and check what is on disk then."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.datastore.learned import (
    HEADER,
    LEARNED,
    PHRASE_IDENTITY,
    Learned,
    LearnedPair,
    LearnedStore,
    NewPair,
    PairPhrases,
    journal_path,
)
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.storage.journal import Journal
from tests.helpers import contents

SECOND = 1_000_000  # added to the number of a pair for the one that is learned together with it


def store_at(folder: Path) -> LearnedStore:
    return LearnedStore(TokenDatastore(folder))


def ids_of(learned: list[Learned]) -> list[int]:
    return [one.id for one in learned]


def new_pair(number: int, version: int = 0, dimension: int = 32, width: int = 0) -> NewPair:
    """A pair of random content, which its number and version decide, with phrases whose keys are so wide, or without.

    Versions are translations of the same source.
    """
    rng = np.random.default_rng([number, version])
    length = int(rng.integers(1, 12))
    keys = rng.standard_normal((length, dimension)).astype(np.float16)
    values = rng.integers(4, 400, length).astype(np.int32)
    target, phrases = f"Target {number} 中{version or ''}", None
    if width:
        places = [span for span in ([0, 6], [0, len(target)], [7, len(target)]) if rng.random() < 0.8]
        spans = np.array(places, np.int32).reshape(-1, 2)
        phrases = PairPhrases(spans, rng.standard_normal((len(spans), width)).astype(np.float16))
    return NewPair(f"Quelle {number} äöß", target, values, keys, phrases)


def maker(folder: Path) -> Callable[..., NewPair]:
    """Make the pairs that can be learned alongside a datastore, with phrases where it has a phrase part."""
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    width = manifest.phrase.dimension if manifest.phrase is not None else 0
    return partial(new_pair, dimension=manifest.token.dimension, width=width)


def same(store: LearnedStore, pairs: dict[int, NewPair], replaced: dict[int, NewPair] | None = None) -> bool:
    """Whether exactly these count, in their order, and exactly those were replaced."""
    aside = {number: store.replaced[number] for number in sorted(store.replaced)}
    entries = [one.entries for one in aside.values()]
    return _same([*store.pairs.values()], [*store.entries.values()], store.phrases, pairs) and _same(
        [one.pair for one in aside.values()],
        [one for one in entries if one is not None],
        {number: one.phrases for number, one in aside.items() if one.phrases is not None},
        dict(sorted((replaced or {}).items())),
    )


def _same(
    found: list[LearnedPair],
    entries: list[tuple[np.ndarray, np.ndarray]],
    phrases: dict[int, PairPhrases],
    pairs: dict[int, NewPair],
) -> bool:
    texts = [(one.id, one.source, one.target, one.tokens) for one in found]
    with_phrases = {number: one.phrases for number, one in pairs.items() if one.phrases is not None}
    return (
        texts == [(number, one.source, one.target, len(one.values)) for number, one in pairs.items()]
        and len(entries) == len(pairs)
        and all(
            np.array_equal(values, one.values) and np.array_equal(keys, one.keys)
            for (values, keys), one in zip(entries, pairs.values())
        )
        and phrases.keys() == with_phrases.keys()
        and all(
            np.array_equal(phrases[n].spans, one.spans) and np.array_equal(phrases[n].keys, one.keys)
            for n, one in with_phrases.items()
        )
    )


class Expected(dict[int, NewPair]):
    """Pairs that are kept, by their ids, in the order in which they were last learned: the last of each source counts."""

    def learn(self, number: int, pair: NewPair) -> Expected:
        kept = Expected(self)
        kept.pop(number, None)
        kept[number] = pair
        return kept

    def forget(self, number: int) -> Expected:
        return Expected({n: pair for n, pair in self.items() if n != number})

    def divided(self) -> tuple[dict[int, NewPair], dict[int, NewPair]]:
        """Those that count, by their ids, and those that were replaced."""
        last = {pair.source: number for number, pair in self.items()}
        counting = {number: self[number] for number in sorted(last.values())}
        return counting, {number: pair for number, pair in self.items() if number not in counting}


def killed(work: Callable[[int], object], seconds: float, begun: bool = False) -> bytes:
    """Run a function in a process that is killed after some seconds; return what it wrote to the file it was given.

    Args:
        begun: whether the seconds are counted from the first byte on that it wrote.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _work_and_exit(work, writing)
    os.close(writing)
    first = os.read(reading, 1) if begun else b""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as stream:
        return first + stream.read()


def _work_and_exit(work: Callable[[int], object], writing: int) -> NoReturn:
    tqdm.set_lock(threading.RLock())  # the default one is shared with the parent, which would wait for ever for it
    try:
        work(writing)
    finally:
        os._exit(0)


def kill_learning(folder: Path, kills: int, rng: np.random.Generator) -> int:
    """Let one process after the other learn, replace and forget where the one before was killed; no other file may change.

    Returns:
        How many changes were acknowledged.
    """
    before, make = contents(folder), maker(folder)
    pairs, number, first_id, acknowledged = Expected(), 0, 1, 0
    for kill in range(kills):
        said = killed(partial(_write_for_ever, folder, number, make), float(rng.uniform(0, 0.08)), begun=kill % 2 > 0)
        store = store_at(folder)
        states = _possible(pairs, number, len(said), first_id, make)
        assert any(same(store, *state.divided()) for state in states), (number, said, list(store.pairs))
        pairs = next(state for state in states if same(store, *state.divided()))
        number = max([number, *(int(one.source.split()[1]) % SECOND for one in store.find(""))])
        if len(pairs) > 200:
            store.forget(first := list(pairs)[:150])
            for one in first:
                pairs = pairs.forget(one)
        store.lock()  # cuts off what was not completely written, as the next writer would
        store.close()
        first_id, acknowledged = store.next_id, acknowledged + len(said)
    assert {name: content for name, content in contents(folder).items() if not name.startswith(LEARNED)} == before
    return acknowledged


Change = tuple[str, list[tuple[int, int]]]  # learn or forget, and the numbers and versions of pairs


def _changes(number: int) -> Iterator[Change]:
    """Learn two pairs; replace the first every other time, and then bring it back or undo that; forget the second."""
    while True:
        number += 1
        yield "learn", [(number, 0), (number + SECOND, 0)]
        if number % 2 == 0:
            yield "learn", [(number, 1)]
            yield ("learn", [(number, 0)]) if number % 4 else ("forget", [(number, 1)])
        if number % 3 == 0:
            yield "forget", [(number + SECOND, 0)]


def _write_for_ever(folder: Path, number: int, make: Callable[..., NewPair], acknowledged: int) -> None:
    """Make one change after the other; write a byte after each that was acknowledged."""
    store, ids = store_at(folder), dict[tuple[int, int], int]()
    for kind, some in _changes(number):
        if kind == "learn":
            ids |= zip(some, ids_of(store.learn([make(*one) for one in some])))
        else:
            store.forget(ids[one] for one in some)
        os.write(acknowledged, b".")


def _possible(pairs: Expected, number: int, said: int, next_id: int, make: Callable[..., NewPair]) -> list[Expected]:
    """What may be there after a kill: all that was acknowledged, and what was begun after that, none of it half."""
    ids: dict[tuple[int, int], int] = {}
    states = [pairs]
    for kind, some in islice(_changes(number), said + 1):
        states = states[-1:]
        for one in some:
            if kind == "learn":
                if one not in ids:
                    ids[one], next_id = next_id, next_id + 1
                states.append(states[-1].learn(ids[one], make(*one)))
            else:
                states.append(states[-1].forget(ids[one]))
    return states


def flip_bits(folder: Path, flips: int, rng: np.random.Generator) -> int:
    """Flip bits of a journal, one at a time: each is noticed, and costs what the record says that it hits.

    Returns:
        How many pairs the other records had in all: none of them was lost.
    """
    learning, make, ids = store_at(folder), maker(folder), dict[tuple[int, int], int]()
    learned = [*((n, 0) for n in range(1, 13)), (3, 0), (2, 1), (4, 1), (7, 1), (2, 0), (7, 2), (13, 0), (1, 0)]
    changes = [("learn", one) for one in learned] + [("forget", one) for one in ((5, 0), (8, 0), (4, 1), (7, 1))]
    for kind, one in changes:
        if kind == "learn":
            ids[one] = learning.learn([make(*one)])[0].id
        else:
            learning.forget([ids[one]])
    learning.close()
    states = [_without(changes, missing, ids, make) for missing in (*range(len(changes)), None)]
    whole, ends = learning.path.read_bytes(), [0]
    hit: list[int] = []  # the change that each record is
    for record in Journal(learning.path).read():
        ends.append(ends[-1] + 32 + len(record))
        hit.append(-1 if record[0] in (HEADER, PHRASE_IDENTITY) else sum(one >= 0 for one in hit))
    assert ends[-1] == len(whole) and len(changes) == max(hit) + 1
    saved = 0
    for place in rng.integers(len(whole), size=flips).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        learning.path.write_bytes(damaged)
        found = LearnedStore(learning.datastore)
        pairs, counts = states[hit[bisect_right(ends, place) - 1]]
        assert found.damage and found.next_id > max(ids.values()) and same(found, *pairs.divided()), place
        assert {pair.id: pair.count for pair in found.find("")} == counts, place
        saved += len(pairs)
    learning.path.write_bytes(whole)
    return saved


def _without(
    changes: list[tuple[str, tuple[int, int]]],
    missing: int | None,
    ids: dict[tuple[int, int], int],
    make: Callable[..., NewPair],
) -> tuple[Expected, dict[int, int]]:
    """The pairs, and how often each was learned, if all but one of the changes are made."""
    pairs, counts, written = Expected(), dict[int, int](), set[int]()
    for place, (kind, one) in enumerate(changes):
        number = ids[one]
        again, there = number in written, number in counts
        written.add(number)
        if place == missing or (again and not there):  # a record that says less than the pair
            continue
        if kind == "learn":
            pairs, counts[number] = pairs.learn(number, make(*one)), counts.get(number, 0) + 1
        else:
            pairs = pairs.forget(number)
            del counts[number]
    return pairs, counts


def kill_compacting(folder: Path, kills: int, rng: np.random.Generator) -> set[int]:
    """Kill processes that compact copies of a datastore alongside which something was learned; all is there, or nothing.

    Some of what was forgotten and replaced had moved into the datastore before.

    Returns:
        The generations that they left, counted from the one before.
    """
    learning, make, own = store_at(folder), maker(folder), keys_at(folder)
    first = ids_of(learning.learn([make(number) for number in range(1, 11)]))
    learning.close()
    _compact(folder)
    learning = store_at(folder)
    ids = first + ids_of(learning.learn([make(number) for number in range(11, 30)]))
    made = dict(zip(ids, map(make, range(1, 30))))
    learning.forget(ids[::4])
    made |= {learning.learn([make(number, 1)])[0].id: make(number, 1) for number in (2, 3, 12, 14)}
    learning.learn([make(3), make(14)])  # brought back
    learning.close()
    counting = {number: made[number] for number in sorted(learning.pairs)}
    replaced = {number: made[number] for number in learning.replaced}
    assert {pair.target for pair in replaced.values()} == {
        made[2].target,
        made[12].target,
        *(make(n, 1).target for n in (3, 14)),
    }
    before, generation = keys_at(folder), learning.datastore.section.generation
    tokens = [pair.keys for pair in counting.values()]
    phrases = [pair.phrases.keys for pair in counting.values() if pair.phrases is not None]
    after = [np.concatenate([own, *new]) for own, new in zip(own, (tokens, phrases))]
    copy, names = folder.with_name("killed"), {re.sub(r"^(token|phrase)-1$", r"\1-2", name) for name in _names(folder)}
    start = time.monotonic()
    _compact(Path(shutil.copytree(folder, copy)))
    seconds, generations = time.monotonic() - start, set()
    for _ in range(kills):
        shutil.rmtree(copy)
        shutil.copytree(folder, copy)
        killed(lambda writing: _compact(copy), float(rng.uniform(0, 1.2 * seconds)))
        generations.add(store_at(copy).datastore.section.generation - generation)
        if store_at(copy).datastore.section.generation == generation:
            assert journal_path(copy, generation).read_bytes() == learning.path.read_bytes()
            assert all(map(np.array_equal, keys_at(copy), before))
            _compact(copy)  # starts over
        found = store_at(copy)
        assert all(map(np.array_equal, keys_at(copy), after)) and not (found.entries or found.phrases)
        assert list(found.pairs) == list(counting)
        assert _same(
            [one.pair for _, one in sorted(found.replaced.items())],
            [one.entries for _, one in sorted(found.replaced.items()) if one.entries is not None],
            {number: one.phrases for number, one in found.replaced.items() if one.phrases is not None},
            dict(sorted(replaced.items())),
        )
        _compact(copy)  # completes it
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
