"""Interpolate what memories say with the model's distribution: pure tensor maths, sparse and in log space.

Letters: H hypotheses, N tokens, M memories, C tokens that a memory names, k neighbours, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.device import sync_is_free
from fairseq_ccpr.timing import MERGE, phase

RUN = 64  # neighbouring tokens whose highest is found first, as torch tracks the place of a maximum slowly
FEW = 32  # neighbours that are compared with one another; more are sorted
# A weight of 1 would rule out all that was not retrieved, even the end of a sentence that has reached its
# full length.
ALMOST_ALL = 1 - 2**-24
SILENT = -80.0  # in place of log 0, whose differences and gradients are not numbers


NamedColumns = Mapping[tuple[str, ...], Tensor]  # features at N tokens: n names -> fp32 [N, n]
Said = tuple[Tensor, Tensor]  # of a memory: log p_r of N given tokens, and its weight there, fp32 [N] each


class ModelEvidence(NamedTuple):
    """The model's likeliest token at N tokens."""

    best: Tensor  # fp32 [N], log p_NMT of it
    favourite: Tensor  # int64 [N]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Name what trust looks at."""
        return names_in(cls(torch.zeros(1), torch.zeros(1, dtype=torch.int64)).columns())

    def columns(self) -> NamedColumns:
        """Compute what trust looks at; a feature of the model is a line here, and nothing elsewhere."""
        return {("highest p_NMT",): self.best.unsqueeze(1)}


def names_in(columns: NamedColumns) -> tuple[str, ...]:
    """Name features, in the order of `joined`."""
    return tuple(name for names in columns for name in names)


def joined(columns: NamedColumns) -> Tensor:
    """Put features beside one another, fp32 [N, F]."""
    return torch.cat(list(columns.values()), dim=1)


def distrust(model: ModelEvidence, log_probs: Tensor, found: Tensor | None) -> Tensor:
    """Compute how many nats a memory's favourite is below the model's, fp32 [N, 1]: 80 at most; 0 without one.

    Args:
        log_probs: log p_NMT of the memory's favourite, fp32 [N, 1]; -inf where the model rules it out.
        found: whether it has one, bool [N, 1]; None: everywhere.
    """
    below = model.best.unsqueeze(1) - log_probs.clamp_min(SILENT)
    return below if found is None else below.masked_fill(~found, 0.0)


class ModelView(Protocol):
    """What the model says at N tokens, as far as an interpolation weight may need it; looked up on demand."""

    @property
    def neighbours(self) -> Tensor:
        """log p_NMT of the neighbours' tokens, fp32 [N, k]."""

    @property
    def best(self) -> Tensor:
        """log p_NMT of the likeliest token, fp32 [N]."""

    @property
    def favourite(self) -> Tensor:
        """The likeliest token, int64 [N]."""


class LookedUp(NamedTuple):
    """A `ModelView` that was looked up."""

    neighbours: Tensor
    best: Tensor
    favourite: Tensor


class Evidence(Protocol):
    """What a memory saw at N tokens: what trust decides by."""

    def features(self, model: ModelEvidence) -> Tensor:
        """Compute the memory's features, fp32 [N, F], in the order of `Memory.features`."""


class Columns(NamedTuple):
    """Evidence that is features already."""

    columns: Tensor  # fp32 [N, F]

    def features(self, model: ModelEvidence) -> Tensor:
        return self.columns


class Vote(NamedTuple):
    """What a memory says of the next token of H hypotheses: a distribution over C tokens, and its weight."""

    values: Tensor  # int64 [H, C], tokens
    # fp32 [H, C], log p_r, duplicates merged: equal tokens all have the token's whole probability
    log_probs: Tensor
    weight: Tensor  # fp32 [H], the interpolation weight, in [0, 1]
    evidence: Evidence | None = None  # what trust looks at, where `Step.trusted`

    def select(self, rows: Tensor | slice) -> Vote:
        """Select some of the hypotheses, without evidence."""
        return Vote(self.values[rows], self.log_probs[rows], self.weight[rows])

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Look up log p_r of a given token a row, int64 [H] -> fp32 [H]; -inf where it is none of the C."""
        return self.log_probs.masked_fill(self.values != tokens.unsqueeze(1), float("-inf")).amax(dim=1)

    def said(self, tokens: Tensor) -> Said:
        """Look up log p_r of a given token a row, int64 [H], and the weight there."""
        return self.log_prob(tokens), self.weight


class Distribution:
    """The model's distribution at N tokens, shared so that the vocabulary is swept once for all questions.

    Args:
        log_probs: fp32 [N, V], log p_NMT.
        peaks: the highest of each run of `RUN` tokens, fp32 [N, R], where they are known.
    """

    def __init__(self, log_probs: Tensor, peaks: Tensor | None = None) -> None:
        self.log_probs, self.known_peaks = log_probs, peaks

    @property
    def peaks(self) -> Tensor:
        if self.known_peaks is None:
            self.known_peaks = run_peaks(self.log_probs)
        return self.known_peaks

    @cached_property
    def likeliest(self) -> ModelEvidence:
        """The likeliest token, and its log p_NMT; must first be read before `log_probs` is mixed in place.

        A GPU sweeps the vocabulary in one operation, and is asked for the peaks of what was mixed alone.
        """
        if not sync_is_free(self.log_probs.device):
            return ModelEvidence(*self.log_probs.max(dim=1))
        best, run = self.peaks.max(dim=1)
        begins = (run * RUN).unsqueeze(1)
        inside = (begins + torch.arange(RUN, device=run.device)).clamp_max(self.log_probs.size(1) - 1)
        place = self.log_probs.gather(1, inside).argmax(dim=1, keepdim=True)
        return ModelEvidence(best, inside.gather(1, place).squeeze(1))

    def again(self, tokens: set[int]) -> Distribution:
        """Return the same after the log p of some tokens were changed in place."""
        for run in {token // RUN for token in tokens}:
            self.peaks[:, run] = self.log_probs[:, run * RUN : (run + 1) * RUN].amax(dim=1)
        return Distribution(self.log_probs, self.peaks)

    def view(self, values: Tensor) -> DistributionView:
        return DistributionView(self, values)


def run_peaks(log_probs: Tensor) -> Tensor:
    """Find the highest of each run of `RUN` neighbouring tokens, [N, V] -> [N, R]; the last run may be shorter."""
    runs = log_probs.size(1) // RUN
    peaks = log_probs[:, : runs * RUN].unflatten(1, (runs, RUN)).amax(dim=2)
    if runs * RUN == log_probs.size(1):
        return peaks
    return torch.cat([peaks, log_probs[:, runs * RUN :].amax(dim=1, keepdim=True)], dim=1)


@dataclass
class DistributionView:
    """A `ModelView` of a whole distribution."""

    distribution: Distribution
    values: Tensor  # int64 [N, k], the neighbours' tokens

    @cached_property
    def neighbours(self) -> Tensor:
        return self.distribution.log_probs.gather(1, self.values)

    @property
    def best(self) -> Tensor:
        return self.distribution.likeliest.best

    @property
    def favourite(self) -> Tensor:
        return self.distribution.likeliest.favourite


def neighbour_log_probabilities(
    scores: Tensor, values: Tensor, temperature: float, complete: bool = False
) -> Tensor:
    """Compute log p_r of each neighbour's value, duplicates merged: equations 4 and 7 of the CLKNN paper.

    p_r(v) = sum_i 1[v_i = v] exp(score_i / T) / sum_i exp(score_i / T), scores being minus squared distances
    or inner products. Neighbours that share a value all get that value's whole probability.

    Args:
        scores: fp32 [H, k]; -inf marks a missing neighbour, which gets no weight.
        values: int64 [H, k], tokens; anything where the neighbour is missing.
        complete: whether no neighbour is missing and the best comes first; False where that is not known.

    Returns:
        fp32 [H, k]; -inf throughout where all neighbours of a row are missing.

    >>> scores, values = torch.tensor([[0.0, 0.0, 0.0, float("-inf")]]), torch.tensor([[7, 7, 9, 8]])
    >>> neighbour_log_probabilities(scores, values, 1.0).exp()
    tensor([[0.6667, 0.6667, 0.3333, 0.0000]])
    """
    return merge_equal(neighbour_shares(scores, temperature, complete), values).log()


def neighbour_shares(scores: Tensor, temperature: float, complete: bool = False) -> Tensor:
    """Compute the weight of each neighbour in p_r, fp32 [H, k]; 0 where all of a row are missing."""
    highest = scores[:, :1] if complete else scores.amax(dim=1, keepdim=True)
    # Only differences count, and before the division they lose nothing. Not numbers where all are -inf.
    shares = torch.softmax((scores - highest) / temperature, dim=1)
    return shares if complete else shares.nan_to_num(0.0)


def merge_equal(weights: Tensor, values: Tensor) -> Tensor:
    """Give each of k neighbours the weight of all that share its value, fp32 [H, k]."""
    # each is compared with each: few operations, which is what counts for so few numbers
    if values.size(1) <= FEW:
        numbers = values.float()  # which tell all tokens apart, and are compared and multiplied faster
        equal = weights.new_empty(*values.shape, values.size(1))
        torch.eq(numbers.unsqueeze(2), numbers.unsqueeze(1), out=equal)
        return (equal * weights.unsqueeze(1)).sum(dim=2)
    # Equal values become neighbours, and each run of them is added up.
    ordered, order = values.sort(dim=1)
    run = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(dim=1)
    totals = torch.zeros_like(weights).scatter_add_(1, run, weights.gather(1, order))
    return torch.empty_like(weights).scatter_(1, order, totals.gather(1, run))


def target_log_probabilities(scores: Tensor, matches: Tensor, temperature: float) -> Tensor:
    """Compute log p_r of a given token a row, fp32 [N], that the neighbours `matches`, bool [N, k], name."""
    logits = (scores - scores.amax(dim=1, keepdim=True)) / temperature  # as in `neighbour_shares`
    log_shares = torch.log_softmax(logits, dim=1)
    return log_shares.masked_fill(~matches, float("-inf")).logsumexp(dim=1)


def retrieval_confidence(scores: Tensor, least: float = 0.0) -> Tensor:
    """Average the similarity of the neighbours found, fp32 [H] in [0, 1]: the factor of lambda.

    Args:
        scores: fp32 [H, k], inner products of unit vectors; -inf marks a missing neighbour. Negative ones,
            which do occur, count as 0.
        least: similarity s0 in [0, 1) that counts as none; above it (s - s0) / (1 - s0) takes the place of s.
            The paper's is 0, but in a wrong domain neighbours are similar as well, only less so.

    >>> retrieval_confidence(torch.tensor([[0.9, 0.5, -0.2, float("-inf")]]))
    tensor([0.4667])
    """
    found = (scores > float("-inf")).sum(dim=1).clamp_min(1)
    above = (scores - least) / (1 - least) if least else scores
    return above.clamp(0, 1).sum(dim=1) / found


@dataclass(frozen=True)
class Mixture:
    """How votes are combined with the model: p = (1 - sum of weights) p_NMT + sum of weight p_r.

    With one memory, equation 2 of the CLKNN paper. Decoding, scoring, tuning and explaining know no other
    formula: another combiner is a subclass with a `mix`, an `of_targets` and `shares` of its own.

    Args:
        bounded: of each memory that votes, whether Lambda_max bounds its weight.
    """

    settings: MixtureSettings = field(default_factory=MixtureSettings)
    bounded: tuple[bool, ...] = ()

    def limit(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Scale weights, fp32 [H] of each memory, down alike to Lambda_max, or the sum of the unbounded ones.

        So phrases never crowd out the model, and where they have no weight the tokens' is what it is without
        phrases.
        """
        if not any(self.bounded):
            return list(weights)
        total = sum(weights[1:], weights[0])
        free = torch.zeros_like(total)
        for weight, bounded in zip(weights, self.bounded):
            free = free if bounded else free + weight
        # Where no weight is above 0, the scale is 1; it would be 0 / 0 if Lambda_max is 0 as well.
        scale = (free.clamp_min(self.settings.lambda_max) / total).nan_to_num(1.0).clamp_max(1.0)
        return [weight * scale for weight in weights]

    def limited(self, votes: Sequence[Vote]) -> list[Vote]:
        if not (votes and any(self.bounded)):
            return list(votes)
        weights = self.limit([vote.weight for vote in votes])
        return [vote._replace(weight=weight) for vote, weight in zip(votes, weights)]

    @phase(MERGE)
    def mix(self, model: Distribution, votes: Sequence[Vote]) -> Distribution:
        """Mix votes into log p_NMT [H, V], in place and only where p_r is not zero.

        No vote leaves log p_NMT as it was, and weights of 0 leave their row as it was, to the bit.
        """
        if not votes:
            return model
        total = votes[0].weight
        for vote in votes[1:]:
            total = total + vote.weight
        left = torch.log1p(-total.clamp_max(ALMOST_ALL)).unsqueeze(1)
        # kept where they were looked for, as not all ask for them
        peaks = model.known_peaks + left if model.known_peaks is not None else None
        log_probs = model.log_probs.add_(left)
        for vote in votes:
            named = log_probs.gather(1, vote.values)
            mixed = torch.logaddexp(named, vote.weight.log().unsqueeze(1) + vote.log_probs)
            log_probs.scatter_(1, vote.values, mixed)
            if peaks is not None:  # what is named only rises beside the others
                peaks.scatter_reduce_(1, vote.values // RUN, mixed, "amax")
        return Distribution(log_probs, peaks)

    def of_targets(self, log_p: Tensor, said: Sequence[Said]) -> Tensor:
        """Mix log p_NMT [N] of a given token a row with what each memory says of it."""
        return torch.stack(self._terms(log_p, said)).logsumexp(dim=0) if said else log_p

    def shares(self, log_p: Tensor, said: Sequence[Said]) -> Tensor:
        """Compute what part of p of given tokens is owed to the model and to each memory, [N, 1 + M]."""
        # Not numbers where none gives it any: a memory that acts on the mixture alone does.
        return torch.stack(self._terms(log_p, said), dim=1).softmax(dim=1).nan_to_num(0.0)

    @staticmethod
    def _terms(log_p: Tensor, said: Sequence[Said]) -> list[Tensor]:
        total = sum((weight for _, weight in said), torch.zeros_like(log_p))
        left = torch.log1p(-total.clamp_max(ALMOST_ALL))
        return [left + log_p, *(weight.log() + retrieved for retrieved, weight in said)]
