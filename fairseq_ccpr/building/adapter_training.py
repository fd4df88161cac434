"""Training a CLKNN adapter with fairseq-train, as a stage of a build."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fairseq import options

from fairseq_ccpr.child_process import locked, run_child
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.models.token_adapter import TokenAdapterConfig, default_output
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import PLAN, write_json
from fairseq_ccpr.training.supervised_contrastive import SupervisedContrastiveConfig
from fairseq_ccpr.training.token_contrast import TokenContrastConfig
from fairseq_ccpr.version import __version__

BEST, LAST = "checkpoint_best.pt", "checkpoint_last.pt"
FINISHED = "finished"  # a file in the save directory
LOG = "train.log"
UPDATES = 1000

# fairseq takes the later of two, so --adapter-options can change any of them.
DEFAULTS = (
    "--task token_contrast --arch token_adapter --criterion supervised_contrastive "
    "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --no-epoch-checkpoints --optimizer adam --lr 3e-4 "
    "--lr-scheduler polynomial_decay --warmup-updates 100 --clip-norm 1 --batch-size 128 --seed 1 --num-workers 0"
)


@dataclass(frozen=True)
class AdapterTraining:
    """How an adapter is to be trained."""

    words: list[str]  # of the command line, the defaults first
    output_dim: int | None  # as given; None: derived from the width of the keys

    @classmethod
    def parse(cls, extra: str) -> AdapterTraining:
        """Read `--adapter-options`, options of fairseq-train, before any work is done.

        Raises:
            ConfigurationError: fairseq-train does not take them.
        """
        printed = io.StringIO()
        try:
            given = shlex.split(extra)
            words = [*shlex.split(DEFAULTS), "--max-update", str(UPDATES), *given]
            parser = options.get_training_parser()
            with contextlib.redirect_stderr(printed):
                parsed: Any = options.parse_args_and_arch(
                    parser, input_args=["datastore", "--total-num-update", "1", *words]
                )
        except (SystemExit, ValueError, KeyError, RuntimeError) as error:
            lines = printed.getvalue().strip().splitlines()
            reason = lines[-1].split("error: ")[-1] if lines else error
            raise ConfigurationError(
                f"--adapter-options '{extra}': fairseq-train does not take them ({reason})"
            ) from None
        # The learning rate falls to 0 at the last update.
        words = ["--total-num-update", str(parsed.max_update), *words]
        return cls(words, getattr(parsed, "adapter_output_dim", 0) or None)

    def fingerprint(self, keys: list[str]) -> str:
        """Digest everything that the outcome depends on: the keys, the options, and the defaults of those not given.

        Args:
            keys: fingerprints of the raw keys and of what they were extracted from.
        """
        configs = (TokenContrastConfig, TokenAdapterConfig, SupervisedContrastiveConfig)
        defaults = [f"{config.__name__}.{f.name}={f.default}" for config in configs for f in fields(config)]
        return fingerprint.of_strings([*keys, *self.words, *defaults, __version__])

    def width(self, dimension: int) -> int:
        """Return the width of the adapter's vectors for keys of width `dimension`."""
        return self.output_dim or default_output(dimension)

    def run(self, stores: list[Path], save_dir: Path, identity: str, cpu: bool, quiet: bool) -> Path:
        """Train the adapter of a raw datastore, or resume its training, unless it is finished.

        Args:
            stores: datastores of the decoder's own states: one to train on, and perhaps one to validate on.
            save_dir: where fairseq keeps its checkpoints.
            identity: the fingerprint.
            quiet: let fairseq's messages go to a log in `save_dir`, not to stderr.

        Returns:
            The checkpoint with the best retrieval accuracy on held-out sentences; the untrained start is one of them.

        Raises:
            ConfigurationError: fairseq-train fails.
            DatastoreError: the folder belongs to another training run.
        """
        plan = save_dir / PLAN
        begun = plan.exists() and (save_dir / LAST).exists()
        if begun and json.loads(plan.read_text(encoding="utf-8")) != {"fingerprint": identity}:
            raise DatastoreError(
                f"{save_dir} holds another training: give the same options, or another --output, or delete it"
            )
        if not (save_dir / FINISHED).exists():
            save_dir.mkdir(parents=True, exist_ok=True)
            write_json(plan, {"fingerprint": identity})
            user_dir = Path(__file__).resolve().parent.parent
            command = [sys.executable, "-m", "fairseq_cli.train", str(stores[0]), "--user-dir", str(user_dir)]
            command += [word for valid in stores[1:] for word in ("--valid-datastore", str(valid))]
            command += [*self.words, "--save-dir", str(save_dir), *(["--cpu"] if cpu else [])]
            _run(command, save_dir, quiet)
            if not (save_dir / BEST).exists():
                raise ConfigurationError(
                    f"fairseq-train wrote no {save_dir / BEST}: take options that turn saving or validation off out of "
                    "--adapter-options"
                )
            (save_dir / FINISHED).touch()
        return save_dir / BEST


def _run(command: list[str], save_dir: Path, quiet: bool) -> None:
    # In a process of its own: fairseq-train starts one for each GPU, which torchrun must not know of.
    torchrun = ("MASTER_", "WORLD_SIZE", "RANK", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        environment.pop("OMP_NUM_THREADS", None)  # torchrun sets it to 1, for many processes at once
    work = "a process is already training"
    with locked(save_dir, work) as lock, (save_dir / LOG).open("a", encoding="utf-8") as log:
        # In our own process group, so that killing the group also kills the training.
        code = run_child(command, lock, log if quiet else sys.stderr, environment, Path.cwd(), own_group=False)
    if code:
        lines = (save_dir / LOG).read_text(encoding="utf-8").strip().splitlines() if quiet else []
        raise ConfigurationError(
            f"fairseq-train ended with exit code {code} ({lines[-1] if lines else 'see above'}); "
            "fix the cause, then run the same command to resume"
        )
