"""`--task phrase_contrast`: training a CCPR phrase encoder on phrase pairs in their sentences."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fairseq import utils
from fairseq.data import FairseqDataset
from fairseq.tasks import register_task
from omegaconf import MISSING

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.span_encoder import UNTOLD_EDGES
from fairseq_ccpr.phrases.pair_filters import edge_rule
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.training.contrast_dataset import PhraseContrastDataset
from fairseq_ccpr.training.contrast_draw import ContrastOptions
from fairseq_ccpr.training.cpu_autocast import cpu_autocast
from fairseq_ccpr.training.length_batches import Mixture
from fairseq_ccpr.training.phrase_task import PhraseTask, PhraseTaskConfig

logger = logging.getLogger(__name__)

VALID_PHRASES = 8  # per sentence pair, so that encoders trained on more or fewer get the same validation
INDEX_TOKENS = 8000  # in a batch that only encodes


@dataclass
class PhraseContrastConfig(PhraseTaskConfig):
    """Options of the task."""

    data: str = field(
        default=MISSING,
        metadata={"help": "folders of fairseq-ccpr extract, separated by ':', whose train and valid parts are mixed"},
    )
    phrases_per_sentence: int = field(
        default=8, metadata={"help": "phrase pairs drawn from a sentence pair for training, each epoch"}
    )
    different_context_fraction: float = field(
        default=0.0,
        metadata={
            "help": "fraction of the phrases whose translation is taken from another sentence, which counts for --max-tokens "
            "as well: 0 is CCPR, 1 is CPR"
        },
    )
    max_subwords: int = field(default=128, metadata={"help": "longer sentences are left out"})


@register_task("phrase_contrast", dataclass=PhraseContrastConfig)
class PhraseContrastTask(PhraseTask):
    """Contrastive training of a `phrase_encoder`; validation measures acc@1 over an index of held-out phrases."""

    def __init__(self, cfg: PhraseContrastConfig) -> None:
        super().__init__(cfg)
        if not 0 <= cfg.different_context_fraction <= 1:
            raise ConfigurationError(
                f"--different-context-fraction is {cfg.different_context_fraction}: give a fraction between 0 and 1"
            )
        if cfg.phrases_per_sentence < 1:
            raise ConfigurationError(f"--phrases-per-sentence is {cfg.phrases_per_sentence}: give at least 1")
        self.edges = UNTOLD_EDGES
        self.options = ContrastOptions(
            cfg.phrases_per_sentence, cfg.different_context_fraction, cfg.max_subwords, cfg.seed
        )

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split. Validation does not depend on how phrases are drawn for training."""
        options = self.options
        if split != "train":  # translations in their own sentences, for CPR too
            options = replace(options, different_context_fraction=0.0, phrases_per_sentence=VALID_PHRASES)
        pairs = list(self.open_folders(split, PhrasePairs))
        if split == "train":
            self.edges = "+".join(sorted({edge_rule(folder.manifest.settings) for folder in pairs}))
        sets = [PhraseContrastDataset(folder, self.tokenizer, options) for folder in pairs]
        if left_out := sum(one.left_out for one in sets):
            logger.info(
                "%s: %d sentence pairs of more than %d subwords left out", split, left_out, self.cfg.max_subwords
            )
        if not sum(map(len, sets)):
            raise ConfigurationError(f"{self.cfg.data} has no phrase pair in its {split} part to work with")
        self.datasets[split] = sets[0] if len(sets) == 1 else Mixture(sets)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the context encoder's settings, and the edge rule of its training phrases."""
        return super().state_dict() | {"edges": self.edges}

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Index the target phrases of the valid part."""
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
        """Yield a whole data set in batches, on the model's device."""
        on_gpu = choose_device(self.cfg.cpu).type == "cuda"
        for batch in dataset.batch_by_size(dataset.ordered_indices(), max_tokens=INDEX_TOKENS):
            sample = dataset.collater([dataset[int(i)] for i in batch])
            if sample:
                yield utils.move_to_cuda(sample) if on_gpu else sample

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Log acc@1 with the loss: `accuracy` requires the exact entry, `string_accuracy` only its string."""
        loss, count, logged = super().valid_step(sample, model, criterion)
        source, target = sample["source"], sample["target"]
        with torch.no_grad(), cpu_autocast(model):
            vectors = model.vectors(model.context(source["tokens"]), source["spans"])
        _, found = self.index.search(vectors, 1)
        strings, contexts = (indexed[found.squeeze(1)] for indexed in self.indexed)
        right = strings == target["strings"]
        exactly = (right & (contexts == target["contexts"])).sum()
        return loss, count, logged | {"accuracy": exactly, "string_accuracy": right.sum(), "queries": len(right)}
