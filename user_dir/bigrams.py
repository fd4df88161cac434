"""A memory of your own: what followed the last two tokens in a text of the target language, by counting.

    fairseq-generate DATA_BIN --user-dir user_dir --task translation_bigrams --bigram-text FILE --bigram-lambda 0.2 ...

It decodes alone or beside a datastore, `fairseq-ccpr tune` trains trust in it, and `fairseq-ccpr explain` shows what it says.
FILE is text in the model's subwords, a sentence a line.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_ccpr import (
    Columns,
    Memory,
    MemoryBatch,
    Snapshot,
    Step,
    TranslationRetrievalConfig,
    TranslationRetrievalTask,
    Vote,
)


class Bigrams(Memory, MemoryBatch):
    """Counts of three tokens in a row in sentences, int64 [L] each. Hypotheses hold all it looks at: it is its own batch."""

    name, features = "bigrams", ("context found", "highest p_bigrams")

    def __init__(
        self, sentences: list[Tensor], end: int, weight: float, words: int, device: torch.device
    ) -> None:
        start, kept = torch.tensor([end, end]), 16  # tokens of each context, the most frequent
        one, two, three = torch.cat([torch.cat([start, ids]).unfold(0, 3, 1) for ids in sentences]).T
        seen, counts = ((one * words + two) * words + three).unique(return_counts=True)
        contexts, places, sizes = (seen // words).unique(return_inverse=True, return_counts=True)
        order = torch.argsort(
            places * (counts.max() + 1) - counts, stable=True
        )  # the most frequent of each context first
        ranks = torch.arange(len(seen)) - (sizes.cumsum(0) - sizes)[places[order]]
        chosen, columns = order[ranks < kept], ranks[ranks < kept]
        values = torch.zeros(len(contexts), kept, dtype=torch.long)
        values[places[chosen], columns] = seen[chosen] % words
        shares = torch.zeros(len(contexts), kept)
        shares[places[chosen], columns] = counts[chosen].float()
        log_probs = (shares / shares.sum(dim=1, keepdim=True)).log()
        self.contexts, self.values, self.log_probs = (
            contexts.to(device),
            values.to(device),
            log_probs.to(device),
        )
        self.end, self.weight, self.words = end, weight, words

    def begin(self, sources: Tensor, snapshot: Snapshot) -> "Bigrams":
        """Begin a batch: there is nothing to retrieve for its sources."""
        return self

    def vote(self, step: Step) -> Vote:
        """Look up what followed the last two tokens of each hypothesis."""
        last = torch.nn.functional.pad(step.tokens, (1, 0), value=self.end)[:, -2:]
        context = last[:, 0] * self.words + last[:, 1]
        row = torch.searchsorted(self.contexts, context).clamp_max(len(self.contexts) - 1)
        found = self.contexts[row] == context
        log_probs = self.log_probs[row].masked_fill(~found.unsqueeze(1), float("-inf"))
        seen = torch.stack([found.float(), log_probs[:, 0].exp()], dim=1)
        return Vote(self.values[row], log_probs, self.weight * found, Columns(seen))

    def signature(self) -> str:
        """Name the counts and the weight."""
        return f"bigrams:{len(self.contexts)}|lambda:{self.weight}"


@dataclass
class BigramConfig(TranslationRetrievalConfig):
    """Options of the task below."""

    bigram_text: Optional[str] = field(default=None, metadata={"help": "text in the model's subwords"})
    bigram_lambda: float = field(
        default=0.2, metadata={"help": "interpolation weight where the context was seen"}
    )


@register_task("translation_bigrams", dataclass=BigramConfig)
class TranslationBigramsTask(TranslationRetrievalTask):
    """`translation_retrieval` with that memory."""

    def build_memories(self, models: list[Any]) -> list[Memory]:
        """Build the memories of the datastore, and the counts."""
        words, lines = (
            self.target_dictionary,
            Path(self.cfg.bigram_text).read_text(encoding="utf-8").splitlines(),
        )
        sentences = [words.encode_line(line, add_if_not_exist=False).long() for line in lines]
        device = next(models[0].parameters()).device
        bigrams = Bigrams(sentences, words.eos(), self.cfg.bigram_lambda, len(words), device)
        return [*super().build_memories(models), bigrams]
