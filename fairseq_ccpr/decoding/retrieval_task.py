"""Retrieval as a part of fairseq's translation tasks: `decoding.task` mixes it into each."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from fairseq.data import LanguagePairDataset
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import Tensor

from fairseq_ccpr.datastore.learned import ReadAs
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import digest_options
from fairseq_ccpr.datastore.text import Counts, TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import Datastore, read_tuned, tuned_confidence, tuned_trust
from fairseq_ccpr.decoding.beam_search import AlignedBeamGenerator, BeamGenerator, WithoutText, translated_by
from fairseq_ccpr.decoding.breakdown import RetrievalLog
from fairseq_ccpr.decoding.correction_memory import CorrectionMemory
from fairseq_ccpr.decoding.ensemble import TEXTS, RetrievalEnsemble, RetrievalScorer
from fairseq_ccpr.decoding.glossary_memory import GlossaryCandidates, GlossaryMemory
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory, why_not_learned
from fairseq_ccpr.decoding.memory import Memory
from fairseq_ccpr.decoding.options import (
    NO_TRUST,
    RETRIEVAL,
    MixtureSettings,
    PhraseSettings,
    RetrievalConfig,
    StoreSettings,
    TextSettings,
    TokenRetrievalSettings,
    read_settings,
)
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, load_encoder, query_segmentation
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.decoding.remote_answers import RemoteAnswers
from fairseq_ccpr.decoding.text_memory import LearnedTargets, TextMemory, TextWeight
from fairseq_ccpr.decoding.token_memory import TokenMemory, WeightPolicy, confidence_weight, name_of
from fairseq_ccpr.decoding.token_retriever import LearningRetriever, Retriever, TokenRetriever
from fairseq_ccpr.decoding.trust import LearnedTrust, LoadedTrust, Trained, Trust, load_trust, trained_with
from fairseq_ccpr.device import BF16, FP16, FP32, choose_precision
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.models.checkpoint import Undrawn
from fairseq_ccpr.models.key_layer import KeyCapture
from fairseq_ccpr.models.step_decoder import is_plain
from fairseq_ccpr.paths import literal, split_paths
from fairseq_ccpr.settings import read_options
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import check_whole, parts_of, what_is_there
from fairseq_ccpr.storage.fingerprint import hash_bytes
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords, split_text
from fairseq_ccpr.text.glossary import Glossary
from fairseq_ccpr.text.languages import LANGUAGE_PAIR, LanguageTags
from fairseq_ccpr.text.pairs import tidy

logger = logging.getLogger(__name__)

WEIGHT_ARGUMENTS = 4  # of a `WeightPolicy`


class RetrievalTask(FairseqTask):
    """What makes a translation task of fairseq one whose generators retrieve.

    It comes before fairseq's class in the bases of a task, which calls `open_datastore` at the end of its
    `__init__`.

    Attributes:
        tags: the language tags of the model.
        precision: that beam search computes in.
    """

    name: str  # of the task, for fairseq's --task
    tags: LanguageTags = LanguageTags()
    precision: str = FP32
    retriever_class: Callable[[TokenDatastore, torch.device], Retriever] = TokenRetriever
    token_weight: WeightPolicy = staticmethod(confidence_weight)
    trust_class: type[Trust] = LearnedTrust
    trusted_classes: Mapping[str, str] = MappingProxyType({})  # that trust was trained with
    calibrated: Mapping[str, Any] | str | None = None  # confidence, by tuning; why none; None: not tuned
    identities: Sequence[str] = ()  # fingerprints of its models, where these are known

    def open_datastore(self, cfg: RetrievalConfig) -> None:
        """Open the datastore of the options, where there is one, and read the settings.

        Raises:
            ConfigurationError: options that do not go together.
            DatastoreError: there is no such datastore, or it is for another model or other languages.
        """
        folders = find_parts(cfg.datastore, self.tags.languages)
        timeout = read_options(StoreSettings, cfg).timeout
        self.token_datastore = TokenDatastore(folders["token"], timeout) if "token" in folders else None
        self.phrase_datastore = PhraseDatastore(folders["phrase"], timeout) if "phrase" in folders else None
        self.text_datastore = TextDatastore(folders["text"]) if "text" in folders else None
        words = fingerprint.of_strings(self.target_dictionary.symbols)
        if self.token_datastore is not None:
            self.token_datastore.check_fingerprint("target_dictionary", words, "the data folder")
        if self.text_datastore is not None:
            language = self.tags.languages.rpartition("-")[2] if self.tags.languages else None
            self.text_datastore.check_vocabulary(words, language)
        tuned, self.trust, self.trained = self._read_tuned(cfg)
        self.settings = read_settings(cfg, self.parts, tuned)
        phrases = self.settings.get(PhraseSettings)
        trusted = self.trust is None or PhraseMemory.name in self.trust.memories
        if phrases is not None and phrases.lambda_ > 0 and not trusted:
            raise ConfigurationError(
                f"--phrases-lambda is {phrases.lambda_:g}, but tuning left phrases out and learned trust in "
                "the tokens alone: give --trust none, or tune again"
            )
        self.glossary = Glossary(Path(cfg.glossary)) if cfg.glossary else None
        self.log = RetrievalLog(Path(cfg.tokens_log), self.target_dictionary) if cfg.tokens_log else None
        self.bpe = self.tokenizer = None
        # digests
        self.splitting: dict[str, str | None] = {name: digest_options(None) for name in ("tokenizer", "bpe")}

    def _read_tuned(self, cfg: RetrievalConfig) -> tuple[dict[str, dict[str, Any]], Trust | None, Trained]:
        if cfg.trust is not None and cfg.trust != NO_TRUST:
            trust, trained, described = self._load_trust(Path(cfg.trust))
            return {"text": {"alpha": 0.0}, **described.settings}, trust, trained
        tuned = {} if cfg.untuned else read_tuned(self.parts)
        known = {(kind.PREFIX, one.name) for kind in RETRIEVAL for one in fields(kind)}
        if unknown := [
            name for prefix, values in tuned.items() for name in values if (prefix, name) not in known
        ]:
            logger.warning(
                "the datastore was tuned by another version, with settings unknown to this one (%s): the "
                "tuned settings are not used; tune again",
                ", ".join(unknown),
            )
        if unknown or not tuned:
            return {}, None, {}
        logger.info(
            "settings that are not given are those that tuning left with the datastore (--untuned: defaults)"
        )
        path = tuned_trust(self.parts) if cfg.trust is None else None
        self.calibrated = tuned_confidence(self.parts) if cfg.trust is None else None
        if path is None:
            return tuned, None, {}
        trust, trained, _ = self._load_trust(path)
        return tuned, trust, trained

    def _load_trust(self, path: Path) -> LoadedTrust:
        loaded, policy = load_trust(path, self.parts, self.trust_class), name_of(self._policy)
        if loaded.described.weight not in ("", policy):
            logger.warning(
                "%s was trained with the weight %s, and --task has %s: tune again with this --task, or give "
                "--trust none",
                path,
                loaded.described.weight,
                policy,
            )
        self.trusted_classes = loaded.described.classes
        return loaded

    @property
    def parts(self) -> dict[str, Datastore]:
        parts = {"token": self.token_datastore, "phrase": self.phrase_datastore, "text": self.text_datastore}
        return {name: part for name, part in parts.items() if part is not None}

    def with_data(self, data_bin: Path) -> Any:
        task = copy.copy(self)
        task.cfg, task.datasets, task.dataset_to_epoch_iter = copy.copy(self.cfg), {}, {}
        task.cfg.data = literal(str(data_bin)) if isinstance(task.cfg, DictConfig) else str(data_bin)
        return task

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Load a subset; `alone=False` if those that continue it, such as `test1`, are read too."""
        if kwargs.pop("alone", not kwargs.get("combine")) and (others := parts_of(self, split)[1:]):
            logger.warning(
                "%s holds %s beside '%s', and only '%s' is read here: name another with --gen-subset (of "
                "tune, --subset)",
                self.cfg.data,
                ", ".join(others),
                split,
                split,
            )
        try:
            check_whole(self, split)
            super().load_dataset(split, *args, **kwargs)
            if len(loaded := self.datasets[split]):
                loaded[len(loaded) - 1]  # which a truncated file has lost
        except FileNotFoundError as error:
            if "Dataset not found" not in str(error):
                raise
            raise ConfigurationError(
                f"{self.cfg.data} has no subset '{split}'{what_is_there(self, split)}: prepare the data with "
                f"--{split.rstrip('0123456789')}, or name another subset with --gen-subset (of tune, "
                "--subset)"
            ) from None
        except (AssertionError, ValueError) as error:
            raise ConfigurationError(
                f"{self.cfg.data}: the files of '{split}' are damaged or truncated "
                f"({str(error).splitlines()[0]}): copy or prepare them again"
            ) from None

    @classmethod
    def load_dictionary(cls, filename: str) -> Any:
        try:
            return super().load_dictionary(filename)
        except OSError:
            raise
        except Exception as error:  # fairseq raises no other for a wrong encoding
            raise ConfigurationError(
                f"{filename} is no dictionary of fairseq ({str(error).splitlines()[0]}): copy it, or "
                "prepare the data, again"
            ) from None

    def source_subwords(self, tokens: Tensor) -> np.ndarray:
        """Return the subwords of a source, int64 [L] -> int32 [L'], without padding, tags and its end."""
        found = tokens.cpu().numpy()
        return found[~np.isin(found, self._markers)].astype(np.int32)

    @cached_property
    def _markers(self) -> np.ndarray:
        dictionary = self.source_dictionary
        return np.array([dictionary.pad(), dictionary.eos(), *self.tags.ids(dictionary)])

    def read_as(self, text: str) -> ReadAs:
        """Hash what the model reads as a source: texts that it reads alike are one source."""
        subwords = " ".join(split_text(tidy(text), (self.tokenizer, self.bpe)).split())
        ids = self.source_dictionary.encode_line(subwords, add_if_not_exist=False)
        return ReadAs(hash_bytes(subwords.encode()), tuple(self.source_subwords(ids).tolist()))

    def inference_dataset(self, tokens: list[Tensor]) -> Any:
        """Make a dataset of sources as `encode_line` gives them, with the model's tags."""
        dataset = self.build_dataset_for_inference(tokens, [len(ids) for ids in tokens])
        dataset.shuffle = False
        dataset.left_pad_source, dataset.left_pad_target = self.cfg.left_pad_source, self.cfg.left_pad_target
        return dataset

    def pair_dataset(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """Make a dataset of pairs as `encode_line` gives them, with the model's tags on both sides."""
        dictionary, encoded = self.target_dictionary, self.inference_dataset(sources)
        tagged = [self.tags.tagged(ids, dictionary) for ids in targets]
        return LanguagePairDataset(
            encoded.src,
            encoded.src_sizes,
            self.source_dictionary,
            tagged,
            [len(ids) for ids in tagged],
            dictionary,
            left_pad_source=self.cfg.left_pad_source,
            left_pad_target=self.cfg.left_pad_target,
            shuffle=False,
            eos=self.tags.end_of(dictionary),
        )

    def build_base_generator(self, models: list[Any], args: Any, **kwargs: Any) -> Any:
        """fairseq's own generator, without retrieval."""
        generator = super().build_generator(models, args, **kwargs)
        for model in models:
            forget_beam(model)
        return generator

    def build_generator(self, models: list[Any], args: Any, **kwargs: Any) -> Any:
        """fairseq's own generator or scorer, with an ensemble that retrieves in place of the plain one."""
        generator = self.build_base_generator(models, args, **kwargs)
        scoring = getattr(args, "score_reference", False)
        if (wanted := getattr(self.cfg, "precision", None) or FP32) == FP16:
            raise ConfigurationError("--precision fp16 is for fairseq-ccpr translate: give fairseq's --fp16")
        self.choose_precision(FP32 if scoring else wanted, models)
        ensemble = self.build_ensemble(models)
        ensemble.temperature = getattr(args, "temperature", 1.0)
        logger.info("retrieval signature: %s", ensemble.signature())
        if scoring:
            return RetrievalScorer(
                ensemble,
                self.target_dictionary,
                compute_alignment=getattr(args, "print_alignment", False),
                eos=generator.eos,
                symbols_to_strip_from_output=generator.symbols_to_strip_from_output,
            )
        self.equip(generator, ensemble)
        return generator

    def equip(self, generator: Any, ensemble: RetrievalEnsemble) -> None:
        """Give a generator of fairseq an ensemble that retrieves, and a faster beam search with equal results."""
        generator.model = ensemble
        ours = {SequenceGenerator: BeamGenerator, SequenceGeneratorWithAlignment: AlignedBeamGenerator}
        generator.__class__ = ours.get(type(generator), type(generator))
        if isinstance(generator, BeamGenerator):
            generator.without_text = WithoutText.beside(generator)

    def get_batch_iterator(self, *args: Any, required_batch_size_multiple: int = 1, **kwargs: Any) -> Any:
        """Iterate over all sentences.

        fairseq-generate requires batches of a multiple of 8 sentences, and fairseq then drops the remainder.
        """
        return super().get_batch_iterator(*args, required_batch_size_multiple=1, **kwargs)

    def inference_step(self, generator: Any, models: list[Any], sample: dict[str, Any], **kwargs: Any) -> Any:
        """Generate for a batch, and log what retrieval did where `--tokens-log` wants it."""
        given = sample
        if isinstance(getattr(generator, "search", None), DiverseBeamSearch):
            # fairseq's diverse search takes a sentence's id for its place in the batch, and fails where they
            # differ.
            given = {name: value for name, value in sample.items() if name != "id"}
        if TEXTS in sample and isinstance(getattr(generator, "model", None), RetrievalEnsemble):
            # of which it has no more
            given = {**given, "net_input": {**sample["net_input"], TEXTS: sample[TEXTS]}}
        hypotheses = super().inference_step(generator, models, given, **kwargs)
        ensemble = getattr(generator, "model", None)
        if self.log is not None and isinstance(ensemble, RetrievalEnsemble) and ensemble.memories:
            tokens = [best[0]["tokens"] for best in hypotheses]
            self.log.write(translated_by(generator, hypotheses), sample, tokens)
        return hypotheses

    def build_tokenizer(self, args: Any) -> Any:
        self.tokenizer, self.splitting["tokenizer"] = super().build_tokenizer(args), digest_options(args)
        return self.tokenizer

    def build_bpe(self, args: Any) -> Any:
        """Build the subword model of `--bpe`, and keep it: phrases are made of text."""
        self.bpe, self.splitting["bpe"] = super().build_bpe(args), digest_options(args)
        return self.bpe

    def source_text(self, tokens: Tensor) -> str:
        """Return the text of a source sentence, int64 [S], for a memory of your own."""
        return self._subwords.recover(self.source_dictionary, tokens)

    def target_tokens(self, text: str) -> list[int]:
        """Return the tokens that the decoder writes words with inside a sentence, for a memory of your own.

        They are none where it cannot write them. As `source_text`, it works from the first sentence on:
        fairseq-generate builds its generator before it reads `--bpe` and `--tokenizer`.
        """
        return self._subwords.written(text)

    def build_ensemble(self, models: list[Any]) -> RetrievalEnsemble:
        memories = self.build_memories(models)
        if not memories:
            raise ConfigurationError(f"--task {self.name} needs --datastore DIR, made by fairseq-ccpr build")
        return self.join(models, memories)

    def join(self, models: list[Any], memories: list[Memory]) -> RetrievalEnsemble:
        """Join models and memories in one ensemble, with the trust that was trained in them.

        Raises:
            ConfigurationError: trust was trained in other memories.
        """
        trust = self.trust.to(next(models[0].parameters()).device) if self.trust is not None else None
        ensemble = self.alone(models).with_memories(memories, trust)
        voting = {memory.name: list(memory.features) for memory in ensemble.voting}
        if trust is not None and list(trust.memories) != list(voting):
            raise ConfigurationError(
                f"trust was trained in {' and '.join(trust.memories)}, and --task {self.name} has "
                f"{' and '.join(voting)}: tune again with this --task, or give --trust none"
            )
        if isinstance(trust, LearnedTrust) and (
            other := [one for one in voting if trust.memories[one] != voting[one]]
        ):
            raise ConfigurationError(
                f"trust was trained with other features of {' and '.join(other)} than --task {self.name} "
                "has: tune again with this --task, or give --trust none"
            )
        ensemble.identity = " and ".join(map(fingerprint.short, self._identified(models)))
        found = trained_with(ensemble.identity, memories)
        for what, known in self.trusted_classes.items():
            if found.get(what, known) != known:
                logger.warning(
                    "trust was trained with the %s %s, and this is %s: tune again, or give --trust none",
                    what,
                    known,
                    found[what],
                )
        return ensemble

    def _identified(self, models: list[Any]) -> Sequence[str]:
        return self.identities or [fingerprint.of_parameters(one.named_parameters()) for one in models]

    def alone(self, models: list[Any]) -> RetrievalEnsemble:
        """Make an ensemble of models without memories."""
        dictionary = self.target_dictionary
        ensemble = RetrievalEnsemble(models, [], dictionary.pad(), self.settings[MixtureSettings])
        ensemble.forced, ensemble.end = self.tags.forced, self.tags.end_of(dictionary)
        ensemble.precision = self.precision
        return ensemble

    def choose_precision(self, wanted: str, models: list[Any]) -> None:
        """Choose the precision to translate in with models, see `device.choose_precision`."""
        plain, device = all(map(is_plain, models)), next(models[0].parameters()).device
        if (own := next(models[0].parameters()).dtype) != torch.float32:  # as fairseq's options have it
            self.precision = choose_precision(FP16 if own == torch.float16 else BF16, device, 0)
            return
        if wanted == BF16 and device.type == "cpu" and not plain:
            logger.warning(
                "bf16 on a CPU is for fairseq's own Transformer decoders: this model computes in fp32"
            )
            wanted = FP32
        weights = models[0].decoder.output_projection.weight.numel() if plain else 0
        self.precision = choose_precision(wanted, device, weights)

    def build_memories(self, models: list[Any]) -> list[Memory]:
        """Build the memories, in the order in which they act; a task of your own may add some."""
        memories: list[Memory] = []
        learned, end = None, self.tags.end_of(self.target_dictionary)
        # before keys, which a CPU can search where a GPU has no room for them
        if self.text_datastore is not None:
            counts = self.text_datastore.open_counts(next(models[0].parameters()).device)
        if self.token_datastore is not None:
            memories.append(tokens := self._token_memory(models, self.token_datastore))
            learned = tokens.learned if self._learning_phrases is not None else None
        if self.phrase_datastore is not None and not self.without_phrases:
            memories.append(replace(self._phrase_memory(models, self.phrase_datastore), learned=learned))
        if self.text_datastore is not None:
            both = self.token_datastore is not None
            learned_text = tokens.learned if both else None
            memories.append(self._text_memory(self.text_datastore, counts, learned_text))
        if self.glossary is not None:
            candidates = GlossaryCandidates(self.glossary, self._decoder_subwords, self.source_dictionary)
            unknown, device = self.target_dictionary.unk(), next(models[0].parameters()).device
            memories.append(GlossaryMemory.build(candidates, end, unknown, device))
        # Tuning may have set lambda to 0, and what was corrected since then counts all the same.
        if (
            self.token_datastore is not None
            and tokens.learned is not None
            and getattr(self.cfg, "tokens_lambda", None) != 0
        ):
            memories.append(CorrectionMemory(tokens.learned, self.source_subwords, self.read_as, end))
        return memories

    def _text_memory(
        self, datastore: TextDatastore, counts: Counts, learned: LearnedMemory | LearnedEntries | None
    ) -> TextMemory:
        dictionary, device = self.target_dictionary, counts.grams.device
        ids = {dictionary.pad(), dictionary.bos(), dictionary.unk(), *self.tags.ids(dictionary)}
        special = torch.tensor(sorted(ids), device=device)
        with Undrawn():
            weight = TextWeight()
        weight.load_state_dict(self.trained.get(TextMemory.name, weight.state_dict()))
        weight = weight.requires_grad_(False).to(device)
        end = self.tags.end_of(dictionary)
        targets = LearnedTargets(datastore, counts, end) if learned is not None else None
        return TextMemory(
            datastore, counts, self.settings[TextSettings], weight, special, end, learned, targets
        )

    def _token_memory(self, models: list[Any], datastore: TokenDatastore) -> TokenMemory:
        prints = self._identified(models)
        expected = datastore.section.fingerprints["model"]
        if expected not in prints:
            datastore.check_fingerprint("model", prints[0], "--path")
        member = models[prints.index(expected)]
        capture = KeyCapture(member, datastore.section.key_layer)
        device = next(member.parameters()).device
        retriever = self.retriever_class(datastore, device)
        if missing := [name for name in ("datastore", "search", "describe") if not hasattr(retriever, name)]:
            raise ConfigurationError(
                f"the retriever {type(retriever).__name__} has no {' and no '.join(missing)}: give it "
                "datastore, search and describe, as fairseq_ccpr.Retriever has them"
            )
        learned = LearnedMemory(datastore, device, self._learning_phrases)
        if not learned.entries.empty and not isinstance(retriever, LearningRetriever):
            raise ConfigurationError(
                f"the retriever {type(retriever).__name__} cannot search the {len(learned.store.pairs):,} "
                f"pairs that were learned alongside {datastore.directory}: move {learned.store.folder} "
                "away, or give the retriever the methods of fairseq_ccpr.LearningRetriever, project and "
                "with_learned"
            )
        remote = None
        if (store := datastore.section.store) is not None:
            remote = RemoteAnswers(self.settings[StoreSettings], "tokens", store)
            if isinstance(retriever, TokenRetriever):
                remote.ask(retriever.index.check)
        return TokenMemory(
            capture,
            retriever,
            self.settings[TokenRetrievalSettings],
            self.target_dictionary.unk(),
            self._policy,
            learned,
            remote,
            self.source_subwords,
        )

    @property
    def _policy(self) -> WeightPolicy:
        """The weight of the tokens: a plug-in's function, static method, or method of the task."""
        policy: Any = inspect.getattr_static(self, "token_weight")
        as_function = (
            inspect.isfunction(policy) and len(inspect.signature(policy).parameters) == WEIGHT_ARGUMENTS
        )
        return policy if as_function else self.token_weight

    @property
    def without_phrases(self) -> bool:
        """Whether phrases are not retrieved, since tuning left them a weight of 0."""
        both = self.token_datastore is not None and self.phrase_datastore is not None
        weighed = self.trust is not None and PhraseMemory.name in self.trust.memories
        return both and not weighed and self.settings[PhraseSettings].lambda_ == 0

    @property
    def unused(self) -> list[tuple[PhraseSettings, tuple[str, ...]]]:
        """The settings of memories that these leave out, and which of their fields tuning writes."""
        return [(self.settings[PhraseSettings], PhraseMemory.tuned)] if self.without_phrases else []

    @property
    def _learning_phrases(self) -> PhraseDatastore | None:
        tokens, phrases = self.token_datastore, self.phrase_datastore
        if tokens is None or phrases is None or why_not_learned(tokens.directory, phrases):
            return None
        return phrases

    def _phrase_memory(self, models: list[Any], datastore: PhraseDatastore) -> PhraseMemory:
        device, settings = next(models[0].parameters()).device, self.settings[PhraseSettings]
        encoder = load_encoder(datastore, settings.encoder, self.precision == BF16)
        segmentation = query_segmentation(datastore, settings.threshold, settings.segmentation)
        retriever = PhraseRetriever(
            datastore,
            encoder,
            segmentation,
            settings.k,
            settings.min_similarity,
            device,
            self.settings[StoreSettings],
        )
        candidates = PhraseCandidates(retriever, self._decoder_subwords, self.source_dictionary)
        votes = PhraseVotes()
        trained = self.trained.get(PhraseMemory.name, votes.state_dict())
        if {name: one.shape for name, one in trained.items()} != {
            name: one.shape for name, one in votes.state_dict().items()
        }:
            raise ConfigurationError(
                "the votes of phrases were trained by a version that weighed phrases by other features: tune again, or give "
                "--trust none"
            )
        votes.load_state_dict(trained)
        return PhraseMemory(candidates, settings, votes.requires_grad_(False).to(device), device)

    @cached_property
    def _subwords(self) -> DecoderSubwords:
        return self._decoder_subwords()

    def _decoder_subwords(self) -> DecoderSubwords:
        """Known at the first sentence: fairseq builds its generator before `--bpe` and `--tokenizer`."""
        digests = [digest for digest in self.splitting.values() if digest is not None]
        model = fingerprint.of_strings(digests) if len(digests) == len(self.splitting) else None
        return DecoderSubwords(self.tokenizer, self.bpe, self.target_dictionary, self.tags.symbols, model)


def forget_beam(model: Any) -> None:
    """Make the cross-attention of BART models treat each row of a batch separately, as other models do.

    A generator tells it the width of its beam, by which it folds rows into one: wrong for given targets and
    for other beams.
    """
    if hasattr(model, "set_beam_size"):
        model.set_beam_size(1)
        # it was replaced by a function that does nothing
        vars(model.encoder).pop("reorder_encoder_out", None)


def find_parts(datastore: str | None, languages: str | None = None) -> dict[str, str]:
    """Find the folder of each part (token, phrase, text) in one datastore or several, separated as in `--path`.

    Args:
        languages: "de-en", where the model knows several: of token parts of different languages this one's is
            taken.
    """
    found: dict[str, str] = {}
    others: dict[str, str] = {}  # languages of the tokens of folders that are for others
    for folder in split_paths(datastore) if datastore else []:
        manifest = Manifest.read(Path(folder))
        fingerprints = manifest.token.fingerprints if manifest.token is not None else {}
        if (pair := fingerprints.get(LANGUAGE_PAIR, languages)) != languages:
            others[folder] = str(pair)
        for part in (section.PART for section in manifest.parts):
            if part == "token" and folder in others:
                continue
            if part in found:
                raise ConfigurationError(
                    f"--datastore names two {part} parts, in {found[part]} and in {folder}: give one of "
                    "each kind"
                )
            found[part] = folder
    if others and "token" not in found:
        folder, pair = next(iter(others.items()))
        raise DatastoreError(
            f"the tokens of the datastore {folder} are for {pair}, and not for "
            f"{languages or 'a bilingual model'}: give -s and -t as it was built, or build one for these "
            "languages"
        )
    return found
