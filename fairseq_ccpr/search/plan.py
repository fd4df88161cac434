"""Choosing an index for a store: what `--index` may say, and what it comes to."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search.base import METRICS, IndexDescription
from fairseq_ccpr.search.faiss_index import default_parameters, inverted_lists, make_index, set_parameters

NARROW = 128  # dimensions, each of which then has a code of its own
EXACT_UP_TO = 20_000  # keys; on a CPU, comparing with more of them costs about a step of a small decoder


def plan_index(
    choice: str, metric: str, parameters: str, size: int, dimension: int, gpu: bool = False, probes: int | None = None
) -> IndexDescription:
    """What `--index`, `--metric` and `--index-parameters` mean for `size` keys, before any work is done.

    Args:
        choice: `exact`, a FAISS factory string, or `auto`: exact on a GPU, for small stores, and where there is no
            FAISS; else `automatic_factory`.
        parameters: FAISS search parameters; empty for those that suit the index.
        gpu: whether the search will run on a GPU.
        probes: inverted lists to search, where `parameters` do not say; see `default_parameters`.

    Raises:
        ConfigurationError: a metric, factory or parameters that do not exist, or an index too large for the store.
    """
    if metric not in METRICS:
        raise ConfigurationError(f"--metric is '{metric}': choose one of {', '.join(METRICS)}")
    if choice == "auto":
        exact = gpu or size <= EXACT_UP_TO or importlib.util.find_spec("faiss") is None
        choice = "exact" if exact else automatic_factory(size, dimension)
    if choice == "exact":
        if parameters:
            raise ConfigurationError(f"--index-parameters '{parameters}' are for FAISS, and exact search has none")
        return IndexDescription("exact", metric)
    index = make_index(dimension, choice, metric)
    if (ivf := inverted_lists(index)) is not None and ivf.nlist > size:
        raise ConfigurationError(
            f"--index {choice} has {ivf.nlist:,} lists, but the datastore will have {size:,} keys: use fewer lists or exact"
        )
    set_parameters(index, parameters)
    digest = hashlib.sha256(f"{choice} {metric}".encode()).hexdigest()[:8]
    return IndexDescription(
        "faiss", metric, choice, parameters or default_parameters(index, probes), f"index-{digest}.faiss"
    )


def plan_milvus_index(choice: str, parameters: str, size: int, embedded: bool) -> IndexDescription:
    """What `--index` and `--index-parameters` mean for `size` keys in Milvus, compared by inner product.

    Args:
        choice: `exact`, a type of Milvus's with its parameters, or `auto`: exact for small stores and the embedded Milvus,
            where nothing else is faster; else what the server takes itself.
        parameters: of the search.

    >>> plan_milvus_index("HNSW,M=32", "ef=200", 10**6, False).factory
    'HNSW,M=32'

    Raises:
        ConfigurationError: neither of these.
    """
    if choice in ("auto", "exact"):
        exact = choice == "exact" or embedded or size <= EXACT_UP_TO
        choice = "FLAT" if exact else "AUTOINDEX"
    number = r"\w+=[0-9]*\.?[0-9]+"
    if not re.fullmatch(rf"[A-Z][A-Z0-9_]*(,{number})*", choice):
        raise ConfigurationError(
            f"--index is '{choice}', which is not one of Milvus: give exact, or a type and its numbers, such as "
            "HNSW,M=16,efConstruction=200"
        )
    if not re.fullmatch(rf"({number}(,{number})*)?", parameters):
        raise ConfigurationError(f"--index-parameters are '{parameters}': give numbers by name, such as ef=128")
    return IndexDescription("milvus", "ip", choice, parameters)


def automatic_factory(size: int, dimension: int) -> str:
    """Inverted lists of 4-bit codes that registers scan, the best few scored again from fp16 keys.

    There are about as many lists as keys in each, and a code for two dimensions, or for one where keys are narrow.

    >>> automatic_factory(1_000_000, 256), automatic_factory(1_000_000, 128)
    ('IVF1024,PQ128x4fs,Refine(SQfp16)', 'IVF1024,PQ128x4fs,Refine(SQfp16)')
    """
    lists = 1 << round(math.log2(math.sqrt(size)))
    codes = dimension if dimension <= NARROW or dimension % 2 else dimension // 2
    return f"IVF{lists},PQ{codes}x4fs,Refine(SQfp16)"


def entry_bytes(description: IndexDescription, dimension: int) -> int:
    """Bytes a key takes in the index's file, about."""
    if description.backend == "exact":
        return 0
    index = make_index(dimension, description.factory, description.metric)
    try:
        return index.sa_code_size() + 8
    except RuntimeError:
        return 4 * dimension + 300  # a graph: the key itself and its links
