"""Decoding and scoring test sets: BLEU, chrF, and systems compared on the same sentences."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from sacrebleu.metrics import BLEU, CHRF

from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference import system as inference
from fairseq_ccpr.inference.confidence import ScoredText, token_ends
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.inference.unknown import OFF
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import check_data_bin, has_subset
from fairseq_ccpr.text.languages import script_of
from fairseq_ccpr.timing import progress_bar, progress_over

BASE, RETRIEVAL = "base", "retrieval"
OTHER_SUBSET = "valid"
# What sacrebleu divides a script without spaces into words with. Others of these are divided into characters.
TOKENIZERS = {**dict.fromkeys(("Hani", "Hans", "Hant"), "zh"), "Jpan": "ja-mecab", "Kore": "ko-mecab"}
CHARACTERS = "char"
MEAN = "the mean of BLEU and chrF"
UNSPACED = {"Thai", "Laoo", "Khmr", "Mymr", "Tibt", "Bali", "Java", "Lana", "Talu", "Hira", "Kana", "Yiii"}


logger = logging.getLogger(__name__)


def compare_decoding(system: System) -> Decodings:
    """Decode a subset with fairseq's plain generator and, if there is one, the retrieving one, in turns."""
    load_subset(system.cfg, system.task)
    generators = {BASE: system.generator(retrieve=False)}
    if system.ensemble is not None:
        generators[RETRIEVAL] = system.generator()
    return decode(system.cfg, system.task, system.models, generators)


@cache
def bleu_tokenizer(language: str) -> str:
    """Choose sacrebleu's tokenizer for a target language, by its script, among those that are installed.

    >>> [bleu_tokenizer(one) for one in ("zh-Hant", "cmn", "zho_Hans", "tha", "my_MM", "de", "zh-Latn", "")]
    ['zh', 'zh', 'zh', 'char', 'char', '13a', '13a', '13a']
    """
    script = script_of(language)
    name = TOKENIZERS.get(script, CHARACTERS if script in UNSPACED else BLEU.TOKENIZER_DEFAULT)
    try:
        BLEU(tokenize=name)
    except (RuntimeError, ImportError):  # as sacrebleu has it
        return CHARACTERS
    return name


@dataclass(frozen=True)
class TranslationScores:
    """Scores of one system's output, and how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str

    @property
    def metric(self) -> str:
        """Name the score that systems are chosen by.

        BLEU alone favours text that is copied in long runs, which chrF does not; BLEU of characters says
        little that chrF does not.
        """
        return "chrF" if f"|tok:{CHARACTERS}|" in self.bleu_signature else MEAN

    @property
    def deciding(self) -> float:
        """Return the score that `metric` names, 0 to 100."""
        return (self.bleu + self.chrf) / 2 if self.metric == MEAN else self.chrf


def score(hypotheses: list[str], references: list[str], language: str = "") -> TranslationScores:
    """Score detokenised text of a language by BLEU and chrF, one reference each."""
    metrics = BLEU(tokenize=bleu_tokenizer(language)), CHRF()
    results = [round(metric.corpus_score(hypotheses, [references]).score, 2) for metric in metrics]
    return TranslationScores(*results, *(metric.get_signature().format() for metric in metrics))


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """Score one sentence by chrF."""
    return CHRF().sentence_score(hypothesis, [reference]).score


@dataclass
class SystemOutput:
    """The output of one system, by sentence id, and how long it took."""

    hypotheses: dict[int, str] = field(default_factory=dict)
    ids: dict[int, np.ndarray] = field(default_factory=dict)  # of their subwords, and of the end
    scores: dict[int, np.ndarray] = field(default_factory=dict)  # log p of each
    seconds: float = 0.0
    tokens: int = 0

    def after(self, before: SystemOutput) -> SystemOutput:
        """Join it with that for other sentences; time and tokens are those of these alone."""
        return replace(
            self,
            hypotheses=before.hypotheses | self.hypotheses,
            ids=before.ids | self.ids,
            scores=before.scores | self.scores,
        )

    @property
    def tokens_per_second(self) -> float:
        """Target tokens of the best hypotheses per second."""
        return self.tokens / self.seconds


@dataclass
class Decodings:
    """The outputs of several systems for one test set."""

    systems: dict[str, SystemOutput]
    sources: dict[int, str] = field(default_factory=dict)
    references: dict[int, str] = field(default_factory=dict)
    language: str = ""  # of the references
    reference_ids: dict[int, np.ndarray] = field(default_factory=dict)
    copied: dict[str, float] = field(default_factory=dict)  # of subwords, see `Trial.copied`
    to_scored: Any = None  # makes a `ScoredText` of ids and scores, without unknown words

    def after(self, before: Decodings) -> Decodings:
        """Join them with other sentences as the same systems translated them; time is that of these alone."""
        return replace(
            self,
            systems={name: one.after(before.systems[name]) for name, one in self.systems.items()},
            sources=before.sources | self.sources,
            references=before.references | self.references,
            reference_ids=before.reference_ids | self.reference_ids,
        )

    def scores(self, name: str) -> TranslationScores:
        """Score one system by BLEU and chrF."""
        ids = sorted(self.references)
        hypotheses = [self.systems[name].hypotheses[i] for i in ids]
        return score(hypotheses, [self.references[i] for i in ids], self.language)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per system: scores, seconds, tokens per second, and these in proportion to the base's."""
        base = self.systems[BASE]
        return [
            {
                "system": name,
                **asdict(self.scores(name)),
                "seconds": round(system.seconds, 1),
                "tokens_per_second": round(system.tokens_per_second),
                "speed": round(system.tokens_per_second / base.tokens_per_second, 3),
            }
            for name, system in self.systems.items()
        ]

    def examples(self, count: int) -> list[int]:
        """Choose the sentences that retrieval brought nearest to the reference, by chrF gained."""
        base, retrieval = (self.systems[name].hypotheses for name in (BASE, RETRIEVAL))
        gains = {
            i: sentence_chrf(retrieval[i], reference) - sentence_chrf(base[i], reference)
            for i, reference in self.references.items()
            if base[i] != retrieval[i]
        }
        return sorted(gains, key=lambda i: (-gains[i], i))[:count]


def load(cfg: Any) -> tuple[RetrievalTask, list[Any]]:
    """Load the task, the subset `--gen-subset`, and the models, as fairseq-generate does."""
    task, models = inference.load(cfg)
    load_subset(cfg, task)
    return task, models


def load_subset(cfg: Any, task: RetrievalTask) -> None:
    """Load the subset `--gen-subset`, which is decoded as fairseq-generate does."""
    if cfg.generation.replace_unk not in (None, OFF):
        raise ConfigurationError(
            f"--replace-unk copies unknown characters of a text, and {cfg.task.data} has them no longer: "
            "leave it out"
        )
    task.load_dataset(cfg.dataset.gen_subset)


def batches(cfg: Any, task: Any, models: list[Any], at_least: int = 1) -> Any:
    """Iterate over the subset in fairseq's batches, on the models' device, without sentences longer than they take.

    Args:
        at_least: batches, if need be of fewer sentences than the options say.
    """
    dataset = task.dataset(cfg.dataset.gen_subset)
    if dataset.tgt is None:
        raise ConfigurationError(
            f"{cfg.task.data} has '{cfg.dataset.gen_subset}' in {task.cfg.source_lang} alone, and to measure takes the "
            f"{task.cfg.target_lang} side as well: prepare both, or name another subset"
        )
    most, longest = -(-len(dataset) // at_least), [m.max_positions() for m in models]
    made = task.get_batch_iterator(
        dataset=dataset,
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=min(cfg.dataset.batch_size or most, most),
        max_positions=utils.resolve_max_positions(task.max_positions(), *longest),
        ignore_invalid_inputs=True,
    )
    on_gpu = next(models[0].parameters()).is_cuda
    total, quiet = sum(map(len, made.frozen_batches)), cfg.common.no_progress_bar
    with progress_bar(cfg.dataset.gen_subset, "sentence", total=total, quiet=quiet) as bar:
        for sample in made.next_epoch_itr(shuffle=False):
            yield utils.move_to_cuda(sample) if on_gpu else sample
            bar.update(len(sample["id"]))


@dataclass(frozen=True)
class OtherText:
    """A subset of another DATA_BIN."""

    data_bin: Path
    subset: str

    @classmethod
    def parse(cls, word: str) -> OtherText:
        """Read DATA_BIN or DATA_BIN:SUBSET."""
        folder, colon, subset = word.rpartition(":")
        if colon and "/" not in subset and not Path(word).exists():
            return cls(Path(folder), subset)
        return cls(Path(word), OTHER_SUBSET)

    @property
    def place(self) -> tuple[Path, str]:
        """An identifier of the text that does not depend on the name of its folder."""
        return self.data_bin.resolve(), self.subset

    @property
    def name(self) -> str:
        return f"{self.data_bin}:{self.subset}"

    def samples(self, system: System, at_least: int = 1) -> list[Any]:
        """Read its batches, see `batches`."""
        task = self.check(system)
        task.load_dataset(self.subset)
        cfg = copy.deepcopy(system.cfg)
        cfg.dataset.gen_subset = self.subset
        return list(batches(cfg, task, system.models, at_least))

    def check(self, system: System) -> Any:
        """Return the task over its folder, once it is seen to be readable: before any long work begins."""
        task = system.task.with_data(self.data_bin)
        check_data_bin(self.data_bin, task.cfg.source_lang, task.cfg.target_lang)
        sides = (task.cfg.source_lang, task.source_dictionary), (task.cfg.target_lang, task.target_dictionary)
        for language, expected in sides:
            found = task.load_dictionary(str(self.data_bin / f"dict.{language}.txt"))
            if found.symbols != expected.symbols:
                digests = (
                    fingerprint.short(fingerprint.of_strings(one.symbols)) for one in (found, expected)
                )
                raise ConfigurationError(
                    f"--also {self.data_bin} has another dictionary for {language} than the model ({', '.join(digests)}): "
                    "prepare it with the model's"
                )
        if not has_subset(task, self.subset):
            raise ConfigurationError(
                f"--also {self.data_bin} has no subset {self.subset}: name another, {self.data_bin}:SUBSET"
            )
        return task


def other_texts(words: list[str], home: OtherText) -> list[OtherText]:
    """Read the texts that `--also` names, each once; skip the held-out text, which is not of another domain."""
    texts = {home.place: home}
    for text in map(OtherText.parse, words):
        if text.place in texts:
            logger.warning("--also %s is named twice, or is what is tuned on: it counts once", text.name)
        texts.setdefault(text.place, text)
    return list(texts.values())[1:]


def decode(
    cfg: Any, task: Any, models: list[Any], generators: dict[str, Any], samples: list[Any] | None = None
) -> Decodings:
    """Decode the subset, or some batches of it, with every generator.

    They take turns batch by batch, so that other load on the machine affects all of them equally.

    Args:
        samples: batches; none: all, after one to warm up.
    """
    decodings = Decodings({name: SystemOutput() for name in generators}, language=task.cfg.target_lang)
    to_text = inference.detokeniser(cfg, task)
    decodings.to_scored = partial(_scored, task, to_text)
    given = batches(cfg, task, models)
    if samples is not None:
        given = progress_over(
            samples, "decoding", "sentence", lambda one: len(one["id"]), cfg.common.no_progress_bar
        )
    for number, sample in enumerate(given):
        ids = sample["id"].tolist()
        for row, i in enumerate(ids):
            decodings.sources[i] = to_text(task.source_dictionary, sample["net_input"]["src_tokens"][row])
            decodings.references[i] = to_text(task.target_dictionary, sample["target"][row], True)
            reference = sample["target"][row].cpu().numpy()
            decodings.reference_ids[i] = reference[reference != task.target_dictionary.pad()]
        if number == 0 and samples is None:  # warm up
            for generator in generators.values():
                task.inference_step(generator, models, sample)
        for name, generator in generators.items():
            start = time.perf_counter()
            best = [hypotheses[0] for hypotheses in task.inference_step(generator, models, sample)]
            system = decodings.systems[name]
            system.tokens += sum(len(one["tokens"]) for one in best)
            texts = [to_text(task.target_dictionary, one["tokens"]) for one in best]
            system.seconds += time.perf_counter() - start
            system.hypotheses |= dict(zip(ids, texts))
            system.ids |= {i: one["tokens"].cpu().numpy() for i, one in zip(ids, best)}
            system.scores |= {i: one["positional_scores"].cpu().numpy() for i, one in zip(ids, best)}
    return decodings


def _scored(task: Any, to_text: Callable[..., str], ids: np.ndarray, scores: np.ndarray) -> ScoredText:
    dictionary = task.target_dictionary
    counted = ~np.isin(ids, [*task.tags.ids(dictionary)])
    tokens, spell = ids[counted][:-1].tolist(), partial(to_text, dictionary, unknown=repeat(""))
    text = spell(torch.tensor(tokens, dtype=torch.int64))
    return ScoredText.of(text, token_ends(spell, tokens, text), scores[counted].tolist())
