"""Building a FAISS index, in memory or with inverted lists on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import DISK, IndexDescription, lists_file
from fairseq_ccpr.search.faiss_library import import_faiss, inverted_lists, make_index, silence, skip_polysemous
from fairseq_ccpr.storage.atomic import atomic_file, move_into_place, scratch_directory

ADD_ROWS = 1 << 16
TRAIN_ROWS_PER_CENTROID = 64
TRAIN_ROWS = 1 << 16  # at least, where the datastore has as many: product quantisers want 2^8 centroids trained well


def build_faiss(
    keys: np.ndarray, description: IndexDescription, path: Path, progress: Callable[[int], object], seed: int = 1
) -> None:
    """Train an index on a random sample of `keys`, add all of them, and write it to `path` when it is complete.

    Args:
        keys: [N, d], may be memory-mapped; read in blocks.
        description: of an index in memory, or of one on disk, whose lists go next to it; see `build_on_disk`.
        path: its file, with the name that the description has.
        progress: told how many keys were added.

    Raises:
        ConfigurationError: a datastore too small to train such an index.
        DatastoreError: the file cannot be written.
    """
    index, rows = trained_index(keys, description, seed)
    if description.backend == DISK:
        build_on_disk(keys, index, rows, path, progress)
        return
    _add(index, keys, progress)
    with atomic_file(path) as partial:
        _write(index, partial)


def trained_index(keys: np.ndarray, description: IndexDescription, seed: int) -> tuple[Any, int]:
    """Return an index that is ready to take keys, and how many keys at most it is trained on."""
    index = make_index(keys.shape[1], description.factory, description.metric)
    skip_polysemous(index, description.parameters)
    ivf = inverted_lists(index)
    wanted = max(TRAIN_ROWS, TRAIN_ROWS_PER_CENTROID * (ivf.nlist if ivf is not None else 0))
    if not index.is_trained:
        rows = np.random.default_rng(seed).choice(len(keys), min(wanted, len(keys)), replace=False)
        rows.sort()
        try:
            index.train(torch.from_numpy(keys[rows].astype(np.float32)))
        except RuntimeError:
            raise ConfigurationError(
                f"the datastore has {len(keys):,} keys, too few to train the index '{description.factory}' on: "
                "use a smaller index or --index exact"
            ) from None
    return index, wanted


def build_on_disk(keys: np.ndarray, index: Any, rows: int, path: Path, progress: Callable[[int], object]) -> None:
    """Fill an index whose inverted lists are never entirely in memory, and write it to `path`, with its lists next to it.

    1. Blocks of keys become an index each, in a folder of their own.
    2. FAISS merges the inverted lists of all blocks into one file, list by list.

    Args:
        keys: [N, d], may be memory-mapped.
        index: trained and empty; its inverted lists are replaced.
        rows: of keys in a block.
        path: of the index; its folder may be renamed later, but not the files.
    """
    faiss = import_faiss()
    from faiss.contrib.ondisk import merge_ondisk

    with scratch_directory(path) as folder:
        blocks: list[str] = []
        for start in range(0, len(keys), rows):
            block = faiss.clone_index(index)
            _add(block, keys[start : start + rows], progress, start)
            blocks.append(str(folder / str(len(blocks))))
            _write(block, Path(blocks[-1]))
        with silence(), _explain_failure(lists := folder / lists_file(path.name)):
            merge_ondisk(index, blocks, str(lists))
        # FAISS looks for the lists next to the index when it reads them: the index is the same wherever it was built.
        faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).filename = lists.name
        _write(index, folder / path.name)
        for name in (lists.name, path.name):  # the index last: its file vouches for both
            move_into_place(folder / name, path.with_name(name))


def _add(index: Any, keys: np.ndarray, progress: Callable[[int], object], first_id: int | None = None) -> None:
    """Add keys [N, d] in blocks, numbered from `first_id` if given."""
    for start in range(0, len(keys), ADD_ROWS):
        block = torch.from_numpy(keys[start : start + ADD_ROWS].astype(np.float32))
        if first_id is None:
            index.add(block)
        else:
            index.add_with_ids(block, torch.arange(len(block)) + first_id + start)
        progress(len(block))


def _write(index: Any, path: Path) -> None:
    with _explain_failure(path):
        import_faiss().write_index(index, str(path))


@contextmanager
def _explain_failure(path: Path) -> Iterator[None]:
    """Raise a DatastoreError of one sentence where FAISS cannot write a file."""
    try:
        yield
    except RuntimeError as error:
        raise DatastoreError(
            f"FAISS could not write {path} ({str(error).splitlines()[-1]}): is the disk full?"
        ) from None
