"""Phrases inside the beam search of a model whose subwords are subword-nmt's, and of text in which phrases follow quotes."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fairseq_ccpr.decoding.memory import Step
from fairseq_ccpr.decoding.mixture import Vote
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch
from fairseq_ccpr.text.pairs import read_pairs
from tests.decoding.phrase_ensembles import retrieving
from tests.helpers import run
from tests.small_models import World, train

CONTINUED = "@@"
QUOTE = '"'


@pytest.fixture(scope="module")
def pairs(world: World) -> dict[str, list[tuple[str, str]]]:
    """The tests' sentence pairs, each second target in quotes."""
    return {
        subset: [
            (source, f"{QUOTE}{target}{QUOTE}" if number % 2 else target)
            for number, (source, target) in enumerate(read_pairs(world.folder / f"{subset}.tsv"))
        ]
        for subset in ("train", "valid", "test")
    }


@pytest.fixture(scope="module")
def model(world: World, pairs: dict, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Options of decoding with a model of subword-nmt's pieces."""
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe")
    apply_bpe = pytest.importorskip("subword_nmt.apply_bpe")
    folder = tmp_path_factory.mktemp("subword-nmt")
    codes = io.StringIO()
    learn_bpe.learn_bpe((side.replace(QUOTE, "") for pair in pairs["train"] for side in pair), codes, 400)
    (folder / "codes").write_text(codes.getvalue(), encoding="utf-8")
    bpe = apply_bpe.BPE(io.StringIO(codes.getvalue()))
    for subset, rows in pairs.items():
        for language, sentences in zip(("de", "en"), zip(*rows)):
            lines = "".join(bpe.process_line(sentence) + "\n" for sentence in sentences)
            (folder / f"{subset}.{language}").write_text(lines, encoding="utf-8")
    texts = [word for subset in pairs for word in (f"--{subset}pref", folder / subset)]
    run(
        "fairseq-preprocess",
        "-s",
        "de",
        "-t",
        "en",
        "--joined-dictionary",
        *texts,
        "--destdir",
        folder / "bin",
    )
    train(folder / "bin", folder / "model", 60, seed=1)
    checkpoint = folder / "model/checkpoint_last.pt"
    return [folder / "bin", "--path", checkpoint, "--bpe", "subword_nmt", "--bpe-codes", folder / "codes"]


def overlap(found: dict[int, Any], references: list[str], symbols: list[str]) -> float:
    """Share of the references' words that the hypotheses have."""
    common = [
        len({*references[i].split()} & {*text_of(best, symbols).split()}) for i, (best, *_) in found.items()
    ]
    return sum(common) / sum(len({*references[i].split()}) for i in found)


def text_of(hypothesis: dict[str, Any], symbols: list[str]) -> str:
    """What a hypothesis says."""
    written = " ".join(symbols[token] for token in hypothesis["tokens"].tolist()[:-1])
    return f"{written} ".replace(f"{CONTINUED} ", "").strip()


def test_phrases_are_whole_words_in_beam_search(
    world: World, decode: Callable, model: list, pairs: dict, phrase_store: Path
) -> None:
    data, *options = model
    symbols = read_symbols(Path(data) / "dict.en.txt")
    sources, targets = ([pair[side] for pair in pairs["test"]] for side in (0, 1))
    counts = {"in words": 0, "after quotes": 0, "phrases": 0}
    vote, lay_out = PhraseBatch.vote, PhraseBatch.__post_init__

    def watched_vote(batch: PhraseBatch, step: Step) -> Vote:
        """Nothing but phrases that have begun proposes letters within a word."""
        tokens, said, state = step.tokens, vote(batch, step), batch.state
        begun, values = state.matched & batch.table.phrases[state.rows, :, 2], state.proposals().values
        for row, last in enumerate(tokens[:, -1].tolist()):
            if tokens.size(1) == 1 or not symbols[last].endswith(CONTINUED):
                continue
            proposed = {*said.values[row][said.log_probs[row] > -30].tolist()}
            new = proposed - {*values[row][begun[row] > 0].tolist()}
            if symbols[last] == QUOTE + CONTINUED:
                counts["after quotes"] += bool(new)
            elif symbols[last].removesuffix(CONTINUED)[-1:].isalnum():
                assert not any(symbols[token][0].isalnum() for token in new)
                counts["in words"] += 1
        return said

    def watched_start(batch: PhraseBatch) -> None:
        """Each phrase is the subwords of its string."""
        batch.memory.votes.state.data[0] = 2.0  # so eager that they begin against so poor a model
        for sentence in batch.phrases:
            found = sentence.candidates
            strings = [query.retrieved for query in sentence.queries]
            for tokens, length, query, rank in zip(found.tokens, found.lengths, found.queries, found.ranks):
                written = " ".join(symbols[token] for token in tokens[:length].tolist()).removesuffix(
                    CONTINUED
                )
                assert written.replace(f"{CONTINUED} ", "") == strings[query][rank].string
                counts["phrases"] += 1
        lay_out(batch)

    def number(text: str) -> int:
        return sources.index(difflib.get_close_matches(text, sources, 1, 0)[0])

    words = [*options, "--datastore", phrase_store, "--phrases-lambda", 0.9, "--beam", 4]
    with patch_data(world, data):
        base = decode(*words, base=True)
        with (
            retrieving(targets, number),
            patch.object(PhraseBatch, "vote", watched_vote),
            patch.object(PhraseBatch, "__post_init__", watched_start),
        ):
            found = decode(*words)
    assert min(counts.values()) > 10, counts
    assert overlap(found, targets, symbols) > overlap(base, targets, symbols) + 0.1


def patch_data(world: World, data: object) -> Any:
    """Decode other data than the tests' own."""
    options = World.options
    return patch.object(World, "options", lambda self, *extra: [str(data), *options(self, *extra)[1:]])


def read_symbols(path: Path) -> list[str]:
    """The symbols of a dictionary, special ones first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return ["<s>", "<pad>", "</s>", "<unk>", *(line.split()[0] for line in lines)]


def test_texts_are_read_as_written() -> None:
    symbols = ["<s>", "<pad>", "</s>", "<unk>", f"{QUOTE}@@", "go@@", "es"]
    assert text_of({"tokens": torch.tensor([4, 5, 6, 2])}, symbols) == '"goes'
