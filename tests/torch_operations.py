"""Watch the operations of torch: those that make the host wait for a device, and how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
# What has to know numbers, be it only to know how large its result is.
ASKING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class NoRoundTrip(TorchDispatchMode):
    """Fails where the host would wait for a GPU: for the result of an operation, or to copy numbers of its own there.

    Copies of tensors that are already there, such as `.to(device)`, go unseen on a CPU.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        assert packet not in ASKING, f"{func} asks the device for numbers"
        assert packet is not aten.lift_fresh, f"{func} makes a tensor of the host's numbers"
        if packet in BY_MASK:
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), (
                f"{func} by a mask"
            )
        assert func is not aten.repeat_interleave.Tensor, f"{func} asks for the sum of its repeats"
        return func(*args, **(kwargs or {}))


class Traced(NoRoundTrip):
    """Notes each operation, with shapes and types of what it takes and gives: what a CUDA graph replays."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        tensors, _ = tree_flatten((args, kwargs, made))
        noted = [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in tensors]
        self.notes.append((str(func), noted))
        return made


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """CUDA's own check, in which any call that waits for the device fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
