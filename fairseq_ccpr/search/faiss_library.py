"""Helpers around FAISS's own objects: lazy import, factory strings, search parameters."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search.base import Effort

NARROW = 128  # dimensions, each of which then has a code of its own
FACTOR, CANDIDATES = "k_factor_rf", "candidates"  # a search parameter of FAISS, and one that it does not have


def import_faiss() -> Any:
    """Import FAISS.

    Raises:
        ConfigurationError: says how to install it.
    """
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it reports which instruction sets it tried
    try:
        import faiss
        import faiss.contrib.torch_utils  # lets indexes take tensors, on the GPU without a round trip
    except ImportError:
        raise ConfigurationError(
            "this index needs FAISS, which is not installed: pip install faiss-cpu (or faiss-gpu), or use --index exact"
        ) from None
    return faiss


def set_parameters(index: Any, parameters: str) -> int:
    """Apply search-time parameters in FAISS's own notation; an empty string changes nothing.

    One parameter is not FAISS's. Where candidates are scored again, `candidates=64` sets their minimum per query: few
    neighbours need more candidates each than many do.

    Returns:
        The minimum number of candidates; 0 if it is not given.

    Raises:
        ConfigurationError: parameters that the index does not have.
    """
    faiss, named = import_faiss(), named_parameters(parameters)
    candidates = named.pop(CANDIDATES, "0") if isinstance(index, faiss.IndexRefine) else "0"
    if not candidates.isdecimal():
        raise ConfigurationError(
            f"--index-parameters '{parameters}': {CANDIDATES} is '{candidates}'; give the number of keys to score again, "
            f"such as {CANDIDATES}=64"
        )
    try:
        faiss.ParameterSpace().set_index_parameters(index, format_parameters(named))
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS does not know the index parameters '{parameters}' for a {type(index).__name__}: "
            "give --index-parameters in its notation, such as nprobe=32 or efSearch=64"
        ) from None
    return int(candidates)


def named_parameters(parameters: str) -> dict[str, str]:
    """Return the values of search parameters by their names.

    Raises:
        ConfigurationError: a part of them is not NAME=VALUE.

    >>> named_parameters("nprobe=16, k_factor_rf = 4")
    {'nprobe': '16', 'k_factor_rf': '4'}
    """
    named = {}
    for word in re.sub(r"\s*=\s*", "=", parameters).replace(",", " ").split():
        if not re.fullmatch(r"\w+=[\w.+-]+", word):
            raise ConfigurationError(
                f"--index-parameters '{parameters}': '{word}' is not NAME=VALUE; separate parameters by commas, such as "
                "nprobe=32,k_factor_rf=4"
            )
        name, value = word.split("=")
        named[name] = value
    return named


def format_parameters(parameters: dict[str, str]) -> str:
    """Write search parameters in FAISS's notation."""
    return ",".join(f"{name}={value}" for name, value in parameters.items())


def complete_parameters(index: Any, given: str, effort: Effort) -> str:
    """Add defaults for search parameters that are not given: FAISS's own favour speed above recall."""
    faiss, named = import_faiss(), named_parameters(given)
    parameters = {}
    if (ivf := inverted_lists(index)) is not None:
        # By angle, the nearest keys are spread over more lists.
        probes = effort.probes or (24 if ivf.metric_type == faiss.METRIC_INNER_PRODUCT else 16)
        parameters["nprobe"] = f"{min(probes, ivf.nlist)}"
    if isinstance(index, faiss.IndexRefine):
        parameters[FACTOR] = f"{effort.candidates}"
        if effort.min_candidates and FACTOR not in named:
            parameters[CANDIDATES] = f"{effort.min_candidates}"
    if isinstance(index, faiss.IndexHNSW):
        parameters["efSearch"] = "64"
    return format_parameters(parameters | named)


def inverted_lists(index: Any) -> Any | None:
    """Return the inverted-list index inside `index`, if there is one."""
    return import_faiss().try_extract_index_ivf(index)


def skip_polysemous(index: Any, parameters: str) -> None:
    """Train plain product quantisers without ordering their codes for polysemous search, unless the parameters use it.

    FAISS's factory orders them by simulated annealing, which takes many times as long as all other training.
    """
    faiss = import_faiss()
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine):
        index = faiss.downcast_index(index.index if isinstance(index, faiss.IndexPreTransform) else index.base_index)
    if isinstance(index, faiss.IndexPQ) and "ht=" not in parameters:
        index.do_polysemous_training = False


def can_stay_on_disk(index: Any) -> bool:
    """Return whether all that grows with the entries of an empty index is in inverted lists of plain codes."""
    faiss = import_faiss()
    ivf = None if isinstance(index, faiss.IndexRefine) else inverted_lists(index)
    return ivf is not None and isinstance(faiss.downcast_InvertedLists(ivf.invlists), faiss.ArrayInvertedLists)


def make_index(dimension: int, factory: str, metric: str) -> Any:
    """Create an empty index.

    Raises:
        ConfigurationError: FAISS cannot make sense of `factory` at this width.
    """
    faiss = import_faiss()
    kind = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    try:
        return faiss.index_factory(dimension, factory, kind)
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS cannot make an index '{factory}' for keys of width {dimension}: "
            "give --index exact or a FAISS factory string such as IVF1024,SQfp16"
        ) from None


def automatic_factory(size: int, dimension: int, metric: str) -> str:
    """Choose inverted lists of 4-bit codes that registers scan, the best few scored again from the fp16 keys.

    There are about as many lists as keys in each, and a code for two dimensions, or for one where keys are narrow. By inner
    product, codes are of what a key is beyond the centre of its list: half the bytes then find as much, and a query needs but
    one more number of each list. A rotation shares out between all codes what there is to tell. By distance, a query would
    need tables of its own in each list, which cost more than they find: codes are of whole keys.

    >>> automatic_factory(1_000_000, 256, "l2"), automatic_factory(1_000_000, 128, "ip")
    ('IVF1024,PQ128x4fs,Refine(keys)', 'RR128,IVF1024,PQ64x4fsr,Refine(keys)')
    """
    lists, by_angle = f"IVF{list_count(size)}", metric == "ip"
    narrow = NARROW // 2 if by_angle else NARROW
    if dimension <= narrow or dimension % 2:
        return f"{lists},PQ{dimension}x4fs{'r' if by_angle else ''},Refine(keys)"
    codes = f"{lists},PQ{dimension // 2}x4fs"
    return f"RR{dimension},{codes}r,Refine(keys)" if by_angle else f"{codes},Refine(keys)"


def disk_factory(size: int) -> str:
    """Choose inverted lists of a byte for a dimension: nearly exact, with nothing to score again, which would be in memory.

    >>> disk_factory(1_000_000)
    'IVF1024,SQ8'
    """
    return f"IVF{list_count(size)},SQ8"


def list_count(size: int) -> int:
    """Choose about as many lists as keys in each, a power of 2."""
    return 1 << round(math.log2(math.sqrt(size)))


@contextmanager
def silence(silent: bool = True) -> Iterator[None]:
    """Silence what FAISS writes about lists on disk to stdout, which is for results."""
    if not silent:
        yield
        return
    stdout = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
