"""The recipe of retrieved sentences: a memory of each source sentence alone, on real models and phrases."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from tests.helpers import ROOT, call, equal, refused
from tests.small_models import World

TASK = ["--user-dir", ROOT / "scripts/recipes/retrieved_sentences", "--task", "translation_retrieved_sentences"]
WORDS = [*TASK, "--sentences-count", 5, "--sentences-k", 4, "--sentences-temperature", 5]


def test_it_decodes_and_scores(decode: Callable, phrases: list[object], check_rescoring: Callable) -> None:
    words = [*phrases, *WORDS, "--beam", 2]
    together = decode(*words)
    assert equal(decode(*words, "--sentences-lambda", 0), silent := decode(*phrases, "--beam", 2))
    assert not equal(together, silent, tolerance=1e-2)
    assert equal(decode(*words, "--batch-size", 3), together, tolerance=3e-3)
    check_rescoring(*phrases, *WORDS)


@pytest.mark.parametrize("consent", [1e9, 2.0])
def test_votes_are_those_of_a_plain_search(world: World, phrases: list[object], consent: float) -> None:
    """The nearest tokens of the sentences of a source alone, force-decoded one at a time, in float64."""
    cfg = parse_generation(
        [*world.options("--no-progress-bar"), *map(str, [*phrases, *WORDS, "--sentences-consent", consent])]
    )
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    memory, (model,) = ensemble.memory("sentences"), models
    sample = next(iter(batches(cfg, task, models)))
    with torch.no_grad():
        record = ensemble.force_decode(sample).records["sentences"]
        vote = record.vote(memory, False)
        real = ensemble.real_tokens(sample["target"])
        wanted = memory.ranking.start(sample["net_input"]["src_tokens"])()
        states, _ = model(**sample["net_input"], features_only=True)
        log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)[real]
        queries, owners = states[real].double(), real.nonzero()[:, 0].tolist()
        for row, owner in [*enumerate(owners)][::9]:
            keys, values, ranks = [], [], []
            for rank, ids in enumerate(wanted[owner]):
                inputs = {name: value[owner : owner + 1] for name, value in sample["net_input"].items()}
                inputs["prev_output_tokens"] = torch.cat([torch.tensor([memory.end]), ids[:-1]])[None]
                forced, _ = model(**inputs, features_only=True)
                known = ids != task.target_dictionary.unk()
                keys.append(forced[0, : len(ids)][known].double())
                values.append(ids[known])
                ranks.append(torch.full((int(known.sum()),), rank))
            distances = torch.cdist(queries[row][None], torch.cat(keys))[0].square() + 0.01 * torch.cat(ranks)
            nearest, places = distances.topk(4, largest=False)
            tokens = torch.cat(values)[places]
            able = log_probs[row][tokens] >= log_probs[row].max() - consent
            shares: dict[int, float] = defaultdict(float)
            for token, share in zip(tokens[able].tolist(), torch.softmax(-nearest[able] / 5, 0).tolist()):
                shares[token] += share
            found = {int(v): float(p) for v, p in zip(vote.values[row], vote.log_probs[row].exp()) if p > 0}
            assert found == pytest.approx(shares, abs=2e-3)
            assert float(vote.weight[row]) == (0.5 if shares else 0)


def test_sentences_are_ranked_by_the_phrases_they_have(world: World, phrases: list[object]) -> None:
    cfg = parse_generation([*world.options("--no-progress-bar"), *map(str, [*phrases, *WORDS])])
    task, models = load(cfg)
    memory = task.build_ensemble(models).memory("sentences")
    ranking = memory.ranking
    retriever, sample = ranking.candidates.retriever, next(iter(batches(cfg, task, models)))
    sources = sample["net_input"]["src_tokens"]
    texts = [ranking.candidates.subwords.recover(task.source_dictionary, row) for row in sources]
    strings = [retriever.datastore.phrase(entry)[0] for entry in range(retriever.datastore.section.size)]
    for ids, phrases_of in zip(ranking.start(sources)(), retriever.retrieve(texts)):
        scores: dict[str, float] = defaultdict(float)
        for query in phrases_of:
            best: dict[str, float] = {}
            for one in query.retrieved:
                share = np.log(retriever.datastore.section.sentences / strings.count(one.string))
                best[one.sentence] = max(best.get(one.sentence, -1), one.score * max(share, 0))
            for sentence, value in best.items():
                scores[sentence] += value
        written = {tuple(ranking.candidates.subwords.split(text).ids): score for text, score in scores.items()}
        kept = [written[tuple(one.tolist())] for one in ids]
        assert kept == pytest.approx(sorted(scores.values(), reverse=True)[:5])


def test_it_is_tuned_and_needs_phrases(world: World, phrases: list[object], tmp_path: Path) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, [*phrases, *WORDS])]
    shown = call("tune", *words, "--output", tmp_path / "options").stdout
    assert re.search(r"gain +harm *sentences +phrases$", shown, re.MULTILINE), shown
    refused(call("compare", *world.options(*TASK), check=False), "needs a datastore with phrases")
