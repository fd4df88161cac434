"""From sentence pairs as text to a DATA_BIN: SentencePiece, then fairseq-preprocess.

Raises:
    ConfigurationError: a file that is no SentencePiece model, or a line that is no pair.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import sentencepiece
from fairseq import options
from fairseq_cli import preprocess

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.text_pairs import read_pairs

SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself


def train_sentencepiece(path: Path, prefix: Path, pieces: int) -> None:
    """Train a joint SentencePiece model on both sides of a TSV file; writes PREFIX.model."""
    sentences = (side for pair in read_pairs(path) for side in pair)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(prefix), vocab_size=pieces, model_type="bpe",
        character_coverage=0.9995, input_sentence_size=1_000_000, shuffle_input_sentence=True, minloglevel=2,
    )  # fmt: skip


def write_dictionary(model: Path, path: Path) -> None:
    """fairseq's dictionary of all pieces of a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = (processor.id_to_piece(i) for i in range(SPECIAL_PIECES, len(processor)))
    path.write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")


def binarise(
    subsets: dict[str, Path], source_lang: str, target_lang: str, model: Path, dictionary: Path, output: Path
) -> None:
    """Cut the pairs of each subset (train, valid, test) into pieces and binarise them with fairseq-preprocess."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except RuntimeError:
        raise ConfigurationError(f"{model} is no SentencePiece model") from None
    text = output / "text"
    text.mkdir(parents=True, exist_ok=True)
    arguments = [
        "-s", source_lang, "-t", target_lang, "--destdir", str(output),
        "--srcdict", str(dictionary), "--tgtdict", str(dictionary),
    ]  # fmt: skip
    for name, path in subsets.items():
        with (
            (text / f"{name}.{source_lang}").open("w", encoding="utf-8") as source_text,
            (text / f"{name}.{target_lang}").open("w", encoding="utf-8") as target_text,
        ):
            for source, target in read_pairs(path):
                source_text.write(" ".join(processor.encode(source, out_type=str)) + "\n")
                target_text.write(" ".join(processor.encode(target, out_type=str)) + "\n")
        arguments += [f"--{name}pref", str(text / name)]
    with redirect_stdout(io.StringIO()):
        preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
