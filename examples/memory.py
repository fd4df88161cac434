"""Attach a memory of your own to the search: a subword that is never used. From the repository: python examples/memory.py"""

from typing import Any

import torch

from fairseq_ccpr import (
    Memory,
    MemoryBatch,
    Snapshot,
    Step,
    TranslationRetrievalConfig,
    TranslationRetrievalTask,
    Translator,
)
from fairseq.tasks import register_task  # after fairseq_ccpr, as fairseq alone would print what it loads

SENTENCES = ["Jesus aber sprach zu ihm: Komm!"]


class Avoided(Memory, MemoryBatch):
    """Takes the probability of some tokens away. It keeps nothing of a batch, and so is its own."""

    name, acts_on = "avoided", "mixture"  # after the datastore has voted

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def begin(self, sources: torch.Tensor, snapshot: Snapshot) -> "Avoided":
        """Begin a batch."""
        return self

    def rescore(self, step: Step) -> torch.Tensor:
        """Change log p of model and datastore, fp32 [H, V]."""
        step.model.log_probs[:, self.tokens] = float("-inf")
        return step.model.log_probs

    def signature(self) -> str:
        """Tell the signature what this is."""
        return f"avoided:{len(self.tokens)}"


@register_task("translation_avoiding", dataclass=TranslationRetrievalConfig)
class AvoidingTask(TranslationRetrievalTask):
    """Adds it to the memories of the datastore."""

    def build_memories(self, models: list[Any]) -> list[Memory]:
        """Build all of them, in the order in which they act."""
        tokens = [self.target_dictionary.index("▁him")]
        return [*super().build_memories(models), Avoided(tokens)]


for task in ("translation_retrieval", "translation_avoiding"):
    with Translator("datastores/demo/model.pt", datastore="datastores/demo/ready", task=task) as translator:
        for translation in translator.translate(SENTENCES):
            print(*translation.tokens)
