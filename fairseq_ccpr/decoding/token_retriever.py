"""Retrieval from a token datastore, each step of the decoder."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ccpr.datastore.fingerprint import short
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.interpolation import neighbour_log_probabilities
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.version import __version__

# A share of 1 would forbid whatever was not retrieved, and with it the end of a sentence that has reached its full length.
ALMOST_ALL = 1 - 2**-24


@dataclass(frozen=True)
class TokenRetrievalSettings:
    """The `--knn-*` options.

    Raises:
        ConfigurationError: a value out of its range.
    """

    k: int
    lambda_: float
    temperature: float

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"--knn-k is {self.k}: at least 1 neighbour is needed")
        if not 0 <= self.lambda_ <= 1:
            raise ConfigurationError(f"--knn-lambda is {self.lambda_}: a share between 0 and 1 is needed")
        if not 0 < self.temperature < float("inf"):
            raise ConfigurationError(f"--knn-temperature is {self.temperature}: a number above 0 is needed")


class TokenRetriever:
    """Turns queries into what the token datastore says of the next token.

    Args:
        datastore: an opened token datastore.
        settings: k, lambda and T.
        device: the model's device; keys and values live there where the index can.
    """

    def __init__(self, datastore: TokenDatastore, settings: TokenRetrievalSettings, device: torch.device) -> None:
        self.datastore = datastore
        self.settings = settings
        self.index = datastore.open_index().to(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.values = torch.from_numpy(datastore.values).to(device)

    def __call__(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Retrieve for each hypothesis.

        Args:
            queries: [H, d], any float dtype.

        Returns:
            values int64 [H, k], log p_r fp32 [H, k] with duplicates merged, and the share lambda fp32 [H], which is 0
            where nothing was found.
        """
        scores, ids = self.index.search(queries, self.settings.k)
        values = self.values[ids.clamp_min(0)].long()
        share = self.share(scores, ids, values).clamp(0, ALMOST_ALL).masked_fill((ids < 0).all(dim=1), 0.0)
        return values, neighbour_log_probabilities(scores, ids, values, self.settings.temperature), share

    def share(self, scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """How much the neighbours count, fp32 [H] in [0, 1]; here the same for all. A policy of your own overrides this.

        Args:
            scores, ids, values: the neighbours, [H, k] each, as `Index.search` gives them, and their tokens.
        """
        return scores.new_full((len(scores),), self.settings.lambda_)

    def with_settings(self, settings: TokenRetrievalSettings) -> TokenRetriever:
        """The same retriever over the same index, with other settings."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def signature(self) -> str:
        """All that decides what is retrieved and how it counts, in one line to be printed with results."""
        section, settings = self.datastore.section, self.settings
        store = short(section.files["token/keys.npy"]["sha256"])
        return (
            f"retriever:{type(self).__name__}|store:{store}|entries:{section.size}|layer:{section.key_layer}|index:{section.index}|"
            f"metric:{section.index.metric}|k:{settings.k}|lambda:{settings.lambda_}|T:{settings.temperature}|v:{__version__}"
        )
