"""Retrieve phrases once per source sentence: which target phrases, in which sentences, translate its phrases."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.learned_memory import LearnedPhrases
from fairseq_ccpr.decoding.options import SKIP, PhraseSettings, StoreSettings
from fairseq_ccpr.errors import ConfigurationError, UnreachableError
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder, Segmentation
from fairseq_ccpr.models.query_head import QueryHead, load_query_head
from fairseq_ccpr.models.span_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.translation_states import EncodedSources
from fairseq_ccpr.search import EXACT
from fairseq_ccpr.search.distinct_strings import NearestEntries, nearest_distinct
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage.fingerprint import short

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RetrievedPhrase(NamedTuple):
    """An entry of the phrase datastore, or a phrase that was learnt, whose entries are numbered after those."""

    entry: int
    string: str
    sentence: str
    start: int  # of the string in the sentence, in characters
    end: int
    score: float
    learnt: int = 0  # the id of the pair that it was learnt from; 0: the datastore was built with it


@dataclass(frozen=True)
class QueryPhrase:
    """A phrase of a source sentence, with what was retrieved for it: distinct strings, the best first."""

    string: str
    start: int
    end: int
    probability: float  # of being a phrase
    retrieved: list[RetrievedPhrase]


class RetrievedEntries(NamedTuple):
    """The entries retrieved for the P phrases of some sentences, in order; `PhraseRetriever.read` gives their strings."""

    spans: np.ndarray  # int32 [P, 3]: sentence, start and end in characters
    probabilities: np.ndarray  # fp32 [P], of being a phrase
    entries: np.ndarray  # int64 [P, k], of distinct strings, the best first; -1 where there are fewer
    scores: np.ndarray  # fp64 [P, k]


class PhraseRetriever:
    """Segment sentences, search for each phrase, keep the best entry of each string.

    Args:
        datastore: an opened phrase datastore.
        encoder: the phrase encoder it was built with.
        segmentation: which spans of a sentence are queried.
        k: strings kept for a query phrase.
        min_similarity: score below which an entry is left out.
        device: where encoder and, where it can, index work.
        waiting: how long a remote index may take, and what is done when it does not answer.
        queries: segments and encodes source sentences instead of the phrase encoder.

    Attributes:
        encoder: the phrase encoder, which encodes what is learnt even where `queries` are given.
        too_long: sentences so far that are longer than the encoder reads, and were read in windows.
        phrases: number queried so far.
        retrieved: number of strings found for them so far.
        skipped: sentences so far without phrases because the remote index did not answer.

    Raises:
        DatastoreError: the datastore was built with another encoder.
        UnreachableError: the remote index does not answer, and its phrases may not be skipped.
        ConfigurationError: k below 1, or the query head imitates another encoder.
    """

    def __init__(
        self,
        datastore: PhraseDatastore,
        encoder: SpanEncoder,
        segmentation: Segmentation,
        k: int,
        min_similarity: float,
        device: torch.device,
        waiting: StoreSettings | None = None,
        queries: QueryHead | None = None,
    ) -> None:
        if k < 1:
            raise ConfigurationError(f"--phrase-k is {k}: at least 1 phrase is needed")
        datastore.check_encoder(own := encoder.fingerprint())
        if queries is not None and queries.teacher != own:
            raise ConfigurationError(
                f"the query head imitates the phrase encoder {short(queries.teacher)}, and the phrases of "
                f"{datastore.directory} are of {short(own)}: train one for theirs, or give --phrase-queries none"
            )
        self.datastore, self.k, self.min_similarity = datastore, k, min_similarity
        self.encoder = encoder.to(device)
        self.finder = PhraseFinder((queries or encoder).to(device), segmentation)
        self.waiting = waiting or StoreSettings()
        self.index = datastore.open_index(self.waiting.timeout, device)
        self.device = device
        # One thread: while it waits for the answer, this one encodes.
        self._asking = ThreadPoolExecutor(1) if self.index.remote else None
        self.too_long = self.phrases = self.retrieved = self.skipped = 0
        self._not_before = 0.0  # seconds of the clock, before which an index that did not answer is not queried
        self._answer_or_skip(self.index.check, 0)

    def retrieve(self, sentences: list[str], learnt: LearnedPhrases | None = None) -> list[list[QueryPhrase]]:
        """Retrieve for each phrase of each sentence, in order; phrases for which nothing was found are in it too.

        Args:
            learnt: phrases learnt alongside the datastore, which are searched together with it.
        """
        return self.read(sentences, self.start(sentences, learnt)(), learnt)

    def start(
        self, sentences: list[str], learnt: LearnedPhrases | None = None, encoded: EncodedSources | None = None
    ) -> Callable[[], RetrievedEntries]:
        """Start retrieval; returns a function that waits for the result.

        An index in another process searches in the meantime; one of this process searches when the result is wanted.

        Args:
            learnt: see `retrieve`.
            encoded: see `PhraseFinder.find`.
        """
        found = self.finder.find(sentences, encoded)
        self.too_long += found.too_long
        if not len(found.spans):
            return self._nothing
        search = partial(self._nearest, found.vectors.to(self.device), learnt)
        answer = self._asking.submit(search).result if self._asking and self._is_open() else search
        return lambda: self._take(sentences, found, answer)

    def _take(
        self, sentences: list[str], found: FoundPhrases, answer: Callable[[], NearestEntries]
    ) -> RetrievedEntries:
        nearest = self._answer_or_skip(answer, len(sentences))
        if nearest is None:
            return self._nothing()
        self.phrases += len(found.spans)
        self.retrieved += int((nearest.entries >= 0).sum())
        return RetrievedEntries(found.spans, found.probabilities.numpy(), *nearest)

    def _nothing(self) -> RetrievedEntries:
        nearest = np.empty((0, self.k), np.int64), np.empty((0, self.k))
        return RetrievedEntries(np.empty((0, 3), np.int32), np.empty(0, np.float32), *nearest)

    def read(
        self, sentences: list[str], retrieved: RetrievedEntries, learnt: LearnedPhrases | None = None
    ) -> list[list[QueryPhrase]]:
        """Look up the strings and sentences of what was retrieved, together with what was learnt if that is given."""
        read_sentence = cache(self.datastore.sentence)

        def phrase(entry: int, score: float) -> RetrievedPhrase:
            pair = learnt.pair(entry) if learnt is not None else None
            source = pair.id if pair is not None else 0
            if learnt is not None and entry >= self.datastore.section.size:
                return RetrievedPhrase(entry, *learnt.phrase(entry), score, source)
            number, start, end = self.datastore.spans[entry].tolist()
            sentence = read_sentence(number)
            return RetrievedPhrase(entry, sentence[start:end], sentence, start, end, score, source)

        results: list[list[QueryPhrase]] = [[] for _ in sentences]
        columns = (part.tolist() for part in retrieved)
        for (number, start, end), probability, entries, scores in zip(*columns):
            best = [phrase(entry, score) for entry, score in zip(entries, scores) if entry >= 0]
            results[number].append(QueryPhrase(sentences[number][start:end], start, end, probability, best))
        return results

    def _is_open(self) -> bool:
        return time.monotonic() >= self._not_before

    def _answer_or_skip(self, answer: Callable[[], T], sentences: int) -> T | None:
        """Wait for an answer; None where the remote index gives none and its phrases may be skipped.

        After a failure it is not queried for as long as it was waited for, so that at most half of the time is lost.
        """
        try:
            if self._is_open():
                return answer()
        except UnreachableError as error:
            if self.waiting.unreachable != SKIP:
                raise UnreachableError(f"{error}; --store-unreachable {SKIP} continues without phrases") from None
            logger.warning("%s; continuing without phrases, and trying again later", error)
            self._not_before = time.monotonic() + self.waiting.timeout
        if not self.skipped and sentences:
            atexit.register(self._tell_skipped)
        self.skipped += sentences
        return None

    def _tell_skipped(self) -> None:
        print(f"fairseq-ccpr: {self.skipped:,} sentences went without phrases: Milvus did not answer", file=sys.stderr)

    def check_found(self, text: object) -> None:
        """At the end of a text, refuse to have found nothing in it, or nothing for it.

        Args:
            text: its name.

        Raises:
            ConfigurationError: says what was asked for, and what to do.
        """
        if self.skipped:
            return  # nothing is known
        if not self.phrases:
            raise ConfigurationError(f"no phrase was found in {text} {self.finder.segmentation.explain_nothing()}")
        if not self.retrieved:
            raise ConfigurationError(
                f"nothing was retrieved for any of {self.phrases:,} phrases: no entry scores {self.min_similarity} or "
                "more; lower --phrase-min-similarity"
            )

    def _nearest(self, vectors: Tensor, learnt: LearnedPhrases | None) -> NearestEntries:
        """Find the entries with the k nearest strings of each vector, fp32 [Q, o] on the device."""
        if learnt is None or learnt.empty:
            return nearest_distinct(self.index, self.datastore.string_hashes, vectors, self.k, self.min_similarity)
        index = learnt.joined(self.index)
        return nearest_distinct(index, learnt.string_hashes, vectors, self.k, self.min_similarity, learnt.gone)

    def signature(self, settings: Mapping[str, object] | None = None, learnt: LearnedPhrases | None = None) -> str:
        """Name all that decides what is retrieved, in one line to be printed with results.

        Args:
            settings: what counts besides datastore, encoder and segmentation, by name; k and min_similarity of this retriever
                if not given.
            learnt: see `retrieve`.
        """
        datastore, section = self.datastore, self.datastore.section
        return signature(
            {
                "phrases": short(datastore.keys_fingerprint),
                "entries": section.size,
                "encoder": short(section.fingerprints["encoder"]),
                "index": EXACT if self.index.stands_in else section.index,
                "query": self.finder.description,
                **({} if learnt is None or learnt.empty else {"learnt": learnt}),
                **({"k": self.k, "min_similarity": self.min_similarity} if settings is None else settings),
            }
        )


def find_encoder(datastore: PhraseDatastore, given: str | None) -> Path:
    """Find the checkpoint of the phrase encoder: the one given, or the one that the datastore was built with.

    Raises:
        ConfigurationError: no checkpoint is given, and the datastore's is no longer where it was.
    """
    path = Path(given or datastore.section.encoder)
    if given is None and not path.is_file():
        raise ConfigurationError(
            f"the phrases of {datastore.directory} were built with the encoder {path}, which is not there: say with "
            "--phrase-encoder where it is"
        )
    return path


def load_encoders(
    datastore: PhraseDatastore, settings: PhraseSettings, models: Sequence[Any]
) -> tuple[SpanEncoder, QueryHead | None]:
    """Load the phrase encoder, and the query head that settings name for one of the translation models.

    Raises:
        CheckpointError: one of them is missing, or is something else.
        ConfigurationError: see `find_encoder`.
    """
    path, bf16 = find_encoder(datastore, settings.encoder), settings.bf16
    with torch.random.fork_rng(devices=[]):  # sampling must draw the same as without phrases
        encoder = load_phrase_encoder(path, bf16=bf16)
        head = settings.queries
        queries = load_query_head(Path(head), [model.encoder for model in models], bf16) if head else None
    if getattr(encoder, "similarity", "cosine") != "cosine":
        logger.warning(
            "the phrases of %s are compared by inner products without bounds: --phrase-min-similarity and the weights of "
            "phrases are made for cosines, and weigh these wrongly until they are tuned", path,
        )  # fmt: skip
    return encoder, queries


def query_segmentation(datastore: PhraseDatastore, threshold: float, kind: str | None = None) -> Segmentation:
    """Choose which spans of a source are queried: the datastore's kind unless given, by a threshold of their own."""
    built = datastore.section.segmentation
    return Segmentation(kind or built["kind"], threshold, built["max_words"])
