"""JSON and text written atomically; files described by size and checksum, and checked against that description."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file

MANIFEST = "manifest.json"
PLAN = "plan.json"  # in a folder that is not finished: what it is being built from
CHECKSUM = "checksum"  # the last entry of a manifest: SHA-256 of the file without this entry


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically."""
    write_text(path, _as_text(data))


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 atomically.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)


def write_checked_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically, with a checksum of its own: `read_checked_json` then notices any change of any byte."""
    write_text(path, _with_checksum(data))


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read what `write_checked_json` wrote, checksum included, or an older file, which has none.

    Raises:
        ValueError: says in what way the file is damaged.
    """
    text = path.read_bytes().decode("utf-8")
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    if CHECKSUM in data and text != _with_checksum({name: data[name] for name in data if name != CHECKSUM}):
        raise ValueError(f"its {CHECKSUM} is not that of its bytes, which have changed since it was written")
    return data


def drop_checksum(data: dict[str, Any], since: int) -> None:
    """Remove the checksum from JSON that was read, and check that it has one if its format has.

    Args:
        data: as `read_checked_json` returns it.
        since: the first `format_version` that has a checksum.

    Raises:
        ValueError: the checksum is missing, or has no place there.
    """
    if (CHECKSUM in data) != (data["format_version"] >= since):
        fault = "has" if CHECKSUM in data else "lacks"
        raise ValueError(f"it {fault} a {CHECKSUM}, unlike any of format version {data['format_version']}")
    data.pop(CHECKSUM, None)


def _with_checksum(data: dict[str, Any]) -> str:
    """Return the only text that stands for these data."""
    digest = hashlib.sha256(_as_text(data).encode()).hexdigest()
    return _as_text({**data, CHECKSUM: digest})


def _as_text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return size and checksum of files, by their path relative to `directory`."""
    paths = {name: directory / name for name in names}
    return {name: {"bytes": p.stat().st_size, "sha256": fingerprint.of_file(p)} for name, p in paths.items()}


def check_sizes(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    """Check that each file exists and is as long as it was; quick enough for whenever a datastore is opened.

    Raises:
        DatastoreError: names the file, the bytes found and the bytes expected.
    """
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise DatastoreError(f"{path} is missing: copy the whole datastore, or build it again")
        if (found := path.stat().st_size) != expected["bytes"]:
            raise DatastoreError(
                f"{path} is damaged: {found:,} bytes found, {expected['bytes']:,} expected; build the datastore again"
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
