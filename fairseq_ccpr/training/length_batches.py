"""Data sets whose examples have sizes, and batches of them by length."""

from __future__ import annotations

import numpy as np
from fairseq.data import ConcatDataset, FairseqDataset


def by_length(lengths: np.ndarray, seed: int, epoch: int = 0) -> np.ndarray:
    """Order by length, which saves padding; break ties at random, so that batches mix places in the text."""
    order = np.random.default_rng([seed, epoch] if epoch else seed).permutation(len(lengths))
    return order[lengths[order].argsort(kind="stable")]


class SizedDataset(FairseqDataset):
    """A data set of n examples of `sizes`, int64 [n], which `--max-tokens` counts as well."""

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    num_tokens = size

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]


class EpochDataset(SizedDataset):
    """A data set whose order or examples change with the epoch."""

    epoch = 1
    can_reuse_epoch_itr_across_epochs = False  # fairseq's workers would keep the data set of the first epoch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


class LengthBatches(EpochDataset):
    """A data set that fairseq orders and batches again each epoch.

    Each of its n examples has sentences on two sides, and a batch is a padded table of subwords for each
    side.
    """

    counts: np.ndarray  # int64 [n, 2], sentences of each example on either side, at most
    lengths: np.ndarray  # int64 [n, 2], subwords of the longest of them
    seed: int  # of the order

    @property
    def sizes(self) -> np.ndarray:  # type: ignore[override]
        """Subwords of each example on its larger side, with padding, int64 [n].

        fairseq leaves out examples with too many.
        """
        return (self.counts * self.lengths).max(axis=1)

    def ordered_indices(self) -> np.ndarray:
        return by_length(self.lengths.max(axis=1), self.seed, self.epoch)

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """Cut `indices` into batches as large as allowed.

        Args:
            max_tokens: subwords on either side, with padding; an example that exceeds this gets a batch of
                its own.
            required_batch_size_multiple: of the number of examples in a batch, unless it has fewer.
        """
        most = min(limit for limit in (max_tokens, max_sentences, len(indices)) if limit is not None)
        batches = []
        while len(indices):
            window = indices[:most]
            # [w, 2]
            padded = self.counts[window].cumsum(axis=0) * np.maximum.accumulate(self.lengths[window])
            size = len(window) if max_tokens is None else int((padded.max(axis=1) <= max_tokens).sum())
            if size > required_batch_size_multiple:
                size -= size % required_batch_size_multiple
            batches.append(indices[: max(1, size)])
            indices = indices[max(1, size) :]
        return batches


class Mixture(LengthBatches, ConcatDataset):
    """Several datasets, of the same seed and epoch, as one."""

    def __init__(self, datasets: list[LengthBatches]) -> None:
        super().__init__(datasets)
        self.seed = datasets[0].seed
        self.set_epoch(datasets[0].epoch)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for name in ("counts", "lengths"):
            setattr(self, name, np.concatenate([getattr(dataset, name) for dataset in self.datasets]))
