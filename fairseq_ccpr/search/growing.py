"""Keys that grow at their end, on the device where they are searched."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FIRST_ROWS = 4096  # that there is room for; then twice as many each time


class GrowingKeys:
    """N keys fp16 of width d. What `rows` returned before stays as it is when more are appended.

    Args:
        dimension: d.
        device: where they are.
    """

    def __init__(self, dimension: int, device: torch.device) -> None:
        self._room = torch.empty(0, dimension, dtype=torch.float16, device=device)
        self.size = 0

    @property
    def rows(self) -> Tensor:
        """All of them, fp16 [N, d]."""
        return self._room[: self.size]

    def append(self, keys: np.ndarray) -> None:
        """Append keys, fp16 [n, d]."""
        size = self.size + len(keys)
        if size > len(self._room):
            larger = self._room.new_empty(max(FIRST_ROWS, 2 * size), self._room.size(1))
            larger[: self.size] = self.rows
            self._room = larger
        self._room[self.size : size] = torch.tensor(keys, dtype=torch.float16, device=self._room.device)
        self.size = size
