"""IBM-4, HMM, fast-align and eflomal models of sil-thot, trained in both directions and symmetrised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extras import installing
from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions, SentencePair
from fairseq_ccpr.progress import progress_bar

SYMMETRIZATIONS = (
    "grow-diag-final-and", "grow-diag-final", "grow-diag", "grow", "och", "intersection", "union",
)  # fmt: skip
MAX_WORDS = 200  # of a sentence; sil-thot skips longer ones
_FREE_ITERATIONS = 0  # the model chooses the number itself, from the size of the text

# Each model starts from the previous one; these numbers of EM iterations are customary (GIZA++, fast_align).
_STAGES: dict[str, tuple[tuple[str, int], ...]] = {
    "ibm4": (
        ("Ibm1AlignmentModel", 5), ("HmmAlignmentModel", 5), ("Ibm3AlignmentModel", 3), ("Ibm4AlignmentModel", 3),
    ),
    "hmm": (("Ibm1AlignmentModel", 5), ("HmmAlignmentModel", 5)),
    "fast-align": (("FastAlignModel", 5),),
    "eflomal": (("EflomalAlignmentModel", _FREE_ITERATIONS),),
}  # fmt: skip


def import_thot() -> Any:
    """Import the module `thot.alignment`.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import thot.alignment
    except ImportError:
        raise ConfigurationError(
            f"word alignment needs sil-thot, which is not installed: {installing('align')}, or give ready alignments with "
            "--alignments"
        ) from None
    return thot.alignment


class StatisticalAligner(Aligner):
    """One model in each direction.

    Args:
        name: `ibm4`, `hmm`, `fast-align` or `eflomal`.
        options: only `symmetrization` is used, one of SYMMETRIZATIONS.

    Raises:
        ConfigurationError: sil-thot is not installed.
    """

    def __init__(self, name: str, options: AlignerOptions) -> None:
        super().__init__(options.symmetrization)
        self.thot = import_thot()
        self.name = name
        self._aligner: Any = None

    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn from the pairs, keeping all their words in memory; the same pairs give the same model."""
        (first, _), *_ = _STAGES[self.name]
        direct, inverse = (getattr(self.thot, first)() for _ in range(2))
        for model in (direct, inverse):
            if self.name == "eflomal":
                model.seed, model.deterministic = 1, True
        for pair in pairs:
            source, target = pair.words()
            direct.add_sentence_pair(source, target)
            inverse.add_sentence_pair(target, source)
        self._aligner = self.thot.SymmetrizedAlignmentModel(
            self._train_direction(direct, "source to target", show),
            self._train_direction(inverse, "target to source", show),
        )

    def _train_direction(self, model: Any, direction: str, show: bool) -> Any:
        """Train all stages, each from the one before, and return the last model."""
        for number, (kind, iterations) in enumerate(_STAGES[self.name]):
            if number:
                model = getattr(self.thot, kind)(model)
            model.start_training()
            if iterations == _FREE_ITERATIONS:
                iterations = model.scheduled_iterations
            label = f"{kind.removesuffix('AlignmentModel').removesuffix('Model')}, {direction}"
            for _ in progress_bar(label, "iteration", range(iterations), quiet=not show):
                model.train()
            model.end_training()
        return model

    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        """Align sentence pairs: links [A, 2] of each."""
        heuristic = self.symmetrization.replace("-", "_").upper()
        self._aligner.heuristic = getattr(self.thot.SymmetrizationHeuristic, heuristic)
        sources, targets = zip(*(pair.words() for pair in pairs))
        found = self._aligner.get_best_alignments(sources, targets)
        return [np.argwhere(matrix.to_numpy()).astype(np.int32) for _, matrix in found]
