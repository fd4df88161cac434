"""CLKNN's training: the supervised contrastive loss, its criterion and its task."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore, fit_pca, sample_rows
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.training.contrast_sampler import ContrastSampler, ContrastSettings
from fairseq_ccpr.training.cpu_autocast import CpuAutocast, cpu_autocast, has_best, save_start
from fairseq_ccpr.training.length_batches import SizedDataset

ACCURACY_DIGITS = 3  # of `accuracy`, in percent
VALID_KEYS = 200_000  # that validation searches in, at most
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
class SupervisedContrastiveCriterion(FairseqCriterion):
    """That loss in training. In validation the task measures the precision of retrieval, logged as `accuracy`."""

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

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over anchors, and over the validation queries."""
        count = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar(
            "loss", sum(log.get("loss", 0) for log in logging_outputs) / max(count, 1), count, round=3
        )
        if any("precision" in log for log in logging_outputs):
            queries = sum(log.get("queries", 0) for log in logging_outputs)
            precision = sum(log.get("precision", 0) for log in logging_outputs)
            metrics.log_scalar("accuracy", 100 * precision / queries, queries, round=ACCURACY_DIGITS)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True


@dataclass
class ContrastTaskConfig(FairseqDataclass):
    """Options of other parts of fairseq that the tasks read; their own include at least `data`."""

    seed: int = II("common.seed")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    disable_validation: bool = II("dataset.disable_validation")


class ContrastTask(CpuAutocast, FairseqTask):
    """A task that validates by retrieval accuracy, and has no dictionaries."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tracks_accuracy = cfg.best_checkpoint_metric == "accuracy" and cfg.maximize_best_checkpoint_metric
        if not (tracks_accuracy or cfg.disable_validation):
            raise ConfigurationError(
                f"--task {cfg._name} validates by retrieval accuracy: "
                "give --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric"
            )

    def max_positions(self) -> None:
        """Return None: the data sets leave out examples that are too long."""
        return None

    @property
    def source_dictionary(self) -> None:
        """None: there is no such dictionary."""
        return None

    @property
    def target_dictionary(self) -> None:
        """None: there is no such dictionary."""
        return None


@dataclass
class TokenContrastConfig(ContrastTaskConfig):
    """Options of the task."""

    data: str = field(
        default=MISSING, metadata={"help": "a token datastore with the decoder's own states as keys"}
    )
    positives: int = field(default=2, metadata={"help": "M, positives of an anchor"})
    negatives: int = field(default=32, metadata={"help": "N, negatives of an anchor"})
    nearest_clusters: int = field(
        default=128, metadata={"help": "K, nearest clusters that hard negatives come from"}
    )
    negative_sampling: ChoiceEnum(["hard", "random"]) = field(  # type: ignore[valid-type]
        default="hard", metadata={"help": "hard: from clusters near the anchor; random: from any other"}
    )
    refresh_interval: int = field(
        default=200, metadata={"help": "R, updates until the clusters' centres are recomputed"}
    )
    anchors_per_epoch: int = field(
        default=32000, metadata={"help": "anchors drawn in an epoch, after which fairseq validates and saves"}
    )
    valid_datastore: Optional[str] = field(
        default=None,
        metadata={
            "help": "a datastore of the same states of held-out text, for validation; without it some sentences of the "
            "one that is trained on are held out, with all that have the same translation"
        },
    )
    valid_queries: int = field(
        default=2000, metadata={"help": "held-out tokens, about, that validation searches for"}
    )
    no_save: bool = II("checkpoint.no_save")


class NumberedDraws(SizedDataset):
    """0 to `count` - 1, for fairseq to batch: the data that they represent is drawn, or looked up, on the device."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.sizes = np.ones(count, dtype=np.int64)  # so that a batch is of so many examples

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collater(self, samples: list[int]) -> dict[str, Any]:
        """Make a batch of numbers, with the first of them in a separate field."""
        count = len(samples)
        if not count:
            return {}
        return {
            "numbers": torch.as_tensor(samples),
            "first": int(samples[0]),
            "nsentences": count,
            "ntokens": count,
        }


@register_task("token_contrast", dataclass=TokenContrastConfig)
class TokenContrastTask(ContrastTask):
    """Supervised contrastive training of a `token_adapter`; validation measures the precision of retrieval."""

    def __init__(self, cfg: TokenContrastConfig) -> None:
        super().__init__(cfg)
        if cfg.anchors_per_epoch < 1:
            raise ConfigurationError(f"--anchors-per-epoch is {cfg.anchors_per_epoch}: give at least 1")
        self.settings = ContrastSettings(
            cfg.positives,
            cfg.negatives,
            cfg.nearest_clusters,
            cfg.negative_sampling == "hard",
            cfg.refresh_interval,
            cfg.valid_queries,
            VALID_KEYS,
            cfg.seed,
        )
        self.datastore = _raw(cfg.data)
        self.dimension = self.datastore.section.dimension
        self.trained_on = _states(self.datastore)
        self.valid_datastore = _raw(cfg.valid_datastore) if cfg.valid_datastore else None
        if self.valid_datastore is not None and (found := _states(self.valid_datastore)) != self.trained_on:
            what = next(name for name in found if found[name] != self.trained_on[name])
            raise ConfigurationError(
                f"--valid-datastore {cfg.valid_datastore} holds states of another {what.replace('_', ' ')} than {cfg.data}: "
                "build both with the same"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: which states the model was trained on."""
        return self.trained_on

    @cached_property
    def sampler(self) -> ContrastSampler:
        """The keys, on the device that trains."""
        gpu = choose_device(self.cfg.cpu).type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        store, other = self.datastore, self.valid_datastore
        other_text = (other.keys, other.values, other.provenance[:, 0]) if other is not None else None
        return ContrastSampler(
            store.keys, store.values, store.provenance[:, 0], self.settings, device, other_text
        )

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build an adapter that starts as a PCA of the keys, if its widths allow it."""
        adapter = super().build_model(cfg, from_checkpoint)
        if adapter.can_start_linear and not from_checkpoint:
            rows = self.datastore.keys[sample_rows(len(self.datastore.keys), most=START_ROWS)]
            pca = fit_pca(torch.from_numpy(rows), adapter.output.out_features)
            adapter.start_as_pca(pca.mean, pca.components)
        return adapter

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split: `train` is what anchors are drawn from, `valid` the queries."""
        is_train = split == "train"
        self.datasets[split] = NumberedDraws(
            self.cfg.anchors_per_epoch if is_train else len(self.sampler.query_values)
        )

    def train_step(
        self, sample: dict[str, Any], model: Any, *args: Any, update_num: int, **others: Any
    ) -> Any:
        """Train on contrasts that are drawn for the batch."""
        adapter = _adapter(model)
        with cpu_autocast(adapter):
            keys = self.sampler.draw(adapter, len(sample["numbers"]), update_num, sample["first"])
        contrasts = {"keys": keys, "positives": self.settings.positives}
        return super().train_step(contrasts, model, *args, update_num=update_num, **others)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Let the untrained adapter compete for the best checkpoint: training then never makes keys worse."""
        if has_best() or self.cfg.no_save or self.cfg.disable_validation:
            return
        adapter = _adapter(model)
        accuracy = round(100 * self.sampler.measure(adapter, VALID_NEIGHBOURS), ACCURACY_DIGITS)
        save_start(adapter, self.state_dict(), accuracy, Path(self.cfg.save_dir))

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Index the keys that validation searches."""
        self.sampler.prepare_validation(_adapter(model))

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Any:
        """Log the retrieval precision with the loss."""
        numbers, adapter = sample["numbers"], _adapter(model)
        model.eval()
        keys = self.sampler.draw_held_out(adapter, numbers)
        contrasts = {"keys": keys, "positives": self.settings.positives}
        loss, count, logged = super().valid_step(contrasts, model, criterion)
        precision = self.sampler.precision(adapter, numbers, VALID_NEIGHBOURS).sum()
        return loss, count, logged | {"precision": precision, "queries": len(numbers)}


def _raw(directory: str) -> TokenDatastore:
    datastore = TokenDatastore(directory)
    if datastore.section.projection is not None:
        raise ConfigurationError(
            f"the keys of {directory} went through an adapter already: give a datastore of --adapter none, or the "
            "`raw` folder that --keep-raw-keys leaves"
        )
    return datastore


def _states(datastore: TokenDatastore) -> dict[str, str]:
    section = datastore.section
    return {"model": section.fingerprints["model"], "key_layer": section.key_layer}


def _adapter(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
