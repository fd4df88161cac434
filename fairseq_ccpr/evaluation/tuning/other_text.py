"""`--also`: text of other domains, which tuning must not harm."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.test_set import batches
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import check_data_bin, has_subset

SUBSET = "valid"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OtherText:
    """A subset of another DATA_BIN."""

    data_bin: Path
    subset: str

    @classmethod
    def parse(cls, word: str) -> OtherText:
        """Read DATA_BIN or DATA_BIN:SUBSET."""
        folder, colon, subset = word.rpartition(":")
        if colon and "/" not in subset and not Path(word).exists():
            return cls(Path(folder), subset)
        return cls(Path(word), SUBSET)

    @property
    def place(self) -> tuple[Path, str]:
        """An identifier of the text that does not depend on the name of its folder."""
        return self.data_bin.resolve(), self.subset

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.data_bin}:{self.subset}"

    def samples(self, system: System) -> list[Any]:
        """Read its batches.

        Raises:
            ConfigurationError: no such folder or subset, or other dictionaries than the model's.
        """
        task = self._task(system)
        task.load_dataset(self.subset)
        cfg = copy.deepcopy(system.cfg)
        cfg.dataset.gen_subset = self.subset
        return list(batches(cfg, task, system.models))

    def check(self, system: System) -> None:
        """Check that it can be read, before any long work begins.

        Raises:
            ConfigurationError: as `samples`.
        """
        self._task(system)

    def _task(self, system: System) -> Any:
        task = system.task.with_data(self.data_bin)
        check_data_bin(self.data_bin, task.cfg.source_lang, task.cfg.target_lang)
        for language, own in (
            (task.cfg.source_lang, task.source_dictionary),
            (task.cfg.target_lang, task.target_dictionary),
        ):
            path = self.data_bin / f"dict.{language}.txt"
            found = task.load_dictionary(str(path))
            if found.symbols != own.symbols:
                digests = (fingerprint.short(fingerprint.of_strings(one.symbols)) for one in (found, own))
                raise ConfigurationError(
                    f"--also {self.data_bin} has another dictionary for {language} than the model ({', '.join(digests)}): "
                    "prepare it with the model's"
                )
        if not has_subset(task, self.subset):
            raise ConfigurationError(
                f"--also {self.data_bin} has no subset {self.subset}: name another, {self.data_bin}:SUBSET"
            )
        return task


def other_texts(words: list[str], home: OtherText) -> list[OtherText]:
    """Read the texts that `--also` names, each once; skip the held-out text, which is not of another domain."""
    texts = {home.place: home}
    for text in map(OtherText.parse, words):
        if text.place in texts:
            logger.warning("--also %s is named twice, or is what is tuned on: it counts once", text.name)
        texts.setdefault(text.place, text)
    return list(texts.values())[1:]
