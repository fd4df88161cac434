"""A teacher-forced pass over held-out sentences: enough to score any setting, and to train trust."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.forced import ForcedText
from fairseq_ccpr.decoding.token_memory import TokenMemory, TokenRecord
from fairseq_ccpr.progress import progress_over

# Of the held-out text, and of all others together: more teach little, and cost as long as decoding them.
TOKENS = 24_000
# Of these, for other memories than the tokens': phrases have hundreds of candidates at each, for every point of a grid.
SAMPLED_TOKENS = 10_000


@dataclass
class HeldOut:
    """N reference tokens of a text as model and memories see them, batch by batch; on the CPU."""

    name: str
    texts: list[ForcedText]

    def having(self, names: Collection[str]) -> HeldOut:
        """Keep the batches that all these memories were asked about."""
        return HeldOut(self.name, [text for text in self.texts if all(name in text.records for name in names)])

    @cached_property
    def targets(self) -> Tensor:
        """int64 [N]."""
        return torch.cat([text.targets for text in self.texts])

    @cached_property
    def sentences(self) -> Tensor:
        """int64 [N], numbered from 0."""
        return torch.cat([text.sentences for text in self.texts])

    @cached_property
    def log_probs(self) -> Tensor:
        """log p_NMT of the targets, fp32 [N]."""
        return torch.cat([text.log_probs for text in self.texts])

    @cached_property
    def found(self) -> TokenRecord:
        """What the token memory found at all of them."""
        return TokenRecord.joined([text.records[TokenMemory.name] for text in self.texts])


@torch.inference_mode()
def force_decode_text(
    name: str, samples: list[Any], ensemble: RetrievalEnsemble, most: int = TOKENS, quiet: bool = False
) -> HeldOut:
    """Force-decode batches of held-out sentences, keeping what model and memories say of the references.

    Args:
        name: of the text.
        samples: fairseq's batches, spread over all lengths; of many, some are left out.
        ensemble: whose token memory has the largest k.
        most: tokens, about, of which memories besides the tokens' are asked about as many as their share of `TOKENS`.
        quiet: without a progress bar.
    """
    size = sum(int(sample["ntokens"]) for sample in samples)
    samples = spread(samples, size, most)
    sampled = {id(one) for one in spread(samples, min(size, most), SAMPLED_TOKENS * most // TOKENS)}
    always = [memory for memory in ensemble.memories if memory.acts_on == "model" or isinstance(memory, TokenMemory)]
    quick = ensemble.with_memories(always, None)
    texts: list[ForcedText] = []
    sentences = 0
    for sample in progress_over(samples, name, "token", lambda one: int(one["ntokens"]), quiet):
        text = (ensemble if id(sample) in sampled else quick).force_decode(sample)
        texts.append(text.kept(sentences))
        sentences += len(sample["target"])
    return HeldOut(name, texts)


def spread(samples: list[Any], size: int, most: int) -> list[Any]:
    """Keep every n-th batch, so many that `size` tokens become about `most`."""
    return samples[:: max(1, round(size / most))]
