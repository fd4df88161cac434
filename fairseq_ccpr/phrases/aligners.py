"""The aligners by the names that options and manifests give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fairseq_ccpr.phrases.alignment import Aligner
from fairseq_ccpr.phrases.statistical_aligners import StatisticalAligner

# A new aligner is one file and one line here: from the name of a symmetrisation, which it may pass over, to the aligner.
ALIGNERS: dict[str, Callable[[str], Aligner]] = {
    "ibm4": partial(StatisticalAligner, "ibm4"),
    "hmm": partial(StatisticalAligner, "hmm"),
    "fast-align": partial(StatisticalAligner, "fast-align"),
    "eflomal": partial(StatisticalAligner, "eflomal"),
}
