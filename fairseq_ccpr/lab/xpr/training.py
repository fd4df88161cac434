"""XPR's training: a lexicon's phrase pairs with example sentences drawn again each epoch, its task and its criterion."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.xpr.lexicon import Lexicon, PhraseTypes, TypeExample, as_tables, usable_examples
from fairseq_ccpr.lab.xpr.model import TrainedXprEncoder
from fairseq_ccpr.lab.xpr.type_vectors import find_translations, type_means
from fairseq_ccpr.models.xpr_encoder import span_means
from fairseq_ccpr.storage.equal_strings import digest_number
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.training.length_batches import EpochDataset
from fairseq_ccpr.training.phrase_contrast import alignment_losses, all_gather_rows
from fairseq_ccpr.training.tasks import PhraseTask, PhraseTaskConfig, SummedCriterion, cpu_autocast

# both phrases, their examples, the number of the pair
Row = tuple[tuple[str, str], list[list[TypeExample]], int]


class LexiconDataset(EpochDataset):
    """The phrase pairs of one or several lexicons."""

    def __init__(
        self,
        lexicons: list[Lexicon],
        tokenizer: SubwordTokenizer,
        sentences: int,
        max_subwords: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.lexicons, self.tokenizer, self.sentences = lexicons, tokenizer, sentences
        self.max_subwords, self.seed = max_subwords, seed
        self.starts = np.cumsum([0, *(len(lexicon.pairs) for lexicon in lexicons)])
        self.sizes = np.ones(len(self), dtype=np.int64)  # so that a batch is of so many pairs

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Row:
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        lexicon = self.lexicons[number]
        phrases = lexicon.pairs[index - self.starts[number]].tolist()
        strings, examples = [], []
        for types, phrase in zip(lexicon.sides, phrases):
            order = rng.permutation(types.counts[phrase]).tolist() if self.sentences else []
            places = (types.example(phrase, place) for place in order)
            strings.append(types.phrases[phrase])
            examples.append(
                usable_examples(
                    self.tokenizer, phrase, strings[-1], places, self.sentences, self.max_subwords
                )
            )
        return (strings[0], strings[1]), examples, int(index)

    def collater(self, samples: list[Row]) -> dict[str, Any]:
        """Make a batch of K pairs: tables of `as_tables`, phrases numbered sources first; strings and pairs as numbers.

        Returns:
            tables; strings int64 [2, K], equal where strings are; pairs int64 [K], numbers in this dataset.
        """
        if not samples:
            return {}
        examples = [
            TypeExample(number + side * len(samples), one.place, one.subwords, one.first, one.last)
            for side in (0, 1)
            for number, (_, examples_of_sides, _) in enumerate(samples)
            for one in examples_of_sides[side]
        ]
        return {
            "nsentences": len(samples), "ntokens": sum(len(example.subwords.ids) for example in examples),
            "tables": as_tables(examples, self.tokenizer.pad),
            "strings": torch.tensor([[digest_number(strings[side]) for strings, _, _ in samples] for side in (0, 1)]),
            "pairs": torch.tensor([number for _, _, number in samples]),
        }  # fmt: skip

    def ordered_indices(self) -> np.ndarray:
        """Shuffle, so that each epoch batches different pairs together."""
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self))


@dataclass
class PhraseLexiconConfig(PhraseTaskConfig):
    """Options of the task."""

    data: str = field(
        default=MISSING,
        metadata={
            "help": "folders of fairseq-ccpr lexicon, separated by ':', whose train and valid parts are mixed"
        },
    )
    sentences: int = field(
        default=4,
        metadata={
            "help": "example sentences of a phrase, drawn again each epoch; 0: the phrase alone (an ablation)"
        },
    )
    max_subwords: int = field(default=128, metadata={"help": "sentences are cut to this, around the phrase"})
    max_tokens: Optional[int] = II("dataset.max_tokens")


@register_task("phrase_lexicon", dataclass=PhraseLexiconConfig)
class PhraseLexiconTask(PhraseTask):
    """Contrastive training of a `phrase_encoder_xpr`; validation measures acc@1 among the held-out phrases, both ways."""

    def __init__(self, cfg: PhraseLexiconConfig) -> None:
        super().__init__(cfg)
        if cfg.sentences < 0:
            raise ConfigurationError(
                f"--sentences is {cfg.sentences}: give at least 1, or 0 for phrases alone"
            )
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

    def begin_valid_epoch(self, epoch: int, model: TrainedXprEncoder) -> None:
        """Encode all phrases of the valid part, and determine which find a translation."""
        model.eval()
        with torch.no_grad(), cpu_autocast(model):
            self.right = torch.cat(
                [self._search(model, lexicon) for lexicon in self.dataset("valid").lexicons], dim=1
            )

    def _search(self, model: TrainedXprEncoder, lexicon: Lexicon) -> Tensor:
        """Check whether the phrases of each pair find a translation, bool [2, pairs]."""
        pairs = torch.from_numpy(lexicon.pairs.astype("int64")).to(next(model.parameters()).device)

        def encode(tokens: Tensor, spans: Tensor) -> Tensor:
            return span_means(model.states(tokens), spans).unsqueeze(0)

        def means(types: PhraseTypes) -> Tensor:
            counts, most = [self.cfg.sentences], self.cfg.max_subwords
            return type_means(encode, self.tokenizer, types, counts, most, pairs.device, show=True)[0, 0]

        sources, targets = (model.project(means(types)) for types in lexicon.sides)
        found = find_translations(sources, targets, pairs), find_translations(targets, sources, pairs.flip(1))
        return torch.stack([side[rows] for side, rows in zip(found, pairs.T)])

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Log `accuracy` with the loss: acc@1 of both directions; any of several translations counts."""
        loss, count, logged = super().valid_step(sample, model, criterion)
        right = self.right[:, sample["pairs"]]
        return loss, count, logged | {"accuracy": right.sum(), "queries": right.numel()}


@dataclass
class XpcoConfig(FairseqDataclass):
    """Options of `--criterion xpco`."""

    contrast_temperature: float = field(default=0.06, metadata={"help": "T, temperature of the softmax"})


@register_criterion("xpco", dataclass=XpcoConfig)
class XpcoCriterion(SummedCriterion):
    """L = L(P -> Q*) + L(Q -> P*), equations 3 and 4 of the XPR paper, * by the momentum encoder; a sum over pairs.

    Candidates are the phrases of all processes and those of the queue, where there is one.
    """

    def __init__(self, cfg: XpcoConfig, task: Any) -> None:
        super().__init__(task)
        if not cfg.contrast_temperature > 0:
            raise ConfigurationError(
                f"--contrast-temperature is {cfg.contrast_temperature}: give a number above 0"
            )
        self.scale = 1 / cfg.contrast_temperature

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over pairs, their number, and the values to log."""
        count = sample["nsentences"]
        vectors, candidates = model(sample["tables"], 2 * count)
        sides = [all_gather_rows(part) for part in vectors.chunk(2)]
        others = sides if candidates is vectors else [all_gather_rows(part) for part in candidates.chunk(2)]
        strings = all_gather_rows(sample["strings"].T.contiguous())
        momentum = model.momentum
        loss = vectors.new_zeros(())
        for one, other in ((0, 1), (1, 0)):
            targets, candidate_strings = others[other], strings
            if momentum is not None:
                queued, queued_strings = momentum.queued(other)
                targets, candidate_strings = (
                    torch.cat([targets, queued]),
                    torch.cat([strings, queued_strings]),
                )
            same = false_negatives(strings, candidate_strings)
            loss = loss + alignment_losses(sides[one], targets, self.scale, same).sum()
        if momentum is not None and model.training:
            momentum.enqueue((others[0].detach(), others[1].detach()), strings)
        logged = {
            # the loss covers all processes: each logs its part of it
            "loss": loss.detach() * count / len(strings),
            "ntokens": sample["ntokens"],
            "nsentences": count,
            "sample_size": count,
        }
        return loss, count, logged


def false_negatives(pairs: Tensor, candidates: Tensor) -> Tensor:
    """Mark the candidates that are not negatives of a pair, since they share a string with it, bool [K, C].

    An equal string on the candidates' side is the right answer itself, one on the other side another
    translation. If language pairs are mixed, a source in one may be a target in another. Both are numbers of
    strings, int64 [n, 2].
    """
    return (pairs[:, None, :, None] == candidates[None, :, None, :]).flatten(2).any(dim=2)
