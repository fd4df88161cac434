"""Accuracy of a token datastore's keys: precision and any-hit by k, by kind of key and by frequency of the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.manifold import TSNE
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore, fit_pca, sample_rows
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import matching_neighbours
from fairseq_ccpr.timing import progress_bar

SEEN_OFTEN_ENOUGH = 10  # times a token must occur to be in a band: footnote 6 of the CLKNN paper
BANDS = {"high (first 1%)": (0.0, 0.01), "middle (40-60%)": (0.4, 0.6), "low (last 1%)": (0.99, 1.0)}
RAW = "raw"
OVERALL = "all but punctuation"
CLUSTERS = MEMBERS = 10  # tokens in a picture, and points of each: figure 2 of the paper
QUERY_BLOCK = 256
KEY_BLOCK = 1 << 16


def precision_at_k(matches: Tensor) -> Tensor:
    """Compute the fraction of matches among the nearest 1, 2, ... k of each query, fp32 [Q, k].

    >>> precision_at_k(torch.tensor([[True, False]]))
    tensor([[1.0000, 0.5000]])
    """
    return matches.float().cumsum(1) / torch.arange(1, matches.size(1) + 1, device=matches.device)


def any_hit_at_k(matches: Tensor) -> Tensor:
    """Mark whether the nearest 1, 2, ... k hold a match, fp32 [Q, k]."""
    return (matches.cumsum(1) > 0).float()


@dataclass
class Keys:
    """One kind of key: an index over the datastore's keys, and how a decoder's state becomes a query."""

    index: ExactIndex
    to_query: Callable[[Tensor], Tensor]


@dataclass
class Accuracy:
    """Results of an evaluation."""

    # band -> system -> precision@1..k and any-hit@1..k, in per cent
    precision: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    any_hit: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)  # by band


def _token_bands(values: np.ndarray, symbols: list[str]) -> dict[str, np.ndarray]:
    """Sort tokens, int [N] of a datastore, into bands of frequency, and one of all but punctuation."""
    counts = np.bincount(values, minlength=len(symbols))
    ranked = np.argsort(-counts, kind="stable")
    ranked = ranked[counts[ranked] >= SEEN_OFTEN_ENOUGH]
    bands = {}
    for name, (low, high) in BANDS.items():
        start, end = round(low * len(ranked)), round(high * len(ranked))
        bands[name] = ranked[min(start, len(ranked) - 1) : max(end, start + 1)] if len(ranked) else ranked
    special = 4  # <s>, <pad>, </s>, <unk>
    words = [
        i for i, symbol in enumerate(symbols) if i >= special and any(letter.isalnum() for letter in symbol)
    ]
    return {OVERALL: np.array(words, dtype=np.int64), **bands}


def key_sets(raw: TokenDatastore, projected: dict[str, TokenDatastore]) -> dict[str, Keys]:
    """Collect raw keys, raw keys after PCA to the width of each projected kind, and those kinds."""
    if raw.section.projection is not None:
        raise DatastoreError(
            f"{raw.directory} went through an adapter: the first datastore must be one of --adapter none"
        )
    sets = {RAW: Keys(ExactIndex(raw.keys, "l2"), lambda states: states)}
    for name, store in projected.items():
        for kind in ("model", "corpus", "target_dictionary"):
            store.check_fingerprint(kind, raw.section.fingerprints[kind], str(raw.directory))
        projection = store.open_projection()
        same_keys = (store.section.size, store.section.key_layer) == (raw.section.size, raw.section.key_layer)
        if projection is None or not same_keys:
            raise DatastoreError(
                f"{store.directory} was not made from the keys of {raw.directory} with an adapter"
            )
        width = store.section.dimension
        if width < raw.section.dimension and (label := f"raw, PCA {width}") not in sets:
            sets[label] = _pca_keys(raw.keys, width)
        sets[name] = Keys(ExactIndex(store.keys, "ip"), torch.inference_mode()(projection.forward))
    return sets


def _pca_keys(keys: np.ndarray, width: int) -> Keys:
    pca = fit_pca(torch.from_numpy(keys[sample_rows(len(keys))]).float(), width)
    mean, components = pca.mean.float(), pca.components.float()

    def to_query(states: Tensor) -> Tensor:
        return (states.float() - mean) @ components.T

    reduced = torch.empty(len(keys), width, dtype=torch.float16)
    for start in range(0, len(keys), KEY_BLOCK):
        rows = slice(start, start + KEY_BLOCK)
        reduced[rows] = to_query(torch.from_numpy(keys[rows].astype(np.float32)))
    return Keys(ExactIndex(reduced, "l2"), to_query)


def evaluate_retrieval(
    sets: dict[str, Keys],
    raw: TokenDatastore,
    queries: TokenDatastore | None,
    count: int,
    k: int,
    seed: int,
    quiet: bool,
) -> Accuracy:
    """Measure precision@1..k and any-hit@1..k of each kind of key, for up to `count` random queries in each band.

    Without `queries`, raw keys of held-out text, these are entries of `raw`, their own sentences left out.
    """
    source = queries or raw
    source_layer, raw_layer = (
        (store.section.fingerprints["model"], store.section.key_layer, store.section.projection)
        for store in (source, raw)
    )
    if source_layer != raw_layer:
        raise ConfigurationError(
            f"{source.directory} does not hold raw keys of the same model and layer: build it like {raw.directory}"
        )
    rng = np.random.default_rng(seed)
    accuracy = Accuracy()
    values, sentences = torch.from_numpy(raw.values[:]), torch.from_numpy(raw.provenance[:, 0].copy())
    lengths = torch.bincount(sentences.long())
    for band, tokens in _token_bands(raw.values, raw.read_symbols()).items():
        eligible = np.flatnonzero(np.isin(source.values, tokens))
        rows = np.sort(rng.permutation(eligible)[:count])
        if not len(rows):
            continue
        accuracy.queries[band] = len(rows)
        targets = torch.from_numpy(source.values[rows])
        origins = torch.from_numpy(source.provenance[rows, 0]) if queries is None else None
        longest = int(lengths[origins.long()].max()) if origins is not None else 0
        accuracy.precision[band], accuracy.any_hit[band] = {}, {}
        for name, keys in progress_bar(band, "system", sets.items(), quiet=quiet):
            vectors = keys.to_query(torch.from_numpy(source.keys[rows].astype(np.float32)))
            parts = [
                matching_neighbours(
                    keys.index, values, vectors[block], targets[block], k,
                    *((sentences, origins[block], longest) if origins is not None else ()),
                )
                for block in torch.arange(len(rows)).split(QUERY_BLOCK)
            ]  # fmt: skip
            matches = torch.cat(parts)
            accuracy.precision[band][name] = (100 * precision_at_k(matches).mean(dim=0)).tolist()
            accuracy.any_hit[band][name] = (100 * any_hit_at_k(matches).mean(dim=0)).tolist()
    if not accuracy.queries:
        raise ConfigurationError(f"no token of {source.directory} is in any band: give a larger datastore")
    return accuracy


def cluster_points(
    sets: dict[str, Keys], raw: TokenDatastore, seed: int
) -> list[tuple[str, np.ndarray, list[str]]]:
    """Project random entries of each band by t-SNE, for each kind of key: title, [n, 2], and the token of each point."""
    rng = np.random.default_rng(seed)
    symbols = raw.read_symbols()
    chosen: dict[str, tuple[np.ndarray, list[str]]] = {}
    for band, tokens in _token_bands(raw.values, symbols).items():
        if band != OVERALL and len(tokens):
            some = rng.permutation(tokens)[:CLUSTERS]
            rows = [rng.permutation(np.flatnonzero(raw.values == token))[:MEMBERS] for token in some]
            chosen[band] = np.concatenate(rows), [symbols[t] for t, r in zip(some, rows) for _ in r]
    panels: list[tuple[str, np.ndarray, list[str]]] = []
    for name, keys in sets.items():
        for band, (entries, labels) in chosen.items():
            vectors = keys.to_query(torch.from_numpy(raw.keys[entries].astype(np.float32))).numpy()
            tsne = TSNE(perplexity=min(30, (len(vectors) - 1) / 3), random_state=seed)
            panels.append((f"{name}: {band}", tsne.fit_transform(vectors), labels))
    return panels


def as_table(accuracy: Accuracy, ks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> list[list[Any]]:
    """Tabulate band, number of queries, kind of key, and precision@k / any-hit@k for each k."""
    longest = max(len(values) for systems in accuracy.precision.values() for values in systems.values())
    ks = tuple(k for k in ks if k <= longest)
    table: list[list[Any]] = [["band", "queries", "keys", *(f"k = {k}" for k in ks)]]
    for band, systems in accuracy.precision.items():
        for name, precision in systems.items():
            hits = accuracy.any_hit[band][name]
            cells = [f"{precision[k - 1]:.1f} / {hits[k - 1]:.1f}" for k in ks]
            table.append([band, accuracy.queries[band], name, *cells])
    return table
