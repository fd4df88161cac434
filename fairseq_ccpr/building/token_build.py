"""Building a token datastore: force-decode the corpus, index the keys, publish. Each stage survives a kill.

An empty one is to learn into, where there is no text of the domain to build from.
"""

from __future__ import annotations

import copy
import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, Optional

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.data.iterators import EpochBatchIterator
from torch.nn.functional import cross_entropy

from fairseq_ccpr.building.corpus import Chunk, Corpus, PseudoPairs, entries_of, read_corpus
from fairseq_ccpr.building.options import BuildOptions, check_texts, refuse
from fairseq_ccpr.building.part import VALID, ChunkRows, Processes, TokenPart
from fairseq_ccpr.datastore.manifest import REVERSE_MODEL, Manifest, ProjectionDescription, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, PROJECTION_FILE, PROVENANCE, VALUES
from fairseq_ccpr.datastore.token import KeyProjection, TokenDatastore
from fairseq_ccpr.datastore.tuned import UNTUNED, write_tuned
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.task import BILINGUAL, task_words
from fairseq_ccpr.device import tell_slow_fp16
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.models.checkpoint import load_models
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture, key_module
from fairseq_ccpr.paths import configuration, split_paths
from fairseq_ccpr.search import METRICS
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.settings import as_words, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import TRAIN, check_data_bin, has_subset
from fairseq_ccpr.storage.files import MANIFEST, atomic_directory
from fairseq_ccpr.text.languages import LANGUAGE_PAIR

NO_ADAPTER, TRAINED_ADAPTER = "none", "clknn"
PCA_DIMENSION = 128  # the paper's
AT_ONCE = 64  # tokens that the model is asked for, each with scores of its whole vocabulary
# While little is learned, most neighbours are far even if the nearest is not: it alone decides, and only if
# it is near.
EMPTY_SETTINGS = {
    "k": 1,
    "lambda_": 1.0,
    "temperature": 0.05,
    "confidence": True,
    "lambda_max": 0.95,
    "min_similarity": 0.8,
}


@dataclass(frozen=True)
class TokenOptions:
    """The options of `fairseq-ccpr build tokens` alone, and the pairs that it makes of monolingual text."""

    data_bin: Path
    path: str = option(help="checkpoint of the one model the datastore is for", metavar="MODEL")
    source_lang: Optional[str] = option(
        None, "source language (that of DATA_BIN)", flags=("-s",), metavar="LANG"
    )
    target_lang: Optional[str] = option(
        None, "target language (that of DATA_BIN)", flags=("-t",), metavar="LANG"
    )
    subset: list[str] = option([TRAIN], "subsets of DATA_BIN to build from", nargs="+", metavar="NAME")
    monolingual: list[Path] = option(
        [],
        "text of the target language to build from in place of DATA_BIN's pairs, one sentence per line, "
        "plain, .gz or .xz; --reverse-model translates it back",
        nargs="+",
        metavar="TEXT",
    )
    reverse_model: Optional[Path] = option(
        None,
        "checkpoint of a model from the target to the source language, with DATA_BIN's dictionaries and "
        "subwords, or its own in a folder that prepare or convert wrote",
        metavar="CKPT",
    )
    key_layer: str = option(KEY_LAYERS[0], "the decoder state that becomes the key", choices=KEY_LAYERS)
    metric: Optional[str] = option(
        None, "nearness: squared distance or inner product (l2; with an adapter ip)", choices=METRICS
    )
    adapter: str = option(
        NO_ADAPTER,
        "clknn: train an adapter on the keys and store what it makes of them; FILE: use one trained "
        "elsewhere (checkpoint of fairseq-train --task token_contrast); none: the decoder's own states",
        metavar="clknn|FILE|none",
    )
    adapter_options: str = option(
        "",
        "options of fairseq-train for the adapter's training, in one string, such as '--max-update 5000 "
        "--positives 4'",
        metavar="STRING",
    )
    pca_dim: Optional[int] = option(
        None,
        f"width of the keys after PCA of the adapter's vectors ({PCA_DIMENSION}, or what they have if "
        "less); 0: no PCA",
        within="[0, inf)",
        needs="a width, or 0 for no PCA,",
        metavar="N",
    )
    raw_datastore: Optional[Path] = option(
        None,
        "datastore of the decoder's own states, for the adapter to start from: read, or else created; it is "
        "kept (in --output)",
        metavar="DIR",
    )
    keep_raw_keys: bool = option(False, "keep those in --output/raw when all is done")
    valid_subset: Optional[str] = option(
        None,
        "subset of DATA_BIN by whose retrieval accuracy the best adapter is chosen (valid, where there is "
        "one; without one, some sentences are held out)",
        metavar="NAME",
    )
    max_tokens: int = option(
        4000, "tokens in a batch, as in fairseq", within="[1, inf)", needs="at least 1 token", metavar="N"
    )
    chunk_tokens: int = option(
        131072, "checkpoint interval in tokens", within="[1, inf)", needs="at least 1 token", metavar="N"
    )
    fp16: bool = option(False, "run the model in half precision")
    user_dir: Optional[str] = option(None, "your own fairseq plug-in, if the model needs one", metavar="DIR")
    task_options: str = option(
        "",
        "options of a multilingual model's task that its checkpoint does not tell, in one string, such as "
        "'--lang-dict langs.txt'",
        metavar="STRING",
    )
    pseudo_pairs: Optional[PseudoPairs] = None


@dataclass(frozen=True)
class TokenBuildSettings(BuildOptions, TokenOptions):
    """The options of `fairseq-ccpr build tokens`."""

    ENDING = "_tokens"

    def check(self) -> None:
        super().check()
        raw, trained = self.adapter == NO_ADAPTER, self.adapter == TRAINED_ADAPTER
        of_adapter = ("pca_dim", "raw_datastore", "keep_raw_keys")
        refuse(
            (
                self.num_shards > 1 and not raw,
                f"--num-shards is {self.num_shards}, but --adapter {self.adapter} needs all states "
                "together: build shards without it, merge them, and give the merged datastore as "
                "--raw-datastore",
            ),
            *(
                (
                    raw and getattr(self, name) not in (None, False),
                    f"--{name.replace('_', '-')} needs --adapter clknn or --adapter FILE",
                )
                for name in of_adapter
            ),
            (
                not raw and self.metric == "l2",
                "--metric is l2, but the keys of an adapter are compared by inner product: leave it out",
            ),
            *(
                (
                    getattr(self, name) and not trained,
                    f"--{name.replace('_', '-')} is for training: it needs --adapter clknn",
                )
                for name in ("adapter_options", "valid_subset")
            ),
            (
                trained and "${" in f"{self.output} {self.raw_datastore}",
                f"--output {self.output}: fairseq-train, which trains the adapter, takes ${{ for a "
                "reference to an option: give a folder without it",
            ),
            (
                self.valid_subset in self.subset,
                f"--valid-subset is {self.valid_subset}, which the datastore is built from: give text that "
                "it will not hold",
            ),
        )
        self._check_monolingual()

    def _check_monolingual(self) -> None:
        needs = "give the text, and the model that translates it back"
        chosen = {
            "--subset": self.subset != [TRAIN],
            "--fraction": self.fraction < 1,
            "--num-shards": self.num_shards > 1,
        }
        refuse(
            (
                self.monolingual and self.reverse_model is None,
                f"--monolingual needs --reverse-model: {needs}",
            ),
            (
                self.reverse_model is not None and not self.monolingual,
                f"--reverse-model needs --monolingual: {needs}",
            ),
        )
        check_texts(self.monolingual)
        refuse(
            *(
                (
                    self.monolingual and chooses,
                    f"{name} chooses among sentence pairs, and --monolingual builds from all of the text: "
                    "leave it out, or divide the text, and join the datastores with fairseq-ccpr merge",
                )
                for name, chooses in chosen.items()
            )
        )


def load(settings: TokenBuildSettings, device: torch.device) -> tuple[Any, Any]:
    """Load the task of DATA_BIN, and the model."""
    task = _load_task(settings, settings.data_bin)
    if settings.fp16:
        tell_slow_fp16(device)
    return task, load_model(settings.path, task, device, settings.fp16)


def _load_task(settings: TokenBuildSettings, data_bin: Path) -> Any:
    task_arguments = [*task_words(Path(settings.path)), *shlex.split(settings.task_options)]
    return load_task(data_bin, settings.source_lang, settings.target_lang, settings.user_dir, task_arguments)


class Extraction:
    """What keys are read from: a model, and a corpus for it to force-decode."""

    def __init__(self, settings: TokenBuildSettings, processes: Processes) -> None:
        self.settings, self.processes = settings, processes
        self.device = processes.device(settings.cpu)
        self.task, self.model = load(settings, self.device)
        self.model_fingerprint = fingerprint.of_parameters(self.model.named_parameters())
        self.capture = KeyCapture(self.model, settings.key_layer)
        pairs = settings.pseudo_pairs
        task = self.task if pairs is None else _load_task(settings, pairs.data_bin)
        self.corpus = self._read(task, settings.subset, settings.fraction)
        if settings.num_shards > 1:
            self.corpus = self.corpus.shard(settings.num_shards, settings.shard_id)
        self.symbols: list[str] = self.task.target_dictionary.symbols

    def _read(self, task: Any, subsets: list[str], fraction: float) -> Corpus:
        return read_corpus(task, subsets, self.model.max_positions(), self.settings.chunk_tokens, fraction)

    def of_valid(self) -> Extraction | None:
        """Return the same for the text that adapter training validates on, if there is any."""
        name = self.settings.valid_subset
        if name is None and VALID not in self.settings.subset and has_subset(self.task, VALID):
            name = VALID
        if name is None:
            return None
        other = copy.copy(self)
        other.settings = replace(self.settings, pseudo_pairs=None)
        other.corpus = self._read(self.task, [name], 1.0)
        if self.settings.pseudo_pairs is None and (
            shared := other.corpus.subsets.keys() & self.corpus.subsets
        ):
            raise ConfigurationError(
                f"--valid-subset {name} shares {', '.join(sorted(shared))} with what the datastore is built "
                "from: give text that it will not hold"
            )
        return other

    def section(self) -> TokenSection:
        s, tags = self.settings, self.task.tags
        optional = {
            LANGUAGE_PAIR: tags.languages,
            REVERSE_MODEL: s.pseudo_pairs.reverse_model if s.pseudo_pairs else None,
        }
        return TokenSection(
            size=self.corpus.size,
            dimension=self.capture.dimension,
            key_layer=s.key_layer,
            subsets=self.corpus.subsets,
            fingerprints={
                "model": self.model_fingerprint,
                "target_dictionary": fingerprint.of_strings(self.symbols),
                "corpus": self.corpus.fingerprint,
                **{name: digest for name, digest in optional.items() if digest},
            },
            share=self.corpus.fraction,
            shard=[s.shard_id, s.num_shards, s.chunk_tokens] if s.num_shards > 1 else None,
        )

    def tell(self, part: TokenPart, states: np.ndarray | None = None) -> None:
        """Tell a part what the model says of its tokens, by its states [N, d]; None: its keys are these."""
        projection = key_module(self.model, KEY_LAYERS[0])

        @torch.inference_mode()
        def log_probs(rows: np.ndarray, keys: np.ndarray, values: np.ndarray) -> torch.Tensor:
            inputs = (
                torch.from_numpy(keys if states is None else states[rows])
                .to(projection.weight)
                .split(AT_ONCE)
            )
            targets = torch.from_numpy(values.astype(np.int64)).to(projection.weight.device).split(AT_ONCE)
            costs = [
                cross_entropy(projection(x).float(), y, reduction="none") for x, y in zip(inputs, targets)
            ]
            return -torch.cat(costs).cpu()

        part.log_probs = log_probs if self.settings.key_layer == KEY_LAYERS[0] else None

    def finish(self, part: TokenPart) -> None:
        dictionary = self.task.source_dictionary
        part.finish(self.corpus.sources(), len(dictionary), dictionary.unk())

    def fill(self, part: TokenPart) -> None:
        """Force-decode the corpus into `part`, which may be partly filled; all processes share the work."""
        if self.processes.first:
            s = self.settings
            part.lay_out({"max_tokens": s.max_tokens, "shard_tokens": s.chunk_tokens, "fp16": s.fp16})
        self.processes.barrier()
        mine = {
            chunk.number: chunk for chunk in self.corpus.chunks[self.processes.rank :: self.processes.world]
        }

        def write(todo: list[int], done: Progress) -> Iterator[ChunkRows]:
            chunks = [mine[number] for number in todo]
            for chunk, rows in force_decode(
                self.capture, self.corpus, chunks, self.settings.max_tokens, done
            ):
                yield chunk.number, chunk.first_row, rows

        part.fill({number: chunk.rows for number, chunk in mine.items()}, write, "force decoding")
        self.processes.barrier()


def build_token_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or resume building, a token datastore of the decoder's own states.

    1. Plan: read the corpus, fingerprint everything, see that the output is free, or ours, and that it fits.
    2. Extract: keys, values and provenance, chunk by chunk; the processes share the chunks.
    3. Index the keys, or bring them into Milvus; give the part its final name and write the manifest.

    Returns:
        The token section, and how many sentences were left out as too long for the model.
    """
    store = settings.key_store()
    extraction = Extraction(settings, processes)
    section, gpu = extraction.section(), extraction.device.type == "cuda"
    show = processes.first and not settings.quiet
    part = TokenPart(settings.output, section, extraction.symbols, show, store)
    choice, metric = settings.index if settings.num_shards == 1 else "exact", settings.metric or "l2"
    section.index = part.plan_index(
        choice, metric, settings.index_parameters, section.size, section.dimension, gpu
    )
    if processes.first:
        part.check_store(section.index)
    if part.published is None:  # otherwise only its index may be another
        extraction.fill(part)
    if processes.first:
        extraction.tell(part)
        extraction.finish(part)
    processes.barrier()
    return part.section, extraction.corpus.left_out


def load_task(
    data_bin: Path,
    source_lang: str | None,
    target_lang: str | None,
    user_dir: str | None = None,
    task_arguments: Sequence[str] = (),
) -> Any:
    """Set up the task that retrieves, for a DATA_BIN; fairseq infers languages not given.

    Args:
        task_arguments: words of a command line, see `task_words`; for a bilingual model none are needed.
    """
    check_data_bin(data_bin, *filter(None, (source_lang, target_lang)))
    named = {"source_lang": source_lang, "target_lang": target_lang, "user_dir": user_dir}
    arguments = [str(data_bin), *as_words(named), *task_arguments]
    parser = options.get_generation_parser(default_task=BILINGUAL)
    parsed = options.parse_args_and_arch(parser, input_args=arguments)
    config = configuration(parsed)
    utils.import_user_module(config.common)
    return tasks.setup_task(config.task)


def load_model(path: str, task: Any, device: torch.device, fp16: bool) -> Any:
    """Load the one model of a checkpoint for inference."""
    if len(paths := split_paths(path)) > 1:
        raise CheckpointError(
            f"--path names an ensemble of {len(paths)} checkpoints, and a datastore belongs to one model: "
            "build it with one of them (decoding finds its keys with that one and mixes with the whole "
            "ensemble)"
        )
    (model,) = load_models([path], task)
    if fp16:
        model.half()
    return model.to(device).eval()


def force_decode(
    capture: KeyCapture, corpus: Corpus, chunks: list[Chunk], max_tokens: int, done: Progress
) -> Iterator[tuple[Chunk, dict[str, np.ndarray]]]:
    """Compute keys, values and provenance of each chunk, rows in the order of the corpus.

    Equation 3 of the CLKNN paper: for each sentence pair (x, y) and position t the key h_t = f(x, y_<t) and
    the value y_t. The end of the sentence is a value like any other; padding never is.

    Yields:
        The chunk, and its arrays: keys fp16 [n, d], values int32 [n], provenance int32 [n, 2] (sentence,
        position).
    """
    for subset in corpus.subsets:
        work = [(chunk, corpus.batches(chunk, max_tokens)) for chunk in chunks if chunk.subset == subset]
        dataset, all_batches = (
            corpus.task.dataset(subset),
            [batch for _, batches in work for batch in batches],
        )
        # fairseq's own loader over ready batches, one worker thread ahead
        loader = EpochBatchIterator(dataset, dataset.collater, all_batches, buffer_size=8)
        stream = iter(loader.next_epoch_itr(shuffle=False))
        for chunk, batches in work:
            yield chunk, _decode_chunk(capture, corpus, chunk, itertools.islice(stream, len(batches)), done)


@torch.inference_mode()
def _decode_chunk(
    capture: KeyCapture, corpus: Corpus, chunk: Chunk, samples: Iterable[dict[str, Any]], done: Progress
) -> dict[str, np.ndarray]:
    dataset = corpus.task.dataset(chunk.subset)
    pad = corpus.task.target_dictionary.pad()
    names = list(corpus.subsets)  # through which sentences are counted
    offset = sum(corpus.subsets[name] for name in names[: names.index(chunk.subset)])
    forced = corpus.task.tags.forced
    lengths = entries_of(dataset, corpus.task.tags)[chunk.sentences]
    first_row = dict(zip(chunk.sentences.tolist(), (np.cumsum(lengths) - lengths).tolist()))
    form = TokenSection.KEY_FORM
    keys = form.empty(chunk.rows, capture.dimension)
    values = np.empty(chunk.rows, dtype=np.int32)
    provenance = np.empty((chunk.rows, 2), dtype=np.int32)
    filled = 0
    for sample in samples:
        target = sample["target"]
        real = target.ne(pad)  # [B, T]; all that follows is [B, T] -> [tokens]
        real[:, :forced] = False
        position = (real.cumsum(1) - 1)[real].numpy()
        length = real.sum(1).numpy()
        sentence = np.repeat(sample["id"].numpy(), length)
        rows = np.repeat([first_row[i] for i in sample["id"].tolist()], length) + position
        keys[rows] = form.encode(capture.force_decode(sample["net_input"])[real])
        values[rows] = target[real].numpy()
        provenance[rows] = np.stack([sentence + offset, position], axis=1)
        filled += len(rows)
        done(len(rows))
    if filled != chunk.rows:
        raise RuntimeError(
            f"fairseq's batches hold {filled} of the {chunk.rows} tokens of chunk {chunk.number}"
        )
    finite = np.isfinite(form.decode(keys)).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise DatastoreError(
            "the model computes numbers that a key cannot hold (NaN, or beyond fp16's range), first in "
            f"sentence {provenance[row, 0]} of the corpus: check the model; without --fp16 it may do better"
        )
    return {KEYS: keys, VALUES: values, PROVENANCE: provenance}


def write_empty_store(
    models: list[Any], source: Any, symbols: list[str], key_layer: str, languages: str | None, output: Path
) -> TokenSection:
    """Write an empty datastore, which appears when it is complete, or add tokens to a phrase-only one.

    Args:
        source: the source dictionary of fairseq.
    """
    if len(models) > 1:
        raise ConfigurationError(
            f"--path names an ensemble of {len(models)} models, and a datastore belongs to one model"
        )
    dimension = KeyCapture(models[0], key_layer).dimension
    section = TokenSection(
        size=0,
        dimension=dimension,
        key_layer=key_layer,
        subsets={},
        fingerprints={
            "model": fingerprint.of_parameters(models[0].named_parameters()),
            "target_dictionary": fingerprint.of_strings(symbols),
            "corpus": fingerprint.of_strings([]),
            **({LANGUAGE_PAIR: languages} if languages else {}),
        },
        projection=ProjectionDescription(dimension, 0, pca=False),
    )
    beside_phrases = (output / MANIFEST).exists() and Manifest.read(output).token is None
    with nullcontext(output) if beside_phrases else atomic_directory(output) as folder:
        part = TokenPart(folder, section, symbols, show=False)
        rmtree(part.partial, ignore_errors=True)  # left by a run that was killed
        part.lay_out({})
        KeyProjection.scaling(dimension).save(part.partial / PROJECTION_FILE)
        part.finish((), len(source), source.unk())
        write_tuned(
            {"token": TokenDatastore(folder)}, {TokenRetrievalSettings.PREFIX: EMPTY_SETTINGS}, UNTUNED
        )
    return section
