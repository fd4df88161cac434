"""`preprocessing.json`: how text becomes a model's tokens, kept with what was prepared or built.

`fairseq-ccpr prepare` leaves it in DATA_BIN, `fairseq-ccpr build tokens` in the datastore, together with the
dictionaries and the subword model, so that none of it has to be specified again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from filecmp import cmpfiles
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.settings import as_words
from fairseq_ccpr.storage.files import (
    check_checksums,
    check_sizes,
    describe_files,
    read_checked_json,
    scratch_directory,
    write_checked_json,
)
from fairseq_ccpr.storage.fingerprint import of_file, of_strings
from fairseq_ccpr.text.schemes import FILE_OPTIONS, SUBWORD_SCHEMES, Scheme

PREPROCESSING = "preprocessing"  # folder in a datastore
PREPROCESSING_FILE = "preprocessing.json"
PREPROCESSING_VERSION = 1


@dataclass(frozen=True)
class Preprocessing:
    """Languages, dictionaries and subwords of a translation model."""

    folder: Path  # has dict.LANGUAGE.txt of both languages
    source_lang: str
    target_lang: str
    # fairseq's of tokenizer and BPE by name, such as bpe; empty where they are not known
    options: Mapping[str, Any]
    model: str = ""  # the checkpoint, where it is known

    @property
    def words(self) -> list[str]:
        return as_words(self.options)

    def exchanged(self) -> Preprocessing:
        """Return the same of a model of the opposite direction."""
        options = SUBWORD_SCHEMES.get(self.options.get("bpe", ""), Scheme).exchanged(self.options)
        return replace(
            self, source_lang=self.target_lang, target_lang=self.source_lang, options=options, model=""
        )

    def subword_digests(self) -> frozenset[str]:
        """Digest the files of tokenizer and BPE: equal models have equal digests, wherever they lie."""
        return frozenset(map(of_file, self._files()))

    def save(self, folder: Path) -> None:
        """Write the description to a folder, with copies of the files that are not in it."""
        dictionaries = [
            self.folder / f"dict.{language}.txt" for language in (self.source_lang, self.target_lang)
        ]
        files = list(dict.fromkeys([*dictionaries, *self._files()]))
        for path in files:
            if (other := next(one for one in files if one.name == path.name)) != path:
                raise DatastoreError(
                    f"{other} and {path} cannot both be kept in {folder}: give one of them another name"
                )
            if path.parent.resolve() != folder.resolve():
                shutil.copyfile(path, folder / path.name)
        described = {
            "format_version": PREPROCESSING_VERSION,
            "source_lang": self.source_lang,
            "target_lang": self.target_lang,
            "options": {
                name: Path(v).name if name in FILE_OPTIONS else v for name, v in self.options.items()
            },
            "model": self.model,
            "files": describe_files(folder, [path.name for path in files]),
        }
        write_checked_json(folder / PREPROCESSING_FILE, described)

    def _files(self) -> list[Path]:
        return [Path(value) for name, value in self.options.items() if name in FILE_OPTIONS]


def read_preprocessing(folder: Path) -> Preprocessing | None:
    """Read what `save` wrote to a folder; None where there is nothing."""
    path = folder / PREPROCESSING_FILE
    if not path.is_file():
        return None
    try:
        data = read_checked_json(path, PREPROCESSING_VERSION)
        files, options = data["files"], data["options"]
        found = Preprocessing(folder, data["source_lang"], data["target_lang"], options, data["model"])
    except (ValueError, KeyError) as error:
        raise DatastoreError(f"{path} is damaged ({error}): delete it, or make its folder again") from None
    check_sizes(folder, files)
    if faults := check_checksums(folder, files):
        raise DatastoreError(f"{folder}: {faults[0]}; copy it again, or make it again")
    return replace(
        found, options={n: str(folder / v) if n in FILE_OPTIONS else v for n, v in options.items()}
    )


def remember(preprocessing: Preprocessing, datastore: Path) -> None:
    """Store a preprocessing in a datastore, replacing a different one; an equal one stays."""
    folder = datastore / PREPROCESSING
    with scratch_directory(folder) as partial:
        preprocessing.save(partial)
        names = [path.name for path in partial.iterdir()]
        if folder.is_dir() and cmpfiles(partial, folder, names, shallow=False)[0] == names:
            return
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def remembered(datastore: Path) -> Preprocessing | None:
    """Return the preprocessing that a datastore keeps, None where there is none."""
    return read_preprocessing(datastore / PREPROCESSING)


def digest_options(options: Any) -> str | None:
    """Digest the options of a tokenizer or BPE; files count by their bytes. None where they say too little.

    >>> one, two = (OmegaConf.create({"_name": "moses", "source_lang": lang}) for lang in ("de", "en"))
    >>> digest_options(one) == digest_options(one.copy()) != digest_options(two)
    True
    """
    if options is None:
        return of_strings(["none"])
    if not isinstance(options, DictConfig):
        return None
    values = OmegaConf.to_container(options)
    assert isinstance(values, dict)
    named = {}
    for name, value in values.items():
        is_file = isinstance(value, str) and value and Path(value).is_file()
        named[str(name)] = of_file(Path(value)) if is_file else repr(value)
    return of_strings(part for pair in sorted(named.items()) for part in pair)
