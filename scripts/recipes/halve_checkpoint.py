"""Reduce a fairseq checkpoint to what using the model needs: weights in fp16 and settings, no optimiser.

python scripts/recipes/halve_checkpoint.py CHECKPOINT OUTPUT
"""

import sys
from pathlib import Path

import torch

from fairseq_ccpr.storage.files import (
    atomic_file,
)  # the package also names what a fairseq checkpoint may hold


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    source, output = map(Path, sys.argv[1:])
    state = torch.load(source, map_location="cpu")
    kept = {name: state.get(name) for name in ("args", "cfg", "criterion", "optimizer_history", "task_state")}
    # A momentum encoder is of use to training alone.
    weights = {name: value for name, value in state["model"].items() if not name.startswith("momentum.")}
    halves: dict[int, torch.Tensor] = {}  # embeddings that are shared stay shared, and are stored once
    for value in weights.values():
        halves.setdefault(value.data_ptr(), value.half() if value.is_floating_point() else value)
    kept["model"] = {name: halves[value.data_ptr()] for name, value in weights.items()}
    kept |= {"extra_state": {}, "last_optimizer_state": None}
    with atomic_file(output) as path:
        torch.save(kept, path)


if __name__ == "__main__":
    main()
