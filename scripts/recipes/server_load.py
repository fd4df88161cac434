"""How fast the server answers 1, 8, 32 and 64 clients at a time, and whether it loses a request or grows.

python scripts/recipes/server_load.py PAIRS.tsv SECONDS [--learn N] [OPTION of fairseq-ccpr serve ...]

Starts a server at a free port of loopback. Each client sends one sentence of PAIRS.tsv after another, until SECONDS are over
or all clients have sent 20,000. Every answer must be the one that the sentence had before. With --learn, each N-th request is
for /learn instead, with a pair that is none of those sentences; answers may then change, and every pair that was acknowledged
must be in the memory in the end. Give a datastore that may be written to.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.text.pairs import read_pairs

CLIENTS, MOST_REQUESTS, SENTENCES = (1, 8, 32, 64), 20_000, 200
HEADER = [
    "clients", "requests", "requests per second", "median, ms", "95th percentile, ms", "learned",
    "learning median, ms", "learning 95th percentile, ms", "failed", "other answers", "memory, MiB", "afterwards",
]  # fmt: skip


@dataclass
class Load:
    """What clients sent, and what came of it."""

    sentences: list[str]
    pairs: Iterator[tuple[str, str]]  # to be learned
    every: int  # how many requests of a client there are for one that learns; 0: none does
    known: dict[str, str] = field(default_factory=dict)  # translations
    translated: list[float] = field(default_factory=list)  # seconds
    learned: list[float] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_pair(self) -> tuple[str, str]:
        with self.lock:
            return next(self.pairs)

    def row(self, clients: int, seconds: float, process: int, before: float) -> list[Any]:
        others = self.faults.count("other")
        count = len(self.translated) + len(self.learned)
        row = [clients, f"{count:,}", f"{count / seconds:.1f}", *quantiles(self.translated), f"{len(self.learned):,}",
               *quantiles(self.learned), len(self.faults) - others, "" if self.every else others, f"{before:.0f}",
               f"{memory(process):.0f}"]  # fmt: skip
        self.translated, self.learned, self.faults = [], [], []
        return row


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("pairs", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--learn", type=int, default=0)
    given, options = parser.parse_known_args()
    rows = read_pairs(given.pairs)
    sentences = [source for source, _ in islice(rows, SENTENCES)]
    table: list[list[Any]] = [HEADER]
    with started(options) as (process, address):
        run = Load(sentences, rows, given.learn)
        load(address, run, 1, 5.0)  # warms up
        run.row(1, 5.0, process.pid, 0.0)
        for clients in CLIENTS:
            before, start = memory(process.pid), time.perf_counter()
            load(address, run, clients, given.seconds)
            table.append(run.row(clients, time.perf_counter() - start, process.pid, before))
        if given.learn:
            found = json.loads(asked(HTTPConnection(address, timeout=120), "GET", "/memory?limit=999999"))
            lost = run.ids - {pair["id"] for pair in found["pairs"]}
            print(f"{len(run.ids):,} pairs were acknowledged, {len(lost)} of them are not there")
    print(markdown_table(table))


def quantiles(seconds: list[float]) -> list[str]:
    """Return the median, and what 95 in 100 take at most, in milliseconds."""
    return [f"{1000 * q:.0f}" for q in np.quantile(seconds, [0.5, 0.95])] if seconds else ["", ""]


@contextmanager
def started(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "fairseq_ccpr", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip()).netloc
        if not address:
            sys.exit("the server did not start")
        try:
            yield process, address
        finally:
            process.terminate()
    print(f"the server ended with exit code {process.returncode}")


def load(address: str, run: Load, clients: int, seconds: float) -> None:
    numbers, end = count(), time.monotonic() + seconds

    def client(first: int) -> None:
        connection = HTTPConnection(address, timeout=120)
        for number in count(first * 7):
            if time.monotonic() >= end or next(numbers) >= MOST_REQUESTS:
                return
            try:
                if run.every and number % run.every == run.every - 1:
                    learn(connection, run)
                else:
                    translate(connection, run, run.sentences[number % len(run.sentences)])
            except (OSError, KeyError, ValueError) as error:
                run.faults.append(f"failed: {error}")
                connection.close()

    threads = [threading.Thread(target=client, args=(first,)) for first in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def translate(connection: HTTPConnection, run: Load, sentence: str) -> None:
    start = time.perf_counter()
    text = json.loads(asked(connection, "POST", "/translate", q=sentence))["translatedText"]
    run.translated.append(time.perf_counter() - start)
    if run.known.setdefault(sentence, text) != text:
        run.faults.append("other")


def learn(connection: HTTPConnection, run: Load) -> None:
    source, target = run.next_pair()
    start = time.perf_counter()
    number = json.loads(asked(connection, "POST", "/learn", q=source, s=target))["id"]
    run.learned.append(time.perf_counter() - start)
    run.ids.add(number)


def asked(connection: HTTPConnection, method: str, path: str, **sent: str) -> bytes:
    connection.request(method, path, json.dumps(sent) if sent else None, {"Content-Type": "application/json"})
    return connection.getresponse().read()


def memory(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
