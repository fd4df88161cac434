"""Systems that encode phrases in their sentences, and the phrases they encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.sentence_encoders import MUSE, MuseEncoder
from fairseq_ccpr.models.phrase_encoder import load_phrase_encoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.text.subwords import Subwords, batches_of_like_length, collate, subword_bounds

BLOCK_TEXTS = 64


@dataclass
class Phrases:
    """K phrases in S texts."""

    texts: list[str]
    spans: np.ndarray  # int32 [K, 3]: text, start, end in characters; by text

    def strings(self) -> list[str]:
        """List the phrases as strings."""
        return [self.texts[text][start:end] for text, start, end in self.spans.tolist()]

    def keep(self, wanted: np.ndarray) -> Phrases:
        """Keep the phrases of which `wanted`, bool [K], is true, and all texts."""
        return Phrases(self.texts, self.spans[wanted])

    def blocks(self, size: int = BLOCK_TEXTS) -> Iterator[tuple[slice, Phrases]]:
        """Split into blocks of `size` texts, each with the rows of its phrases."""
        for start in range(0, len(self.texts), size):
            texts = self.texts[start : start + size]
            first, end = np.searchsorted(self.spans[:, 0], [start, start + len(texts)]).tolist()
            yield slice(first, end), Phrases(texts, self.spans[first:end] - np.array([start, 0, 0], np.int32))


class PhraseSystem(Protocol):
    """An encoder of phrases in their sentences, compared by inner product."""

    fingerprint: str  # of all that decides the vectors

    def usable(self, phrases: Phrases) -> np.ndarray:
        """Mark the phrases that it can encode, bool [K]."""

    def encode(self, phrases: Phrases) -> Tensor:
        """Encode phrases, all of them usable, to fp32 [K, d]."""


class SubwordSystem:
    """A Transformer whose states at the subwords of a phrase make its vector.

    Args:
        to_states: tokens int64 [S, L] -> its states [S, L, H].
        to_vectors: states [S, L, H] and spans int64 [K, 3] (sentence, first and last subword) -> fp32 [K, d].
    """

    def __init__(
        self,
        context: ContextEncoder,
        to_states: Callable[[Tensor], Tensor],
        to_vectors: Callable[[Tensor, Tensor], Tensor],
        digest: str,
    ) -> None:
        self.context, self.to_states, self.to_vectors, self.fingerprint = (
            context,
            to_states,
            to_vectors,
            digest,
        )

    def usable(self, phrases: Phrases) -> np.ndarray:
        """Mark the phrases whose borders no subword crosses, in texts that are not too long."""
        subwords = self._split(phrases)
        limit = self.context.max_positions + 2
        fits = (
            len(subwords[text].ids) <= limit and subword_bounds(subwords[text], start, end) is not None
            for text, start, end in phrases.spans.tolist()
        )
        return np.array([*fits], bool)

    @torch.inference_mode()
    def encode(self, phrases: Phrases) -> Tensor:
        """Encode in batches of like length, each text once."""
        subwords = self._split(phrases)
        bounds = torch.tensor([subword_bounds(subwords[text], a, b) for text, a, b in phrases.spans.tolist()])
        numbers = torch.from_numpy(phrases.spans[:, 0].astype(np.int64))
        device = next(self.context.parameters()).device
        vectors: Tensor | None = None
        for batch in batches_of_like_length(numbers.unique().tolist(), subwords):
            place = torch.full((len(subwords),), -1)
            place[batch] = torch.arange(len(batch))
            rows = (place[numbers] >= 0).nonzero().squeeze(1)
            spans = torch.column_stack([place[numbers[rows]], bounds[rows]]).to(device)
            tokens = collate([subwords[number] for number in batch], self.context.tokenizer.pad).to(device)
            found = self.to_vectors(self.to_states(tokens), spans)
            vectors = found.new_empty(len(numbers), found.size(1)) if vectors is None else vectors
            vectors[rows.to(device)] = found
        assert vectors is not None, "phrases to encode"
        return vectors

    def _split(self, phrases: Phrases) -> list[Subwords]:
        return [self.context.tokenizer.encode(text) for text in phrases.texts]


class SentenceSystem:
    """A sentence encoder, S texts -> [S, d]: every phrase of a sentence has the sentence's vector."""

    def __init__(
        self, encode_sentences: Callable[[list[str]], Any], digest: str, device: torch.device
    ) -> None:
        self.encode_sentences, self.fingerprint, self.device = encode_sentences, digest, device

    def usable(self, phrases: Phrases) -> np.ndarray:
        """Mark all phrases."""
        return np.ones(len(phrases.spans), bool)

    def encode(self, phrases: Phrases) -> Tensor:
        """Give each phrase the vector of its sentence."""
        numbers, rows = np.unique(phrases.spans[:, 0], return_inverse=True)
        vectors = np.asarray(self.encode_sentences([phrases.texts[number] for number in numbers]), np.float32)
        return torch.from_numpy(vectors)[torch.from_numpy(rows)].to(self.device)


def _raw_vectors(states: Tensor, spans: Tensor) -> Tensor:
    """Concatenate states [S, L, H] to [H_s ; H_e], fp32 [K, 2H] of length 1: the input of CCPR's alignment head."""
    sentence, first, last = spans.unbind(dim=1)
    ends = torch.cat([states[sentence, first], states[sentence, last]], dim=1)
    return torch.nn.functional.normalize(ends.float(), dim=1)


def load_system(word: str, device: torch.device, bf16: bool = False) -> PhraseSystem:
    """Load a system by its word on the command line."""
    path = Path(word)
    if path.is_dir():
        context = ContextEncoder.load(path, bf16=bf16).to(device)
        return SubwordSystem(context, context, _raw_vectors, context.fingerprint())
    if path.is_file():
        encoder = load_phrase_encoder(path, bf16=bf16).to(device)
        return SubwordSystem(encoder.context, encoder.states, encoder.vectors, encoder.fingerprint())
    if word == MUSE:
        return load_muse(device)
    raise ConfigurationError(
        f"there is no encoder '{word}': give a checkpoint of fairseq-train --task phrase_contrast, the folder of a "
        f"pretrained encoder, or {MUSE}"
    )


def load_muse(device: torch.device) -> SentenceSystem:
    """Load Google's multilingual universal sentence encoder, version 3."""
    muse = MuseEncoder()
    return SentenceSystem(muse.encode, muse.fingerprint, device)
