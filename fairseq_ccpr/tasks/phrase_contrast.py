"""`--task phrase_contrast`: training a CCPR phrase encoder on phrase pairs in their sentences."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import FairseqDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.context_encoder import ContextEncoder
from fairseq_ccpr.phrases.contrast_dataset import PhraseContrastDataset
from fairseq_ccpr.phrases.contrast_draw import ContrastOptions
from fairseq_ccpr.phrases.length_batches import Mixture
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.phrases.tokenizers import TOKENIZERS, load_tokenizer
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.tasks.contrast_task import ContrastTask
from fairseq_ccpr.tasks.cpu_autocast import cpu_autocast

logger = logging.getLogger(__name__)

INDEX_TOKENS = 8000  # in a batch that only encodes


@dataclass
class PhraseContrastConfig(FairseqDataclass):
    """Options of the task."""

    data: str = field(
        default=MISSING,
        metadata={"help": "folders of extract_phrases.py, separated by ':', whose train and valid parts are mixed"},
    )
    phrases_per_sentence: int = field(
        default=8, metadata={"help": "phrase pairs drawn from a sentence pair each epoch"}
    )
    different_context_fraction: float = field(
        default=0.0,
        metadata={
            "help": "of the phrases, those whose translation is taken from another sentence, which counts for --max-tokens "
            "as well: 0 is CCPR, 1 is CPR"
        },
    )
    max_subwords: int = field(default=128, metadata={"help": "longer sentences are left out"})
    seed: int = II("common.seed")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")
    encoder: str = II("model.encoder")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    disable_validation: bool = II("dataset.disable_validation")


@register_task("phrase_contrast", dataclass=PhraseContrastConfig)
class PhraseContrastTask(ContrastTask):
    """Contrastive training of a `phrase_encoder`; validation measures acc@1 over an index of held-out phrases."""

    def __init__(self, cfg: PhraseContrastConfig) -> None:
        super().__init__(cfg)
        if not 0 <= cfg.different_context_fraction <= 1:
            raise ConfigurationError(
                f"--different-context-fraction is {cfg.different_context_fraction}: give a share between 0 and 1"
            )
        if cfg.phrases_per_sentence < 1:
            raise ConfigurationError(f"--phrases-per-sentence is {cfg.phrases_per_sentence}: give at least 1")
        if not cfg.encoder:
            raise ConfigurationError("--encoder is not given: make one with convert_encoder.py")
        self.tokenizer = load_tokenizer(Path(cfg.encoder))
        self.options = ContrastOptions(
            cfg.phrases_per_sentence, cfg.different_context_fraction, cfg.max_subwords, cfg.seed
        )
        self.context_settings: dict[str, Any] = {}

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """See `FairseqTask.build_model`. What the checkpoints need beside their weights goes to `--save-dir`."""
        model = super().build_model(cfg, from_checkpoint)
        context: ContextEncoder = model.context
        if self.cfg.max_subwords > context.max_positions:
            raise ConfigurationError(
                f"--max-subwords is {self.cfg.max_subwords}, but the encoder {self.cfg.encoder} takes {context.max_positions}"
            )
        self.context_settings = vars(context.arguments)
        self._save_tokenizer(Path(self.cfg.save_dir))
        return model

    def _save_tokenizer(self, folder: Path) -> None:
        """Write it to the folder of the checkpoints, unless those that are there have one."""
        if any(folder.glob("*.pt")) and any((folder / filename).is_file() for filename in TOKENIZERS):
            if not self._same_tokenizer(folder):
                raise ConfigurationError(
                    f"--save-dir {folder} holds checkpoints with another tokenizer than that of {self.cfg.encoder}: "
                    "give the encoder they were trained from, or another --save-dir"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(folder)

    def _same_tokenizer(self, folder: Path) -> bool:
        """Whether the checkpoints of a folder have the tokenizer of this training."""
        there = load_tokenizer(folder)
        return (there.filename, there.content, there.symbols) == (
            self.tokenizer.filename, self.tokenizer.content, self.tokenizer.symbols,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The settings of the context encoder, for a checkpoint; see `FairseqTask.state_dict`."""
        return {"context": self.context_settings}

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """See `FairseqTask.load_dataset`. Validation asks for translations in their own sentences, of CPR too."""
        options = self.options if split == "train" else replace(self.options, different_context_fraction=0.0)
        pairs = [PhrasePairs(folder) for folder in self._folders(split)]
        for of_language_pair in pairs:
            of_language_pair.check()  # all of it is about to be read anyway
        sets = [PhraseContrastDataset(of_language_pair, self.tokenizer, options) for of_language_pair in pairs]
        if left_out := sum(one.left_out for one in sets):
            logger.info(
                "%s: %d sentence pairs of more than %d subwords left out", split, left_out, self.cfg.max_subwords
            )
        if not sum(map(len, sets)):
            raise ConfigurationError(f"{self.cfg.data} has no phrase pair in its {split} part to work with")
        self.datasets[split] = sets[0] if len(sets) == 1 else Mixture(sets)

    def has_sharded_data(self, split: str) -> bool:
        """See `FairseqTask.has_sharded_data`: several folders are mixed, so no epoch has to read another of them."""
        return False

    def _folders(self, split: str) -> list[Path]:
        """The parts of a name; of validation, those that are there."""
        folders = [Path(folder) / split for folder in utils.split_paths(self.cfg.data)]
        if split == "train" or not any(folder.is_dir() for folder in folders):
            return folders
        return [folder for folder in folders if folder.is_dir()]

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Index the target phrases of the valid part; see `FairseqTask.begin_valid_epoch`."""
        model.eval()
        dataset = self.dataset("valid")
        vectors, strings, contexts = [], [], []
        with torch.no_grad(), cpu_autocast(model):
            for sample in self._samples(dataset):
                target = sample["target"]
                vectors.append(model.vectors(model.context(target["tokens"]), target["spans"]))
                strings.append(target["strings"])
                contexts.append(target["contexts"])
        self.index = ExactIndex(torch.cat(vectors), "ip")
        self.indexed = torch.cat(strings), torch.cat(contexts)

    def _samples(self, dataset: FairseqDataset) -> Any:
        """All of a dataset in batches, where the model is."""
        on_gpu = torch.cuda.is_available() and not self.cfg.cpu
        for batch in dataset.batch_by_size(dataset.ordered_indices(), max_tokens=INDEX_TOKENS):
            sample = dataset.collater([dataset[int(i)] for i in batch])
            if sample:
                yield utils.move_to_cuda(sample) if on_gpu else sample

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """See `FairseqTask.valid_step`. `accuracy` asks for the very entry, `string_accuracy` for its string."""
        loss, count, logged = super().valid_step(sample, model, criterion)
        source, target = sample["source"], sample["target"]
        with torch.no_grad(), cpu_autocast(model):
            vectors = model.vectors(model.context(source["tokens"]), source["spans"])
        _, found = self.index.search(vectors, 1)
        strings, contexts = (of_index[found.squeeze(1)] for of_index in self.indexed)
        right = strings == target["strings"]
        exactly = (right & (contexts == target["contexts"])).sum()
        return loss, count, logged | {"accuracy": exactly, "string_accuracy": right.sum(), "queries": len(right)}
