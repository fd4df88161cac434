"""acc@1 of phrase types: how often the nearest phrase of the other language is a translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fairseq_ccpr.lab.accuracy.type_systems import TypeSystem
from fairseq_ccpr.lab.xpr.lexicon_store import Lexicon
from fairseq_ccpr.lab.xpr.type_vectors import find_translations


@dataclass(frozen=True)
class TypeResult:
    """acc@1 of a system in one setting, per cent."""

    data: str
    system: str
    training: str  # see `setting_of`
    layer: int  # 0 where there is none to choose
    sentences: int
    forward: float  # source phrases that find a translation
    backward: float

    @property
    def mean(self) -> float:
        """Average both directions."""
        return (self.forward + self.backward) / 2

    def as_json(self) -> dict[str, Any]:
        """Convert to a dictionary, with the mean."""
        return asdict(self) | {"mean": self.mean}


def evaluate_types(
    systems: Mapping[str, TypeSystem], data: Mapping[str, Lexicon], counts: Sequence[int], show: bool
) -> list[TypeResult]:
    """Measure each system on each lexicon.

    Args:
        systems: by name.
        data: lexicons by name.
        counts: numbers of example sentences; 0 is the phrase alone.
        show: whether to draw progress bars.
    """
    results = []
    for data_name, lexicon in data.items():
        for name, system in systems.items():
            training = setting_of(system.trained_on, lexicon.manifest.language_pair)
            for (layer, count), (source, target) in sorted(system.encode(lexicon, counts, show).items()):
                pairs = torch.from_numpy(lexicon.pairs.astype("int64")).to(source.device)
                found = find_translations(source, target, pairs), find_translations(target, source, pairs.flip(1))
                forward, backward = (round(100 * float(right.float().mean()), 2) for right in found)
                results.append(TypeResult(data_name, name, training, layer, count, forward, backward))
    return results


def setting_of(trained_on: Sequence[str] | None, language_pair: str) -> str:
    """Name the paper's setting in which a system is tested on a language pair.

    >>> [setting_of(pairs, "de-en") for pairs in ([], ["en-de"], ["fr-en"], ["de-en", "fr-en"], None)]
    ['unsupervised', 'supervised', 'zero-shot', 'multilingual', 'other']
    """
    if trained_on is None:
        return "other"
    if not trained_on:
        return "unsupervised"
    if sorted(language_pair.split("-")) not in [sorted(pair.split("-")) for pair in trained_on]:
        return "zero-shot"
    return "supervised" if len(trained_on) == 1 else "multilingual"


def accuracy_rows(results: Sequence[TypeResult]) -> list[list[Any]]:
    """Tabulate the results, the header first."""
    table: list[list[Any]] = [["data", "system", "setting", "layer", "sentences", "→", "←", "mean"]]
    for one in results:
        cells = [one.data, one.system, one.training, one.layer or "", one.sentences]
        table.append([*cells, *(f"{value:.1f}" for value in (one.forward, one.backward, one.mean))])
    return table
