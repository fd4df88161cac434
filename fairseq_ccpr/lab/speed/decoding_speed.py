"""Speed of decoding with datastores of any size relative to plain fairseq, the systems taking turns in one process."""

from __future__ import annotations

import time
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import tasks, utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_ccpr.cli.planning import Limits, synchronise
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.learned_memory import LearnedEntries
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.device import FP32
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.machine import peak_bytes, start_peak
from fairseq_ccpr.lab.speed.search_speed import grow, make_index
from fairseq_ccpr.search import Index
from fairseq_ccpr.search.live import Segment
from fairseq_ccpr.timing import DECODER, PhaseTimer, phase

BASE, EQUIPPED, REST = "base", "base+", "rest"
ALONE = (BASE, EQUIPPED)  # systems without retrieval, which are always measured
SENTENCES = 10  # at least, in a measurement


@dataclass
class DecodingSpeed:
    """One system on one load; medians over repeats."""

    system: str
    entries: int  # that each step searches; 0 where it does not search an index
    batch: int  # target tokens of the references, that a batch has at least
    hypotheses: int  # at once, in the first batch
    tokens_per_second: float
    slowest: float  # tokens per second
    fastest: float
    speed: float  # as a fraction of the base model's, measured in the same repeat
    speed_equipped: float  # the same, of that of `EQUIPPED`
    # milliseconds per step by phase, from one more run that waits for the device after each
    parts: dict[str, float]
    operations: float  # a step, see `Operations`
    floor: float  # milliseconds that exact search takes a step at least; 0 without search
    peak_bytes: int  # see `peak_bytes`


class Operations(TorchDispatchMode):
    """Counts this thread's operations that make or change a tensor: on a GPU, about as many kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class SpeedTest:
    """Models and systems, loaded once."""

    def __init__(self, cfg: Any, task: Any, models: list[Any], datastores: dict[str, str]) -> None:
        self.cfg, self.task, self.models = cfg, task, models
        self.device = next(models[0].parameters()).device
        self.generators = {BASE: task.build_base_generator(models, cfg.generation)}
        plain = self.generators[BASE].model  # fairseq's, which marks no phase
        plain.forward_decoder = phase(DECODER)(plain.forward_decoder)
        # The base model with retrieval's beam search: what that saves is not due to retrieval.
        self.generators[EQUIPPED] = task.build_base_generator(models, cfg.generation)
        task.choose_precision(getattr(cfg.task, "precision", None) or FP32, models)
        task.equip(self.generators[EQUIPPED], task.alone(models))
        self.generators |= {name: self._build_generator(datastore) for name, datastore in datastores.items()}
        self.signatures: dict[str, str] = {}  # of each system and size that `resize` made
        self.turns = list(self.generators)  # the systems that `measure` is for

    def _build_generator(self, datastore: str) -> Any:
        settings = deepcopy(self.cfg.task)
        settings.datastore = datastore
        task = tasks.setup_task(settings)
        task.build_tokenizer(self.cfg.tokenizer)
        task.build_bpe(self.cfg.bpe)
        return task.build_generator(self.models, self.cfg.generation)

    def resize(self, entries: int, choice: str) -> None:
        """Give every system a token datastore of so many entries, made from its own; some may share one.

        Systems without one have no size, and take their turns but once.
        """
        self.turns = list(ALONE)
        made: dict[Path, tuple[Index, Tensor, Tensor, str]] = {}
        for name, generator in self.generators.items():
            if name in ALONE:
                continue
            ensemble: RetrievalEnsemble = generator.model
            tokens = ensemble.find(TokenMemory)
            if tokens is None:
                self.turns += [name] * (name not in self.signatures)
                self.signatures[name] = ensemble.signature()
                continue
            self.turns.append(name)
            retriever = tokens.retriever
            if not isinstance(retriever, TokenRetriever):
                raise ConfigurationError(
                    f"the retriever {type(retriever).__name__} cannot be given entries: benchmark TokenRetriever"
                )
            store = retriever.datastore
            if store.directory not in made:
                unit = store.section.projection is not None
                known = np.column_stack([store.values, store.provenance[:, 0]])
                keys, found = grow(store.keys, known, entries, unit, self.device)
                index, description, _ = make_index(keys, choice, store.section.index.metric)
                made[store.directory] = index, found[:, 0], found[:, 1], str(description)
            index, values, sentences, described = made[store.directory]
            learned = nothing_learned(store, sentences, self.device)
            tokens = replace(
                tokens, retriever=with_entries(retriever, index, values, described), learned=learned
            )
            self.task.equip(generator, ensemble.replacing(tokens, trust=ensemble.trust))
            self.signatures[f"{name}, {entries:,} keys"] = generator.model.signature()

    def batches(self, tokens: int) -> list[dict[str, Any]]:
        """Make batches of at least so many target tokens, of sentences whose references are of about the median length.

        As many as make up `SENTENCES`; where the subset ends, it begins again.
        """
        dataset = self.task.dataset(self.cfg.dataset.gen_subset)
        lengths = np.asarray(dataset.tgt_sizes)
        order = np.abs(lengths - np.median(lengths)).argsort(kind="stable")
        batches: list[dict[str, Any]] = []
        sentences, endless = 0, cycle(order.tolist())
        while sentences < SENTENCES:
            rows: list[int] = []
            while lengths[rows].sum() < tokens:
                rows.append(next(endless))
            sample = dataset.collater([dataset[row] for row in rows])
            batches.append(utils.move_to_cuda(sample) if self.device.type == "cuda" else sample)
            sentences += len(rows)
        return batches

    def _index(self, name: str) -> Index | None:
        """The index that a system searches each step, if it does; the one that `resize` made."""
        tokens = self.generators[name].model.find(TokenMemory) if name not in ALONE else None
        return None if tokens is None else tokens.retriever.index

    def measure(self, batch: int, repeats: int, limits: Limits) -> list[DecodingSpeed]:
        """Time every system on the same batches: once to warm up, then `repeats` times in turns."""
        samples = self.batches(batch)
        for name in self.turns:
            self._decode(name, samples)
        speeds: dict[str, list[float]] = {name: [] for name in self.turns}
        peaks: dict[str, int] = {}
        for _ in range(repeats):
            for name, repeated in speeds.items():
                start_peak(self.device)
                repeated.append(self._decode(name, samples))
                peaks[name] = peak_bytes(self.device)
        hypotheses = len(samples[0]["net_input"]["src_tokens"]) * self.cfg.generation.beam
        rows = []
        for name, repeated in speeds.items():
            phases, operations = self._time_phases(name, samples)
            index = self._index(name)
            ratio, ratio_equipped = (
                float(np.median(np.array(repeated) / np.array(speeds[base]))) for base in (BASE, EQUIPPED)
            )
            rows.append(
                DecodingSpeed(
                    name,
                    index.size if index is not None else 0,
                    batch,
                    hypotheses,
                    float(np.median(repeated)),
                    min(repeated),
                    max(repeated),
                    ratio,
                    ratio_equipped,
                    phases,
                    operations,
                    1000 * limits.floor(index.size, index.dimension, hypotheses)
                    if index is not None
                    else 0.0,
                    peaks[name],
                )
            )
        return rows

    def _decode(self, name: str, samples: list[dict[str, Any]]) -> float:
        synchronise(self.device)
        start, tokens = time.perf_counter(), 0
        for sample in samples:
            hypotheses = self.task.inference_step(self.generators[name], self.models, sample)
            tokens += sum(len(best[0]["tokens"]) for best in hypotheses)
        synchronise(self.device)
        return tokens / (time.perf_counter() - start)

    def _time_phases(self, name: str, samples: list[dict[str, Any]]) -> tuple[dict[str, float], float]:
        """Time phases, in milliseconds a step, and count operations, the encoder's and beam search's too."""
        with PhaseTimer(self.device) as timer:
            start = time.perf_counter()
            self._decode(name, samples)
            total = time.perf_counter() - start
        phases = {**timer.seconds, REST: total - sum(timer.seconds.values())}
        with (counted := Operations()):
            self._decode(name, samples)
        steps = timer.calls[DECODER]
        return {name: 1000 * seconds / steps for name, seconds in phases.items()}, counted.count / steps


def with_entries(retriever: TokenRetriever, index: Index, values: Tensor, described: str) -> TokenRetriever:
    """Return the same retriever over other entries.

    Args:
        index: of their keys.
        values: int [N], their tokens, on the device of the index.
        described: names the index in the signature.
    """
    other = copy(retriever)
    other.index, other.values, other.learned, other._named = index, values, None, {}
    vars(other).pop("describe", None)  # of entries that it had before
    said = {**other.describe(), "index": described}
    vars(other)["describe"] = lambda: said
    return other


def nothing_learned(datastore: TokenDatastore, sentences: Tensor, device: torch.device) -> LearnedEntries:
    """Make a snapshot in which nothing was learned, of a datastore whose entries are of these sentences, int32 [N]."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    keys = torch.empty(0, datastore.section.dimension, dtype=torch.float16, device=device)
    segment = Segment(keys, nothing.float(), datastore.section.index.metric)
    return LearnedEntries(
        segment,
        nothing.int(),
        (),
        (),
        nothing,
        len(sentences),
        np.empty(0, np.int64),
        datastore.values,
        sentences,
        source_index=datastore.source_index,
    )
