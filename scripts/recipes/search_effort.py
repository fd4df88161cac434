"""The cost and recall of search settings, for the queries of beam search.

python scripts/recipes/search_effort.py MODEL DATASTORE SOURCE INDEX PARAMETERS [PARAMETERS ...]

DATASTORE is a token datastore of the translation model MODEL, whose k and temperature count. INDEX is what --index of
fairseq-ccpr build tokens takes, PARAMETERS what --index-parameters takes, such as nprobe=16,k_factor_rf=8. The model
translates the text SOURCE with the datastore; some of its queries, drawn at random, are then searched in an index of the same
keys. A row has the least of three times of 160 queries and of 5, the recall, and two measures against exact search: mass, the
part of p_tok that the neighbours found have, and shift, half the sum of all differences between both p_tok.
"""

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr import TokenDatastore, TokenMemory, TokenRetriever, Translator
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.lab.speed.search_speed import time_search
from fairseq_ccpr.search import ExactIndex, build_index, open_index
from fairseq_ccpr.search.faiss_index import RESCORED, import_faiss
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.text.pairs import read_lines

QUERIES, BATCHES, REPEATS = 1280, (160, 5), 3
BACKENDS = ("faiss", RESCORED)
HEADING = ["search", "bytes per key", *(f"{count}, ms" for count in BATCHES), "recall", "mass", "shift"]


def main() -> None:
    if len(sys.argv) < 6:
        sys.exit(__doc__.strip())
    model, folder, source, choice, *efforts = sys.argv[1:]
    torch.set_num_threads(1)
    import_faiss().omp_set_num_threads(1)
    store = TokenDatastore(folder)
    metric, values = store.section.index.metric, torch.from_numpy(np.array(store.values)).long()
    description = plan_index(choice, metric, "", *store.keys.shape)
    if description.backend not in BACKENDS:
        sys.exit(f"INDEX is '{choice}': give a factory string of FAISS, whose search has parameters")
    queries, k, temperature = asked(model, store, read_lines(Path(source)))
    if len(queries) < BATCHES[0]:
        sys.exit(
            f"{source} gives {len(queries)} queries, and {BATCHES[0]} are searched at once: give more text"
        )
    wanted = ExactIndex(store.keys, metric).search(queries, k)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        build_index(store.keys, description, Path(scratch) / description.file, lambda _: None)
        size = sum((Path(scratch) / name).stat().st_size for name in description.files) / len(values)
        for effort in efforts:
            index = open_index(replace(description, parameters=effort), store.keys, Path(scratch))
            least = (min(time_search(index, queries[:count], k) for _ in range(REPEATS)) for count in BATCHES)
            times = [f"{1000 * seconds:.2f}" for seconds in least]
            found = compare(wanted, index.search(queries, k), values, temperature)
            rows.append([effort, f"{size:.0f}", *times, *(f"{100 * part:.1f}%" for part in found)])
    print(markdown_table([HEADING, *rows]))


class RecordingRetriever(TokenRetriever):
    """Searches as decoding does, and keeps the queries as they are searched, fp32 [n, d] each."""

    def __init__(self, datastore: TokenDatastore) -> None:
        super().__init__(datastore, torch.device("cpu"))
        self.queries: list[Tensor] = []

    def project(self, states: Tensor) -> Tensor:
        keys = super().project(states)
        self.queries.append(keys.float())
        return keys


def asked(model: str, store: TokenDatastore, texts: Iterable[str]) -> tuple[Tensor, int, float]:
    """Translate texts, and return some of the queries, fp32 [n, d], with k and the temperature."""
    translator = Translator(model, datastore=store.directory, device="cpu")
    assert translator.ensemble is not None  # it has a datastore
    retriever = RecordingRetriever(store)
    tokens = translator.find_memory(TokenMemory)
    assert tokens is not None
    memory = replace(tokens, retriever=retriever)
    translator.ensemble = translator.ensemble.replacing(memory, trust=translator.ensemble.trust)
    for _ in translator.translate(texts):
        pass
    queries = torch.cat(retriever.queries)
    drawn = torch.randperm(len(queries), generator=torch.Generator().manual_seed(1))[:QUERIES]
    return queries[drawn], memory.settings.k, memory.settings.temperature


def compare(
    exact: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], values: Tensor, temperature: float
) -> tuple[float, float, float]:
    """Compute recall, mass and shift of what was found, scores and ids [n, k] each, on average over the queries."""
    shares = [(scores.float() / temperature).softmax(dim=1) for scores, _ in (exact, found)]
    (_, wanted), (_, ids) = exact, found
    there = (wanted.unsqueeze(2) == ids.unsqueeze(1)).any(dim=2).float()
    one, other = (
        torch.zeros(len(ids), int(values.max()) + 1).scatter_add_(1, values[rows.clamp_min(0)], share)
        for (_, rows), share in zip((exact, found), shares)
    )
    shift = (one - other).abs().sum(dim=1) / 2
    return float(there.mean()), float((shares[0] * there).sum(dim=1).mean()), float(shift.mean())


if __name__ == "__main__":
    main()
