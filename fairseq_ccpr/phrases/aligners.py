"""The aligners by their names in options and manifests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions
from fairseq_ccpr.phrases.encoder_aligner import EncoderAligner
from fairseq_ccpr.phrases.statistical_aligners import StatisticalAligner

ENCODER = "encoder"

# A new aligner is one file and one line here.
ALIGNERS: dict[str, Callable[[AlignerOptions], Aligner]] = {
    "ibm4": partial(StatisticalAligner, "ibm4"),
    "hmm": partial(StatisticalAligner, "hmm"),
    "fast-align": partial(StatisticalAligner, "fast-align"),
    "eflomal": partial(StatisticalAligner, "eflomal"),
    ENCODER: EncoderAligner,
}
