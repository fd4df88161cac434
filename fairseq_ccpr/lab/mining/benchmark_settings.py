"""What the benchmark of mining compares, the sizes of its tests, and tuned settings kept as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.method import Grid, MiningMethod
from fairseq_ccpr.lab.mining.pair_methods import LogisticMethod, MarginMethod, MaxMethod, TwoWayMethod
from fairseq_ccpr.lab.mining.rfr import RfrMethod
from fairseq_ccpr.settings import check, count_option, inside, option, signature
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import write_json

BASELINE, RFR, NO_SENTENCE, NO_FILTER = MaxMethod.name, "RFR", "RFR, fragment alone", "RFR, no entropy filter"
QUESTIONS = "questions"
AT_ONE = "at-1.0"
# Methods, and what their tuning tries; None where the settings are to stay as they are.
SYSTEMS: dict[str, tuple[MiningMethod, Grid | None]] = {
    BASELINE: (MaxMethod(), Grid()),
    MarginMethod.name: (MarginMethod(), Grid()),
    AT_ONE: (MarginMethod(threshold=1.0), None),  # as near as its neighbourhood: hardly anything is rejected
    TwoWayMethod.name: (TwoWayMethod(), Grid()),
    LogisticMethod.name: (LogisticMethod(), Grid()),
    RFR: (RfrMethod(), Grid()),
}
ABLATIONS: dict[str, tuple[MiningMethod, Grid | None]] = {
    NO_SENTENCE: (RfrMethod(sentence_half=False), Grid()),
    NO_FILTER: (RfrMethod(), Grid(keep=(1.0,))),
}
HALF = 0.5

fraction_option = partial(
    option, within="[0, 1)", needs="a fraction of sentences, at least 0 and less than 1,", metavar="FRACTION"
)


@dataclass(frozen=True)
class MiningBenchmarkSettings:
    """Sizes of the tests; options of `fairseq-ccpr evaluate mining`.

    Raises:
        ConfigurationError: a number out of its range.
    """

    size: int = count_option(1000, "sentences on either side of a test")
    non_pairing: float = fraction_option(HALF, "of them without a partner")
    curve: list[float] = fraction_option([], "tests with these fractions of them as well", nargs="+")  # noqa: RUF009
    tuning_size: int = count_option(100, "sentences that settings are tuned on")
    tuning_sets: int = count_option(1, "how many times, on others each time")
    draws: int = count_option(1, "tests, each of other sentences")
    pool: Optional[int] = option(
        None, "pairs of each set that the draws share, so that each is encoded once (all pairs)",
        within="[1, inf)", needs="at least 1", metavar="N",
    )  # fmt: skip
    systems: list[str] = option(list(SYSTEMS), f"what is compared with {BASELINE}", nargs="+", choices=tuple(SYSTEMS))
    ablations: bool = option(False, "RFR without the sentence half, and without the entropy filter, too")
    seed: int = option(1, "of the draw of sentences", metavar="N")

    def __post_init__(self) -> None:
        check(self)

    @property
    def compared(self) -> dict[str, tuple[MiningMethod, Grid | None]]:
        """List the systems that are compared, the baseline first."""
        named = {name: system for name, system in SYSTEMS.items() if name in (BASELINE, *self.systems)}
        return {**named, **(ABLATIONS if self.ablations else {})}

    @property
    def stride(self) -> int:
        """Tell how far apart the fragments are that all systems can take theirs from."""
        return min((method.stride for method, _ in self.compared.values() if method.window), default=1)


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
