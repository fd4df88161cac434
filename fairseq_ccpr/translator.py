"""The door for programs: a model and a datastore, loaded once, to translate, learn and explain."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from fairseq_ccpr.building.live_compact import LiveCompaction
from fairseq_ccpr.datastore.learned import Learned, LearnedPair
from fairseq_ccpr.decoding.glossary_memory import GlossaryCandidates, GlossaryMemory
from fairseq_ccpr.decoding.learned_memory import LearnedMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.device import AUTO, PRECISIONS
from fairseq_ccpr.errors import ConfigurationError, NotWritableError
from fairseq_ccpr.evaluation.explain import explain_sentences
from fairseq_ccpr.evaluation.explanation import Explanation
from fairseq_ccpr.inference.learning import Learner, learned_memory
from fairseq_ccpr.inference.resources import configure_named, configure_system, words_by_name
from fairseq_ccpr.inference.system import SESSION, System
from fairseq_ccpr.text.glossary import MAX_TERM_WORDS
from fairseq_ccpr.text.pairs import tidy

logger = logging.getLogger(__name__)


def choose(device: str | torch.device | None) -> torch.device | None:
    """Read the name of a device."""
    if device is None:
        return None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"device {device} cannot be used ({reason}): give one such as cpu or cuda"
        ) from None
    return torch.device(device)


def _term_fault(candidates: GlossaryCandidates, source: str, target: str) -> str:
    """Say why a pair cannot be a term; nothing where it can."""
    if (words := len(source.split())) > MAX_TERM_WORDS:
        return f"'{tidy(source)[:60]}' has {words} words, expected 1 to {MAX_TERM_WORDS}"
    # an empty one is refused as any pair's
    return candidates.fault_of(tidy(target)) if target.strip() else ""


class Translator(System):
    """Translate text with a trained model of fairseq, and with what a datastore knows.

    >>> with Translator(model, datastore=datastore, beam=5) as translator:
    ...     translations = list(translator.translate(["Und Gott sprach:", "Es werde Licht!"]))
    ...     translator.explain("Es werde Licht!").save(folder / "page.html")
    ...     learned = translator.learn("Es werde Licht!", "Let there be light!")
    ...     found = [one.target for one in translator.memory("licht")]
    ...     restored = translator.forget(learned.id)
    >>> [(one.source, len(one.text) > 0, one.score < 0) for one in translations], found
    ([('Und Gott sprach:', True, True), ('Es werde Licht!', True, True)], ['Let there be light!'])

    Everything is loaded once. Several threads may translate with one translator at the same time. `close`, or
    the end of `with`, lets others learn into the datastore; a translator that was closed does no more work.

    Args:
        path: the model's checkpoint; several of an ensemble are separated by colons. Left out, the one that
            the datastore was built with.
        datastore: a folder with tokens, phrases or both; two folders, separated by a colon, where they are
            apart. Left out, the model translates alone. Several of one model have names, such as `{"cars":
            "datastores/cars", "bikes": "datastores/bikes"}`: `translate(texts, memory=["cars", "bikes"])` uses
            both together, and `translator["bikes"]` is a translator over one of them. The first is the
            default.
        data: a folder with the model's dictionaries, such as DATA_BIN. Left out, they are found in the
            datastore, or next to the model; so are the subwords, unless `bpe` and `sentencepiece_model` or
            `bpe_codes` name them.
        beam: width of beam search.
        device: such as "cpu" or "cuda:1"; left out, the GPU where there is one.
        precision: "auto", which is bf16 where the processor is faster in it and fp32 elsewhere; "fp32", "bf16", or
            "fp16", for GPUs.
        options: any other option of fairseq-generate by its name, and of retrieval, such as `lenpen=1.2` or
            `tokens_k=16`. Settings of retrieval that are left out are as `fairseq-ccpr tune` left them with the
            datastore.

    Raises:
        ConfigurationError: an option that does not exist, or something that was not found.
        CheckpointError: the checkpoint is no model of these dictionaries.
        DatastoreError: the datastore is damaged, or belongs to another model.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        datastore: str | Path | Mapping[str, str | Path] | None = None,
        data: str | Path | None = None,
        beam: int = 5,
        device: str | torch.device | None = None,
        precision: str = AUTO,
        **options: Any,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigurationError(f"precision is {precision}: choose one of {', '.join(PRECISIONS)}")
        several = datastore if isinstance(datastore, Mapping) else {}
        named = {
            "path": path,
            "datastore": None if isinstance(datastore, Mapping) else datastore,
            "beam": beam,
            "no_progress_bar": True,
        }
        if precision != AUTO:  # the default, and tasks that do not retrieve have no such option
            named["precision"] = precision
        words, folder = words_by_name(named | options), Path(data) if data is not None else None
        known = configure_named(words, several, folder)
        super().__init__(
            next(iter(known.values())) if known else configure_system(words, folder), choose(device), known
        )

    _compaction: LiveCompaction | None = None  # the last one
    terms: frozenset[int] = frozenset()  # ids of pairs that are terms as well, in a session

    @classmethod
    def of(
        cls,
        words: list[str],
        data: Path | None = None,
        datastores: Mapping[str, str | Path] = MappingProxyType({}),
    ) -> Translator:
        """Load the translator that options of fairseq-generate describe, completed by what is found.

        Args:
            datastores: several by name, see the class; the options then have none.
        """
        translator, named = cls.__new__(cls), configure_named(words, datastores, data)
        cfg = next(iter(named.values())) if named else configure_system(words, data)
        System.__init__(translator, cfg, named=named)
        return translator

    def __getitem__(self, name: str) -> Self:
        return self.over([name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        datastore = f", datastore={self.cfg.task.datastore!r}" if self.cfg.task.datastore else ""
        return f"{type(self).__name__}({self.cfg.common_eval.path!r}{datastore}, device='{self.device}')"

    def learn(self, source: str, target: str, author: str = "") -> Learned:
        """Learn a sentence and its translation, such as a correction: it counts from the next sentence on.

        It replaces what was learned before of the same sentence, which is kept and counts again once it is
        learned again, or this pair is forgotten.

        It is on disk, in the datastore's folder, when this returns. From then on no other process, and no
        other translator, can learn into this datastore until `close`, or until this process ends.

        Args:
            author: who has learned it, which is kept with it, as is the time.

        Returns:
            Its id, and what it replaced. A pair that was learned before keeps its id, and is counted.

        Raises:
            ConfigurationError: there is no token datastore, or the pair cannot be learned, as where it is
            empty or too long. DatastoreError: another process learns, or the journal cannot be written:
            nothing was learned then.
        """
        (learned,) = self.learn_all([(source, target)], author)
        if isinstance(learned, str):
            raise ConfigurationError(f"the pair was not learned: {learned}")
        return learned

    def lock(self) -> bool:
        """Let no other process learn or compact from now on, rather than from the first pair on.

        Returns:
            Whether this translator can learn: it has a token datastore, in a folder that can be written.

        Raises:
            DatastoreError: another process learns already.
        """
        if self.find_memory(TokenMemory) is None:
            return False
        try:
            learned_memory(self).lock()
        except NotWritableError as error:
            logger.warning("%s", error)
            return False
        return True

    def learn_all(self, pairs: Sequence[tuple[str, str]], author: str = "") -> list[Learned | str]:
        """Learn many pairs together, which is faster than one by one.

        Returns:
            Of each what `learn` returns, or in place of it a few words that say why it was not learned.

        Raises:
            ConfigurationError: there is no token datastore.
            DatastoreError: another process learns, or the journal cannot be written: nothing was learned
            then.
        """
        learned = self._learner.learn(pairs, author)
        if self.terms:  # one may have been replaced
            self._prefer()
        return learned

    def learn_terms(self, pairs: Sequence[tuple[str, str]], author: str = "") -> list[Learned | str]:
        """Learn pairs of a session that count as terms of a glossary, too.

        They count before those of its other glossary, and as long as the pairs do; of one source, the one
        that was learned last.

        Returns:
            As `learn_all`.

        Raises:
            ConfigurationError: this is no session.
            DatastoreError: the journal cannot be written: nothing was learned then.
        """
        glossary = self.find_memory(GlossaryMemory)
        if glossary is None or not self.name.startswith(SESSION):
            raise ConfigurationError("terms are learned in a session: give others as --glossary")
        faults = [_term_fault(glossary.candidates, *pair) for pair in pairs]
        learned = self._learner.learn([pair for pair, fault in zip(pairs, faults) if not fault], author)
        self.terms |= {one.id for one in learned if not isinstance(one, str)}
        self._prefer()
        each = iter(learned)
        return [f"{fault}: learn it without term, as a sentence" if fault else next(each) for fault in faults]

    def forget(self, *ids: int) -> list[LearnedPair]:
        """Forget pairs that were learned: translations are from now on as if they never had been.

        Returns:
            The pairs that they had replaced, and that count again.

        Raises:
            ConfigurationError: there is no token datastore, or no such pair.
            DatastoreError: another process learns, or the journal cannot be written: nothing was forgotten
            then.
        """
        restored = learned_memory(self).forget(ids)
        if self.terms:
            self._prefer()
        return restored

    def memory(self, query: str = "", counting: bool = False) -> list[LearnedPair]:
        """Return what was learned, newest first: the pairs that have all words of the query, or all pairs.

        Pairs that were replaced are among them, unless only those are wanted that are `counting`;
        `replaced_by` tells them apart.

        Raises:
            ConfigurationError: there is no token datastore.
        """
        return learned_memory(self).store.find(query, counting)

    def _prefer(self) -> None:
        """Bring the glossary of a session up to date with its terms that count."""
        assert self.task.glossary is not None  # as a session has
        terms = [one for one in self.memory(counting=True) if one.id in self.terms]
        self.task.glossary.become((one.source, one.target) for one in reversed(terms))

    def compact(self) -> bool:
        """Move what was learned into the datastore's own entries, as fairseq-ccpr compact does, while in use.

        Other threads may translate, learn and forget meanwhile. The work is done in a process of its own;
        `close` ends it.

        Returns:
            Whether it was done, and not ended.

        Raises:
            ConfigurationError: there is no token datastore, or it has phrases as well.
            DatastoreError: it could not be done, as where the disk is full, and all is as it was.
        """
        memory = learned_memory(self)
        tokens = self.find_memory(TokenMemory)
        assert tokens is not None  # whose memory that is
        kind: Any = type(tokens.retriever)
        self._compaction = LiveCompaction(memory, lambda datastore: kind(datastore, memory.device))
        return self._compaction.run()

    def close(self) -> None:
        """Let others learn into the datastore, and end its compaction. From then on it refuses to work.

        The first of several by name closes all of them, others only themselves.
        """
        first = self is next(iter(self.named.values()))
        for one in self.named.values() if first else self.members:
            one.closed = True
            if one._compaction is not None:
                one._compaction.cancel()
            tokens = one.find_memory(TokenMemory)
            if tokens is not None and isinstance(tokens.learned, LearnedMemory):
                tokens.learned.store.close()
        for session in list(self._sessions) if first else ():
            self.end(session)

    @cached_property
    def _learner(self) -> Learner:
        return Learner(self)

    def explain(self, sentences: str | list[str], neighbours: int = 16) -> Explanation:
        """Translate with and without retrieval, and say where each token came from.

        The `matches` of each sentence are the sentences of the datastore most like it, as a translation
        memory lists them.

        Args:
            sentences: one, or several.
            neighbours: entries of the token datastore that are kept of each token, at most.

        Returns:
            An explanation, whose `save` writes a page for the browser.

        Raises:
            ConfigurationError: there is no datastore, or a sentence is too long.
        """
        return explain_sentences(
            self, [sentences] if isinstance(sentences, str) else list(sentences), neighbours
        )
