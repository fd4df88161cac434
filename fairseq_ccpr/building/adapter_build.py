"""Building a CLKNN datastore: raw keys, an adapter trained on them, PCA, projected keys of length 1, index."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.building.adapter_training import AdapterTraining
from fairseq_ccpr.building.distributed import Processes
from fairseq_ccpr.building.domain_sample import sample_domain
from fairseq_ccpr.building.part import ADAPTER, RAW, VALID, TokenPart, refuse_foreign
from fairseq_ccpr.building.token_build import PCA_DIMENSION, TRAINED_ADAPTER, Extraction, TokenBuildSettings
from fairseq_ccpr.datastore.manifest import Manifest, TokenSection
from fairseq_ccpr.datastore.projection import KeyProjection, ProjectionDescription, fit_pca, sample_rows
from fairseq_ccpr.datastore.token import DOMAIN, KEYS, PROJECTION, PROVENANCE, VALUES, TokenDatastore
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.models.token_adapter import TokenAdapter
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file
from fairseq_ccpr.storage.files import MANIFEST

RAW_INDEX = IndexDescription("exact", "l2")
BLOCK_ROWS = 1 << 14


def build_projected_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or resume building, a datastore whose keys are projected by an adapter.

    1. Plan: as for raw keys; and check that the adapter, PCA and index fit together.
    2. Write raw keys as a datastore of their own, in `--raw-datastore`, or in `raw` alongside the part until the end.
    3. Train the adapter on them, validating on the states of `--valid-subset`, or read it from a file.
    4. Fit PCA on a sample of its vectors, fold it into the adapter, project every key.
    5. Index and publish.

    Returns:
        The token section of the finished datastore, and how many sentences were left out as too long for the model.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    plan = _Plan(settings, Extraction(settings, processes))
    part = plan.part(show=processes.first and not settings.quiet)
    unfinished = not part.filled
    if unfinished:
        refuse_foreign(settings.output)
    raw_folder = settings.raw_datastore or settings.output / RAW
    if settings.keep_raw_keys and not unfinished and not raw_folder.exists():
        raise ConfigurationError(
            f"{settings.output} is finished, and its raw keys were dropped: leave out --keep-raw-keys, or delete it "
            "and build it again"
        )
    processes.barrier()  # all have seen the same
    valid_folder = settings.output / VALID
    if unfinished:
        raw = extract(plan.extraction, raw_folder, processes, part.show)
        valid = extract(plan.valid, valid_folder, processes, show=False) if plan.valid else None
        if processes.first:
            plan.project(raw, valid, part)
    if processes.first:
        part.finish()
        if unfinished and not settings.keep_raw_keys:
            shutil.rmtree(valid_folder, ignore_errors=True)
            if settings.raw_datastore is None:
                shutil.rmtree(raw_folder)
    processes.barrier()
    return part.section, plan.extraction.corpus.left_out


class _Plan:
    """What to build, decided before any work is done."""

    def __init__(self, settings: TokenBuildSettings, extraction: Extraction) -> None:
        self.settings, self.extraction, self.device = settings, extraction, extraction.device
        self.raw_section = extraction.section(RAW_INDEX)
        d = self.raw_section.dimension
        self.given: TokenAdapter | None = None
        self.valid: Extraction | None = None
        if settings.adapter == TRAINED_ADAPTER:
            self.training = AdapterTraining.parse(settings.adapter_options)
            self.width = self.training.width(d)
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
                f"--pca-dim is {self.pca_dim}, but the adapter's vectors are {self.width} wide: give 1 to {self.width}, "
                "or 0 for no PCA"
            )

    def _load(self, path: Path) -> TokenAdapter:
        """Load the adapter of a file, which must suit the model."""
        adapter, raw = TokenAdapter.load(path), self.raw_section
        if (width := adapter.hidden.in_features) != raw.dimension:
            raise ConfigurationError(
                f"the adapter {path} takes states of width {width}, but those of {self.settings.path} are {raw.dimension} "
                "wide: give an adapter trained for this model"
            )
        current = {"model": raw.fingerprints["model"], "key_layer": raw.key_layer}
        for what, value in current.items():
            if adapter.trained_on.get(what, value) != value:
                trained = adapter.trained_on[what]
                raise CheckpointError(
                    f"the adapter {path} was trained for another {what.replace('_', ' ')}: {_short(trained)} there, "
                    f"{_short(value)} now; train one for this, with --adapter clknn"
                )
        return adapter

    def part(self, show: bool) -> TokenPart:
        """Open the part at the output, finished or not."""
        s = self.settings
        if (s.output / MANIFEST).exists():
            token = Manifest.read(s.output).token
            if token is not None and token.projection is None:
                raise DatastoreError(
                    f"{s.output} holds the decoder's own states as keys: give another --output "
                    f"(with --raw-datastore {s.output} it starts from them)"
                )
        raw = self.raw_section
        dimension = self.pca_dim or self.width
        gpu = self.device.type == "cuda"
        section = self.extraction.section(plan_index(s.index, "ip", s.index_parameters, raw.size, dimension, gpu=gpu))
        section.dimension = dimension
        section.projection = ProjectionDescription(
            raw.dimension, self.width, bool(self.pca_dim), s.normalize_before_pca
        )
        section.fingerprints["adapter"] = self.identity
        return TokenPart(s.output, section, self.extraction.symbols, show)

    def project(self, raw: TokenDatastore, valid: TokenDatastore | None, part: TokenPart) -> None:
        """Train the adapter unless it was given, fit PCA, and fill `part` with the projected keys."""
        s = self.settings
        adapter = self.given
        if adapter is None:
            stores = [raw.directory, *([valid.directory] if valid else [])]
            adapter = TokenAdapter.load(self.training.run(stores, s.output / ADAPTER, self.identity, s.cpu, s.quiet))
        part.lay_out({"block_rows": BLOCK_ROWS})
        projection = self._projection(part, raw, adapter.to(self.device))
        blocks = range(0, part.section.size, BLOCK_ROWS)

        def write(todo: list[int], done: Callable[[int], object]) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
            for number in todo:
                rows = slice(blocks[number], blocks[number] + BLOCK_ROWS)
                with torch.inference_mode():
                    keys = projection(_rows(raw.keys[rows], self.device)).half().cpu().numpy()
                done(len(keys))
                yield number, rows.start, {KEYS: keys, VALUES: raw.values[rows], PROVENANCE: raw.provenance[rows]}

        # An older raw datastore has no statistics of its own text, but has the states to compute them from.
        domain = raw.open_domain() or sample_domain(raw.keys, raw.provenance)
        domain.save(part.partial / DOMAIN)
        sizes = {i: min(BLOCK_ROWS, part.section.size - start) for i, start in enumerate(blocks)}
        part.fill(sizes, write, "projection")

    def _projection(self, part: TokenPart, raw: TokenDatastore, adapter: TokenAdapter) -> KeyProjection:
        """Fold adapter and PCA into one projection, computed once and kept with the part."""
        path = part.partial / PROJECTION
        if not path.exists():
            pca = fit_pca(self._embed_sample(adapter, raw), self.pca_dim) if self.pca_dim else None
            projection = KeyProjection.fold(adapter.hidden, adapter.output, pca, self.settings.normalize_before_pca)
            with atomic_file(path) as partial:
                projection.save(partial)
        return KeyProjection.load(path).to(self.device)

    @torch.inference_mode()
    def _embed_sample(self, adapter: TokenAdapter, raw: TokenDatastore) -> Tensor:
        """Embed a sample of the keys, fp32 [n, d_o], of length 1 with `--normalize-before-pca`."""
        rows = torch.from_numpy(raw.keys[sample_rows(len(raw.keys))])
        z = torch.cat([adapter(block.to(self.device).float()) for block in rows.split(BLOCK_ROWS)])
        return torch.nn.functional.normalize(z, dim=1) if self.settings.normalize_before_pca else z


def extract(extraction: Extraction, folder: Path, processes: Processes, show: bool) -> TokenDatastore:
    """Write the decoder's own states, unless that was done; the processes share the work."""
    raw = TokenPart(folder, extraction.section(RAW_INDEX), extraction.symbols, show)
    processes.barrier()
    if not raw.filled:  # any existing index will do
        extraction.fill(raw)
        if processes.first:
            raw.finish()
        processes.barrier()
    return TokenDatastore(folder)


def _rows(keys: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(keys.astype(np.float32)).to(device)


def _short(name: str) -> str:
    """Shorten a fingerprint, but not the name of a layer."""
    return fingerprint.short(name) if len(name) == 64 else name
