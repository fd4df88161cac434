"""`--bpe sentencepiece_pair`: a SentencePiece model for each language, as OPUS-MT has them.

fairseq's own --bpe sentencepiece has one model. Joining pieces needs none, so it is for splitting that the target language's
is kept: training pairs, and phrases.
"""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.data.encoders import register_bpe
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

PAIR = "sentencepiece_pair"
_TAG = re.compile(r"\s*(>>[\w-]+<<)\s*")  # what names the target language, in front of a source sentence


@dataclass
class SentencepiecePairConfig(SentencepieceConfig):
    """Options of `--bpe sentencepiece_pair`."""

    sentencepiece_model: str = field(default="???", metadata={"help": "SentencePiece model of the source language"})
    sentencepiece_target_model: str = field(
        default="???", metadata={"help": "SentencePiece model of the target language"}
    )
    source_tag: Optional[str] = field(
        default=None, metadata={"help": "what the model wants in front of every source sentence, such as >>deu<<"}
    )


@register_bpe(PAIR, dataclass=SentencepiecePairConfig)
class SentencepiecePair(SentencepieceBPE):
    """Split source text; `target` splits target text.

    A sentence that begins with a tag such as >>deu<< keeps it as one subword; any other gets that of `--source-tag`. Joining
    leaves tags out.
    """

    def __init__(self, cfg: SentencepiecePairConfig) -> None:
        super().__init__(cfg)
        self.tag = cfg.source_tag or ""
        self.target = SentencepieceBPE(
            SentencepieceConfig(
                sentencepiece_model=cfg.sentencepiece_target_model,
                sentencepiece_enable_sampling=cfg.sentencepiece_enable_sampling,
                sentencepiece_alpha=cfg.sentencepiece_alpha,
            )
        )

    def encode(self, x: str) -> str:
        """Split a source sentence into pieces, with its tag in front; nothing stays nothing."""
        tag, text = self._without_tag(x)
        pieces = super().encode(text)
        return " ".join(filter(None, (tag or self.tag, pieces))) if pieces else ""

    def decode(self, x: str) -> str:
        """Join the pieces of a sentence of either language."""
        return str(super().decode(self._without_tag(x)[1]))

    @staticmethod
    def _without_tag(text: str) -> tuple[str, str]:
        found = _TAG.match(text)
        return (found[1], text[found.end() :]) if found else ("", text)


def implied_bpe(words: list[str]) -> list[str]:
    """Return words of a command line with the --bpe that its SentencePiece models mean, where it is left out.

    >>> implied_bpe(["--sentencepiece-model", "spm.model"])
    ['--bpe', 'sentencepiece', '--sentencepiece-model', 'spm.model']
    """
    names = {word.partition("=")[0] for word in words}
    if "--bpe" in names or "--sentencepiece-model" not in names:
        return words
    return ["--bpe", PAIR if "--sentencepiece-target-model" in names else "sentencepiece", *words]


def for_target(bpe: Any) -> Any:
    """Return the subword model of the target language: of a pair its second, of any other itself."""
    return bpe.target if isinstance(bpe, SentencepiecePair) else bpe
