"""Stages of an experiment: commands that are done once, for as long as nothing changes that they depend on."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Union

from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import ConfigurationError, StageError
from fairseq_ccpr.experiments.commands import PACKAGE, execute, last_line
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import MANIFEST, write_json
from fairseq_ccpr.version import __version__

FEW = 8  # files that are missing are named


@dataclass(frozen=True)
class Contents:
    """Words of a command line that are read from a file when the command runs."""

    path: Path

    def __str__(self) -> str:
        return f"$(cat {self.path})"


Word = Union[str, Contents]


@dataclass
class Stage:
    """A command, what it reads and what it makes."""

    name: str  # kind/domain/system
    module: str  # that runs it
    words: list[Word]
    outputs: list[Path]
    needs: list[Stage] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)  # settings of the experiment, and the paths they name
    resumes: bool = False  # whether a killed command goes on where it was; else what it has made so far is removed

    @property
    def file_name(self) -> str:
        """Its name for files."""
        return self.name.replace("/", ".")


def with_needs(goals: Iterable[Stage], left_out: Callable[[Stage], bool] = lambda stage: False) -> list[Stage]:
    """The goals and all that they need, each after what it needs; without those left out, and what they alone need."""
    found: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.name not in found and not left_out(stage):
            for need in stage.needs:
                visit(need)
            found[stage.name] = stage

    for goal in goals:
        visit(goal)
    return list(found.values())


class Runner:
    """Runs stages in a folder, into an output, and knows which of them are done.

    A stage is done when its stamp has the digest of its command, of the files it reads, by size and time, and of the stages
    it needs; and when what it made is there. Whatever has changed is made anew.

    Args:
        folder: where commands run.
        output: everything that is made is below it.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output = folder.resolve(), output.resolve()
        self.stamps, self.logs = self.output / "stamps", self.output / "logs"
        self._digests: dict[str, str] = {}

    def digest(self, stage: Stage) -> str:
        """Of all that the outcome of a stage depends on. It does not change when the output is moved."""
        if stage.name not in self._digests:
            words = [self._portable(str(word)) for word in stage.words]
            named = [word for word in words if self._is_file(word)]
            files = sorted({*named, *(path for _, path in stage.inputs)})
            about = [[path, list(_describe(self.folder / path))] for path in files]
            needed = [self.digest(need) for need in stage.needs]
            self._digests[stage.name] = fingerprint.of_strings([json.dumps([stage.module, words, about, needed])])
        return self._digests[stage.name]

    def _portable(self, word: str) -> str:
        """A word without the places of this machine that are no setting of the experiment."""
        return word.replace(str(self.output), "OUTPUT").replace(str(PACKAGE), PACKAGE.name)

    def _is_file(self, word: str) -> bool:
        """Whether a word of a command line names a file, such as one that an option is given."""
        try:
            return (self.folder / word).is_file()
        except OSError:  # too long for a name
            return False

    def stamp(self, stage: Stage) -> dict[str, Any] | None:
        """What is known of the last run of a stage, though what it made may have been deleted; None where it did not end."""
        path = self.stamps / f"{stage.file_name}.json"
        stamp = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return stamp if stamp is not None and stamp["digest"] == self.digest(stage) else None

    def done(self, stage: Stage) -> bool:
        """Whether there is nothing to do."""
        return self.stamp(stage) is not None and all(path.exists() for path in stage.outputs)

    def to_do(self, goals: Iterable[Stage]) -> list[Stage]:
        """The goals that are not done, each after the stages it needs that are not done.

        What a stage needed is not looked at once it is done: datastores may be deleted after decoding.
        """
        return with_needs(goals, self.done)

    def check_inputs(self, stages: Iterable[Stage]) -> None:
        """Raise a ConfigurationError that names all files that these stages would miss."""
        named = {path: key for stage in stages for key, path in stage.inputs}
        missing = [f"{path} ({key})" for path, key in named.items() if not (self.folder / path).exists()]
        if missing:
            more = f" and {len(missing) - FEW:,} more" if len(missing) > FEW else ""
            raise ConfigurationError(f"these are not there, seen from {self.folder}: {', '.join(missing[:FEW])}{more}")

    def command(self, stage: Stage) -> list[str]:
        """Words for the interpreter; those that are read from a file, as they stand in it if it is there."""
        words: list[str] = ["-m", stage.module]
        for word in stage.words:
            if isinstance(word, Contents) and word.path.is_file():
                words += shlex.split(word.path.read_text(encoding="utf-8"))
            else:
                words.append(str(word))
        return words

    def run(self, stage: Stage, lock: IO[str]) -> float:
        """Run a stage; what an earlier run of another command made is removed first.

        Args:
            lock: of the output, see `processes.locked`.

        Returns:
            Seconds.

        Raises:
            StageError: the command fails.
        """
        digest, begun = self.digest(stage), self.stamps / f"{stage.file_name}.begun"
        stamp, log = begun.with_suffix(".json"), self.logs / f"{stage.file_name}.log"
        resumed = stage.resumes and begun.is_file() and begun.read_text(encoding="utf-8") == digest
        stamp.unlink(missing_ok=True)
        if not resumed:
            begun.unlink(missing_ok=True)  # before what it vouches for
            for path in stage.outputs:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for folder in (self.stamps, self.logs, *(path.parent for path in stage.outputs)):
            folder.mkdir(parents=True, exist_ok=True)
        begun.write_text(digest, encoding="utf-8")
        command, start = self.command(stage), time.monotonic()
        with log.open("a" if resumed else "w", encoding="utf-8") as stream:
            code = execute(command, self.folder, stream, lock)
        seconds = time.monotonic() - start
        if code or not all(path.exists() for path in stage.outputs):
            raise StageError(f"stage {stage.name} failed with exit code {code} ({last_line(log)}); its log is {log}")
        about = {
            "stage": stage.name,
            "digest": digest,
            "command": ["python", *map(self._portable, command)],
            "log": str(log.relative_to(self.output)),
            "seconds": round(seconds, 1),
            "resumed": resumed,
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "created_with": f"fairseq-ccpr {__version__}",
            "datastore": _describe_datastore(stage.outputs[0]),
        }
        write_json(stamp, about)
        begun.unlink()
        return seconds


def _describe(path: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of a file, or of all below a folder; nothing where there is none."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            about = file.stat()
            yield str(file.relative_to(path)), about.st_size, about.st_mtime_ns


def _describe_datastore(output: Path) -> dict[str, Any] | None:
    """What results say of a datastore, kept for when it is deleted."""
    if not (output / MANIFEST).is_file():
        return None
    manifest = Manifest.read(output)
    section = manifest.token or manifest.phrase
    assert section is not None
    return {
        "entries": section.size,
        "dimension": section.dimension,
        "index": str(section.index),
        "share": section.share,
        "bytes": sum(file["bytes"] for file in section.files.values()),
        "fingerprints": section.fingerprints,
    }
