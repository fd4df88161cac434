"""What was learned for the very sentence comes out, whatever the settings; for all others nothing changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.decoding.correction_memory import (
    AFTER_END,
    END_COST,
    WEIGHT,
    CorrectionBatch,
    CorrectionMemory,
)
from fairseq_ccpr.decoding.memory import Step
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.inference.system import encode
from fairseq_ccpr.text.pairs import read_pairs
from tests.small_models import World

END, WORDS = 2, 12


@pytest.fixture
def store(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.datastore, tmp_path / "store"))


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))[:8]


@pytest.mark.parametrize("settings", [{}, {"tokens_k": 1, "tokens_lambda": 0.1}, {"beam": 1}], ids=str)
def test_a_correction_comes_out_as_it_was_learned(
    store: Path, pairs: list[tuple[str, str]], settings: dict[str, Any]
) -> None:
    """With the defaults of a datastore that nobody tuned, in batches with other sentences, also after compacting."""
    sources = [source for source, _ in pairs]
    wanted = [target for _, target in pairs[4:]]  # of other sentences
    with Translator(datastore=store, device="cpu", **settings) as translator:
        before = [(one.text, one.score) for one in translator.translate(sources)]
        ids = [translator.learn(source, target).id for source, target in zip(sources, wanted)]
        assert [one.text for one in translator.translate(sources)][:4] == wanted
        assert [next(iter(translator.translate([source]))).text for source in sources[:4]] == wanted
        assert translator.explain(sources[0]).sentences[0].tokens
        translator.compact()
        assert [one.text for one in translator.translate(sources)][:4] == wanted
        translator.forget(*ids)
        assert [(one.text, one.score) for one in translator.translate(sources)] == before


@pytest.mark.parametrize("target", ["He  went to 東 – {it}…", "Seite\u00a05: He came", "Ｈe came"])
def test_a_correction_keeps_its_characters(store: Path, target: str) -> None:
    """Also those that subwords do not tell, or that are unknown; not for a source with other unknown characters."""
    with Translator(datastore=store, device="cpu") as translator:
        translator.learn("Er ging zu 東", target)
        (found, other) = translator.translate(["Er ging zu 東", "Er ging zu 京"])
        assert found.text == target.replace("  ", " ") and "東" not in other.text


def test_sources_that_differ_in_unknown_characters_have_their_own(
    store: Path, pairs: list[tuple[str, str]]
) -> None:
    """Where the text is given; fairseq-generate, which has subwords alone, takes the one that was learned last."""
    sources, (one, other) = ["Er ging zu 東", "Er ging zu 京"], [target for _, target in pairs[:2]]
    with Translator(datastore=store, device="cpu") as translator:
        first = translator.learn(sources[0], one)
        second = translator.learn(sources[1], other)
        assert first.replaced is second.replaced is None
        assert [found.text for found in translator.translate(sources)] == [one, other]
        translator.learn(sources[0], one)
        memory, batch = translator.find_memory(CorrectionMemory), encode(sources[1], translator.task)
        assert memory.target(batch, None).tolist() == memory.target(batch, sources[0]).tolist()
        assert memory.target(batch, None).tolist() != memory.target(batch, sources[1]).tolist()


def test_corrections_count_where_tuning_set_the_weight_to_zero(
    store: Path, pairs: list[tuple[str, str]]
) -> None:
    write_tuned({"token": TokenDatastore(store)}, {"tokens": {"lambda_": 0.0}}, "tuned before")
    with Translator(datastore=store, device="cpu") as translator:
        plain = [
            one.text for one in translator.translate([source for source, _ in pairs[:2]], retrieve=False)
        ]
        assert [one.text for one in translator.translate([source for source, _ in pairs[:2]])] == plain
        translator.learn(pairs[0][0], pairs[3][1])
        assert next(iter(translator.translate([pairs[0][0]]))).text == pairs[3][1]


def test_a_weight_of_zero_for_tokens_is_the_model_alone(store: Path, pairs: list[tuple[str, str]]) -> None:
    with Translator(datastore=store, device="cpu", tokens_lambda=0) as translator:
        plain = [(one.text, one.score) for one in translator.translate([pairs[0][0]], retrieve=False)]
        translator.learn(*pairs[0])
        assert [(one.text, one.score) for one in translator.translate([pairs[0][0]])] == plain


def test_scores_of_given_targets_are_those_of_beam_search(store: Path, pairs: list[tuple[str, str]]) -> None:
    with Translator(datastore=store, device="cpu") as translator:
        translator.learn(pairs[0][0], pairs[1][1])
        (found,) = translator.translate([pairs[0][0]])
        tokens = translator.explain(pairs[0][0]).sentences[0].tokens
        np.testing.assert_allclose([np.log(one.probability) for one in tokens], found.token_scores, atol=2e-3)


def test_it_is_followed_and_left_as_a_plain_loop_says(rng: np.random.Generator) -> None:
    """Hypotheses of three sentences, one of which has no correction, through steps at which beams are reordered."""
    memory = CorrectionMemory(*[None] * 3, END)  # type: ignore[arg-type]
    targets = [[5, 6, 7, END], [], [5, END]]
    table = torch.full((3, 5), AFTER_END)
    for row, target in zip(table, targets):
        row[: len(target)] = torch.tensor(target, dtype=torch.int64)
    batch = CorrectionBatch(memory, table, table, torch.arange(3), torch.ones(3, dtype=torch.bool))
    rows, hypotheses = np.repeat(np.arange(3), 4), torch.full((12, 1), END)
    batch = batch.reorder(torch.from_numpy(rows))
    for step in range(6):
        log_probs = torch.from_numpy(rng.normal(size=(12, WORDS))).log_softmax(1)
        found = batch.rescore(Step(hypotheses, Distribution(log_probs.float())))
        found = found if found is not None else log_probs.float()  # which stay as they are
        for row, before, after, hypothesis in zip(rows, log_probs, found, hypotheses[:, 1:].tolist()):
            target, expected = targets[row], before.exp()
            if len(hypothesis) < len(target):
                if hypothesis == target[: len(hypothesis)]:
                    expected = expected * (1 - WEIGHT)
                    expected[target[len(hypothesis)]] += WEIGHT
                if target[len(hypothesis)] != END:
                    expected[END] *= np.exp(-END_COST)
            torch.testing.assert_close(after.exp().double(), expected, rtol=1e-5, atol=1e-9)
        order = np.concatenate([np.flatnonzero(rows == row)[rng.integers(4, size=4)] for row in range(3)])
        follow = [
            targets[row][step] if step < len(targets[row]) and rng.random() < 0.7 else 9
            for row in rows[order]
        ]
        hypotheses = torch.cat([hypotheses[torch.from_numpy(order)], torch.tensor(follow).unsqueeze(1)], 1)
        batch, rows = batch.reorder(torch.from_numpy(order)), rows[order]
