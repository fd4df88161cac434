"""CLKNN's training: the supervised contrastive loss, its criterion and its task."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from fairseq.checkpoint_utils import save_checkpoint, torch_persistent_save
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import get_global_rank
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore, fit_pca, sample_rows
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.token_adapter import can_be_linear, init_as_linear
from fairseq_ccpr.training.contrast_sampler import ContrastSampler, Text, TokenContrastConfig
from fairseq_ccpr.training.length_batches import SizedDataset
from fairseq_ccpr.training.tasks import ContrastTask, SummedCriterion, cpu_autocast, refuse_below_1

logger = logging.getLogger(__name__)

BEST = "checkpoint_best.pt"
ACCURACY_DIGITS = 3  # of `accuracy`, in percent
VALID_NEIGHBOURS = 8  # whose tokens it compares
START_ROWS = 1 << 16  # keys to fit the PCA on that training starts from


def supervised_contrastive_loss(
    anchors: Tensor, positives: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """Compute equation 6 of the CLKNN paper for each anchor, [B], in fp32 or better.

    -log [ sum_M exp s(z, z+) / (sum_M exp s(z, z+) + sum_N exp s(z, z-)) ], s = cosine / T'.

    Args:
        anchors: z, [B, d].
        positives: [B, M, d], of the anchor's token.
        negatives: [B, N, d], of other tokens.
        temperature: T'. At the paper's 0.01 the logits reach 100, which low precision cannot hold.

    >>> z = torch.eye(2)
    >>> supervised_contrastive_loss(z[:1], z[:1].unsqueeze(0), z[1:].unsqueeze(0), 1.0)
    tensor([0.3133])
    """
    dtype = torch.promote_types(anchors.dtype, torch.float32)
    others = torch.cat([positives, negatives], dim=1)
    anchors, others = (torch.nn.functional.normalize(z.to(dtype), dim=-1) for z in (anchors, others))
    with torch.autocast(anchors.device.type, enabled=False):
        logits = (others @ anchors.unsqueeze(2)).squeeze(2) / temperature  # [B, M + N]
    return logits.logsumexp(dim=1) - logits[:, : positives.size(1)].logsumexp(dim=1)


@dataclass
class SupervisedContrastiveConfig(FairseqDataclass):
    """Options of `--criterion supervised_contrastive`."""

    # The paper has 0.01, which makes retrieval less precise here.
    contrast_temperature: float = field(
        default=0.03, metadata={"help": "T' of the loss, by which cosines are divided"}
    )


@register_criterion("supervised_contrastive", dataclass=SupervisedContrastiveConfig)
class SupervisedContrastiveCriterion(SummedCriterion):
    """That loss in training; in validation the task logs the precision of retrieval as `accuracy`."""

    percentages: ClassVar = {"accuracy": ACCURACY_DIGITS}

    def __init__(self, task: Any, contrast_temperature: float) -> None:
        super().__init__(task)
        if not 0 < contrast_temperature < float("inf"):
            raise ConfigurationError(
                f"--contrast-temperature is {contrast_temperature}: a number above 0 is needed"
            )
        self.temperature = contrast_temperature

    def forward(self, model: Any, sample: dict[str, Any]) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over the anchors, their number, and the values to log.

        Of `keys` [B, 1 + M + N, d], each row is an anchor, its M positives and its N negatives.
        """
        z = model(sample["keys"])
        m = sample["positives"]
        loss = supervised_contrastive_loss(z[:, 0], z[:, 1 : 1 + m], z[:, 1 + m :], self.temperature).sum()
        count = len(z)
        logged = {"loss": loss.data, "nsentences": count, "ntokens": count, "sample_size": count}
        return loss, count, logged


class NumberedDraws(SizedDataset):
    """0 to `count` - 1, for fairseq to batch: what they represent is drawn, or looked up, on the device."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.sizes = np.ones(count, dtype=np.int64)  # so that a batch is of so many examples

    def __getitem__(self, index: int) -> int:
        return int(index)

    def collater(self, samples: list[int]) -> dict[str, Any]:
        """Make a batch of numbers, with the first of them in a separate field, which stays on the host."""
        if not samples:
            return {}
        counts = dict.fromkeys(("nsentences", "ntokens"), len(samples))
        return {"numbers": torch.as_tensor(samples), "first": samples[0]} | counts


@register_task("token_contrast", dataclass=TokenContrastConfig)
class TokenContrastTask(ContrastTask):
    """Supervised contrastive training of a `token_adapter`.

    Validation measures the precision of retrieval.
    """

    def __init__(self, cfg: TokenContrastConfig) -> None:
        super().__init__(cfg)
        refuse_below_1(cfg, "anchors_per_epoch", "positives", "negatives")
        refuse_below_1(cfg, "nearest_clusters", "refresh_interval", "valid_queries")
        self.datastore = _raw(cfg.data)
        self.dimension = self.datastore.section.dimension
        self.trained_on = _states(self.datastore)
        self.valid_datastore = _raw(cfg.valid_datastore) if cfg.valid_datastore else None
        if self.valid_datastore is not None and (found := _states(self.valid_datastore)) != self.trained_on:
            what = next(name for name in found if found[name] != self.trained_on[name])
            raise ConfigurationError(
                f"--valid-datastore {cfg.valid_datastore} holds states of another {what.replace('_', ' ')} "
                f"than {cfg.data}: build both with the same"
            )

    def state_dict(self) -> dict[str, Any]:
        return self.trained_on

    @cached_property
    def sampler(self) -> ContrastSampler:
        device = choose_device(self.cfg.cpu)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        other = Text.of(self.valid_datastore) if self.valid_datastore is not None else None
        return ContrastSampler(Text.of(self.datastore), self.cfg, device, other)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build an adapter that starts as a PCA of the keys, if its widths allow it."""
        adapter = super().build_model(cfg, from_checkpoint)
        layers = adapter.hidden, adapter.output
        if can_be_linear(*layers) and not from_checkpoint:
            rows = self.datastore.keys[sample_rows(len(self.datastore.keys), most=START_ROWS)]
            pca = fit_pca(torch.from_numpy(rows), adapter.output.out_features)
            components, shift = pca.components.float(), -(pca.components @ pca.mean).float()
            init_as_linear(*layers, components, shift)
        return adapter

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split: `train` is what anchors are drawn from, `valid` the queries."""
        count = self.cfg.anchors_per_epoch if split == "train" else len(self.sampler.query_values)
        self.datasets[split] = NumberedDraws(count)

    def train_step(
        self, sample: dict[str, Any], model: Any, *args: Any, update_num: int, **others: Any
    ) -> Any:
        adapter = _adapter(model)
        with cpu_autocast(adapter):
            keys = self.sampler.draw(adapter, len(sample["numbers"]), update_num, sample["first"])
        contrasts = {"keys": keys, "positives": self.cfg.positives}
        return super().train_step(contrasts, model, *args, update_num=update_num, **others)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Let the untrained adapter compete for the best checkpoint: training then never makes keys worse.

        fairseq has a best one where this process, or the one that it resumes, measured any. Each process
        measures; the first of them saves, and later checkpoints replace that if they are no worse.
        """
        if hasattr(save_checkpoint, "best") or self.cfg.no_save or self.cfg.disable_validation:
            return
        adapter = _adapter(model)
        accuracy = round(100 * self.sampler.measure(adapter, VALID_NEIGHBOURS), ACCURACY_DIGITS)
        save_checkpoint.best = accuracy
        logger.info(f"update 0, before training: accuracy {accuracy}")
        if get_global_rank() == 0:
            weights = {name: tensor.cpu() for name, tensor in adapter.state_dict().items()}
            position = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
            state = {
                "args": None,
                "cfg": None,
                "model": weights,
                "optimizer_history": [{"lr_scheduler_state": {}, "num_updates": 0}],
                "task_state": self.state_dict(),
                "extra_state": position | dict.fromkeys(("val_loss", "best"), accuracy),
            }
            torch_persistent_save(state, str(Path(self.cfg.save_dir) / BEST))

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        self.sampler.prepare_validation(_adapter(model))

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        numbers, adapter = sample["numbers"], _adapter(model)
        model.eval()
        keys = self.sampler.draw_held_out(adapter, numbers)
        contrasts = {"keys": keys, "positives": self.cfg.positives}
        loss, count, logged = super().valid_step(contrasts, model, criterion)
        precision = self.sampler.precision(adapter, numbers, VALID_NEIGHBOURS).sum()
        return loss, count, logged | {"accuracy": precision, "queries": len(numbers)}


def _raw(directory: str) -> TokenDatastore:
    datastore = TokenDatastore(directory)
    if datastore.section.projection is not None:
        raise ConfigurationError(
            f"the keys of {directory} went through an adapter already: give a datastore of --adapter none, "
            "or the `raw` folder that --keep-raw-keys leaves"
        )
    return datastore


def _states(datastore: TokenDatastore) -> dict[str, str]:
    section = datastore.section
    return {"model": section.fingerprints["model"], "key_layer": section.key_layer}


def _adapter(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
