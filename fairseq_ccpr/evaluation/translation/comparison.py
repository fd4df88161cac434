"""A comparison of the base model with retrieval on one test set: quality, relative speed, and examples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fairseq_ccpr.evaluation.translation.scores import sentence_chrf
from fairseq_ccpr.evaluation.translation.test_set import Decodings, decode
from fairseq_ccpr.inference.system import System

BASE, RETRIEVAL = "base", "retrieval"


@dataclass
class Comparison:
    """Both systems on one test set, or the base model alone."""

    retrieval_signature: str | None
    decodings: Decodings

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per system: scores, seconds, tokens per second, and those as a ratio to the base model's."""
        base = self.decodings.systems[BASE]
        return [
            {
                "system": name,
                **asdict(self.decodings.scores(name)),
                "seconds": round(system.seconds, 1),
                "tokens_per_second": round(system.tokens_per_second),
                "speed": round(system.tokens_per_second / base.tokens_per_second, 3),
            }
            for name, system in self.decodings.systems.items()
        ]

    def examples(self, count: int) -> list[int]:
        """Choose the sentences whose translation retrieval brought nearest to the reference, by chrF gained."""
        base, retrieval = (self.decodings.systems[name].hypotheses for name in (BASE, RETRIEVAL))
        gains = {
            i: sentence_chrf(retrieval[i], reference) - sentence_chrf(base[i], reference)
            for i, reference in self.decodings.references.items()
            if base[i] != retrieval[i]
        }
        return sorted(gains, key=lambda i: (-gains[i], i))[:count]


def compare_decoding(system: System) -> Comparison:
    """Decode a subset with fairseq's plain generator and with the retrieving one, in turns.

    Args:
        system: without a datastore, there is nothing but the plain generator.
    """
    system.task.load_dataset(system.cfg.dataset.gen_subset)
    generators = {BASE: system.generator(retrieve=False)}
    if system.ensemble is not None:
        generators[RETRIEVAL] = system.generator()
    return Comparison(system.signature, decode(system.cfg, system.task, system.models, generators))
