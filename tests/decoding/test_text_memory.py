"""The text memory in beam search: what it must leave as it is, what it gains, how it is tuned, learns and is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.memory import Snapshot, Step
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.text_memory import (
    ALPHAS,
    BETA,
    LAST,
    STEPS,
    TOKENS,
    TextBatch,
    TextMemory,
    TextWeight,
)
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.evaluation.test_set import Decodings, SystemOutput, TranslationScores
from fairseq_ccpr.evaluation.tune import Candidate
from fairseq_ccpr.text.pairs import read_pairs
from tests.decoding.test_decoding import SEARCHES
from tests.helpers import call, equal, refused, write_lines
from tests.server.conftest import served
from tests.small_models import World, subword_options


def with_text(store: Path, *options: object) -> list[object]:
    return ["--datastore", store, "--beam", 3, *options]


def test_alpha_of_zero_is_as_without_text(decode: Callable, build_text: Callable, references: Path) -> None:
    store = build_text(references, False)
    plain = decode("--beam", 3)
    assert equal(decode(*with_text(store, "--text-alpha", 0)), plain)  # to the bit
    assert not equal(decode(*with_text(store, "--text-alpha", 0.5)), plain)


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_every_kind_of_search_has_the_text(decode: Callable, only_text: Path, search: list[object]) -> None:
    """With alpha 0 the model alone, to the bit; with more, something else."""
    words, alone = ["--datastore", only_text, *search, "--text-alpha"], decode(*search, base=True)
    assert equal(decode(*words, 0), alone)
    assert not equal(decode(*words, 0.5), alone, tolerance=1e-2)


def test_prefixes_are_kept_beside_the_text(decode: Callable, only_text: Path) -> None:
    words = ["--datastore", only_text, "--text-alpha", 0.5, "--prefix-size", 2]
    forced, free = decode(*words), decode(*words[:-2])
    firsts = {i: hypotheses[0]["tokens"][:2].tolist() for i, hypotheses in decode(base=True).items()}
    assert all(len({tuple(one["tokens"][:2].tolist()) for one in each}) == 1 for each in forced.values())
    assert any(forced[i][0]["tokens"][:2].tolist() != firsts[i] for i in forced) and not equal(forced, free)


def test_half_precision_and_ensembles_have_the_text(
    world: World, decode: Callable, only_text: Path, tmp_path: Path
) -> None:
    words = ["--datastore", only_text, "--text-alpha", 0.5]
    whole, half = (decode(*words, "--score-reference", *more) for more in ([], ["--fp16"]))
    scores = [
        torch.cat([one[0]["positional_scores"].float() for one in each.values()]) for each in (whole, half)
    ]
    assert 0 < float((scores[0] - scores[1]).abs().median()) < 0.01 and bool(scores[1].isfinite().all())
    shutil.copy(world.model, tmp_path / "again.pt")
    both = ["--path", f"{world.model}:{tmp_path / 'again.pt'}"]
    assert equal(decode(*words, *both), decode(*words), tolerance=2e-3)
    one, other = (
        ["--path", ":".join(map(str, models))] for models in permutations([world.model, world.other_model])
    )
    of_both, turned, alone = decode(*words, *one), decode(*words, *other), decode(*one, base=True)
    assert equal(of_both, turned, tolerance=2e-3) and not equal(of_both, alone, tolerance=1e-2)
    assert equal(decode(*words[:-1], 0, *one), alone)


def test_a_translation_does_not_depend_on_its_batch(
    decode: Callable, build_text: Callable, references: Path, general: Path, check_rescoring: Callable
) -> None:
    store = build_text(references, False, "--against", general)
    together = decode(*with_text(store, "--text-alpha", 0.4))
    assert equal(decode(*with_text(store, "--text-alpha", 0.4, "--batch-size", 1)), together, tolerance=3e-3)
    check_rescoring(
        "--datastore", store, "--text-alpha", 0.4, "--text-foreign", "inf"
    )  # given targets are scored as beam search does


def test_references_help_and_their_words_in_another_order_do_not(
    decode: Callable, build_text: Callable, references: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    lines = references.read_text(encoding="utf-8").splitlines()
    shuffled = write_lines(
        tmp_path / "shuffled", *(" ".join(rng.permutation(line.split())) for line in lines)
    )

    def gain(text: Path) -> float:
        """Mean log p of the references' tokens, beyond that without the text."""
        store = build_text(text, False)
        scored = [decode(*with_text(store, "--text-alpha", alpha, "--score-reference")) for alpha in (0.5, 0)]
        with_it, without = (
            torch.cat([found[0]["positional_scores"] for found in each.values()]) for each in scored
        )
        return float((with_it - without).mean())

    assert gain(references) > 0.3 and gain(shuffled) < gain(references) / 2


def test_the_mass_of_what_is_changed_stays(
    world: World, build_text: Callable, references: Path, general: Path, rng: np.random.Generator
) -> None:
    """In float64, token by token, for flat and for steep distributions."""
    translator = Translator(datastore=build_text(references, True, "--against", general), device="cpu")
    memory: TextMemory = translator.find_memory(TextMemory)
    words = memory.counts.words
    tokens = torch.from_numpy(rng.integers(4, words, (12, 4)))
    tokens[:, 0] = 2
    tokens[:6, 1:] = torch.from_numpy(memory.datastore.sentence(0)[:3].astype(np.int64))
    scale = torch.linspace(0.2, 6, 12).unsqueeze(1)
    log_probs = torch.from_numpy(rng.normal(size=(12, words)).astype(np.float32) * scale.numpy()).log_softmax(
        1
    )
    fused = TextBatch(memory).rescore(Step(tokens, Distribution(log_probs.clone())))
    torch.testing.assert_close(fused.exp().sum(1), torch.ones(12))
    everything = memory.counts.look_up(
        tokens, torch.arange(12).repeat_interleave(words), torch.arange(words).repeat(12)
    )
    ratios = (everything.text - memory.settings.beta * everything.general).view(12, words).double()
    for row in range(12):
        p = log_probs[row].double()
        steps = ((log_probs[row].max() - log_probs[row]) * STEPS).long()
        count = max((last for last in range(LAST) if (steps <= last).sum() < TOKENS), default=-1)
        some = (steps <= count).nonzero().squeeze(1)
        some = some[(some != 0) & (some != 1)]  # neither the beginning nor padding
        expected = p.clone()
        if everything.length[row] > 0 and len(some):
            scores = p[some] + memory.settings.alpha * ratios[row, some]
            expected[some] = scores - scores.logsumexp(0) + p[some].logsumexp(0)
        torch.testing.assert_close(fused[row].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_tuning_stores_what_decoding_takes(
    world: World, build_text: Callable, references: Path, general: Path, alone: bool, half: bool
) -> None:
    """Where the text translates best with more of alpha, or with less, as some scores have it."""
    store = build_text(references, alone, "--against", general)

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        bleu = {one.name: one.ensemble.find(TextMemory).settings.alpha for one in tried}
        bleu = {name: 2 - alpha if half and alpha else alpha for name, alpha in bleu.items()} | {"base": 1e-9}
        scores = {n: TranslationScores(value, 0.0, "", "") for n, value in bleu.items()}
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    words = [*world.options("--no-progress-bar"), *subword_options(world)]
    words[words.index(str(world.datastore))] = str(store)
    del words[words.index("--tokens-temperature") : words.index("--tokens-temperature") + 2]
    with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
        shown = call("tune", *words).stdout
    assert re.search(r"model alone +-\S+\n +text +\+[\d.]*[1-9]", shown), (
        shown
    )  # references in the text are likelier with it
    tuned = json.loads((store / "tuned.json").read_text())["tuned"]["text" if alone else "token+text"]
    translator = Translator(datastore=store, max_len_b=25, device="cpu")
    memory = translator.find_memory(TextMemory)
    assert tuned["settings"]["text"] == {"alpha": memory.settings.alpha, "beta": BETA}
    assert memory.settings.alpha in [alpha * (0.5 if half else 1.5) for alpha in ALPHAS]
    assert not torch.equal(memory.weight.output.weight, TextWeight().output.weight)
    assert f"alpha:{memory.settings.alpha}|beta:{BETA}|foreign:10.0|weight:" in str(translator.signature)


@pytest.mark.full
def test_for_speed_the_text_is_left_out_where_it_brings_little(
    world: World, build_text: Callable, references: Path, tmp_path: Path
) -> None:
    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        out = {one.name: not one.ensemble.find(TextMemory).settings.alpha for one in tried} | {"base": False}
        scores = {name: TranslationScores(5 - 0.2 * without, 0.0, "", "") for name, without in out.items()}
        scores["base"] = TranslationScores(1.0, 0.0, "", "")
        seconds = {n: 1 - 0.1 * one for n, one in out.items()}
        return scores, seconds, Decodings(dict.fromkeys(out, SystemOutput()))

    words = world.options(
        "--no-progress-bar", "--datastore", build_text(references, False), *subword_options(world)
    )
    for prefer, left_out in (("speed", True), ("quality", False)):
        with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
            call("tune", *words, "--combiner", "fixed", "--prefer", prefer, "--output", tmp_path / prefer)
        assert ("--text-alpha 0 " in (tmp_path / prefer).read_text()) == left_out


def test_what_is_learned_counts_and_what_is_forgotten_does_not(
    world: World, build_text: Callable, references: Path
) -> None:
    store, pairs = build_text(references, False), list(read_pairs(world.folder / "test.tsv"))
    options = {
        "max_len_b": 25,
        "device": "cpu",
        "tokens_lambda": 0,
        "text_alpha": 1.0,
    }  # through the text alone
    translator = Translator(datastore=store, **options)
    sources, target = (
        [source for source, _ in pairs[:3]],
        "The ark of the covenant stood beyond the river of Jordan.",
    )

    def outcome() -> list[tuple[str, float]]:
        return [(one.text, one.score) for one in translator.translate(sources)]

    before = outcome()
    number = translator.learn("Etwas anderes.", target).id
    memory, ensemble = translator.find_memory(TextMemory), translator.ensemble
    assert memory is not None and ensemble is not None
    begun = [memory.begin(torch.zeros(1, 1), one) for one in (Snapshot(), ensemble.snapshot())]
    assert [bool(batch.memory.counts.more) for batch in begun] == [False, True]  # a snapshot counts
    assert ensemble.now().find(TextMemory).counts.more and not memory.counts.more  # type: ignore[union-attr]
    learned = outcome()
    translator.learn("Etwas anderes.", "Now go down.")  # which replaces it
    (other,) = (translator.memory()[0],)
    replaced = outcome()
    assert not translator.forget(number) and outcome() == replaced != learned
    translator.forget(other.id)
    assert outcome() == before != learned


def test_bad_options_are_refused(world: World, build_text: Callable, references: Path) -> None:
    store = build_text(references)
    words = [*world.options(), "--text-beta", 0.5]
    words[words.index(str(world.datastore))] = str(store)
    refused(
        call("fairseq-generate", *words, check=False),
        "--text-beta is 0.5, but .* was built without general text",
    )
    refused(
        call("fairseq-generate", *words[:-2], "--text-alpha", -1, check=False),
        "--text-alpha is -1.0: a weight of at least 0 is needed",
    )
    shown = call("inspect", store).stdout
    assert re.search(r"text +44 sentences", shown), shown


def test_an_explanation_shows_what_the_text_has(world: World, build_text: Callable, references: Path) -> None:
    translator = Translator(datastore=build_text(references), max_len_b=25, device="cpu", text_alpha=1.0)
    sources = [source for source, _ in list(read_pairs(world.folder / "test.tsv"))[:3]]
    explanation = translator.explain(sources)
    supported = [
        (one, token) for one in explanation.sentences for token in one.tokens if token.text is not None
    ]
    assert supported
    for sentence, token in supported:
        word = sentence.translation[token.start : token.end]
        assert 0 < len(token.text.places) <= token.text.count and token.text.context
        for found in token.text.places:
            assert explanation.texts[found.sentence][found.start : found.end] == word
            assert found.symbol == token.symbol
            assert token.text.context.split()[-1] in explanation.texts[found.sentence][: found.start]
    with served(translator) as server:
        status, answer = server.ask("/explain", "POST", q=sources[0])
        assert status == 200 and any(token["text"] for one in answer["sentences"] for token in one["tokens"])


def test_text_that_was_added_to_a_tuned_datastore_waits_for_tuning(
    world: World, build_text: Callable, references: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    words = [*world.options("--no-progress-bar"), *subword_options(world)]
    words[words.index(str(world.datastore))] = str(store)
    call("tune", *words)
    before = Translator(datastore=store, max_len_b=25, device="cpu")
    other = build_text(references, False)
    for name in ("tuned.json", *(path.name for path in store.glob("trust-*"))):
        shutil.copy(store / name, other / name)
    after = Translator(datastore=other, max_len_b=25, device="cpu")
    assert after.find_memory(TextMemory).settings.alpha == 0
    assert after.find_memory(TokenMemory).settings == before.find_memory(TokenMemory).settings
    sources = [source for source, _ in list(read_pairs(world.folder / "test.tsv"))[:4]]
    found = [[(one.text, one.score) for one in each.translate(sources)] for each in (before, after)]
    assert found[0] == found[1]


@pytest.mark.full
def test_text_is_from_then_on_for_the_model_that_it_was_tuned_with(
    world: World, build_text: Callable, references: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = build_text(references), tmp_path / "other.pt"
    state = torch.load(world.model, map_location="cpu")
    name = next(name for name in state["model"] if name.endswith("decoder.layers.0.fc1.weight"))
    state["model"][name] = state["model"][name] * 1.25
    torch.save(state, other)
    words = ["--datastore", store, "--cpu", "--no-progress-bar", "--max-len-b", 20]

    def scored(trial: Any, tried: list[Candidate], *others: Any) -> Any:
        # the text helps, in any tiny model
        bleu = {"base": 1.0, **dict.fromkeys((one.name for one in tried), 2.0)}
        scores = {n: TranslationScores(value, 0.0, "", "") for n, value in bleu.items()}
        return scores, dict.fromkeys(bleu, 1.0), Decodings(dict.fromkeys(bleu, SystemOutput()))

    with patch("fairseq_ccpr.evaluation.tune.Trial._decode", scored):
        call("tune", world.data_bin, *words, "--path", other, "--also", f"{world.data_bin}:test", "--bf16")
    assert f"by {other}" in call("inspect", store).stdout
    Translator(datastore=store, device="cpu")
    assert "trust was trained with the model" not in caplog.text
    Translator(datastore=store, path=world.model, device="cpu")
    assert re.search(
        r"trust was trained with the model [0-9a-f]{12}, and this is [0-9a-f]{12}: tune again", caplog.text
    )


def test_an_empty_memory_has_its_text(
    world: World, build_text: Callable, references: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    where = ["--path", world.model, "--data", world.data_bin, *subword_options(world), "--output", store]
    call("build memory", *where)
    call("build text", references, *where)
    translator = Translator(datastore=store, max_len_b=25, device="cpu")
    assert (
        translator.find_memory(TextMemory).settings.alpha > 0
        and translator.find_memory(TokenMemory).settings.k == 1
    )
