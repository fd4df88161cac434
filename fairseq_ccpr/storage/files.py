"""JSON and text written atomically; files described by size and checksum, and checked against that description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file

MANIFEST = "manifest.json"
PLAN = "plan.json"  # in a folder that is not finished: what it is being built from


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 atomically.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, by their path relative to `directory`."""
    paths = {name: directory / name for name in names}
    return {name: {"bytes": p.stat().st_size, "sha256": fingerprint.of_file(p)} for name, p in paths.items()}


def check_sizes(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    """The quick check made whenever a datastore is opened: each file is there and as long as it was.

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
    """The full check: a sentence for each file whose bytes have changed."""
    changed = [name for name, expected in files.items() if fingerprint.of_file(directory / name) != expected["sha256"]]
    return [f"{name}: the bytes have changed since it was built (checksum)" for name in changed]
