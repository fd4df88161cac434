"""Several datastores of one model in one beam search.

    p = (p_NMT + sum of o_i p_i) / (1 + sum of o_i),   o_i = w_i / (1 - w)

where w_i is the weight that memory i has with its own datastore alone, by trust and settings of that, and w
the sum of the weights of that datastore's memories. So each memory keeps the odds against the model that it
has alone: an empty one changes nothing, and the order of datastores does not count. Only of corrections of
the same source the first datastore's is written. What belongs to no datastore, such as a glossary or a
memory of a plug-in, is in each ensemble, and counts once: a vote with its highest odds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.correction_memory import CorrectionMemory
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.forced import ForcedText
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch
from fairseq_ccpr.decoding.mixture import ALMOST_ALL, Distribution, Vote
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust import Trust
from fairseq_ccpr.errors import ConfigurationError

OF_DATASTORES = (TokenMemory, PhraseMemory, TextMemory, CorrectionMemory)
REFUSAL = "several memories together translate, and are neither scored nor explained: name one of them"


class JointEnsemble(RetrievalEnsemble):
    """The memories of several ensembles of the same models, for beam search alone.

    Args:
        members: each with the memories of one datastore, the most important first.
    """

    def __init__(self, members: Sequence[RetrievalEnsemble]) -> None:
        first = members[0]
        # each votes in its own ensemble, whose trust asks for all
        owned = [
            (own, member)
            for member in members
            for own in member.memories
            if member is first or own.acts_on == "vote" or isinstance(own, OF_DATASTORES)
        ]
        # what acts last has the last word
        corrections = [one for one in reversed(owned) if isinstance(one[0], CorrectionMemory)]
        owned = [one for one in owned if not isinstance(one[0], CorrectionMemory)] + corrections
        memories = [memory for memory, _ in owned]
        super().__init__(list(first.models), memories, first.pad, first.mixture.settings)
        self.mixture = first.mixture
        for name in ("temperature", "forced", "end", "precision", "identity"):
            setattr(self, name, getattr(first, name))
        self.members, self._owners = tuple(members), [member for _, member in owned]
        self.trusted = any(member.trusted for member in members)

    def begun(self, sources: Tensor, texts: Sequence[str] | None) -> list[MemoryBatch]:
        snapshots = {id(member): member.snapshot(texts) for member in self.members}
        owned = zip(self.memories, self._owners)
        return [memory.begin(sources, snapshots[id(owner)]) for memory, owner in owned]

    def decided(self, model: Distribution | ForcedText, votes: list[Vote]) -> list[Vote]:
        """Return the votes with the weights that they have in the end, see the module."""
        waiting, decided = iter(votes), list[Vote]()
        shared: dict[str, int] = {}  # where votes are that each ensemble has
        for member in self.members:
            if own := member.decided(model, [next(waiting) for _ in member.voting]):
                left = 1 - torch.stack([vote.weight for vote in own]).sum(dim=0).clamp_max(ALMOST_ALL)
                for memory, vote in zip(member.voting, own):
                    odds = vote.weight / left
                    if not isinstance(memory, OF_DATASTORES):
                        place = shared.setdefault(memory.name, len(decided))
                        if place < len(decided):
                            most = torch.maximum(decided[place].weight, odds)
                            decided[place] = decided[place]._replace(weight=most)
                            odds = torch.zeros_like(most)
                    decided.append(vote._replace(weight=odds))
        if not decided:
            return decided
        total = 1 + torch.stack([vote.weight for vote in decided]).sum(dim=0)
        return [vote._replace(weight=vote.weight / total) for vote in decided]

    def silencing(
        self, kinds: tuple[type[Memory], ...], members: Sequence[RetrievalEnsemble]
    ) -> RetrievalEnsemble:
        return JointEnsemble([one.silencing(kinds, ()) if one in members else one for one in self.members])

    def with_memories(self, memories: Sequence[Memory], trust: Trust | None) -> RetrievalEnsemble:
        raise ConfigurationError(REFUSAL)

    def force_decode(self, sample: dict[str, Any], temperature: float | None = None) -> ForcedText:
        raise ConfigurationError(REFUSAL)

    def signature(self) -> str:
        return " and ".join(member.signature() for member in self.members)
