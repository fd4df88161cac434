"""Subwords by SentencePiece, as in XLM-R."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import sentencepiece

from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.text.sentencepiece_model import parse_model, replace_pieces
from fairseq_ccpr.text.subwords import DICTIONARY, SubwordTokenizer, read_symbols
from fairseq_ccpr.text.words import SPACE, kinds_of

BLANK = "▁"  # how a piece writes the space before it


class SentencePieceTokenizer(SubwordTokenizer):
    """A SentencePiece model and the dictionary that gives its pieces their ids."""

    filename = "sentencepiece.bpe.model"

    def __init__(self, symbols: Sequence[str], model: bytes) -> None:
        super().__init__(symbols)
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        self.processor.LoadFromSerializedProto(model)

    def split(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Split a text with the SentencePiece model."""
        return piece_spans(self.processor, text)

    def restrict(self, kept: Collection[str]) -> SentencePieceTokenizer:
        """Make a tokenizer of fewer pieces.

        The piece of the lowest score stays, since the cost of an unknown character is set by it.
        """
        message = parse_model(self.model)
        if message.trainer_spec.model_type != message.trainer_spec.UNIGRAM:
            raise ConfigurationError(
                "the encoder's SentencePiece model is BPE, which needs all its pieces: leave out --keep-pieces-of"
            )
        normal = [piece for piece in message.pieces if piece.type == piece.NORMAL]
        stays = {*kept, min(normal, key=lambda piece: piece.score).piece}
        pieces = (piece for piece in message.pieces if piece.type != piece.NORMAL or piece.piece in stays)
        model = replace_pieces(message, pieces)
        return SentencePieceTokenizer([s for s in self.symbols if s in stays], model)

    @property
    def content(self) -> bytes:
        """The SentencePiece model."""
        return self.model

    @classmethod
    def load(cls, directory: Path) -> SentencePieceTokenizer:
        """Read the model and the dictionary of a directory."""
        path = directory / cls.filename
        try:
            return cls(read_symbols(directory / DICTIONARY), path.read_bytes())
        except RuntimeError:
            raise CheckpointError(f"{path} is no SentencePiece model: copy the encoder's folder again") from None


def piece_spans(processor: sentencepiece.SentencePieceProcessor, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the pieces of a text with the characters each stands for, spaces around it left out.

    The pieces laid end to end are the normalised text, and SentencePiece says of each of its characters where in the
    text it comes from. Where one character becomes several pieces (½, or the bytes of one that has no piece), each of
    them stands for it.
    """
    _, origins = processor.normalize(text, with_offsets=True)  # one more than characters
    kinds = kinds_of(text)
    at = 0
    for piece in processor.encode(text, out_type=str):
        byte = _byte(processor, piece) if piece.startswith("<0x") else None
        if byte is None:
            begin, after = at + len(piece) - len(piece.lstrip(BLANK)), at + len(piece)
        else:
            begin = at - 1 if 0x80 <= byte < 0xC0 else at  # such a byte continues a character of UTF-8
            after = begin + 1
        start, end = origins[begin], origins[after]
        if begin < after:
            end = max(end, min(origins[after - 1] + 1, len(text)))  # the blank of a last word comes from no character
            while end > start + 1 and kinds[end - 1] == SPACE:  # at the end of the text
                end -= 1
        yield piece, start, end
        at = after


def _byte(processor: sentencepiece.SentencePieceProcessor, piece: str) -> int | None:
    """Return the byte that a piece such as <0xE2> stands for, in models that fall back on bytes; None in others."""
    return int(piece[1:-1], 16) if processor.is_byte(processor.piece_to_id(piece)) else None
