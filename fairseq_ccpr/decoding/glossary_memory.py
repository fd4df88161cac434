"""The glossary inside beam search: terms of the source propose their translations, as retrieved phrases do.

A hypothesis that has not written a term of its source leaves some of each step's probability to the term's first subword,
more where the model finds it likelier; so those that write it where it fits win. A term that has begun is followed to its
end, and one that was written counts no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.learnt_phrases import LearntPhrases
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import Candidates, PhraseCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN, WRITTEN, Proposals
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage.fingerprint import of_file, short
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords
from fairseq_ccpr.text.glossary import Glossary

logger = logging.getLogger(__name__)


class GlossaryVotes(PhraseVotes):
    """How much a term counts, against 1 for all that the model says.

    A term that may begin has exp(b0 + c0 r), one that has begun exp(b1 + c1 r), where r is the log probability of its next
    subword to that of the likeliest; nothing once it was written.
    """

    MAY_BEGIN, BEGUN = (1.5, 0.6), (6.0, 0.6)  # b, c

    def __init__(self) -> None:
        super().__init__()
        states = [self.MAY_BEGIN, *[self.BEGUN] * (WRITTEN - 1)]
        for weights, at in ((self.state, 0), (self.consent, 1)):
            weights.data[:WRITTEN] = torch.tensor([state[at] for state in states])
        for weights in (self.similarity, self.covered, self.model):
            nn.init.zeros_(weights)

    def forward(self, proposals: Proposals, of_phrases: Tensor) -> Tensor:
        """Compute the votes, fp32 [N, A]; see `PhraseVotes`."""
        return super().forward(proposals, of_phrases.masked_fill(proposals.covered > 0, float("-inf")))


class GlossaryCandidates(PhraseCandidates):
    """The terms of a glossary in source sentences, as the decoder would generate their translations.

    Args:
        glossary: terms.
        make_subwords: called at the first sentence.
        source_dictionary: of the translation model.
    """

    def __init__(
        self, glossary: Glossary, make_subwords: Callable[[], DecoderSubwords], source_dictionary: Any
    ) -> None:
        self.glossary, self.make_subwords, self.source_dictionary = glossary, make_subwords, source_dictionary
        self.checked = True  # a sentence without a term is nothing to warn of
        self._ids: dict[str, list[int]] = {}

    def start(self, src_tokens: Tensor, learnt: LearntPhrases | None = None) -> Callable[[], list[SentencePhrases]]:
        """Find the terms of sentences, int64 [B, S]; terms are not learnt."""
        texts = [self.subwords.recover(self.source_dictionary, row) for row in src_tokens.cpu()]
        return lambda: [SentencePhrases(self._terms_of(text), list, number) for number, text in enumerate(texts)]

    def _terms_of(self, text: str) -> Candidates:
        found = [
            (query, ids)
            for query, (_, _, variants) in enumerate(self.glossary.find(text))
            for ids in map(self._ids_of, variants)
            if ids
        ]
        lengths = np.array([len(ids) for _, ids in found], np.int64)
        tokens = np.full((len(found), int(lengths.max(initial=1))), NO_TOKEN, np.int32)
        for row, (_, ids) in enumerate(found):
            tokens[row, : len(ids)] = ids
        queries = np.array([query for query, _ in found], np.int64)
        ranks, scores = np.zeros(len(found), np.int64), np.ones(len(found), np.float32)
        return Candidates(tokens, lengths, lengths, queries, ranks, scores)

    def _ids_of(self, term: str) -> list[int]:
        """Return the subwords of a translation; none, after a warning, where the decoder cannot write it."""
        if term not in self._ids:
            pieces = self.subwords.split(term)
            ids = self.subwords.slice(pieces, 0, len(term)) or []
            if not 0 < len(ids) <= MAX_SUBWORDS:
                logger.warning(
                    "%s: the model cannot write '%s', of which the dictionary has no pieces, or which has more than %d of "
                    "them: it counts for nothing", self.glossary.path, term, MAX_SUBWORDS,
                )  # fmt: skip
                ids = []
            self._ids[term] = ids
        return self._ids[term]


@dataclass(frozen=True)
class GlossaryMemory(PhraseMemory):
    """A glossary beside the decoder; it needs neither datastore nor encoder."""

    @classmethod
    def of(cls, candidates: GlossaryCandidates, device: torch.device) -> GlossaryMemory:
        """Make the memory of a glossary's terms."""
        votes = GlossaryVotes().requires_grad_(False).to(device)
        return cls(candidates, PhraseSettings(), votes, device)

    def start(self, sources: Tensor) -> Callable[[], PhraseBatch]:
        """Find the terms of a batch, int64 [B, S]; returns a function that lays them out."""
        return lambda: self._batch(self.candidates.start(sources))

    def signature(self) -> str:
        """Name the glossary and how it counts."""
        assert isinstance(self.candidates, GlossaryCandidates)
        return signature({"glossary": short(of_file(self.candidates.glossary.path)), "votes": self.votes.digest()})
