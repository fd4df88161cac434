"""The options of the tasks that retrieve: settings, each declared once, and how fairseq reads them."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks.translation import TranslationConfig

from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.token import FAMILIAR, TokenDatastore
from fairseq_ccpr.datastore.tuned import Parts
from fairseq_ccpr.device import PRECISIONS
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import TIMEOUT
from fairseq_ccpr.settings import check, option, read_options, with_options

logger = logging.getLogger(__name__)

NO_TRUST = "none"
STOP, SKIP = "stop", "skip"
NEAREST, PUBLISHED = "nearest", "published"
OF_LAMBDA_STAR = {"lambda_max": 1.0, "min_similarity": 0.0, "lambda_star": NEAREST}  # where lambda* is off
COSINE = "a cosine in [0, 1)"
SHARE = "a weight between 0 and 1"


@dataclass(frozen=True)
class TokenRetrievalSettings:
    """The `--tokens-*` options."""

    PREFIX: ClassVar[str] = "tokens"

    k: int = option(
        8,
        "neighbours retrieved for each token",
        within="[1, inf)",
        needs="at least 1 neighbour",
        automatic=True,
    )
    lambda_: float = option(
        0.5,
        "interpolation weight of the token datastore, 0 to 1; with lambda*, which scales it, the default is "
        "1",
        within="[0, 1]",
        needs=SHARE,
        sign="lambda",
        automatic=True,
    )
    temperature: float = option(
        10.0,
        "temperature of the neighbours' distribution: about 10 to 100 for squared distances, 0.01 to 0.5 "
        "for the inner products of an adapter's keys, whose default is 0.05",
        within="(0, inf)",
        needs="a number above 0",
        sign="T",
        automatic=True,
    )
    confidence: bool = option(
        False,
        "scale the weight by the mean similarity of the 8 nearest neighbours (lambda*); on for an adapter's "
        "keys",
        sign="lambda*",
        automatic=True,
    )
    lambda_max: float = option(
        1.0, "upper bound on lambda*", within="(0, 1]", needs="a weight above 0 and up to 1", automatic=True
    )
    min_similarity: float = option(
        0.0,
        "similarity, 0 to 1, at or below which a neighbour adds nothing to lambda*; protects text of other "
        "domains",
        within="[0, 1)",
        needs=COSINE,
        sign="s0",
        automatic=True,
    )
    lambda_star: str = option(
        NEAREST,
        "mean that lambda* takes: nearest, of the 8 nearest neighbours found, negative similarities as 0; "
        "or published, equation 8 of the CLKNN paper, of all k, missing ones as 0",
        choices=(NEAREST, PUBLISHED),
        sign="mean",
        automatic=True,
    )
    likeness: float = option(
        0.0,
        "nats by which a neighbour counts less where its source sentence is nothing like the one that is "
        "translated; 0: what sentence it is from does not count",
        within="[0, inf)",
        needs="a number of nats of at least 0",
        sign="gamma",
        automatic=True,
    )
    guard: bool = option(
        False,
        "translate sentences that none of the datastore's is like without it, and lower the weight for "
        "those that are little like any; on where that was measured",
        automatic=True,
    )

    def __post_init__(self) -> None:
        check(self)
        for name, off in OF_LAMBDA_STAR.items():
            if getattr(self, name) != off and not self.confidence:
                raise ConfigurationError(
                    f"--tokens-{name.replace('_', '-')} is for the lambda* of --tokens-confidence, which is off: "
                    "leave it out"
                )
        if self.lambda_star == PUBLISHED and self.min_similarity:
            raise ConfigurationError(
                f"--tokens-min-similarity is {self.min_similarity:g}, and equation 8 of --tokens-lambda-star "
                f"{PUBLISHED} has no such bound: give 0"
            )


@dataclass(frozen=True)
class PhraseSearchSettings:
    """The `--phrases-*` options that decide which phrases are retrieved."""

    PREFIX: ClassVar[str] = "phrases"

    encoder: Optional[str] = option(
        None,
        "checkpoint of the phrase encoder (the one that the phrase datastore was built with, at its path)",
        metavar="CKPT",
        unsigned="the datastore's signature has the encoder's fingerprint",
    )
    k: int = option(
        16,
        "target phrases retrieved for each phrase of a source sentence",
        within="[1, inf)",
        needs="at least 1 phrase",
        metavar="N",
        automatic=True,
    )
    min_similarity: float = option(
        0.3,
        "similarity, 0 to 1, at or below which a phrase is not retrieved",
        within="[0, 1)",
        needs=COSINE,
        metavar="S",
        automatic=True,
    )
    threshold: float = option(
        0.5,
        "probability above which words of the source are queried as a phrase",
        within="[0, 1)",
        needs="a probability in [0, 1)",
        metavar="P",
        automatic=True,
        unsigned="the description of the queries has it",
    )
    segmentation: Optional[str] = option(
        None,
        "which words of the source are queried: learned, all, ngram:N, or lexicon:FILE, those that FILE "
        "names (as in the phrase datastore)",
        metavar="learned|all|ngram:N|lexicon:FILE",
        automatic=True,
        unsigned="the description of the queries has it",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class PhraseSettings(PhraseSearchSettings):
    """The `--phrases-*` options: which phrases are retrieved, and how they count."""

    lambda_: float = option(
        1.0,
        "interpolation weight of the phrase datastore, 0 to 1; it scales the weight that the votes give",
        within="[0, 1]",
        needs=SHARE,
        sign="lambda",
        automatic=True,
    )
    consent: float = option(
        12.0,
        "nats below the model's likeliest token at which a phrase has no vote for a token; 12: it always "
        "has one",
        within="(0, 12]",
        needs="a number above 0, and at most 12",
        automatic=True,
    )


@dataclass(frozen=True)
class TextSettings:
    """The `--text-*` options.

    Raises:
        ConfigurationError: a value out of its range.
    """

    PREFIX: ClassVar[str] = "text"

    alpha: float = option(
        0.3,
        "weight of the text: the exponent of p_text / p_general^beta; 0: none",
        within="[0, inf)",
        needs="a weight of at least 0",
        automatic=True,
    )
    beta: float = option(
        1.0,
        "exponent of p_general, what general text would say (0 where none was counted with --against)",
        within="[0, inf)",
        needs="an exponent of at least 0",
        automatic=True,
    )
    foreign: float = option(
        10.0,
        "a translation that general text (--against) makes so many nats likelier than the text, as a whole, "
        "is made again without the text and phrases (inf: never)",
        within="(-inf, inf]",
        needs="a number of nats, or inf",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class StoreSettings:
    """The `--store-*` options, for keys that a server holds."""

    PREFIX: ClassVar[str] = "store"

    timeout: float = option(
        TIMEOUT,
        "seconds that Milvus may take to answer, all attempts together, if it has keys of the datastore",
        within="(0, inf)",
        needs="a number of seconds above 0",
        metavar="S",
        unsigned="waiting decides no result",
    )
    unreachable: str = option(
        STOP,
        "what to do if Milvus does not answer in time: stop, or skip: go without its phrases or tokens",
        choices=(STOP, SKIP),
        unsigned="sentences that were skipped are counted and reported",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class MixtureSettings:
    """The `--retrieval-*` options."""

    PREFIX: ClassVar[str] = "retrieval"

    lambda_max: float = option(
        0.9,
        "upper bound on lambda_tok + lambda_phr when phrases are active; both are scaled down",
        within="[0, 1)",
        needs="a weight in [0, 1)",
        sign="Lambda_max",
        automatic=True,
    )

    def __post_init__(self) -> None:
        check(self)


# Each with the part of a datastore that it is for, if it is for one.
RETRIEVAL: dict[type[Any], str] = {
    TokenRetrievalSettings: "token", PhraseSettings: "phrase", TextSettings: "text", StoreSettings: "", MixtureSettings: "",
}  # fmt: skip


@with_options(*RETRIEVAL)
class RetrievalConfig(FairseqDataclass):
    """Retrieval options, in addition to those of a fairseq task."""

    datastore: Optional[str] = option(
        None,
        "the datastore, a folder made by fairseq-ccpr build, with tokens, phrases, text or several of them; "
        "TOKENS:PHRASES if they are in two folders",
    )
    precision: Optional[str] = option(
        None,
        "numbers to compute translations in: auto, which is bf16 where the processor is faster in it and fp32 "
        "elsewhere; fp32; bf16; or fp16, for GPUs (default: auto; of fairseq's own commands, fp32)",
        choices=PRECISIONS,
    )
    untuned: bool = option(
        False, "use the defaults of retrieval for options not given, instead of the tuned settings"
    )
    trust: Optional[str] = option(
        None,
        "learned trust, a file that fairseq-ccpr tune wrote, instead of the datastore's; none: use no trust",
    )
    glossary: Optional[str] = option(
        None,
        "glossary, a TSV of source terms and their translations, which beam search then prefers; it needs "
        "no datastore",
    )
    tokens_log: Optional[str] = option(
        None,
        "file for one line of JSON per token of each best hypothesis: weights, probabilities, neighbours",
    )


@dataclass
class TranslationRetrievalConfig(RetrievalConfig, TranslationConfig):
    """Task options, in addition to those of `translation`."""


def automatic_token_settings(datastore: TokenDatastore, confidence: bool | None = None) -> dict[str, object]:
    """Choose what suits a datastore's keys where options are left out, as it was measured when they were built.

    Args:
        confidence: whether lambda is scaled to lambda*, by an option or its being left out; None: left out.
            lambda* is never more than lambda, and less by a third or so: it wants all of it.
    """
    unit, measured = datastore.section.projection is not None, datastore.section.suits
    confident = unit if confidence is None else confidence
    return {
        "lambda_": 1.0 if confident else measured.get("lambda_", 0.5),
        "temperature": measured.get("temperature", 0.05 if unit else 10.0),
        "confidence": unit,
        "likeness": measured.get("likeness", 0.0),
        "guard": _guards(datastore),
    }


def _guards(datastore: TokenDatastore) -> bool:
    """Check whether a datastore knows which sentences are like its own."""
    return FAMILIAR in datastore.section.suits


def token_settings(
    cfg: RetrievalConfig, datastore: TokenDatastore, tuned: Mapping[str, object] | None = None
) -> TokenRetrievalSettings:
    """Read the `--tokens-*` options; those left out are as tuned, or else what suits a datastore's keys."""
    known = {
        name: value
        for name, value in (tuned or {}).items()
        if name != "guard" or not value or _guards(datastore)
    }
    suits = {"confidence": known.get("confidence", automatic_token_settings(datastore)["confidence"])}
    confidence = read_options(TokenRetrievalSettings, cfg, suits).confidence
    suits = {
        **automatic_token_settings(datastore, confidence),
        **known,
        **({} if confidence else OF_LAMBDA_STAR),
    }
    settings = read_options(TokenRetrievalSettings, cfg, suits)
    unit = datastore.section.projection is not None
    if settings.confidence and not unit:
        raise ConfigurationError(
            f"--tokens-confidence needs keys of length 1, but those of {datastore.directory} are the decoder's "
            "own states: build the datastore with --adapter clknn"
        )
    if settings.guard and not _guards(datastore):
        raise ConfigurationError(
            f"--tokens-guard needs to know how much the sentences of {datastore.directory} are like one "
            "another, which is measured of 10,000 entries or more, when they are built: build it again, or "
            "leave the guard out"
        )
    if unit and settings.temperature >= 1:
        logger.warning(
            "--tokens-temperature %g makes all neighbours count alike: the keys of %s are compared by inner "
            "products of at most 1, which need 0.01 to 0.5",
            settings.temperature,
            datastore.directory,
        )
    elif datastore.section.index.metric == "l2" and settings.temperature < 1:
        logger.warning(
            "--tokens-temperature %g leaves only the nearest neighbour: the keys of %s are compared by squared "
            "distances, which need about 10 to 100",
            settings.temperature,
            datastore.directory,
        )
    return settings


def text_settings(
    cfg: RetrievalConfig, datastore: TextDatastore, tuned: Mapping[str, object] | None = None
) -> TextSettings:
    """Read the `--text-*` options; those left out are as tuned, or else what suits the text."""
    general = datastore.section.general
    settings = read_options(TextSettings, cfg, {"beta": float(general > 0), **(tuned or {})})
    if settings.beta and not general:
        raise ConfigurationError(
            f"--text-beta is {settings.beta:g}, but {datastore.directory} was built without general text: "
            "leave it out, or build the text with --against into another --output, and name both folders, "
            "A:B"
        )
    return settings


def read_settings(
    cfg: RetrievalConfig, parts: Parts, tuned: Mapping[str, Mapping[str, Any]]
) -> dict[type, Any]:
    """Read the options of retrieval that these parts of a datastore have a use for, by their class."""
    readers: dict[str, Callable[..., Any]] = {"token": token_settings, "text": text_settings}
    settings = {}
    for kind, part in RETRIEVAL.items():
        if part in readers and part in parts:
            settings[kind] = readers[part](cfg, parts[part], tuned.get(kind.PREFIX))
        elif part in parts or not part:
            settings[kind] = read_options(kind, cfg, tuned.get(kind.PREFIX))
    return settings
