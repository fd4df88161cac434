"""Loading what a datastore is built from: fairseq's translation task and one trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils

from fairseq_ccpr.decoding.task import BILINGUAL
from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.checkpoint import load_models
from fairseq_ccpr.paths import configuration, split_paths
from fairseq_ccpr.settings import as_words
from fairseq_ccpr.storage.data_bin import check_data_bin


def load_task(
    data_bin: Path,
    source_lang: str | None,
    target_lang: str | None,
    user_dir: str | None = None,
    of_task: Sequence[str] = (),
) -> Any:
    """Set up the task that retrieves for a folder that fairseq-preprocess wrote.

    fairseq infers languages that are not given from the names of the folder's files.

    Args:
        of_task: words of a command line, see `task_words`; for a bilingual model none are needed.

    Raises:
        ConfigurationError: the folder or a dictionary is missing.
    """
    check_data_bin(data_bin, *filter(None, (source_lang, target_lang)))
    named = {"source_lang": source_lang, "target_lang": target_lang, "user_dir": user_dir}
    arguments = [str(data_bin), *as_words(named), *of_task]
    parser = options.get_generation_parser(default_task=BILINGUAL)
    parsed = options.parse_args_and_arch(parser, input_args=arguments)
    config = configuration(parsed)
    utils.import_user_module(config.common)
    return tasks.setup_task(config.task)


def load_model(path: str, task: Any, device: torch.device, fp16: bool) -> Any:
    """Load the one model of a checkpoint for inference.

    Raises:
        CheckpointError: several checkpoints, a missing one, no checkpoint of fairseq, or one that would run code.
    """
    if len(paths := split_paths(path)) > 1:
        raise CheckpointError(
            f"--path names an ensemble of {len(paths)} checkpoints, and a datastore belongs to one model: build it with "
            "one of them (decoding finds its keys with that one and mixes with the whole ensemble)"
        )
    (model,) = load_models([path], task)
    if fp16:
        model.half()
    return model.to(device).eval()
