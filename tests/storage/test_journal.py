"""The journal: all records that are whole, whatever happened to the others, and none that never was; one writer; no disk."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import signal
import socket
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.journal import MARK, Journal, WriterLock, begins_as_journal, create_journal
from tests.helpers import files_up_to

RECORDS = [b"first", MARK + b"\x00\xff" * 31, b"third" * 100, b""]
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
    with (tmp_path / "j").open("ab") as stream:
        stream.write(MARK * 9)
    assert (
        list(early.read()) == []
        and early.lost == 9
        and early.damage == [(STARTS[-1], STARTS[-1] + 9 * len(MARK))]
    )
    writing.append([b"more"])  # in place of what is no record
    assert records(tmp_path / "j") == ([*RECORDS, b"more"], [], 0)


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
        assert found == [*RECORDS[:hit], *RECORDS[hit + 1 :]] and lost == 1, place
        assert damage == [(STARTS[hit], STARTS[hit + 1])]


def test_records_that_were_left_out_or_moved_are_noticed(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole").path.read_bytes()
    frames = [whole[a:b] for a, b in itertools.pairwise(STARTS)]
    for order, numbers, noticed in (
        ((0, 2, 3), (0, 2, 3), ([], 1)),
        # as missing, and as damage
        ((0, 1, 3, 2), (0, 1, 3), ([(STARTS[4] - len(frames[2]), STARTS[4])], 2)),
        ((0, 0, 1), (0, 1), ([(STARTS[1], 2 * STARTS[1])], 0)),
        ((3,), (3,), ([], 3)),
    ):
        (tmp_path / "other").write_bytes(b"".join(frames[n] for n in order))
        assert records(tmp_path / "other") == ([RECORDS[n] for n in numbers], *noticed)


def test_journals_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    create_journal(tmp_path / "new", [])
    assert not begins_as_journal(tmp_path / "new")  # it has no record
    create_journal(tmp_path / "new", RECORDS[:1])
    assert begins_as_journal(tmp_path / "new")


def test_who_may_enter_the_folder_may_read_the_files(tmp_path: Path) -> None:
    for folder, file in ((0o700, 0o600), (0o705, 0o604)):
        tmp_path.chmod(folder)
        create_journal(tmp_path / "j", [])
        assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == file


def test_a_record_too_long_for_its_length_is_refused(tmp_path: Path) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 2**32

    with pytest.raises(DatastoreError, match=r"a record of 4,294,967,296 bytes is too long for a journal"):
        create_journal(tmp_path / "j", [Long()])
    assert not any(tmp_path.iterdir())


def test_damage_is_put_aside_under_a_new_name_each_time(tmp_path: Path) -> None:
    path = written(tmp_path / "j").path
    damaged = bytearray(path.read_bytes())
    damaged[STARTS[2] + 40] ^= 4
    path.write_bytes(damaged + b"more")
    for number in (1, 2):
        journal = Journal(path)
        assert list(journal.read()) == [RECORDS[n] for n in (0, 1, 3)] and journal.lost == 2
        aside = journal.put_damage_aside()
        assert aside == path.with_name(f"j.damaged-{number}")
        assert aside.read_bytes() == damaged[STARTS[2] : STARTS[3]] + b"more"
    create_journal(path, RECORDS)
    journal = Journal(path)
    assert list(journal.read()) == RECORDS and journal.put_damage_aside() is None


def test_what_does_not_fit_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    before = journal.path.read_bytes()
    with (
        files_up_to(len(before) + 300),
        pytest.raises(DatastoreError, match=r"cannot be written .*nothing was added"),
    ):
        journal.append([b"small", b"large" * 1000])
    assert journal.path.read_bytes() == before
    journal.append([b"small"])  # as soon as there is room
    assert records(journal.path) == ([*RECORDS, b"small"], [], 0)


def test_a_second_writer_is_told_of_the_first_whose_kill_lets_it_in(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"left by another" * 9)
    lock = WriterLock(tmp_path / "lock")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(
        DatastoreError, match=re.escape(f"{tmp_path} is being written to by {holder}: end that process")
    ):
        WriterLock(tmp_path / "lock")
    lock.release()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            held = WriterLock(tmp_path / "lock")
            os.write(writing, b"holds")
            time.sleep(60)
            held.release()
        finally:
            os._exit(1)
    os.close(writing)  # or nothing would end the wait for a child that failed
    assert os.read(reading, 5) == b"holds"
    with pytest.raises(DatastoreError, match=f"by process {child} on "):
        WriterLock(tmp_path / "lock")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    WriterLock(tmp_path / "lock").release()


def test_a_writer_that_has_not_given_its_name_is_another_process(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for said, holder in ((b"", "another process"), (b"\xff", "\ufffd")):
            stream.write(said)
            with pytest.raises(DatastoreError, match=f"by {holder}: end"):
                WriterLock(tmp_path / "lock")


def test_what_was_written_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked for that, with all bytes in the file, and for the names of new files in their folder."""
    synced: list[int] = []  # sizes of files; -1: a folder
    real = os.fsync

    def watched(file: int) -> None:
        found = os.fstat(file)
        synced.append(-1 if stat.S_ISDIR(found.st_mode) else found.st_size)
        real(file)

    monkeypatch.setattr(os, "fsync", lambda file: watched(file if isinstance(file, int) else file.fileno()))
    create_journal(tmp_path / "j", RECORDS[:1])
    journal = Journal(tmp_path / "j")
    assert list(journal.read()) == RECORDS[:1] and synced == [STARTS[1], -1]
    journal.append(RECORDS[1:])
    assert synced[2:] == [STARTS[-1]]
    with files_up_to(STARTS[-1] + 300), pytest.raises(DatastoreError):
        journal.append([b"large" * 1000])
    assert synced[3:] == [STARTS[-1]]
    journal.damage = [(0, 9)]
    journal.put_damage_aside()
    assert synced[4:] == [9, -1]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_disk_that_fails_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    journal = written(tmp_path / "j")
    before, journal.damage = journal.path.read_bytes(), [(0, 9)]

    def fails(file: object) -> None:
        if not isinstance(file, int) or stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DatastoreError, match=rf"j cannot be written \({reason}\): nothing was added"):
        journal.append([b"small"])
    with pytest.raises(OSError, match=os.strerror(code)):
        journal.put_damage_aside()
    assert journal.path.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["j"]
