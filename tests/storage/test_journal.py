"""The journal: all records that are whole, whatever happened to the others, and none that never was; one writer; no disk."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.journal import MARK, Journal, WriterLock, create_journal
from tests.helpers import files_up_to

RECORDS = [b"first", b"", b"third" * 100, MARK + b"\x00\xff" * 31]
STARTS = [32 * n + len(b"".join(RECORDS[:n])) for n in range(len(RECORDS) + 1)]  # 32 bytes before each


def written(path: Path) -> Journal:
    """Write all records to a journal, the first when it is made."""
    create_journal(path, RECORDS[:1])
    journal = Journal(path)
    assert list(journal.read()) == RECORDS[:1]
    journal.append(RECORDS[1:3])
    journal.append(RECORDS[3:])
    return journal


def records(path: Path) -> tuple[list[bytes], list[tuple[int, int]], int]:
    journal = Journal(path)
    return list(journal.read()), journal.damage, journal.lost


def test_what_was_appended_is_read_at_once_or_bit_by_bit(tmp_path: Path) -> None:
    create_journal(tmp_path / "j", RECORDS[:1])
    early, writing = Journal(tmp_path / "j"), Journal(tmp_path / "j")
    assert list(early.read()) == list(writing.read()) == RECORDS[:1]
    for record in RECORDS[1:]:
        writing.append([record])
        assert list(early.read()) == [record] and not early.damage
    assert records(tmp_path / "j") == (RECORDS, [], 0) and list(early.read()) == []
    assert early.end == (tmp_path / "j").stat().st_size == STARTS[-1]


def test_a_journal_cut_at_any_byte_has_the_records_before(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    for size in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        count = sum(start <= size for start in STARTS[1:])
        rest = [(STARTS[count], size)] if size > STARTS[count] else []
        found, damage, lost = records(tmp_path / "cut")
        assert found == RECORDS[:count] and damage == rest and (lost > 0) == bool(rest)


def test_a_flipped_bit_costs_the_record_that_it_hits(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "damaged").write_bytes(damaged)
        hit = sum(start <= place for start in STARTS) - 1
        found, damage, lost = records(tmp_path / "damaged")
        assert found == [*RECORDS[:hit], *RECORDS[hit + 1 :]] and lost >= 1, place
        assert damage == [(STARTS[hit], STARTS[hit + 1])]


def test_records_that_were_left_out_or_moved_are_noticed(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    frames = [whole[a:b] for a, b in itertools.pairwise(STARTS)]
    for order, numbers in (((0, 2, 3), (0, 2, 3)), ((0, 1, 3, 2), (0, 1, 3)), ((0, 0, 1), (0, 1)), ((3,), (3,))):
        (tmp_path / "other").write_bytes(b"".join(frames[n] for n in order))
        found, damage, lost = records(tmp_path / "other")
        assert found == [RECORDS[n] for n in numbers] and (damage or lost)


def test_damage_is_put_aside_under_a_new_name_each_time(tmp_path: Path) -> None:
    path = written(tmp_path / "j").path
    damaged = bytearray(path.read_bytes())
    damaged[STARTS[2] + 40] ^= 4
    path.write_bytes(damaged + b"more")
    for number in (1, 2):
        journal = Journal(path)
        assert list(journal.read()) == [RECORDS[n] for n in (0, 1, 3)]
        aside = journal.put_damage_aside()
        assert aside == path.with_name(f"j.damaged-{number}")
        assert aside.read_bytes() == damaged[STARTS[2] : STARTS[3]] + b"more"
    create_journal(path, RECORDS)
    journal = Journal(path)
    assert list(journal.read()) == RECORDS and journal.put_damage_aside() is None


def test_what_does_not_fit_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    before = journal.path.read_bytes()
    with files_up_to(len(before) + 300), pytest.raises(DatastoreError, match=r"cannot be written .*nothing was added"):
        journal.append([b"small", b"large" * 1000])
    assert journal.path.read_bytes() == before
    journal.append([b"small"])  # as soon as there is room
    assert records(journal.path) == ([*RECORDS, b"small"], [], 0)


def test_a_second_writer_is_told_of_the_first_whose_kill_lets_it_in(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "lock")
    with pytest.raises(DatastoreError, match=r"is being written to by process \d+ on "):
        WriterLock(tmp_path / "lock")
    lock.release()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        held = WriterLock(tmp_path / "lock")
        os.write(writing, b"holds")
        time.sleep(60)
        held.release()
        os._exit(1)
    assert os.read(reading, 5) == b"holds"
    with pytest.raises(DatastoreError, match=f"by process {child} on "):
        WriterLock(tmp_path / "lock")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    WriterLock(tmp_path / "lock").release()
