"""`--task phrase_queries`: training a query head on source text, to judge phrases as a phrase encoder does."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II, MISSING

from fairseq_ccpr.datastore.preprocessing import Preprocessing, read_preprocessing
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.checkpoint import load_models
from fairseq_ccpr.models.key_layer import TranslationStates
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import TOKENIZERS, SentencePieceTokenizer, load_tokenizer
from fairseq_ccpr.training.query_criterion import QueryTexts
from fairseq_ccpr.training.token_contrast import ContrastTask, ContrastTaskConfig

MOST_WORDS = 7  # of a phrase, as datastores have them
SENTENCEPIECE = "sentencepiece"


@dataclass
class PhraseQueriesConfig(ContrastTaskConfig):
    """Options of the task."""

    data: str = field(default=MISSING, metadata={"help": "DATA_BIN of fairseq-ccpr prepare, for the translation model"})
    text: str = field(
        default="",
        metadata={"help": "source text of any domains: files of a sentence per line, or of pairs, separated by ':'"},
    )
    translation_model: str = field(default="", metadata={"help": "checkpoint of the translation model"})
    phrase_encoder: str = field(default="", metadata={"help": "checkpoint of the phrase encoder that is imitated"})
    valid_sentences: int = field(default=500, metadata={"help": "the first sentences, which are held out"})


@register_task("phrase_queries", dataclass=PhraseQueriesConfig)
class PhraseQueriesTask(ContrastTask):
    """Distillation of a phrase encoder, the frozen `teacher`, into a `phrase_query_head` of the translation model.

    Validation measures for how many held-out phrases the head's vector is nearest, in its batch, to the phrase encoder's.
    """

    def __init__(self, cfg: PhraseQueriesConfig) -> None:
        super().__init__(cfg)
        for name in ("text", "translation_model", "phrase_encoder"):
            if not getattr(cfg, name):
                raise ConfigurationError(f"--{name.replace('_', '-')} is missing")
        if cfg.valid_sentences < 1:
            raise ConfigurationError(f"--valid-sentences is {cfg.valid_sentences}: give at least 1")
        if not Path(cfg.data).is_dir():
            raise ConfigurationError(
                f"there is no folder {cfg.data}: give what fairseq-ccpr prepare wrote for the model"
            )
        prepared = read_preprocessing(Path(cfg.data))
        if prepared is None or prepared.options.get("bpe") != SENTENCEPIECE or prepared.options.get("tokenizer"):
            raise ConfigurationError(
                f"{cfg.data} does not have the subwords of one SentencePiece model, without a tokenizer, as a query head "
                "needs them: give what fairseq-ccpr prepare wrote for a model with such subwords"
            )
        self.teacher = PhraseEncoder.load(Path(cfg.phrase_encoder)).requires_grad_(False)
        if self.teacher.similarity != "cosine":
            raise ConfigurationError(
                f"--phrase-encoder {cfg.phrase_encoder} compares phrases by {self.teacher.similarity}: a query head imitates "
                "encoders with cosine alone"
            )
        self.context = _states(prepared, Path(cfg.translation_model))

    @cached_property
    def _texts(self) -> list[str]:
        files = [Path(path) for path in split_paths(self.cfg.text)]
        for path in files:
            if not path.is_file():
                raise ConfigurationError(f"--text: there is no file {path}")
        texts = [text for path in files for line in read_lines(path) if (text := line.split("\t")[0].strip())]
        if len(texts) <= self.cfg.valid_sentences:
            raise ConfigurationError(
                f"--text has {len(texts):,} sentences, of which --valid-sentences holds out {self.cfg.valid_sentences:,}: "
                "give more text"
            )
        return texts

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the head, and save to `--save-dir` the tokenizer that its checkpoints need next to them."""
        last = Path(self.cfg.save_dir) / "checkpoint_last.pt"
        state = checkpoint_utils.load_checkpoint_to_cpu(str(last)) if last.is_file() else None
        if state is not None and state.get("task_state", {}) != self._models:
            raise ConfigurationError(
                f"--save-dir {self.cfg.save_dir} holds a query head of another translation model or phrase encoder: give "
                "these, or another --save-dir"
            )
        model = super().build_model(cfg, from_checkpoint)
        save_tokenizer(self.context.tokenizer, Path(self.cfg.save_dir), self.cfg.translation_model)
        return model

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split: `valid` is the first sentences, `train` all others."""
        held_out = self.cfg.valid_sentences
        texts = self._texts[held_out:] if split == "train" else self._texts[:held_out]
        limits = self.teacher.context.max_positions, self.context.max_positions
        tokenizers = self.teacher.context.tokenizer, self.context.tokenizer
        self.datasets[split] = QueryTexts(texts, *tokenizers, limits, MOST_WORDS)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the models that the head was trained for."""
        return self._models

    @cached_property
    def _models(self) -> dict[str, Any]:
        return {
            "translation": self.context.fingerprint(), "teacher": self.teacher.fingerprint(),
            "dimension": self.teacher.dimension, "edges": self.teacher.edges,
        }  # fmt: skip

    @torch.no_grad()
    def teach(self, sample: dict[str, Any], least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the phrase encoder's outputs: P(phrase) of the spans, fp32 [C], and vectors of those above `least`."""
        teacher = self.teacher.to(sample["tokens"].device)
        states = teacher.states(sample["teacher_tokens"])
        spans = sample["teacher_spans"]
        probabilities = teacher.phrase_logits(states, spans).sigmoid()
        return probabilities, teacher.vectors(states, spans[probabilities > least]).float()


def _states(prepared: Preprocessing, path: Path) -> TranslationStates:
    languages = {"source_lang": prepared.source_lang, "target_lang": prepared.target_lang}
    source, target = (Dictionary.load(str(prepared.folder / f"dict.{one}.txt")) for one in languages.values())
    cfg = TranslationConfig(data=str(prepared.folder), **languages)
    [model] = load_models([str(path)], TranslationTask(cfg, source, target))
    model_of_pieces = Path(prepared.options["sentencepiece_model"]).read_bytes()
    tokenizer = SentencePieceTokenizer(source.symbols[source.nspecial :], model_of_pieces)
    return TranslationStates(model.encoder.eval(), tokenizer)


@dataclass
class PhraseTaskConfig(ContrastTaskConfig):
    """Options of other parts of fairseq that the tasks read; their own include at least `data` and `max_subwords`."""

    encoder: str = II("model.encoder")


class PhraseTask(ContrastTask):
    """A task whose model has a `ContextEncoder` as `context`, and whose data are folders with a train and a valid part."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        if not cfg.encoder:
            raise ConfigurationError("--encoder is not given: make one with fairseq-ccpr convert")
        self.tokenizer = load_tokenizer(Path(cfg.encoder))
        self.context_settings: dict[str, Any] = {}

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, and save to `--save-dir` the files that its checkpoints need besides their weights."""
        model = super().build_model(cfg, from_checkpoint)
        context: ContextEncoder = model.context
        if self.cfg.max_subwords > context.max_positions:
            raise ConfigurationError(
                f"--max-subwords is {self.cfg.max_subwords}, but the encoder {self.cfg.encoder} takes {context.max_positions}"
            )
        self.context_settings = vars(context.arguments)
        save_tokenizer(self.tokenizer, Path(self.cfg.save_dir), self.cfg.encoder)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the context encoder, for a checkpoint."""
        return {"context": self.context_settings}

    def has_sharded_data(self, split: str) -> bool:
        """Return False: several folders are mixed, so every epoch reads all of them."""
        return False

    def open_folders(self, split: str, kind: Any) -> Iterator[Any]:
        """Open and check the part `split` of each folder with `kind`; for validation, folders without one are skipped."""
        folders = [Path(folder) / split for folder in split_paths(self.cfg.data)]
        if split != "train" and any(folder.is_dir() for folder in folders):
            folders = [folder for folder in folders if folder.is_dir()]
        for folder in folders:
            opened = kind(folder)
            opened.check()
            yield opened


def save_tokenizer(tokenizer: SubwordTokenizer, folder: Path, origin: str) -> None:
    """Write a tokenizer, which comes from `origin`, to the folder of the checkpoints, unless they already have it.

    Raises:
        ConfigurationError: they have another.
    """
    if any(folder.glob("*.pt")) and any((folder / filename).is_file() for filename in TOKENIZERS):
        saved = load_tokenizer(folder)
        if (saved.filename, saved.content, saved.symbols) != (tokenizer.filename, tokenizer.content, tokenizer.symbols):
            raise ConfigurationError(
                f"--save-dir {folder} holds checkpoints with another tokenizer than that of {origin}: "
                "give the encoder they were trained from, or another --save-dir"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
