"""The task that retrieves with a model, and the options it needs, as the model's checkpoint tells them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_ccpr.decoding.task import BART, BILINGUAL, MULTILINGUAL, RETRIEVING
from fairseq_ccpr.models.checkpoint import read_task
from fairseq_ccpr.settings import as_words

# What a multilingual model must be told again as it was trained.
OF_TASK: Mapping[str, tuple[str, ...]] = {
    MULTILINGUAL: (
        "langs", "lang_pairs", "encoder_langtok", "decoder_langtok", "langtoks_specs", "lang_tok_style",
        "lang_tok_replacing_bos_eos",
    ),
    BART: ("langs", "prepend_bos"),
}  # fmt: skip
FILES: Mapping[str, tuple[str, ...]] = {MULTILINGUAL: ("lang_dict", "fixed_dictionary", "source_dict", "target_dict")}
TASKS = (BILINGUAL, MULTILINGUAL, BART)


def task_words(model: Path) -> list[str]:
    """Return words of a command line: the task that retrieves with a model, and its options.

    There are none for a bilingual model, and for a file that is missing.

    Files that the checkpoint names are looked for at their recorded paths, and next to it.

    Raises:
        CheckpointError: the file is no checkpoint of fairseq, or would run code.
    """
    if not model.is_file():
        return []  # whoever loads it will say so
    trained = read_task(model)
    name = str(trained.get("task") or trained.get("_name") or "")
    task = RETRIEVING.get(name, name)
    if task not in OF_TASK:
        return []
    told = {option: _as_value(trained.get(option)) for option in OF_TASK[task]}
    for option in FILES.get(task, ()):
        if given := trained.get(option):
            places = (Path(given), model.parent / Path(given).name)
            told[option] = next((str(place) for place in places if place.is_file()), None)
    return as_words({"task": task, **{option: value for option, value in told.items() if value}})


def _as_value(value: Any) -> Any:
    """Return an option's value as it is typed: lists with commas."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
