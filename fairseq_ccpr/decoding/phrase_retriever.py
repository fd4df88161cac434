"""Retrieve phrases once per source sentence: target phrases, and their sentences, for its phrases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.learned_memory import LearnedPhrases
from fairseq_ccpr.decoding.options import StoreSettings
from fairseq_ccpr.decoding.remote_answers import RemoteAnswers
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import COSINE, SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.search import EXACT
from fairseq_ccpr.search.distinct_strings import nearest_distinct
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage.fingerprint import short

logger = logging.getLogger(__name__)


class RetrievedPhrase(NamedTuple):
    """An entry of the phrase datastore, or a learned phrase, which are numbered after those."""

    entry: int
    string: str
    sentence: str
    start: int  # of the string in the sentence, in characters
    end: int
    score: float
    learned: int = 0  # the id of the pair that it was learned from; 0: the datastore was built with it


@dataclass(frozen=True)
class QueryPhrase:
    """A phrase of a source sentence, with what was retrieved for it: distinct strings, the best first."""

    string: str
    start: int
    end: int
    probability: float  # of being a phrase
    retrieved: list[RetrievedPhrase]


class RetrievedEntries(NamedTuple):
    """The entries retrieved for the P phrases of some sentences, in order."""

    spans: np.ndarray  # int32 [P, 3]: sentence, start and end in characters
    probabilities: np.ndarray  # fp32 [P], of being a phrase
    entries: np.ndarray  # int64 [P, k], of distinct strings, the best first; -1 where there are fewer
    scores: np.ndarray  # fp64 [P, k]


class PhraseRetriever:
    """Segment sentences, search for each phrase, keep the best entry of each string.

    Args:
        min_similarity: score below which an entry is left out.

    Attributes:
        encoder: the phrase encoder.
        too_long: sentences so far that are longer than the encoder reads, and were read in windows.
        phrases: number queried so far.
        retrieved: number of strings found for them so far.
        remote: asks the index where it is in another process.
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
    ) -> None:
        datastore.check_encoder(encoder.fingerprint())
        self.datastore, self.k, self.min_similarity, self.device = datastore, k, min_similarity, device
        self.encoder = encoder.to(device)
        self.finder = PhraseFinder(self.encoder, segmentation)
        self.index = datastore.open_index(device)
        self.remote = RemoteAnswers(waiting or StoreSettings(), "phrases", datastore.section.store)
        self.too_long = self.phrases = self.retrieved = 0
        if self.index.remote:
            self.remote.ask(self.index.check)

    def retrieve(
        self, sentences: list[str], learned: LearnedPhrases | None = None
    ) -> list[list[QueryPhrase]]:
        """Retrieve for each phrase of each sentence, in order, found or not."""
        return self.read(sentences, self.start(sentences, learned)(), learned)

    def start(
        self, sentences: list[str], learned: LearnedPhrases | None = None
    ) -> Callable[[], RetrievedEntries]:
        """Start retrieval; returns a function that waits for the result.

        An index in another process searches in the meantime; one of this process searches when the result is
        wanted.
        """
        found = self.finder.find(sentences)
        self.too_long += found.too_long
        vectors = found.vectors.to(self.device)

        def search() -> tuple[np.ndarray, np.ndarray]:
            least = self.min_similarity
            if learned is None or learned.empty:
                return nearest_distinct(self.index, self.datastore.hashes.__getitem__, vectors, self.k, least)
            index, hashes = learned.joined(self.index), learned.string_hashes
            return nearest_distinct(index, hashes, vectors, self.k, least, learned.gone)

        answer = self.remote.start(search, len(sentences)) if self.index.remote and len(vectors) else search

        def wait() -> RetrievedEntries:
            entries, scores = answer() or (np.empty((0, self.k), np.int64), np.empty((0, self.k)))
            self.phrases += (count := len(entries))
            self.retrieved += int((entries >= 0).sum())
            return RetrievedEntries(found.spans[:count], found.probabilities.numpy()[:count], entries, scores)

        return wait

    def read(
        self, sentences: list[str], retrieved: RetrievedEntries, learned: LearnedPhrases | None = None
    ) -> list[list[QueryPhrase]]:
        """Look up the strings and sentences of what was retrieved."""
        read_sentence = cache(self.datastore.sentence)

        def phrase(entry: int, score: float) -> RetrievedPhrase:
            pair = learned.pair(entry) if learned is not None else None
            source = pair.id if pair is not None else 0
            if learned is not None and entry >= self.datastore.section.size:
                return RetrievedPhrase(entry, *learned.phrase(entry), score, source)
            number, start, end = self.datastore.spans[entry].tolist()
            sentence = read_sentence(number)
            return RetrievedPhrase(entry, sentence[start:end], sentence, start, end, score, source)

        results: list[list[QueryPhrase]] = [[] for _ in sentences]
        columns = (part.tolist() for part in retrieved)
        for (number, start, end), probability, entries, scores in zip(*columns):
            best = [phrase(entry, score) for entry, score in zip(entries, scores) if entry >= 0]
            results[number].append(QueryPhrase(sentences[number][start:end], start, end, probability, best))
        return results

    def check_found(self, text: object) -> None:
        """At the end of a text, refuse to have found nothing in it, or nothing for it."""
        if self.remote.skipped:
            return  # nothing is known
        if not self.phrases:
            raise ConfigurationError(
                f"no phrase was found in {text} {self.finder.segmentation.explain_nothing()}"
            )
        if not self.retrieved:
            raise ConfigurationError(
                f"nothing was retrieved for any of {self.phrases:,} phrases: no entry scores "
                f"{self.min_similarity} or more; lower --phrases-min-similarity"
            )

    def signature(
        self, settings: Mapping[str, object] | None = None, learned: LearnedPhrases | None = None
    ) -> str:
        """Name all that decides what is retrieved, in one line to be printed with results.

        Args:
            settings: what counts besides datastore, encoder and segmentation, by name; k and min_similarity
                of this retriever if not given.
        """
        section = self.datastore.section
        return signature(
            {
                "phrases": short(self.datastore.keys_fingerprint),
                "entries": section.size,
                "encoder": short(section.fingerprints["encoder"]),
                "index": EXACT if self.index.stands_in else section.index,
                "query": self.finder.description,
                **({} if learned is None or learned.empty else {"learned": learned}),
                **({"k": self.k, "min_similarity": self.min_similarity} if settings is None else settings),
            }
        )


def find_encoder(datastore: PhraseDatastore, given: str | None) -> Path:
    """Find the checkpoint of the encoder: the one given, or what the datastore was built with."""
    path = Path(given or datastore.section.encoder)
    if given is None and not path.is_file():
        raise ConfigurationError(
            f"the phrases of {datastore.directory} were built with the encoder {path}, which is not there: "
            "say with --phrases-encoder where it is"
        )
    return path


def load_encoder(datastore: PhraseDatastore, given: str | None, bf16: bool) -> SpanEncoder:
    """Load a datastore's phrase encoder, or the one `given`; warn where it does not compare by cosine."""
    path = find_encoder(datastore, given)
    with torch.random.fork_rng(devices=[]):  # sampling must draw the same as without phrases
        encoder = load_phrase_encoder(path, bf16=bf16)
    if getattr(encoder, "similarity", COSINE) != COSINE:
        logger.warning(
            "the phrases of %s are compared by inner products without bounds: --phrases-min-similarity and "
            "the weights of phrases are made for cosines, and weigh these wrongly until they are tuned",
            path,
        )
    return encoder


def query_segmentation(datastore: PhraseDatastore, threshold: float, kind: str | None = None) -> Segmentation:
    """Choose which spans of a source are queried: the datastore's kind unless given."""
    built = datastore.section.segmentation
    return Segmentation(kind or built["kind"], threshold, built["max_words"])
