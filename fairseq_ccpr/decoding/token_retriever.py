"""Retrieval from a token datastore, each step of the decoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.interpolation import ALMOST_ALL, neighbour_log_probabilities, retrieval_confidence
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import Index
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.version import __version__


@dataclass(frozen=True)
class TokenRetrievalSettings:
    """The `--knn-*` options.

    Raises:
        ConfigurationError: a value out of its range.
    """

    k: int
    lambda_: float
    temperature: float
    confidence: bool = False  # scale lambda by the neighbours' similarity (lambda*)
    lambda_max: float = 1.0  # of lambda*
    min_similarity: float = 0.0  # s0 of lambda*

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"--knn-k is {self.k}: at least 1 neighbour is needed")
        if not 0 <= self.lambda_ <= 1:
            raise ConfigurationError(f"--knn-lambda is {self.lambda_}: a share between 0 and 1 is needed")
        if not 0 < self.temperature < float("inf"):
            raise ConfigurationError(f"--knn-temperature is {self.temperature}: a number above 0 is needed")
        if not 0 < self.lambda_max <= 1:
            raise ConfigurationError(f"--knn-lambda-max is {self.lambda_max}: a share above 0 and up to 1 is needed")
        if not 0 <= self.min_similarity < 1:
            raise ConfigurationError(
                f"--knn-min-similarity is {self.min_similarity}: a cosine from 0 up to, but not, 1 is needed"
            )
        for name, off in (("lambda_max", 1), ("min_similarity", 0)):
            if getattr(self, name) != off and not self.confidence:
                raise ConfigurationError(
                    f"--knn-{name.replace('_', '-')} is for the lambda* of --knn-confidence, which is off: leave it out"
                )


class Neighbours(NamedTuple):
    """What was found for H hypotheses."""

    ids: Tensor  # int64 [H, k], entries; -1 where one is missing
    scores: Tensor  # fp32 [H, k]
    values: Tensor  # int64 [H, k], tokens
    log_probs: Tensor  # fp32 [H, k], log p_r of each token, duplicates merged
    share: Tensor  # fp32 [H], 0 where nothing was found


class TokenRetriever:
    """Turns queries into what the token datastore says of the next token.

    Args:
        datastore: an opened token datastore.
        settings: k, lambda and T.
        device: the model's device; keys and values live there where the index can.

    Raises:
        ConfigurationError: lambda* over keys that are not of length 1, whose inner products are no confidence.
    """

    def __init__(self, datastore: TokenDatastore, settings: TokenRetrievalSettings, device: torch.device) -> None:
        self.datastore = datastore
        self.settings = settings
        if settings.confidence and datastore.section.projection is None:
            raise ConfigurationError(
                f"--knn-confidence needs keys of length 1, but those of {datastore.directory} are the decoder's own states: "
                "build the datastore with --adapter clknn"
            )
        self.index = datastore.open_index().to(device)
        projection = datastore.open_projection()
        self.projection = projection.to(device) if projection is not None else None
        self.values = as_tensor(datastore.values).to(device)

    def __call__(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Retrieve for each hypothesis.

        Args:
            queries: [H, d], any float dtype.

        Returns:
            values int64 [H, k], log p_r fp32 [H, k] with duplicates merged, and the share lambda fp32 [H], which is 0
            where nothing was found.
        """
        found = self.look_up(queries)
        return found.values, found.log_probs, found.share

    def look_up(self, queries: Tensor) -> Neighbours:
        """The same with all that is known of the neighbours."""
        scores, ids = self.search(queries, self.settings.k)
        values = self.values[ids].long()  # of the last entry where one is missing
        share = self.share(scores, ids, values).clamp(0, ALMOST_ALL).masked_fill(scores[:, 0] == float("-inf"), 0.0)
        log_probs = neighbour_log_probabilities(scores, values, self.settings.temperature)
        return Neighbours(ids, scores, values, log_probs, share)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest entries of each of the decoder's states [H, d]; see `Index.search`."""
        return self.index.search(self.projection(queries) if self.projection is not None else queries, k)

    def share(self, scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """How much the neighbours count, fp32 [H] in [0, 1]: lambda, or lambda* of equation 8 of the CLKNN paper.

        A policy of your own overrides this.

        Args:
            scores, ids, values: the neighbours, [H, k] each, as `Index.search` gives them, and their tokens.
        """
        settings = self.settings
        if settings.confidence:
            confidence = retrieval_confidence(scores, settings.min_similarity)
            return (settings.lambda_ * confidence).clamp_max(settings.lambda_max)
        return scores.new_full((len(scores),), settings.lambda_)

    def with_settings(self, settings: TokenRetrievalSettings) -> TokenRetriever:
        """The same retriever over the same index, with other settings."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def with_entries(self, index: Index, values: Tensor) -> TokenRetriever:
        """The same retriever over other entries: an index of keys, and their tokens [N] on its device."""
        other = copy.copy(self)
        other.index, other.values = index, values
        return other

    def signature(self) -> str:
        """All that decides what is retrieved and how it counts, in one line to be printed with results."""
        section, settings = self.datastore.section, self.settings
        store = short(section.files["token/keys.npy"]["sha256"])
        keys = section.key_layer + (f"+{section.projection}" if section.projection is not None else "")
        share = (
            f"lambda*:{settings.lambda_}<={settings.lambda_max}|s0:{settings.min_similarity}"
            if settings.confidence
            else f"lambda:{settings.lambda_}"
        )
        return (
            f"retriever:{type(self).__name__}|store:{store}|entries:{section.size}|keys:{keys}|index:{section.index}|"
            f"metric:{section.index.metric}|k:{settings.k}|{share}|T:{settings.temperature}|v:{__version__}"
        )
