"""Folders that appear under their name when all of them is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairseq_ccpr.errors import ConfigurationError


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` in the end, and goes if anything fails.

    Raises:
        ConfigurationError: `output` exists.
    """
    if output.exists():
        raise ConfigurationError(f"--output {output} exists: give a new folder, or delete it")
    partial = unfinished(output)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def unfinished(output: Path) -> Path:
    """Where a folder is written before it appears."""
    return output.with_name(output.name + ".partial")
