"""Learning sentence pairs alongside a datastore: their keys come from one forced decoding.

If it has phrases, those of the targets are found in the same way as in its text.
"""

from __future__ import annotations

import logging
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from fairseq import utils
from torch import Tensor

from fairseq_ccpr.building.phrase_build import without_repeats
from fairseq_ccpr.datastore.learned import Learned, LearnedPair, NewPair, PairPhrases
from fairseq_ccpr.datastore.manifest import PhraseSection, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.learned_memory import LearnedMemory, why_not_learned
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import LearningRetriever
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.inference.system import System, batches_of, encode
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.text.languages import as_bcp47
from fairseq_ccpr.text.pairs import tidy
from fairseq_ccpr.text.translation_memory import SignedPair, tmx_lines

MOST_AUTHOR = 100  # characters
TOO_MANY_UNKNOWN = 0.5  # fraction of a sentence's subwords that are unknown

logger = logging.getLogger(__name__)


def count_learned(found: Iterable[Learned | str], counts: Counter[str], skipped: Counter[str]) -> list[int]:
    """Count what learning has done: pairs `learned`, there `again`, `replaced`, and by reason those skipped.

    Returns:
        The ids of new pairs.
    """
    ids = []
    for one in found:
        if isinstance(one, str):
            skipped[one] += 1
        else:
            counts["learned" if one.new else "again"] += 1
            counts["replaced"] += one.replaced is not None
            ids += [one.id] * one.new
    return ids


class Learner:
    """Learns pairs alongside a system's token datastore, and phrases, if their part is in the same folder."""

    def __init__(self, system: System) -> None:
        self.system = system
        system.check_encoding()
        self.memory = learned_memory(system)
        assert system.ensemble is not None  # it has the memory above
        self.ensemble: RetrievalEnsemble = system.ensemble
        tokens = system.ensemble.find(TokenMemory)
        assert tokens is not None  # as `learned_memory` has seen
        retriever = tokens.retriever
        if not isinstance(retriever, LearningRetriever):
            raise ConfigurationError(
                f"the retriever {type(retriever).__name__} cannot search what is learned: give it the "
                "methods of fairseq_ccpr.LearningRetriever, project and with_learned"
            )
        self.retriever, self.capture = retriever, tokens.capture
        self._encode_target = system.target_encoder()

    def learn(self, pairs: Sequence[tuple[str, str]], author: str = "") -> list[Learned | str]:
        """Learn pairs of sentences together; those that can be learned count as soon as this returns.

        The journal keeps when that was, and who has learned them, or, without an author, when and by whom a
        `SignedPair` was made.

        Returns:
            For each pair its id and what it replaced, or instead a few words that say why it cannot be
            learned.

        Raises:
            ConfigurationError: the author is no name that others can be shown.
        """
        if fault := author_fault(author):
            raise ConfigurationError(fault)
        self.system.check_open()
        made = self._with_keys([(tidy(source), tidy(target)) for source, target in pairs])
        new = [one for one in made if isinstance(one, NewPair)]
        if new and self._phrases is not None:
            targets = [pair.target for pair in new]
            found = without_repeats(self._phrases.find(targets), targets)
            keys, numbers = PhraseSection.KEY_FORM.encode(found.vectors), found.spans[:, 0]
            each = [PairPhrases(found.spans[numbers == n, 1:], keys[numbers == n]) for n in range(len(new))]
            new = [replace(pair, phrases=phrases) for pair, phrases in zip(new, each)]
        given = [pair for pair, one in zip(pairs, made) if isinstance(one, NewPair)]
        signed = [self._signed(one, pair, author) for one, pair in zip(new, given)]
        done = iter(self.memory.learn(signed) if new else [])
        return [next(done) if isinstance(one, NewPair) else one for one in made]

    @staticmethod
    def _signed(one: NewPair, pair: tuple[str, str], author: str) -> NewPair:
        signed = pair if isinstance(pair, SignedPair) and not author else SignedPair(pair)
        author = author or ("" if author_fault(signed.author) else signed.author)
        return replace(one, time=signed.time or int(time.time()), author=author)

    @torch.no_grad()
    def _with_keys(self, pairs: list[tuple[str, str]]) -> list[NewPair | str]:
        """Decode the targets for their keys; a few words in place of a pair say why it cannot be learned."""
        system, task, form = self.system, self.system.task, TokenSection.KEY_FORM
        faults = [text_fault(*pair) for pair in pairs]
        tokens = {
            n: (encode(source, task), self._encode_target(target))
            for n, (source, target) in enumerate(pairs)
            if not faults[n]
        }
        made: list[NewPair | str] = [fault or self._token_fault(*tokens[n]) for n, fault in enumerate(faults)]
        fits = [n for n, fault in enumerate(made) if not fault]
        if not fits:
            return made
        self.ensemble.eval()
        sources, targets = [tokens[n][0] for n in fits], [tokens[n][1] for n in fits]
        for sample in batches_of(sources, system.cfg, task, targets):
            real = self.ensemble.real_tokens(sample["target"])
            queries = self.capture.force_decode(sample["net_input"])[real]
            keys, values = form.encode(self.retriever.project(queries)), sample["target"][real].int()
            lengths = real.sum(dim=1).tolist()
            each = np.split(keys, np.cumsum(lengths[:-1]))
            for number, k, v in zip(sample["id"].tolist(), each, values.split(lengths)):
                place: int = fits[number]
                source, target = pairs[place]
                made[place] = NewPair(source, target, v.numpy(), k, read_as=task.read_as(source))
                if not np.isfinite(form.decode(k)).all():
                    made[place] = "the model computes numbers that a key cannot hold"
        return made

    @cached_property
    def _phrases(self) -> PhraseFinder | None:
        memory = self.ensemble.find(PhraseMemory)
        if memory is None:
            if self.system.task.without_phrases:
                logger.warning(
                    "the phrases of what is learned do not count: their weight is 0, and they are not loaded"
                )
            return None
        retriever = memory.retriever
        if why_not := why_not_learned(self.memory.store.datastore.directory, retriever.datastore):
            logger.warning("the phrases of what is learned do not count: %s", why_not)
            return None
        datastore: PhraseDatastore = retriever.datastore
        segmentation = Segmentation(**datastore.section.segmentation)
        finder = PhraseFinder(retriever.encoder, segmentation)  # which refuses a lexicon that is missing
        lexicon, expected = segmentation.lexicon, datastore.section.fingerprints.get("lexicon")
        if lexicon is not None and (found := fingerprint.of_file(lexicon)) != expected:
            raise DatastoreError(
                f"{lexicon}, which names the phrases of {datastore.directory}, has changed since they were "
                f"built ({fingerprint.short(found)}, then {fingerprint.short(str(expected))}): bring that "
                "file back, or build the phrases again"
            )
        return finder

    def _token_fault(self, source: Tensor, target: Tensor) -> str:
        task, models = self.system.task, self.system.models
        limits = utils.resolve_max_positions(
            task.max_positions(), *[model.max_positions() for model in models]
        )
        added = len(task.tags.tagged(target, task.target_dictionary)) - len(target)
        for side, tokens, most, dictionary in (
            ("source", source, limits[0] - task.tags.added, task.source_dictionary),
            ("target", target, limits[1] - added, task.target_dictionary),
        ):
            if len(tokens) > most:
                return f"its {side} is longer than the {most:,} tokens that the model takes"
            unknown = int((tokens == dictionary.unk()).sum())
            if unknown >= TOO_MANY_UNKNOWN * (len(tokens) - 1):
                return (
                    f"half of its {side} or more is not in the dictionary, as of another language or script"
                )
        return ""


def learned_memory(system: System) -> LearnedMemory:
    """Return the memory of pairs learned alongside the token datastore of a system."""
    system.check_open()
    if len(system.members) > 1:
        raise ConfigurationError("several memories together do not learn: name one of them")
    tokens, phrases = system.find_memory(TokenMemory), system.find_memory(PhraseMemory)
    if tokens is None and phrases is not None:
        raise ConfigurationError(
            f"{phrases.retriever.datastore.directory} has phrases alone, and learning needs "
            "tokens as well: add them with fairseq-ccpr build tokens, or fairseq-ccpr build memory, which "
            "adds an empty token part"
        )
    if tokens is None or not isinstance(tokens.learned, LearnedMemory):
        raise ConfigurationError(
            "learning needs a token datastore: give one with --datastore, or make an empty one with "
            "fairseq-ccpr build memory"
        )
    return tokens.learned


def learned_for(system: System, sources: Sequence[str]) -> list[tuple[LearnedPair, str] | None]:
    """Return the pair that counts for each source, of the most important memory, and its name; None without."""
    found = dict[str, tuple[LearnedPair, str]]()
    for one in reversed(system.members):
        tokens = one.find_memory(TokenMemory)
        if tokens is not None and isinstance(tokens.learned, LearnedMemory):
            counting = tokens.learned.store.counting
            pairs = {source: counting(one.task.read_as(source)) for source in sources}
            found |= {source: (pair, one.name) for source, pair in pairs.items() if pair is not None}
    return [found.get(source) for source in sources]


def text_fault(source: str, target: str) -> str:
    """Say why a pair of texts cannot be learned; nothing where it can."""
    for side, text in (("source", source), ("target", target)):
        if not text:
            return f"its {side} is empty"
        if any(
            character in "\ufffe\uffff" or unicodedata.category(character) in ("Cc", "Cs")
            for character in text
        ):
            return f"its {side} has control characters, or is no Unicode"
    return ""


def as_tmx(pairs: Iterable[LearnedPair], source: str, target: str) -> str:
    """Write learned pairs as TMX; the languages are as fairseq names them."""
    each = ((str(one.id), one.source, one.target, one.time, one.author) for one in pairs)
    return "\n".join([*tmx_lines(as_bcp47(source), as_bcp47(target), each), ""])


def author_fault(author: str) -> str:
    """Say why a name cannot be kept with a pair; nothing where it can.

    Control characters, marks of direction and halves of characters could make others read another name.
    """
    if author.isprintable() and len(author) <= MOST_AUTHOR:
        return ""
    return (
        f"the author is {author[:30]!a}: give a name of at most {MOST_AUTHOR} characters, without control "
        "characters and marks of direction"
    )
