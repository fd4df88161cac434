"""Manifests of folders that training reads: phrase pairs and lexicons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.atomic import PARTIAL, partial_path
from fairseq_ccpr.storage.files import MANIFEST, check_checksums, drop_checksum, read_checked_json
from fairseq_ccpr.version import __version__

CHECKSUM_SINCE = 2  # format version of every kind
M = TypeVar("M")


@dataclass(frozen=True)
class TextFormat:
    """What distinguishes one kind of folder from others."""

    kind: str  # as the manifest has it
    version: int  # the highest that is read
    what: str  # what it holds, in the plural, as messages have it
    files: tuple[str, ...]
    again: str  # what to do about a damaged one


def read_text_manifest(directory: Path, make: type[M], of: TextFormat) -> M:
    """Read and check the manifest of a folder.

    Args:
        directory: the folder.
        make: the manifest's dataclass, which has `files`.
        of: the kind of folder expected.

    Raises:
        DatastoreError: no such directory, not of this kind, unfinished, a newer format, or a damaged manifest.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if partial_path(directory).exists() or directory.suffix == PARTIAL:
            raise DatastoreError(f"the {of.what} {directory} are unfinished: {of.again}")
        inside = " (give one of its folders, such as train)" if (directory / "train" / MANIFEST).exists() else ""
        raise DatastoreError(f"there are no {of.what} at {directory}: it has no {MANIFEST}{inside}")
    try:
        data = read_checked_json(path)
        if data.get("kind") != of.kind:
            raise DatastoreError(f"{directory} holds no {of.what}: its {MANIFEST} is that of something else")
        if data["format_version"] > of.version:
            raise DatastoreError(
                f"{path} has format version {data['format_version']}, and this fairseq-ccpr ({__version__}) reads up to "
                f"{of.version}: upgrade fairseq-ccpr"
            )
        drop_checksum(data, CHECKSUM_SINCE)
        if set(data["files"]) != set(of.files):
            raise ValueError(f"it names other files than {', '.join(of.files)}")
        return make(**data)
    except (KeyError, TypeError, AttributeError) as error:
        raise DatastoreError(f"{path} is damaged ({error!r}): {of.again}") from None
    except ValueError as error:
        raise DatastoreError(f"{path} is damaged ({error}): {of.again}") from None


def check_every_byte(directory: Path, files: dict[str, dict[str, Any]], of: TextFormat) -> None:
    """Read every byte of the files that a manifest names, and compare their checksums.

    Raises:
        DatastoreError: a file has changed.
    """
    if faults := check_checksums(directory, files):
        raise DatastoreError(f"{directory} is damaged ({faults[0]}): {of.again}")
