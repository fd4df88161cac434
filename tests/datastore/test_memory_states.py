"""A live memory in whatever order it is used: learned, replaced, forgotten, compacted, reopened, killed while it writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.datastore.learned import LearnedPair, LearnedStore, NewPair
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from tests.killing import Expected, ids_of, new_pair, store_at
from tests.small_models import World

PAIR = st.tuples(st.integers(1, 4), st.integers(0, 2))  # a source, and which of its translations


class LiveMemory(RuleBasedStateMachine):
    """What is on disk is what was acknowledged, whatever came before.

    Args:
        original: a datastore, which is copied.
        folder: where copies are made.
    """

    def __init__(self, original: Path, folder: Path) -> None:
        super().__init__()
        self.folder = folder / f"store-{len(list(folder.iterdir()))}"
        shutil.copytree(original, self.folder)
        self.own = TokenDatastore(self.folder).section.size
        self.store = store_at(self.folder)
        self.kept, self.counts, self.next_id = Expected(), dict[int, int](), 1

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(pairs=st.lists(PAIR, min_size=1, max_size=4))
    def learn(self, pairs: list[tuple[int, int]]) -> None:
        made = [new_pair(*pair) for pair in pairs]
        for number, pair, learned in zip(ids_of(done := self.store.learn(made)), made, done):
            known = {(one.source, one.target): n for n, one in self.kept.items()}.get(
                (pair.source, pair.target)
            )
            assert learned.new == (known is None) and (number == known or number >= self.next_id)
            counting = next(
                (n for n, one in self.kept.divided()[0].items() if one.source == pair.source), None
            )
            replaced = learned.replaced.id if learned.replaced is not None else None
            assert replaced == (counting if counting != number else None)
            self.next_id = max(self.next_id, number + 1)  # the ids of lost records are not reused
            self.counts[number] = self.counts.get(number, 0) + 1
            self.kept = self.kept.learn(number, pair)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.kept)))
        before, _ = self.kept.divided()
        self.kept = self.kept.forget(number)
        now, _ = self.kept.divided()
        assert [pair.id for pair in self.store.forget([number])] == sorted(now.keys() - before.keys())
        del self.counts[number]

    @rule()
    def forget_what_is_not_there(self) -> None:
        with pytest.raises(
            ConfigurationError, match=f"there is no pair {self.next_id + 9} among what was learned"
        ):
            self.store.forget([*self.kept, self.next_id + 9])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = store_at(self.folder)

    @rule()
    def compact(self) -> None:
        self.store.close()
        compact_datastore(CompactSettings(self.folder, cpu=True, quiet=True))
        self.store = store_at(self.folder)
        counting, _ = self.kept.divided()
        assert not self.store.entries and not self.store.gone
        assert TokenDatastore(self.folder).section.size == self.own + sum(
            len(pair.values) for pair in counting.values()
        )

    @rule(pair=PAIR, share=st.floats(0, 1, exclude_max=True))
    def kill_while_it_learns(self, pair: tuple[int, int], share: float) -> None:
        """Only a part of the last record is on disk, and it was never acknowledged."""
        self.store.lock()
        before = self.store.path.stat().st_size
        self.store.learn([new_pair(*pair)])
        self.store.close()
        size = before + int(share * (self.store.path.stat().st_size - before))
        with self.store.path.open("r+b") as journal:
            journal.truncate(size)
        self.store = store_at(self.folder)

    @invariant()
    def is_what_was_acknowledged(self) -> None:
        for store in (self.store, store_at(self.folder)):
            counting, replaced = self.kept.divided()
            assert [*store.pairs] == [*counting] and sorted(store.replaced) == sorted(replaced)
            for pair in store.find(""):
                assert self.counts[pair.id] == pair.count
                self.check(store, pair, self.kept[pair.id], pair.id in counting)

    def check(self, store: LearnedStore, pair: LearnedPair, expected: NewPair, counts: bool) -> None:
        assert (pair.source, pair.target, pair.tokens) == (
            expected.source,
            expected.target,
            len(expected.values),
        )
        assert (pair.replaced_by is None) == counts
        if pair.first_entry is None:
            entries = store.entries[pair.id] if counts else store.replaced[pair.id].entries
            assert entries is not None
            values, keys = entries
        else:
            rows = slice(pair.first_entry, pair.first_entry + pair.tokens)
            values, keys = store.datastore.values[rows], store.datastore.keys[rows]
        assert np.array_equal(values, expected.values) and np.array_equal(keys, expected.keys)


def test_a_memory_is_what_was_acknowledged(world: World, tmp_path: Path, seed: int) -> None:
    bounds = settings(
        max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
        database=None,
    )  # fmt: skip
    run_state_machine_as_test(lambda: LiveMemory(world.datastore, tmp_path), settings=bounds)
