"""A small experiment: its settings, running it in this process, and what it found."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import IO, Any

import yaml

from tests.helpers import call
from tests.small_models import World


def execute_here(words: list[str], folder: Path, log: IO[str], lock: IO[str]) -> int:
    """A stage in this process, which spares it the imports."""
    # of ours, the words begin with the name
    command = "fairseq-train" if words[1] == "fairseq_cli.train" else ""
    assert not lock.closed
    with contextlib.chdir(folder):
        done = call(command, *words[2:], check=False)
    log.write(done.stdout + done.stderr)
    return done.returncode


def write_config(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path


def settings_of(world: World, folder: Path) -> dict[str, Any]:
    """A domain that is binarised, one of two files a subset, paths relative to the folder; kNN-MT with all and with less."""
    folder.mkdir(parents=True)
    shutil.copy(world.spm, folder / "spm.model")
    for subset in ("valid", "test"):
        rows = (world.folder / f"{subset}.tsv").read_text(encoding="utf-8").splitlines()[:12]
        for side, language in enumerate(("de", "en")):
            text = "".join(row.split("\t")[side] + "\n" for row in rows)
            (folder / f"{subset}.{language}").write_text(text, encoding="utf-8")
    store = "--index exact --cpu --max-tokens 1500"
    return {
        "title": "A & B",
        "model": {
            "path": str(world.model), "source_lang": "de", "target_lang": "en",
            "subwords": "--bpe sentencepiece --sentencepiece-model spm.model",
            "dictionary": [str(world.data_bin / "dict.en.txt")], "options": "--cpu --beam 2 --max-len-b 30",
        },
        "domains": {
            "verses": {"data_bin": str(world.data_bin), "published_bleu": 99.0, "published_in": "nowhere"},
            "few": {"text": {"train": str(world.folder / "valid.tsv"), "valid": "valid", "test": "test"},
                    "references": ["test.en"], "unlike": "valid.en", "monolingual": ["valid.en"],
                    "publish": True},
        },
        "tune_options": "--combiner fixed --decode 1",
        "bootstrap_samples": 20,
        "systems": {
            "base": None,
            "knn-mt": {"tokens": {"options": store}},
            "tenth": {
                "tokens": {"options": store, "share": 0.1}, "tune_on": "few", "against": "knn-mt", "domains": ["verses"],
                "tune_options": "--combiner learned", "also": ["verses"],
            },
            "fixed": {"tokens": {"options": store}, "tune": False, "options": "--tokens-k 2", "domains": ["verses"]},
        },
    }  # fmt: skip


def experiment(config: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run an experiment into the folder `out` next to its file."""
    return call("experiment run", config, "--output", config.parent / "out", *extra, check=check)


def to_do(config: Path, *extra: object) -> set[str]:
    """The stages that would run."""
    return set(re.findall("^# (.*): to do$", experiment(config, "--dry-run", *extra).stdout, re.MULTILINE))


def results_of(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "out" / "results.json").read_text(encoding="utf-8"))
