"""Retrieval of phrases, once a source sentence: which target phrases, in which sentences, translate its phrases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fairseq_ccpr.datastore.fingerprint import short
from fairseq_ccpr.datastore.phrase import KEYS, PHRASE, PhraseDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.version import __version__

LEAST_ENTRIES, SPARE = 64, 4  # searched for a phrase, and for each string that is kept: many have the same string


@dataclass(frozen=True)
class RetrievedPhrase:
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

    Attributes:
        too_long: sentences so far that the encoder cannot take, which have no phrases.

    Raises:
        DatastoreError: the datastore was built with another encoder.
        ConfigurationError: k below 1.
    """

    def __init__(
        self,
        datastore: PhraseDatastore,
        encoder: PhraseEncoder,
        segmentation: Segmentation,
        k: int,
        min_similarity: float,
        device: torch.device,
    ) -> None:
        if k < 1:
            raise ConfigurationError(f"--k is {k}: at least 1 phrase is needed")
        datastore.check_encoder(encoder.fingerprint())
        self.datastore, self.k, self.min_similarity = datastore, k, min_similarity
        self.finder = PhraseFinder(encoder.to(device), segmentation)
        self.index = datastore.open_index().to(device)
        self.device = device
        self.too_long = 0

    def retrieve(self, sentences: list[str]) -> list[list[QueryPhrase]]:
        """For each sentence its phrases, in order, those for which nothing was found too."""
        found = self.finder.find(sentences)
        self.too_long += found.too_long
        results: list[list[QueryPhrase]] = [[] for _ in sentences]
        if not len(found.spans):
            return results
        scores, ids = self.index.search(found.vectors.to(self.device), max(LEAST_ENTRIES, self.k * SPARE))
        probabilities = found.probabilities.tolist()
        for row, (number, start, end) in enumerate(found.spans.tolist()):
            retrieved = self._distinct(scores[row].tolist(), ids[row].tolist())
            query = QueryPhrase(sentences[number][start:end], start, end, probabilities[row], retrieved)
            results[number].append(query)
        return results

    def signature(self, settings: Mapping[str, object] | None = None) -> str:
        """All that decides what is retrieved, in one line to be printed with results.

        Args:
            settings: what counts beside datastore, encoder and segmentation, by name; k and s0 of this retriever if not
                given.
        """
        section, segmentation = self.datastore.section, self.finder.segmentation
        parts = {
            "phrases": short(section.files[f"{PHRASE}/{KEYS}.npy"]["sha256"]),
            "entries": section.size,
            "encoder": short(section.fingerprints["encoder"]),
            "index": section.index,
            "query": f"{segmentation.kind}>{segmentation.threshold}<={segmentation.max_words}words",
            **({"k": self.k, "s0": self.min_similarity} if settings is None else settings),
            "v": __version__,
        }
        return "|".join(f"{name}:{value}" for name, value in parts.items())

    def _distinct(self, scores: list[float], ids: list[int]) -> list[RetrievedPhrase]:
        best: dict[str, RetrievedPhrase] = {}
        for score, entry in zip(scores, ids):
            if entry < 0 or score < self.min_similarity or len(best) == self.k:
                break  # entries come best first
            string, sentence, start, end = self.datastore.phrase(entry)
            best.setdefault(string, RetrievedPhrase(entry, string, sentence, start, end, score))
        return list(best.values())
