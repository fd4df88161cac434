"""A loaded system: sentences in, tokens in batches, translations out."""

from __future__ import annotations

import ast
import copy
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, repeat
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Self, cast

import torch
from fairseq import tasks, utils
from fairseq.data import data_utils
from torch import Tensor

from fairseq_ccpr.building.token_build import write_empty_store
from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.decoding.correction_memory import CorrectionMemory
from fairseq_ccpr.decoding.ensemble import TEXTS, M, RetrievalEnsemble
from fairseq_ccpr.decoding.joint_ensemble import JointEnsemble
from fairseq_ccpr.decoding.learned_memory import LearnedMemory
from fairseq_ccpr.decoding.options import NO_TRUST
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.device import AUTO, BF16, FP16, choose_device, compute_on_one_thread, one_thread
from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnknownMemoryError
from fairseq_ccpr.inference.confidence import Confidence, ScoredText, conditions, token_ends
from fairseq_ccpr.inference.resources import configure_system, preprocessing_of
from fairseq_ccpr.inference.unknown import OFF, copies, given_text, nothing_known
from fairseq_ccpr.models.checkpoint import load_models
from fairseq_ccpr.models.key_layer import KEY_LAYERS
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.decoder_subwords import loading_subwords, split_text, target_steps
from fairseq_ccpr.text.glossary import Glossary
from fairseq_ccpr.text.pairs import one_line
from fairseq_ccpr.text.schemes import check_subwords, looks_shuffled
from fairseq_ccpr.text.sentences import Segments

MAX_UNKNOWN = 0.1  # fraction of unknown subwords above which something is wrong
HELD = "\0"  # in place of an unknown token, until it is known as what it is written
NUMBERS_AT_ONCE = 1 << 28  # of the distributions of batches that are decoded at once
FEW_HYPOTHESES = 16  # up to which one thread is faster than several
SESSION = ":"  # with which its name begins
MOST_SESSIONS, MOST_OF_OWNER = 128, 32  # at once
SESSION_SECONDS = 12 * 3600.0  # without being named
MOST_TOGETHER = 32  # choices of several datastores that are kept
WINDOW = 4096  # sentences that are read at once, and sorted by length
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translation:
    """A translation of one sentence.

    Attributes:
        source: the sentence as it was given.
        text: the best translation.
        score: its log-probability with retrieval, by fairseq's length normalisation (`--lenpen`,
            `--unnormalized`).
        tokens: its subwords, without the end of the sentence; what was copied from the source is in place of
            unknown ones.
        token_scores: log p of each subword, and of the end of the sentence.
        alternatives: the next best translations, where `nbest` asks for more than one.
        fault: why there is no translation; empty where there is one.
        confidence: where it is asked for, how probable it is that this translation is as good as the better
            half of those of held-out text, 0 to 1; None where nothing was decoded, and of alternatives.
        word_confidences: likewise each word of the text that has letters or digits, in order, and how
            probable it is that a reference has it; None of one that the tokens are not seen to write, as
            where a pair was learned in another form than they spell.
        parts: the translations of its parts where a sentence is longer than the models take. `text` joins
            theirs then, `tokens` and `token_scores` are those of one after the other, each with its end,
            `score` is their mean by tokens, `confidence` the lowest, and `word_confidences` lack a part that
            was copied.
    """

    source: str
    text: str
    score: float
    tokens: tuple[str, ...] = ()
    token_scores: tuple[float, ...] = ()
    alternatives: tuple[Translation, ...] = ()
    fault: str = ""
    confidence: float | None = None
    word_confidences: tuple[tuple[str, float | None], ...] = ()
    parts: tuple[Translation, ...] = ()

    @classmethod
    def of(cls, source: str, tokens: Tensor, hypotheses: list[dict[str, Any]], system: System) -> Translation:
        """Make a translation of fairseq's hypotheses, the best first; the source's tokens are int64 [S]."""
        dictionary = system.task.target_dictionary
        best, *others = hypotheses
        tags = system.task.tags.ids(dictionary)
        both = zip(best["tokens"].tolist(), best["positional_scores"].tolist())
        scored = [(token, score) for token, score in both if token not in tags]
        scores = tuple(score for _, score in scored)
        copied = system.copied(given_text(source, system.task), tokens, best)
        following = iter(copied or ())
        symbols = tuple(
            next(following, dictionary.unk_word) if i == dictionary.unk() else dictionary.symbols[i]
            for i, _ in scored
            if i != dictionary.eos()
        )
        alternatives = tuple(cls.of(source, tokens, [other], system) for other in others)
        text = system.learned_text(source, best["tokens"])
        text = system.to_text(dictionary, best["tokens"], unknown=copied) if text is None else text
        return cls(source, text, float(best["score"]), symbols, scores, alternatives)

    @classmethod
    def of_nothing(cls, source: str, length: int, most: int) -> Translation:
        fault = f"{length:,} tokens, and the model takes {most:,}: divide it" if length > most else ""
        return cls(source, "", 0.0, fault=fault)

    @classmethod
    def joined(cls, source: str, divided: Segments, parts: Sequence[Translation]) -> Translation:
        """Join the translations of a sentence's parts, and of their alternatives the first, and so on."""
        if fault := next((one.fault for one in parts if one.fault), ""):
            return cls(source, "", 0.0, fault=fault)
        count = sum(len(one.token_scores) for one in parts)
        ranked = [[one, *one.alternatives] for one in parts]
        others = [
            cls.joined(
                source, divided, [replace(each[min(rank, len(each) - 1)], alternatives=()) for each in ranked]
            )
            for rank in range(1, max(map(len, ranked)))
        ]
        return cls(
            source,
            one_line(divided.join([one.text for one in parts])),
            sum(one.score * len(one.token_scores) for one in parts) / max(1, count),
            tuple(token for one in parts for token in one.tokens),
            tuple(score for one in parts for score in one.token_scores),
            tuple(others),
            parts=tuple(parts),
        )


class Session:
    """A system over a datastore in a temporary folder, and when it was named last, in seconds."""

    def __init__(self, make: Callable[[Path], System], used: float) -> None:
        self.folder, self.used = TemporaryDirectory(prefix="fairseq-ccpr-session-"), used
        self.system = make(Path(self.folder.name, "store"))

    @staticmethod
    def name_of(owner: str, session: str) -> str:
        """Return the name of an owner's session, see `System.over`; the owner has no tab."""
        return f"{SESSION}{owner}\t{session}"

    @staticmethod
    def called(name: str) -> str:
        """Return what its owner calls it."""
        return name.partition("\t")[2]

    def close(self) -> None:
        self.system.closed = True
        tokens = self.system.find_memory(TokenMemory)
        if tokens is not None and isinstance(tokens.learned, LearnedMemory):
            tokens.learned.store.close()
        self.folder.cleanup()


def encode(sentence: str, task: Any) -> Tensor:
    """Return the tokens of a source sentence, the end of the sentence included."""
    return encode_with(sentence, (task.tokenizer, task.bpe), task.source_dictionary)


def encode_with(sentence: str, steps: tuple[Any, ...], dictionary: Any) -> Tensor:
    """Encode a sentence with fairseq's tokenizer and subword model, either of which may be None."""
    tokens: Tensor = dictionary.encode_line(split_text(sentence, steps), add_if_not_exist=False).long()
    return tokens


def length_limit(task: Any, models: list[Any]) -> int:
    """Return the most tokens that a source sentence may have."""
    limits = utils.resolve_max_positions(task.max_positions(), *[model.max_positions() for model in models])
    return int(limits[0]) - task.tags.added


def batches_of(
    tokens: list[Tensor],
    cfg: Any,
    task: Any,
    targets: list[Tensor] | None = None,
    sources: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Make fairseq's batches of sentences, similar lengths together, longest first.

    Args:
        tokens: of each sentence; a batch has their numbers as `id`.
        sources: the sentences, where they are known: a batch has them as `texts`, and memories look for
            phrases and terms there rather than in what subwords leave of them.
    """
    dataset = task.inference_dataset(tokens) if targets is None else task.pair_dataset(tokens, targets)
    order = dataset.ordered_indices()
    sizes = [dataset.src_sizes, *([dataset.tgt_sizes] if targets is not None else [])]
    most = cfg.dataset.max_tokens and max(
        cfg.dataset.max_tokens, *(int(each.max(initial=1)) for each in sizes)
    )
    for batch in reversed(dataset.batch_by_size(order, most, cfg.dataset.batch_size)):
        sample: dict[str, Any] = dataset.collater([dataset[number] for number in batch])
        if sources:
            sample[TEXTS] = [given_text(sources[number], task) for number in sample["id"].tolist()]
        yield sample


class System:
    """Everything that decoding needs: configuration, task, models, and the ensemble that retrieves.

    Threads may share one: each has a generator of its own, and what a batch retrieves stays with the batch.

    Args:
        device: where the models are; None: the GPU where there is one.
        named: configurations that differ in their datastore alone, by name: the first is this system's, the
            others share its models.
        models: that are loaded already.

    Attributes:
        ensemble: the models with the memories of the datastore; None without a datastore and a glossary.
        alone: the models without memories.
        named: the systems of the datastores by name, itself the first; nameless where it has but one.
        name: its own among these, or that of a session.
        members: itself, or the systems whose datastores it has together, see `over`.
        confidence: what `tune` calibrated for the settings in use; None where it has not, as `unrated` tells.
        closed: whether it does no more work.
    """

    closed = False

    def __init__(
        self,
        cfg: Any,
        device: torch.device | None = None,
        named: Mapping[str, Any] = MappingProxyType({}),
        models: list[Any] | None = None,
    ) -> None:
        self.cfg = cfg
        self.device = device or choose_device(cfg.common.cpu)
        wanted = (
            FP16
            if cfg.common.fp16
            else BF16
            if cfg.common.bf16
            else getattr(cfg.task, "precision", None) or AUTO
        )
        self.task, self.models = load(cfg, self.device, wanted == FP16, models)
        self.task.choose_precision(wanted, self.models)
        self.alone = self.task.alone(self.models)
        self.alone.temperature = cfg.generation.temperature
        self.ensemble: RetrievalEnsemble | None = None
        if memories := self.task.build_memories(self.models):
            self.ensemble = self.task.join(self.models, memories)
            self.ensemble.temperature = cfg.generation.temperature
        myself = cast(Self, self)
        self.members: tuple[Self, ...] = (myself,)
        self.name = next(iter(named), "")
        self.named: dict[str, Self] = {self.name: myself}
        self._together: dict[tuple[str, ...], Self] = {}
        self._sessions: dict[str, Session] = {}
        for name, other in list(named.items())[1:]:
            made: Any = type(self).__new__(type(self))
            System.__init__(made, other, self.device, models=self.models)
            made.name, made.named, self.named[name] = name, self.named, made
        if models is None and self.device.type != "cpu" and self.task.precision == BF16:
            for model in self.models:  # after they were identified by their parameters, which bf16 rounds
                model.bfloat16()
        self.to_text = detokeniser(cfg, self.task)
        self.confidence = Confidence.read(self.task.calibrated)
        self.unrated = self.task.calibrated if isinstance(self.task.calibrated, str) else ""
        if self.confidence is not None and self.ensemble is not None:
            self.unrated = self.confidence.mismatch(conditions(self.ensemble, cfg.generation))
            self.confidence = self.confidence if not self.unrated else None
        self.replaces_unknown = cfg.generation.replace_unk != OFF
        for dictionary in (self.task.source_dictionary, self.task.target_dictionary):
            check_subwords(dictionary, self.task.bpe, cfg.common_eval.post_process)
        of_languages = {
            cfg.task.source_lang: self.task.source_dictionary,
            cfg.task.target_lang: self.task.target_dictionary,
        }
        if shuffled := [name for name, one in of_languages.items() if looks_shuffled(one, self.task.bpe)]:
            logger.warning(
                "%s: the symbols of dict.%s.txt are neither by falling counts nor as in the subword model: if the model was "
                "trained with them in another order, all translations are nonsense; give that file",
                self.preprocessing.folder,
                shuffled[0],
            )
        self._of_thread = threading.local()
        self._warned = self._encodes = False

    @classmethod
    def of(cls, words: list[str], data: Path | None = None) -> System:
        """Load the system that options of fairseq-generate describe, completed by what is found."""
        return cls(configure_system(words, data))

    def over(self, names: Sequence[str]) -> Self:
        """Return the system of a named datastore, or of several together, which translates; of none: itself.

        A name that begins with a colon is that of a session, see `Session.name_of`: an empty datastore of its
        own, for what is confirmed in one document. It begins with `begin`, and is gone at its `end`, or when
        nobody has named it for half a day. Beside others, one that has not begun has nothing to say.

        Raises:
            UnknownMemoryError: there is none of that name.
        """
        names = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
        if unknown := [name for name in names if name not in self.named and not name.startswith(SESSION)]:
            known = " and ".join(filter(None, self.named)) or "none with a name"
            raise UnknownMemoryError(f"there is no memory {unknown[0]}: there is {known}")
        self._end_old_sessions()
        if len(names) > 1:
            names = tuple(name for name in names if name in self.named or name in self._sessions)
        members = tuple(self.named[name] if name in self.named else self._session(name) for name in names)
        if len(names) < 2:
            return members[0] if names else self
        if names not in self._together:
            made = members[0]._copied()
            made.members = members
            made.ensemble = JointEnsemble([one.ensemble or one.alone for one in members])
            # What was calibrated holds for one datastore; a session beside it says little else.
            calibrated = [self.named[name].confidence for name in names if name in self.named]
            made.confidence = calibrated[0] if len(calibrated) == 1 else None
            alone = "each datastore is calibrated by itself: name one" if len(calibrated) > 1 else ""
            made.unrated = alone or members[-1].unrated  # a session is named first
            if len(self._together) == MOST_TOGETHER:  # they are quickly made
                self._together.pop(next(iter(self._together)))
            self._together[names] = made
        return self._together[names]

    def _copied(self) -> Self:
        """Copy the system without what is cached of it, to be one with other memories."""
        made = copy.copy(self)
        for name in [
            one for one in vars(made) if isinstance(getattr(type(made), one, None), cached_property)
        ]:
            delattr(made, name)
        made._of_thread, made._encodes = threading.local(), False
        return made

    def _session(self, name: str) -> Self:
        if name not in self._sessions:
            known = "it begins when it first learns"
            raise UnknownMemoryError(f"there is no session {Session.called(name)}: {known}")
        self._sessions[name].used = time.monotonic()
        return cast(Self, self._sessions[name].system)

    def _end_old_sessions(self) -> None:
        now = time.monotonic()
        for name in [name for name, one in self._sessions.items() if now - one.used > SESSION_SECONDS]:
            self.end(name)

    def begin(self, session: str) -> Self:
        """Begin a session, unless it has begun, and return its system, which learns.

        Raises:
            ConfigurationError: there are several models.
            DatastoreError: too many have begun.
        """
        self._end_old_sessions()
        if session not in self._sessions:
            if len(self.models) > 1:
                raise ConfigurationError(f"a session is for one model, and --path names {len(self.models)}")
            owner = session.partition("\t")[0]
            own = sum(name.partition("\t")[0] == owner for name in self._sessions)
            if own >= MOST_OF_OWNER or len(self._sessions) >= MOST_SESSIONS:
                found = f"{own} of your sessions are open, and {len(self._sessions)} in all"
                raise DatastoreError(f"{found}: end one, or try again later")
            self._sessions[session] = Session(partial(self._with_empty, session), time.monotonic())
        return self._session(session)

    @cached_property
    def _empty(self) -> tuple[TemporaryDirectory[str], str]:
        """An empty datastore, as `store` in a folder, and the fingerprint of the model."""
        folder, task = TemporaryDirectory(prefix="fairseq-ccpr-empty-"), self.task
        symbols, languages = task.target_dictionary.symbols, task.tags.languages
        store = Path(folder.name, "store")
        section = write_empty_store(
            self.models, task.source_dictionary, symbols, KEY_LAYERS[0], languages, store
        )
        return folder, section.fingerprints["model"]

    def _with_empty(self, name: str, folder: Path) -> Self:
        """Return the same with an empty datastore, to be written as a folder, in place of its own."""
        made, task = self._copied(), copy.copy(self.task)
        empty, model = self._empty
        copytree(Path(empty.name, "store"), folder)
        task.cfg = copy.copy(task.cfg)
        task.cfg.datastore, task.cfg.trust = str(folder), NO_TRUST
        steps = task.tokenizer, task.bpe, task.splitting
        task.open_datastore(task.cfg)
        task.tokenizer, task.bpe, task.splitting = steps
        task.identities, task.glossary = (model,), Glossary(others=self.task.glossary)
        made.task, made.ensemble = task, task.join(self.models, task.build_memories(self.models))
        made.ensemble.temperature = self.alone.temperature
        made.name, made.members, made.named = name, (made,), {name: made}
        return made

    def end(self, session: str) -> None:
        """End a session: what was learned in it is gone."""
        for names in [one for one in self._together if session in one]:
            del self._together[names]
        if (ended := self._sessions.pop(session, None)) is not None:
            ended.close()

    def generator(self, retrieve: bool = True) -> Any:
        """Make a generator of fairseq, with retrieval where there is a datastore."""
        made = self.task.build_base_generator(self.models, self.cfg.generation)
        self.task.equip(made, self.ensemble if retrieve and self.ensemble is not None else self.alone)
        return made

    def learned_text(self, source: str, tokens: Tensor) -> str | None:
        """Return the text of what was learned for a source, where its tokens are these, int64 [T]; else None."""
        memories = self.ensemble.memories if self.ensemble is not None else ()
        learned = [one.learned.entries for one in memories if isinstance(one, CorrectionMemory)]
        if not any(entries.by_source for entries in learned):
            return None
        read, written = self.task.read_as(source), tokens[self.task.tags.forced :].tolist()
        for entries in reversed(learned):  # what acts last has the last word
            for pair in entries.by_source.get(read.ids, []):
                if pair.read_as == read and entries.target(pair).tolist() == written:
                    return str(pair.target)
        return None

    def find_memory(self, kind: type[M]) -> M | None:
        """Look up the memory of a class; None without one."""
        return self.ensemble.find(kind) if self.ensemble is not None else None

    @property
    def preprocessing(self) -> Preprocessing:
        return preprocessing_of(self.cfg)

    @property
    def signature(self) -> str | None:
        """The retrieval signature: all that affects a result, in one line; None without a datastore."""
        return self.ensemble.signature() if self.ensemble is not None else None

    def translate(
        self,
        sentences: Iterable[str],
        done: Callable[[int], object] = lambda count: None,
        window: int = WINDOW,
        nbest: int | None = None,
        retrieve: bool = True,
        memory: Sequence[str] = (),
        confidence: bool = False,
    ) -> Iterator[Translation]:
        """Translate sentences in batches of similar lengths; translations come in the order of the sentences.

        Args:
            sentences: raw text, each one sentence. An empty one has an empty translation. One that is longer
                than the models take is divided at ends of sentences or clauses, or at spaces, as
                `Translation.parts` tells; where it has none, its translation is empty, and the reason is
                `Translation.fault`. One that has nothing but unknown characters is its own translation.
            done: called with the number of newly translated sentences, before they can be yielded in order.
            window: sentences that are read ahead and sorted by length.
            nbest: translations of each, at most as many as the beam is wide; left out, as `--nbest` has it.
            retrieve: whether the datastore is used, or the model alone.
            memory: names of the datastores that are used, where it has several; left out, the first.
            confidence: whether `Translation.confidence` and its `word_confidences` are wanted.
        """
        if memory:
            return self.over(memory).translate(
                sentences, done, window, nbest, retrieve, confidence=confidence
            )
        if confidence:
            self.check_confidence(retrieve)
        if isinstance(sentences, str):
            raise ConfigurationError(
                "translate takes a list of sentences, not one string: put it in brackets"
            )
        self.check_open()
        self.check_encoding()
        waiting = iter(sentences)
        nbest = nbest or self.cfg.generation.nbest
        windows = iter(lambda: list(islice(waiting, window)), [])
        found = chain.from_iterable(self._translate(one, done, nbest, retrieve) for one in windows)
        return map(self.rated, found) if confidence else found

    def check_confidence(self, retrieve: bool = True) -> None:
        """Refuse confidence where it was not calibrated."""
        if self.confidence is None or not retrieve:
            where = "of these settings" if retrieve and self.task.parts else "of the model alone"
            how = "run fairseq-ccpr tune, which stores it with the datastore, and translate with that"
            raise ConfigurationError(
                f"the confidence {where} was not calibrated: {(retrieve and self.unrated) or how}"
            )

    def rated(self, one: Translation) -> Translation:
        """Return a translation with its confidence, where that was calibrated and something was decoded."""
        if self.confidence is None or not one.token_scores:
            return one
        if one.parts:
            parts = tuple(map(self.rated, one.parts))
            known = [part.confidence for part in parts if part.confidence is not None]
            lowest = min(known) if len(known) == len(parts) else None
            words = tuple(word for part in parts for word in part.word_confidences)
            return replace(one, confidence=lowest, word_confidences=words, parts=parts)
        scored = ScoredText.of(one.text, self.token_ends(one), one.token_scores)
        sentence, words = self.confidence.of_sentence(scored), self.confidence.of_words(scored)
        return replace(one, confidence=sentence, word_confidences=words)

    def fits(self, sentence: str) -> bool:
        """Tell whether the models take a sentence whole."""
        return len(encode(sentence, self.task)) <= length_limit(self.task, self.models)

    def token_ends(self, one: Translation) -> list[int]:
        """Return where the tokens of a translation end in its text, see `confidence.token_ends`."""
        dictionary = self.task.target_dictionary
        ids = [dictionary.index(token) for token in one.tokens]
        copied = [token for token, i in zip(one.tokens, ids) if i == dictionary.unk()]
        return token_ends(partial(self.to_text, dictionary, unknown=copied), ids, one.text)

    def _translate(
        self, sentences: list[str], done: Callable[[int], object], nbest: int, retrieve: bool
    ) -> list[Translation]:
        self.check_open()
        tokens = [encode(sentence, self.task) for sentence in sentences]
        self._warn_of_unknown(tokens)
        most = length_limit(self.task, self.models)
        translations = [Translation.of_nothing(one, len(ids), most) for one, ids in zip(sentences, tokens)]
        fits = []
        for i, ids in enumerate(tokens):
            if self.knows_nothing(sentences[i], ids):
                translations[i] = Translation(sentences[i], one_line(sentences[i]), 0.0)
            elif len(ids) > most:
                divided = Segments.fitting(sentences[i].strip(), self.fits)
                if len(divided.sentences) > 1:
                    parts = list(self._translate(divided.sentences, lambda count: None, nbest, retrieve))
                    translations[i] = Translation.joined(sentences[i], divided, parts)
            elif len(ids) > 1:
                fits.append(i)
        done(len(sentences) - len(fits))
        sources = [sentences[i] for i in fits]
        samples = batches_of([tokens[i] for i in fits], self.cfg, self.task, sources=sources) if fits else ()
        for sample, hypotheses in self._decoded(list(samples), retrieve):
            places = [fits[i] for i in sample["id"].tolist()]
            for place, row, found in zip(places, sample["net_input"]["src_tokens"], hypotheses):
                translations[place] = Translation.of(sentences[place], row, found[:nbest], self)
            done(len(places))
        return translations

    def _decoded(
        self, samples: list[dict[str, Any]], retrieve: bool
    ) -> Iterator[tuple[dict[str, Any], list[list[dict[str, Any]]]]]:
        """Decode batches in their order; on a CPU as many at once as it has threads, where there are so many.

        A step is of many small operations, which a thread each wait less for than several for each other. Not
        where their order counts, a database answers, or their distributions would take too much memory.
        """
        generation, parts = self.cfg.generation, [p for one in self.members for p in one.task.parts.values()]
        ordered = generation.sampling or generation.retain_dropout or self.task.log is not None
        remote = any(getattr(part.section, "store", None) is not None for part in parts)
        most = max((sample["id"].numel() for sample in samples), default=1)
        numbers = most * generation.beam * len(self.task.target_dictionary)
        workers = min(torch.get_num_threads(), NUMBERS_AT_ONCE // numbers)
        if self.device.type != "cpu" or ordered or remote or not 1 < workers <= len(samples):
            yield from ((sample, self._decode(sample, retrieve)) for sample in samples)
            return
        ready, threads = threading.Barrier(workers + 1, timeout=60), torch.get_num_threads()
        # made here, as fairseq changes models for a moment when it makes one
        generators = [self.generator(retrieve) for _ in range(workers)]

        def begin() -> None:
            vars(self._of_thread)[str(retrieve)] = generators.pop()
            compute_on_one_thread()
            ready.wait()

        pool = ThreadPoolExecutor(workers, initializer=begin)
        try:
            found = pool.map(self._decode, samples, repeat(retrieve))
            ready.wait()
            torch.set_num_threads(threads)  # for threads that begin later, which the others have changed
            yield from zip(samples, found)
        finally:
            pool.shutdown(cancel_futures=True)

    def _decode(self, sample: dict[str, Any], retrieve: bool) -> list[list[dict[str, Any]]]:
        generator = self._generator(retrieve)
        sample = utils.move_to_cuda(sample, self.device) if self.device.type == "cuda" else sample
        few = len(sample["id"]) * self.cfg.generation.beam <= FEW_HYPOTHESES and self.device.type == "cpu"
        with one_thread() if few and torch.get_num_threads() > 1 else nullcontext():
            found: list[list[dict[str, Any]]] = self.task.inference_step(generator, self.models, sample)
        return found

    def target_encoder(self) -> Callable[[str], Tensor]:
        """Return a function from a target sentence to its tokens, with its end, int64 [L]."""
        self.check_encoding()
        steps = target_steps(self.task.tokenizer, self.task.bpe)
        return lambda sentence: encode_with(sentence, steps, self.task.target_dictionary)

    def copied(self, text: str | None, tokens: Tensor, hypothesis: dict[str, Any]) -> list[str] | None:
        """Return what unknown subwords of a hypothesis are written as, see `copies`; None: they stay."""
        return copies(self.task, text, tokens, hypothesis) if self.replaces_unknown else None

    def knows_nothing(self, sentence: str, tokens: Tensor) -> bool:
        """Tell whether a sentence has unknown characters alone, no term: it is its own translation."""
        terms = self.task.glossary
        nothing = nothing_known(tokens, self.task) and not (terms is not None and any(terms.find(sentence)))
        return nothing and self.replaces_unknown

    def check_open(self) -> None:
        if any(one.closed for one in self.members):
            raise ConfigurationError(f"{self!r} was closed, and does no more work: load another")

    def check_encoding(self) -> None:
        # it looks at the whole dictionary, which a program that translates one sentence feels
        if not self._encodes:
            check_subwords(self.task.source_dictionary, self.task.bpe)
            self._encodes = True
            for one in self.members:
                tokens = one.find_memory(TokenMemory)
                if tokens is not None and isinstance(tokens.learned, LearnedMemory):
                    tokens.learned.identify(self.task.read_as)

    def _warn_of_unknown(self, tokens: list[Tensor]) -> None:
        pieces = sum(map(len, tokens))
        unknown = sum(int((ids == self.task.source_dictionary.unk()).sum()) for ids in tokens)
        if unknown > MAX_UNKNOWN * pieces and not self._warned:
            self._warned = True
            logger.warning(
                "%.0f%% of the subwords of the text are not in the source dictionary: the text is in another language, or "
                "the subword model is not the model's",
                100 * unknown / pieces,
            )

    def _generator(self, retrieve: bool) -> Any:
        made = vars(self._of_thread)
        if (name := str(retrieve)) not in made:
            made[name] = self.generator(retrieve)
        return made[name]


def load(
    cfg: Any, device: torch.device | None = None, half: bool | None = None, models: list[Any] | None = None
) -> tuple[RetrievalTask, list[Any]]:
    """Load task and models, as fairseq-generate does, unless they are loaded already."""
    task = tasks.setup_task(cfg.task)
    if not isinstance(task, RetrievalTask):
        raise ConfigurationError(f"--task {cfg.task._name} does not retrieve: use translation_retrieval")
    with loading_subwords(preprocessing_of(cfg).words):
        task.build_tokenizer(cfg.tokenizer)
        task.build_bpe(cfg.bpe)
    if models is not None:
        return task, models
    overrides = ast.literal_eval(cfg.common_eval.model_overrides)
    models = load_models(split_paths(cfg.common_eval.path), task, overrides)
    utils.set_torch_seed(cfg.common.seed)
    for model in models:
        if cfg.common.fp16 if half is None else half:
            model.half()
        model.to(device or choose_device(cfg.common.cpu))
        model.prepare_for_inference_(cfg)
    return task, models


def detokeniser(cfg: Any, task: Any) -> Callable[..., str]:
    """Return a function from a dictionary and token ids to text, as fairseq-generate prints it.

    A reference's unknown tokens are written in a way that no hypothesis matches, unless the caller says how,
    in their order.
    """

    def to_text(
        dictionary: Any, tokens: torch.Tensor, reference: bool = False, unknown: Iterable[str] | None = None
    ) -> str:
        tokens = utils.strip_pad(tokens, dictionary.pad()).int().cpu()
        tags = task.tags.ids(dictionary)
        sign = None if unknown is None else HELD
        text = dictionary.string(tokens, None, reference, extra_symbols_to_ignore=tags, unk_string=sign)
        following = iter(unknown or ())
        text = re.sub(HELD, lambda _: next(following), text) if unknown is not None else text
        text = data_utils.post_process(text, cfg.common_eval.post_process)
        text = task.bpe.decode(text) if task.bpe is not None else text
        return one_line(task.tokenizer.decode(text) if task.tokenizer is not None else text)

    return to_text
