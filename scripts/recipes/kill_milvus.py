"""Kill a Milvus server while keys move to it, while it searches, and while it compacts; nothing may be lost, no answer wrong.

python scripts/recipes/kill_milvus.py FOLDER [KILLS [OPTIONS]]

FOLDER is one of scripts/recipes/milvus_server.sh, which this starts, with these options; no other may run on this machine.
Half of the kills (20) are of uploads, the others of searches and of Milvus's own compaction, in turn. Keys are random. It
prints how long Milvus took until it answered again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.base import IndexDescription, RemoteKeys, StoreAddress
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.milvus import MilvusIndex

KEYS, WIDTH, QUERIES, K = 20_000, 64, 32, 8
PORT = 19540
STARTING = 300.0  # seconds that a server may take


class Server:
    """The server, in a group of processes of its own."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        script = Path(__file__).with_name("milvus_server.sh")
        self.words = [str(script), str(folder), str(PORT), *options]
        self.log = (folder / "kills.log").open("ab")
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.words, stdout=self.log, stderr=self.log, start_new_session=True)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            while True:  # until all have ended, whose ports the next one needs
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.1)

    def kill_later(self, seconds: float) -> threading.Thread:
        """Kill it in so many seconds, and start it again 2 later."""

        def act() -> None:
            time.sleep(seconds)
            self.kill()
            time.sleep(2)
            self.start()

        thread = threading.Thread(target=act)
        thread.start()
        return thread


def collection(name: str, keys: np.ndarray) -> MilvusIndex:
    place = RemoteKeys(
        StoreAddress(f"http://127.0.0.1:{PORT}", name), len(keys), WIDTH, {"name": name}, STARTING
    )
    return MilvusIndex(place, IndexDescription("milvus", "ip", "FLAT"))


def check(index: MilvusIndex, keys: np.ndarray) -> None:
    """Every key to the bit, and the neighbours of exact search."""
    if not np.array_equal(np.concatenate(list(index.read())), keys):
        sys.exit(f"{index.address}: the keys are not those that were written")


def wrong(index: MilvusIndex, exact: ExactIndex, queries: torch.Tensor) -> int:
    """Count the queries whose neighbours are not as near as those of exact search."""
    found, wanted = index.search(queries, K)[0], exact.search(queries, K)[0]
    return int((~torch.isclose(found, wanted, atol=1e-3)).any(dim=1).sum())


def try_often(work: Any) -> int:
    """Run what a user would run again where it failed with a sentence; returns how often it failed."""
    for failures in range(20):
        try:
            work()
            return failures
        except DatastoreError as error:
            print(f"  said: {error}")
    sys.exit("it did not come to an end")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    seed = random.randrange(2**32)
    print(f"moments are drawn with the seed {seed}")
    draw, rng = random.Random(seed), np.random.default_rng(1)
    keys = rng.standard_normal((KEYS, WIDTH), np.float32).astype(np.float16)
    queries = torch.from_numpy(rng.standard_normal((QUERIES, WIDTH), np.float32))
    server, exact = Server(Path(sys.argv[1]).resolve(), sys.argv[3:]), ExactIndex(keys, "ip")
    try:
        first = collection("whole", keys)
        if first.exists():
            first.drop()
        start = time.monotonic()
        first.fill(keys, lambda rows: None)
        usual = time.monotonic() - start
        check(first, keys)
        print(f"{KEYS:,} keys of width {WIDTH} uploaded in {usual:.0f} s without a kill")
        for number in range(kills):
            start, name = time.monotonic(), ("upload", "search", "upload", "compaction")[number % 4]
            if name == "upload":
                index = collection("killed", keys)
                if index.exists():
                    index.drop()
                killer = server.kill_later(draw.uniform(0.5, usual))
                failures = try_often(lambda index=index: index.fill(keys, lambda rows: None))
            else:
                index = first
                killer = server.kill_later(draw.uniform(0.2, 3))
                if name == "compaction":
                    try_often(lambda: first.write(0, keys[:5_000]))  # what it has to merge
                    try_often(lambda: first.server.ask("compact", first.address.collection))
                    failures = try_often(
                        lambda: first.server.ask("flush", first.address.collection, slow=True)
                    )
                else:
                    failures = 0
                    while killer.is_alive():
                        failures += try_often(lambda: first.search(queries, K))
            killer.join()
            failures += try_often(lambda index=index: index.search(queries, K))
            check(index, keys)
            if faults := wrong(index, exact, queries):
                sys.exit(f"{index.address}: {faults} of {QUERIES} queries found other neighbours")
            took = time.monotonic() - start
            print(
                f"kill {number + 1}, {name}: all there, neighbours right after {took:.0f} s, {failures} failures",
                flush=True,
            )
    finally:
        server.kill()


if __name__ == "__main__":
    main()
