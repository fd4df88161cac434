"""Mining of pairs in text of any size: index the targets on disk, then match the sources block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.encoded_text import (
    DTYPE,
    EncodedText,
    FragmentedText,
    encode_distinct,
    fragment_text,
    fragments,
)
from fairseq_ccpr.lab.mining.f1 import BLOCK_SOURCES, Estimate, Matcher, decide, estimate
from fairseq_ccpr.lab.mining.labelled import LabelledText, check_file, with_negatives
from fairseq_ccpr.lab.mining.methods import Method, prepare, tune
from fairseq_ccpr.lab.mining.neighbours import Centre, IndexedKeys, SearchableText, index_keys
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.base import Effort
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import GrowingArray, check_space
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.timing import progress_bar

SOURCE, TARGET = "source", "target"
# about, of the sentences that are encoded at a time; no text has more fragments than that
BLOCK_CHARACTERS = 1 << 16


class MinedPair(NamedTuple):
    """A source sentence, its likely translation, and how likely it is."""

    source: str
    target: str
    score: float


def read_sentences(path: Path) -> list[str]:
    """Read the lines of a text, stripped, tabs as spaces, so that they fit into a TSV."""
    check_file(path)
    lines = [line.replace("\t", " ").strip() for line in read_lines(path)]
    if not any(fragments(line, 1) for line in lines):
        raise ConfigurationError(f"{path} has no sentence with a word in it: give text, a sentence per line")
    return lines


class Tuning(NamedTuple):
    """How settings were chosen."""

    f1: float
    negatives: int  # labelled sources that had something to find, and should not


class Miner:
    """Finds for source sentences their translations among target sentences.

    Attributes:
        keys: how many the targets have.
        description: of their index.
    """

    def __init__(
        self,
        sources: list[str],
        targets: Iterable[str],
        encoder: SentenceEncoder,
        method: Method,
        work: Path,
        index: str = "auto",
        quiet: bool = False,
    ) -> None:
        self.encoder, self.method, self.work, self.choice, self.quiet = encoder, method, work, index, quiet
        self.sources, self.targets = sources, list(dict.fromkeys(targets))
        self._numbers = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        self._matched: Matcher | None = None
        self._centres: dict[str, tuple[Centre, Centre]] = {}  # of the keys and the fragments of each side
        self._source_side, _ = self._searchable(list(self._numbers), SOURCE)
        self._target_side, self.description = self._searchable(self.targets, TARGET)
        self.keys = len(self._target_side.keys)

    def tune(self, labelled: LabelledText, grid: Grid) -> Tuning:
        """Take the settings that do best on labelled sentences, tried among those to be mined."""
        target_numbers = {target: number for number, target in enumerate(self.targets)}
        sources, rows = self._among(labelled.sources, self._numbers, self._source_side, SOURCE)
        targets, columns = self._among(labelled.targets, target_numbers, self._target_side, TARGET)
        labels = with_negatives(rows, np.append(columns, -1)[labelled.gold])
        self.method, f1 = tune(self.method, sources, targets, labels, grid)
        others = len(np.unique(targets.owners)) > 1
        return Tuning(f1, int((labels.gold < 0).sum()) if others else 0)

    def estimate(self) -> Estimate:
        """Take the threshold that the scores suggest, without any label."""
        self._matched = prepare(self.method, self._source_side, self._target_side)
        estimated = estimate(self._matched, len(self._numbers))
        self.method = self.method.having(threshold=estimated.threshold)
        return estimated

    def mine(self) -> Iterator[MinedPair]:
        """Yield the pairs, in the order of the sources; a source without a likely partner has none."""
        match = self._matched or prepare(self.method, self._source_side, self._target_side)
        with progress_bar("mining", "sentence", total=len(self.sources), quiet=self.quiet) as bar:
            for start in range(0, len(self.sources), BLOCK_SOURCES):
                block = self.sources[start : start + BLOCK_SOURCES]
                rows = np.array([self._numbers[source] for source in block], np.int64)
                answers = match(rows, np.full(len(rows), -1))
                decided = decide(answers, self.method.threshold)
                for source, partner, score in zip(block, decided.tolist(), answers.scores.tolist()):
                    if partner >= 0:
                        yield MinedPair(source, self.targets[partner], score)
                bar.update(len(block))

    def _among(
        self, labelled: list[str], numbers: dict[str, int], side: SearchableText, name: str
    ) -> tuple[SearchableText, np.ndarray]:
        new = dict.fromkeys(sentence for sentence in labelled if sentence not in numbers)
        numbers = numbers | {sentence: len(numbers) + at for at, sentence in enumerate(new)}
        rows = np.array([numbers[sentence] for sentence in labelled], np.int64)
        return side.join(self._searchable(list(new), name)[0]) if new else side, rows

    def _searchable(self, sentences: list[str], side: str) -> tuple[SearchableText, IndexDescription]:
        # Those that come later to a side are centred by what was there at first.
        later = side in self._centres
        name = f"labelled {side}" if later else side
        folder = self.work / name
        folder.mkdir(parents=True)
        centres = self._centres.setdefault(side, (Centre(), Centre()))
        keys, fragments = folder / "keys.npy", folder / "fragments.npy"
        arrays: list[GrowingArray] = []
        owners, lengths, fragment_owners, done = [], [], [], 0
        with progress_bar(f"encoding {name}", "sentence", total=len(sentences), quiet=self.quiet) as bar:
            for block in self._blocks(sentences):
                whole = encode_distinct(block.sentences, self.encoder)
                parts = encode_distinct(block.fragments, self.encoder) if self.method.window else whole[:0]
                made = self.method.keys(EncodedText(block, whole, parts))
                values = made.keys, made.fragments
                if not arrays:
                    arrays = [
                        GrowingArray(path, rows.shape[1:], np.dtype(DTYPE).str)
                        for path, rows in zip((keys, fragments), values)
                    ]
                check_space(folder, sum(rows.nbytes for rows in values))
                for array, rows, centre in zip(arrays, values, centres):
                    array.append(rows)
                    if not later:
                        centre.add(rows)
                owners.append(made.owners + done)
                lengths.append(made.lengths)
                fragment_owners.append(made.fragment_owners + done)
                done += len(block.sentences)
                bar.update(len(block.sentences))
        for array, path, centre in zip(arrays, (keys, fragments), centres):
            array.close()
            if self.method.centred and array.rows:
                centre.subtract_(np.load(path, mmap_mode="r+"))
        mapped, read = (
            np.load(path, mmap_mode="r" if array.rows else None)
            for path, array in zip((keys, fragments), arrays)
        )
        # Each sentence is searched for once, and what is not found is not mined: more effort than a step of
        # decoding.
        description = plan_index(self.choice, "ip", "", len(mapped), mapped.shape[1], effort=Effort())
        indexed = index_keys(mapped, description, folder, self.quiet)
        text = SearchableText(
            indexed,
            np.concatenate(owners),
            np.concatenate(lengths),
            IndexedKeys(read),
            np.concatenate(fragment_owners),
        )
        return text, description

    def _blocks(self, sentences: list[str]) -> Iterator[FragmentedText]:
        window = self.method.window or 1  # which sentences have a word is to be known in any case
        first = size = 0
        for number, sentence in enumerate(sentences, 1):
            size += len(sentence)
            if size >= BLOCK_CHARACTERS or number == len(sentences):
                yield fragment_text(sentences[first:number], window, self.method.stride)
                first, size = number, 0
