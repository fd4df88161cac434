"""The base of the tasks that train by contrast."""

from __future__ import annotations

from typing import Any

from fairseq.tasks import FairseqTask

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.training.cpu_autocast import CpuAutocast


class ContrastTask(CpuAutocast, FairseqTask):
    """A task that validates by retrieval accuracy, and has no dictionaries.

    Raises:
        ConfigurationError: fairseq would keep the checkpoint that is best by something else.
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
        """Return None: the data sets leave out what is too long."""
        return None

    @property
    def source_dictionary(self) -> None:
        """None: there is no such dictionary."""
        return None

    @property
    def target_dictionary(self) -> None:
        """None: there is no such dictionary."""
        return None
