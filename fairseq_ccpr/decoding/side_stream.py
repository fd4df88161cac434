"""Work that a GPU does beside what it is asked to do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A second queue of a GPU's work. On a CPU there is none, and work is done when it is asked for."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # made when the first work tells on which device

    @contextmanager
    def taking(self, given: Tensor) -> Iterator[None]:
        """What is asked for in here is done in the second queue, once `given` and all else asked for before is there."""
        if not given.is_cuda:
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(given.device)
        self.stream.wait_stream(torch.cuda.current_stream(given.device))
        given.record_stream(self.stream)  # its memory must not be used again before that queue is done with it
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What is asked for from now on is done after all that the second queue was given."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
