"""Several datastores of one model by name: each as it is alone, some of them together, learning into one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.joint_ensemble import JointEnsemble
from fairseq_ccpr.decoding.mixture import Vote
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.inference import system
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call
from tests.small_models import World, build, subword_options

KEEN: dict[str, Any] = {"max_len_b": 45, "device": "cpu", "tokens_lambda": 0.9, "tokens_temperature": 5}
BOTH = ("cars", "bikes")


def make_stores(world: World, folder: Path) -> dict[str, Path]:
    """Make a copy of the datastore of all tests, one of half its text, and an empty one."""
    stores = {"cars": folder / "cars", "bikes": folder / "bikes", "empty": folder / "empty"}
    shutil.copytree(world.datastore, stores["cars"])
    build(world, stores["bikes"], "--fraction", 0.5)
    where = ["--path", world.model, "--data", world.data_bin, *subword_options(world), "--cpu"]
    call("build memory", *where, "--output", stores["empty"])
    return stores


@pytest.fixture(scope="module")
def stores(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_stores(world, tmp_path_factory.mktemp("memories"))


@pytest.fixture(scope="module")
def translator(stores: dict[str, Path]) -> Iterator[Translator]:
    with Translator(datastore=stores, **KEEN) as one:
        yield one


def outcome(translator: Translator, sentences: list[str], *memory: str) -> list[object]:
    """Texts, and scores to three decimals."""
    found = translator.translate(sentences, memory=memory)
    return [(one.text, [round(score, 3) + 0.0 for score in one.token_scores]) for one in found]


def test_each_is_what_it_is_alone_and_they_share_the_model(
    translator: Translator, stores: dict[str, Path], sentences: list[str]
) -> None:
    found = {name: outcome(translator, sentences, name) for name in stores}
    assert translator["bikes"].models is translator["cars"].models is translator.models
    assert outcome(translator, sentences) == found["cars"] != found["bikes"] != found["empty"]
    for name, store in stores.items():
        alone = Translator(datastore=store, **KEEN)
        assert outcome(alone, sentences) == found[name] and translator[name].signature == alone.signature


@pytest.mark.parametrize("trusting", [False, True])
def test_together_each_keeps_its_odds_against_the_model(
    stores: dict[str, Path], sentences: list[str], trusting: bool
) -> None:
    translator = Translator(datastore=stores, **KEEN)
    if trusting:
        torch.manual_seed(1)
        for one in (translator, translator["bikes"]):
            trust = LearnedTrust.untrained(one.ensemble.memories[:1], True)
            for parameter in trust.parameters():
                parameter.data.normal_(0, 0.3)
            one.ensemble = one.ensemble.with_memories(one.ensemble.memories, trust.eval())
    both, first, second = (outcome(translator, sentences, *names) for names in (BOTH, BOTH[:1], BOTH[1:]))
    assert outcome(translator, sentences, *reversed(BOTH)) == both != first != second != both
    for names in (("cars", "empty"), ("empty", "cars")):
        assert outcome(translator, sentences, *names) == first


def test_weights_are_those_of_the_formula(translator: Translator) -> None:
    ensemble = translator.over([*BOTH, "empty"]).ensemble
    assert isinstance(ensemble, JointEnsemble)
    weights, named = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)), torch.zeros(5, 1).long()
    weights[1, 0] = 0
    votes = ensemble.decided(SimpleNamespace(), [Vote(named, named.float(), weight) for weight in weights])  # type: ignore[arg-type]
    for column, one in enumerate(weights.T.tolist()):
        odds = [weight / (1 - weight) for weight in one]
        wanted = [each / (1 + sum(odds)) for each in odds]
        assert [float(vote.weight[column]) for vote in votes] == pytest.approx(wanted, abs=1e-5)


def test_what_is_refused(translator: Translator, stores: dict[str, Path], world: World) -> None:
    together = translator.over(BOTH)
    for refused, sentence in (
        (lambda: translator["trucks"], "there is no memory trucks: there is cars and bikes and empty"),
        (lambda: translator.translate(["ja"], memory="boats"), "there is no memory boats"),
        (
            lambda: together.translate(["ja"], confidence=True),
            "each datastore is calibrated by itself: name one",
        ),
        (lambda: together.learn("ja", "yes"), "several memories together do not learn: name one"),
        (lambda: together.explain("ja"), "several memories together translate, .* name one of them"),
        (lambda: Translator(datastore=stores["cars"])["cars"], "there is no memory cars: there is none with"),
        (lambda: Translator(datastore={"a,b": stores["cars"]}), "a memory is called 'a,b': use letters"),
        (lambda: Translator(world.other_model, datastore=stores), "was built with another model"),
    ):
        with pytest.raises((ConfigurationError, DatastoreError), match=sentence):
            refused()


def test_sessions_are_gone_when_too_many_or_too_old(
    world: World, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, target), (_, other) = list(read_pairs(world.folder / "test.tsv"))[2:4]
    monkeypatch.setattr(system, "MOST_SESSIONS", 2)
    with Translator(datastore=stores["cars"], **KEEN) as translator:
        before = outcome(translator, [source], ":a", "")
        assert (
            before == outcome(translator, [source]) and not translator._sessions
        )  # it begins when it learns
        for name, text in ((":a", target), (":b", other)):
            translator.over([name]).learn(source, text)
            assert outcome(translator, [source], name, "")[0][0] == text
        folders = [one.folder.name for one in translator._sessions.values()]
        translator.over([":a", ""])
        translator.over([":c"])
        assert sorted(translator._sessions) == [":a", ":c"], "the one that was not named for longest"
        translator._sessions[":a"].used -= system.SESSION_SECONDS + 1
        translator.over([":b"])
        assert sorted(translator._sessions) == [":b", ":c"]
        assert outcome(translator, [source], ":b", "") == before
    assert not translator._sessions and not any(Path(folder).exists() for folder in folders)
