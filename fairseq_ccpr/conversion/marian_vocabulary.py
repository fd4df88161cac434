"""The vocabularies of a Marian model as Hugging Face stores it, and the same as dictionaries of fairseq."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.pretrained.hub_folder import TOKENIZER_CONFIG, read_json

SOURCE_VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
PAD, EOS, UNKNOWN = SPECIALS = ("<pad>", "</s>", "<unk>")  # in the order of fairseq's <s> <pad> </s> <unk>
_TAG = re.compile(r">>[\w-]+<<")


@dataclass(frozen=True)
class Vocabulary:
    """One side's symbols by their row in the weights.

    Attributes:
        path: of its file.
        symbols: all of them, by id.
    """

    path: Path
    symbols: list[str]

    @property
    def tags(self) -> list[str]:
        """The symbols that name a target language in front of a source sentence, such as >>deu<<."""
        return [symbol for symbol in self.symbols if _TAG.fullmatch(symbol)]

    @property
    def rows(self) -> list[int]:
        """For each entry of fairseq's dictionary after <s>, its row in the weights."""
        special = [self.symbols.index(symbol) for symbol in SPECIALS]
        return special + [row for row in range(len(self.symbols)) if row not in special]

    def dictionary(self) -> Dictionary:
        """Make fairseq's dictionary: <s>, which Marian lacks, and then `rows`."""
        made = Dictionary()
        names = set(self.symbols)
        for row in self.rows[len(SPECIALS) :]:
            symbol = self.symbols[row]
            # A line of dict.txt cannot hold white space, and some vocabularies have a word that reads <s>. No text is split
            # into these, so another name does; the row stays, and with it the probabilities.
            plain = symbol == "".join(symbol.split()) and symbol != made.bos_word and symbol
            made.add_symbol(symbol if plain else _free_name(row, names))
        return made

    def check_rows(self, rows: int, name: str) -> None:
        """Check that a tensor has a row for each symbol, and no others.

        Raises:
            CheckpointError: it does not.
        """
        if rows != len(self.symbols):
            raise CheckpointError(
                f"{self.path} has {len(self.symbols):,} entries, and {name} has {rows:,}: they are not of one model; copy "
                "the model's whole folder again"
            )


def read_vocabularies(folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Read the vocabularies of source and target, which are the same unless the tokenizer says otherwise.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    separate = False
    if (folder / TOKENIZER_CONFIG).is_file():
        separate = bool(read_json(folder / TOKENIZER_CONFIG).get("separate_vocabs", False))
    source = _read(folder / SOURCE_VOCABULARY)
    return source, _read(folder / TARGET_VOCABULARY) if separate else source


def _read(path: Path) -> Vocabulary:
    ids: Mapping[str, object] = read_json(path)
    symbols = {number: symbol for symbol, number in ids.items() if isinstance(number, int)}
    if len(symbols) != len(ids) or sorted(symbols) != list(range(len(ids))):
        raise CheckpointError(f"{path} does not number its {len(ids):,} entries from 0 on, each once: copy it again")
    if missing := [symbol for symbol in SPECIALS if symbol not in ids]:
        raise CheckpointError(f"{path} has no {missing[0]}: give the vocabulary of a Marian model")
    return Vocabulary(path, [symbols[number] for number in range(len(symbols))])


def _free_name(row: int, taken: set[str]) -> str:
    name = f"<marian:{row}>"
    while name in taken:
        name += ">"
    return name
