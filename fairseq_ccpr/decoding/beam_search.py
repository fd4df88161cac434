"""Beam search that reads the vocabulary once: the same hypotheses as fairseq's, found through the largest of each run."""

from __future__ import annotations

import torch
from fairseq.search import BeamSearch
from torch import Tensor

RUN = 64  # neighbouring tokens that the likeliest of them stands for
SMALL = 1 << 17  # log-probabilities of a batch that are compared with one another


class RunwiseBeamSearch(BeamSearch):
    """Selects what fairseq's `BeamSearch` selects, but for the order of equal scores.

    The best continuations lie in the runs whose own best are best, and adding a hypothesis's score to all of a run leaves
    their order. So nothing as wide as the vocabulary is added up or sorted.
    """

    def step(
        self,
        step: int,
        lprobs: Tensor,
        scores: Tensor | None,
        prev_output_tokens: Tensor | None = None,
        original_batch_idxs: Tensor | None = None,
        candidate_multiple: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best continuations of each sentence.

        Args:
            lprobs: fp32 [B, beam, V].
            scores: fp32 [B, beam, step], of the hypotheses after each token.

        Returns:
            Scores, tokens and hypotheses, fp32 and int64 twice [B, min(candidate_multiple * beam, beam * V - 1)].
        """
        sentences, beam, words = lprobs.shape
        count = candidate_multiple * beam
        if step == 0 or lprobs.numel() < SMALL or beam * (words // RUN) < count:
            selected: tuple[Tensor, Tensor, Tensor] = super().step(
                step, lprobs, scores, prev_output_tokens, original_batch_idxs, candidate_multiple
            )
            return selected
        assert scores is not None
        so_far = scores[:, :, step - 1]
        at = _best_runs(lprobs, so_far, count)
        likely = lprobs.view(sentences, -1).gather(1, at) + so_far.gather(1, at // words)
        best, chosen = likely.topk(count, dim=1)
        at = at.gather(1, chosen)
        return best, at % words, at // words


def _best_runs(lprobs: Tensor, so_far: Tensor, count: int) -> Tensor:
    """Find where the best `count` continuations of each sentence may be, int64 [B, C], as places in [beam * V]."""
    sentences, beam, words = lprobs.shape
    runs = words // RUN
    whole = runs * RUN
    likeliest = lprobs[:, :, :whole].unflatten(2, (runs, RUN)).amax(dim=3) + so_far.unsqueeze(2)
    best = likeliest.flatten(1).topk(count, dim=1).indices
    begins = best // runs * words + best % runs * RUN
    device = lprobs.device
    inside = (begins.unsqueeze(2) + torch.arange(RUN, device=device)).flatten(1)
    rest = torch.arange(beam, device=device).unsqueeze(1) * words + torch.arange(whole, words, device=device)
    return torch.cat([inside, rest.flatten().expand(sentences, -1)], dim=1)
