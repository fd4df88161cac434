"""Building a CLKNN datastore: raw keys, an adapter trained on them, PCA, projected keys of length 1, index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore import fingerprint
from fairseq_ccpr.datastore.manifest import MANIFEST, TokenSection
from fairseq_ccpr.datastore.projection import KeyProjection, ProjectionDescription, fit_pca, sample_rows
from fairseq_ccpr.datastore.token import KEYS, PROJECTION, PROVENANCE, VALUES, TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.extraction.adapter_training import DEFAULTS, train_adapter
from fairseq_ccpr.extraction.processes import Processes
from fairseq_ccpr.extraction.token_build import TRAINED_ADAPTER, Extraction, TokenBuildSettings
from fairseq_ccpr.extraction.token_part import ADAPTER, RAW, TokenPart, refuse_foreign
from fairseq_ccpr.models.token_adapter import TokenAdapter
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.plan import plan_index

PCA_DIMENSION = 128  # the paper's
BLOCK_ROWS = 1 << 16


def build_projected_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or go on building, a datastore whose keys went through an adapter; what is already there is reused.

    1. Raw keys: a datastore of its own, in `--raw-datastore`, or in `raw` beside the part and dropped in the end.
    2. Train the adapter on them, or read it from a file.
    3. Fit PCA on a sample of its vectors, and fold it into the adapter.
    4. Project every key, index, publish.

    Returns and raises: see `build_token_datastore`.
    """
    refuse_foreign(settings.output)
    extraction = Extraction(settings, processes)
    show = processes.first and not settings.quiet
    raw_folder = settings.raw_datastore or settings.output / RAW
    given = TokenAdapter.load(Path(settings.adapter)) if settings.adapter != TRAINED_ADAPTER else None
    raw_section = extraction.section(IndexDescription("exact", "l2"))
    request = _request(settings, given, raw_section)
    build = _Projection(settings, extraction, request, show)
    if (ready := build.find_ready()) is None:
        raw = TokenPart(raw_folder, raw_section, extraction.symbols, show)
        raw.keep_index()
        if not raw.filled:
            extraction.fill(raw)
            if processes.first:
                raw.publish()
            processes.barrier()
        if processes.first:
            ready = build.run(TokenDatastore(raw_folder), given)
        processes.barrier()
    elif processes.first and not ready.up_to_date:
        ready.make_index()
        ready.publish()
    if processes.first and settings.raw_datastore is None and not settings.keep_raw_keys:
        shutil.rmtree(raw_folder, ignore_errors=True)
    processes.barrier()
    section = ready.section if ready is not None else TokenDatastore(settings.output).section
    return section, extraction.corpus.left_out


def _request(settings: TokenBuildSettings, given: TokenAdapter | None, raw: TokenSection) -> str:
    """Fingerprint of the adapter asked for: of its weights, or of all that its training depends on."""
    if given is not None:
        return fingerprint.of_parameters(given.named_parameters())
    parts = [raw.key_layer, *raw.fingerprints.values(), DEFAULTS, settings.adapter_options]
    return fingerprint.of_strings(parts)


class _Projection:
    """From raw keys to the finished part, in one process."""

    def __init__(self, settings: TokenBuildSettings, extraction: Extraction, request: str, show: bool) -> None:
        self.settings, self.extraction, self.request, self.show = settings, extraction, request, show
        self.device = extraction.device

    def find_ready(self) -> TokenPart | None:
        """The part at the output, when all but its index is as it should be."""
        output = self.settings.output
        if not (output / MANIFEST).exists():
            return None
        section = TokenDatastore(output).section
        if section.projection is None:
            raise DatastoreError(
                f"{output} holds the decoder's own states as keys: give another --output "
                f"(with --raw-datastore {output} it starts from them)"
            )
        return self._part(section.projection, section.dimension)

    def _part(self, projection: ProjectionDescription, dimension: int) -> TokenPart:
        section = self.extraction.section(self._plan_index(dimension))
        section.dimension, section.projection = dimension, projection
        pca = fingerprint.of_strings([str(self.settings.pca_dim), str(self.settings.normalize_before_pca)])
        section.fingerprints |= {"adapter": self.request, "pca": pca}
        return TokenPart(self.settings.output, section, self.extraction.symbols, self.show)

    def _plan_index(self, dimension: int) -> IndexDescription:
        s = self.settings
        size, gpu = self.extraction.corpus.size, self.device.type == "cuda"
        return plan_index(s.index, "ip", s.index_parameters, size, dimension, gpu=gpu)

    def run(self, raw: TokenDatastore, adapter: TokenAdapter | None) -> TokenPart:
        """Train where need be, project, index, publish."""
        s = self.settings
        if adapter is None:
            save_dir = s.output / ADAPTER
            best = train_adapter(raw.directory, save_dir, self.request, s.adapter_options, s.cpu, s.quiet)
            adapter = TokenAdapter.load(best)
        d, width = adapter.hidden.in_features, adapter.output.out_features
        if d != raw.section.dimension:
            raise ConfigurationError(
                f"the adapter {s.adapter} takes states of width {d}, but those of {s.path} are {raw.section.dimension} "
                "wide: give an adapter trained for this model"
            )
        pca_dim = min(PCA_DIMENSION, width) if s.pca_dim is None else s.pca_dim
        description = ProjectionDescription(d, width, bool(pca_dim), s.normalize_before_pca)
        part = self._part(description, pca_dim or width)
        part.prepare({"block_rows": BLOCK_ROWS})
        projection = self._projection(part, raw, adapter.to(self.device), pca_dim)
        self._project(part, raw, projection)
        part.make_index()
        part.publish()
        return part

    def _projection(self, part: TokenPart, raw: TokenDatastore, adapter: TokenAdapter, pca_dim: int) -> KeyProjection:
        """Adapter and PCA as one, made once and kept with the part."""
        path = part.partial / PROJECTION
        if not path.exists():
            pca = None
            if pca_dim:
                rows = torch.from_numpy(raw.keys[sample_rows(len(raw.keys))])
                pca = fit_pca(self._embed(adapter, rows), pca_dim)
            projection = KeyProjection.fold(adapter.hidden, adapter.output, pca, self.settings.normalize_before_pca)
            partial = path.with_name(path.name + ".partial")
            projection.save(partial)
            partial.replace(path)
        return KeyProjection.load(path).to(self.device)

    @torch.inference_mode()
    def _embed(self, adapter: TokenAdapter, rows: Tensor) -> Tensor:
        """z of raw keys, fp32 [n, d_o], of length 1 where PCA is to see it so."""
        z = torch.cat([adapter(block.to(self.device).float()) for block in rows.split(BLOCK_ROWS)])
        return torch.nn.functional.normalize(z, dim=1) if self.settings.normalize_before_pca else z

    @torch.inference_mode()
    def _project(self, part: TokenPart, raw: TokenDatastore, projection: KeyProjection) -> None:
        size = part.section.size
        blocks = range(0, size, BLOCK_ROWS)

        def write(todo: list[int]) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
            for number in todo:
                rows = slice(blocks[number], blocks[number] + BLOCK_ROWS)
                states = torch.from_numpy(raw.keys[rows].astype(np.float32)).to(self.device)
                keys = projection(states).half().cpu().numpy()
                yield number, rows.start, {KEYS: keys, VALUES: raw.values[rows], PROVENANCE: raw.provenance[rows]}

        part.fill({i: min(BLOCK_ROWS, size - start) for i, start in enumerate(blocks)}, write)
