"""The worth of systems on a text: what references gain and lose against the model alone, and the weight of each memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Worth(NamedTuple):
    """Nats a token against the model alone, and mean interpolation weights."""

    gain: float  # mean of log p - log p_NMT
    harm: float  # mean of what tokens lose; those that gain count as 0
    weights: dict[str, float]  # mean weight of each memory

    @classmethod
    def measure(cls, model: Tensor, system: Tensor, weights: Mapping[str, Tensor]) -> Worth:
        """Measure a system by N reference tokens.

        Args:
            model, system: fp32 [N], log p_NMT and log p of them.
            weights: fp32 [N], of each memory.
        """
        gain = system - model
        means = {name: float(weight.mean()) for name, weight in weights.items()}
        return cls(float(gain.mean()), float((-gain).clamp_min(0).mean()), means)


class TextWorth(NamedTuple):
    """The worth of systems on a text."""

    model: float  # mean log p_NMT of its references
    systems: dict[str, Worth]  # by name


def table(texts: dict[str, TextWorth]) -> list[str]:
    """Write the lines of a table: a row for each system on each text."""
    names = list(
        dict.fromkeys(name for text in texts.values() for one in text.systems.values() for name in one.weights)
    )
    rows = [("nats per token, weights", "", "gain", "harm", *names)]
    for text, (model, systems) in texts.items():
        rows.append((text[-23:], "model alone", f"{model:.3f}", "", *("" for _ in names)))
        for name, worth in systems.items():
            weights = (f"{worth.weights[one]:.2f}" if one in worth.weights else "" for one in names)
            rows.append(("", name, f"{worth.gain:+.3f}", f"{worth.harm:.3f}", *weights))
    widths = ("<24", "<18", ">8", ">8", *(">9" for _ in names))
    return ["".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
