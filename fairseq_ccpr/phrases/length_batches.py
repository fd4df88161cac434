"""Datasets whose batches have examples of like length, others together each epoch."""

from __future__ import annotations

import numpy as np
from fairseq.data import ConcatDataset, FairseqDataset


class LengthBatches(FairseqDataset):
    """A dataset of n examples that fairseq puts in order, and in batches, anew each epoch.

    Attributes:
        sizes: int64 [n], what each example counts for --max-tokens.
        seed: of the order.
        epoch: from 1; what changes with it follows `set_epoch`.
    """

    sizes: np.ndarray
    seed: int
    epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """See `FairseqDataset.set_epoch`."""
        super().set_epoch(epoch)
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """No: fairseq's workers would go on with the dataset as it was in the first epoch."""
        return False

    def ordered_indices(self) -> np.ndarray:
        """By length, which makes for little padding; ties at random, so that batches are not of one place in the text."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return order[self.sizes[order].argsort(kind="stable")]


class Mixture(LengthBatches, ConcatDataset):
    """Several datasets as one.

    Args:
        datasets: of the same seed.
    """

    def __init__(self, datasets: list[LengthBatches]) -> None:
        super().__init__(datasets)
        self.seed = datasets[0].seed
