"""Files and folders written atomically (`NAME.partial`, renamed once on disk), with checksums."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import Any, TypeVar

from fairseq_ccpr.errors import ConfigurationError, DatastoreError, naming
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.version import __version__

PARTIAL = ".partial"  # what the names of unfinished files and folders end in
MANIFEST = "manifest.json"
PLAN = "plan.json"  # in a folder that is not finished: what it is being built from
CHECKSUM = "checksum"  # the last entry of a manifest: SHA-256 of the file without this entry
LACKING = f"it lacks its {CHECKSUM}"
M = TypeVar("M")


def partial_path(path: Path) -> Path:
    """Return where a file or folder is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


def unfollowed(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file, as an `opener`, but through no symbolic link: a datastore may come from someone else."""
    return os.open(path, flags | os.O_NOFOLLOW, mode)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666, follow: bool = False) -> Iterator[Path]:
    """Yield the path to write a file to, which then replaces `path`: readers see the old one or the new.

    Nothing stays of a file whose writing fails.

    Args:
        mode: its permissions, less those that new files never get. safetensors gives others.
        follow: whether to replace what a symbolic link leads to, as /dev/stdout does, rather than the link.
    """
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced by a file
        with naming(path):
            yield path
        return
    path = path.resolve() if follow else path
    partial = partial_path(path)
    new = partial.with_name(f"{partial.name}.new")
    try:
        for left in (partial, new):  # by a run that was killed, or links, which would be written through
            left.unlink(missing_ok=True)
        with naming(path):
            yield partial
        # to learn what permissions a new file gets
        os.close(unfollowed(str(new), os.O_CREAT | os.O_EXCL, mode))
        permissions = S_IMODE(new.stat().st_mode)
        new.unlink()
        partial.chmod(permissions)
        move_into_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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
def only_writer(path: Path) -> Iterator[None]:
    """Keep others from replacing a file while it is changed; one that is not there has no other writer."""
    with ExitStack() as held:
        while path.exists():
            # NFS wants r+b
            stream = held.enter_context(path.open("r+b" if os.access(path, os.W_OK) else "rb"))
            with suppress(OSError):  # a file system without locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                break  # or else it was replaced meanwhile, and others lock the new one
        yield


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Yield an empty folder, which then becomes `output`, a new one; nothing stays if anything fails."""
    if output.exists():
        raise ConfigurationError(f"--output {output} exists: give a new folder, or delete it")
    with scratch_directory(output) as partial:
        yield partial
        partial.rename(output)


@contextmanager
def scratch_directory(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, which is removed at the end."""
    partial = partial_path(path)
    if partial.is_symlink():
        partial.unlink()
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir(parents=True)
    try:
        with naming(path):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically."""
    write_text(path, _as_text(data), follow=False)


def write_text(path: Path, text: str, follow: bool = True) -> None:
    """Write a file of UTF-8 atomically; `follow` as of `atomic_file`."""
    with (
        atomic_file(path, follow=follow) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as stream,
    ):
        stream.write(text)


def write_checked_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically, with its checksum: `read_checked_json` then notices any change of any byte."""
    write_text(path, _with_checksum(data), follow=False)


def read_checked_json(path: Path, version: int | None = None) -> dict[str, Any]:
    """Read what `write_checked_json` wrote, checksum included; ValueError if damaged.

    Args:
        version: the only `format_version` that is read.
    """
    data = _read_json(path)
    if CHECKSUM not in data:
        raise ValueError(LACKING)
    if version is not None and data["format_version"] != version:
        raise ValueError(f"it has format version {data['format_version']}, and this reads {version}")
    return data


def read_versioned(
    directory: Path,
    what: str,
    version: int,
    again: str,
    mine: Callable[[dict[str, Any]], bool],
    make: Callable[[dict[str, Any]], M],
) -> M:
    """Make something of the manifest of a folder, which has the only format version that is read.

    Args:
        what: what such folders hold, as a message has it; `again`: how to make one again.
        mine: tells whether it is the manifest of such a folder, of any version.
        make: gets its entries without the checksum; what it raises is damage, unless it is a DatastoreError.
    """
    path = directory / MANIFEST
    try:
        data = _read_json(path)
        if not mine(data):
            raise DatastoreError(f"{directory} holds no {what}: its {MANIFEST} is that of something else")
        found = data["format_version"]
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"it has format version {found!r}, and the first is 1")
        if found != version:
            raise DatastoreError(
                f"{path} has format version {found}, and this fairseq-ccpr ({__version__}) reads {version}: "
                f"{'upgrade fairseq-ccpr' if found > version else again}"
            )
        if data.pop(CHECKSUM, None) is None:
            raise ValueError(LACKING)
        return make(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fault = error if isinstance(error, ValueError) else repr(error)
        raise DatastoreError(f"{path} is damaged ({fault}): copy it again, or {again}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError unless it is one, and its checksum right where it has one."""
    text = path.read_bytes().decode("utf-8")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    if CHECKSUM in data and text != _with_checksum({name: data[name] for name in data if name != CHECKSUM}):
        raise ValueError(f"its {CHECKSUM} is not that of its bytes, which have changed since it was written")
    return data


def _with_checksum(data: dict[str, Any]) -> str:
    """The only text that stands for these data."""
    return _as_text({**data, CHECKSUM: hashlib.sha256(_as_text(data).encode()).hexdigest()})


def _as_text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return size and checksum of files, by their path relative to `directory`."""
    paths = {name: directory / name for name in names}
    return {name: {"bytes": p.stat().st_size, "sha256": fingerprint.of_file(p)} for name, p in paths.items()}


def check_sizes(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    """Check that each file exists and is as long as it was: quick, for whenever a datastore is opened."""
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise DatastoreError(f"{path} is missing: copy the whole datastore, or build it again")
        if (found := path.stat().st_size) != expected["bytes"]:
            raise DatastoreError(
                f"{path} is damaged: {found:,} bytes found, {expected['bytes']:,} expected; build the "
                "datastore again"
            )


def check_checksums(directory: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Read every byte; returns a sentence for each file that has changed."""
    total = sum(expected["bytes"] for expected in files.values())
    with progress_bar("checksums", "B", total=total, delay=1) as bar:
        changed = [
            name for name, expected in files.items()
            if fingerprint.of_file(directory / name, bar.update) != expected["sha256"]
        ]  # fmt: skip
    return [f"{name}: the bytes have changed since it was built (checksum)" for name in changed]
