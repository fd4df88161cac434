"""Settings of an experiment: its YAML file, read and checked.

Paths are relative to the file, and commands run in its folder, so that paths inside of options are as well.
"""

# No `from __future__ import annotations` here: OmegaConf reads the types themselves.

import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Optional

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_ccpr.errors import ConfigurationError

NAME = re.compile(r"\w[\w.+-]*")
REFERENCE = "reference"  # beside systems, in results
# Options that an experiment passes to its commands itself.
RESERVED = {
    "-s", "-t", "--source-lang", "--target-lang", "--path", "--output", "--datastore", "--results-path", "--phrases-encoder",
    "--gen-subset", "--save-dir", "--fraction", "--raw-datastore", "--source", "--target", "--tune", "--settings",
    "--finetune-from-model", "--stop-time-hours",
}  # fmt: skip


@dataclass
class ModelConfig:
    """The translation model."""

    path: str = MISSING
    source_lang: str = MISSING
    target_lang: str = MISSING
    # fairseq's options that make text of its subwords, and subwords of text: --bpe and the like
    subwords: str = ""
    # joint, or source and target; needed for domains of text
    dictionary: list[str] = field(default_factory=list)
    options: str = ""  # of fairseq-generate, for all decoding: --beam, --max-tokens and the like
    # of fairseq-train, for fine_tune: --arch and sizes of the model, --task and the like
    training_options: str = ""


@dataclass
class MineConfig:
    """Sentence pairs that are to be found in two texts, a sentence per line, which need not be translations of each other."""

    source: str = MISSING
    target: str = MISSING
    tune: Optional[str] = None  # labelled pairs, TSV, of any domain; without them, the threshold is estimated
    encoder: str = "muse"  # or e5, or an encoder's directory
    options: str = ""  # of fairseq-ccpr mine


@dataclass
class TextConfig:
    """Sentence pairs: TSV files, or what the names of two files begin with."""

    train: Optional[str] = None
    mine: Optional[MineConfig] = None  # or what to mine the training pairs from
    valid: str = MISSING
    test: str = MISSING


@dataclass
class DomainConfig:
    """The data of one domain."""

    data_bin: Optional[str] = None  # of fairseq-preprocess
    text: Optional[TextConfig] = None  # or what to make one from
    # text of the target language, for phrases and text memories
    monolingual: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)  # of the test set, in place of those in data_bin
    # text whose near-duplicates in the test set are left out of a second comparison
    unlike: Optional[str] = None
    # whether outputs/ gets all translations beside the references, as far as the text's licence allows it
    publish: bool = False
    published_bleu: Optional[float] = None  # of the base model
    published_in: str = ""
    tolerance: float = 0.5


@dataclass
class TokensConfig:
    """A token datastore."""

    options: str = ""  # of fairseq-ccpr build tokens
    share: float = 1.0  # of the sentence pairs
    raw: Optional[str] = None  # the system whose datastore an adapter starts from
    # translates the domain's monolingual text back, which is stored in place of its sentence pairs
    reverse_model: Optional[str] = None


@dataclass
class PhrasesConfig:
    """A phrase datastore."""

    options: str = ""  # of fairseq-ccpr build phrases
    share: float = 1.0  # of the sentences
    texts: list[str] = field(default_factory=list)  # in place of the domain's monolingual text
    encoder: Optional[str] = None  # in place of the experiment's


@dataclass
class TextMemoryConfig:
    """A text memory of the domain's monolingual text."""

    against: list[str] = field(default_factory=list)  # general text


@dataclass
class FineTuneConfig:
    """Training of the model on the sentence pairs of a domain, as long as the loss on its valid set falls."""

    minutes: float = MISSING  # of training, at most
    options: str = ""  # of fairseq-train, for this system alone: --lr, --seed and the like


@dataclass
class SystemConfig:
    """A way to translate; without tokens, phrases, text and fine_tune it is a base model."""

    fine_tune: Optional[FineTuneConfig] = None
    tokens: Optional[TokensConfig] = None
    phrases: Optional[PhrasesConfig] = None
    text: Optional[TextMemoryConfig] = None
    options: str = ""  # of fairseq-generate, for this system alone
    tune: bool = True
    tune_options: str = ""  # of fairseq-ccpr tune, for this system alone
    also: list[str] = field(default_factory=list)  # domains whose valid sets are to lose nothing by it
    # the domain whose valid set chooses the settings, in place of each one's own; or one for each
    tune_on: Any = None
    stores_from: Optional[str] = None  # whose datastores and fine-tuned model are used, not each one's own
    against: Optional[str] = None  # a system to compare with, besides the base model
    domains: Optional[list[str]] = None  # all, if not given

    def tuned_on(self, domain: str) -> str:
        """Return the domain whose valid set chooses the settings for a domain."""
        return (self.tune_on.get(domain) if isinstance(self.tune_on, dict) else self.tune_on) or domain


@dataclass
class TrainEncoderConfig:
    """A phrase encoder to train."""

    texts: dict[str, str] = MISSING  # sentence pairs by name, TSV
    start_from: Optional[str] = None  # an encoder directory; multilingual-e5-small if not given
    convert_options: str = ""  # of fairseq-ccpr convert, which makes that directory
    extract_options: str = "--valid 300"  # of fairseq-ccpr extract
    updates: int = 3000
    options: str = ""  # of fairseq-train


@dataclass
class ExperimentConfig:
    """All of a file."""

    model: ModelConfig = MISSING
    domains: dict[str, DomainConfig] = MISSING
    systems: dict[str, Optional[SystemConfig]] = MISSING
    title: str = ""
    description: str = ""
    encoder: Optional[str] = None  # checkpoint of a phrase encoder
    train_encoder: Optional[TrainEncoderConfig] = None
    tune_options: str = ""  # of fairseq-ccpr tune
    bootstrap_samples: int = 1000

    def system(self, name: str) -> SystemConfig:
        """Return a system; one without settings is a base model."""
        return self.systems[name] or SystemConfig()

    def systems_of(self, domain: str) -> list[str]:
        """Return the systems of a domain, a base model first."""
        known = [n for n in self.systems if domain in (self.system(n).domains or self.domains)]
        return sorted(known, key=lambda name: not self.is_base(name))

    def has_store(self, name: str) -> bool:
        """Tell whether a system retrieves."""
        system = self.system(name)
        return any(part is not None for part in (system.tokens, system.phrases, system.text))

    def is_base(self, name: str) -> bool:
        """Tell whether a system is the model as it is."""
        return not self.has_store(name) and self.system(name).fine_tune is None


def read_config(path: Path) -> ExperimentConfig:
    """Read a file, and check that its names fit together; files that it names are checked when they are needed."""
    try:
        given = OmegaConf.load(path)
        if not isinstance(given, DictConfig):
            raise ConfigurationError(
                f"{path} holds no settings: give a YAML file of them, such as model: ..."
            )
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ExperimentConfig), given))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {_explain(error)}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigurationError(
            f"{path}{where}: this is no YAML ({problem or 'it cannot be read'})"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text") from None
    assert isinstance(config, ExperimentConfig)
    for fault in _faults(config):
        raise ConfigurationError(f"{path}: {fault}")
    return config


def _explain(error: OmegaConfBaseException) -> str:
    reason = str(error.msg).splitlines()[0]
    key, kind = error.full_key, error.object_type
    if type(error).__name__ == "ConfigKeyError" and is_dataclass(kind):
        return f"there is no setting {key}; known are {', '.join(f.name for f in fields(kind))}"
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key} is missing: it must be given"
    return f"{key}: {reason}" if key else reason


def _faults(config: ExperimentConfig) -> Iterator[str]:
    for kind, names in (("domains", config.domains), ("systems", config.systems)):
        if not names:
            yield f"there are no {kind}: name at least one"
        for name in names:
            if not NAME.fullmatch(str(name)):
                yield f"{kind}.{name}: give a name of letters, digits and .+-_"
    if config.encoder is not None and config.train_encoder is not None:
        yield "encoder and train_encoder exclude each other: give one of them"
    if len(config.model.dictionary) > 2:
        yield "model.dictionary names more than two files: give a joint one, or source and target"
    for name, domain in config.domains.items():
        if (domain.data_bin is None) == (domain.text is None):
            yield f"domains.{name} needs data_bin or text, and not both"
        if domain.text is not None and (domain.text.train is None) == (domain.text.mine is None):
            yield f"domains.{name}.text needs train or mine, and not both"
        if domain.text is not None and not (config.model.subwords and config.model.dictionary):
            yield f"domains.{name}.text needs model.subwords and model.dictionary"
        if not any(config.is_base(system) for system in config.systems_of(name)):
            yield f"domains.{name} has no base model: name a system without tokens, phrases, text and fine_tune for it"
    if REFERENCE in config.systems:
        yield f"systems.{REFERENCE}: the references have this name in results, give another"
    for name in config.systems:
        yield from _system_faults(config, name, config.system(name))
    for key, text in _options(config):
        try:
            words = shlex.split(text)
        except ValueError as error:
            yield f"{key} cannot be split into words: {error}"
            return
        for option in (word.split("=")[0] for word in words):
            if option in RESERVED:
                yield f"{key} has {option}, which the experiment sets itself: leave it out"


def _system_faults(config: ExperimentConfig, name: str, system: SystemConfig) -> Iterator[str]:
    key = f"systems.{name}"
    chosen = system.tune_on if isinstance(system.tune_on, dict) else {None: system.tune_on}
    others = [other for other in config.systems if other != name]
    with_tokens = [other for other in others if config.system(other).tokens is not None]
    raw = system.tokens.raw if system.tokens is not None else None
    named: list[tuple[str, Iterable[Any], Collection[str], str]] = [
        ("stores_from", [system.stores_from], config.domains, "domain"),
        ("tune_on", [*chosen, *chosen.values()], config.domains, "domain"),
        ("domains", system.domains or [], config.domains, "domain"),
        ("also", system.also, config.domains, "domain"),
        ("against", [system.against], others, "other system"),
        ("tokens.raw", [raw], with_tokens, "other system with tokens"),
    ]
    for setting, values, known, what in named:
        for value in values:
            if value is not None and value not in known:
                yield f"{key}.{setting} is '{value}', and there is no such {what}; known are {', '.join(known)}"
    for setting, given in (("tune_on", system.tune_on is not None), ("also", system.also)):
        if given and not system.tune:
            yield f"{key} has {setting}, but tune is false: leave one of them out"
    if raw is not None and config.system(raw).fine_tune != system.fine_tune:
        yield f"{key}.tokens.raw is '{raw}', which is of another model: give both the same fine_tune"
    if system.fine_tune is not None and "--arch" not in config.model.training_options:
        yield f"{key}.fine_tune needs model.training_options, with --arch and the model's sizes"
    if system.fine_tune is not None and not system.fine_tune.minutes > 0:
        yield f"{key}.fine_tune.minutes is {system.fine_tune.minutes:g}: give more than 0"
    for part in (system.tokens, system.phrases):
        if part is not None and not 0 < part.share <= 1:
            yield f"{key}: a share is {part.share:g}; give more than 0, and at most 1"
    if system.phrases is not None and not (system.phrases.encoder or config.encoder or config.train_encoder):
        yield f"{key}.phrases needs an encoder: give encoder or train_encoder"
    needing = {
        "phrases": system.phrases is not None and not system.phrases.texts,
        "text": system.text is not None,
        "tokens.reverse_model": system.tokens is not None and system.tokens.reverse_model is not None,
    }
    domains = system.domains or list(config.domains)
    for domain in [*domains, *map(system.tuned_on, domains)]:
        home = system.stores_from or domain
        if not config.domains[home].monolingual:
            yield from (
                f"{key}.{what} needs text: give domains.{home}.monolingual"
                for what, needs in needing.items()
                if needs
            )


def _options(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Iterate over the settings that hold options of a command, by their keys."""
    holders: dict[str, Any] = {"": config, "model.": config.model, "train_encoder.": config.train_encoder}
    for name, domain in config.domains.items():
        holders[f"domains.{name}.text.mine."] = domain.text.mine if domain.text is not None else None
    for name in config.systems:
        system = config.system(name)
        parts = {
            "": system,
            "fine_tune.": system.fine_tune,
            "tokens.": system.tokens,
            "phrases.": system.phrases,
        }
        holders |= {f"systems.{name}.{part}": holder for part, holder in parts.items()}
    for prefix, holder in holders.items():
        for f in fields(holder) if holder is not None else []:
            if f.name == "subwords" or f.name.endswith("options"):
                yield prefix + f.name, getattr(holder, f.name)
