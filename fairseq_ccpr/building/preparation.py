"""Preparing a DATA_BIN from sentence pairs as text: fairseq's tokenizer and BPE, then fairseq-preprocess."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice, product
from pathlib import Path

import numpy as np
import sentencepiece
from fairseq import options
from fairseq.data import data_utils, encoders
from fairseq_cli import preprocess

from fairseq_ccpr.errors import ConfigurationError, naming
from fairseq_ccpr.paths import configuration
from fairseq_ccpr.storage.data_bin import TRAIN
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.text.decoder_subwords import loading_subwords
from fairseq_ccpr.text.languages import SAMPLE, refuse_exchanged
from fairseq_ccpr.text.pairs import one_line, read_pairs, read_together, reasons, tell_skipped
from fairseq_ccpr.text.sentencepiece import for_target

logger = logging.getLogger(__name__)

MANY = 0.1  # of a subset's pairs, which are worth a warning if they are in the training text
SPECIAL_PIECES = 3  # <unk>, <s> and </s>, which fairseq's dictionary adds by itself


def train_sentencepiece(path: Path, languages: tuple[str, str], prefix: Path, pieces: int) -> None:
    """Train a joint SentencePiece model on both sides of sentence pairs; writes PREFIX.model."""
    model = io.BytesIO()  # the trainer does not notice a full disk
    sentences = (side for pair in read_subset(path, *languages, skipped=Counter()) for side in pair)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            vocab_size=pieces,
            model_type="bpe",
            character_coverage=0.9995,
            input_sentence_size=1_000_000,
            shuffle_input_sentence=True,
            minloglevel=2,
        )
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        raise ConfigurationError(
            f"{path} is too little text for --pieces {pieces}"
            + (f": give {most[1]} or fewer" if most else f" ({str(error).splitlines()[0]}): give fewer")
            + ", or --path, to use the subwords of a model that is trained already"
        ) from None
    path = prefix.with_suffix(".model")
    with naming(path):
        path.write_bytes(model.getvalue())


def write_dictionary(model: Path, path: Path) -> None:
    """Write fairseq's dictionary of all pieces of a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = (processor.id_to_piece(i) for i in range(SPECIAL_PIECES, len(processor)))
    with naming(path):
        path.write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")


def pair_files(path: Path, *languages: str) -> list[Path]:
    """List the files of pairs: one TSV file, or else two, named PATH.LANGUAGE."""
    return [path] if path.is_file() else [Path(f"{path}.{language}") for language in languages]


def read_subset(path: Path, *languages: str, skipped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Read the pairs of a TSV file or of two files, and count what is no pair."""
    files = pair_files(path, *languages)
    return (
        read_pairs(path, skipped=skipped) if files == [path] else read_together(files[0], files[1], skipped)
    )


def splitter(subwords: list[str], language: str, target: bool = False) -> Callable[[str], str]:
    """Return a function from text of a language to its subwords, separated by spaces.

    Args:
        subwords: options of fairseq: `--tokenizer`, `--bpe`, and those that belong to them.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            parsed = options.parse_args_and_arch(
                options.get_generation_parser(),
                input_args=["data", "-s", language, "-t", language, *subwords],
            )
    except SystemExit:
        reason = printed.getvalue().strip().split("error: ")[-1]
        raise ConfigurationError(f"fairseq does not take '{' '.join(subwords)}': {reason}") from None
    with loading_subwords(subwords):
        cfg = configuration(parsed)
        bpe = encoders.build_bpe(cfg.bpe)
        steps = [encoders.build_tokenizer(cfg.tokenizer), for_target(bpe) if target else bpe]

    def split(text: str) -> str:
        for step in steps:
            text = step.encode(text) if step is not None else text
        return one_line(text)

    return split


def binarise(
    subsets: dict[str, Path],
    languages: tuple[str, str],
    subwords: list[str],
    dictionaries: list[Path],
    output: Path,
) -> dict[str, int]:
    """Split the pairs of each subset (train, valid, test) and binarise them with fairseq-preprocess.

    Args:
        subsets: of each a TSV file, or the common beginning of two files' names.
        dictionaries: a joint one, or those of source and target.
        output: the DATA_BIN; its folder `text` keeps the subwords.

    Returns:
        How many pairs each subset has: those with an empty side are left out, and equal ones are all kept;
        both are reported.
    """
    split_source, split_target = (
        splitter(subwords, languages[0]),
        splitter(subwords, languages[1], target=True),
    )
    text = output / "text"
    text.mkdir(parents=True, exist_ok=True)
    source_lang, target_lang = languages
    arguments = [
        "-s", source_lang, "-t", target_lang, "--destdir", str(output),
        "--srcdict", str(dictionaries[0]), "--tgtdict", str(dictionaries[-1]),
    ]  # fmt: skip
    counts = dict.fromkeys(subsets, 0)
    for name, path in subsets.items():
        sample = list(islice(read_subset(path, *languages, skipped=Counter()), SAMPLE))
        refuse_exchanged(f"--{name} {path}", sample, *languages)
    unseen = {
        name: set(read_subset(path, *languages, skipped=Counter()))
        for name, path in subsets.items()
        if name != TRAIN
    }
    different = {name: len(pairs) for name, pairs in unseen.items()}
    for name, path in subsets.items():
        skipped, sides = Counter[str](), [text / f"{name}.{language}" for language in languages]
        with (
            naming(text),
            sides[0].open("w", encoding="utf-8") as source_text,
            sides[1].open("w", encoding="utf-8") as target_text,
        ):
            for pair in read_subset(path, *languages, skipped=skipped):
                source, target = split_source(pair[0]).strip(), split_target(pair[1]).strip()
                if not source or not target:
                    skipped[f"its {'target' if source else 'source'} is empty"] += 1
                    continue
                counts[name] += 1
                source_text.write(source + "\n")
                target_text.write(target + "\n")
                if name == TRAIN:
                    for pairs in unseen.values():
                        pairs.discard(pair)
        tell_skipped(f"--{name} {path}", skipped)
        first = first_of_equals(map("\t".join, read_together(sides[0], sides[1])), text)
        if repeated := int((first != np.arange(len(first))).sum()):
            logger.warning("--%s %s: %s pairs are there again, and are kept", name, path, f"{repeated:,}")
        (text / "first.npy").unlink()
        if not counts[name]:
            found = f" ({reasons(skipped)})" if skipped else ""
            raise ConfigurationError(
                f"--{name} {path} has no pair{found}: expected lines of source, tab, target"
            )
        arguments += [f"--{name}pref", str(text / name)]
    with naming(output), redirect_stdout(io.StringIO()):
        preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    for name, language in product(subsets, languages):
        file = output / f"{name}.{source_lang}-{target_lang}.{language}"
        if (made := len(data_utils.load_indexed_dataset(str(file), None))) != counts[name]:
            raise ConfigurationError(
                f"fairseq made {made:,} sentences of the {language} side of --{name} {subsets[name]}, which has "
                f"{counts[name]:,} pairs: look for characters that end lines, and take them out"
            )
    for name, pairs in unseen.items():
        if (seen := different[name] - len(pairs)) > MANY * different[name]:
            logger.warning(
                "%s of the %s different pairs of --%s are in --train as well: tuning and measuring on them expect too much "
                "of other text; take them out of one",
                f"{seen:,}",
                f"{different[name]:,}",
                name,
            )
    return counts
