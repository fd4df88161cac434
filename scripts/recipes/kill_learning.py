"""Kill processes that learn, replace, forget and compact alongside a copy of a datastore; nothing may be lost or half done.

python scripts/recipes/kill_learning.py DATASTORE [KILLS]
python scripts/recipes/kill_learning.py DATASTORE --damages DAMAGES
python scripts/recipes/kill_learning.py DATASTORE --beside KILLS

Of the kills (2000), three in four are of learning, replacing and forgetting, the others of compacting. With --damages, a
journal is damaged instead, its bytes flipped, cut off, zeroed, inserted or exchanged: each is harmless, refused or told. With
--beside, a build and a compaction meet in one folder, one stopped before a change of a file that is drawn, and one of them or
both are killed. It needs what the tests need.
"""

import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.killing import damage_journals, kill_beside, kill_compacting, kill_learning


def main() -> None:
    mode = sys.argv[2] if sys.argv[2:3] and sys.argv[2].startswith("--") else ""
    if len(sys.argv) not in ((4,) if mode else (2, 3)) or mode not in ("", "--damages", "--beside"):
        sys.exit(__doc__.strip())
    store, count = Path(sys.argv[1]), int(sys.argv[-1]) if len(sys.argv) > 2 else 2000
    seed = random.randrange(2**32)
    print(f"moments and bits are drawn with the seed {seed}")
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        one, two = (Path(shutil.copytree(store, Path(folder) / name)) for name in ("one", "two"))
        if mode == "--damages":
            logging.lastResort = None  # each would print a line
            print(
                ", ".join(
                    f"{times:,} {what}" for what, times in sorted(damage_journals(one, count, rng).items())
                )
            )
            return
        if mode == "--beside":
            for met, times in sorted(kill_beside(one, count, rng).items()):
                print(f"{times:4} {met}")
            print(f"{count:,} kills of a build beside a compaction: nothing lost, nothing half there")
            return
        acknowledged = kill_learning(one, count - count // 4, rng)
        print(
            f"{count - count // 4:,} kills of learning: {acknowledged:,} changes acknowledged, none lost, none half there"
        )
        generations = kill_compacting(two, count // 4, rng)
        print(
            f"{count // 4:,} kills of compacting: complete each time, before or after (generations {sorted(generations)})"
        )


if __name__ == "__main__":
    main()
