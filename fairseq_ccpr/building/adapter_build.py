"""The CLKNN adapter of a datastore: trained with fairseq-train on raw keys, which it then projects."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options

from fairseq_ccpr.building.part import ADAPTER, RAW, VALID, ChunkRows, Processes, TokenPart, refuse_foreign
from fairseq_ccpr.building.token_build import PCA_DIMENSION, TRAINED_ADAPTER, Extraction, TokenBuildSettings
from fairseq_ccpr.child_process import locked, run_child
from fairseq_ccpr.datastore.manifest import Manifest, ProjectionDescription, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, PROJECTION_FILE, PROVENANCE, VALUES
from fairseq_ccpr.datastore.token import KeyProjection, TokenDatastore, fit_pca, sample_rows
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.models.token_adapter import TokenAdapter, TokenAdapterConfig, default_output
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import MANIFEST, PLAN, write_json
from fairseq_ccpr.training.contrast_sampler import VALID_KEYS
from fairseq_ccpr.training.token_contrast import (
    VALID_NEIGHBOURS,
    SupervisedContrastiveConfig,
    TokenContrastConfig,
)
from fairseq_ccpr.version import __version__

BEST, LAST = "checkpoint_best.pt", "checkpoint_last.pt"
FINISHED, LOG = "finished", "train.log"  # files in the save directory, as the checkpoints are

# fairseq takes the later of two, so --adapter-options can change any of them.
DEFAULTS = (
    "--task token_contrast --arch token_adapter --criterion supervised_contrastive --best-checkpoint-metric "
    "accuracy --maximize-best-checkpoint-metric --no-epoch-checkpoints --optimizer adam --lr 3e-4 "
    "--lr-scheduler polynomial_decay --warmup-updates 100 --clip-norm 1 --batch-size 128 --seed 1 "
    "--num-workers 0 --max-update 1000"
)

RAW_INDEX = IndexDescription("exact", "l2")
PROJECTED_ROWS = 1 << 14


@dataclass(frozen=True)
class AdapterTraining:
    """How an adapter is to be trained."""

    words: list[str]  # of the command line, the defaults first
    output_dim: int | None  # as given; None: derived from the width of the keys

    @classmethod
    def parse(cls, extra: str) -> AdapterTraining:
        """Read `--adapter-options`, options of fairseq-train, before any work is done."""
        printed = io.StringIO()
        try:
            words = [*shlex.split(DEFAULTS), *shlex.split(extra)]
            parser = options.get_training_parser()
            with contextlib.redirect_stderr(printed):
                given = ["datastore", "--total-num-update", "1", *words]
                parsed: Any = options.parse_args_and_arch(parser, input_args=given)
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
        """Digest all that the outcome depends on: fingerprints of raw keys and their origin, and all options."""
        configs = (TokenContrastConfig, TokenAdapterConfig, SupervisedContrastiveConfig)
        defaults = [f"{config.__name__}.{f.name}={f.default}" for config in configs for f in fields(config)]
        fixed = [str(one) for one in (VALID_KEYS, VALID_NEIGHBOURS)]
        return fingerprint.of_strings([*keys, *self.words, *defaults, *fixed, __version__])

    def run(self, stores: list[Path], save_dir: Path, identity: str, cpu: bool, quiet: bool) -> Path:
        """Train on one store, perhaps validating on a second; resume a run that was killed, keep a finished one.

        Returns:
            The checkpoint with the best retrieval accuracy on held-out sentences; the untrained start is one
            of them.
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
                    f"fairseq-train wrote no {save_dir / BEST}: take options that turn saving or validation "
                    "off out of --adapter-options"
                )
            (save_dir / FINISHED).touch()
        return save_dir / BEST


def _run(command: list[str], save_dir: Path, quiet: bool) -> None:
    # In a process of its own: fairseq-train starts one for each GPU, which torchrun must not know of.
    torchrun = ("MASTER_", "WORLD_SIZE", "RANK", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        environment.pop("OMP_NUM_THREADS", None)  # torchrun sets it to 1, for many processes at once
    with (
        locked(save_dir, "a process is already training") as lock,
        (save_dir / LOG).open("a", encoding="utf-8") as log,
    ):
        # In our own process group, so that killing the group also kills the training.
        code = run_child(
            command, lock, log if quiet else sys.stderr, environment, Path.cwd(), own_group=False
        )
    if code:
        lines = (save_dir / LOG).read_text(encoding="utf-8").strip().splitlines() if quiet else []
        raise ConfigurationError(
            f"fairseq-train ended with exit code {code} ({lines[-1] if lines else 'see above'}); "
            "fix the cause, then run the same command to resume"
        )


def build_projected_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or resume building, projected keys; returns what `build_token_datastore` does.

    1. Plan: as for raw keys; and check that the adapter, PCA and index fit together.
    2. Write raw keys as a datastore of their own, in `--raw-datastore`, or in `raw` alongside the part until
       the end.
    3. Train the adapter on them, validating on the states of `--valid-subset`, or read it from a file.
    4. Fit PCA on a sample of its vectors, fold it into the adapter, project every key; index and publish.
    """
    plan = _Plan(settings, Extraction(settings, processes))
    part = plan.part(show=processes.first and not settings.quiet)
    if processes.first:
        part.check_store(part.section.index)
    unfinished = part.published is None
    if unfinished:
        refuse_foreign(settings.output)
    raw_folder = settings.raw_datastore or settings.output / RAW
    if settings.keep_raw_keys and not unfinished and not raw_folder.exists():
        raise ConfigurationError(
            f"{settings.output} is finished, and its raw keys were dropped: leave out --keep-raw-keys, or "
            "delete it and build it again"
        )
    processes.barrier()  # all have seen the same
    valid_folder = settings.output / VALID
    if unfinished:
        raw = extract(plan.extraction, raw_folder, processes, part.show)
        valid = extract(plan.valid, valid_folder, processes, show=False) if plan.valid else None
        if processes.first:
            plan.project(raw, valid, part)
    if processes.first:
        plan.extraction.finish(part)
        if unfinished and not settings.keep_raw_keys:
            shutil.rmtree(valid_folder, ignore_errors=True)
            if settings.raw_datastore is None:
                shutil.rmtree(raw_folder)
    processes.barrier()
    return part.section, plan.extraction.corpus.left_out


class _Plan:
    def __init__(self, settings: TokenBuildSettings, extraction: Extraction) -> None:
        self.settings, self.extraction, self.device = settings, extraction, extraction.device
        self.raw_section = extraction.section()
        d = self.raw_section.dimension
        self.given: TokenAdapter | None = None
        self.valid: Extraction | None = None
        if settings.adapter == TRAINED_ADAPTER:
            self.training = AdapterTraining.parse(settings.adapter_options)
            self.width = self.training.output_dim or default_output(d)
            self.valid = extraction.of_valid()
            keys = [self.raw_section.key_layer, *self.raw_section.fingerprints.values()]
            keys += [self.valid.corpus.fingerprint] if self.valid else []
            keys += [f"share {settings.fraction}"] if settings.fraction < 1 else []
            self.identity = self.training.fingerprint(keys)
        else:
            self.given = self._load(Path(settings.adapter))
            self.width = self.given.output.out_features
            self.identity = fingerprint.of_parameters(self.given.named_parameters())
        self.pca_dim = min(PCA_DIMENSION, self.width) if settings.pca_dim is None else settings.pca_dim
        if self.pca_dim > self.width:
            raise ConfigurationError(
                f"--pca-dim is {self.pca_dim}, but the adapter's vectors are {self.width} wide: give 1 to "
                f"{self.width}, or 0 for no PCA"
            )

    def _load(self, path: Path) -> TokenAdapter:
        adapter, raw = TokenAdapter.load(path), self.raw_section
        if (width := adapter.hidden.in_features) != raw.dimension:
            raise ConfigurationError(
                f"the adapter {path} takes states of width {width}, but those of {self.settings.path} are "
                f"{raw.dimension} wide: give an adapter trained for this model"
            )
        current = {"model": raw.fingerprints["model"], "key_layer": raw.key_layer}
        for what, value in current.items():
            if adapter.trained_on.get(what, value) != value:
                raise CheckpointError(
                    f"the adapter {path} was trained for another {what.replace('_', ' ')}: "
                    f"{fingerprint.brief(adapter.trained_on[what])} there, {fingerprint.brief(value)} now; "
                    "train one for this, with --adapter clknn"
                )
        return adapter

    def part(self, show: bool) -> TokenPart:
        s = self.settings
        if (s.output / MANIFEST).exists():
            token = Manifest.read(s.output).token
            if token is not None and token.projection is None:
                raise DatastoreError(
                    f"{s.output} holds the decoder's own states as keys: give another --output "
                    f"(with --raw-datastore {s.output} it starts from them)"
                )
        raw, d = self.raw_section, self.pca_dim or self.width
        projection = ProjectionDescription(raw.dimension, self.width, bool(self.pca_dim))
        prints = raw.fingerprints | {"adapter": self.identity}
        section = replace(raw, dimension=d, projection=projection, fingerprints=prints)
        part = TokenPart(s.output, section, self.extraction.symbols, show, s.key_store())
        gpu = self.device.type == "cuda"
        section.index = part.plan_index(s.index, "ip", s.index_parameters, raw.size, d, gpu)
        return part

    def project(self, raw: TokenDatastore, valid: TokenDatastore | None, part: TokenPart) -> None:
        s = self.settings
        adapter = self.given
        if adapter is None:
            stores = [raw.directory, *([valid.directory] if valid else [])]
            adapter = TokenAdapter.load(
                self.training.run(stores, s.output / ADAPTER, self.identity, s.cpu, s.quiet)
            )
        part.lay_out({"block_rows": PROJECTED_ROWS})
        projection = self._projection(part, raw, adapter.to(self.device))
        blocks = range(0, part.section.size, PROJECTED_ROWS)

        def write(todo: list[int], done: Progress) -> Iterator[ChunkRows]:
            for number in todo:
                rows = slice(blocks[number], blocks[number] + PROJECTED_ROWS)
                with torch.inference_mode():
                    states = torch.from_numpy(raw.keys[rows].astype(np.float32)).to(self.device)
                    keys = TokenSection.KEY_FORM.encode(projection(states))
                done(len(keys))
                kept = {VALUES: raw.values, PROVENANCE: raw.provenance}
                yield number, rows.start, {KEYS: keys} | {name: array[rows] for name, array in kept.items()}

        sizes = {i: min(PROJECTED_ROWS, part.section.size - start) for i, start in enumerate(blocks)}
        part.fill(sizes, write, "projection")
        self.extraction.tell(part, raw.keys)

    def _projection(self, part: TokenPart, raw: TokenDatastore, adapter: TokenAdapter) -> KeyProjection:
        path, pca = part.partial / PROJECTION_FILE, None
        if not path.exists():
            if self.pca_dim:
                rows = torch.from_numpy(raw.keys[sample_rows(len(raw.keys))])
                with torch.inference_mode():
                    z = torch.cat(
                        [adapter(block.to(self.device).float()) for block in rows.split(PROJECTED_ROWS)]
                    )
                pca = fit_pca(z, self.pca_dim)
            KeyProjection.fold(adapter.hidden, adapter.output, pca).save(path)
        return KeyProjection.load(path).to(self.device)


def extract(extraction: Extraction, folder: Path, processes: Processes, show: bool) -> TokenDatastore:
    """Write the decoder's own states, unless that was done; the processes share the work."""
    raw = TokenPart(folder, replace(extraction.section(), index=RAW_INDEX), extraction.symbols, show)
    raw.check_store(RAW_INDEX)  # keys in a database cannot be read from it
    processes.barrier()
    if raw.published is None:  # any existing index will do
        extraction.fill(raw)
        if processes.first:
            extraction.finish(raw)
        processes.barrier()
    return TokenDatastore(folder)
