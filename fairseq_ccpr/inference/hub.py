"""fairseq's hub interface (`TransformerModel.from_pretrained`) would translate without a datastore, so it is refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fairseq import checkpoint_utils
from fairseq.tasks import TASK_REGISTRY

from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.errors import ConfigurationError


def refuse_retrieval_by_hub() -> None:
    """Make the hub refuse a datastore, or a task that retrieves: it drops the options of both, and builds no memory."""
    load = checkpoint_utils.load_model_ensemble_and_task

    @functools.wraps(load)
    def checked(
        filenames: Any, arg_overrides: Mapping[str, Any] | None = None, task: Any = None, *others: Any, **named: Any
    ) -> Any:
        wanted = arg_overrides or {}
        kind = TASK_REGISTRY.get(wanted.get("task"))
        if task is None and (wanted.get("datastore") or (kind and issubclass(kind, RetrievalTask))):
            raise ConfigurationError(
                "fairseq's from_pretrained does not retrieve: use fairseq_ccpr.Translator(path, datastore=...)"
            )
        return load(filenames, arg_overrides, task, *others, **named)

    checkpoint_utils.load_model_ensemble_and_task = checked
