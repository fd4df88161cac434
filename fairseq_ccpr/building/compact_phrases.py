"""Compacting the phrase part: learnt sentences become its own, and forgotten ones leave it.

As in a build from all of the text, a sentence is there once, however many texts or pairs have it.
Letters: S sentences, n texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.building.compatible import Opened, describe_corpora
from fairseq_ccpr.building.string_hashes import write_string_hashes
from fairseq_ccpr.datastore.learned import LEARNED, OWN_SENTENCE, LearnedStore
from fairseq_ccpr.datastore.manifest import PhraseSection, Source
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, SENTENCES, SOURCES, SPANS, TOTALS, PhraseDatastore
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import write_lines

BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class CompactedSentences:
    """The sentences of a phrase part when what was learnt has moved into it.

    Attributes:
        of_text: bool [S], which of the sentences before are in the text that the datastore was built from.
        numbers: int64 [S], the new number of each sentence before; -1 for those that leave.
        added: new sentences, after all others: by target, the id of the pair whose phrases they bring.
        places: of the target of each pair that has phrases, by the pair's id; `OWN_SENTENCE` where it is `of_text`.
        learnt: bool [S'], which sentences are targets of such pairs.
    """

    of_text: np.ndarray
    numbers: np.ndarray
    added: dict[str, int]
    places: dict[int, int]
    learnt: np.ndarray

    @classmethod
    def of(cls, datastore: PhraseDatastore, store: LearnedStore) -> CompactedSentences:
        """Determine the sentences."""
        size, sources = datastore.section.sentences, datastore.open_sources()
        of_text = np.array(sources[:, :-1].any(axis=1) if datastore.section.ancestors else sources.any(axis=1))
        targets = {
            pair.id: pair.target
            for pair in store.pairs.values()
            if pair.sentence is not None or pair.id in store.phrases
        }
        wanted = set(targets.values())
        before = {text: n for n in range(size) if (text := datastore.sentence(n)) in wanted}
        stay = of_text.copy()
        stay[list(before.values())] = True
        numbers = np.where(stay, np.cumsum(stay) - 1, -1)
        added: dict[str, int] = {}
        for number, target in targets.items():
            if target not in before:
                added.setdefault(target, number)
        now = {text: int(numbers[n]) for text, n in before.items()}
        now |= {text: int(stay.sum()) + place for place, text in enumerate(added)}
        learnt = np.zeros(int(stay.sum()) + len(added), bool)
        learnt[[now[target] for target in targets.values()]] = True
        own = {text for text, n in before.items() if of_text[n]}
        places = {number: OWN_SENTENCE if text in own else now[text] for number, text in targets.items()}
        return cls(of_text, numbers, added, places, learnt)


def needs_compacting(store: LearnedStore) -> bool:
    """Check whether the phrase part still lacks learnt phrases, or still has forgotten ones."""
    return bool(store.phrases or store.gone_sentences)


def write_phrases(
    datastore: PhraseDatastore, store: LearnedStore, part: Path, progress: Callable[[int], object]
) -> tuple[PhraseSection, dict[int, int]]:
    """Write the phrase part with what was learnt in it, without its index.

    Args:
        part: folder to write to.
        progress: told how many entries were read.

    Returns:
        Its section of the manifest, without index and files, and the new `LearnedPair.sentence` of each pair with phrases.
    """
    sentences = CompactedSentences.of(datastore, store)
    write_lines(part / SENTENCES, part / f"{OFFSETS}.npy", _texts(datastore, sentences))
    size, of_learnt = _write_entries(datastore, store, sentences, part, progress)
    _write_sources(datastore, sentences, part)
    write_string_hashes(part, len(sentences.learnt))
    section = _describe(datastore, sentences, size, of_learnt)
    totals = {"phrases": size, "sentences": section.sentences, "too_long": _too_long(datastore)}
    write_json(part / TOTALS, totals)
    return section, sentences.places


def _texts(datastore: PhraseDatastore, sentences: CompactedSentences) -> Iterator[str]:
    for number in np.flatnonzero(sentences.numbers >= 0).tolist():
        yield datastore.sentence(number)
    yield from sentences.added


def _write_entries(
    datastore: PhraseDatastore,
    store: LearnedStore,
    sentences: CompactedSentences,
    part: Path,
    progress: Callable[[int], object],
) -> tuple[int, int]:
    """Write keys and spans: those of sentences that stay, then those of new ones; count all, and those that are learnt."""
    assert datastore.keys is not None  # they are in the folder
    keys = GrowingArray(part / f"{KEYS}.npy", (datastore.section.dimension,), "float16")
    spans, of_learnt = GrowingArray(part / f"{SPANS}.npy", (3,), "int32"), 0
    for start in range(0, datastore.section.size, BLOCK_ROWS):
        block = np.array(datastore.spans[start : start + BLOCK_ROWS])
        block[:, 0] = sentences.numbers[block[:, 0]]
        stay = block[:, 0] >= 0
        keys.append(datastore.keys[start : start + BLOCK_ROWS][stay])
        spans.append(block[stay])
        of_learnt += int(sentences.learnt[block[stay, 0]].sum())
        progress(len(block))
    first = len(sentences.learnt) - len(sentences.added)
    for place, number in enumerate(sentences.added.values()):
        found = store.phrases[number]
        keys.append(found.keys)
        spans.append(np.insert(found.spans, 0, first + place, axis=1))
        of_learnt += len(found.spans)
    keys.close()
    spans.close()
    return spans.rows, of_learnt


def _write_sources(datastore: PhraseDatastore, sentences: CompactedSentences, part: Path) -> None:
    """Write which texts have each sentence; what was learnt is the last text."""
    before = datastore.open_sources()
    texts = before.shape[1] - bool(datastore.section.ancestors)
    several, first = GrowingArray(part / f"{SOURCES}.npy", (texts + 1,), "bool"), 0
    for start in range(0, len(before), BLOCK_ROWS):
        block = before[start : start + BLOCK_ROWS, :texts][sentences.numbers[start : start + BLOCK_ROWS] >= 0]
        several.append(np.column_stack([block, sentences.learnt[first : first + len(block)]]))
        first += len(block)
    new = len(sentences.added)
    several.append(np.column_stack([np.zeros((new, texts), bool), np.ones(new, bool)]))
    several.close()


def _describe(datastore: PhraseDatastore, sentences: CompactedSentences, size: int, of_learnt: int) -> PhraseSection:
    """Describe the new part as a datastore of several texts, the last of which was learnt."""
    name = datastore.directory.resolve().name
    sources = list(Opened(name, datastore, _too_long(datastore)).sources)
    before = sources.pop() if datastore.section.ancestors else Source(f"{name}-{LEARNED}", "", 0, 0, 1.0)
    stay = np.flatnonzero(sentences.numbers >= 0)  # before all that come
    texts = [datastore.sentence(n) for n in stay[sentences.learnt[: len(stay)]].tolist()]
    corpus = fingerprint.of_strings([*texts, *sentences.added])
    learnt = Source(before.name, corpus, of_learnt, int(sentences.learnt.sum()), 1.0)
    section = describe_corpora(datastore.section, [*sources, learnt])
    return replace(section, size=size, sentences=len(sentences.learnt), files={}, index_recall=None, hashes=True)


def _too_long(datastore: PhraseDatastore) -> int:
    """Count the sentences that are too long for the encoder, as far as they are of a text."""
    totals = json.loads((datastore.folder / TOTALS).read_text(encoding="utf-8"))
    return int(totals["too_long"])
