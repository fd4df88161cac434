"""`--task token_contrast`: training a CLKNN adapter on the keys of a token datastore."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from omegaconf import II, MISSING

from fairseq_ccpr.datastore.projection import fit_pca, sample_rows
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.training.contrast_sampler import ContrastSampler, ContrastSettings
from fairseq_ccpr.training.contrast_task import ContrastTask, ContrastTaskConfig
from fairseq_ccpr.training.cpu_autocast import cpu_autocast
from fairseq_ccpr.training.sized_dataset import SizedDataset
from fairseq_ccpr.training.start_checkpoint import has_best, save_start
from fairseq_ccpr.training.supervised_contrastive import ACCURACY_DIGITS

START_ROWS = 1 << 16  # keys to fit the PCA on that training starts from


@dataclass
class TokenContrastConfig(ContrastTaskConfig):
    """Options of the task."""

    data: str = field(default=MISSING, metadata={"help": "a token datastore with the decoder's own states as keys"})
    positives: int = field(default=2, metadata={"help": "M, positives of an anchor"})
    negatives: int = field(default=32, metadata={"help": "N, negatives of an anchor"})
    nearest_clusters: int = field(default=128, metadata={"help": "K, nearest clusters that hard negatives come from"})
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
    valid_queries: int = field(default=2000, metadata={"help": "held-out tokens, about, that validation searches for"})
    valid_keys: int = field(default=200000, metadata={"help": "keys, at most, that it searches in"})
    valid_neighbours: int = field(default=8, metadata={"help": "neighbours whose tokens it compares"})
    no_save: bool = II("checkpoint.no_save")


class NumberedDraws(SizedDataset):
    """0 to `count` - 1, for fairseq to batch: the data that they represent is drawn, or looked up, on the device."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return int(index)

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def collater(self, samples: list[int]) -> dict[str, Any]:
        """Make a batch of numbers, with the first of them in a separate field."""
        count = len(samples)
        if not count:
            return {}
        return {"numbers": torch.as_tensor(samples), "first": int(samples[0]), "nsentences": count, "ntokens": count}


@register_task("token_contrast", dataclass=TokenContrastConfig)
class TokenContrastTask(ContrastTask):
    """Supervised contrastive training of a `token_adapter`; validation measures the precision of retrieval."""

    def __init__(self, cfg: TokenContrastConfig) -> None:
        super().__init__(cfg)
        for name in ("anchors_per_epoch", "valid_neighbours"):
            if (value := getattr(cfg, name)) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} is {value}: give at least 1")
        self.settings = ContrastSettings(
            cfg.positives, cfg.negatives, cfg.nearest_clusters, cfg.negative_sampling == "hard",
            cfg.refresh_interval, cfg.valid_queries, cfg.valid_keys, cfg.seed,
        )  # fmt: skip
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
        return ContrastSampler(store.keys, store.values, store.provenance[:, 0], self.settings, device, other_text)

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
        if split == "train":
            self.datasets[split] = NumberedDraws(self.cfg.anchors_per_epoch)
        else:
            self.datasets[split] = NumberedDraws(len(self.sampler.query_values))

    def train_step(
        self,
        sample: dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Any:
        """Train on contrasts that are drawn for the batch."""
        numbers = sample["numbers"]
        adapter = _adapter(model)
        with cpu_autocast(adapter):
            keys = self.sampler.draw(adapter, len(numbers), update_num, sample["first"])
        contrasts = {"keys": keys, "positives": self.settings.positives}
        return super().train_step(contrasts, model, criterion, optimizer, update_num, ignore_grad)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Let the untrained adapter compete for the best checkpoint: training then never makes keys worse."""
        if has_best() or self.cfg.no_save or self.cfg.disable_validation:
            return
        adapter = _adapter(model)
        accuracy = round(100 * self.sampler.measure(adapter, self.cfg.valid_neighbours), ACCURACY_DIGITS)
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
        precision = self.sampler.precision(adapter, numbers, self.cfg.valid_neighbours).sum()
        return loss, count, logged | {"precision": precision, "queries": len(numbers)}


def _raw(directory: str) -> TokenDatastore:
    """Open a datastore whose keys are the decoder's own states."""
    datastore = TokenDatastore(directory)
    if datastore.section.projection is not None:
        raise ConfigurationError(
            f"the keys of {directory} went through an adapter already: give a datastore of --adapter none, or the "
            "`raw` folder that --keep-raw-keys leaves"
        )
    return datastore


def _states(datastore: TokenDatastore) -> dict[str, str]:
    """Describe which states its keys are."""
    section = datastore.section
    return {"model": section.fingerprints["model"], "key_layer": section.key_layer}


def _adapter(model: Any) -> Any:
    """Unwrap the adapter from fairseq's wrappers for several processes."""
    while hasattr(model, "module"):
        model = model.module
    return model
