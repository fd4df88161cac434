"""The device that work is done on."""

import torch


def choose_device(cpu: bool) -> torch.device:
    """Return the GPU where there is one, unless the CPU is asked for."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
