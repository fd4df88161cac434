"""Kill processes that learn, forget and compact alongside a copy of a datastore, and check that nothing is lost or half done.

python scripts/recipes/kill_learning.py DATASTORE [KILLS]

Of the kills (2000), three in four are of learning and forgetting, the others of compacting. It needs what the tests need.
"""

import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.killing import kill_compacting, kill_learning


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__.strip())
    store, kills = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 2000
    seed = random.randrange(2**32)
    print(f"moments are drawn with the seed {seed}")
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        one, two = (Path(shutil.copytree(store, Path(folder) / name)) for name in ("one", "two"))
        acknowledged = kill_learning(one, kills - kills // 4, rng)
        print(
            f"{kills - kills // 4:,} kills of learning: {acknowledged:,} changes acknowledged, none lost, none half there"
        )
        generations = kill_compacting(two, kills // 4, rng)
        print(
            f"{kills // 4:,} kills of compacting: complete each time, before or after (generations {sorted(generations)})"
        )


if __name__ == "__main__":
    main()
