"""What trust looks at in the token memory: a pure function of what was retrieved and of what the model says.

Decoding, scoring, tuning and explaining call the same functions. They gather and count: nothing is as wide as the
vocabulary, and nothing goes back to the host. Letters: N tokens, k neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import ModelEvidence

RANKS = (1, 2, 4, 8, 16, 32, 64)
TYPICAL_RANK = 8  # whose score is followed along a hypothesis
OF_STATE = ("state distance", "state cosine", "state norm")
RUNNING = ("running score", "running distance", "running agreement")

TOKEN_FEATURES = (
    *(f"score {rank}" for rank in RANKS), "found",
    *(f"distinct {rank}" for rank in RANKS[1:]),
    "highest p_tok", "entropy of p_tok", "count of favourite",
    "model of favourite", "agreement", "overlap",
    *OF_STATE, *RUNNING, "position",
)  # fmt: skip


class Course(NamedTuple):
    """How N hypotheses have gone so far, this token included."""

    state: Tensor  # fp32 [N, 3], `OF_STATE`, of this token alone
    running: Tensor  # fp32 [N, 3], `RUNNING`
    position: Tensor  # fp32 [N], tokens before this one

    @classmethod
    def of(cls, state: Tensor, sums: Tensor, length: Tensor | int) -> Course:
        """Make it of the sums of what was `observed` at each token, fp32 [N, 4], and their number."""
        running = sums[:, :3] / sums[:, 3:].clamp_min(1)
        running[:, 1] = sums[:, 1] / length
        position = length - 1.0 if isinstance(length, Tensor) else sums.new_full((len(sums),), length - 1.0)
        return cls(state, running, position)

    @property
    def running_distance(self) -> Tensor:
        """The mean of the log distance of the states to the datastore's text, fp32 [N]."""
        return self.running[:, 1]


class TokenEvidence(NamedTuple):
    """What the token memory saw at N tokens."""

    scores: Tensor  # fp32 [N, k], inner products or minus squared distances; -inf where a neighbour is missing
    values: Tensor  # int64 [N, k]
    log_probs: Tensor  # fp32 [N, k], log p_tok, duplicates merged
    model: Tensor  # fp32 [N, k], log p_NMT of `values`
    course: Course

    def features(self, model: ModelEvidence) -> Tensor:
        """Compute `TOKEN_FEATURES`, fp32 [N, F]."""
        found = self.scores > float("-inf")
        count = found.sum(dim=1, keepdim=True)
        some, at_least_one = count > 0, count.clamp_min(1)
        # A rank that was not found has the score of the last one that was.
        ranks = torch.minimum(_ranks(count.device), at_least_one)
        places = ranks - 1
        scores = self.scores.sort(dim=1, descending=True).values.gather(1, places)
        scores = similarities(scores).nan_to_num(neginf=0.0)
        values = torch.where(found, self.values, -1)
        first = first_occurrences(values) & found
        distinct = first.cumsum(dim=1).gather(1, places) / ranks
        probabilities = self.log_probs.exp() * first
        highest, place = probabilities.max(dim=1, keepdim=True)
        favourite = values.gather(1, place)
        entropy = torch.special.entr(probabilities).sum(dim=1, keepdim=True)
        same = (values == favourite).sum(dim=1, keepdim=True) / at_least_one * some
        distrust = (model.best.unsqueeze(1) - self.model.gather(1, place)) * some
        agreement = favourite == model.favourite.unsqueeze(1)
        overlap = (probabilities * self.model.exp()).sum(dim=1, keepdim=True)
        state, running, position = self.course
        return torch.cat(
            [
                scores, count / self.scores.size(1), distinct[:, 1:], highest, entropy, same, distrust, agreement, overlap,
                state, running, torch.log1p(position).unsqueeze(1),
            ], dim=1,
        )  # fmt: skip


def observed(scores: Tensor, values: Tensor, state: Tensor, favourite: Tensor) -> Tensor:
    """What of N tokens is followed along their hypotheses, fp32 [N, 4]; tokens without neighbours count for the last alone.

    Columns: those of `RUNNING`, the similarity of a neighbour of typical rank, the distance of the state to the datastore's
    text, and whether the nearest neighbour names the model's favourite; then whether there are neighbours.

    Args:
        scores, values: fp32 and int64 [N, k].
        state: fp32 [N, 3], `OF_STATE`.
        favourite: int64 [N], the model's likeliest token.
    """
    near = scores[:, :TYPICAL_RANK]
    least = near.masked_fill(near == float("-inf"), float("inf")).amin(dim=1)
    typical = similarities(least).nan_to_num(posinf=0.0)
    agrees = (values[:, 0] == favourite) & (scores[:, 0] > float("-inf"))
    some = scores.amax(dim=1) > float("-inf")
    return torch.stack([typical, state[:, 0], agrees, some], dim=1)


def along_sentences(seen: Tensor, positions: Tensor) -> Tensor:
    """Sum what was `observed`, fp32 [N, 4], from the beginning of each sentence to each token.

    Args:
        positions: int64 [N], of the tokens of sentence after sentence, from 0.
    """
    sums = seen.double().cumsum(dim=0)
    start = torch.arange(len(positions), device=positions.device) - positions
    before = torch.cat([sums.new_zeros(1, sums.size(1)), sums])[start]
    return (sums - before).to(seen.dtype)


def similarities(scores: Tensor) -> Tensor:
    """Bring scores of any shape to one scale, fp32: inner products as they are, squared distances as minus their logarithm.

    Scores of a metric have one sign but for inner products below 0, which say as much as 0; missing ones are -inf.
    """
    return torch.where(scores < 0, -torch.log1p(-scores), scores)


def first_occurrences(values: Tensor) -> Tensor:
    """Tell which of k values of each row no earlier one equals, bool [N, k]."""
    ordered, order = values.sort(dim=1, stable=True)
    new = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return torch.empty_like(new).scatter_(1, order, new)


@cache
def _ranks(device: torch.device) -> Tensor:
    return 2 ** torch.arange(len(RANKS), device=device)  # made there: a copy would be waited for
