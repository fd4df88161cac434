"""The journal: whole records up to the first that is not, whatever happened to the file; one writer; no disk."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.journal import DAMAGED, MAGIC, JournalReader, JournalWriter, WriterLock, create_journal
from tests.helpers import files_up_to

RECORDS = [b"first", b"", b"third" * 100, b"\x00\xff" * 31]
STARTS = [len(MAGIC) + 20 * n + len(b"".join(RECORDS[:n])) for n in range(len(RECORDS) + 1)]  # 20 bytes before each


def written(path: Path) -> JournalReader:
    """Write all records to a journal, the first when it is made; and a reader that has read them."""
    create_journal(path, RECORDS[:1])
    reader = JournalReader(path)
    assert list(reader.read()) == RECORDS[:1]
    writer = JournalWriter(reader)
    writer.append(RECORDS[1:3])
    writer.append(RECORDS[3:])
    writer.close()
    return reader


def records(path: Path) -> tuple[list[bytes], int]:
    reader = JournalReader(path)
    return list(reader.read()), reader.rest


def test_what_was_appended_is_read_at_once_or_bit_by_bit(tmp_path: Path) -> None:
    create_journal(tmp_path / "j", RECORDS[:1])
    early, writing = JournalReader(tmp_path / "j"), JournalReader(tmp_path / "j")
    assert list(early.read()) == list(writing.read()) == RECORDS[:1]
    writer = JournalWriter(writing)
    for record in RECORDS[1:]:
        writer.append([record])
        assert list(early.read()) == [record] and early.rest == 0
    assert records(tmp_path / "j") == (RECORDS, 0) and list(early.read()) == []
    assert early.end == (tmp_path / "j").stat().st_size == STARTS[-1]


def test_a_journal_cut_at_any_byte_has_the_records_before(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    for size in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        count = sum(start <= size for start in STARTS[1:])
        assert records(tmp_path / "cut") == (RECORDS[:count], size - STARTS[count] if size >= len(MAGIC) else size)


def test_after_a_flipped_bit_no_record_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    for at in sorted({*range(STARTS[2] + 30), *rng.integers(len(whole), size=200).tolist()}):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "damaged").write_bytes(damaged)
        found, rest = records(tmp_path / "damaged")
        count = max(0, sum(start <= at for start in STARTS) - 1) if at >= len(MAGIC) else 0
        assert found == RECORDS[:count] and rest > 0, at


def test_records_that_were_left_out_or_moved_are_noticed(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    frames = [whole[a:b] for a, b in itertools.pairwise(STARTS)]
    for order, count in (((0, 2, 3), 1), ((0, 1, 3, 2), 2), ((0, 0, 1), 1)):
        (tmp_path / "other").write_bytes(MAGIC + b"".join(frames[n] for n in order))
        found, rest = records(tmp_path / "other")
        assert found == RECORDS[:count] and rest > 0


def test_a_writer_puts_the_damage_aside_and_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path / "j").path
    damaged = bytearray(path.read_bytes())
    damaged[STARTS[2] + 40] ^= 4
    path.write_bytes(damaged)
    reader = JournalReader(path)
    assert list(reader.read()) == RECORDS[:2]
    writer = JournalWriter(reader)
    writer.append([b"new"])
    writer.close()
    assert records(path) == ([*RECORDS[:2], b"new"], 0)
    assert path.with_name(f"j{DAMAGED}").read_bytes() == damaged[STARTS[2] :]


def test_what_does_not_fit_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    reader = written(tmp_path / "j")
    before, writer = reader.path.read_bytes(), JournalWriter(reader)
    with files_up_to(len(before) + 300), pytest.raises(DatastoreError, match=r"cannot be written .*nothing was added"):
        writer.append([b"small", b"large" * 1000])
    assert reader.path.read_bytes() == before
    writer.append([b"small"])  # as soon as there is room
    assert records(reader.path) == ([*RECORDS, b"small"], 0)


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
