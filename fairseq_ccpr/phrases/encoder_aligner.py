"""Word alignment by a pretrained encoder: subwords whose states are each other's nearest (Jalili Sabet et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions, SentencePair, Spans
from fairseq_ccpr.text.subwords import Subwords, collate

MUTUAL = "mutual-nearest"  # in place of a symmetrisation
BATCH_TOKENS = 4000  # of either side, padding included


class EncoderAligner(Aligner):
    """Links words that have subwords whose states, less the mean of their sentence, are nearest to each other by cosine.

    There is no training, so one sentence pair is aligned as well as a million; words beyond the encoder's maximum length
    have no links.

    Args:
        options: only `encoder` and `encoder_layer` are used.

    Raises:
        ConfigurationError: no encoder was given, or it has no such layer.
        CheckpointError: the encoder cannot be loaded.
    """

    directed = False

    def __init__(self, options: AlignerOptions) -> None:
        super().__init__(MUTUAL)
        if options.encoder is None:
            raise ConfigurationError("--aligner encoder needs --encoder DIR: make one with fairseq-ccpr convert")
        device = choose_device(cpu=False)
        self.encoder = ContextEncoder.load(options.encoder).to(device)
        layers = self.encoder.layers
        self.layer = default_layer(layers) if options.encoder_layer is None else options.encoder_layer
        if not 0 <= self.layer <= layers:
            raise ConfigurationError(
                f"--encoder-layer is {self.layer}, but {options.encoder} has {layers} layers: give 0 to {layers}"
            )

    def describe(self) -> dict[str, Any]:
        """Return the rule and the layer."""
        return super().describe() | {"encoder_layer": self.layer}

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of the encoder."""
        return {"encoder": self.encoder.fingerprint()}

    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn nothing, but consume the pairs, since their reader counts them."""
        for _ in pairs:
            pass

    @torch.inference_mode()
    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        """Align sentence pairs: links [A, 2] of each."""
        tokenizer, limit = self.encoder.tokenizer, self.encoder.max_positions
        encoded = [[tokenizer.encode(text).cut(limit) for text in (pair.source, pair.target)] for pair in pairs]
        links: list[np.ndarray] = [np.empty((0, 2), np.int32)] * len(pairs)
        for batch in _batches(encoded):
            sides = zip(*(encoded[number] for number in batch))
            states = [self._states(list(side)) for side in sides]
            for number, source, target in zip(batch, *states):
                pair, (source_subwords, target_subwords) = pairs[number], encoded[number]
                source_words = words_of_subwords(source_subwords, pair.source_words)
                target_words = words_of_subwords(target_subwords, pair.target_words)
                links[number] = linked_words(source, target, source_words, target_words)
        return links

    def _states(self, batch: list[Subwords]) -> Tensor:
        """Compute the states of subwords, fp32 [S, L, H]."""
        tokens = collate(batch, self.encoder.tokenizer.pad).to(next(self.encoder.parameters()).device)
        return self.encoder.states(tokens, self.layer).float()


def default_layer(layers: int) -> int:
    """Return the layer whose states align best as far as measured: the middle one.

    >>> default_layer(12)
    6
    """
    return layers // 2


def words_of_subwords(subwords: Subwords, words: Spans) -> np.ndarray:
    """Mark the words that each subword has characters of, bool [n, W]; markers and spaces have none.

    A word has several subwords, and a subword may have parts of several words, as of two Chinese characters.
    """
    starts, ends = np.array(subwords.starts)[:, None], np.array(subwords.ends)[:, None]
    spans = np.array(words, dtype=np.int64).reshape(-1, 2)
    return (starts < spans[:, 1]) & (ends > spans[:, 0]) & (starts < ends)


def linked_words(source: Tensor, target: Tensor, source_words: np.ndarray, target_words: np.ndarray) -> np.ndarray:
    """Link words that have mutually nearest subwords.

    Args:
        source: states of subwords [at least n, H].
        target: [at least m, H].
        source_words: words of the n source subwords, bool [n, W].
        target_words: of the m target subwords, bool [m, V].

    Returns:
        Links int32 [A, 2], in ascending order.
    """
    i, j = (
        torch.from_numpy(np.flatnonzero(side.any(axis=1))).to(source.device) for side in (source_words, target_words)
    )
    if not len(i) or not len(j):
        return np.empty((0, 2), np.int32)
    similarity = _directions(source[i]) @ _directions(target[j]).T  # [n', m']
    forward, backward = similarity.argmax(dim=1), similarity.argmax(dim=0)
    mutual = backward[forward] == torch.arange(len(i), device=i.device)
    left, right = i[mutual].cpu().numpy(), j[forward[mutual]].cpu().numpy()
    shared = source_words[left].T.astype(np.int32) @ target_words[right].astype(np.int32)  # [W, V]
    return np.argwhere(shared).astype(np.int32)


def _directions(states: Tensor) -> Tensor:
    """Centre states [n, H] and normalise them: their common component says little about any of them."""
    return torch.nn.functional.normalize(states - states.mean(dim=0) if len(states) > 1 else states, dim=1)


def _batches(encoded: list[list[Subwords]]) -> Iterator[list[int]]:
    """Batch pairs of similar length, about BATCH_TOKENS subwords per side."""
    lengths = [max(len(subwords.ids) for subwords in sides) for sides in encoded]
    batch: list[int] = []
    for number in sorted(range(len(encoded)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
