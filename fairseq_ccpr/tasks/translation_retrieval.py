"""`--task translation_retrieval`: translating with a datastore beside the model."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from fairseq import utils
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_ccpr.datastore import fingerprint
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, RetrievalScorer
from fairseq_ccpr.decoding.retrieval_log import RetrievalLog
from fairseq_ccpr.decoding.token_retriever import TokenRetrievalSettings, TokenRetriever
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extraction.loading import check_data_bin
from fairseq_ccpr.models.key_layer import KeyCapture

logger = logging.getLogger(__name__)


@dataclass
class TranslationRetrievalConfig(TranslationConfig):
    """Options of the task, beside those of `translation`."""

    datastore: Optional[str] = field(
        default=None, metadata={"help": "the datastore, a folder made by build_datastore.py"}
    )
    knn_k: int = field(default=8, metadata={"help": "neighbours retrieved for each token"})
    knn_lambda: float = field(
        default=0.5, metadata={"help": "share of the token datastore in the probability of each token, 0 to 1"}
    )
    knn_temperature: Optional[float] = field(
        default=None,
        metadata={
            "help": "temperature of the neighbours' distribution: squared distances want about 10 to 100 (10 by default), "
            "the inner products of an adapter's keys 0.01 to 0.5 (0.05)"
        },
    )
    knn_confidence: bool = field(
        default=False,
        metadata={"help": "scale the share by the neighbours' mean similarity (lambda*); an adapter's keys have it on"},
    )
    no_knn_confidence: bool = field(default=False, metadata={"help": "keep the share fixed for an adapter's keys too"})
    knn_lambda_max: float = field(default=1.0, metadata={"help": "the most that lambda* may be"})
    knn_min_similarity: float = field(
        default=0.0,
        metadata={
            "help": "neighbours no more similar than this, 0 to 1, count as unlike for lambda*: guards other domains"
        },
    )
    knn_log: Optional[str] = field(
        default=None,
        metadata={"help": "file for a line of JSON a token of each best hypothesis: share, probabilities, neighbours"},
    )


@register_task("translation_retrieval", dataclass=TranslationRetrievalConfig)
class TranslationRetrievalTask(TranslationTask):
    """fairseq's translation task whose generators mix what a datastore says into beam search."""

    retriever_class = TokenRetriever

    def __init__(self, cfg: TranslationRetrievalConfig, src_dict: Any, tgt_dict: Any) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        if not cfg.datastore:
            raise ConfigurationError("--task translation_retrieval needs --datastore DIR, made by build_datastore.py")
        self.token_datastore = TokenDatastore(cfg.datastore)
        self.token_datastore.check_fingerprint(
            "target_dictionary", fingerprint.of_strings(tgt_dict.symbols), "the data folder"
        )
        self.settings = _settings(cfg, self.token_datastore)
        self.log = RetrievalLog(Path(cfg.knn_log), tgt_dict) if cfg.knn_log else None

    @classmethod
    def setup_task(cls, cfg: TranslationRetrievalConfig, **kwargs: Any) -> Any:
        """See `FairseqTask.setup_task`."""
        data_bin = Path(utils.split_paths(cfg.data)[0])
        check_data_bin(data_bin, *(lang for lang in (cfg.source_lang, cfg.target_lang) if lang))
        return super().setup_task(cfg, **kwargs)

    def build_base_generator(self, models: list[Any], args: Any, **kwargs: Any) -> Any:
        """fairseq's own generator, without retrieval."""
        return super().build_generator(models, args, **kwargs)

    def build_generator(self, models: list[Any], args: Any, **kwargs: Any) -> Any:
        """fairseq's own generator or scorer, with an ensemble that retrieves in place of the plain one.

        Raises:
            DatastoreError: the datastore belongs to none of `models`.
        """
        generator = self.build_base_generator(models, args, **kwargs)
        scoring = getattr(args, "score_reference", False)
        ensemble = self.build_ensemble(models, 1 if scoring else generator.beam_size)
        logger.info("retrieval signature: %s", ensemble.signature())
        if scoring:
            return RetrievalScorer(
                ensemble, self.target_dictionary, compute_alignment=getattr(args, "print_alignment", False)
            )
        generator.model = ensemble
        return generator

    def get_batch_iterator(self, *args: Any, required_batch_size_multiple: int = 1, **kwargs: Any) -> Any:
        """See `FairseqTask.get_batch_iterator`; but no sentence is left out.

        fairseq-generate asks for batches of a multiple of 8 sentences, and fairseq then drops those that remain in the end.
        """
        return super().get_batch_iterator(*args, required_batch_size_multiple=1, **kwargs)

    def inference_step(self, generator: Any, models: list[Any], sample: dict[str, Any], **kwargs: Any) -> Any:
        """See `FairseqTask.inference_step`."""
        if isinstance(getattr(generator, "search", None), DiverseBeamSearch):
            # fairseq's diverse search takes a sentence's id for its place in the batch, and fails where they differ.
            given = {name: value for name, value in sample.items() if name != "id"}
        else:
            given = sample
        hypotheses = super().inference_step(generator, models, given, **kwargs)
        if self.log is not None and isinstance(getattr(generator, "model", None), RetrievalEnsemble):
            self.log.write(generator.model, sample, [best[0]["tokens"] for best in hypotheses])
        return hypotheses

    def build_ensemble(self, models: list[Any], beam_size: int) -> RetrievalEnsemble:
        """The models and the datastore as one.

        Raises:
            DatastoreError: the datastore belongs to none of `models`.
        """
        member = self._find_member(models)
        capture = KeyCapture(member, self.token_datastore.section.key_layer)
        device = next(member.parameters()).device
        retriever = self.retriever_class(self.token_datastore, self.settings, device)
        return RetrievalEnsemble(models, capture, retriever, self.target_dictionary.pad(), beam_size)

    def _find_member(self, models: list[Any]) -> Any:
        """The model of the ensemble that the datastore was built with."""
        found = [fingerprint.of_parameters(model.named_parameters()) for model in models]
        expected = self.token_datastore.section.fingerprints["model"]
        if expected not in found:
            self.token_datastore.check_fingerprint("model", found[0], "--path")
        return models[found.index(expected)]


def _settings(cfg: TranslationRetrievalConfig, datastore: TokenDatastore) -> TokenRetrievalSettings:
    """The `--knn-*` options, with the defaults that suit the datastore's keys."""
    if cfg.knn_confidence and cfg.no_knn_confidence:
        raise ConfigurationError("--knn-confidence and --no-knn-confidence exclude each other: give one of them")
    unit = datastore.section.projection is not None
    distances = datastore.section.index.metric == "l2"
    temperature = cfg.knn_temperature
    if temperature is None:
        temperature = 0.05 if unit else 10.0
    elif unit and temperature >= 1:
        logger.warning(
            "--knn-temperature %g makes all neighbours count alike: the keys of %s are compared by inner products of at "
            "most 1, which want 0.01 to 0.5", temperature, datastore.directory,
        )  # fmt: skip
    elif distances and temperature < 1:
        logger.warning(
            "--knn-temperature %g leaves only the nearest neighbour: the keys of %s are compared by squared distances, "
            "which want about 10 to 100", temperature, datastore.directory,
        )  # fmt: skip
    confidence = cfg.knn_confidence or (unit and not cfg.no_knn_confidence)
    return TokenRetrievalSettings(
        cfg.knn_k, cfg.knn_lambda, temperature, confidence, cfg.knn_lambda_max, cfg.knn_min_similarity
    )
