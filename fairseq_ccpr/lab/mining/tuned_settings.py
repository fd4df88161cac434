"""Mining methods by name, and their settings as `--tune` writes them to a file and mining reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.logistic import LogisticMethod
from fairseq_ccpr.lab.mining.margin import MarginMethod, MaxMethod
from fairseq_ccpr.lab.mining.method import MiningMethod
from fairseq_ccpr.lab.mining.rfr import RfrMethod
from fairseq_ccpr.lab.mining.two_way import TwoWayMethod
from fairseq_ccpr.settings import inside, signature
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import write_json

METHODS: dict[str, Callable[..., MiningMethod]] = {
    method.name: method for method in (RfrMethod, MarginMethod, MaxMethod, TwoWayMethod, LogisticMethod)
}


@dataclass(frozen=True)
class TunedSettings:
    """A method and its settings, with what they were chosen by."""

    method: MiningMethod
    encoder: str  # its fingerprint
    tuned: dict[str, Any] = field(default_factory=dict)  # on what, and how well they did there

    def signature(self) -> str:
        """Name all that decides a result in one line."""
        values = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in asdict(self.method).items()}
        return signature({"method": self.method.name, **values, "encoder": fingerprint.short(self.encoder)})

    def write(self, path: Path) -> None:
        """Write them atomically."""
        values = {"method": self.method.name, **asdict(self.method), "encoder": self.encoder, "tuned": self.tuned}
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
            method = METHODS[values.pop("method")](**values)
            _check(method)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} holds no settings of fairseq-ccpr mine ({type(error).__name__}: {error}): make new ones with --tune"
            ) from None
        return cls(method, encoder, tuned)


def _check(method: MiningMethod) -> None:
    """Check types and ranges of what a file has."""
    for one in fields(method):
        value = getattr(method, one.name)
        kind: Any = type(one.default)
        if not isinstance(value, (int, float) if kind is float else kind) or (
            kind is float and not math.isfinite(value)
        ):
            raise ValueError(f"{one.name} is {value!r}, and must be a {kind.__name__}")
        if one.metadata["within"] and not inside(value, one.metadata["within"]):
            raise ValueError(f"{one.name} is {value}, and must be {one.metadata['needs']}")
        if one.metadata["choices"] and value not in one.metadata["choices"]:
            raise ValueError(f"{one.name} is {value}, and must be one of {', '.join(one.metadata['choices'])}")
