"""The published networks that decide how far neighbours count, as kinds of trust: Adaptive and Robust kNN-MT.

Both read the scores of the k neighbours and the counts of distinct values among the first 1, 2, ... k of them. Letters:
N tokens, k neighbours.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.trust import Decision, LearnedTrust, Step, Trust
from fairseq_ccpr.decoding.trust_features import first_occurrences
from fairseq_ccpr.errors import ConfigurationError

HIDDEN = 32
NOISE = 0.01  # standard deviation of what is added to each number of a key, relative to unit vectors


class NeighbourNetwork(Trust):
    """What the two have in common.

    Inputs, fp32 [N, 3k + 1]: scores, -inf where a neighbour is missing; counts of distinct values; log p_NMT of the
    neighbours' tokens; log p_NMT of the likeliest token.

    Args:
        tokens, phrases: as of `Trust`; both networks are of token datastores alone.
        neighbours: k.
        temperature: T of the settings, in the units of the scores.

    Raises:
        ConfigurationError: with phrases.
    """

    SPREADS = True
    mean: Tensor
    scale: Tensor

    def __init__(self, tokens: bool, phrases: bool, neighbours: int, temperature: float) -> None:
        if phrases or not tokens:
            raise ConfigurationError(
                f"--combiner {self.KIND} is for a token datastore alone: leave out the phrases, or take --combiner learned"
            )
        super().__init__(tokens, phrases)
        self.neighbours, self.temperature = neighbours, temperature
        self.register_buffer("mean", torch.zeros(2 * neighbours))
        self.register_buffer("scale", torch.ones(2 * neighbours))

    def arguments(self) -> dict[str, Any]:
        """Return what makes another of the same shape."""
        return {**super().arguments(), "neighbours": self.neighbours, "temperature": self.temperature}

    def inputs(self, step: Step) -> Tensor:
        """Collect scores, counts and probabilities."""
        tokens = step.tokens
        assert tokens is not None
        found = tokens.scores > float("-inf")
        first = first_occurrences(tokens.values.masked_fill(~found, -1)) & found
        columns = [tokens.scores, first.cumsum(dim=1), tokens.of_neighbours, step.model.best.unsqueeze(1)]
        return torch.cat([column.float() for column in columns], dim=1)

    def prepare(self, inputs: Tensor) -> None:
        """Take mean and standard deviation of scores and counts."""
        seen = self._finite(inputs)
        self.mean.copy_(seen.mean(dim=0))
        self.scale.copy_(seen.std(dim=0).clamp_min(1e-3))

    def normalised(self, inputs: Tensor) -> Tensor:
        """Return scores and counts, normalised, fp32 [N, 2k]."""
        return (self._finite(inputs) - self.mean) / self.scale

    def _finite(self, inputs: Tensor) -> Tensor:
        """Return scores and counts [N, 2k]; a missing neighbour has the lowest score that was found, or 0."""
        k = self.neighbours
        scores = inputs[:, :k]
        lowest = scores.masked_fill(scores == float("-inf"), float("inf")).amin(dim=1, keepdim=True)
        found = torch.where(scores == float("-inf"), lowest, scores).nan_to_num(posinf=0.0)
        return torch.cat([found, inputs[:, k : 2 * k]], dim=1)


class AdaptiveTrust(NeighbourNetwork):
    """Adaptive kNN-MT (Zheng et al., 2021): a distribution over how many neighbours to believe, none among the choices.

    p = pi_0 p_NMT + sum over r in {1, 2, 4, ... k} of pi_r softmax(score_1..r / T), pi = softmax(W2 tanh(W1 z + b1) + b2).
    """

    KIND: ClassVar[str] = "adaptive"

    def __init__(self, tokens: bool, phrases: bool, neighbours: int, temperature: float) -> None:
        super().__init__(tokens, phrases, neighbours, temperature)
        self.ranks = [2**i for i in range(neighbours.bit_length()) if 2**i <= neighbours]
        self.network = nn.Sequential(
            nn.Linear(2 * neighbours, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1 + len(self.ranks))
        )

    def decide(self, inputs: Tensor, weights: Tensor) -> Decision:
        """Mix distributions of the nearest 1, 2, 4, ... neighbours."""
        chosen = self.network(self.normalised(inputs)).softmax(dim=1)  # [N, 1 + R]
        logits = _logits(inputs[:, : self.neighbours], self.temperature)
        spread = torch.zeros_like(logits)
        for number, rank in enumerate(self.ranks, start=1):
            nearest = torch.zeros_like(logits)
            nearest[:, :rank] = logits[:, :rank].softmax(dim=1).nan_to_num(0.0)
            spread = spread + chosen[:, number : number + 1] * nearest
        total = spread.sum(dim=1, keepdim=True)  # pi of ranks up to which nothing was found goes to the model
        return Decision(total * (weights > 0), spread / total.clamp_min(1e-12))


class RobustTrust(NeighbourNetwork):
    """Robust kNN-MT (Jiang et al., 2022): the temperature and each neighbour's part corrected by the model's confidence.

    p_tok is softmax(score_i / (T exp(t)) + c_i), t of scores and counts, c_i of log p_NMT(v_i) and log p_max; the weight is
    softmax(s_kNN, s_NMT), s_kNN of scores and counts, s_NMT of all c_i and log p_max. The paper also gives c_i the model's
    probability of v_i at the entry's own state, and s_NMT the eight highest of p_NMT: here nothing is computed over the
    vocabulary. Training perturbs the keys and plants the right token among the neighbours, ever less.
    """

    KIND: ClassVar[str] = "robust"

    def __init__(self, tokens: bool, phrases: bool, neighbours: int, temperature: float) -> None:
        super().__init__(tokens, phrases, neighbours, temperature)
        self.of_neighbours = nn.Sequential(nn.Linear(2 * neighbours, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))
        self.correction = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.of_model = nn.Linear(neighbours + 1, 1)

    def decide(self, inputs: Tensor, weights: Tensor) -> Decision:
        """Correct the neighbours' distribution, and weigh it."""
        k = self.neighbours
        temperature, score = self.of_neighbours(self.normalised(inputs)).unbind(dim=1)
        probabilities, best = inputs[:, 2 * k : 3 * k].exp(), inputs[:, 3 * k :].exp()
        parts = torch.stack([probabilities, best.expand_as(probabilities)], dim=2)
        corrections = self.correction(parts).squeeze(2)  # [N, k]
        sharpness = (-temperature.clamp(-2, 2)).exp().unsqueeze(1)
        logits = _logits(inputs[:, :k], self.temperature) * sharpness + corrections
        model = self.of_model(torch.cat([corrections, best], dim=1)).squeeze(1)
        weight = torch.sigmoid(score - model).unsqueeze(1)
        return Decision(weight * (weights > 0), logits.softmax(dim=1).nan_to_num(0.0))

    def perturbed(self, inputs: Tensor, matches: Tensor, of_target: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """Add noise to the keys, and plant the reference token as the nearest neighbour where none names it."""
        k = self.neighbours
        scores, counts, of_neighbours, best = inputs.split([k, k, k, 1], dim=1)
        spread = torch.where(scores < 0, 2 * NOISE * scores.clamp(-1e6, 0).neg().sqrt(), NOISE)
        scores = scores + torch.randn_like(scores) * spread * noise
        plants = (torch.rand(len(inputs), 1, device=inputs.device) < noise) & ~matches.any(dim=1, keepdim=True)
        nearest = scores[:, :1]
        planted = torch.where(nearest < 0, nearest * NOISE, nearest.clamp_min(1 - NOISE))
        shifted = [
            torch.cat([first, rest[:, :-1]], dim=1)
            for first, rest in (
                (planted, scores),
                (torch.ones_like(best), counts + 1),
                (of_target.unsqueeze(1), of_neighbours),
            )
        ]
        changed = torch.cat([*shifted, best], dim=1)
        found = torch.zeros_like(matches)
        found[:, 0] = True
        kept = torch.cat([scores, counts, of_neighbours, best], dim=1)
        return torch.where(plants, changed, kept), torch.where(plants, found, matches)


def _logits(scores: Tensor, temperature: float) -> Tensor:
    """Scores / T less the highest of each row, fp32 [N, k]; not numbers where all are -inf."""
    return (scores - scores.amax(dim=1, keepdim=True)) / temperature


KINDS: dict[str, type[Trust]] = {kind.KIND: kind for kind in (LearnedTrust, AdaptiveTrust, RobustTrust)}
