"""The record of a teacher-forced pass over held-out sentences: enough to score any setting, and to learn trust."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.distribution import Distribution
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.interpolation import Vote, neighbour_log_probabilities, target_log_probabilities
from fairseq_ccpr.decoding.memory import Neighbours
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import Consent, Proposals
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust_features import Course, ModelEvidence
from fairseq_ccpr.progress import progress_over

TOKENS = (
    24_000  # of the held-out text, and of all others together: more teach little, and cost as long as decoding them
)
CPU = torch.device("cpu")  # where what is kept lies
PHRASE_TOKENS = 10_000  # of these, with phrases: there are hundreds to weigh at each, for every point of a grid


class CachedView(NamedTuple):
    """A `ModelView` of N reference tokens, kept from the teacher-forced pass."""

    neighbours: Tensor  # fp32 [N, K], log p_NMT of the neighbours' tokens
    best: Tensor  # fp32 [N], of the likeliest token
    favourite: Tensor  # int64 [N], that token


@dataclass
class TokenCache:
    """The token memory's results: a row for each of N reference tokens.

    Args:
        memory: the token memory; its settings do not count.
        targets: int64 [N], the reference tokens.
        neighbours: [N, K], nearest first.
        model: the model's probabilities for them.
        course: the references up to each token.
    """

    memory: TokenMemory
    targets: Tensor
    neighbours: Neighbours
    model: CachedView
    course: Course

    def first(self, k: int) -> TokenCache:
        """Keep the k nearest neighbours only."""
        neighbours = Neighbours(*(part[:, :k] for part in self.neighbours))
        model = self.model._replace(neighbours=self.model.neighbours[:, :k])
        return replace(self, neighbours=neighbours, model=model)

    def at(self, rows: Tensor) -> TokenCache:
        """Keep some of the tokens only."""
        neighbours = Neighbours(*(part[rows] for part in self.neighbours))
        model, course = CachedView(*(part[rows] for part in self.model)), Course(*(part[rows] for part in self.course))
        return replace(self, targets=self.targets[rows], neighbours=neighbours, model=model, course=course)

    def retrieved(self, temperature: float) -> Tensor:
        """Compute log p_tok of the reference tokens, fp32 [N]."""
        return target_log_probabilities(self.neighbours.scores, self.matches(), temperature)

    def matches(self) -> Tensor:
        """Mark the neighbours that exist and have the reference token, bool [N, K]."""
        return (self.neighbours.values == self.targets.unsqueeze(1)) & (self.neighbours.ids >= 0)

    def weight(self, settings: TokenRetrievalSettings) -> Tensor:
        """Compute the weight by policy and guard at the reference tokens, fp32 [N], as the decoder does."""
        return replace(self.memory, settings=settings).weight(self.neighbours, self.model, self.course)

    def vote(self, settings: TokenRetrievalSettings) -> Vote:
        """Vote as the decoder does, with the evidence for trust; the cache must have `settings.k` neighbours."""
        memory = replace(self.memory, settings=settings, trusted=True)
        scores, values = self.neighbours.scores, self.neighbours.values
        retrieved = neighbour_log_probabilities(scores, values, settings.temperature)
        return memory.vote(self.neighbours, retrieved, self.model, self.course)


class PhraseRows(NamedTuple):
    """A batch of the pass: its phrases, and what each proposes at n reference tokens."""

    batch: PhraseBatch
    proposals: Proposals  # [n, A]
    sentences: Tensor  # int64 [n], of each token in the batch
    targets: Tensor  # int64 [n]
    rows: Tensor  # int64 [n], of all N tokens of the text
    model: CachedView  # of the proposals' tokens

    def vote(self, memory: PhraseMemory) -> Vote:
        """Vote as the decoder does with this memory."""
        return self.batch.of_memory(memory).weigh(self.proposals, Consent.of(self.model), self.sentences, self.model)


@dataclass
class PhraseCache:
    """The phrase memory's proposals in some batches of the pass."""

    batches: list[PhraseRows] = field(default_factory=list)

    @property
    def rows(self) -> Tensor:
        """Which of the text's N tokens they have, int64 [n]."""
        return torch.cat([batch.rows for batch in self.batches])

    def vote(self, memory: PhraseMemory) -> tuple[Tensor, Tensor]:
        """Compute log p_phr of the n reference tokens kept, and the weight, fp32 [n] each, as the decoder does."""
        votes = [(batch.vote(memory), batch.targets) for batch in self.batches]
        said, weights = zip(*((vote.of_token(targets), vote.weight) for vote, targets in votes))
        return torch.cat(said), torch.cat(weights)


@dataclass
class HeldOut:
    """N reference tokens of a text as model and memories see them."""

    name: str
    sentences: Tensor  # int64 [N], numbered from 0
    targets: Tensor  # int64 [N]
    log_probs: Tensor  # fp32 [N], log p_NMT of them
    model: ModelEvidence
    tokens: TokenCache | None
    phrases: PhraseCache

    @property
    def rows(self) -> Tensor:
        """The tokens that all memories were asked about, int64 [n]: with a phrase memory, not all."""
        return self.phrases.rows if self.phrases.batches else torch.arange(len(self.targets))


@torch.inference_mode()
def force_decode_text(
    name: str, samples: list[Any], ensemble: RetrievalEnsemble, k: int, most: int = TOKENS, quiet: bool = False
) -> HeldOut:
    """Force-decode batches of held-out sentences, keeping the outputs of model, k nearest neighbours and phrases.

    Args:
        name: of the text.
        samples: fairseq's batches, spread over all lengths; of many, some are left out.
        most: tokens, about, of which phrases are asked about as many as their share of `TOKENS`.
        quiet: without a progress bar.
    """
    size = sum(int(sample["ntokens"]) for sample in samples)
    samples = spread(samples, size, most)
    phrase_samples = {id(one) for one in spread(samples, min(size, most), PHRASE_TOKENS * most // TOKENS)}
    columns: list[tuple[Tensor, ...]] = []
    phrases = PhraseCache()
    total = sentences = 0
    for sample in progress_over(samples, name, "token", lambda one: int(one["ntokens"]), quiet):
        real = ensemble.real_tokens(sample["target"])
        log_probs, queries, _ = ensemble.force_decode_models(sample)
        targets, model = sample["target"][real], Distribution(log_probs[real])
        numbers = real.nonzero()[:, 0]
        view = model.at(targets.unsqueeze(1))
        of_model = [targets, view.neighbours.squeeze(1), view.best, view.favourite, numbers + sentences]
        of_memory = _of_tokens(ensemble.tokens, queries[real], model, real, k) if ensemble.tokens is not None else []
        columns.append(tuple(part.cpu() for part in (*of_model, *of_memory)))
        if ensemble.phrases is not None and id(sample) in phrase_samples:
            batch = ensemble.phrases.start(sample["net_input"]["src_tokens"])()
            proposals, places = ensemble.force_proposals(batch, sample)
            kept = (model.at(proposals.values).neighbours, view.best, view.favourite)
            rows = torch.arange(total, total + len(targets))
            phrases.batches.append(
                PhraseRows(
                    batch.to(CPU), Proposals(*(part.cpu() for part in proposals)),
                    places.cpu(), targets.cpu(), rows, CachedView(*(part.cpu() for part in kept)),
                )
            )  # fmt: skip
        total, sentences = total + len(targets), sentences + len(real)
    targets, log_probs, best, favourite, numbers, *of_memory = (torch.cat(column) for column in zip(*columns))
    tokens = None
    if ensemble.tokens is not None:
        ids, scores, values, of_neighbours, state, running, position = of_memory
        view_of_all = CachedView(of_neighbours, best, favourite)
        course = Course(state, running, position)
        domain = ensemble.tokens.domain
        memory = replace(ensemble.tokens, domain=domain.to(CPU) if domain is not None else None)
        tokens = TokenCache(memory, targets, Neighbours(ids, scores, values), view_of_all, course)
    return HeldOut(name, numbers, targets, log_probs, ModelEvidence(best, favourite), tokens, phrases)


def _of_tokens(memory: TokenMemory, queries: Tensor, model: Distribution, real: Tensor, k: int) -> list[Tensor]:
    neighbours, course = memory.force_search(queries, k, model, real)
    return [*neighbours, model.at(neighbours.values).neighbours, *course]


def spread(samples: list[Any], size: int, most: int) -> list[Any]:
    """Keep every n-th batch, so many that `size` tokens become about `most`."""
    return samples[:: max(1, round(size / most))]
