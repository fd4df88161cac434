"""What trust looks at of the token memory's neighbours, and of how a hypothesis has gone.

They gather and count: nothing is as wide as the vocabulary, and nothing goes back to the host. Letters: N tokens,
k neighbours, F features.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import FEW, ModelEvidence, NamedColumns, distrust, joined, names_in
from fairseq_ccpr.decoding.source_likeness import SOURCE_FEATURES

RANKS = (1, 2, 4, 8, 16, 32, 64)
OBSERVED = 4  # numbers, see `observed`
TYPICAL_RANK = 8  # whose score is followed along a hypothesis


class Course(NamedTuple):
    """How N hypotheses have gone so far, this token included, and what they translate."""

    norm: Tensor  # fp32 [N], log of that of the decoder's state
    running: Tensor  # fp32 [N, 2], means over all tokens so far, see `observed`
    length: Tensor  # fp32 [N], tokens so far
    # fp32 [N, S], what is known of the source sentence, see `SourceLikeness.columns`
    source: Tensor
    # fp32 [N], what the guard leaves of the weight, see `TokenMemory.familiarity`; None: not computed yet
    familiar: Tensor | None = None

    @classmethod
    def of(cls, norm: Tensor, sums: Tensor, source: Tensor, complete: bool = False) -> Course:
        """Make it of what was summed up and of what is known of the source.

        Args:
            sums: fp32 [N, 4], of what was `observed` at each token.
            source: fp32 [N, S], and with a guard [N, S + 1], where its factor stands last.
            complete: whether it is known that no neighbour is missing at this token.
        """
        counts, known = sums[:, 2:3], len(SOURCE_FEATURES)
        running = sums[:, :2] / (counts if complete else counts.clamp_min(1))
        familiar = source[:, known] if source.size(1) > known else None
        return cls(norm, running, sums[:, 3], source[:, :known], familiar)

    @property
    def best(self) -> Tensor:
        """The likeness of the datastore's sentence that is most like the source, fp32 [N]; 0 where not known."""
        return self.source[:, 0]


class TokenEvidence(NamedTuple):
    """What the token memory saw at N tokens."""

    # fp32 [N, k], inner products or minus squared distances; -inf where a neighbour is missing
    scores: Tensor
    values: Tensor  # int64 [N, k]
    likeness: Tensor | None  # fp16 or fp32 [N, k], of their sentences
    log_probs: Tensor  # fp32 [N, k], log p_tok, duplicates merged
    model: Tensor  # fp32 [N, k], log p_NMT of `values`
    course: Course
    complete: bool = False  # whether it is known that no neighbour is missing

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Name the features."""
        one, many = torch.zeros(1), torch.zeros(1, 2)
        course = Course(one, many, one, torch.zeros(1, len(SOURCE_FEATURES)))
        nothing = cls(many, many.long(), None, many, many, course)
        return names_in(nothing.columns(ModelEvidence(one, one.long())))

    def features(self, model: ModelEvidence) -> Tensor:
        return joined(self.columns(model))

    def columns(self, model: ModelEvidence) -> NamedColumns:
        """Compute what trust looks at; a feature of tokens is a line here, and nothing elsewhere."""
        scores, values, (rows, k) = self.scores, self.values, self.scores.shape
        likeness = torch.zeros_like(scores) if self.likeness is None else self.likeness
        ranks, places = _ranks(scores.device, k)
        if self.complete:
            first, there, some = first_occurrences(values), ranks[:, :1], None
        else:
            found = scores > float("-inf")
            count = found.sum(dim=1, keepdim=True)
            there, some = count / k, count > 0
            # A rank that was not found has the score of the last one that was.
            ranks = torch.minimum(ranks, count.clamp_min(1))
            places = ranks - 1
            scores = scores.sort(dim=1, descending=True).values.masked_fill(~some, 0.0)
            values, likeness = torch.where(found, values, -1), likeness * found
            first = first_occurrences(values) & found
        places = places[:, : len(RANKS)].expand(rows, -1)
        distinct = first.cumsum(dim=1).gather(1, places[:, 1:]) / ranks[:, 1 : len(RANKS)]
        probabilities = self.log_probs.exp() * first
        highest, place = probabilities.max(dim=1, keepdim=True)
        favourite = self.values.gather(1, place)
        agreement = favourite == model.favourite.unsqueeze(1)
        entropies = torch.special.entr(probabilities)
        each = [entropies, probabilities * self.model.exp(), values == favourite, likeness]
        sums = torch.stack(each, dim=1).sum(dim=2)
        means = sums[:, 2:] / ranks[:, -1:]  # over those found
        return {
            tuple(f"score {rank}" for rank in RANKS): similarities(scores.gather(1, places)),
            ("found",): there.expand(rows, -1),
            tuple(f"distinct {rank}" for rank in RANKS[1:]): distinct,
            ("highest p_tok",): highest,
            ("entropy of p_tok",): sums[:, :1],
            ("count of favourite",): means[:, :1],
            ("model of favourite",): distrust(model, self.model.gather(1, place), some),
            ("agreement",): agreement if some is None else agreement & some,
            ("overlap",): sums[:, 1:2],
            ("likeness of nearest",): likeness[:, :1],
            ("highest likeness",): likeness.amax(dim=1, keepdim=True),
            ("mean likeness",): means[:, 1:],
            SOURCE_FEATURES: self.course.source,
            ("state norm",): self.course.norm.unsqueeze(1),
            ("running score", "running agreement"): self.course.running,
            ("position",): self.course.length.log().unsqueeze(1),
        }


def observed(scores: Tensor, values: Tensor, favourite: Tensor, complete: bool = False) -> Tensor:
    """What of N tokens is followed along hypotheses, fp32 [N, 4]; without neighbours, that there is a token.

    Columns: the similarity of a neighbour of typical rank, and whether the nearest neighbour names the model's
    favourite; then whether there are neighbours, and 1.

    Args:
        complete: whether it is known that no neighbour is missing.
    """
    near, agrees = scores[:, :TYPICAL_RANK], values[:, 0] == favourite
    always = some = _ranks(scores.device, 1)[0][0, :1].expand(len(scores))  # 1
    if complete:
        least = near[:, -1]
    else:
        some = near.amax(dim=1) > float("-inf")  # not of all: the nearest may be of the unknown token
        agrees = agrees & (scores[:, 0] > float("-inf"))
        least = near.masked_fill(near == float("-inf"), float("inf")).amin(dim=1).masked_fill(~some, 0.0)
    return torch.stack([similarities(least), agrees, some, always], dim=1)


def along_sentences(seen: Tensor, positions: Tensor) -> Tensor:
    """Sum what was `observed`, fp32 [N, 4], from the beginning of each sentence to each token."""
    sums = seen.double().cumsum(dim=0)
    start = torch.arange(len(positions), device=positions.device) - positions
    before = torch.cat([sums.new_zeros(1, sums.size(1)), sums])[start]
    return (sums - before).to(seen.dtype)


def log_norms(states: Tensor) -> Tensor:
    """Compute log |h| of the decoder's states, [N, d] in any float dtype: fp32 [N]."""
    return torch.linalg.vector_norm(states.float(), dim=1).clamp_min(1e-8).log()


def similarities(scores: Tensor) -> Tensor:
    """Bring scores to one scale: inner products as they are, squared distances as minus their logarithm.

    Scores of a metric have one sign but for inner products below 0, which say as much as 0; missing ones are
    -inf.
    """
    # of a score below 0 the logarithm is the higher, of others the score itself
    return torch.maximum(scores, torch.special.xlog1py(-1, scores.abs()))


def first_occurrences(values: Tensor) -> Tensor:
    """Tell which of k values of each row no earlier one equals, bool [N, k]."""
    if (k := values.size(1)) <= FEW:
        different = values.unsqueeze(2) != values.unsqueeze(1)
        new = different | _not_before(values.device, k)
        return new.view(torch.int8).amin(dim=2).view(torch.bool)  # faster than `all`
    ordered, order = values.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[:, 1:], ordered[:, :-1], out=new[:, 1:])
    return torch.empty_like(new).scatter_(1, order, new)


# Made on the device, as a copy would be waited for, and once.


@cache
def _ranks(device: torch.device, k: int) -> tuple[Tensor, Tensor]:
    """Return `RANKS` as far as there are k neighbours, and k, and their places: int64 [1, 8] each."""
    ranks = (2 ** torch.arange(len(RANKS) + 1, device=device)).clamp_max(k)
    ranks[-1:].fill_(k)
    return ranks.unsqueeze(0), ranks.unsqueeze(0) - 1


@cache
def _not_before(device: torch.device, k: int) -> Tensor:
    """Mark what does not stand before each of k, bool [k, k]."""
    return torch.ones(k, k, dtype=torch.bool, device=device).triu()
