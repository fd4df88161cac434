"""What the benchmark of mining compares, and the sizes of its tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Optional

from fairseq_ccpr.lab.mining.grid import Grid
from fairseq_ccpr.lab.mining.logistic import LogisticMethod
from fairseq_ccpr.lab.mining.margin import MarginMethod, MaxMethod
from fairseq_ccpr.lab.mining.method import MiningMethod
from fairseq_ccpr.lab.mining.rfr import RfrMethod
from fairseq_ccpr.lab.mining.two_way import TwoWayMethod
from fairseq_ccpr.settings import check, count_option, option

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
