"""Contrasts of a corpus that repeats itself, against plain loops over its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.token_adapter import TokenAdapter
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.training.contrast_sampler import (
    ContrastSampler,
    SentenceOrigins,
    Text,
    TokenContrastConfig,
    repeated,
)
from tests.helpers import call
from tests.small_models import World

SETTINGS = TokenContrastConfig(
    positives=2, negatives=6, nearest_clusters=12, refresh_interval=20, valid_queries=2000,
    seed=1,
)  # fmt: skip


class RandomText:
    """Random states of sentences of few tokens, some of which repeat others' translation, source or both."""

    def __init__(
        self, rng: np.random.Generator, sentences: int, targets: list[list[int]], sources: int
    ) -> None:
        target, source = rng.integers(len(targets), size=sentences), rng.integers(sources, size=sentences)
        keys, values, self.target, self.source, provenance = [], [], [], [], []
        for number in range(sentences):
            tokens = targets[target[number]]
            keys.append(8 * rng.normal(size=(len(tokens), 16)))
            values += tokens
            self.target += [int(target[number])] * len(tokens)
            self.source += [int(source[number])] * len(tokens)
            provenance += [[3 * number + 1, position] for position in range(len(tokens))]
        self.keys, self.values = np.concatenate(keys).astype(np.float16), np.array(values, dtype=np.int32)
        self.provenance = np.array(provenance, dtype=np.int32)
        self.sources = np.zeros(3 * sentences - 1, np.uint64)
        self.sources[1::3] = (1 << 63) + source.astype(np.uint64)
        self.row = {key.tobytes(): i for i, key in enumerate(self.keys)}
        assert len(self.row) == len(values)

    def rows(self, keys: torch.Tensor) -> np.ndarray:
        """Find the entries that keys are of, in any shape."""
        found = [
            self.row[key.tobytes()] for key in keys.numpy().astype(np.float16).reshape(-1, keys.size(-1))
        ]
        return np.array(found).reshape(keys.shape[:-1])

    @property
    def text(self) -> Text:
        return Text(self.keys, self.values, self.provenance, self.sources)


def texts(rng: np.random.Generator, *sizes: int) -> list[RandomText]:
    """Texts that share translations and sources."""
    # No two are equal: each begins with a token of its own, from 40 on.
    targets = [[40 + i, *rng.integers(4, 24, rng.integers(2, 8)).tolist(), 2] for i in range(30)]
    return [RandomText(rng, size, targets, 40) for size in sizes]


def check(
    contrasts: torch.Tensor, anchors: RandomText, store: RandomText, left: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Look at each contrast by itself; which entries were its anchor and its positives.

    Args:
        left: the entries that are not held out; None: all.
    """
    left = np.arange(len(store.values)) if left is None else left
    own, others = anchors.rows(contrasts[:, 0]), store.rows(contrasts[:, 1:])
    for anchor, drawn in zip(own.tolist(), others.tolist()):
        for positive in drawn[: SETTINGS.positives]:
            assert store.values[positive] == anchors.values[anchor]
            assert store.target[positive] != anchors.target[anchor]
        choice = {store.target[i] for i in left if store.values[i] == anchors.values[anchor]}
        choice -= {anchors.target[anchor]}
        found = {store.target[i] for i in drawn[: SETTINGS.positives]}
        assert len(found) == SETTINGS.positives or len(choice) < SETTINGS.positives
        for negative in drawn[SETTINGS.positives :]:
            assert store.values[negative] != anchors.values[anchor]
            assert store.target[negative] != anchors.target[anchor]
            assert store.source[negative] != anchors.source[anchor]
    return own, others[:, : SETTINGS.positives]


def test_contrasts_are_between_different_sentences(rng: np.random.Generator) -> None:
    text, other = texts(rng, 300, 120)
    sampler = ContrastSampler(text.text, SETTINGS, torch.device("cpu"), other.text)
    adapter = TokenAdapter(16, 32, 8)
    drawn, _ = check(sampler.draw(adapter, 3000, 0, 0), text, text)
    groups_of = {
        token: {text.target[i] for i in np.flatnonzero(text.values == token)} for token in set(text.values)
    }
    repeated = {i for i, token in enumerate(text.values) if len(groups_of[token]) > 1}
    assert set(drawn) <= repeated and len(set(drawn)) > 0.7 * len(repeated)
    # Validation: every member of the token's class may be the positive, but for copies of the query's own
    # translation.
    queries = torch.arange(len(sampler.query_values))
    contrasts = sampler.draw_held_out(adapter, queries)
    own, positives = check(contrasts, other, text)
    asked = other.rows(sampler.query_keys.float())
    known = [i for i in asked if groups_of.get(other.values[i], set()) - {other.target[i]}]
    assert own.tolist() == known and len(known) < len(asked)
    of_end = np.flatnonzero(text.values == 2)
    assert {int(text.target[i]) for i in positives[other.values[own] == 2].flatten()} == {
        text.target[i] for i in of_end
    }


def test_equal_translations_are_held_out_together(rng: np.random.Generator) -> None:
    (text,) = texts(rng, 300)
    sampler = ContrastSampler(text.text, replace(SETTINGS, valid_queries=150), torch.device("cpu"))
    held_out = text.rows(sampler.query_keys.float())
    kept = text.rows(sampler.rows(sampler.clusters.members))
    assert 0 < len(held_out) < 0.4 * len(text.values) and len(held_out) + len(kept) == len(text.values)
    assert not {text.target[i] for i in held_out} & {text.target[i] for i in kept}
    check(sampler.draw_held_out(TokenAdapter(16, 32, 8), torch.arange(len(held_out))), text, text, kept)


def test_copies_of_one_sentence_are_no_training_data() -> None:
    values = np.array([4, 5, 6, 2] * 3, dtype=np.int32)
    keys = np.arange(96, dtype=np.float16).reshape(12, 8)
    with pytest.raises(
        DatastoreError, match=r"of the 12 entries .* 0 tokens occur in two different sentences"
    ):
        provenance = np.stack([np.arange(12) // 4, np.arange(12) % 4], axis=1)
        text = Text(keys, values, provenance, np.arange(1, 4).astype(np.uint64))
        ContrastSampler(text, SETTINGS, torch.device("cpu"))


def test_a_store_of_one_source_still_gives_negatives(rng: np.random.Generator) -> None:
    text = RandomText(rng, 60, [[4, 5, 6, 2], [7, 5, 8, 2], [9, 5, 2]], 1)
    sampler = ContrastSampler(text.text, SETTINGS, torch.device("cpu"), text.text)
    rows = text.rows(sampler.draw(TokenAdapter(16, 32, 8), 50, 0, 0))
    tokens = text.values[rows]
    assert (tokens[:, 1 : 1 + SETTINGS.positives] == tokens[:, :1]).all()
    assert (tokens[:, 1 + SETTINGS.positives :] != tokens[:, :1]).all()


def test_origins_of_a_model_are_those_of_its_text(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks change nothing."""
    monkeypatch.setattr("fairseq_ccpr.datastore.token.HASHED_ROWS", 37)
    pairs = [pair for pair, _ in zip(read_pairs(world.folder / "train.tsv"), range(60))]
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    # Each source comes again with another translation, each translation with another source, some pairs as
    # they are.
    train = [*pairs, *zip(sources, targets[1:]), *zip(sources[7:], targets), *pairs[::5]]
    valid = [
        (sources[3], targets[20]),
        (sources[49][:-1] + "?", targets[4]),
        (targets[5], sources[5]),
        pairs[0],
    ]
    for name, rows in (("train", train), ("valid", valid)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in rows), encoding="utf-8")
    words = ["--train", tmp_path / "train.tsv", "--valid", tmp_path / "valid.tsv", "-s", "de", "-t", "en"]
    of_model = ["--dict", world.data_bin / "dict.en.txt", "--sentencepiece-model", world.spm]
    call("prepare", *words, *of_model, "--output", tmp_path / "bin")
    for name in ("train", "valid"):
        words = [
            "--path",
            world.model,
            "--output",
            tmp_path / name,
            "--subset",
            name,
            "--max-tokens",
            600,
            "--cpu",
        ]
        call("build tokens", tmp_path / "bin", *words)
    stores = [TokenDatastore(tmp_path / name) for name in ("train", "valid")]
    known = SentenceOrigins(Text.of(stores[0]))
    queries = known.of_rows(Text.of(stores[1]), np.flatnonzero(stores[1].provenance[:, 1] == 1))
    for given, origins in ((train, known.origins), (valid, queries)):
        found = repeated(origins, known.origins[torch.arange(len(train)).expand(len(given), -1)])
        wanted = [[s == source or t == target for s, t in train] for source, target in given]
        assert found.tolist() == wanted
