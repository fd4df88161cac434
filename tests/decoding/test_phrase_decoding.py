"""Phrases inside beam search, with and without tokens: the invariants, on real models."""

from __future__ import annotations

import difflib
import gc
import itertools
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.decoding.breakdown import break_down
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import Candidates, PhraseCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, RetrievedEntries
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.evaluation.translation.test_set import batches, load
from fairseq_ccpr.evaluation.tuning.held_out import force_decode_text
from fairseq_ccpr.evaluation.tuning.phrase_grid import References
from fairseq_ccpr.inference.arguments import parse_generation
from fairseq_ccpr.storage.files import MANIFEST
from fairseq_ccpr.text.decoder_subwords import after_sign
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.timing import DECODER, FINDING, PHRASES, PhaseTimer
from tests.helpers import call, edit_manifest, equal, refused
from tests.small_models import PAIRS, Ccpr, World, other_encoder

SEARCHES = [
    [],
    ["--lenpen", 0.5, "--nbest", 3],
    ["--prefix-size", 2],
    ["--sampling", "--sampling-topk", 5, "--nbest", 5],
    ["--diverse-beam-groups", 5],
    ["--beam", 1],
    ["--score-reference"],
]


def load_ensemble(world: World, words: list[object]) -> tuple[Any, Any, list[Any], Any]:
    """The settings, the task, its models, and these with their memories."""
    cfg = parse_generation(world.options("--no-progress-bar", *words))
    task, models = load(cfg)
    return cfg, task, models, task.build_ensemble(models)


def mixed_and_phrase_vote(ensemble: RetrievalEnsemble, sample: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """log p at the real tokens of the references, and what the phrase memory says there."""
    forced = ensemble.force_decode(sample)
    return ensemble.mix(forced.log_probs[forced.real], forced.votes), forced.phrase_vote


@contextmanager
def retrieving(texts: list[str], choose: Callable[[str], int], size: int = 3) -> Iterator[None]:
    """In the place of what the encoder finds, the phrases of a text that is chosen for each source sentence.

    Texts are cut in phrases of some words, each of which is retrieved with certainty for a query of its own.
    """
    places = []
    for number, text in enumerate(texts):
        words = word_spans(text)
        for first in range(0, len(words), size):
            places.append([number, words[first][0], words[first : first + size][-1][1]])

    def phrase(entry: int) -> tuple[str, str, int, int]:
        number, start, end = places[entry]
        return texts[number][start:end], texts[number], start, end

    spans = np.array(places, np.int32).reshape(-1, 3)
    store = SimpleNamespace(spans=spans, sentence=texts.__getitem__, phrase=phrase)

    def start(self: PhraseRetriever, sources: list[str], *_: None) -> Callable[[], RetrievedEntries]:
        self.datastore = store
        found = [np.flatnonzero(store.spans[:, 0] == choose(source)) for source in sources]
        spans = np.zeros((sum(map(len, found)), 3), np.int32)
        spans[:, 0] = np.repeat(np.arange(len(sources)), [len(entries) for entries in found])
        entries = np.concatenate(found)[:, None]
        return lambda: RetrievedEntries(spans, np.ones(len(spans), np.float32), entries, np.ones(entries.shape))

    unwritten = patch("fairseq_ccpr.decoding.phrase_candidates.open_or_write", return_value=None)
    with patch.object(PhraseRetriever, "start", start), unwritten:
        yield


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_share_of_zero_equals_stock_fairseq_and_token_retrieval_to_the_bit(
    decode: Callable, phrases: list[object], joint: list[object], search: list
) -> None:
    assert equal(decode(*phrases, *search, "--phrase-lambda", 0), decode(*search, base=True))
    assert equal(decode(*joint, *search, "--phrase-lambda", 0), decode(*search, "--knn-lambda", 0.4))


def test_parts_in_two_folders_are_as_in_one(
    world: World, decode: Callable, both: Path, phrase_store: Path, joint: list[object]
) -> None:
    apart = [*joint, "--datastore", f"{world.datastore}:{phrase_store}"]
    assert equal(decode(*apart), decode(*joint))
    twice = call("fairseq-generate", *world.options(*joint, "--datastore", f"{world.datastore}:{both}"), check=False)
    refused(twice, "--datastore names two token parts, in .*datastore and in .*both")


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_phrases_change_every_kind_of_search(decode: Callable, phrases: list[object], search: list) -> None:
    changed = decode(*phrases, *search, "--phrase-lambda", 0.9)
    assert not equal(changed, decode(*search, base=True), tolerance=1e-2)


def test_no_phrases_at_all_is_token_retrieval_to_the_bit(decode: Callable, joint: list[object]) -> None:
    with retrieving([], lambda source: 0):
        assert equal(decode(*joint), decode("--knn-lambda", 0.4))


def test_tokens_without_weight_leave_phrases_as_they_are_alone_to_the_bit(
    decode: Callable, phrases: list[object], joint: list[object]
) -> None:
    alone = decode(*phrases, "--phrase-k", 3)
    assert equal(decode(*joint, "--knn-lambda", 0), alone) and not equal(decode(*joint), alone)


@pytest.mark.parametrize("kind", ["phrases", "joint"])
def test_phrases_do_not_depend_on_the_batch(decode: Callable, kind: str, request: pytest.FixtureRequest) -> None:
    words = [*request.getfixturevalue(kind), "--phrase-lambda", 0.8]
    together = decode(*words, "--batch-size", 32)
    for size in (1, 7):
        assert equal(decode(*words, "--batch-size", size), together, tolerance=3e-3)


@pytest.mark.parametrize("reach", [0, 16])
def test_scores_of_beam_search_are_those_of_one_pass_over_what_it_wrote(
    world: World, decode: Callable, joint: list[object], reach: int
) -> None:
    """Prefixes and coverage follow the beam, and the batch as it shrinks."""
    words = [*joint, "--phrase-reach", reach, "--phrase-lambda", 0.8]
    found = decode(*words)
    options = ["--max-tokens", 2000, "--gen-subset", "test", *words]
    cfg, task, models, ensemble = load_ensemble(world, options)
    coming = 0
    for sample in batches(cfg, task, models):
        best = [found[i][0] for i in sample["id"].tolist()]
        traced = break_down(ensemble, sample, [one["tokens"] for one in best], task.target_dictionary)
        assert torch.allclose(traced.mixed, torch.cat([one["positional_scores"] for one in best]), atol=3e-3)
        terms = [
            torch.log1p(-traced.token_weight - traced.phrase_weight) + traced.model,
            traced.token_weight.log() + traced.token_memory,
            traced.phrase_weight.log() + traced.phrase_memory,
        ]
        assert torch.allclose(torch.stack(terms).logsumexp(dim=0), traced.mixed, atol=1e-4)
        assert (traced.token_weight + traced.phrase_weight).max() <= 0.9 + 1e-6
        coming += int((traced.phrase_memory > -1).sum())
    assert coming > 10


def test_probabilities_sum_to_one_and_phrases_give_none_to_specials(world: World, joint: list[object]) -> None:
    cfg, task, models, ensemble = load_ensemble(world, [*joint, "--phrase-lambda", 0.9])
    dictionary = task.target_dictionary
    for sample in batches(cfg, task, models):
        mixed, said = mixed_and_phrase_vote(ensemble, sample)
        assert torch.allclose(mixed.exp().sum(dim=1), torch.ones(len(mixed)), atol=1e-4)
        for special in (dictionary.pad(), dictionary.bos(), dictionary.eos(), dictionary.unk()):
            assert said.log_probs[said.values == special].eq(float("-inf")).all()
        once = torch.zeros(len(said.values), len(dictionary)).scatter(1, said.values, said.log_probs.exp())
        some = said.weight > 0
        assert some.any() and torch.allclose(once[some].sum(dim=1), torch.ones(int(some.sum())), atol=1e-4)


def test_phrases_of_the_references_help_and_those_of_other_sentences_do_not(
    world: World, decode: Callable, phrases: list[object]
) -> None:
    pairs = list(read_pairs(world.folder / "test.tsv"))
    words = [*phrases, "--phrase-lambda", 0.8, "--beam", 5]
    cfg = parse_generation(world.options("--no-progress-bar", *words))
    task, _ = load(cfg)
    references = {i: task.dataset("test").tgt[i] for i in range(PAIRS["test"])}

    def overlap(found: dict) -> float:
        """Share of the references' tokens that the hypotheses have."""
        common = sum(len(set(references[i].tolist()) & set(found[i][0]["tokens"].tolist())) for i in found)
        return common / sum(len(set(tokens.tolist())) for tokens in references.values())

    base = overlap(decode(base=True))
    sources = [source for source, _ in pairs]

    def number(text: str) -> int:
        """Which sentence it is, though unknown pieces are missing from it."""
        return sources.index(difflib.get_close_matches(text, sources, 1, 0)[0])

    targets = [target for _, target in pairs]
    with retrieving(targets, number):
        assert overlap(decode(*words)) > base + 0.1
    random.Random(1).shuffle(targets)
    with retrieving(targets, number):
        assert overlap(decode(*words)) < base + 0.05


def test_ensembles_take_phrases_beside_tokens(world: World, decode: Callable, joint: list[object]) -> None:
    members = ["--path", f"{world.other_model}:{world.model}"]
    assert equal(decode(*joint, *members, "--phrase-lambda", 0), decode(*members, "--knn-lambda", 0.4))
    changed = decode(*joint, *members, "--phrase-lambda", 0.9)
    assert not equal(changed, decode(*members, "--knn-lambda", 0.4), tolerance=1e-2)


def test_one_retrieval_a_sentence(decode: Callable, phrases: list[object]) -> None:
    asked: list[str] = []
    start = PhraseRetriever.start

    def watched(self: PhraseRetriever, texts: list[str], *_: None) -> Callable[[], RetrievedEntries]:
        asked.extend(texts)
        return start(self, texts)

    with patch.object(PhraseRetriever, "start", watched):
        decode(*phrases, "--batch-size", 8)
    assert len(asked) == PAIRS["test"]


def test_time_of_phrases_is_told_apart(decode: Callable, phrases: list[object]) -> None:
    timer, spent = PhaseTimer(torch.device("cpu")), []
    real = PhraseCandidates.start

    def watched(self: PhraseCandidates, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = real(self, *arguments)
        spent.append(time.perf_counter() - start)
        return found

    with timer, patch.object(PhraseCandidates, "start", watched):
        decode(*phrases)
    assert 0 < sum(spent) < timer.seconds[FINDING]
    assert timer.seconds[PHRASES] > 0 and timer.calls[PHRASES] > timer.calls[DECODER]


def test_bf16_is_said_and_changes_little(
    decode: Callable, phrases: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = decode(*phrases)
    assert ",bf16|" not in caplog.text
    half = decode(*phrases, "--phrase-bf16")
    assert ",bf16|" in caplog.text
    assert not equal(half, whole)
    best = [(whole[number][0]["tokens"].tolist(), half[number][0]["tokens"].tolist()) for number in whole]
    assert sum(one == other for one, other in best) > 0.7 * len(best)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_phrases_are_made(enabled: bool) -> None:
    seen: list[bool] = []

    def make(*_: object) -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ZeroDivisionError

    candidates: Any = SimpleNamespace(
        start=lambda sources, *_: make, table=make, retriever=SimpleNamespace(index=SimpleNamespace(remote=False))
    )
    memory = PhraseMemory(candidates, PhraseSettings(), PhraseVotes(), torch.device("cpu"))
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            memory.start(torch.ones(1, 1))()
        assert seen == [False, False] and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_candidates_are_what_the_decoder_writes_of_what_was_retrieved(world: World, joint: list[object]) -> None:
    """Against cutting every string out of its sentence, and writing it anew where its pieces are those after a sign, or its
    source stands after one; most are asked for more than once."""
    words = [*joint, "--phrase-k", 20, "--phrase-min-similarity", 0, "--phrase-threshold", 0]
    cfg, task, models, ensemble = load_ensemble(world, words)
    candidates, seen, elsewhere = ensemble.phrases.candidates, 0, 0
    subwords = candidates.subwords
    samples = [sample["net_input"]["src_tokens"] for sample in batches(cfg, task, models)]
    sources = [subwords.recover(task.source_dictionary, row) for sample in samples for row in sample]
    cut = subwords.slice
    found = [one for sample in samples for one in candidates.start(sample)()]
    for sentence, source in zip(found, sources, strict=True):
        wanted = []
        for number, query in enumerate(sentence.queries):
            written: set[tuple[int, ...]] = set()
            for rank, phrase in enumerate(query.retrieved):
                assert phrase.string == phrase.sentence[phrase.start : phrase.end]
                tokens = tuple(cut(subwords.split(phrase.sentence), phrase.start, phrase.end) or ())
                if not tokens or len(tokens) > MAX_SUBWORDS or tokens in written:
                    continue
                written.add(tokens)
                wanted.append((tokens, number, rank, phrase.score))
                goes_on = bool(subwords.borders.going_on[tokens[0]])
                if goes_on or after_sign(source, query.start):
                    before, rest = "" if goes_on else '"', phrase.sentence[phrase.start :]
                    pieces, size = subwords.split(before + rest), len(phrase.string)
                    other = tuple(cut(pieces, len(before), len(before) + size) or ())
                    if other and other != tokens:
                        wanted.append((other, number, rank, phrase.score))
                        elsewhere += 1
            seen += len(query.retrieved)
        of = sentence.candidates
        made = [tuple(row[:length]) for row, length in zip(of.tokens.tolist(), of.lengths.tolist())]
        assert all((row[extent:] == NO_TOKEN).all() for row, extent in zip(of.tokens, of.extents))
        assert all(lengths <= extent <= lengths + 16 for lengths, extent in zip(of.lengths, of.extents))
        assert [*zip(made, of.queries.tolist(), of.ranks.tolist())] == [one[:3] for one in wanted]
        assert of.scores.tolist() == pytest.approx([score for *_, score in wanted])
    entries = {phrase.entry for sentence in found for query in sentence.queries for phrase in query.retrieved}
    assert 0 < elsewhere < len(entries) < seen / 2


def test_a_table_has_every_candidate_in_its_place(world: World, joint: list[object]) -> None:
    """Against a plain loop: sentences with no, few and many phrases, with letters and without."""
    cfg = parse_generation([*world.options(), *map(str, joint)])
    task, models = load(cfg)
    task.build_tokenizer(cfg.tokenizer)
    task.build_bpe(cfg.bpe)
    candidates = task.build_generator(models, cfg.generation).model.phrases.candidates
    letters = [any(map(str.isalnum, symbol)) for symbol in task.target_dictionary.symbols]
    batch = []
    for queries in (3, 1, 0):
        phrases = [
            (random.sample(range(4, len(letters)), random.randint(1, 6)), random.randint(0, 3), query, rank, random.random())
            for query in range(queries) for rank in random.sample(range(5), 3)
        ]  # fmt: skip
        longest = random.randint(6, 9)
        tokens = [ids + [NO_TOKEN] * (longest - len(ids)) for ids, *_ in phrases]
        columns = [[max(1, len(ids) - after), len(ids), *numbers] for ids, after, *numbers in phrases]
        lengths, extents, of_query, ranks, scores = np.array(columns).reshape(-1, 5).T
        made = Candidates(
            np.array(tokens, np.int32).reshape(-1, longest), lengths.astype(int), extents.astype(int), of_query.astype(int),
            ranks.astype(int), scores.astype(np.float32),
        )  # fmt: skip
        batch.append((phrases, SentencePhrases(made, list, 0)))
    table = candidates.table([found for _, found in batch])
    for row, (phrases, _) in enumerate(batch):
        whole = [max(1, len(ids) - after) for ids, after, *_ in phrases]
        assert table.lengths[row].tolist() == whole + [0] * (9 - len(phrases))
        for lane, (ids, _, query, _, score) in enumerate(phrases):
            first = int(table.phrases[row, lane, 5])
            assert table.following[first : first + len(ids), 0].tolist() == ids
            assert int(table.queries[row, lane]) == query and float(table.scores[row, lane]) == pytest.approx(score)
            begun = next((n for n, t in enumerate(ids[: whole[lane]], 1) if letters[t]), whole[lane])
            assert table.phrases[row, lane, 1] == begun


def options_in(words: list[str], wanted: list[str]) -> bool:
    """Whether a command line has these options with these values."""
    pairs = [*itertools.pairwise(words)]
    return all(pair in pairs for pair in zip(wanted[::2], wanted[1::2]))


def test_tuning_chooses_tokens_and_phrases_together(world: World, joint: list[object], tmp_path: Path) -> None:
    words = [*world.options("--no-progress-bar"), *map(str, joint)]
    shaping = ["--phrase-threshold", "0.4", "--retrieval-lambda-max", "0.8"]
    shown = call("tune", *words, *shaping, "--output", tmp_path / "options", "--decode", 3).stdout
    assert "75 settings" in shown and "entries" in shown and "phrases:" in shown
    chosen = (tmp_path / "options").read_text().split()
    assert "--knn-k" in chosen and "--phrase-lambda" in chosen and options_in(chosen, shaping)
    generated = call("fairseq-generate", *words, *chosen)
    assert "Generate test" in generated.stdout
    assert (tmp_path / "options.png").read_bytes().startswith(b"\x89PNG")


def test_tuner_scores_equal_a_direct_computation(world: World, joint: list[object]) -> None:
    settings = ["--phrase-lambda", 0.6, "--phrase-k", 2]
    cfg, task, models, ensemble = load_ensemble(world, [*joint, *settings, "--phrase-min-similarity", 0.3])
    direct = []
    for sample in batches(cfg, task, models):
        mixed, _ = mixed_and_phrase_vote(ensemble, sample)
        targets = sample["target"][sample["target"].ne(task.target_dictionary.pad())]
        direct.append(mixed.gather(1, targets.unsqueeze(1)).squeeze(1))
    remembering = ensemble.with_memories(ensemble.tokens, ensemble.phrases.remembering(), ensemble.trust)
    text = force_decode_text("test", list(batches(cfg, task, models)), remembering, 64)
    assert text.tokens is not None
    cache, log_probs = text.phrases, text.log_probs
    assert cache.rows.tolist() == list(range(len(log_probs)))  # few as they are, all are kept
    references = References.of(text, replace(task.token_settings, temperature=5.0), 0.9)
    found = references.log_likelihood(*cache.vote(ensemble.phrases))
    assert float(found.mean()) == pytest.approx(float(torch.cat(direct).mean()), abs=1e-4)


def test_log_tells_of_both_memories(
    world: World, joint: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = [*world.options("--no-progress-bar"), *map(str, joint), "--knn-log", tmp_path / "log"]
    call("fairseq-generate", *words)
    assert any("Lambda_max:0.9" in record.message for record in caplog.records)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any(line["phrases"] is not None and line["phrase_lambda"] > 0 for line in lines)
    assert any(line["neighbours"] for line in lines)


def test_what_does_not_fit_is_refused(
    world: World, ccpr: Ccpr, phrase_store: Path, phrases: list[object], tmp_path: Path
) -> None:
    def generate(*extra: object) -> object:
        return call("fairseq-generate", *world.options("--no-progress-bar"), *extra, check=False)

    refused(
        generate("--datastore", phrase_store), "cannot be split into .* --bpe sentencepiece and --sentencepiece-model"
    )
    refused(generate(*phrases, "--phrase-encoder", tmp_path / "none.pt"), "none.pt")
    refused(generate(*phrases, "--phrase-k", 0), "--phrase-k is 0")
    refused(generate(*phrases, "--phrase-lambda", 2), "--phrase-lambda is 2")
    refused(generate(*phrases, "--phrase-reach", -1), "--phrase-reach is -1")
    refused(generate(*phrases, "--retrieval-lambda-max", 1), "--retrieval-lambda-max is 1")
    other = other_encoder(ccpr, tmp_path / "other")
    refused(generate(*phrases, "--phrase-encoder", other), "built with another encoder: they need [0-9a-f]{12}")
    moved = tmp_path / "moved"
    shutil.copytree(phrase_store, moved)
    phrase = json.loads((moved / MANIFEST).read_text())["phrase"]
    edit_manifest(moved, phrase=phrase | {"encoder": str(tmp_path / "gone.pt")})
    given = [*phrases, "--datastore", moved]
    refused(generate(*given), "gone.pt, which is not there: say with --phrase-encoder")
    assert generate(*given, "--phrase-encoder", ccpr.checkpoint, "--beam", 1).returncode == 0


def test_nothing_found_is_said_once(decode: Callable, phrases: list[object], caplog: pytest.LogCaptureFixture) -> None:
    size = ["--batch-size", 4]
    with retrieving([], lambda source: 0):
        assert equal(decode(*phrases, *size), decode(*size, base=True))
    assert sum("no phrase was retrieved" in record.message for record in caplog.records) == 1
    assert PhraseMemory.__module__ in {record.name for record in caplog.records}
