"""Preparing a DATA_BIN from sentence pairs as text: fairseq's tokenizer and BPE, then fairseq-preprocess."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from fairseq import options
from fairseq.data import data_utils, encoders
from fairseq_cli import preprocess

from fairseq_ccpr.errors import ConfigurationError, naming
from fairseq_ccpr.paths import configuration
from fairseq_ccpr.storage.data_bin import TRAIN
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.text.decoder_subwords import loading_subwords, split_text, target_steps
from fairseq_ccpr.text.languages import IDENTIFIED_LINES, refuse_exchanged
from fairseq_ccpr.text.pairs import one_line, read_pairs, read_together, reasons, tell_skipped
from fairseq_ccpr.text.sentencepiece import SPECIAL_PIECES, read_pieces

logger = logging.getLogger(__name__)

MANY_SEEN = 0.1  # of a subset's pairs, which are worth a warning if they are in the training text


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
    pieces = read_pieces(model.read_bytes())[
        len(SPECIAL_PIECES) :
    ]  # which fairseq's dictionary adds by itself
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


def splitters(subwords: list[str], languages: tuple[str, str]) -> list[Callable[[str], str]]:
    """Return functions from text of either language to its subwords, separated by spaces.

    Args:
        subwords: options of fairseq: `--tokenizer`, `--bpe`, and those that belong to them.
    """
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            parsed = options.parse_args_and_arch(
                options.get_generation_parser(),
                input_args=["data", "-s", languages[0], "-t", languages[1], *subwords],
            )
    except SystemExit:
        reason = printed.getvalue().strip().split("error: ")[-1]
        raise ConfigurationError(f"fairseq does not take '{' '.join(subwords)}': {reason}") from None
    with loading_subwords(subwords):
        cfg = configuration(parsed)
        steps = encoders.build_tokenizer(cfg.tokenizer), encoders.build_bpe(cfg.bpe)
        of_target = target_steps(*steps)

    def splitter(each: tuple[Any, Any]) -> Callable[[str], str]:
        return lambda text: one_line(split_text(text, each)).strip()

    return [splitter(steps), splitter(of_target)]


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
    split = splitters(subwords, languages)
    text = output / "text"
    text.mkdir(parents=True, exist_ok=True)
    for name, path in subsets.items():
        sample = list(islice(read_subset(path, *languages, skipped=Counter()), IDENTIFIED_LINES))
        refuse_exchanged(f"--{name} {path}", sample, *languages)
    held_out = {name: path for name, path in subsets.items() if name != TRAIN}
    unseen = {name: set(read_subset(path, *languages, skipped=Counter())) for name, path in held_out.items()}
    different = {name: len(pairs) for name, pairs in unseen.items()}
    counts: dict[str, int] = {}
    for name, path in subsets.items():
        in_training = [*unseen.values()] if name == TRAIN else []
        files = [text / f"{name}.{language}" for language in languages]
        counts[name] = _split_subset(f"--{name} {path}", path, languages, split, files, in_training)
    _preprocess(subsets, languages, dictionaries, text, output)
    for name, language in product(subsets, languages):
        file = output / f"{name}.{'-'.join(languages)}.{language}"
        if (made := len(data_utils.load_indexed_dataset(str(file), None))) != counts[name]:
            raise ConfigurationError(
                f"fairseq made {made:,} sentences of the {language} side of --{name} {subsets[name]}, which "
                f"has {counts[name]:,} pairs: look for characters that end lines, and take them out"
            )
    for name, pairs in unseen.items():
        if (seen := different[name] - len(pairs)) > MANY_SEEN * different[name]:
            logger.warning(
                "%s of the %s different pairs of --%s are in --train as well: tuning and measuring on them "
                "expect too much of other text; take them out of one",
                f"{seen:,}",
                f"{different[name]:,}",
                name,
            )
    return counts


def _split_subset(
    option: str,
    path: Path,
    languages: tuple[str, str],
    split: list[Callable[[str], str]],
    files: list[Path],
    unseen: list[set[tuple[str, str]]],
) -> int:
    """Write a subset's subwords to the files of both sides, take its pairs out of `unseen`, count them."""
    skipped, count, folder = Counter[str](), 0, files[0].parent
    with (
        naming(folder),
        files[0].open("w", encoding="utf-8") as one,
        files[1].open("w", encoding="utf-8") as two,
    ):
        for pair in read_subset(path, *languages, skipped=skipped):
            source, target = (split_side(side) for split_side, side in zip(split, pair))
            if not source or not target:
                skipped[f"its {'target' if source else 'source'} is empty"] += 1
                continue
            count += 1
            one.write(source + "\n")
            two.write(target + "\n")
            for pairs in unseen:
                pairs.discard(pair)
    tell_skipped(option, skipped)
    first = first_of_equals(map("\t".join, read_together(files[0], files[1])), folder)
    if repeated := int((first != np.arange(len(first))).sum()):
        logger.warning("%s: %s pairs are there again, and are kept", option, f"{repeated:,}")
    (folder / "first.npy").unlink()
    if not count:
        found = f" ({reasons(skipped)})" if skipped else ""
        raise ConfigurationError(f"{option} has no pair{found}: expected lines of source, tab, target")
    return count


def _preprocess(
    subsets: Iterable[str], languages: tuple[str, str], dictionaries: list[Path], text: Path, output: Path
) -> None:
    """Run fairseq-preprocess on the subwords in a folder."""
    words = ["-s", languages[0], "-t", languages[1], "--destdir", str(output)]
    words += ["--srcdict", str(dictionaries[0]), "--tgtdict", str(dictionaries[-1])]
    for name in subsets:
        words += [f"--{name}pref", str(text / name)]
    with naming(output), redirect_stdout(io.StringIO()):
        preprocess.main(options.get_preprocessing_parser().parse_args(words))
