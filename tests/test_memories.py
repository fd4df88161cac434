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
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.joint_ensemble import JointEnsemble
from fairseq_ccpr.decoding.learned_memory import LearnedMemory
from fairseq_ccpr.decoding.mixture import Vote
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnknownMemoryError
from fairseq_ccpr.inference import system
from fairseq_ccpr.inference.learning import learned_memory
from fairseq_ccpr.inference.system import Session
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT, call
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
        (
            lambda: Translator(datastore={"one": stores["cars"], "two": stores["cars"] / ".." / "cars"}),
            "the memories one and two are the same folder",
        ),
        (lambda: Translator(world.other_model, datastore=stores), "was built with another model"),
    ):
        with pytest.raises((ConfigurationError, DatastoreError), match=sentence):
            refused()


def test_what_acts_last_is_written(stores: dict[str, Path], sentences: list[str]) -> None:
    """Also of corrections that differ only in characters that the model does not know."""
    source, session = sentences[0], Session.name_of("", "a")
    with Translator(datastore=stores, replace_unk=True, **KEEN) as translator:
        for one, text in ((translator["bikes"], "ja ☃"), (translator.begin(session), "ja ☂")):
            one.learn(source, text)
        for names, text in (
            ([session, "bikes"], "ja ☂"),
            (["bikes", session], "ja ☃"),
            (["cars", "bikes"], "ja ☃"),
        ):
            assert [one.text for one in translator.translate([source], memory=names)] == [text]


def test_the_sources_of_earlier_corrections_are_read_together_too(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[LearnedMemory]()
    monkeypatch.setattr(LearnedMemory, "identify", lambda memory, read_as: read.append(memory))
    with Translator(datastore=stores, **KEEN) as translator:
        for names in (["cars"], BOTH):
            list(translator.translate(["ja"], memory=names))
        assert {id(one) for one in read} == {id(learned_memory(translator[name])) for name in BOTH}


def test_a_memory_of_a_plug_in_counts_once(
    world: World, stores: dict[str, Path], sentences: list[str], tmp_path: Path
) -> None:
    tokens = TokenDatastore(world.datastore)
    symbols = tokens.read_symbols()
    (tmp_path / "text").write_text(" ".join(symbols[token] for token in tokens.values))
    asked = {"user_dir": ROOT / "user_dir", "task": "translation_bigrams", "bigram_text": tmp_path / "text"}
    with Translator(datastore=stores, **KEEN, **asked, bigram_lambda=0.5) as translator:
        alone = outcome(translator, sentences, "cars")
        assert alone != outcome(Translator(datastore=stores["cars"], **KEEN), sentences)
        for names in (("cars", "empty"), ("empty", "cars")):
            assert outcome(translator, sentences, *names) == alone


def test_the_first_closes_all_and_another_itself(stores: dict[str, Path]) -> None:
    translator = Translator(datastore=stores, **KEEN)
    translator["bikes"].close()
    assert [one.closed for one in translator.named.values()] == [False, True, False]
    with pytest.raises(ConfigurationError, match="was closed"):
        translator.translate(["ja"], memory=BOTH)
    translator.close()
    assert all(one.closed for one in translator.named.values())


def test_sessions_begin_to_learn_and_are_gone_when_too_old(
    world: World, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, target), (_, other) = list(read_pairs(world.folder / "test.tsv"))[2:4]
    monkeypatch.setattr(system, "MOST_OF_OWNER", 2)
    monkeypatch.setattr(system, "MOST_SESSIONS", 3)
    a, b, c = (Session.name_of("me", name) for name in "abc")
    with Translator(datastore=stores["cars"], **KEEN) as translator:
        before = outcome(translator, [source], a, "")
        assert before == outcome(translator, [source]) and not translator._sessions
        with pytest.raises(UnknownMemoryError, match="there is no session a: it begins when it first learns"):
            translator.over([a])
        for name, text in ((a, target), (b, other)):
            translator.begin(name).learn(source, text)
            monkeypatch.setattr(fingerprint, "of_parameters", None)  # the model is known from now on
            assert outcome(translator, [source], name, "")[0][0] == text
        folders = [one.folder.name for one in translator._sessions.values()]
        with pytest.raises(DatastoreError, match="2 of your sessions are open, and 2 in all: end one"):
            translator.begin(c)
        translator.begin(Session.name_of("you", "a"))
        with pytest.raises(DatastoreError, match="0 of your sessions are open, and 3 in all"):
            translator.begin(Session.name_of("they", "a"))
        assert outcome(translator, [source], a, "")[0][0] == target, "nobody ends those of others"
        translator._sessions[a].used -= system.SESSION_SECONDS + 1
        assert outcome(translator, [source], a, "") == before and a not in translator._sessions
        translator.begin(c)
    assert not translator._sessions and not any(Path(folder).exists() for folder in folders)


def test_terms_that_cannot_be_written_are_refused_however_many(stores: dict[str, Path]) -> None:
    with Translator(datastore=stores["cars"], **KEEN) as translator:
        session = translator.begin(Session.name_of("", "a"))
        refused = session.learn_terms([(f"Wort {number}", "☃ in ☂ and 世界") for number in range(300)])
        assert len(refused) == 300 and all("cannot write" in str(one) for one in refused)
        (learned,) = session.learn_terms([("Haus", "ark")])
        assert "ark" in outcome(translator, ["Wo ist das Haus?"], session.name, "")[0][0]
        assert session.terms == {learned.id}


def test_a_session_is_not_explained(stores: dict[str, Path]) -> None:
    with Translator(datastore=stores["cars"], **KEEN) as translator:
        session = translator.begin(Session.name_of("", "a"))
        with pytest.raises(
            ConfigurationError, match="a session, which may have terms, works in beam search alone"
        ):
            session.explain("ja")


def test_a_session_is_for_one_model(world: World, stores: dict[str, Path]) -> None:
    with (
        Translator(f"{world.model}:{world.model}", datastore=stores["cars"], **KEEN) as translator,
        pytest.raises(ConfigurationError, match="a session is for one model, and --path names 2"),
    ):
        translator.begin(Session.name_of("", "a"))
