"""Every option of decoding changes something and is in the signature, or says why not."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass

from fairseq_ccpr.datastore.token import FAMILIAR
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.options import (
    MixtureSettings,
    PhraseSettings,
    StoreSettings,
    TokenRetrievalSettings,
    TranslationRetrievalConfig,
    automatic_token_settings,
    token_settings,
)
from fairseq_ccpr.decoding.token_retriever import Neighbours
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.settings import as_options, option_name
from tests.helpers import ROOT, equal, weight_of
from tests.small_models import World

# Of each field the options that change it.
TOKENS: dict[str, list[object]] = {
    "k": ["--tokens-k", 3], "lambda_": ["--tokens-lambda", 0.9], "temperature": ["--tokens-temperature", 50],
    "likeness": ["--tokens-likeness", 2],
}  # fmt: skip
OF_OTHER_TEXT = ("guard",)  # see test_followed_hypotheses
OF_UNIT_KEYS = ("confidence", "lambda_max", "min_similarity", "lambda_star")
PHRASES: dict[str, list[object]] = {
    "k": ["--phrases-k", 1], "min_similarity": ["--phrases-min-similarity", 0.8], "threshold": ["--phrases-threshold", 0.2],
    "segmentation": ["--phrases-segmentation", "ngram:1"], "lambda_": ["--phrases-lambda", 0.3],
    "consent": ["--phrases-consent", 0.5],
}  # fmt: skip
MATTERS_WITH: dict[str, list[object]] = {"threshold": ["--phrases-segmentation", "learned"]}
MIXTURE: dict[str, list[object]] = {"lambda_max": ["--retrieval-lambda-max", 0.4]}


@pytest.fixture(scope="module")
def observe(world: World, decode: Callable) -> Callable[..., tuple[dict, str]]:
    """What decoding with some options writes, and the signature it logs; once for the same options."""

    @cache
    def run(*words: str) -> tuple[dict, str]:
        cfg = parse_generation(world.options(*words))
        task, models = load(cfg)
        return decode(*words), task.build_generator(models, cfg.generation).model.signature()

    return lambda *words: run(*map(str, words))


@pytest.mark.usefixtures("with_bf16")
@pytest.mark.parametrize(("settings", "name"), [
    *((TOKENS, name) for name in TOKENS), *((PHRASES, name) for name in PHRASES), *((MIXTURE, name) for name in MIXTURE),
])  # fmt: skip
def test_every_option_changes_something_and_is_in_the_signature(
    observe: Callable, joint: list[object], settings: dict[str, list[object]], name: str
) -> None:
    words = [*joint, "--phrases-lambda", 0.9, "--beam", 2]
    words += MATTERS_WITH.get(name, [])
    (usual, signature), (changed, other_signature) = observe(*words), observe(*words, *settings[name])
    assert not equal(changed, usual, tolerance=1e-4) and other_signature != signature


def test_no_option_is_forgotten() -> None:
    reasons = {
        (kind, one.name): one.metadata["unsigned"]
        for kind in (TokenRetrievalSettings, PhraseSettings, StoreSettings, MixtureSettings) for one in fields(kind)
    }  # fmt: skip
    tried = {(TokenRetrievalSettings, name) for name in (*TOKENS, *OF_UNIT_KEYS, *OF_OTHER_TEXT)}
    tried |= {(PhraseSettings, name) for name in PHRASES} | {(MixtureSettings, name) for name in MIXTURE}
    for untried in reasons.keys() - tried:
        assert reasons[untried], untried


@pytest.mark.parametrize(
    "change",
    [{"confidence": False}, {"lambda_max": 0.2}, {"min_similarity": 0.5}, {"lambda_star": "published"}],
    ids=lambda change: next(iter(change)),
)
def test_options_of_unit_keys_change_the_weight(change: dict[str, Any]) -> None:
    values = torch.randint(0, 9, (20, 8))
    neighbours = Neighbours(values, torch.rand(20, 8) * 1.5 - 0.5, values)
    model = Distribution(torch.randn(20, 9).log_softmax(dim=1)).view(values)
    given = {"confidence": True} | change
    usual, other = (
        weight_of(neighbours, model, TokenRetrievalSettings(8, 0.8, 0.1, **settings))
        for settings in ({"confidence": True}, given)
    )
    assert not torch.allclose(usual, other)


@pytest.mark.parametrize(
    ("unit", "words", "wanted"),
    [
        (False, "", {"lambda_": 0.5, "temperature": 10.0, "confidence": False, "guard": True}),
        (True, "", {"lambda_": 1.0, "temperature": 0.05, "confidence": True, "guard": True}),
        (True, "--no-tokens-guard", {"guard": False}),
        (True, "--tokens-confidence", {"lambda_": 1.0, "confidence": True}),
        (True, "--no-tokens-confidence", {"lambda_": 0.5, "temperature": 0.05, "confidence": False}),
        (True, "--tokens-lambda 0.5", {"lambda_": 0.5, "confidence": True}),
        (True, "--tokens-lambda 0", {"lambda_": 0.0}),
        (True, "--tokens-lambda 1 --no-tokens-confidence", {"lambda_": 1.0, "confidence": False}),
    ],
)
def test_what_is_left_out_suits_the_keys(unit: bool, words: str, wanted: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, TranslationRetrievalConfig())
    index = SimpleNamespace(metric="ip" if unit else "l2")
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection="clknn" if unit else None, index=index, suits={FAMILIAR: 0.2})
    )
    settings = token_settings(parser.parse_args(["data", *words.split()]), datastore)
    assert {name: getattr(settings, name) for name in wanted} == wanted
    written = as_options(settings, automatic=automatic_token_settings(datastore, settings.confidence))
    assert set(written.split()) == set(words.split()) - ({"--tokens-confidence"} if unit else set())


def test_what_was_tuned_for_lambda_star_is_left_out_with_it() -> None:
    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, TranslationRetrievalConfig())
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection="clknn", index=SimpleNamespace(metric="ip"), suits={})
    )
    tuned = {"confidence": True, "lambda_max": 0.9, "lambda_star": "published"}
    assert token_settings(parser.parse_args(["data"]), datastore, tuned).lambda_star == "published"
    fixed = token_settings(parser.parse_args(["data", "--no-tokens-confidence"]), datastore, tuned)
    assert (fixed.confidence, fixed.lambda_max, fixed.lambda_star) == (False, 1, "nearest")


def test_the_documentation_has_the_defaults_of_the_settings() -> None:
    rows = re.findall(
        r"^\| `(--[a-z0-9-]+)` \| ([0-9.]+|[a-z]+) \|",
        (ROOT / "docs/options.md").read_text(),
        flags=re.MULTILINE,
    )
    table = dict(rows)
    for kind in (TokenRetrievalSettings, PhraseSettings, StoreSettings, MixtureSettings):
        for one in fields(kind):
            name = option_name(kind, one)
            by_the_keys = kind is TokenRetrievalSettings and one.name in ("lambda_", "temperature")
            if one.default in (None, True, False) or by_the_keys:
                continue
            assert name in table, name
            written = table[name] if isinstance(one.default, str) else type(one.default)(table[name])
            assert written == one.default, name


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("--knn-k", "--tokens-k"),
        ("--no-knn-guard", "--no-tokens-guard"),
        ("--phrase-lambda", "--phrases-lambda"),
    ],
)
def test_a_former_name_is_refused_with_todays(former: str, current: str) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no option {former}; did you mean {current}[?]"):
        parse_generation(["data-bin", "--path", "model.pt", former, "3"])
