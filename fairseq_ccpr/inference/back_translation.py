"""Back-translating monolingual text with a reverse model, into a DATA_BIN to build from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from fairseq.data import Dictionary

from fairseq_ccpr.building.adapter_build import AdapterTraining
from fairseq_ccpr.building.corpus import PseudoPairs
from fairseq_ccpr.building.part import BACK_TRANSLATIONS, RAW, Processes, refuse_differences, refuse_foreign
from fairseq_ccpr.building.preparation import binarise
from fairseq_ccpr.building.token_build import TRAINED_ADAPTER, TokenBuildSettings, load
from fairseq_ccpr.datastore.manifest import REVERSE_MODEL, TOKEN, Manifest
from fairseq_ccpr.datastore.preprocessing import Preprocessing, read_preprocessing
from fairseq_ccpr.decoding.task import task_words
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, DatastoreError
from fairseq_ccpr.inference.resources import configure_system, parse_generation
from fairseq_ccpr.inference.system import System, Translation
from fairseq_ccpr.models.checkpoint import refuse_other_sizes
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import TRAIN
from fairseq_ccpr.storage.files import (
    CHECKSUM,
    MANIFEST,
    PLAN,
    atomic_file,
    partial_path,
    read_checked_json,
    scratch_directory,
    write_checked_json,
    write_json,
)
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.timing import progress_bar

SHARED = "give a reverse model that shares the dictionaries, or one in a folder that fairseq-ccpr prepare or convert wrote"
BEAM = 2  # hypotheses of the reverse model: more give no better translations, and take longer
PART_SENTENCES = 4096  # lines translated together: the most that a kill loses
PARTS, PAIRS, DATA_BIN, LEFT_OUT = "parts", "pairs.tsv", "data-bin", "left-out.json"
EMPTY, TOO_LONG, NO_TEXT = "empty", "longer than the reverse model takes", "with nothing translated"


def load_reverse_model(path: Path, forward: Preprocessing, words: list[str], device: torch.device) -> System:
    """Load a model of the opposite direction.

    Its dictionaries and subwords are those that `preprocessing.json` names in its own folder, if that is of
    its direction; otherwise it must share those of `forward`, source and target exchanged.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}: --reverse-model is that of a fairseq model")
    back = forward.exchanged()
    languages = back.source_lang, back.target_lang
    words = ["--path", str(path), "-s", languages[0], "-t", languages[1], *words]
    beside = read_preprocessing(path.parent)
    if beside is not None and (beside.source_lang, beside.target_lang) == languages:
        return System(configure_system(words), device)
    task = task_words(path)
    if not task:  # a multilingual task adds symbols to those of the files
        _check_shared(path, back)
    return System(parse_generation([str(back.folder), *task, *back.words, *words]), device)


def _check_shared(path: Path, back: Preprocessing) -> None:
    files = [back.folder / f"dict.{language}.txt" for language in (back.source_lang, back.target_lang)]
    dictionaries = [Dictionary.load(str(file)).symbols for file in files]
    refuse_other_sizes(path, files, SHARED)
    for file, symbols in zip(files, dictionaries):
        beside = path.parent / file.name
        if not beside.is_file():
            continue
        for number, (one, other) in enumerate(zip_longest(Dictionary.load(str(beside)).symbols, symbols)):
            if one != other:
                first, second = ("missing" if symbol is None else f"'{symbol}'" for symbol in (one, other))
                raise CheckpointError(
                    f"{beside}, next to --reverse-model, and {file} differ: symbol {number:,} is {first} in the first, and "
                    f"{second} in the second; {SHARED}"
                )


def back_translate(settings: TokenBuildSettings, forward: Preprocessing, processes: Processes) -> PseudoPairs:
    """Make pairs from the text `settings.monolingual`, or resume doing so; finished parts are reused.

    1. Plan: load both models, read the text once, see that the output is free, or ours.
    2. Translate it part by part, lines of similar length together; the processes share the parts.
    3. Join the parts to a table of pairs, and make a DATA_BIN of it with the subwords of `forward`.

    All of it stays in the folder `back-translations` of the output.
    """
    if not forward.options:
        raise ConfigurationError(
            f"{settings.data_bin} does not say how its text was cut into subwords, as monolingual text must be: make it with "
            "fairseq-ccpr prepare"
        )
    work = BackTranslation(settings, forward, processes)
    if not work.finished:
        work.check_output()
        load(settings, work.system.device)  # report anything missing now, not after hours
        if settings.adapter == TRAINED_ADAPTER:
            AdapterTraining.parse(settings.adapter_options)
    processes.barrier()  # all have seen the same
    if not work.finished:
        if processes.first:
            work.begin()
        processes.barrier()
        work.translate()
        processes.barrier()
    if processes.first:
        work.finish()
    processes.barrier()
    return work.pairs()


def tell_left_out(counts: Mapping[str, int]) -> str:
    """Tell how many lines gave no pair, and why.

    >>> tell_left_out({"empty": 1200, "with nothing translated": 3})
    '1,203 lines were left out: 1,200 empty, 3 with nothing translated'
    """
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()):,} lines were left out: {reasons}" if counts else ""


def refuse_begun(output: Path) -> None:
    """Refuse to build something else in the folder of a datastore of monolingual text."""
    folder = output / BACK_TRANSLATIONS
    if folder.exists() or partial_path(folder).exists():
        raise DatastoreError(
            f"{output} is built from monolingual text: give the same --monolingual and --reverse-model, or another --output"
        )


class BackTranslation:
    """The folder of back-translations: NAME.partial while parts are made, then NAME; its plan says of what."""

    def __init__(self, settings: TokenBuildSettings, forward: Preprocessing, processes: Processes) -> None:
        self.settings, self.forward, self.processes = settings, forward, processes
        assert settings.reverse_model is not None  # `settings.check` has seen to it
        words = ["--beam", str(BEAM), "--max-tokens", str(settings.max_tokens)]
        words += ["--fp16"] if settings.fp16 else ["--precision", "fp32"]  # the same on every processor
        words += ["--user-dir", settings.user_dir] if settings.user_dir else []
        self.system = load_reverse_model(
            settings.reverse_model, forward, words, processes.device(settings.cpu)
        )
        self.final = settings.output / BACK_TRANSLATIONS
        self.partial = partial_path(self.final)
        self.fingerprint = fingerprint.of_parameters(self.system.models[0].named_parameters())
        self.identity = {"beam": BEAM, "fingerprints": self._fingerprints()}
        self.finished = self.final.exists()
        self.begun = self.finished or (self.partial / PLAN).exists()
        if self.begun:
            folder = self.final if self.finished else self.partial
            plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            refuse_differences(folder, plan, self.identity if self.finished else self._plan())
        if not self.finished:
            self.sentences = sum(1 for _ in self._text())  # an unreadable line is reported now

    def _fingerprints(self) -> dict[str, str]:
        both = [self.forward, self.system.preprocessing]
        languages = self.forward.source_lang, self.forward.target_lang
        dictionaries = [one.folder / f"dict.{language}.txt" for one in both for language in languages]
        return {
            "text": fingerprint.of_files(self.settings.monolingual),
            REVERSE_MODEL: self.fingerprint,
            "dictionaries": fingerprint.of_files(dictionaries),
            "subwords": fingerprint.of_strings(
                digest for one in both for digest in sorted(one.subword_digests())
            ),
        }

    def _plan(self) -> dict[str, Any]:
        """Return the settings that must not change until all is translated: batches depend on them."""
        s = self.settings
        return self.identity | {"part_sentences": PART_SENTENCES, "max_tokens": s.max_tokens, "fp16": s.fp16}

    def _text(self) -> Iterator[str]:
        return chain.from_iterable(map(read_lines, self.settings.monolingual))

    def check_output(self) -> None:
        output = self.settings.output
        refuse_foreign(output)
        published = Manifest.read(output).token if (output / MANIFEST).exists() else None
        others = [output / name for name in (TOKEN, f"{TOKEN}.partial", RAW)]
        if not self.begun and (published or any(path.exists() for path in others)):
            raise DatastoreError(
                f"{output} holds tokens that were not built with --monolingual: give another --output, or delete it"
            )

    def begin(self) -> None:
        (self.partial / PARTS).mkdir(parents=True, exist_ok=True)
        if not self.begun:
            write_json(self.partial / PLAN, self._plan())

    def translate(self) -> None:
        text, mine = self._text(), range(self.processes.rank, self._count(), self.processes.world)
        sizes = {number: min(PART_SENTENCES, self.sentences - number * PART_SENTENCES) for number in mine}
        done = sum(size for number, size in sizes.items() if self._part(number).exists())
        hidden = self.settings.quiet or not self.processes.first
        with progress_bar(
            "back-translations", "sentence", total=sum(sizes.values()), done=done, quiet=hidden
        ) as bar:
            for number in range(self._count()):
                lines = [line.replace("\t", " ") for line in islice(text, PART_SENTENCES)]
                if number in mine and not self._part(number).exists():
                    write_checked_json(self._part(number), self._translated(lines, bar.update))

    def _translated(self, lines: list[str], done: Callable[[int], object]) -> dict[str, Any]:
        fitting = [line for line in lines if self.system.fits(line)]  # others would be translated in parts
        pairs, left_out = [], Counter({TOO_LONG: len(lines) - len(fitting)})
        done(left_out[TOO_LONG])
        for translation in self.system.translate(fitting, done, window=len(lines)):
            if fault := _fault(translation):
                left_out[fault] += 1
            else:
                pairs.append([translation.text.replace("\t", " "), translation.source])
        return {"pairs": pairs, "left_out": dict(+left_out)}

    def _count(self) -> int:
        return -(-self.sentences // PART_SENTENCES)

    def _part(self, number: int) -> Path:
        return self.partial / PARTS / f"{number:06}.json"

    def finish(self) -> None:
        """Join the parts, give the folder its name, and remove what is no longer needed."""
        if not self.finished:
            self._write_pairs()
            if not (self.partial / DATA_BIN).exists():
                forward = self.forward
                languages = forward.source_lang, forward.target_lang
                dictionaries = [forward.folder / f"dict.{language}.txt" for language in languages]
                with scratch_directory(self.partial / DATA_BIN) as folder:
                    binarise({TRAIN: self.partial / PAIRS}, languages, forward.words, dictionaries, folder)
                    replace(forward, folder=folder, model="").save(folder)
                    folder.rename(self.partial / DATA_BIN)
            self.partial.rename(self.final)
        rmtree(self.final / PARTS, ignore_errors=True)

    def _write_pairs(self) -> None:
        left_out, count = Counter[str](), 0
        with (
            atomic_file(self.partial / PAIRS) as path,
            path.open("w", encoding="utf-8", newline="\n") as table,
        ):
            for number in range(self._count()):
                part = _read_part(self._part(number))
                table.writelines(f"{source}\t{target}\n" for source, target in part["pairs"])
                left_out.update(part["left_out"])
                count += len(part["pairs"])
        if not count:
            rmtree(self.partial)
            with suppress(OSError):  # not empty
                self.settings.output.rmdir()
            raise ConfigurationError(
                f"--monolingual: {', '.join(map(str, self.settings.monolingual))} gives no sentence pair "
                f"({tell_left_out(left_out) or 'there are no lines'}): give text of one sentence per line"
            )
        write_checked_json(self.partial / LEFT_OUT, dict(left_out))

    def pairs(self) -> PseudoPairs:
        return PseudoPairs(self.final / DATA_BIN, self.fingerprint, _read_part(self.final / LEFT_OUT))


def _fault(translation: Translation) -> str:
    if not translation.source.strip():
        return EMPTY
    if translation.fault:
        return TOO_LONG
    return "" if translation.text.strip() else NO_TEXT


def _read_part(path: Path) -> dict[str, Any]:
    try:
        return {name: value for name, value in read_checked_json(path).items() if name != CHECKSUM}
    except ValueError as error:
        raise DatastoreError(
            f"{path} is damaged ({error}): delete {path.parent}, and run the command again"
        ) from None
