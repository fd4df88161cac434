"""Training a CLKNN adapter with fairseq-train, as a stage of a build."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from fairseq_ccpr.datastore.manifest import PLAN, write_json
from fairseq_ccpr.errors import ConfigurationError, DatastoreError

BEST = "checkpoint_best.pt"
FINISHED = "finished"  # a file in the save directory
LOG = "train.log"
LOCK = "lock"

# What the chain trains with; fairseq takes the later of two, so --adapter-options can change any of them.
DEFAULTS = (
    "--optimizer adam --lr 1e-3 --lr-scheduler polynomial_decay --total-num-update 3000 --warmup-updates 100 "
    "--max-update 3000 --clip-norm 1 --batch-size 128 --patience 6 --seed 1 --num-workers 0"
)


def training_command(raw: Path, save_dir: Path, extra: str, cpu: bool) -> list[str]:
    """The fairseq-train command that trains an adapter on the keys in `raw`."""
    user_dir = Path(__file__).resolve().parent.parent
    words = [sys.executable, "-m", "fairseq_cli.train", str(raw), "--user-dir", str(user_dir)]
    words += shlex.split(
        "--task token_contrast --arch token_adapter --criterion supervised_contrastive "
        "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --no-epoch-checkpoints"
    )
    words += [*shlex.split(DEFAULTS), *shlex.split(extra)]
    words += ["--save-dir", str(save_dir), "--log-file", str(save_dir / LOG)]
    return [*words, "--cpu"] if cpu else words


def train_adapter(raw: Path, save_dir: Path, fingerprint: str, extra: str, cpu: bool, quiet: bool) -> Path:
    """Train, go on training, or find trained, the adapter of a raw datastore.

    Args:
        raw: datastore of the decoder's own states.
        save_dir: where fairseq keeps its checkpoints and its log.
        fingerprint: of all that the training depends on.
        extra: options of fairseq-train.

    Returns:
        The checkpoint with the best retrieval accuracy on held-out sentences.

    Raises:
        ConfigurationError: fairseq-train does not take the options, or fails.
        DatastoreError: the folder holds the training of something else.
    """
    plan = save_dir / PLAN
    if plan.exists() and json.loads(plan.read_text(encoding="utf-8")) != {"fingerprint": fingerprint}:
        raise DatastoreError(
            f"{save_dir} holds another training: give the same options, or another --output, or delete it"
        )
    if not (save_dir / FINISHED).exists():
        save_dir.mkdir(parents=True, exist_ok=True)
        write_json(plan, {"fingerprint": fingerprint})
        _run(training_command(raw, save_dir, extra, cpu), save_dir, quiet)
        if not (save_dir / BEST).exists():
            raise ConfigurationError(
                f"fairseq-train wrote no {save_dir / BEST}: take options that turn saving or validation off out of "
                "--adapter-options"
            )
        (save_dir / FINISHED).touch()
    return save_dir / BEST


def _run(command: list[str], save_dir: Path, quiet: bool) -> None:
    # In a process of its own: fairseq-train starts as many as there are GPUs, and is none of torchrun's.
    environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")}
    out, err = (subprocess.DEVNULL, subprocess.PIPE) if quiet else (sys.stderr, None)
    with (save_dir / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"a process is training in {save_dir} already: wait for it, or stop it") from None
        # The training holds the lock as well, and so on its own, should this process be killed.
        done = subprocess.run(command, env=environment, stdout=out, stderr=err, text=True, pass_fds=[lock.fileno()])
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        raise ConfigurationError(
            f"fairseq-train ended with exit code {done.returncode}{f' ({lines[-1]})' if lines else ''}: "
            f"look at {save_dir / LOG}; the same command goes on where it was"
        )
