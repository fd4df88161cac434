"""The worth of systems on a text: what references gain and lose against the model alone, and the weight of each memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Worth(NamedTuple):
    """Nats a token against the model alone, and mean interpolation weights."""

    gain: float  # mean of log p - log p_NMT
    harm: float  # mean of what tokens lose; those that gain count as 0
    tokens: float | None  # mean weight of the token memory; None without one
    phrases: float | None  # of the phrase memory

    @classmethod
    def of(cls, model: Tensor, system: Tensor, tokens: Tensor | None, phrases: Tensor | None) -> Worth:
        """Measure a system by N reference tokens.

        Args:
            model, system: fp32 [N], log p_NMT and log p of them.
            tokens, phrases: fp32 [N], weights of the memories that there are.
        """
        gain = system - model
        weights = (float(one.mean()) if one is not None else None for one in (tokens, phrases))
        return cls(float(gain.mean()), float((-gain).clamp_min(0).mean()), *weights)


class TextWorth(NamedTuple):
    """The worth of systems on a text."""

    model: float  # mean log p_NMT of its references
    systems: dict[str, Worth]  # by name


def table(texts: dict[str, TextWorth]) -> list[str]:
    """Write the lines of a table: a row for each system on each text."""
    rows = [("nats per token, weights", "", "gain", "harm", "tokens", "phrases")]
    for text, (model, systems) in texts.items():
        rows.append((text[-23:], "model alone", f"{model:.3f}", "", "", ""))
        for name, worth in systems.items():
            tokens, phrases = (f"{one:.2f}" if one is not None else "" for one in (worth.tokens, worth.phrases))
            rows.append(("", name, f"{worth.gain:+.3f}", f"{worth.harm:.3f}", tokens, phrases))
    widths = ("<24", "<18", ">8", ">8", ">9", ">9")
    return ["".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
