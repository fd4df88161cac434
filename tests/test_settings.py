"""Options that are declared once: what parsers, checks and signatures make of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Optional

import pytest
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import (
    add_options,
    as_options,
    check,
    option,
    read_options,
    signature,
    signed,
    with_options,
)


@dataclass(frozen=True)
class Settings:
    PREFIX: ClassVar[str] = "toy"

    count: int = option(3, "how many", within="[1, inf)", needs="at least 1", sign="n")
    lambda_: float = option(0.5, "a weight", within="[0, 1)", needs="a share from 0 up to, but not, 1")
    sure: bool = option(False, "be sure", automatic=True)
    cover: bool = option(True, "do not cover")
    fast: bool = option(False, "be fast", unsigned="the result is the same")
    kind: str = option("one", "which", choices=("one", "two"))
    file: Optional[str] = option(None, "a file")

    def __post_init__(self) -> None:
        check(self)


@with_options(Settings)
class Config(FairseqDataclass):
    """As fairseq has it."""


def parsers() -> list[argparse.ArgumentParser]:
    """Our own, and fairseq's."""
    own, of_fairseq = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_options(own, Settings)
    gen_parser_from_dataclass(of_fairseq, Config())
    return [own, of_fairseq]


@pytest.mark.parametrize("which", [0, 1])
def test_options_give_settings_and_settings_give_options(which: int) -> None:
    parser = parsers()[which]
    assert read_options(Settings, parser.parse_args([]), {"sure": True}) == Settings(sure=True)
    settings = Settings(7, 0.25, False, False, True, "two", "x")
    words = as_options(settings, automatic={"sure": True})
    assert (
        words
        == "--toy-count 7 --toy-lambda 0.25 --no-toy-sure --no-toy-cover --toy-fast --toy-kind two --toy-file x"
    )
    assert read_options(Settings, parser.parse_args(words.split()), {"sure": True}) == settings
    assert as_options(Settings()) == "" and as_options(Settings(), ("count",)) == "--toy-count 3"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": 0}, "--toy-count is 0: at least 1 is needed"),
        ({"lambda_": 1.0}, "--toy-lambda is 1.0: a share from 0 up to, but not, 1 is needed"),
        ({"lambda_": float("nan")}, "--toy-lambda is nan: "),
        ({"kind": "three"}, "--toy-kind is three: choose one of one, two"),
    ],
)
def test_values_out_of_their_range_are_refused_by_the_name_of_the_option(change: dict, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        replace(Settings(), **change)
    assert str(refusal.value).startswith(sentence)


def test_an_option_and_its_opposite_exclude_each_other() -> None:
    given = parsers()[1].parse_args(["--toy-sure", "--no-toy-sure"])
    with pytest.raises(ConfigurationError, match="--toy-sure and --no-toy-sure exclude each other"):
        read_options(Settings, given)


def test_signatures_have_every_value_but_those_that_say_why_not() -> None:
    changes = {
        "count": 9,
        "lambda_": 0.1,
        "sure": True,
        "cover": False,
        "fast": True,
        "kind": "two",
        "file": "y",
    }
    assert {one.name for one in fields(Settings)} == changes.keys()
    plain = signature(signed(Settings()))
    for name, value in changes.items():
        assert (signature(signed(replace(Settings(), **{name: value}))) == plain) == (name == "fast"), name
