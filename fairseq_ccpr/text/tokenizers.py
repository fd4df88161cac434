"""Loads the tokenizer of an encoder directory, of whichever kind."""

from __future__ import annotations

from pathlib import Path

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.text.sentencepiece_tokenizer import SentencePieceTokenizer
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.wordpiece_tokenizer import WordPieceTokenizer

TOKENIZERS: dict[str, type[SubwordTokenizer]] = {
    kind.filename: kind for kind in (SentencePieceTokenizer, WordPieceTokenizer)
}


def load_tokenizer(directory: Path) -> SubwordTokenizer:
    """Load the tokenizer of an encoder directory; it needs no weights, and pickles for worker processes.

    Raises:
        CheckpointError: no such directory, or one without a tokenizer, or a damaged one.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no encoder {directory}: make one with fairseq-ccpr convert")
    for filename, kind in TOKENIZERS.items():
        if (directory / filename).is_file():
            return kind.load(directory)
    raise CheckpointError(
        f"the encoder {directory} has no tokenizer: it needs one of {', '.join(TOKENIZERS)} next to its weights"
    )
