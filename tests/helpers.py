"""Run commands as a user would, and compare what they leave."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fairseq import checkpoint_utils, utils

from fairseq_ccpr import Translator
from fairseq_ccpr.cli import main
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.forced import joined
from fairseq_ccpr.decoding.learned_memory import LearnedMemory
from fairseq_ccpr.decoding.memory import Snapshot
from fairseq_ccpr.decoding.mixture import Distribution, ModelView, Vote
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import Neighbours
from fairseq_ccpr.evaluation.grids import HeldOut, force_decode_text, log_likelihood
from fairseq_ccpr.importing import install_report
from fairseq_ccpr.storage.files import CHECKSUM, MANIFEST, read_checked_json, write_checked_json

ROOT = Path(__file__).resolve().parent.parent
USER_DIR = ROOT / "fairseq_ccpr"
PROGRAM = [sys.executable, "-m", "fairseq_ccpr"]
# The memories that trust weighs, with the names of their features.
TOKENS: dict[str, Sequence[str]] = {"tokens": TokenMemory.features}
BOTH: dict[str, Sequence[str]] = TOKENS | {"phrases": PhraseMemory.features}
DEMO = ROOT / "datastores" / "demo"


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def begin(
    *command: object, out: Path | str = os.devnull, err: Path | str = os.devnull, **environment: str
) -> BaseProcess:
    """Begin a command of this project or of fairseq, or a script, in a process of its own, on one thread, in the checkout.

    It is forked off a process that has imported everything, which spares it the seconds that this takes, and
    leads a group.
    """
    words = [str(word) for word in command]
    process = FORKS.Process(target=_execute, args=(words, os.environ | environment, str(out), str(err)))
    process.start()
    return process


def _execute(words: list[str], environment: dict[str, str], *outputs: str) -> None:
    os.setsid()
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    logging.getLogger().handlers.clear()  # the first module of a command decides where it logs
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.argv = [*words[0].split(), *words[1:]]
    install_report()
    try:
        if words[0].endswith(".py"):
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            main_of(words[0].split()[0])()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def run(*command: object, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this project or of fairseq, a script or another program as a user would, from the checkout.

    With an environment of its own its process starts from nothing.
    """
    words = [str(word) for word in command]
    forked = words[0].startswith("fairseq-") or words[0].endswith(".py")
    done = _fork(words) if forked and not environment else _start(words, environment)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def _fork(words: list[str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "out"), Path(folder, "err")
        process = begin(*words, out=outputs[0], err=outputs[1])
        process.join()
        assert process.exitcode is not None
        said = (path.read_text(encoding="utf-8") for path in outputs)
        return subprocess.CompletedProcess(words, process.exitcode, *said)


def _start(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if words[0].startswith("fairseq-ccpr"):
        words = [*PROGRAM, *words[0].split()[1:], *words[1:]]
    elif words[0].endswith(".py"):
        words = [sys.executable, *words]
    elif not words[0].startswith("/"):
        words = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def as_torchrun(*command: object) -> list[BaseProcess]:
    """Begin a command in two processes that know of each other as torchrun has it."""
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [begin(*command, **group, RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def run_two_processes(*command: object) -> list[str]:
    """Run fairseq-train in two processes on this CPU, as fairseq's own options for it have it; what each one logged."""
    together = ["--distributed-world-size", 2, "--distributed-init-method", f"tcp://localhost:{free_port()}"]
    together += ["--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(run, *command, *together, "--distributed-rank", rank) for rank in range(2)]
        return [process.result().stdout + process.result().stderr for process in done]


def adaptive_trust() -> Any:
    """The trust of the worked example, imported as fairseq does for `--user-dir`."""
    utils.import_user_module(Namespace(user_dir=str(ROOT / "user_dir")))
    return import_module("user_dir").AdaptiveTrust


def own_bytes() -> int:
    """Measure the memory that this process holds and does not share, as Linux counts it; what is free goes back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main_of(command: str) -> Callable[[], None]:
    """Find the entry point of a command of this project or of fairseq by its name."""
    if command.startswith("fairseq-") and command != "fairseq-ccpr":
        return import_module(f"fairseq_cli.{command[len('fairseq-') :]}").cli_main
    return main


def call(command: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which spares it the imports; what it prints and its exit code are the same."""
    out, err = io.StringIO(), io.StringIO()
    of_command = [command] if command.startswith("fairseq-") else ["fairseq-ccpr", *command.split()]
    words = [*of_command, *(str(word) for word in arguments)]
    # fairseq keeps the best score of a training in its process
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    code = 0
    report = patch.object(sys, "excepthook", sys.excepthook)
    with patch.object(sys, "argv", words), report, redirect_stdout(out), redirect_stderr(err):
        install_report()
        try:
            main_of(command)()
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # what the interpreter does in the end
            code = 1
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    if check and code:
        raise AssertionError(f"{words}\n{done.stdout}\n{done.stderr}")
    return done


def with_threads(count: int, do: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        do()
    finally:
        torch.set_num_threads(before)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Within this no file may be longer: as on a full disk, the system takes what fits and then refuses."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it, unless a library changed that
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def equal(
    one: dict[int, list[dict[str, Any]]], two: dict[int, list[dict[str, Any]]], tolerance: float = 0.0
) -> bool:
    """Whether two decodings have the same hypotheses, and scores that differ by no more than `tolerance`."""
    pairs = [(a, b) for i in one for a, b in zip(one[i], two[i])]
    return (
        one.keys() == two.keys()
        and all(len(one[i]) == len(two[i]) for i in one)
        and all(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs)
        and all((a["positional_scores"] - b["positional_scores"]).abs().max() <= tolerance for a, b in pairs)
    )


def refused(done: subprocess.CompletedProcess[str], *patterns: str) -> None:
    """Assert that a command ended with one sentence that matches, and no traceback."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    message = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(message) == 1, done.stderr
    for pattern in patterns:
        assert re.search(pattern, message[0]), message[0]


def with_option(command: list[object], option: str, value: object) -> list[object]:
    """The command with another value of an option."""
    changed = list(command)
    changed[changed.index(option) + 1] = value
    return changed


class Malice:
    """Unpickled, this would run a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def output_of(done: subprocess.CompletedProcess[str], kind: str) -> dict[int, str]:
    """The lines of fairseq's output of one kind, such as H or D, by sentence."""
    return {int(i): rest for i, rest in re.findall(rf"^{kind}-(\d+)\t(.*)$", done.stdout, flags=re.MULTILINE)}


def texts(translator: Translator, sentences: Any) -> list[str]:
    return [one.text for one in translator.translate(sentences)]


def hypotheses(printed: str) -> list[str]:
    """What fairseq-generate printed, in the order of the test set."""
    rows = [line.split("\t") for line in printed.splitlines() if line.startswith("D-")]
    return [row[2] for row in sorted(rows, key=lambda row: int(row[0][2:]))]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit_manifest(folder: Path, **changes: object) -> None:
    """Change top-level entries of a manifest, which stays one that could have been written so."""
    data = read_checked_json(folder / MANIFEST)
    write_checked_json(folder / MANIFEST, {k: v for k, v in data.items() if k != CHECKSUM} | changes)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def accuracies(log: str) -> list[float]:
    """Of each validation, acc@1."""
    return [float(found) for found in re.findall(r"valid' subset .*?\| accuracy ([0-9.]+)", log)]


def assert_learned_as_built(datastore: Path, rows: list[tuple[str, str]]) -> None:
    """Assert that its first sentences, learned alongside it, have its values and, but for others in a batch, its keys."""
    translator, built = Translator(datastore=datastore, device="cpu"), TokenDatastore(datastore)
    done = translator.learn_all(rows)
    memory = translator.find_memory(TokenMemory)
    assert memory is not None
    learned = memory.learned
    assert isinstance(learned, LearnedMemory)
    for sentence, one in enumerate(done):
        assert not isinstance(one, str), one
        values, keys = learned.store.entries[one.id]
        own = built.provenance[:, 0] == sentence
        assert values.tolist() == built.values[own].tolist() and len(values) > 3
        np.testing.assert_allclose(keys, built.keys[own], rtol=1e-2, atol=1e-2)
    translator.close()


def vote(memory: TokenMemory, states: torch.Tensor, log_probs: torch.Tensor) -> Vote:
    """What a token memory says after given states, [N, d], of a model that says log_probs [N, V]."""
    neighbours = neighbours_of(memory, states)
    return memory.vote(neighbours, Distribution(log_probs).view(neighbours.values), None, False)


def weight_of(neighbours: Neighbours, model: ModelView, settings: TokenRetrievalSettings) -> torch.Tensor:
    """The interpolation weight of a token memory with these settings, fp32 [N]."""
    nothing: Any = None
    return TokenMemory(nothing, nothing, settings, 3).weight(neighbours, model)


def neighbours_of(memory: TokenMemory, states: torch.Tensor) -> Neighbours:
    """What a token memory finds for given states, [N, d]."""
    learned = memory.learned.entries if memory.learned is not None else None
    batch = memory.begin(torch.zeros(1, 1, dtype=torch.int64), Snapshot(learned))
    return batch.search(states, torch.zeros(len(states), dtype=torch.int64))


def held_out_text(ensemble: RetrievalEnsemble, samples: list[Any], k: int = 64) -> HeldOut:
    """What tuning keeps of batches, with k neighbours of each token."""
    tokens = ensemble.find(TokenMemory)
    assert tokens is not None
    widest = ensemble.replacing(replace(tokens, settings=replace(tokens.settings, k=k)))
    return force_decode_text("test", samples, widest)


def token_grid(
    memory: TokenMemory, text: HeldOut, *grid: Sequence[Any]
) -> dict[TokenRetrievalSettings, float]:
    """Mean log-likelihood of the references at points of a grid of the tokens, see `TokenMemory.points`."""
    found = joined([one.records[memory.name] for one in text.texts], torch.cat)
    points = memory.points(found, text.targets, *grid)
    return {one: float(log_likelihood(text.mixture, text.log_probs, [(p, w)]).mean()) for one, p, w in points}
