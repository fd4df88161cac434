"""What trust looks at of the token memory's neighbours, and of how a hypothesis has gone.

They gather and count: nothing is as wide as the vocabulary, and nothing goes back to the host. Letters: N tokens,
k neighbours, F features.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import ModelEvidence, NamedColumns, distrust, joined, names_in
from fairseq_ccpr.decoding.source_likeness import SOURCE_FEATURES

RANKS = (1, 2, 4, 8, 16, 32, 64)
TYPICAL_RANK = 8  # whose score is followed along a hypothesis


class Course(NamedTuple):
    """How N hypotheses have gone so far, this token included, and what they translate."""

    state: Tensor  # fp32 [N, 3] of this token alone, see `TokenMemory.observe`
    running: Tensor  # fp32 [N, 3] of all so far, see `observed`
    position: Tensor  # fp32 [N], tokens before this one
    # fp32 [N, S], what is known of the source sentence, see `SourceLikeness.columns`
    source: Tensor

    @classmethod
    def of(cls, state: Tensor, sums: Tensor, length: Tensor | int, source: Tensor) -> Course:
        """Make it of the sums of what was `observed` at each token, fp32 [N, 4], and their number."""
        running = sums[:, :3] / sums[:, 3:].clamp_min(1)
        running[:, 1] = sums[:, 1] / length
        position = length - 1.0 if isinstance(length, Tensor) else sums.new_full((len(sums),), length - 1.0)
        return cls(state, running, position, source)

    @property
    def best(self) -> Tensor:
        """The likeness of the datastore's sentence that is most like the source, fp32 [N]; 0 where not known."""
        return self.source[:, 0]


class TokenEvidence(NamedTuple):
    """What the token memory saw at N tokens."""

    # fp32 [N, k], inner products or minus squared distances; -inf where a neighbour is missing
    scores: Tensor
    values: Tensor  # int64 [N, k]
    likeness: Tensor | None  # fp32 [N, k], of their sentences
    log_probs: Tensor  # fp32 [N, k], log p_tok, duplicates merged
    model: Tensor  # fp32 [N, k], log p_NMT of `values`
    course: Course

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Name the features."""
        one, many = torch.zeros(1), torch.zeros(1, 3)
        course = Course(many, many, one, torch.zeros(1, len(SOURCE_FEATURES)))
        nothing = cls(many, many.long(), None, many, many, course)
        return names_in(nothing.columns(ModelEvidence(one, one.long())))

    def features(self, model: ModelEvidence) -> Tensor:
        return joined(self.columns(model))

    def columns(self, model: ModelEvidence) -> NamedColumns:
        """Compute what trust looks at; a feature of tokens is a line here, and nothing elsewhere."""
        found = self.scores > float("-inf")
        count = found.sum(dim=1, keepdim=True)
        some, at_least_one = count > 0, count.clamp_min(1)
        # A rank that was not found has the score of the last one that was.
        ranks = torch.minimum(_ranks(count.device), at_least_one)
        places = ranks - 1
        scores = self.scores.sort(dim=1, descending=True).values.gather(1, places)
        values = torch.where(found, self.values, -1)
        first = (first_occurrences(values) & found).float()
        distinct = first.cumsum(dim=1).gather(1, places) / ranks
        probabilities = self.log_probs.exp() * first
        highest, place = probabilities.max(dim=1, keepdim=True)
        favourite = values.gather(1, place)
        named = torch.eq(values, favourite, out=torch.empty_like(probabilities))
        entropies = torch.special.entr(probabilities)
        sums = torch.stack([entropies, named, probabilities * self.model.exp()], dim=1).sum(dim=2)
        entropy, same, overlap = sums.split(1, dim=1)
        likeness = torch.zeros_like(self.scores) if self.likeness is None else self.likeness * found
        return {
            tuple(f"score {rank}" for rank in RANKS): similarities(scores).nan_to_num(neginf=0.0),
            ("found",): count / self.scores.size(1),
            tuple(f"distinct {rank}" for rank in RANKS[1:]): distinct[:, 1:],
            ("highest p_tok",): highest,
            ("entropy of p_tok",): entropy,
            ("count of favourite",): same / at_least_one * some,
            ("model of favourite",): distrust(model, self.model.gather(1, place), some),
            ("agreement",): favourite == model.favourite.unsqueeze(1),
            ("overlap",): overlap,
            ("likeness of nearest",): likeness[:, :1],
            ("highest likeness",): likeness.amax(dim=1, keepdim=True),
            ("mean likeness",): likeness.sum(dim=1, keepdim=True) / at_least_one,
            SOURCE_FEATURES: self.course.source,
            ("state distance", "state cosine", "state norm"): self.course.state,
            ("running score", "running distance", "running agreement"): self.course.running,
            ("position",): torch.log1p(self.course.position).unsqueeze(1),
        }


def observed(scores: Tensor, values: Tensor, state: Tensor, favourite: Tensor) -> Tensor:
    """What of N tokens is followed along hypotheses, fp32 [N, 4]; without neighbours, the distance alone.

    Columns: the similarity of a neighbour of typical rank, the distance of the
    state to the datastore's text, and whether the nearest neighbour names the model's favourite; then whether
    there are neighbours.
    """
    near = scores[:, :TYPICAL_RANK]
    least = near.masked_fill(near == float("-inf"), float("inf")).amin(dim=1)
    typical = similarities(least).nan_to_num(posinf=0.0)
    agrees = (values[:, 0] == favourite) & (scores[:, 0] > float("-inf"))
    some = scores.amax(dim=1) > float("-inf")
    return torch.stack([typical, state[:, 0], agrees, some], dim=1)


def along_sentences(seen: Tensor, positions: Tensor) -> Tensor:
    """Sum what was `observed`, fp32 [N, 4], from the beginning of each sentence to each token."""
    sums = seen.double().cumsum(dim=0)
    start = torch.arange(len(positions), device=positions.device) - positions
    before = torch.cat([sums.new_zeros(1, sums.size(1)), sums])[start]
    return (sums - before).to(seen.dtype)


def similarities(scores: Tensor) -> Tensor:
    """Bring scores to one scale: inner products as they are, squared distances as minus their logarithm.

    Scores of a metric have one sign but for inner products below 0, which say as much as 0; missing ones are
    -inf.
    """
    return torch.where(scores < 0, -torch.log1p(-scores), scores)


def first_occurrences(values: Tensor) -> Tensor:
    """Tell which of k values of each row no earlier one equals, bool [N, k]."""
    ordered, order = values.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[:, 1:], ordered[:, :-1], out=new[:, 1:])
    return torch.empty_like(new).scatter_(1, order, new)


@cache
def _ranks(device: torch.device) -> Tensor:
    return 2 ** torch.arange(len(RANKS), device=device)  # made there: a copy would be waited for
