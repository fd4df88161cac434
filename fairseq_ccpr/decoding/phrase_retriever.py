"""Retrieval of phrases, once a source sentence: which target phrases, in which sentences, translate its phrases."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.errors import ConfigurationError, UnreachableError
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder, Segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder
from fairseq_ccpr.search import TIMEOUT
from fairseq_ccpr.search.distinct_strings import NearestEntries, nearest_distinct
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.version import __version__

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP, SKIP = "stop", "skip"


@dataclass(frozen=True)
class Waiting:
    """The `--store-*` options: of keys that are in Milvus.

    Raises:
        ConfigurationError: a value out of its range.
    """

    timeout: float = TIMEOUT  # seconds
    unreachable: str = STOP

    def __post_init__(self) -> None:
        if not 0 < self.timeout < float("inf"):
            raise ConfigurationError(f"--store-timeout is {self.timeout}: give seconds")


class RetrievedPhrase(NamedTuple):
    """An entry of the phrase datastore."""

    entry: int
    string: str
    sentence: str
    start: int  # of the string in the sentence, in characters
    end: int
    score: float


@dataclass(frozen=True)
class QueryPhrase:
    """A phrase of a source sentence, with what was retrieved for it: distinct strings, the best first."""

    string: str
    start: int
    end: int
    probability: float  # of being a phrase
    retrieved: list[RetrievedPhrase]


class Retrieved(NamedTuple):
    """What was retrieved for the P phrases of some sentences, which are in their order; see `PhraseRetriever.read`."""

    spans: np.ndarray  # int32 [P, 3]: sentence, start and end in characters
    probabilities: np.ndarray  # fp32 [P], of being a phrase
    entries: np.ndarray  # int64 [P, k], of distinct strings, the best first; -1 where there are fewer
    scores: np.ndarray  # fp64 [P, k]


class PhraseRetriever:
    """Segments sentences, searches for each phrase, keeps the best entry of each string.

    Args:
        datastore: an opened phrase datastore.
        encoder: the phrase encoder it was built with.
        segmentation: which spans of a sentence are asked for.
        k: strings kept for a query phrase.
        min_similarity: score below which an entry is left out.
        device: where encoder and, where it can, index work.
        waiting: what is done about keys in Milvus when that does not answer.

    Attributes:
        too_long: sentences so far that the encoder cannot take, which have no phrases.
        phrases: those so far that were asked for.
        retrieved: strings so far that were found for them.
        skipped: sentences so far that were not asked for, since Milvus did not answer.

    Raises:
        DatastoreError: the datastore was built with another encoder.
        UnreachableError: Milvus does not answer, and is not to be done without.
        ConfigurationError: k below 1.
    """

    def __init__(
        self,
        datastore: PhraseDatastore,
        encoder: SpanEncoder,
        segmentation: Segmentation,
        k: int,
        min_similarity: float,
        device: torch.device,
        waiting: Waiting = Waiting(),
    ) -> None:
        if k < 1:
            raise ConfigurationError(f"--k is {k}: at least 1 phrase is needed")
        datastore.check_encoder(encoder.fingerprint())
        self.datastore, self.k, self.min_similarity = datastore, k, min_similarity
        self.finder = PhraseFinder(encoder.to(device), segmentation)
        self.index = datastore.open_index(waiting.timeout).to(device)
        self.device, self.waiting = device, waiting
        # One thread: while it waits for the answer, this one encodes.
        self._asking = ThreadPoolExecutor(1) if self.index.remote else None
        self.too_long = self.phrases = self.retrieved = self.skipped = 0
        self._not_before = 0.0  # seconds of the clock: an index that did not answer is left alone so long
        self._answer_or_skip(self.index.check, 0)

    def retrieve(self, sentences: list[str]) -> list[list[QueryPhrase]]:
        """For each sentence its phrases, in order, those for which nothing was found too."""
        return self.read(sentences, self.ask(sentences)())

    def ask(self, sentences: list[str]) -> Callable[[], Retrieved]:
        """Begin to retrieve: what is called for the answer.

        An index in another process searches in the meantime; one of this process searches when the answer is wanted.
        """
        found = self.finder.find(sentences)
        self.too_long += found.too_long
        if not len(found.spans):
            return self._nothing
        search = partial(self._nearest, found.vectors.to(self.device))
        answer = self._asking.submit(search).result if self._asking and self._is_open() else search
        return lambda: self._take(sentences, found, answer)

    def _take(self, sentences: list[str], found: FoundPhrases, answer: Callable[[], NearestEntries]) -> Retrieved:
        nearest = self._answer_or_skip(answer, len(sentences))
        if nearest is None:
            return self._nothing()
        self.phrases += len(found.spans)
        self.retrieved += int((nearest.entries >= 0).sum())
        return Retrieved(found.spans, found.probabilities.numpy(), *nearest)

    def _nothing(self) -> Retrieved:
        nearest = np.empty((0, self.k), np.int64), np.empty((0, self.k))
        return Retrieved(np.empty((0, 3), np.int32), np.empty(0, np.float32), *nearest)

    def read(self, sentences: list[str], retrieved: Retrieved) -> list[list[QueryPhrase]]:
        """What was retrieved for sentences, with all strings."""
        read_sentence = cache(self.datastore.sentence)

        def phrase(entry: int, score: float) -> RetrievedPhrase:
            number, start, end = self.datastore.spans[entry].tolist()
            sentence = read_sentence(number)
            return RetrievedPhrase(entry, sentence[start:end], sentence, start, end, score)

        results: list[list[QueryPhrase]] = [[] for _ in sentences]
        columns = (part.tolist() for part in retrieved)
        for (number, start, end), probability, entries, scores in zip(*columns):
            best = [phrase(entry, score) for entry, score in zip(entries, scores) if entry >= 0]
            results[number].append(QueryPhrase(sentences[number][start:end], start, end, probability, best))
        return results

    def _is_open(self) -> bool:
        return time.monotonic() >= self._not_before

    def _answer_or_skip(self, answer: Callable[[], T], sentences: int) -> T | None:
        """An answer; None where Milvus does not give it, and is to be done without.

        After a failure it is left alone for as long as it was waited for, so that half of the time at most is lost.
        """
        try:
            if self._is_open():
                return answer()
        except UnreachableError as error:
            if self.waiting.unreachable != SKIP:
                raise UnreachableError(f"{error}; --store-unreachable {SKIP} goes on without phrases") from None
            logger.warning("%s; going on without phrases, and trying again later", error)
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
                "more; lower --min-similarity"
            )

    def _nearest(self, vectors: Tensor) -> NearestEntries:
        """Of each vector, fp32 [Q, o] on the device, the entries with the k nearest strings."""
        return nearest_distinct(self.index, self.datastore.string_hashes, vectors, self.k, self.min_similarity)

    def signature(self, settings: Mapping[str, object] | None = None) -> str:
        """All that decides what is retrieved, in one line to be printed with results.

        Args:
            settings: what counts beside datastore, encoder and segmentation, by name; k and s0 of this retriever if not
                given.
        """
        datastore, section = self.datastore, self.datastore.section
        parts = {
            "phrases": short(datastore.keys_fingerprint),
            "entries": section.size,
            "encoder": short(section.fingerprints["encoder"]),
            "index": section.index,
            "query": self.finder.description,
            **({"k": self.k, "s0": self.min_similarity} if settings is None else settings),
            "v": __version__,
        }
        return "|".join(f"{name}:{value}" for name, value in parts.items())


def find_encoder(datastore: PhraseDatastore, given: Path | str | None, option: str = "--phrase-encoder") -> Path:
    """The checkpoint of the phrase encoder: the one that is given, or the one that the datastore was built with.

    Raises:
        ConfigurationError: none is given, and the datastore's is not where it was.
    """
    path = Path(given or datastore.section.encoder)
    if given is None and not path.is_file():
        raise ConfigurationError(
            f"the phrases of {datastore.directory} were built with the encoder {path}, which is not there: say with "
            f"{option} where it is"
        )
    return path


def query_segmentation(datastore: PhraseDatastore, threshold: float, kind: str | None = None) -> Segmentation:
    """Queries are phrases of the kind that the datastore has, if none is given, but those found by the encoder surer ones."""
    built = datastore.section.segmentation
    return Segmentation(kind or built["kind"], threshold, built["max_words"])
