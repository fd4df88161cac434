"""How fast entries that were learned are searched in lists and one by one, and how many of the nearest the lists find.

python scripts/recipes/segment_search.py DATASTORE [ENTRIES ...]

As many of DATASTORE's keys as each of ENTRIES (1000 20000 200000) says stand for what was learned, and 120 keys from beyond
them for hypotheses. Times are those of one core that this process had, so that what else the machine does counts little; of
several searches the shortest.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.live import GrowingLists, Segment

HYPOTHESES, K, REPEATS = 120, 8, 7


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    torch.set_num_threads(1)
    datastore = TokenDatastore(sys.argv[1])
    sizes = [int(size) for size in sys.argv[2:]] or [1000, 20_000, 200_000]
    metric, rng = datastore.section.index.metric, np.random.default_rng(1)
    rows = rng.choice(np.arange(max(sizes), datastore.section.size), HYPOTHESES, replace=False)
    queries = torch.from_numpy(datastore.keys[np.sort(rows)].astype(np.float32))
    heads = f"entries|one by one, ms|in lists, ms|of the {K} nearest found|of the nearest|lists made in, s"
    table: list[list[Any]] = [heads.split("|")]
    for size in sizes:
        keys = torch.from_numpy(np.array(datastore.keys[:size]))
        norms = half_norms(keys)
        made, lists = timed(partial(GrowingLists.of, keys, np.arange(size), metric), 1)
        one_by_one, in_lists = Segment(keys, norms, metric), Segment(keys, norms, metric, lists, size)
        exact, (_, wanted) = timed(partial(one_by_one.search, queries, K))
        listed, (_, found) = timed(partial(in_lists.search, queries, K))
        hits = (wanted.unsqueeze(2) == found.unsqueeze(1)).any(dim=2).float()
        table.append([f"{size:,}", f"{1000 * exact:.1f}", f"{1000 * listed:.1f}", f"{hits.mean():.1%}",
                      f"{hits[:, 0].mean():.1%}", f"{made:.1f}"])  # fmt: skip
    print(markdown_table(table))


def timed(work: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    """Do work several times; returns the fewest seconds of CPU that it took, and what it gave."""
    took = []
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        took.append(time.process_time() - start)
    return min(took), result


if __name__ == "__main__":
    main()
