"""Subwords of pretrained encoders: SentencePiece as in XLM-R, and WordPiece."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import sentencepiece

from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.text.sentencepiece import parse_model, piece_spans, replace_pieces
from fairseq_ccpr.text.subwords import DICTIONARY, SubwordTokenizer, read_symbols

CONTINUED = "##"  # how a piece says that it does not begin a word
LONGEST_WORD = 100  # characters; what is longer is unknown as a whole, as in BERT
DROPPED = ("Cc", "Cf", "Co")  # categories of characters that it does not see
IDEOGRAPHS = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


class SentencePieceTokenizer(SubwordTokenizer):
    """A SentencePiece model and the dictionary that gives its pieces their ids."""

    filename = "sentencepiece.bpe.model"

    def __init__(self, symbols: Sequence[str], model: bytes) -> None:
        super().__init__(symbols)
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        self.processor.LoadFromSerializedProto(model)

    def split(self, text: str) -> Iterator[tuple[str, int, int]]:
        return piece_spans(self.processor, text)

    def restrict(self, kept: Collection[str]) -> SentencePieceTokenizer:
        """Keep fewer pieces, and that of the lowest score, which sets the cost of what is unknown."""
        message = parse_model(self.model)
        if message.trainer_spec.model_type != message.trainer_spec.UNIGRAM:
            raise ConfigurationError(
                "the encoder's SentencePiece model is BPE, which needs all its "
                "pieces: leave out --keep-pieces-of"
            )
        normal = [piece for piece in message.pieces if piece.type == piece.NORMAL]
        stays = {*kept, min(normal, key=lambda piece: piece.score).piece}
        pieces = (piece for piece in message.pieces if piece.type != piece.NORMAL or piece.piece in stays)
        model = replace_pieces(message, pieces)
        return SentencePieceTokenizer([s for s in self.symbols if s in stays], model)

    @property
    def content(self) -> bytes:
        return self.model

    @classmethod
    def load(cls, directory: Path) -> SentencePieceTokenizer:
        path = directory / cls.filename
        try:
            return cls(read_symbols(directory / DICTIONARY), path.read_bytes())
        except RuntimeError:
            raise CheckpointError(
                f"{path} is no SentencePiece model: copy the encoder's folder again"
            ) from None


@dataclass(frozen=True)
class WordPieceSettings:
    """BERT's preprocessing of text before it splits words; from a `tokenizer_config.json` of Hugging Face."""

    lower_case: bool
    strip_accents: bool
    split_ideographs: bool


class WordPieceTokenizer(SubwordTokenizer):
    """BERT's splitting at spaces, punctuation and ideographs, then the longest pieces from the left."""

    filename = "wordpiece.json"

    def __init__(self, symbols: Sequence[str], settings: WordPieceSettings) -> None:
        super().__init__(symbols)
        self.settings = settings
        self._pieces = set(symbols)
        self._longest = max(map(len, symbols), default=0)

    def split(self, text: str) -> Iterator[tuple[str, int, int]]:
        for word, origins in self._words(text):
            for piece, start, end in self._split_word(word):
                yield piece, origins[start], origins[end - 1] + 1

    def _words(self, text: str) -> Iterator[tuple[str, list[int]]]:
        word: list[str] = []
        origins: list[int] = []
        for at, character in enumerate(text):
            for normal in self._normalised(character):
                kind = _kind(normal)
                alone = kind == "punctuation" or (kind == "ideograph" and self.settings.split_ideographs)
                if (kind == "space" or alone) and word:
                    yield "".join(word), origins
                    word, origins = [], []
                if alone:
                    yield normal, [at]
                elif kind != "space":
                    word.append(normal)
                    origins.append(at)
        if word:
            yield "".join(word), origins

    def _normalised(self, character: str) -> str:
        if character in "\0\ufffd" or (
            character not in "\t\n\r" and unicodedata.category(character) in DROPPED
        ):
            return ""
        if self.settings.strip_accents:
            decomposed = unicodedata.normalize("NFD", character)
            character = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        return character.lower() if self.settings.lower_case else character

    def _split_word(self, word: str) -> list[tuple[str, int, int]]:
        """Take the longest piece, then the longest of the rest; if that fails, the word is unknown."""
        pieces = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            prefix = CONTINUED if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                if (piece := prefix + word[start:end]) in self._pieces:
                    pieces.append((piece, start, end))
                    start = end
                    break
            else:
                break
        return pieces if start == len(word) else [(self.dictionary.unk_word, 0, len(word))]

    def restrict(self, kept: Collection[str]) -> WordPieceTokenizer:
        return WordPieceTokenizer([s for s in self.symbols if s in kept], self.settings)

    @property
    def content(self) -> bytes:
        """The settings as JSON; the pieces are those of the dictionary."""
        return (json.dumps(asdict(self.settings), indent=2) + "\n").encode()

    @classmethod
    def load(cls, directory: Path) -> WordPieceTokenizer:
        path = directory / cls.filename
        try:
            settings = WordPieceSettings(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): copy the encoder's folder again") from None
        return cls(read_symbols(directory / DICTIONARY), settings)


def _kind(character: str) -> str:
    if character.isspace():
        return "space"
    code, category = ord(character), unicodedata.category(character)
    if category[0] == "P" or (code < 128 and not character.isalnum()):
        return "punctuation"
    return "ideograph" if any(first <= code <= last for first, last in IDEOGRAPHS) else "letter"


ENCODER_TOKENIZERS: dict[str, type[SubwordTokenizer]] = {
    kind.filename: kind for kind in (SentencePieceTokenizer, WordPieceTokenizer)
}


def load_tokenizer(directory: Path) -> SubwordTokenizer:
    """Load the tokenizer of an encoder directory; it needs no weights, and pickles for worker processes."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no encoder {directory}: make one with fairseq-ccpr convert")
    for filename, kind in ENCODER_TOKENIZERS.items():
        if (directory / filename).is_file():
            return kind.load(directory)
    raise CheckpointError(
        f"the encoder {directory} has no tokenizer: it needs one of "
        f"{', '.join(ENCODER_TOKENIZERS)} next to its weights"
    )
