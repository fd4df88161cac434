"""A folder of `fairseq-preprocess`: whether it is complete, which subsets it holds, and their fingerprint."""

from __future__ import annotations

import glob
import re
import struct
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.storage import fingerprint

# of an index that is mapped: mark, version, type, sentences
MAPPED, HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQ")
TRAIN = "train"  # the subset that models are trained on, and datastores built from


def check_data_bin(data_bin: Path, *languages: str) -> None:
    """Check that a folder exists and has the dictionaries of these languages."""
    if not data_bin.is_dir():
        if len(split_paths(str(data_bin))) > 1:
            raise ConfigurationError(
                f"{data_bin} names several folders, of which fairseq-train reads another in each epoch: give "
                "one; datastores built from each become one with fairseq-ccpr merge"
            )
        found = f"{data_bin} is a file" if data_bin.exists() else f"there is no folder {data_bin}"
        raise ConfigurationError(
            f"{found}: give the folder that fairseq-ccpr prepare or fairseq-preprocess wrote"
        )
    for language in languages:
        if not (data_bin / f"dict.{language}.txt").is_file():
            raise ConfigurationError(
                f"{data_bin} has no dict.{language}.txt{but_found(data_bin)}: give the folder that "
                "fairseq-ccpr prepare or fairseq-preprocess wrote, and -s and -t as there"
            )


def but_found(folder: Path) -> str:
    """Name the dictionaries of a folder that lacks those looked for: languages may have other names there."""
    names = [path.name for path in sorted(folder.glob("dict.*.txt"))]
    return f", but {', '.join(names[:10])}" if names else ""


def has_subset(task: Any, subset: str) -> bool:
    """Return whether the data of a translation task have a subset of this name, with both sides."""
    return _prefix(task, subset) is not None


def parts_of(task: Any, subset: str) -> list[str]:
    """List a subset and those that continue it, read as one by fairseq-train: `train`, `train1`, `train2`.

    One whose name ends in a number stands for itself.
    """
    numbers = [name.removeprefix(subset) for name in _found(task) if not subset[-1:].isdigit()]
    return [subset, *(f"{subset}{number}" for number in sorted(filter(str.isdecimal, numbers), key=int))]


def check_whole(task: Any, subset: str) -> None:
    """Check the sizes of a subset's files before fairseq maps them; ValueError names one too short."""
    for path in _folder(task).glob(f"{glob.escape(subset)}.*-*.idx"):
        with path.open("rb") as stream:
            head = stream.read(HEADER.size)
        if head.startswith(MAPPED):
            count = HEADER.unpack(head)[-1] if len(head) == HEADER.size else 0
            if path.stat().st_size != HEADER.size + 12 * count or (
                count and not path.with_suffix(".bin").stat().st_size
            ):
                raise ValueError(f"{path.name} or .bin is too short")


def what_is_there(task: Any, subset: str) -> str:
    """Continue a sentence on a missing subset by those that are there, or by the raw text in its place."""
    if any(_folder(task).glob(f"{glob.escape(subset)}.*-*.{task.cfg.source_lang}")):
        return " but as raw text (without --dataset-impl raw, fairseq-preprocess binarises it)"
    return (
        f", but {', '.join(found)}"
        if (found := sorted(filter(partial(has_subset, task), _found(task))))
        else ""
    )


def corpus_fingerprint(task: Any, subsets: Iterable[str]) -> str:
    """Digest the binarised files of subsets, which must exist, in their order."""
    files = []
    for subset in subsets:
        prefix = f"{subset}.{_prefix(task, subset)}"
        sides = (task.cfg.source_lang, task.cfg.target_lang)
        files += [_folder(task) / f"{prefix}.{side}.{end}" for side in sides for end in ("bin", "idx")]
    return fingerprint.of_files(files)


def _prefix(task: Any, subset: str) -> str | None:
    """The language pair in the names of a subset's files, which serve both directions."""
    source, target = task.cfg.source_lang, task.cfg.target_lang
    ends = [f"{side}.{end}" for side in (source, target) for end in ("bin", "idx")]
    pairs = (f"{source}-{target}", f"{target}-{source}")
    folder = _folder(task)
    return next((p for p in pairs if all((folder / f"{subset}.{p}.{end}").exists() for end in ends)), None)


def _found(task: Any) -> set[str]:
    one, other = re.escape(task.cfg.source_lang), re.escape(task.cfg.target_lang)
    pattern = re.compile(rf"(.+)\.({one}-{other}|{other}-{one})\.({one}|{other})\.(bin|idx)")
    return {found[1] for path in _folder(task).glob("*-*") if (found := pattern.fullmatch(path.name))}


def _folder(task: Any) -> Path:
    return Path(split_paths(task.cfg.data)[0])
