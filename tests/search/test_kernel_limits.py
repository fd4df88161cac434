"""Every kernel of exact search, compiled for GPUs that are not here, takes no more shared memory than those have."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from fairseq_ccpr.search.fused_tiling import HELD, Device, Tiling, shared_bytes
from fairseq_ccpr.search.launching import FUSED

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[kernels]'")

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DEVICES = {80: Device(166_912, 8), 89: Device(101_376, 8), 90: Device(232_448, 9)}  # A100; L4, RTX 4090; H100, H200
WIDTHS = [128, 256, 512, 1024]
HYPOTHESES = [5, 64, 65, 240, 800]
POINTERS = {
    "keys": "*fp16", "half_norms": "*fp32", "high": "*fp16", "low": "*fp16", "scales": "*fp32", "maxima": "*fp32",
    "queries": "*fp32", "buckets": "*i64", "scores": "*fp32",
    "pairs": "*i64", "described": "*i64",
}  # fmt: skip


@cache
def kernels() -> ModuleType:
    """The module of kernels once more: the one that is imported may be of the interpreter."""
    return load(FUSED)


@cache
def list_kernels() -> ModuleType:
    """That of inverted lists, which calls some of these."""
    with patch.dict(sys.modules, {FUSED: kernels()}):
        return load("fairseq_ccpr.search.list_major")


def load(name: str) -> ModuleType:
    """Load a module under another name."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"compiled_{found.name.rpartition('.')[2]}", found.origin)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@cache
def compiled(function: Any, capability: int, sizes: tuple[tuple[str, Any], ...]) -> Any:
    """A kernel as a launch on such a GPU would compile it, where all tensors begin at multiples of 16 bytes."""
    constants = dict(sizes)
    options = {"num_warps": constants.pop("num_warps")} if "num_warps" in constants else {}
    changing = {name: "i32" for name in function.arg_names if name not in constants}
    signature = changing | {name: kind for name, kind in POINTERS.items() if name in changing}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names) if signature.get(name, "").startswith("*")
    }  # fmt: skip
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("dimension", WIDTHS)
@pytest.mark.parametrize("capability", DEVICES)
def test_search_fits_into_shared_memory(capability: int, dimension: int) -> None:
    device = DEVICES[capability]
    for split in (False, True):
        for queries in HYPOTHESES:
            sizes = kernels().maxima_sizes(dimension, queries, True, split, device)
            tiling = Tiling(sizes["QUERIES"], sizes["CHUNK"], sizes["STAGES"], sizes["num_warps"])
            bound = shared_bytes(tiling, dimension <= HELD, split, device.major)
            for function in (kernels()._maxima_kernel, list_kernels()._lists_kernel):
                kernel = compiled(function, capability, tuple(sizes.items()))
                assert kernel.metadata.shared <= bound <= device.shared, (function, queries, split)
                assert ("wgmma" in kernel.asm["ptx"]) == (capability == 90)  # tensor cores, and the newest there are
                assert "mma" in kernel.asm["ptx"]
    kernel = compiled(kernels()._scores_kernel, capability, tuple(kernels().scores_sizes(dimension, True).items()))
    assert kernel.metadata.shared <= 49_152  # what any GPU gives without being asked


def test_kernels_are_compiled_once_for_all_numbers_of_hypotheses() -> None:
    """Numbers that change while it translates are in no variant, but for the four sizes of a tile."""
    module = kernels()
    for kernel in (module._maxima_kernel, module._scores_kernel):
        numbers = [each for each in kernel.params if not each.is_constexpr and each.name not in POINTERS]
        assert numbers and all(number.do_not_specialize for number in numbers)
    variants = {tuple(module.maxima_sizes(128, h, True, True, DEVICES[90]).items()) for h in range(1, 1000)}
    assert len(variants) == 4
