"""Settings of mining, as `--tune` writes them to a file and mining reads them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Union

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.fragments import WINDOW
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import write_json

RFR, MARGIN = "rfr", "margin"
METHODS = (RFR, MARGIN)
OVER_SENTENCES, OVER_NEIGHBOURS = "sentences", "neighbours"
ENTROPIES = (OVER_SENTENCES, OVER_NEIGHBOURS)


@dataclass(frozen=True)
class RfrSettings:
    """Robust fragment-level retrieval."""

    k: int = 10  # neighbours of a fragment
    beta: float = 75.0  # how much the nearest of them count
    keep: float = 0.5  # p, the share of a sentence's fragments that count, those of the lowest entropies
    threshold: float = 0.5  # P, the probability below which there is no pair
    window: int = WINDOW  # n, words of a fragment
    sentence_half: bool = True  # whether a fragment's vector holds its sentence's
    entropy_over: str = OVER_SENTENCES  # or neighbours

    @property
    def method(self) -> str:
        """Its name."""
        return RFR


@dataclass(frozen=True)
class MarginSettings:
    """The margin-ratio baseline."""

    threshold: float = 1.0  # the margin below which there is no pair
    k: int = 4  # neighbours of a sentence in either direction

    @property
    def method(self) -> str:
        """Its name."""
        return MARGIN


Settings = Union[RfrSettings, MarginSettings]
_KINDS: dict[str, Any] = {RFR: RfrSettings, MARGIN: MarginSettings}


@dataclass(frozen=True)
class TunedSettings:
    """Settings with what they were chosen by."""

    settings: Settings
    encoder: str  # its fingerprint
    tuned: dict[str, Any] = field(default_factory=dict)  # on what, and how well they did there

    def signature(self) -> str:
        """One line that names all that decides a result."""
        parts = {"method": self.settings.method, **asdict(self.settings), "encoder": fingerprint.short(self.encoder)}
        return signature({name: _plain(value) for name, value in parts.items()})

    def write(self, path: Path) -> None:
        """Write them; the file appears when it is whole."""
        values = {"method": self.settings.method, **asdict(self.settings), "encoder": self.encoder, "tuned": self.tuned}
        write_json(path, values)

    @classmethod
    def read(cls, path: Path) -> TunedSettings:
        """Read and check a file.

        Raises:
            ConfigurationError: it is missing, damaged, or a value is out of its range.
        """
        if not path.is_file():
            raise ConfigurationError(f"there are no settings at {path}: make them with --tune GOLD_TSV")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            encoder, tuned = values.pop("encoder"), values.pop("tuned")
            settings = _KINDS[values.pop("method")](**values)
            _check(settings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} holds no settings of mine_bitext.py ({type(error).__name__}: {error}): make them anew with --tune"
            ) from None
        return cls(settings, encoder, tuned)


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _check(settings: Settings) -> None:
    for name, value in asdict(settings).items():
        kind = type(getattr(type(settings)(), name))
        if not isinstance(value, (int, float) if kind is float else kind) or (
            kind is float and not math.isfinite(value)
        ):
            raise ValueError(f"{name} is {value!r}, and must be a {kind.__name__}")
    if settings.k < 1:
        raise ValueError(f"k is {settings.k}, and must be at least 1")
    if isinstance(settings, RfrSettings):
        if not 0 < settings.keep <= 1:
            raise ValueError(f"keep is {settings.keep}, and must be above 0 and at most 1")
        if settings.window < 1:
            raise ValueError(f"window is {settings.window}, and must be at least 1")
        if settings.entropy_over not in ENTROPIES:
            raise ValueError(f"entropy_over is {settings.entropy_over}, and must be one of {', '.join(ENTROPIES)}")
