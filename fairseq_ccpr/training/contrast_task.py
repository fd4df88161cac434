"""The base of the tasks that train by contrast."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask
from omegaconf import II

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.training.cpu_autocast import CpuAutocast


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
    """A task that validates by retrieval accuracy, and has no dictionaries.

    Raises:
        ConfigurationError: fairseq would select the best checkpoint by another measure.
    """

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
