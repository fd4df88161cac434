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
    knn_temperature: float = field(
        default=10.0,
        metadata={"help": "temperature of the neighbours' distribution; squared distances want about 10 to 100"},
    )


@register_task("translation_retrieval", dataclass=TranslationRetrievalConfig)
class TranslationRetrievalTask(TranslationTask):
    """fairseq's translation task whose generators mix what a datastore says into beam search."""

    retriever_class = TokenRetriever

    def __init__(self, cfg: TranslationRetrievalConfig, src_dict: Any, tgt_dict: Any) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        self.settings = TokenRetrievalSettings(cfg.knn_k, cfg.knn_lambda, cfg.knn_temperature)
        if not cfg.datastore:
            raise ConfigurationError("--task translation_retrieval needs --datastore DIR, made by build_datastore.py")
        self.token_datastore = TokenDatastore(cfg.datastore)
        self.token_datastore.check_fingerprint(
            "target_dictionary", fingerprint.of_strings(tgt_dict.symbols), "the data folder"
        )

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
            sample = {name: value for name, value in sample.items() if name != "id"}
        return super().inference_step(generator, models, sample, **kwargs)

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
