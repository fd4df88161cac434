"""CCPR's training: the contrast of phrases across processes, and its criterion with the segmentation loss."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import UNRECORDED_EDGES
from fairseq_ccpr.phrases.pair_build import edge_rule
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.training.contrast_dataset import PhraseContrastDataset
from fairseq_ccpr.training.length_batches import Mixture
from fairseq_ccpr.training.tasks import (
    PhraseTask,
    PhraseTaskConfig,
    SummedCriterion,
    cpu_autocast,
    refuse_below_1,
)

logger = logging.getLogger(__name__)
VALID_PHRASES = 8  # per sentence pair, so that encoders trained on more or fewer get the same validation
VALID_TOKENS = 8000  # subwords of a batch that validation indexes


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def divide_gradient(value: Tensor | float) -> Tensor | float:
    """Return the same value with its gradient divided by the number of processes.

    For values that all processes share, when each computes the loss of all rows: the sum over processes
    counts them once.
    """
    if world_size() == 1 or not isinstance(value, Tensor):
        return value
    return value.detach() + (value - value.detach()) / world_size()


def all_gather_rows(rows: Tensor) -> Tensor:
    """Gather the rows of all processes by rank, [n, ...] with any n; gradients flow into this process's own.

    When each process computes the loss of all rows, the gradients they send back sum to the gradient of that
    loss.
    """
    if world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = rows.detach().new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    everything = [part[: int(count)] for part, count in zip(parts, counts)]
    everything[dist.get_rank()] = rows
    return torch.cat(everything)


def alignment_losses(sources: Tensor, targets: Tensor, scale: Tensor | float, excluded: Tensor) -> Tensor:
    """Compute L_{x->y} of each phrase, equation 2 of the CCPR paper; swapped vectors give L_{y->x}.

    Args:
        sources, targets: vectors, [K, o] and [C, o], C at least K; pairs have the same number.
        scale: factor for inner products, 1 / temperature.
        excluded: bool [K, C], targets that are not negatives of a source. The diagonal is ignored.

    Returns:
        [K], fp32, or fp64 where that was given.

    >>> alignment_losses(torch.eye(2), torch.eye(2), 1.0, torch.zeros(2, 2, dtype=torch.bool))
    tensor([0.3133, 0.3133])
    """
    dtype = torch.promote_types(sources.dtype, torch.float32)
    with torch.autocast(sources.device.type, enabled=False):
        logits = (sources.to(dtype) @ targets.to(dtype).T) * scale
        own = torch.eye(*logits.shape, dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(excluded & ~own, float("-inf"))
        return logits.logsumexp(dim=1) - logits.diagonal()


def equal_candidates(strings: Tensor, contexts: Tensor) -> Tensor:
    """Mark the candidates with the same string, int64 [K], in the same context: no negatives, bool [K, K].

    The same string in another context is another phrase: telling the two apart is what CCPR learns.
    """
    return (strings.unsqueeze(0) == strings.unsqueeze(1)) & (contexts.unsqueeze(0) == contexts.unsqueeze(1))


def segmentation_losses(logits: Tensor, are_phrases: Tensor) -> Tensor:
    """Compute the binary cross-entropy of each span, equation 6 of the CCPR paper, fp32 [spans]."""
    with torch.autocast(logits.device.type, enabled=False):
        return functional.binary_cross_entropy_with_logits(
            logits.float(), are_phrases.float(), reduction="none"
        )


@dataclass
class PhraseContrastConfig(PhraseTaskConfig):
    """Options of the task."""

    data: str = field(
        default=MISSING,
        metadata={
            "help": "folders of fairseq-ccpr extract, separated by ':', whose train and valid parts are mixed"
        },
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
    """Contrastive training of a `phrase_encoder`.

    Validation measures acc@1 over an index of held-out phrases.
    """

    def __init__(self, cfg: PhraseContrastConfig) -> None:
        super().__init__(cfg)
        fraction = cfg.different_context_fraction
        if not 0 <= fraction <= 1:
            raise ConfigurationError(
                f"--different-context-fraction is {fraction}: give a fraction between 0 and 1"
            )
        refuse_below_1(cfg, "phrases_per_sentence")
        self.edges = UNRECORDED_EDGES

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split. Validation does not depend on how phrases are drawn for training."""
        phrases, elsewhere = self.cfg.phrases_per_sentence, self.cfg.different_context_fraction
        if split != "train":  # translations in their own sentences, for CPR too
            phrases, elsewhere = VALID_PHRASES, 0.0
        pairs = list(self.open_folders(split, PhrasePairs))
        if split == "train":
            self.edges = "+".join(sorted({edge_rule(folder.manifest.settings) for folder in pairs}))
        most, seed = self.cfg.max_subwords, self.cfg.seed
        sets = [
            PhraseContrastDataset(folder, self.tokenizer, phrases, elsewhere, most, seed) for folder in pairs
        ]
        if left_out := sum(one.left_out for one in sets):
            logger.info("%s: %d sentence pairs of more than %d subwords left out", split, left_out, most)
        if not sum(map(len, sets)):
            raise ConfigurationError(f"{self.cfg.data} has no phrase pair in its {split} part to work with")
        self.datasets[split] = sets[0] if len(sets) == 1 else Mixture(sets)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"edges": self.edges}

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        model.eval()
        dataset = self.dataset("valid")
        on_gpu = choose_device(self.cfg.cpu).type == "cuda"
        indexed = []  # vectors, strings and contexts of each batch
        for batch in dataset.batch_by_size(dataset.ordered_indices(), max_tokens=VALID_TOKENS):
            if sample := dataset.collater([dataset[int(i)] for i in batch]):
                target = utils.move_to_cuda(sample["target"]) if on_gpu else sample["target"]
                indexed.append((self._vectors(model, target), target["strings"], target["contexts"]))
        vectors, *self.indexed = (torch.cat(of_batches) for of_batches in zip(*indexed))
        self.index = ExactIndex(vectors, "ip")

    @torch.no_grad()
    def _vectors(self, model: Any, side: dict[str, Tensor]) -> Tensor:
        with cpu_autocast(model):
            return model.vectors(model.context(side["tokens"]), side["spans"])

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Log acc@1 with the loss: `accuracy` requires the exact entry, `string_accuracy` only its string."""
        loss, count, logged = super().valid_step(sample, model, criterion)
        source, target = sample["source"], sample["target"]
        _, found = self.index.search(self._vectors(model, source), 1)
        strings, contexts = (indexed[found.squeeze(1)] for indexed in self.indexed)
        right = strings == target["strings"]
        exactly = right & (contexts == target["contexts"])
        found_of = {"accuracy": exactly.sum(), "string_accuracy": right.sum(), "queries": len(right)}
        return loss, count, logged | found_of


@dataclass
class CcprConfig(FairseqDataclass):
    """Options of `--criterion ccpr`."""

    segmentation_weight: float = field(
        default=1.0, metadata={"help": "beta, weight of the segmentation loss"}
    )


@register_criterion("ccpr", dataclass=CcprConfig)
class CcprCriterion(SummedCriterion):
    """L = L_{x->y} + L_{y->x} + beta L_seg, equation 7 of the CCPR paper, a sum over phrase pairs.

    Candidates are the phrases of all processes, except other right translations: those whose pair has, on
    either side, the very same phrase as the right pair. Word alignment gives a phrase several translations if
    a word next to them has no links. The mean of L_seg is over the spans of all processes, so that the sum
    over processes equals that of one process with the whole batch.
    """

    means: ClassVar = dict.fromkeys(("loss", "segmentation", "temperature"), 3)
    percentages: ClassVar = dict.fromkeys(("accuracy", "string_accuracy"), 2)

    def __init__(self, cfg: CcprConfig, task: Any) -> None:
        super().__init__(task)
        self.cfg = cfg

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        sides, count = (sample["source"], sample["target"]), sample["phrases"]
        outputs, scale = model(*sides)
        scale = divide_gradient(scale)
        vectors = [all_gather_rows(side_vectors) for side_vectors, _ in outputs]
        strings, contexts = (
            [all_gather_rows(side[name]) for side in sides] for name in ("strings", "contexts")
        )
        alignment = segmentation = vectors[0].new_zeros(())
        excluded = torch.stack([equal_candidates(*side) for side in zip(strings, contexts)]).any(dim=0)
        for one, other in ((0, 1), (1, 0)):
            alignment = alignment + alignment_losses(vectors[one], vectors[other], scale, excluded).sum()
            are_phrases = torch.arange(len(outputs[one][1]), device=excluded.device) < count
            segmentation = segmentation + segmentation_losses(outputs[one][1], are_phrases).sum()
        # the mean over the spans, once for each phrase pair
        segmentation *= len(strings[0]) / len(all_gather_rows(torch.cat([one[1] for one in outputs])))
        loss = alignment + self.cfg.segmentation_weight * segmentation
        # The alignment loss covers all processes: each logs its part of it.
        logged = {
            "loss": loss.detach() - alignment.detach() * (1 - count / len(strings[0])),
            "segmentation": segmentation.detach(), "temperature": count / float(scale),
            "ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": count,
        }  # fmt: skip
        return loss, count, logged
