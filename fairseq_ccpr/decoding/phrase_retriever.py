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

from fairseq_ccpr.datastore.fingerprint import short
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.errors import ConfigurationError, UnreachableError
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder, Segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder
from fairseq_ccpr.search.milvus_index import MilvusIndex
from fairseq_ccpr.search.milvus_server import TIMEOUT
from fairseq_ccpr.search.plan import PHRASE_DEPTH
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


class RetrievedPhrase(NamedTuple):  # some ten thousand a batch: a dataclass takes five times as long to make
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
        if isinstance(self.index, MilvusIndex):
            self._answer_or_skip(self.index.check, 0)

    def retrieve(self, sentences: list[str]) -> list[list[QueryPhrase]]:
        """For each sentence its phrases, in order, those for which nothing was found too."""
        return self.ask(sentences)()

    def ask(self, sentences: list[str]) -> Callable[[], list[list[QueryPhrase]]]:
        """Begin to retrieve: what is called for the answer.

        An index in another process searches in the meantime; one of this process searches when the answer is wanted.
        """
        found = self.finder.find(sentences)
        self.too_long += found.too_long
        if not len(found.spans):
            return lambda: [[] for _ in sentences]
        search = partial(self.nearest_strings, found.vectors.to(self.device))
        answer = self._asking.submit(search).result if self._asking and self._is_open() else search
        return lambda: self._join(sentences, found, answer)

    def _join(
        self, sentences: list[str], found: FoundPhrases, answer: Callable[[], list[list[RetrievedPhrase]]]
    ) -> list[list[QueryPhrase]]:
        """The phrases of sentences with what was retrieved for them."""
        results: list[list[QueryPhrase]] = [[] for _ in sentences]
        retrieved = self._answer_or_skip(answer, len(sentences))
        if retrieved is None:
            return results
        for (number, start, end), p, best in zip(found.spans.tolist(), found.probabilities.tolist(), retrieved):
            results[number].append(QueryPhrase(sentences[number][start:end], start, end, p, best))
        self.phrases += len(retrieved)
        self.retrieved += sum(map(len, retrieved))
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

    def nearest_strings(self, vectors: Tensor) -> list[list[RetrievedPhrase]]:
        """The k nearest strings, each by the best of its entries, of which the first counts where several are equal.

        1. Search for the `PHRASE_DEPTH` best entries of each vector, whatever k: fewer strings are then the head of more.
        2. Take them one by one, without those that score as the last does: more of these may be left.
        3. Search twice as deep for the vectors that have fewer than k strings, while there is more to find.

        What a deeper search of an approximate index finds comes after what was found before, be it better or not.

        Args:
            vectors: fp32 [Q, o], on the device.

        Returns:
            Of each vector at most k; fewer where no more strings score `min_similarity`, or none are left.
        """
        kept: list[dict[str, RetrievedPhrase]] = [{} for _ in vectors]
        read_sentence = cache(self.datastore.sentence)  # of all vectors together
        rows, depth = list(range(len(vectors))), PHRASE_DEPTH
        while rows:
            scores, entries = _by_score(*self.index.search(vectors[rows], min(depth, self.index.deepest)))  # [R, depth]
            places = self.datastore.spans[entries.clip(0)]  # [R, depth, 3]
            last = scores[:, -1] if depth < self.index.deepest else np.full(len(rows), -np.inf)
            taken = (scores > last[:, None]) & (scores >= self.min_similarity)
            for i, row in enumerate(rows):
                count = int(taken[i].sum())  # the first ones
                self._keep(kept[row], scores[i, :count], entries[i, :count], places[i, :count], read_sentence)
            more = (last > -np.inf) & (last >= self.min_similarity)
            rows = [row for row, is_more in zip(rows, more) if is_more and len(kept[row]) < self.k]
            depth *= 2
        return [list(best.values()) for best in kept]

    def _keep(
        self,
        best: dict[str, RetrievedPhrase],
        scores: np.ndarray,
        entries: np.ndarray,
        places: np.ndarray,
        read_sentence: Callable[[int], str],
    ) -> None:
        """Add to `best` the strings of n entries that it lacks, up to k.

        Args:
            best: by string.
            scores: fp64 [n], best first.
            entries: int64 [n].
            places: int32 [n, 3], sentence, start and end of each.
            read_sentence: the text of a sentence, by its number.
        """
        for score, entry, (number, start, end) in zip(scores.tolist(), entries.tolist(), places.tolist()):
            if len(best) == self.k:
                return
            sentence = read_sentence(number)
            string = sentence[start:end]
            if string not in best:
                best[string] = RetrievedPhrase(entry, string, sentence, start, end, score)

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


def _by_score(scores: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What a search found, [Q, k] each, on the CPU: the best first, of equal ones the lowest id."""
    of_scores, of_ids = scores.double().cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((of_ids, -of_scores), axis=1)
    return np.take_along_axis(of_scores, order, 1), np.take_along_axis(of_ids, order, 1)
