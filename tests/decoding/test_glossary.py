"""A glossary's terms are found, wanted inside beam search, and followed to their end; without one nothing changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.glossary_memory import (
    END_COST,
    GROWTH_COST,
    UNKNOWN_COST,
    GlossaryBatch,
    GlossaryMemory,
    GlossaryVotes,
)
from fairseq_ccpr.decoding.memory import Step
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseState
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords
from fairseq_ccpr.text.glossary import Glossary
from fairseq_ccpr.text.pairs import read_pairs
from tests.decoding.phrase_tables import Found, judge, make_table
from tests.helpers import call, equal, refused, write_lines
from tests.small_models import World, subword_options

SHORT: dict[str, Any] = {"max_len_b": 25, "device": "cpu"}


@pytest.fixture(scope="module")
def sentences(world: World) -> list[str]:
    return [source for source, _ in read_pairs(world.folder / "test.tsv")][:12]


def translations(world: World, sentences: list[str], **options: Any) -> list[str]:
    translator = Translator(world.model, data=world.data_bin, **SHORT, **options)
    return [one.text for one in translator.translate(sentences)]


def test_terms_are_found_whole_and_longest_first(tmp_path: Path) -> None:
    lines = (
        "Haus\thouse",
        "haus  Gottes\ttemple\t\t",
        "haus\thome\thouse\tbuilding",
        "Haus\thouse",
        "",
        "z. B.\te.g.",
    )
    glossary = Glossary(write_lines(tmp_path / "terms.tsv", *lines))
    text = "Das HAUS Gottes, Hausherr: z. B. das Haus."
    found = [(text[start:end], variants) for start, end, variants in glossary.find(text)]
    assert found == [
        ("HAUS Gottes", ["temple"]),
        ("z. B.", ["e.g."]),
        ("Haus", ["house", "home", "building"]),
    ]


def test_terms_are_written_and_other_sentences_stay_as_they_are(
    world: World, sentences: list[str], tmp_path: Path
) -> None:
    """Without a datastore: of each sentence with `und` one of the variants, whole, which the model would never write."""
    terms = write_lines(tmp_path / "terms.tsv", "und\tshepherd of Moab", "und\tking of Moab")
    plain = translations(world, sentences)
    wanted = translations(world, sentences, glossary=terms)
    for source, before, after in zip(sentences, plain, wanted):
        with_term = "und" in source.casefold().replace(",", " ").split()
        assert before == after if not with_term else "of Moab" not in before and "of Moab" in after
        assert after.count("of Moab") <= max(1, source.casefold().split().count("und") + 1)


def test_it_goes_with_a_datastore_and_is_in_the_signature(
    world: World, decode: Callable, tmp_path: Path, sentences: list[str]
) -> None:
    """To the bit: terms that no sentence has change nothing."""
    other, und = (
        write_lines(tmp_path / name, line)
        for name, line in (("other.tsv", "Xylophon\txylophone"), ("und.tsv", "und\tmoon"))
    )
    words = [*subword_options(world), "--beam", 2]
    usual = decode(*words)
    assert equal(decode(*words, "--glossary", other), usual)
    assert not equal(decode(*words, "--glossary", und), usual, tolerance=1e-3)
    signatures = [
        Translator(datastore=world.datastore, **SHORT, **given).signature
        for given in ({}, {"glossary": other}, {"glossary": und})
    ]
    assert (
        len(set(signatures)) == 3
        and "glossary:" in str(signatures[1])
        and "glossary:" not in str(signatures[0])
    )


def test_votes_are_those_of_the_formula() -> None:
    """Two variants of one term and another term, after a beginning and after one that was written."""
    table = make_table([[Found([5, 6], 0, 1.0), Found([7], 0, 1.0), Found([8, 9], 1, 1.0)]])
    votes = GlossaryVotes()
    log_probs = torch.randn(1, 12).log_softmax(dim=1)
    state = PhraseState(table, torch.tensor([0]))

    def formula(*next_tokens: tuple[int, tuple[float, float]] | None) -> torch.Tensor:
        ratios = log_probs[0] - log_probs.max()
        scores = [
            torch.exp(one[1][0] + one[1][1] * ratios[one[0]]) if one else torch.tensor(0.0)
            for one in next_tokens
        ]
        return torch.stack(scores) / (1 + sum(scores))

    begin, begun = GlossaryVotes.MAY_BEGIN, GlossaryVotes.BEGUN
    for written, wanted in (
        (None, ((5, begin), (7, begin), (8, begin))), (5, ((6, begun), (7, begin), (8, begin))),
        (6, (None, None, (8, begin))), (8, (None, None, (9, begun))), (9, (None, None, None)),
    ):  # fmt: skip
        if written is not None:
            state.advance(torch.tensor([written]))
        found = judge(votes, table, state, log_probs)
        torch.testing.assert_close(found[0], formula(*wanted))


def test_a_step_is_a_plain_computation_of_votes_and_costs(rng: np.random.Generator) -> None:
    """Random terms of two or three variants, and hypotheses that happen to begin, end, write or repeat them."""
    words, sentences, hypotheses, length = 9, 3, 40, 7
    terms = [[list(rng.integers(4, words, rng.integers(1, 4))) for _ in range(5)] for _ in range(sentences)]
    queries = [0, 0, 1, 2, 2]
    table = make_table([[Found(term, query, 1.0) for query, term in zip(queries, of)] for of in terms])
    votes, rows = GlossaryVotes(), torch.tensor(rng.integers(0, sentences, hypotheses))
    phrases = PhraseMemory(None, PhraseSettings(), votes, torch.device("cpu"))  # type: ignore[arg-type]
    memory = GlossaryMemory(phrases, end_token=2, unknown_token=3)
    growing = torch.tensor([0.0] * 6 + [1.0] * (words - 6))
    memory.__dict__["growing"] = growing
    # of the sentence whose terms have all that is unknown
    unknown_cost = torch.tensor([0.0, UNKNOWN_COST, 0.0])
    batch = GlossaryBatch(
        memory, PhraseBatch(phrases, [], table), torch.full((sentences,), 3.0), unknown_cost
    )
    batch.phrases.state = PhraseState(table, rows)
    written = torch.tensor(rng.integers(4, words, (hypotheses, length)))
    ended_ones = covered_ones = 0
    for step in range(length + 1):
        log_probs = torch.randn(hypotheses, words).log_softmax(dim=1)
        so_far = torch.cat([torch.full((hypotheses, 1), 2), written[:, :step]], dim=1)
        found = batch.rescore(Step(so_far, Distribution(log_probs.clone())))
        for row, history in enumerate(written[:, :step].tolist()):
            own = [[int(token) for token in term] for term in terms[int(rows[row])]]
            ends = [history[-len(term) :] == term for term in own]
            covered = {q for q, term in zip(queries, own) if _has(history, term)}
            p, best = log_probs[row].exp(), log_probs[row].max()
            weights = []
            for query, term in zip(queries, own):
                begun = max((n for n in range(1, len(term)) if history[-n:] == term[:n]), default=0)
                b, c = GlossaryVotes.BEGUN if begun else GlossaryVotes.MAY_BEGIN
                ratio = (log_probs[row, term[begun]] - best).clamp_min(-12)
                weights.append((term[begun], 0.0 if query in covered else float(torch.exp(b + c * ratio))))
            total = 1 + sum(weight for _, weight in weights)
            wanted = p / total
            for token, weight in weights:
                wanted[token] += weight / total
            wanted = wanted.log() - GROWTH_COST * growing * any(ends)
            wanted[2] -= END_COST * (3 - len(covered))
            wanted[3] -= UNKNOWN_COST * float(rows[row] == 1)
            torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-4)
            ended_ones, covered_ones = ended_ones + any(ends), covered_ones + len(covered)
    assert ended_ones > 20 and covered_ones > 20


def _has(history: list[int], term: list[int]) -> bool:
    return any(history[at : at + len(term)] == term for at in range(len(history)))


def test_words_grow_by_pieces_without_a_space_before_them(world: World) -> None:
    task = Translator(world.model, data=world.data_bin, **SHORT).task
    symbols = task.target_dictionary.symbols
    growing = DecoderSubwords(None, task.bpe, task.target_dictionary).growing()
    of = dict(zip(symbols, growing))
    assert of["s"] and of["ed"] and not of["▁the"] and not of["."] and not of["</s>"] and not of["<s>"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no term: write source term, tab, target term"),
        (b"\n \n", "has no term"),
        (b"Haus\n", "line 1 has no target term: expected source term, tab, target term"),
        (b"a\tb\nHaus\t \t\n", "line 2 has no target term"),
        (b"\thouse\thome\n", "line 1 has no source term"),
        (b"Haus\t\xff\n", "line 1: the bytes are not UTF-8"),
        (b"w w w w w w w w w w w w w\tone\n", "the source term has 13 words: expected 1 to 12"),
    ],
)
def test_what_is_no_glossary_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "terms.tsv").write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence):
        Glossary(tmp_path / "terms.tsv")


def test_what_cannot_be_written_or_explained_is_told(
    world: World, sentences: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    terms = write_lines(tmp_path / "terms.tsv", "und\t世界", "und\tone")
    with caplog.at_level(logging.WARNING):
        assert translations(world, sentences[:1], glossary=terms)
    assert f"{terms}: '世界' has characters that the model cannot write: the term is ignored" in caplog.text
    words = [
        "translate",
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "--cpu",
        "--max-len-b",
        25,
        "--quiet",
    ]
    for text, told in (("Xylophon", True), (sentences[0], "und" not in sentences[0].casefold().split())):
        done = call(*words, "--glossary", terms, "--input", write_lines(tmp_path / "in.txt", text, ""))
        assert (f"no sentence has a term of {terms}" in done.stderr) == told
    translator = Translator(datastore=world.datastore, glossary=terms, **SHORT)
    with pytest.raises(ConfigurationError, match="--glossary works in beam search alone"):
        translator.explain(sentences[0])
    done = call(
        "translate",
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "--glossary",
        tmp_path / "no",
        check=False,
    )
    refused(done, "--glossary: there is no file")
