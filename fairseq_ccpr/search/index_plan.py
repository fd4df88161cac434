"""Choosing an index: what `--index` means for so many keys."""

from __future__ import annotations

import importlib.util

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import BACKENDS
from fairseq_ccpr.search.base import EXACT_UP_TO, METRICS, Effort, Index, IndexDescription, IndexRequest, StoreAddress
from fairseq_ccpr.search.faiss_index import automatic_factory
from fairseq_ccpr.search.rescored_index import RESCORED, SUFFIX

# A token memory searches at each step. docs/benchmarks.md has speed and BLEU for other settings.
TOKEN_EFFORT = Effort(probes=16, candidates=4, min_candidates=64)
# Once per sentence, more inverted lists can be searched than at each step, and fewer candidates rescored for each of the
# neighbours, which outnumber the phrases wanted. docs/results/phrases.md has speed and BLEU for other settings.
PHRASE_EFFORT = Effort(probes=24, candidates=2)
PHRASE_DEPTH = 32  # neighbours requested, at least


def plan_index(
    choice: str,
    metric: str,
    parameters: str,
    size: int,
    dimension: int,
    gpu: bool = False,
    effort: Effort = TOKEN_EFFORT,
    store: StoreAddress | None = None,
) -> IndexDescription:
    """Decide what `--index`, `--metric` and `--index-parameters` mean for `size` keys, before any work is done.

    Args:
        choice: `exact`; a FAISS factory string; `disk:` and one whose inverted lists stay on disk, `disk` alone for
            `disk_factory`; another backend's name; or `auto`: exact on a GPU, for small datastores, and without FAISS, else
            `automatic_factory`. For a store, see its backend's `plan`.
        parameters: of the search, in the backend's notation; empty for those that suit the index.
        gpu: whether the search will run on a GPU.
        effort: of a search, where `parameters` do not say.
        store: where the keys are to be, if in a database.

    Raises:
        ConfigurationError: a metric, factory or parameters that do not exist, or an index too large for the store.
    """
    if metric not in METRICS:
        raise ConfigurationError(f"--metric is '{metric}': choose one of {', '.join(METRICS)}")
    if choice == "auto" and store is None:
        exact = gpu or size <= EXACT_UP_TO or importlib.util.find_spec("faiss") is None
        choice = "exact" if exact else automatic_factory(size, dimension, metric)
    request = IndexRequest(choice, metric, parameters, size, dimension, effort, store)
    return _backend_of(request).plan(request)


def _backend_of(request: IndexRequest) -> type[Index]:
    """Return the database's backend, or the one whose name `--index` begins with; FAISS takes all else as a factory.

    A factory string that ends in `SUFFIX` is of `RescoredIndex`.
    """
    if request.store is not None:
        return BACKENDS[request.store.backend]
    if request.choice.endswith(SUFFIX):
        return BACKENDS[RESCORED]
    return next((BACKENDS[name] for name in BACKENDS if request.choice.startswith(name)), BACKENDS["faiss"])


def index_bytes(description: IndexDescription, size: int, dimension: int) -> int:
    """Estimate the bytes that the index's files take for so many keys while they are made."""
    return BACKENDS[description.backend].bytes_needed(description, size, dimension)
