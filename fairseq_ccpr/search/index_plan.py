"""Choosing an index for a store: what `--index` may say, and what it comes to."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search.base import DISK, METRICS, MILVUS, IndexDescription
from fairseq_ccpr.search.faiss_index import (
    Effort,
    can_stay_on_disk,
    default_parameters,
    inverted_lists,
    make_index,
    set_parameters,
)
from fairseq_ccpr.search.torch_ivf import ALIGN, number_of_lists

NARROW = 128  # dimensions, each of which then has a code of its own
TOKEN_EFFORT = Effort()
# Once a sentence more inverted lists can be searched than at each step; and where 64 neighbours are asked for anyway, two
# candidates scored again for each find nearly what eight do: of office's phrases 98.6% of the 16 nearest with both, and of
# all 64 96.3% and 97.6%.
PHRASE_EFFORT = Effort(probes=64, candidates=2)
PHRASE_DEPTH = 64  # neighbours that are asked for, at least
EXACT_UP_TO = 20_000  # keys; on a CPU, comparing with more of them costs about a step of a small decoder
TORCH_IVF = "torch-ivf"
TORCH_IVF_PROBES = 64


def plan_index(
    choice: str,
    metric: str,
    parameters: str,
    size: int,
    dimension: int,
    gpu: bool = False,
    effort: Effort = TOKEN_EFFORT,
) -> IndexDescription:
    """What `--index`, `--metric` and `--index-parameters` mean for `size` keys, before any work is done.

    Args:
        choice: `exact`; `torch-ivf`, or with a number of lists `torch-ivf4096`; a FAISS factory string; or `auto`: exact
            on a GPU, for small stores, and where there is no FAISS; else `automatic_factory`. `disk:` and a factory string
            keep the inverted lists on disk; `disk` alone takes `disk_factory`.
        parameters: FAISS search parameters, or `nprobe=` of `torch-ivf`; empty for those that suit the index.
        gpu: whether the search will run on a GPU.
        effort: of a search, where `parameters` do not say.

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
    if choice.startswith(TORCH_IVF):
        return _plan_torch_ivf(choice, metric, parameters, size, effort.probes)
    backend, choice = ("faiss", choice) if choice.partition(":")[0] != DISK else (DISK, choice.partition(":")[2])
    choice = choice or disk_factory(size)
    index = make_index(dimension, choice, metric)
    if backend == DISK and not can_stay_on_disk(index):
        raise ConfigurationError(
            f"--index {DISK}:{choice} has more than inverted lists of plain codes, and FAISS keeps no others on disk: give "
            f"one such as {DISK}:{disk_factory(size)}"
        )
    if (ivf := inverted_lists(index)) is not None and ivf.nlist > size:
        raise _too_many_lists(choice, ivf.nlist, size)
    set_parameters(index, parameters)
    name = f"{_file_stem(choice, metric, backend)}.faiss"
    return IndexDescription(backend, metric, choice, parameters or default_parameters(index, effort), name)


def _plan_torch_ivf(choice: str, metric: str, parameters: str, size: int, probes: int | None) -> IndexDescription:
    """Four times as many lists as the root of the number of keys, if not given: on a GPU, many centroids cost little.

    But not so many that most of what lists are filled up with to a multiple of `ALIGN` is no keys.
    """
    given = choice.removeprefix(TORCH_IVF)
    if not re.fullmatch(r"[1-9]\d*|", given):
        raise ConfigurationError(f"--index is '{choice}': give {TORCH_IVF}, or with a number of lists {TORCH_IVF}1024")
    lists = int(given) if given else min(1 << round(math.log2(4 * math.sqrt(size))), max(1, size // ALIGN))
    if lists > size:
        raise _too_many_lists(choice, lists, size)
    if not re.fullmatch(r"nprobe=[1-9]\d*|", parameters):
        raise ConfigurationError(
            f"--index-parameters is '{parameters}': {TORCH_IVF} takes nprobe=N, the lists to search"
        )
    factory = f"{TORCH_IVF}{lists}"
    parameters = parameters or f"nprobe={min(probes or TORCH_IVF_PROBES, lists)}"
    stem = _file_stem(factory, metric, TORCH_IVF)
    return IndexDescription(TORCH_IVF, metric, factory, parameters, f"{stem}.safetensors")


def _too_many_lists(choice: str, lists: int, size: int) -> ConfigurationError:
    return ConfigurationError(
        f"--index {choice} has {lists:,} lists, but the datastore will have {size:,} keys: use fewer lists or exact"
    )


def _file_stem(factory: str, metric: str, backend: str) -> str:
    kind = f"{factory} {metric}" + (f" {DISK}" if backend == DISK else "")
    return f"index-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"


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
    return IndexDescription(MILVUS, "ip", choice, parameters)


def automatic_factory(size: int, dimension: int) -> str:
    """Inverted lists of 4-bit codes that registers scan, the best few scored again from fp16 keys.

    There are about as many lists as keys in each, and a code for two dimensions, or for one where keys are narrow.

    >>> automatic_factory(1_000_000, 256), automatic_factory(1_000_000, 128)
    ('IVF1024,PQ128x4fs,Refine(SQfp16)', 'IVF1024,PQ128x4fs,Refine(SQfp16)')
    """
    lists = list_count(size)
    codes = dimension if dimension <= NARROW or dimension % 2 else dimension // 2
    return f"IVF{lists},PQ{codes}x4fs,Refine(SQfp16)"


def disk_factory(size: int) -> str:
    """Inverted lists of a byte for a dimension: nearly exact, with nothing to score again, which would be in memory.

    >>> disk_factory(1_000_000)
    'IVF1024,SQ8'
    """
    return f"IVF{list_count(size)},SQ8"


def list_count(size: int) -> int:
    """About as many as keys in each."""
    return 1 << round(math.log2(math.sqrt(size)))


def index_bytes(description: IndexDescription, size: int, dimension: int) -> int:
    """Bytes that the index's files take for so many keys while they are made, about."""
    if description.backend == "exact":
        return 0
    if description.backend == TORCH_IVF:
        lists = number_of_lists(description.factory)
        return (size + ALIGN // 2 * lists) * (2 * dimension + 4) + lists * (4 * dimension + 8)
    index = make_index(dimension, description.factory, description.metric)
    try:
        once = size * (index.sa_code_size() + 8)
        return 2 * once if description.backend == DISK else once  # in a block, and merged
    except RuntimeError:
        return size * (4 * dimension + 300)  # a graph: the key itself and its links
