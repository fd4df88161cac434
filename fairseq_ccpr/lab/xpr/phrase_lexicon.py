"""`--task phrase_lexicon`: training an XPR phrase encoder on phrase pairs with example sentences."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.xpr.lexicon_dataset import LexiconDataset
from fairseq_ccpr.lab.xpr.lexicon_store import Lexicon, PhraseTypes
from fairseq_ccpr.lab.xpr.type_vectors import find_translations, type_means
from fairseq_ccpr.models.xpr_encoder import XprEncoder, span_means
from fairseq_ccpr.training.cpu_autocast import cpu_autocast
from fairseq_ccpr.training.phrase_task import PhraseTask, PhraseTaskConfig


@dataclass
class PhraseLexiconConfig(PhraseTaskConfig):
    """Options of the task."""

    data: str = field(
        default=MISSING,
        metadata={"help": "folders of fairseq-ccpr lexicon, separated by ':', whose train and valid parts are mixed"},
    )
    sentences: int = field(
        default=4,
        metadata={"help": "example sentences of a phrase, drawn again each epoch; 0: the phrase alone (an ablation)"},
    )
    max_subwords: int = field(default=128, metadata={"help": "sentences are cut to this, around the phrase"})
    max_tokens: Optional[int] = II("dataset.max_tokens")


@register_task("phrase_lexicon", dataclass=PhraseLexiconConfig)
class PhraseLexiconTask(PhraseTask):
    """Contrastive training of a `phrase_encoder_xpr`; validation measures acc@1 among the held-out phrases, both ways."""

    def __init__(self, cfg: PhraseLexiconConfig) -> None:
        super().__init__(cfg)
        if cfg.sentences < 0:
            raise ConfigurationError(f"--sentences is {cfg.sentences}: give at least 1, or 0 for phrases alone")
        if cfg.max_subwords < 1:
            raise ConfigurationError(f"--max-subwords is {cfg.max_subwords}: give at least 1")
        if cfg.max_tokens is not None:
            raise ConfigurationError(
                "--max-tokens has no meaning here, where pairs are put together before their sentences are drawn: give "
                "--batch-size, in pairs"
            )
        self.right = torch.empty(2, 0, dtype=torch.bool)  # whether phrases of valid pairs find one
        self.trained_on: list[str] = []

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split of every lexicon as one data set."""
        if split not in ("train", "valid"):
            raise ConfigurationError(
                f"--valid-subset is {split}: give valid; fairseq-ccpr evaluate types tests on others"
            )
        lexicons = list(self.open_folders(split, Lexicon))
        self.datasets[split] = LexiconDataset(
            lexicons, self.tokenizer, self.cfg.sentences, self.cfg.max_subwords, self.cfg.seed
        )
        if split == "train":
            self.trained_on = sorted({lexicon.manifest.language_pair for lexicon in lexicons})

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the settings of the context encoder, and the data it was trained on."""
        return super().state_dict() | {"trained_on": self.trained_on}

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Take an optimizer step, once per update; the momentum encoder follows."""
        super().optimizer_step(optimizer, model, update_num)
        model.follow()

    def begin_valid_epoch(self, epoch: int, model: XprEncoder) -> None:
        """Encode all phrases of the valid part, and determine which find a translation."""
        model.eval()
        with torch.no_grad(), cpu_autocast(model):
            self.right = torch.cat([self._search(model, lexicon) for lexicon in self.dataset("valid").lexicons], dim=1)

    def _search(self, model: XprEncoder, lexicon: Lexicon) -> Tensor:
        """Check whether the phrases of each pair find a translation, bool [2, pairs]."""
        pairs = torch.from_numpy(lexicon.pairs.astype("int64")).to(next(model.parameters()).device)

        def encode(tokens: Tensor, spans: Tensor) -> Tensor:
            return span_means(model.states(tokens), spans).unsqueeze(0)

        def means(types: PhraseTypes) -> Tensor:
            counts, most = [self.cfg.sentences], self.cfg.max_subwords
            return type_means(encode, self.tokenizer, types, counts, most, pairs.device)[0, 0]

        sources, targets = (model.project(means(types)) for types in lexicon.sides)
        found = find_translations(sources, targets, pairs), find_translations(targets, sources, pairs.flip(1))
        return torch.stack([side[rows] for side, rows in zip(found, pairs.T)])

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Log `accuracy` with the loss: acc@1 of both directions; any of several translations counts."""
        loss, count, logged = super().valid_step(sample, model, criterion)
        right = self.right[:, sample["pairs"]]
        return loss, count, logged | {"accuracy": right.sum(), "queries": right.numel()}
