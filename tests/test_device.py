"""Tensors travel to a device and back in one copy, unchanged.

Without a GPU the bytes are held against one another where they are packed; `meta` stands for the device.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr import device
from fairseq_ccpr.errors import ConfigurationError, describe
from tests.torch_operations import no_synchronisation
from tests.vectors import DEVICE

DTYPES = [
    torch.int64,
    torch.int32,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
]
tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
    min_size=1,
    max_size=9,
)


def make(described):
    """Random tensors; some are views that are not contiguous."""
    made = [(torch.rand(shape) * 100).to(dtype) for dtype, shape, _ in described]
    return [
        tensor.T if turned and tensor.dim() == 2 else tensor
        for tensor, (_, _, turned) in zip(made, described)
    ]


@given(tensors)
def test_what_is_packed_is_unpacked(described) -> None:
    given_tensors = make(described)
    starts = device._starts(given_tensors)
    buffer = torch.empty(starts[-1], dtype=torch.uint8)
    device._fill(buffer, given_tensors, starts)
    for found, wanted in zip(device._views(buffer, given_tensors, starts), given_tensors, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


def test_one_copy_goes_to_the_device() -> None:
    given_tensors = [torch.ones(3, 4, dtype=torch.int64), torch.zeros(5), torch.ones(2, dtype=torch.bool)]
    elsewhere = torch.device("meta")
    moved = device.to_device(given_tensors, elsewhere)
    assert [(t.device, t.dtype, t.shape) for t in moved] == [
        (elsewhere, t.dtype, t.shape) for t in given_tensors
    ]
    assert len({t.untyped_storage()._cdata for t in moved}) == 1
    assert device.to_device(given_tensors, torch.device("cpu"))[0] is given_tensors[0]
    assert device.to_host(given_tensors)[0] is given_tensors[0]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
def test_a_gpu_gives_back_what_it_was_given_and_the_host_does_not_wait() -> None:
    given_tensors = make([(dtype, [3, 5], True) for dtype in DTYPES])
    with no_synchronisation():
        moved = device.to_device(given_tensors, DEVICE)
    assert all(map(torch.equal, device.to_host(moved), given_tensors))


def test_small_networks_train_on_one_thread() -> None:
    before = torch.get_num_threads()

    @device.one_thread()
    def train() -> None:
        assert torch.get_num_threads() == 1
        raise ValueError

    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError):
            train()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


WATCHED = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch:", os.environ.get("OMP_WAIT_POLICY"))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Watch())
sys.argv = ["fairseq-ccpr", "inspect", "no-such-folder"]
from fairseq_ccpr.cli import main
main()
"""


@pytest.mark.full
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_the_threads_of_a_command_wait_passively(given: str | None) -> None:
    """OpenMP reads the variable when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", WATCHED], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"torch: {given or 'PASSIVE'}"), done.stderr


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Error: 'false' failed: StandardGpuResources: alloc fail (cudaMalloc error out of memory [2])",
    ],
)
def test_a_full_gpu_is_one_sentence(said: str) -> None:
    sentence = describe(RuntimeError(said))
    assert sentence is not None and "the GPU is out of memory" in sentence and "--max-tokens" in sentence
    assert describe(RuntimeError("a fault of the program")) is None


def test_auto_is_bf16_where_a_large_product_is_faster_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for faster in (True, False):
        monkeypatch.setattr(device, "has_bf16", lambda where, faster=faster: faster)
        large, small = (device.choose_precision(device.AUTO, cpu, count) for count in (device.LARGE, 100))
        assert (large, small) == (device.BF16 if faster else device.FP32, device.FP32)
    assert device.choose_precision(device.AUTO, torch.device("cuda"), device.LARGE) == device.FP32
    with pytest.raises(ConfigurationError, match="--precision fp64: choose one of auto, fp32, fp16, bf16"):
        device.choose_precision("fp64", cpu, device.LARGE)
