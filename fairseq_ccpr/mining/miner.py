"""Mining pairs out of text of any size: what a target side is made into, and how sources are asked, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.encoded_text import DTYPE, encode_distinct, fragment_keys
from fairseq_ccpr.mining.f1 import decide
from fairseq_ccpr.mining.fragments import FragmentedText, fragment_text, fragments
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.margin import margin_answers, mean_of_found
from fairseq_ccpr.mining.neighbours import Neighbours, Side, open_neighbours
from fairseq_ccpr.mining.pknn import Answers, rfr_answers
from fairseq_ccpr.mining.settings import MarginSettings, RfrSettings, Settings
from fairseq_ccpr.mining.trial import Trial, Unlabelled
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import GrowingArray, check_space
from fairseq_ccpr.text.pairs import read_lines

BLOCK_CHARACTERS = 1 << 16  # about, of the sentences that are encoded at a time; no text has more fragments than that


class Pair(NamedTuple):
    """What was mined."""

    source: str
    target: str
    score: float


def read_sentences(path: Path) -> list[str]:
    """The lines of a text, stripped, tabs as spaces, so that they fit into a TSV.

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
        settings: of RFR or of the margin baseline; `tune` changes them.
        work: a folder for keys and indexes, which may be deleted in the end.
        index: `auto`, `exact`, or a FAISS factory string; see `plan_index`.
        quiet: no progress bars.

    Attributes:
        keys: of the targets, fp16 [N, d], on disk: one a fragment, or one a sentence for the margin baseline.
        side: the targets by these keys.
        description: of their index.

    Raises:
        ConfigurationError: no such index.
        DatastoreError: the disk is too full.
    """

    def __init__(
        self, sources: list[str], targets: Iterable[str], encoder: SentenceEncoder, settings: Settings, work: Path,
        index: str = "auto", quiet: bool = False,
    ) -> None:  # fmt: skip
        self.encoder, self.settings, self.work, self.choice, self.quiet = encoder, settings, work, index, quiet
        self.sources, self.targets = sources, list(dict.fromkeys(targets))
        self.keys, self.side, self.description = self._index(self.targets, "target")

    def tune(self, labelled: LabelledText, grid: Grid) -> float:
        """Take the settings that do best on labelled sentences, tried among those to be mined; their F1."""
        known = {*self.targets}
        own = [target for target in labelled.targets if target not in known]
        numbers = {target: number for number, target in enumerate([*own, *self.targets])}
        number_of = np.array([*(numbers[target] for target in labelled.targets), -1])
        apart = LabelledText(labelled.sources, own, number_of[labelled.gold])
        trial = Trial.encode(apart, self.encoder, "tuning", self.quiet)
        margin = isinstance(self.settings, MarginSettings)
        among = Unlabelled(self.side, self._source_side if margin else None, {*self.sources} & {*labelled.sources})
        self.settings, f1 = trial.tune(self.settings, grid, among)
        return f1

    def mine(self) -> Iterator[Pair]:
        """The pairs, in the order of the sources; a source without a likely partner has none."""
        back_means = np.empty(0)  # m_y of each target key
        if isinstance(self.settings, MarginSettings):
            back_means = mean_of_found(self._source_side.keys.search(self.keys, self.settings.k)[0])
        with tqdm(desc="mining", total=len(self.sources), unit="sentence", disable=self.quiet) as bar:
            for block in self._blocks(self.sources):
                answers = self._answers(block, back_means)
                for source, partner, score in zip(
                    block.sentences, decide(answers, self.settings.threshold).tolist(), answers.scores.tolist()
                ):
                    if partner >= 0:
                        yield Pair(source, self.targets[partner], score)
                bar.update(len(block.sentences))

    def _answers(self, block: FragmentedText, back_means: np.ndarray) -> Answers:
        keys, owners = self._keys(block)
        cosines, ids = self.side.keys.search(keys, self.settings.k)
        if isinstance(self.settings, RfrSettings):
            return rfr_answers(cosines, ids, self.side.owners, owners, len(block.sentences), self.settings)
        return margin_answers(cosines, ids, back_means, self.side.owners).spread(owners, len(block.sentences))

    @cached_property
    def _source_side(self) -> Side:
        return self._index(list(dict.fromkeys(self.sources)), "source")[1]

    def _index(self, sentences: list[str], name: str) -> tuple[np.ndarray, Side, IndexDescription]:
        """Encode one side to disk, and index it."""
        folder = self.work / name
        folder.mkdir(parents=True)
        keys, owners = self._encode(sentences, name, folder)
        description = plan_index(self.choice, "ip", "", *keys.shape)
        neighbours: Neighbours = open_neighbours(keys, description, folder, self.quiet)
        return keys, Side(neighbours, owners, len(sentences)), description

    def _encode(self, sentences: list[str], name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
        """Keys fp16 [N, d], memory-mapped, and the sentence of each, int64 [N]."""
        path = folder / "keys.npy"
        array, owners, done = None, [np.empty(0, np.int64)], 0
        with tqdm(desc=f"encoding {name}", total=len(sentences), unit="sentence", disable=self.quiet) as bar:
            for block in self._blocks(sentences):
                keys, of_block = self._keys(block)
                array = array or GrowingArray(path, keys.shape[1:], np.dtype(DTYPE).str)
                check_space(folder, keys.nbytes)
                array.append(keys)
                owners.append(of_block + done)
                done += len(block.sentences)
                bar.update(len(block.sentences))
        assert array is not None, "sentences"
        array.close()
        return np.load(path, mmap_mode="r" if array.rows else None), np.concatenate(owners)

    def _keys(self, block: FragmentedText) -> tuple[np.ndarray, np.ndarray]:
        """The keys of some sentences, fp16 [n, d], and their sentences, int64 [n]."""
        sentences = encode_distinct(block.sentences, self.encoder)
        if isinstance(self.settings, MarginSettings):
            with_words = np.unique(block.owners)
            return sentences[with_words], with_words
        vectors = encode_distinct(block.fragments, self.encoder)
        keys = fragment_keys(vectors, sentences[block.owners]) if self.settings.sentence_half else vectors
        return keys, block.owners

    def _blocks(self, sentences: list[str]) -> Iterator[FragmentedText]:
        """Sentences with their fragments, as many at a time as have about BLOCK_CHARACTERS."""
        window = self.settings.window if isinstance(self.settings, RfrSettings) else 1
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
