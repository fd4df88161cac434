"""Kill processes that learn, forget, compact and build, at drawn moments, or damage journals, and check what is left."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Literal, NoReturn
from unicodedata import normalize

import numpy as np
import torch
from tqdm import tqdm

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.building.part import Part, only_builder
from fairseq_ccpr.building.text_build import Vocabulary, build_text_part
from fairseq_ccpr.datastore.learned import (
    LEARNED,
    LOCK,
    Learned,
    LearnedPair,
    LearnedStore,
    NewPair,
    PairPhrases,
    ReadAs,
    journal_path,
)
from fairseq_ccpr.datastore.manifest import Manifest, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import CcprError, DatastoreError
from fairseq_ccpr.search.index_plan import plan_index
from tests.helpers import contents, write_lines

FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")
SECOND = 1_000_000  # added to the number of a pair for the one that is learned together with it


def store_at(folder: Path) -> LearnedStore:
    return LearnedStore(TokenDatastore(folder))


def ids_of(learned: list[Learned]) -> list[int]:
    return [one.id for one in learned]


def new_pair(
    number: int, version: int = 0, dimension: int = 32, width: int = 0, forms: bool = False
) -> NewPair:
    """A pair of random content, which its number and version decide, with phrases whose keys are so wide, or without.

    Versions are translations of the same source; with `forms` each has another form of it, which a model
    reads alike.
    """
    rng = np.random.default_rng([number, version])
    length = int(rng.integers(1, 12))
    keys = rng.standard_normal((length, dimension)).astype(np.float16)
    values = rng.integers(4, 400, length).astype(np.int32)
    target, phrases = f"Target {number} 中{version or ''}", None
    source, read_as = f"Quelle {number} äöß", None
    if forms:
        source, read_as = normalize(FORMS[version % len(FORMS)], source), ReadAs(number, (4 + number,))
    if width:
        places = [span for span in ([0, 6], [0, len(target)], [7, len(target)]) if rng.random() < 0.8]
        spans = np.array(places, np.int32).reshape(-1, 2)
        phrases = PairPhrases(spans, rng.standard_normal((len(spans), width)).astype(np.float16))
    return NewPair(source, target, values, keys, phrases, read_as)


def maker(folder: Path, forms: bool = False) -> Callable[..., NewPair]:
    """Make the pairs that can be learned alongside a datastore, with phrases where it has a phrase part."""
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    width = manifest.phrase.dimension if manifest.phrase is not None else 0
    return partial(new_pair, dimension=manifest.token.dimension, width=width, forms=forms)


def same(store: LearnedStore, pairs: dict[int, NewPair], replaced: dict[int, NewPair] | None = None) -> bool:
    """Whether exactly these count, in their order, and exactly those were replaced, and the journal has all of both."""
    return _same([*store.pairs.values()], pairs) and _same(
        [pair for _, pair in sorted(store.replaced.items())], dict(sorted((replaced or {}).items()))
    )


def _same(found: list[LearnedPair], pairs: dict[int, NewPair]) -> bool:
    def parts(pair: LearnedPair | NewPair) -> list[np.ndarray]:
        phrases = [pair.phrases.spans, pair.phrases.keys] if pair.phrases is not None else []
        entries = (pair.values, pair.keys) if isinstance(pair, NewPair) else pair.entries
        return [*(entries or ()), *phrases]

    texts = [(one.id, one.source, one.target, one.tokens) for one in found]
    return texts == [(n, one.source, one.target, len(one.values)) for n, one in pairs.items()] and all(
        len(parts(one)) == len(parts(new)) and all(map(np.array_equal, parts(one), parts(new)))
        for one, new in zip(found, pairs.values())
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
        last = {pair.read_as or pair.source: number for number, pair in self.items()}
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
    # the default one is shared with the parent, which would wait for ever for it
    tqdm.set_lock(threading.RLock())
    try:
        work(writing)
    finally:
        os._exit(0)


def kill_learning(folder: Path, kills: int, rng: np.random.Generator) -> int:
    """Let one process after the other learn, replace and forget where the one before was killed; no other file may change.

    Returns:
        How many changes were acknowledged.
    """
    before, make = contents(folder), maker(folder, forms=True)
    pairs, number, first_id, acknowledged = Expected(), 0, 1, 0
    for kill in range(kills):
        said = killed(
            partial(_write_for_ever, folder, number, make), float(rng.uniform(0, 0.08)), begun=kill % 2 > 0
        )
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
    assert {
        name: content for name, content in contents(folder).items() if not name.startswith(LEARNED)
    } == before
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


def _possible(
    pairs: Expected, number: int, said: int, next_id: int, make: Callable[..., NewPair]
) -> list[Expected]:
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


def damage_journals(folder: Path, times: int, rng: np.random.Generator) -> Counter[str]:
    """Damage a journal in all ways: each is harmless, refused, or told, with the pairs that may have been forgotten.

    Whoever writes next tells it again, and changes no more.

    Returns:
        How often each came about; `back`: of those that are told, a forgotten pair counts again.
    """
    learning, make, came = store_at(folder), maker(folder, forms=True), Counter[str]()
    for number in range(1, 25):
        learning.learn([make(number)])
        if number % 2 == 0:
            learning.learn([make(number, 1)])
            learning.forget(list(learning.pairs)[-1:-4:-2] if number % 4 else list(learning.replaced)[-1:])
    learning.close()
    whole, kept = learning.path.read_bytes(), {one.id: one for one in learning.find("")}
    lock = learning.folder / LOCK
    noted = lock.read_bytes()
    forgotten = set(range(1, learning.next_id)) - kept.keys()
    sentences = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LearnedStore.__module__).addHandler(handler)
    for _ in range(times):
        data, (first, second) = bytearray(whole), np.sort(rng.integers(len(whole), size=2)).tolist()
        size = min(int(2 ** rng.uniform(0, 12)), len(whole) - second)
        match kind := int(rng.integers(5)):
            case 0:
                data[first] ^= 1 << int(rng.integers(8))
            case 1:
                del data[first:]
            case 2:
                data[second : second + size] = bytes(size)
            case 3:
                data[first:first] = rng.bytes(size)
            case _:
                size = min(size, second - first)
                data[first : first + size], data[second : second + size] = (
                    data[second : second + size],
                    data[first : first + size],
                )
        learning.path.write_bytes(data)
        lock.write_bytes(noted)
        try:
            found = LearnedStore(learning.datastore)
        except DatastoreError:
            came["refused"] += 1
            continue
        now = {one.id: one for one in found.find("")}
        back = now.keys() & forgotten
        if not found.damage:
            assert now == kept and (data == whole or not whole.startswith(data))
            came["harmless"] += 1
        else:
            assert back <= set(found.doubtful) and (
                "a forgotten pair may count again" in found.damage or not found.doubtful
            )
            assert kind or (
                not back and len(kept.keys() - now.keys()) <= 1
            )  # a bit costs the pair whose record it hits
            came["told, back" if back else "told"] += 1
            damage, sentences[:] = found.damage, []
            found.lock()
            assert any(one.startswith(damage) for one in sentences)
            found.close()
            assert {one.id: one for one in found.find("")} == now and not store_at(folder).damage
            for path in learning.path.parent.glob("*.damaged-*"):
                path.unlink()
    logging.getLogger(LearnedStore.__module__).removeHandler(handler)
    learning.path.write_bytes(whole)
    return came


def kill_compacting(folder: Path, kills: int, rng: np.random.Generator) -> set[int]:
    """Kill processes that compact copies of a datastore alongside which something was learned; all is there, or nothing.

    Some of what was forgotten and replaced had moved into the datastore before.

    Returns:
        The generations that they left, counted from the one before.
    """
    learning, make, own = store_at(folder), maker(folder, forms=True), keys_at(folder)
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
    copy, names = (
        folder.with_name("killed"),
        {re.sub(r"^(token|phrase)-1$", r"\1-2", name) for name in _names(folder)},
    )
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
        assert _same([pair for _, pair in sorted(found.replaced.items())], dict(sorted(replaced.items())))
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


VOCABULARY = Vocabulary(lambda line: torch.tensor([*map(int, line.split()), 2]), 40, 2, 3, "a")
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "fcntl.flock"}


def count_text(folder: Path) -> None:
    with only_builder(folder):
        build_text_part([folder.parent / "text"], [], folder, VOCABULARY, quiet=True)


def index_again(folder: Path) -> None:
    with only_builder(folder):
        section = TokenDatastore(folder).section
        index = plan_index("IVF4,Flat", section.index.metric, "", section.size, section.dimension)
        Part(folder, TokenSection, show=False).publish(replace(section, index=index))


class Beside:
    """A function in a process of its own, which may stop or kill itself before one of the changes of files that it makes."""

    def __init__(
        self, work: Callable[[Path], object], folder: Path, step: int = -1, end: int = signal.SIGKILL
    ) -> None:
        self._reading, writing = os.pipe()
        self._process = os.fork()
        if not self._process:
            _work_and_exit(partial(self._work, work, folder, step, end), writing)
        os.close(writing)

    @staticmethod
    def _work(work: Callable[[Path], object], folder: Path, step: int, end: int, writing: int) -> None:
        steps = count()

        def hook(event: str, given: tuple[object, ...]) -> None:
            if event in CHANGES and next(steps) == step:
                os.kill(os.getpid(), end)

        sys.addaudithook(hook)
        try:
            work(folder)
            said = f"done in {next(steps)}"
        except CcprError as error:
            said = str(error)
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())

    def ended(self, seconds: float = 60) -> bool:
        """Wait for it to end or to stop; whether it did in that time."""
        give_up = time.monotonic() + seconds
        while not (found := os.waitpid(self._process, os.WNOHANG | os.WUNTRACED))[0]:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.005)
        self.stopped = os.WIFSTOPPED(found[1])
        return True

    def said(self) -> str:
        """What it said when it was done or refused; nothing if it was killed before."""
        with os.fdopen(self._reading, "rb") as stream:
            return stream.read().decode()

    def send(self, number: int) -> None:
        os.kill(self._process, number)


def kill_beside(folder: Path, kills: int, rng: np.random.Generator) -> Counter[str]:
    """Let a build and a compaction of copies of a datastore meet, one stopped before a change while the other works.

    One of them, or both, are killed. All that was published, learned and forgotten is there, and both can be
    run again.

    Returns:
        How often each way in which they met came about.
    """
    learning, make = store_at(folder), maker(folder)
    ids = ids_of(learning.learn([make(number) for number in range(1, 9)]))
    learning.forget(ids[::3])
    learning.close()
    texts = {(pair.id, pair.source, pair.target) for pair in learning.find("")}
    write_lines(folder.parent / "text", *(" ".join(map(str, rng.integers(4, 40, 8))) for _ in range(60)))
    before, after = TokenDatastore(folder).keys, np.concatenate([TokenDatastore(folder).keys, *(
        keys for _, keys in learning.entries.values())])  # fmt: skip
    copy, steps, met = folder.with_name("beside"), {}, Counter[str]()
    works = {"compaction": _compact, "text": count_text, "index": index_again}

    def begin_again() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)

    def check() -> Manifest:
        manifest, found = Manifest.read(copy), store_at(copy)
        assert (
            manifest.token is not None
            and {(one.id, one.source, one.target) for one in found.find("")} == texts
        )
        store = TokenDatastore(copy)
        assert (
            np.array_equal(store.keys, after if store.section.generation else before)
            and not store.find_damage()
        )
        assert store.section.generation or set(found.entries) == set(learning.entries)
        assert manifest.text is None or not TextDatastore(copy).find_damage()
        return manifest

    for name, work in works.items():
        begin_again()
        whole = Beside(work, copy)
        assert whole.ended()
        steps[name] = int(whole.said().removeprefix("done in "))
    while met.total() < kills:
        begin_again()
        build = str(rng.choice(["text", "index"]))
        first, second = rng.permutation(["compaction", build]).tolist()
        dies = rng.random() < 0.4
        one = Beside(works[first], copy, int(rng.integers(steps[first])), signal.SIGSTOP)
        assert one.ended()
        other = Beside(works[second], copy, int(rng.integers(steps[second])) if dies else -1)
        waits = not other.ended(0.5)  # for what the first one has locked
        killed = not dies or rng.random() < 0.5
        one.send(signal.SIGKILL if killed else signal.SIGCONT)
        assert one.ended() and (not waits or other.ended())
        said = {first: one.said(), second: other.said()}
        for words in said.values():
            assert not words or words.startswith("done in") or "by another process meanwhile" in words, words
        manifest = check()
        assert manifest.token is not None and (
            manifest.token.generation or not said["compaction"].startswith("done in")
        )
        assert build != "text" or manifest.text is not None or not said["text"].startswith("done in")
        outcome = {
            name: words[:4] if words.startswith("done") else "refused" if words else "killed"
            for name, words in said.items()
        }
        met[
            f"{first} stopped{', killed' if killed else ''}; {second} {'waited' if waits else outcome[second]}"
        ] += 1
        for name in [second, first, "index", "compaction"]:
            works[name](copy)
        manifest = check()
        assert manifest.token is not None and (manifest.token.generation, manifest.token.index.factory) == (
            1,
            "IVF4,Flat",
        )
        assert not list(copy.glob("*.partial")) and (manifest.text is not None) == (build == "text")
        assert len(list(copy.glob("token*"))) == 1
    shutil.rmtree(copy)
    return met
