"""How fast the server answers 1, 8 and 32 clients at a time, and whether it loses a request or grows.

python scripts/recipes/server_load.py PAIRS.tsv SECONDS [OPTION of fairseq-ccpr serve ...]

Starts a server at a free port of loopback. Each client sends one sentence of PAIRS.tsv after another, until SECONDS are over
or all clients have sent 20,000. Every answer must be the one that the sentence had before.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.text.pairs import read_pairs

CLIENTS, MOST_REQUESTS, SENTENCES = (1, 8, 32), 20_000, 200


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    pairs, seconds, *options = sys.argv[1:]
    sentences = [source for source, _ in islice(read_pairs(Path(pairs)), SENTENCES)]
    table: list[list[Any]] = [
        [
            "clients",
            "requests",
            "requests/s",
            "p50, ms",
            "p95, ms",
            "failed",
            "other answers",
            "memory, MiB",
            "afterwards",
        ]
    ]
    with started(options) as (process, address):
        known: dict[str, str] = {}
        load(address, sentences, 1, 5.0, known)  # warms up
        for clients in CLIENTS:
            before = memory(process.pid)
            start = time.perf_counter()
            took, failed, others = load(address, sentences, clients, float(seconds), known)
            rate = len(took) / (time.perf_counter() - start)
            p50, p95 = np.quantile(took, [0.5, 0.95]) * 1000
            row = [clients, f"{len(took):,}", f"{rate:.1f}", f"{p50:.0f}", f"{p95:.0f}", failed, others]
            table.append([*row, f"{before:.0f}", f"{memory(process.pid):.0f}"])
    print(markdown_table(table))


@contextmanager
def started(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server, and end it as a service manager would."""
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


def load(
    address: str, sentences: list[str], clients: int, seconds: float, known: dict[str, str]
) -> tuple[list[float], int, int]:
    """Send requests from so many clients; returns the seconds of each, how many failed, and how many differed."""
    took: list[float] = []
    faults: list[str] = []
    numbers, end = count(), time.monotonic() + seconds

    def client(first: int) -> None:
        connection = HTTPConnection(address, timeout=120)
        for number in count(first * 7):
            if time.monotonic() >= end or next(numbers) >= MOST_REQUESTS:
                return
            sentence = sentences[number % len(sentences)]
            start = time.perf_counter()
            try:
                connection.request(
                    "POST", "/translate", json.dumps({"q": sentence}), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                text = json.load(answer)["translatedText"]
            except (OSError, KeyError, ValueError) as error:
                faults.append(f"failed: {error}")
                connection.close()
                continue
            took.append(time.perf_counter() - start)
            if known.setdefault(sentence, text) != text:
                faults.append("other")

    threads = [threading.Thread(target=client, args=(first,)) for first in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others = faults.count("other")
    return took, len(faults) - others, others


def memory(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
