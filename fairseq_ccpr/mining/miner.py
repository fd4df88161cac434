"""Mining of pairs in text of any size: index the targets on disk, then match the sources block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.encoded_text import DTYPE, EncodedText, encode_distinct
from fairseq_ccpr.mining.f1 import decide
from fairseq_ccpr.mining.fragments import FragmentedText, fragment_text, fragments
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.method import MiningMethod
from fairseq_ccpr.mining.neighbours import SearchableText, SentenceKeys, index_keys
from fairseq_ccpr.mining.trial import Trial, Unlabelled
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import GrowingArray, check_space
from fairseq_ccpr.text.pairs import read_lines

BLOCK_CHARACTERS = 1 << 16  # about, of the sentences that are encoded at a time; no text has more fragments than that


class MinedPair(NamedTuple):
    """A source sentence, its likely translation, and how likely it is."""

    source: str
    target: str
    score: float


def read_sentences(path: Path) -> list[str]:
    """Read the lines of a text, stripped, tabs as spaces, so that they fit into a TSV.

    Raises:
        ConfigurationError: there is no such file, it is not UTF-8, or no line has a word.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    lines = [line.replace("\t", " ").strip() for line in read_lines(path)]
    if not any(fragments(line, 1) for line in lines):
        raise ConfigurationError(f"{path} has no sentence with a word in it: give text, a sentence a line")
    return lines


class Miner:
    """Finds for source sentences their translations among target sentences.

    Args:
        sources: their sentences.
        targets: T sentences; equal ones count as one, the first.
        encoder: of sentences and fragments.
        method: how pairs are found; `tune` changes its settings.
        work: a folder for keys and indexes, which may be deleted in the end.
        index: `auto`, `exact`, or a FAISS factory string; see `plan_index`.
        quiet: no progress bars.

    Attributes:
        keys: of the targets, fp16 [N, d], on disk.
        indexed: the targets by these keys.
        description: of their index.

    Raises:
        ConfigurationError: no such index.
        DatastoreError: the disk is too full.
    """

    def __init__(
        self, sources: list[str], targets: Iterable[str], encoder: SentenceEncoder, method: MiningMethod, work: Path,
        index: str = "auto", quiet: bool = False,
    ) -> None:  # fmt: skip
        self.encoder, self.method, self.work, self.choice, self.quiet = encoder, method, work, index, quiet
        self.sources, self.targets = sources, list(dict.fromkeys(targets))
        self.keys, self.indexed, self.description = self._index(self.targets, "target")

    def tune(self, labelled: LabelledText, grid: Grid) -> float:
        """Take the settings that do best on labelled sentences, tried among those to be mined; their F1."""
        known = {*self.targets}
        own = [target for target in labelled.targets if target not in known]
        numbers = {target: number for number, target in enumerate([*own, *self.targets])}
        number_of = np.array([*(numbers[target] for target in labelled.targets), -1])
        apart = LabelledText(labelled.sources, own, number_of[labelled.gold])
        trial = Trial.encode(apart, self.encoder, "tuning", self.quiet)
        among = Unlabelled(self.indexed, lambda: self._indexed_sources, {*self.sources} & {*labelled.sources})
        self.method, f1 = trial.tune(self.method, grid, among)
        return f1

    def mine(self) -> Iterator[MinedPair]:
        """Yield the pairs, in the order of the sources; a source without a likely partner has none."""
        match = self.method.matcher(self.indexed, lambda: self._indexed_sources)
        with tqdm(desc="mining", total=len(self.sources), unit="sentence", disable=self.quiet) as bar:
            for block in self._blocks(self.sources):
                answers = match(self._keys(block))
                for source, partner, score in zip(
                    block.sentences, decide(answers, self.method.threshold).tolist(), answers.scores.tolist()
                ):
                    if partner >= 0:
                        yield MinedPair(source, self.targets[partner], score)
                bar.update(len(block.sentences))

    @cached_property
    def _indexed_sources(self) -> SearchableText:
        return self._index(list(dict.fromkeys(self.sources)), "source")[1]

    def _index(self, sentences: list[str], name: str) -> tuple[np.ndarray, SearchableText, IndexDescription]:
        """Encode one side to disk, and index it."""
        folder = self.work / name
        folder.mkdir(parents=True)
        keys, owners = self._encode(sentences, name, folder)
        description = plan_index(self.choice, "ip", "", *keys.shape)
        indexed = index_keys(keys, description, folder, self.quiet)
        return keys, SearchableText(indexed, owners, len(sentences)), description

    def _encode(self, sentences: list[str], name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
        """Keys fp16 [N, d], memory-mapped, and the sentence of each, int64 [N]."""
        path = folder / "keys.npy"
        array, owners, done = None, [np.empty(0, np.int64)], 0
        with tqdm(desc=f"encoding {name}", total=len(sentences), unit="sentence", disable=self.quiet) as bar:
            for block in self._blocks(sentences):
                keys = self._keys(block)
                array = array or GrowingArray(path, keys.keys.shape[1:], np.dtype(DTYPE).str)
                check_space(folder, keys.keys.nbytes)
                array.append(keys.keys)
                owners.append(keys.owners + done)
                done += len(block.sentences)
                bar.update(len(block.sentences))
        assert array is not None, "sentences"
        array.close()
        return np.load(path, mmap_mode="r" if array.rows else None), np.concatenate(owners)

    def _keys(self, block: FragmentedText) -> SentenceKeys:
        sentences = encode_distinct(block.sentences, self.encoder)
        fragments = encode_distinct(block.fragments if self.method.window else [], self.encoder)
        return self.method.keys(EncodedText(block, sentences, fragments))

    def _blocks(self, sentences: list[str]) -> Iterator[FragmentedText]:
        """Split sentences into blocks of about BLOCK_CHARACTERS, with their fragments."""
        window = self.method.window or 1  # which sentences have a word is to be known in any case
        block: list[str] = []
        size = 0
        for sentence in sentences:
            block.append(sentence)
            size += len(sentence)
            if size >= BLOCK_CHARACTERS:
                yield fragment_text(block, window)
                block, size = [], 0
        if block:
            yield fragment_text(block, window)
