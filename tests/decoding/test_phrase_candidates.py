"""From retrieved phrases to the table of candidates that the decoder takes: once a sentence, against plain loops."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.decoding.memory import Snapshot
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, RememberedCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, RetrievedEntries
from fairseq_ccpr.decoding.phrase_votes import MAX_SUBWORDS, NO_TOKEN, Candidates, PhraseVotes
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.text.decoder_subwords import after_sign
from fairseq_ccpr.timing import DECODER, FINDING, PHRASES, PhaseTimer
from tests.decoding.phrase_ensembles import load_ensemble
from tests.small_models import PAIRS, World


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


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_phrases_are_made(enabled: bool) -> None:
    seen: list[bool] = []

    def make(*_: object) -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ZeroDivisionError

    candidates: Any = SimpleNamespace(start=lambda sources, *_: make, table=make, remote=False)
    memory = PhraseMemory(candidates, PhraseSettings(), PhraseVotes(), torch.device("cpu"))
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            memory.begin(torch.ones(1, 1), Snapshot()).encoded()
        assert seen == [False, False] and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_candidates_are_what_the_decoder_writes_of_what_was_retrieved(
    world: World, joint: list[object]
) -> None:
    """Compare with cutting every string out of its sentence, and tokenising it again where its pieces are
    those after a sign, or its source follows one; most strings are requested more than once."""
    words = [*joint, "--phrases-k", 20, "--phrases-min-similarity", 0, "--phrases-threshold", 0]
    cfg, task, models, ensemble = load_ensemble(world, words)
    candidates, seen, elsewhere = ensemble.find(PhraseMemory).candidates, 0, 0
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
        assert all((row[length:] == NO_TOKEN).all() for row, length in zip(of.tokens, of.lengths))
        assert [*zip(made, of.queries.tolist(), of.ranks.tolist())] == [one[:3] for one in wanted]
        assert of.scores.tolist() == pytest.approx([score for *_, score in wanted])
    entries = {phrase.entry for sentence in found for query in sentence.queries for phrase in query.retrieved}
    assert 0 < elsewhere < len(entries) < seen / 2


def test_source_phrases_have_the_subwords_that_they_are_written_with(
    world: World, joint: list[object]
) -> None:
    """In batches with padding; a text that the source's subwords are not of has none to tell apart."""
    words = [*joint, "--phrases-min-similarity", 0, "--phrases-threshold", 0, "--batch-size", 8]
    cfg, task, models, ensemble = load_ensemble(world, words)
    candidates, dictionary, seen = ensemble.find(PhraseMemory).candidates, task.source_dictionary, 0
    for sample in batches(cfg, task, models):
        sources = sample["net_input"]["src_tokens"]
        found = candidates.start(sources)()
        table = candidates.table(found)
        assert table.covering.shape == (len(sources), 1 + table.most_queries, sources.size(1))
        for source, sentence, rows in zip(sources, found, table.covering.bool(), strict=True):
            if dictionary.unk() in source.tolist():
                continue
            assert torch.equal(rows[0], (source != dictionary.pad()) & (source != dictionary.eos()))
            for query, columns in zip(sentence.queries, rows[1:]):
                pieces = [dictionary[int(i)].replace("▁", "") for i in source[columns]]
                string = query.string.replace(" ", "")
                assert string in "".join(pieces) and "".join(pieces[1:-1]) in string
                seen += 1
        others = candidates.start(sources, None, ["No such text."] * len(sources))()
        assert all(one.covering.all() for one in others)
    assert seen > 50


def test_batches_of_the_same_bytes_are_remembered_apart() -> None:
    asked: list[torch.Size] = []
    candidates: Any = SimpleNamespace(
        start=lambda sources, *_: lambda: asked.append(sources.shape) or [len(sources)], retriever=None, subwords=None,
        source_dictionary=None,
    )  # fmt: skip
    remembered = RememberedCandidates(candidates)
    for size in (2, 4, 2, 4):
        assert remembered.start(torch.arange(8).view(size, -1))() == [size]
    assert asked == [(2, 4), (4, 2)]


def test_a_table_has_every_candidate_in_its_place(world: World, joint: list[object]) -> None:
    """Against a plain loop: sentences with no, few and many phrases, with letters and without."""
    cfg = parse_generation([*world.options(), *map(str, joint)])
    task, models = load(cfg)
    task.build_tokenizer(cfg.tokenizer)
    task.build_bpe(cfg.bpe)
    candidates = task.build_generator(models, cfg.generation).model.find(PhraseMemory).candidates
    letters = [any(map(str.isalnum, symbol)) for symbol in task.target_dictionary.symbols]
    batch = []
    for queries in (3, 1, 0):
        phrases = [
            (random.sample(range(4, len(letters)), random.randint(1, 6)), query, rank, random.random())
            for query in range(queries) for rank in random.sample(range(5), 3)
        ]  # fmt: skip
        longest = random.randint(6, 9)
        tokens = [ids + [NO_TOKEN] * (longest - len(ids)) for ids, *_ in phrases]
        columns = [[len(ids), *numbers] for ids, *numbers in phrases]
        lengths, of_query, ranks, scores = np.array(columns).reshape(-1, 4).T
        made = Candidates(
            np.array(tokens, np.int32).reshape(-1, longest), lengths.astype(int), of_query.astype(int),
            ranks.astype(int), scores.astype(np.float32),
        )  # fmt: skip
        batch.append((phrases, SentencePhrases(made, list, 0)))
    table = candidates.table([found for _, found in batch])
    for row, (phrases, _) in enumerate(batch):
        whole = [len(ids) for ids, *_ in phrases]
        assert table.lengths[row].tolist() == whole + [0] * (9 - len(phrases))
        for lane, (ids, query, _, score) in enumerate(phrases):
            first = int(table.phrases[row, lane, 4])
            assert table.following[first : first + len(ids), 0].tolist() == ids
            assert int(table.queries[row, lane]) == query and float(table.scores[row, lane]) == pytest.approx(
                score
            )
            begun = next((n for n, t in enumerate(ids, 1) if letters[t]), len(ids))
            assert table.phrases[row, lane, 1] == begun
