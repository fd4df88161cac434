"""Files and folders written atomically: as `NAME.partial`, renamed once all of them is on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

from fairseq_ccpr.errors import ConfigurationError, naming

PARTIAL = ".partial"  # what the names of unfinished files and folders end in


def partial_path(path: Path) -> Path:
    """Return where a file or folder is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path to write a file to, which then replaces `path`: readers see the old file or the whole new one.

    Nothing stays of a file whose writing fails. Its permissions are those of any new file, which safetensors does not give.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced by a file
        with naming(path):
            yield path
        return
    path = path.resolve()  # of /dev/stdout and other links, what they lead to
    partial = partial_path(path)
    try:
        with naming(path):
            yield partial
        partial.chmod(_permissions_of_new(partial.with_name(f"{partial.name}.new")))
        move_into_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _permissions_of_new(path: Path) -> int:
    """Learn what permissions a new file gets, from one that is removed again."""
    path.touch()
    permissions = S_IMODE(path.stat().st_mode)
    path.unlink()
    return permissions


def move_into_place(written: Path, path: Path) -> None:
    """Bring a file to disk, then rename it to `path`."""
    with written.open("rb") as stream:
        os.fsync(stream.fileno())
    written.replace(path)


def sync_directory(folder: Path) -> None:
    """Bring the names in a folder to disk: a file that was made or renamed there then stays."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, which then becomes `output`; nothing stays of it if anything fails.

    Raises:
        ConfigurationError: `output` exists.
    """
    if output.exists():
        raise ConfigurationError(f"--output {output} exists: give a new folder, or delete it")
    with scratch_directory(output) as partial:
        yield partial
        partial.rename(output)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, which is removed at the end."""
    partial = partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir(parents=True)
    try:
        with naming(path):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
