"""Options of `--task translation_retrieval`, and the settings that come of them."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks.translation import TranslationConfig

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.phrase_memory import ATTENTION_GATE, CONSENT_GATE, PhraseSettings
from fairseq_ccpr.decoding.phrase_retriever import SKIP, STOP
from fairseq_ccpr.decoding.token_retriever import TokenRetrievalSettings
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import TIMEOUT

logger = logging.getLogger(__name__)

GATES = [CONSENT_GATE, ATTENTION_GATE]


@dataclass
class TranslationRetrievalConfig(TranslationConfig):
    """Options of the task, beside those of `translation`."""

    datastore: Optional[str] = field(
        default=None,
        metadata={
            "help": "the datastore, a folder made by build_datastore.py: its token part, its phrase part, or both; "
            "TOKENS:PHRASES where they are in two"
        },
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
    phrase_encoder: Optional[str] = field(
        default=None,
        metadata={
            "help": "checkpoint of the phrase encoder (the one that the phrase datastore was built with, from there)"
        },
    )
    phrase_k: int = field(
        default=16, metadata={"help": "target phrases retrieved for each phrase of a source sentence"}
    )
    phrase_lambda: float = field(
        default=0.8, metadata={"help": "the most that the phrase datastore has of the probability of a token, 0 to 1"}
    )
    phrase_temperature: float = field(
        default=0.05,
        metadata={"help": "temperature of the similarities of phrases retrieved for the same source phrase"},
    )
    phrase_min_similarity: float = field(
        default=0.3, metadata={"help": "phrases no more similar than this, 0 to 1, count for nothing"}
    )
    phrase_enter: float = field(
        default=0.5, metadata={"help": "weight of a phrase that may begin, against 1 for one that goes on"}
    )
    phrase_gate: ChoiceEnum(GATES) = field(  # type: ignore[valid-type]
        default=CONSENT_GATE,
        metadata={
            "help": "what lets a phrase begin: consent, as far as the model finds its first token likely; or attention, as "
            "far as the decoder attends to the source phrase"
        },
    )
    no_phrase_coverage: bool = field(
        default=False,
        metadata={"help": "let phrases begin for a source phrase that one was written for in full (an ablation)"},
    )
    phrase_reward: float = field(
        default=0.0,
        metadata={
            "help": "in the place of a share: multiply the probability of what phrases want by exp of this times how much "
            "they want it (an ablation)"
        },
    )
    phrase_threshold: float = field(
        default=0.5, metadata={"help": "probability above which words of the source are a phrase that is asked for"}
    )
    phrase_segmentation: Optional[str] = field(
        default=None,
        metadata={
            "help": "which words of the source are asked for: learned, all, ngram:N, or lexicon:FILE, those that FILE names "
            "(as in the phrase datastore)"
        },
    )
    phrase_bf16: bool = field(
        default=False,
        metadata={
            "help": "run the phrase encoder in bfloat16, faster where the processor has it; what is found may then depend a "
            "little on which sentences share a batch"
        },
    )
    store_timeout: float = field(
        default=TIMEOUT,
        metadata={"help": "seconds that Milvus may take to answer, all attempts together, where phrases are there"},
    )
    store_unreachable: ChoiceEnum([STOP, SKIP]) = field(  # type: ignore[valid-type]
        default=STOP,
        metadata={"help": "what to do when it does not: stop, or skip the phrases of these sentences"},
    )
    retrieval_lambda_max: float = field(
        default=0.9,
        metadata={
            "help": "the most that phrases may bring both shares to together: beyond, and beyond the share of tokens alone, "
            "both are scaled down"
        },
    )


def token_settings(cfg: TranslationRetrievalConfig, datastore: TokenDatastore) -> TokenRetrievalSettings:
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


def phrase_settings(cfg: TranslationRetrievalConfig) -> PhraseSettings:
    """The `--phrase-*` options that say how phrases count."""
    return PhraseSettings(
        cfg.phrase_k, cfg.phrase_lambda, cfg.phrase_temperature, cfg.phrase_min_similarity, cfg.phrase_enter,
        str(cfg.phrase_gate), not cfg.no_phrase_coverage, cfg.phrase_reward,
    )  # fmt: skip
