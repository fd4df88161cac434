"""The base of data sets: the sizes of examples, from which fairseq makes batches."""

from __future__ import annotations

import numpy as np
from fairseq.data import FairseqDataset


class SizedDataset(FairseqDataset):
    """A data set of n examples of size 1 each, so that a batch is of so many examples; subclasses may have other sizes."""

    @property
    def sizes(self) -> np.ndarray:
        """Sizes of the examples, int64 [n]."""
        return np.ones(len(self), dtype=np.int64)

    def size(self, index: int) -> int:
        """Return the size of an example."""
        return 1

    def num_tokens(self, index: int) -> int:
        """Return the same count for `--max-tokens` as for the limits on sizes."""
        return self.size(index)

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the sizes of several examples, int64."""
        return self.sizes[indices]
