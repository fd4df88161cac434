"""Finding the phrases of a text chunk by chunk, by one process or several, and joining them; a kill loses at most a chunk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.building.distributed import Processes
from fairseq_ccpr.building.shards import chunks_of_shard
from fairseq_ccpr.building.text_sentences import TextCounts, TextSentences
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, SENTENCES, SPANS
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, save_array
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import write_lines

CHUNKS = "shards"  # folder in the unfinished part: keys, spans and counts of each chunk, the counts last


class PhraseChunks:
    """A text in chunks of sentences, of which one shard is wanted.

    Args:
        text: all sentences.
        length: of a chunk, in sentences.
        shard: its number, and of how many.
        folder: the unfinished part.
        processes: which share the chunks.

    Attributes:
        lines: what was left out of the text.
        encoded: sentences whose phrases this process has found, not an earlier one.
        seconds: that took.
    """

    def __init__(
        self, text: TextSentences, length: int, shard: tuple[int, int], folder: Path, processes: Processes
    ) -> None:
        self.text, self.length, self.shard, self.folder, self.processes = text, length, shard, folder, processes
        self.lines, self.encoded, self.seconds = TextCounts(), 0, 0.0

    def read(self) -> None:
        """Read the whole text.

        Raises:
            ConfigurationError: it cannot be read, or has fewer chunks than there are shards.
        """
        if self.processes.first:
            self.lines = self.text.read()
        self.processes.barrier()
        shard_id, num_shards = self.shard
        self.chunks = chunks_of_shard(-(-len(self.text) // self.length), num_shards, shard_id, "sentences")

    def sentences(self) -> Iterator[str]:
        """Iterate over the sentences of the shard."""
        return islice(self.text, self.chunks.start * self.length, self.chunks.stop * self.length)

    def find(self, finder: PhraseFinder, quiet: bool) -> None:
        """Find the phrases of this process's chunks that are not done yet."""
        sentences, start = self.sentences(), time.monotonic()
        total = min(len(self.text) - self.chunks.start * self.length, len(self.chunks) * self.length)
        mine = range(self.processes.rank, len(self.chunks), self.processes.world)
        sizes = {number: min(self.length, total - number * self.length) for number in mine}
        done = sum(size for number, size in sizes.items() if self._path(number).exists())
        hidden = quiet or not self.processes.first
        with progress_bar("sentences", "sentence", total=sum(sizes.values()), done=done, quiet=hidden) as bar:
            for number in range(len(self.chunks)):
                texts = list(islice(sentences, self.length))
                path = self._path(number)
                if number in mine and not path.exists():
                    found = without_repeats(finder.find(texts, done=bar.update), texts)
                    spans = found.spans + np.array([number * self.length, 0, 0], np.int32)
                    save_array(path.with_suffix(f".{KEYS}.npy"), found.vectors.half().cpu().numpy())
                    save_array(path.with_suffix(f".{SPANS}.npy"), spans)
                    write_json(path, {"sentences": len(texts), "too_long": found.too_long, "phrases": len(found.spans)})
                    self.encoded += len(texts)
        self.seconds = time.monotonic() - start

    def _path(self, number: int) -> Path:
        return self.folder / CHUNKS / f"{number:06}.json"

    def join(self, key_width: int, nothing: str) -> dict[str, int]:
        """Join the arrays of the chunks, and write the text alongside them.

        Args:
            key_width: numbers in a key.
            nothing: end of the message if no phrase was found.

        Returns:
            How many `phrases`, `sentences`, and sentences that are `too_long` there are.

        Raises:
            ConfigurationError: no phrase was found.
        """
        # Asked for by name: on shared storage, what another machine has written may come late to a listing.
        paths = [self._path(number) for number in range(len(self.chunks))]
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        totals = {name: sum(count[name] for count in counts) for name in ("phrases", "sentences", "too_long")}
        if not totals["phrases"]:
            raise ConfigurationError(f"no phrase is left of {totals['sentences']:,} sentences {nothing}")
        check_space(self.folder, totals["phrases"] * (2 * key_width + 12))
        for name, width, dtype in ((KEYS, key_width, "float16"), (SPANS, 3, "int32")):
            array = GrowingArray(self.folder / f"{name}.npy", (width,), dtype)
            for path in paths:
                array.append(np.load(path.with_suffix(f".{name}.npy"), allow_pickle=False))
            array.close()
        write_lines(self.folder / SENTENCES, self.folder / f"{OFFSETS}.npy", self.sentences())
        return totals


def without_repeats(found: FoundPhrases, texts: list[str]) -> FoundPhrases:
    """Keep the first of equal strings in each sentence."""
    seen: set[tuple[int, str]] = set()
    kept = []
    for row, (number, start, end) in enumerate(found.spans.tolist()):
        key = number, texts[number][start:end]
        if key not in seen:
            seen.add(key)
            kept.append(row)
    rows = torch.tensor(kept, dtype=torch.int64)
    return FoundPhrases(found.spans[kept], found.probabilities[rows], found.vectors[rows], found.too_long)
