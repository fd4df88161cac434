"""The device that work is done on, and what travels to it and back: many tensors at a time, in one copy."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from fairseq_ccpr.errors import ConfigurationError

logger = logging.getLogger(__name__)
AUTO, FP32, FP16, BF16 = PRECISIONS = "auto", "fp32", "fp16", "bf16"
FASTER = 1.3  # times that bf16 is to be as fast as fp32
LARGE = 1 << 20  # weights of a projection
ALIGN = 16  # bytes; every dtype may begin at a multiple


def choose_device(cpu: bool) -> torch.device:
    """Return the GPU where there is one, unless the CPU is asked for."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


@cache
def has_bf16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are worth it: on a CPU, whether a large one is faster in it, as measured."""
    if device.type != "cpu":
        return True
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # many times as slow
        return False
    seconds = [_seconds_of_product(dtype) for dtype in (torch.float32, torch.bfloat16)]
    return seconds[0] > FASTER * seconds[1]


@cache
def tell_slow_fp16(device: torch.device) -> None:
    """Warn, once, where half precision makes computing slower."""
    if device.type == "cpu":
        logger.warning("--fp16 makes a CPU many times slower than fp32: leave it out")


def _seconds_of_product(dtype: torch.dtype) -> float:
    rows, weights = (torch.ones(count, 512, dtype=dtype) for count in (128, 2048))
    times = []
    with one_thread():
        for _ in range(4):  # the first prepares
            begin = time.perf_counter()
            functional.linear(rows, weights)
            times.append(time.perf_counter() - begin)
    return min(times)


def choose_precision(wanted: str, device: torch.device, weights: int) -> str:
    """Return the precision to translate in: of `AUTO`, bf16 where a CPU is faster in it, and else fp32.

    Args:
        weights: numbers of the projection to the vocabulary; for small ones bf16 gains nothing.
    """
    if wanted not in PRECISIONS:
        raise ConfigurationError(f"--precision {wanted}: choose one of {', '.join(PRECISIONS)}")
    if wanted == FP16:
        tell_slow_fp16(device)
    if wanted == BF16 and not has_bf16(device):
        logger.warning("this processor is slower in bf16 than in fp32: leave --precision bf16 out")
    if wanted != AUTO:
        return wanted
    return BF16 if device.type == "cpu" and weights >= LARGE and has_bf16(device) else FP32


def sync_is_free(device: torch.device) -> bool:
    """Check whether a step may read numbers off tensors: a CPU has them, for a GPU's it would wait."""
    return device.type == "cpu"


def compute_on_one_thread() -> None:
    """Let this thread of a pool compute alone: torch, and FAISS, whose threads are others."""
    torch.set_num_threads(1)
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread of the CPU: in small operations, several mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of the CPU to a GPU: in one copy out of pinned memory, for which the host does not wait.

    What is on a device of that kind already, all or nothing, goes there as it is.
    """
    if tensors[0].device.type == device.type:
        return [tensor.to(device) for tensor in tensors]
    starts = _starts(tensors)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    _fill(buffer, tensors, starts)
    return _views(buffer.to(device, non_blocking=True), tensors, starts)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one GPU to the CPU, in one copy for which the host waits; those of the CPU stay."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    starts = _starts(tensors)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    _fill(buffer, tensors, starts)
    return _views(buffer.cpu(), tensors, starts)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a buffer of bytes, and at last where that ends."""
    return list(accumulate((-(-tensor.nbytes // ALIGN) * ALIGN for tensor in tensors), initial=0))


def _fill(buffer: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
    for place, tensor in zip(_views(buffer, tensors, starts), tensors):
        place.copy_(tensor)


def _views(buffer: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like)
    ]
