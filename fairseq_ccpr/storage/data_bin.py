"""A folder of `fairseq-preprocess`: whether it is complete, which subsets it holds, and their fingerprint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage import fingerprint

TRAIN = "train"  # the subset that models are trained on, and datastores built from


def check_data_bin(data_bin: Path, *languages: str) -> None:
    """Check that a folder exists and has the dictionaries of these languages.

    Raises:
        ConfigurationError: the folder or a dictionary is missing.
    """
    if not data_bin.is_dir():
        found = f"{data_bin} is a file" if data_bin.exists() else f"there is no folder {data_bin}"
        raise ConfigurationError(f"{found}: give the folder that fairseq-ccpr prepare or fairseq-preprocess wrote")
    for language in languages:
        if not (data_bin / f"dict.{language}.txt").is_file():
            raise ConfigurationError(
                f"{data_bin} has no dict.{language}.txt{but_found(data_bin)}: give the folder that fairseq-ccpr prepare or "
                "fairseq-preprocess wrote, and -s and -t as there"
            )


def but_found(folder: Path) -> str:
    """Name the dictionaries of a folder that lacks those that were looked for: languages may be called otherwise there."""
    names = [path.name for path in sorted(folder.glob("dict.*.txt"))]
    return f", but {', '.join(names[:10])}" if names else ""


def has_subset(task: Any, subset: str) -> bool:
    """Return whether the data of a translation task have a subset of this name."""
    return _prefix(task, subset) is not None


def corpus_fingerprint(task: Any, subsets: Iterable[str]) -> str:
    """Digest the binarised files of subsets, which must exist, in their order."""
    files = []
    for subset in subsets:
        prefix = f"{subset}.{_prefix(task, subset)}"
        sides = (task.cfg.source_lang, task.cfg.target_lang)
        files += [Path(task.cfg.data) / f"{prefix}.{side}.{end}" for side in sides for end in ("bin", "idx")]
    return fingerprint.of_files(files)


def _prefix(task: Any, subset: str) -> str | None:
    """Return the language pair in the names of a subset's files, which serve both directions."""
    source, target = task.cfg.source_lang, task.cfg.target_lang
    for prefix in (f"{source}-{target}", f"{target}-{source}"):
        if all((Path(task.cfg.data) / f"{subset}.{prefix}.{side}.bin").exists() for side in (source, target)):
            return prefix
    return None
