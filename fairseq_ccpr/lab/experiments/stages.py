"""Running an experiment's stages, each a command in a process of its own with a log."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Union

from fairseq_ccpr.child_process import run_child
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import CcprError, ConfigurationError
from fairseq_ccpr.provenance import commit_of_code
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import MANIFEST, write_json
from fairseq_ccpr.version import __version__

PACKAGE = Path(__file__).resolve().parents[2]  # fairseq_ccpr, as --user-dir
TAIL_BYTES = 4096  # of a log, where its last line is
FEW = 8  # files that are missing are named


class StageError(CcprError):
    """A command of an experiment that failed."""


def execute(words: list[str], folder: Path, log: IO[str], lock: IO[str]) -> int:
    """Run Python with these words in a folder, able to import this package, and return its exit code."""
    print(f"# {shlex.join(['python', *words])}", file=log, flush=True)
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return run_child([sys.executable, *words], lock, log, environment, folder, own_group=True)


@dataclass(frozen=True)
class FileArguments:
    """Words of a command line that are read from a file when the command starts, such as tuned settings."""

    path: Path

    def read(self) -> list[str]:
        """Read the words; files that were written next to this one are named where they are now, after a move as well."""
        words = shlex.split(self.path.read_text(encoding="utf-8"))
        beside = f"{self.path.name}."
        return [
            str(self.path.parent / name) if (name := Path(word).name).startswith(beside) else word
            for word in words
        ]

    def __str__(self) -> str:
        return f"$(cat {self.path})"


Word = Union[str, FileArguments]


@dataclass
class Stage:
    """A command, its dependencies and its outputs."""

    name: str  # kind/domain/system
    module: str  # that `python -m` runs
    words: list[Word]
    outputs: list[Path]
    needs: list[Stage] = field(default_factory=list)
    # settings of the experiment, and the paths they name
    inputs: list[tuple[str, str]] = field(default_factory=list)
    resumes: bool = False  # whether a killed command resumes; else what it has written is removed first
    # files that it may write; they must stay as it left them
    optional: list[Path] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        """The name without slashes; names of domains and systems have double dots, so that no two stages share one."""
        return self.name.replace(".", "..").replace("/", ".")


def with_needs(
    goals: Iterable[Stage], left_out: Callable[[Stage], bool] = lambda stage: False
) -> list[Stage]:
    """Sort the goals and all that they need, each after its needs; leave out some, and what they alone need."""
    ordered: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.name not in ordered and not left_out(stage):
            for need in stage.needs:
                visit(need)
            ordered[stage.name] = stage

    for goal in goals:
        visit(goal)
    return list(ordered.values())


class Runner:
    """Runs stages in a folder, into an output, and knows which of them are done.

    A stage is done when its outputs exist, its optional files are those that it wrote, and its stamp has the
    digest of its command, of the files it reads, by size and time, and of the stages it needs, none of which
    ran after it. Otherwise it runs again.
    """

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output = folder.resolve(), output.resolve()
        self.stamps, self.logs = self.output / "stamps", self.output / "logs"
        self._digests: dict[str, str] = {}

    def digest(self, stage: Stage) -> str:
        """Digest all that the outcome of a stage depends on. Moving the output does not change it."""
        if stage.name not in self._digests:
            words = [self.portable(str(word)) for word in stage.words]
            named = [word for word in words if self._is_file(word)]
            files = sorted({*named, *(path for _, path in stage.inputs)})
            about = [[path, list(_describe(self.folder / path))] for path in files]
            needed = [self.digest(need) for need in stage.needs]
            self._digests[stage.name] = fingerprint.of_strings(
                [json.dumps([stage.module, words, about, needed])]
            )
        return self._digests[stage.name]

    def portable(self, word: str) -> str:
        """Write a word with names in place of the folders of the output and of this package."""
        return word.replace(str(self.output), "OUTPUT").replace(str(PACKAGE), PACKAGE.name)

    def _is_file(self, word: str) -> bool:
        try:
            return (self.folder / word).is_file()
        except OSError:  # too long for a name
            return False

    def stamp(self, stage: Stage) -> dict[str, Any] | None:
        """Read the record of a stage's last run, which may outlive its outputs; None if it failed or is outdated."""
        path = self.stamps / f"{stage.file_name}.json"
        stamp = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return stamp if stamp is not None and stamp["digest"] == self.digest(stage) else None

    def done(self, stage: Stage) -> bool:
        """Tell whether a stage need not run."""
        stamp = self.stamp(stage)
        if stamp is None or not all(path.exists() for path in stage.outputs):
            return False
        needed = (self.stamp(need) for need in stage.needs)
        if any(one is not None and one["finished"] > stamp["finished"] for one in needed):
            return False
        found = self._optional_files(stage)
        return found == stamp.get("optional_files", found)  # stamps of before do not say

    def _optional_files(self, stage: Stage) -> dict[str, str]:
        return {
            self.portable(str(path)): fingerprint.of_file(path) for path in stage.optional if path.is_file()
        }

    def to_do(self, goals: Iterable[Stage]) -> list[Stage]:
        """Sort the goals that are not done, each after what it needs; what only a stage that is done needs may be deleted."""
        return with_needs(goals, self.done)

    def check_inputs(self, stages: Iterable[Stage]) -> None:
        """Check that the files that these stages read exist."""
        named = {path: key for stage in stages for key, path in stage.inputs}
        missing = [f"{path} ({key})" for path, key in named.items() if not (self.folder / path).exists()]
        if missing:
            more = f" and {len(missing) - FEW:,} more" if len(missing) > FEW else ""
            raise ConfigurationError(
                f"not found, relative to {self.folder}: {', '.join(missing[:FEW])}{more}"
            )

    def command(self, stage: Stage) -> list[str]:
        """Write the words for the interpreter; those of files that exist already are read from them."""
        words: list[str] = ["-m", stage.module]
        for word in stage.words:
            if isinstance(word, FileArguments) and word.path.is_file():
                words += word.read()
            else:
                words.append(str(word))
        return words

    def run(self, stage: Stage, lock: IO[str]) -> float:
        """Run a stage, after removing what an earlier run of another command wrote."""
        digest, begun = self.digest(stage), self.stamps / f"{stage.file_name}.begun"
        stamp, log = begun.with_suffix(".json"), self.logs / f"{stage.file_name}.log"
        resumed = stage.resumes and begun.is_file() and begun.read_text(encoding="utf-8") == digest
        stamp.unlink(missing_ok=True)
        if not resumed:
            begun.unlink(missing_ok=True)  # before what it vouches for
            for path in (*stage.outputs, *stage.optional):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for folder in (self.stamps, self.logs, *(path.parent for path in stage.outputs)):
            folder.mkdir(parents=True, exist_ok=True)
        begun.write_text(digest, encoding="utf-8")
        command, commit, start = self.command(stage), commit_of_code(), time.monotonic()
        with log.open("a" if resumed else "w", encoding="utf-8") as stream:
            code = execute(command, self.folder, stream, lock)
        seconds = time.monotonic() - start
        if code or not all(path.exists() for path in stage.outputs):
            raise StageError(
                f"stage {stage.name} failed with exit code {code} ({_last_line(log)}); its log is {log}"
            )
        about = {
            "stage": stage.name, "digest": digest, "command": ["python", *map(self.portable, command)],
            "log": str(log.relative_to(self.output)), "seconds": round(seconds, 1), "resumed": resumed,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "created_with": f"fairseq-ccpr {__version__}", "commit": commit,
            "optional_files": self._optional_files(stage), "datastore": _describe_datastore(stage.outputs[0]),
        }  # fmt: skip
        write_json(stamp, about)
        begun.unlink()
        return seconds


def _last_line(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = stream.read().decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next(line.strip() for line in reversed(lines) if line.strip())  # the first is the command


def _describe(path: Path) -> Iterator[tuple[str, int, int]]:
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            about = file.stat()
            yield str(file.relative_to(path)), about.st_size, about.st_mtime_ns


def _describe_datastore(output: Path) -> dict[str, Any] | None:
    if not (output / MANIFEST).is_file():
        return None
    section = Manifest.read(output).parts[0]
    return {
        "entries": section.size, "dimension": section.dimension, "index": str(section.index), "share": section.share,
        "bytes": sum(file["bytes"] for file in section.files.values()), "fingerprints": section.fingerprints,
    }  # fmt: skip
