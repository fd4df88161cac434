"""Exact search among a few keys for each sentence of a batch, which are gathered once.

Letters: B sentences, M candidates of each at most, H queries, d width of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_ccpr.search.exact import SPARE, half_norms, largest, products, rounded, scores_of
from fairseq_ccpr.timing import SEARCH, phase


class Candidates:
    """The keys that the queries of each sentence are compared with.

    Args:
        keys: fp32 [B, M, d] on a CPU, fp16 on a GPU.
        entries: int64 [B, M]; -1 where a sentence has fewer.
        metric: l2 or ip.
    """

    def __init__(self, keys: Tensor, entries: Tensor, metric: str) -> None:
        self.keys, self.entries, self.metric = keys, entries, metric
        flat = keys.flatten(0, 1)
        less = half_norms(flat) if metric == "l2" else flat.new_zeros(len(flat), dtype=torch.float32)
        self.less = less.view(entries.shape).masked_fill(entries < 0, float("inf"))
        self._present: Candidates | None = None  # those of the sentences that have not ended

    @phase(SEARCH)
    def search(self, queries: Tensor, rows: Tensor, k: int, each: int | None = None) -> tuple[Tensor, Tensor]:
        """Find the k nearest candidates of the sentences that queries [H, d] belong to.

        Args:
            rows: int64 [H], the sentence of each, ascending.
            each: how many queries each sentence has that has any, so that nobody asks the device; None: they
                differ.

        Returns:
            scores fp32 [H, k], nearest first, and entries int64 [H, k]; -inf and -1 where there are not as
            many.
        """
        if each is not None:
            present = self._of(rows[::each])
            return present._nearest(queries.view(-1, each, queries.size(1)), k)
        counts = torch.bincount(rows, minlength=len(self.keys))
        most = int(counts.max())
        places = rows * most + torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        padded = queries.new_zeros(len(counts) * most, queries.size(1))
        padded[places] = queries
        scores, entries = self._nearest(padded.view(len(counts), most, -1), k)
        return scores[places], entries[places]

    def _of(self, sentences: Tensor) -> Candidates:
        """Return those of some sentences; in a beam search sentences end, and none begins."""
        if len(sentences) == len(self.keys):
            return self
        if self._present is None or len(self._present.keys) != len(sentences):
            self._present = Candidates(self.keys[sentences], self.entries[sentences], self.metric)
        return self._present

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search for queries [B, n, d]."""
        sentences, each, width = queries.shape
        most = self.entries.size(1)
        near = products(rounded(queries, self.keys), self.keys)
        near -= self.less.unsqueeze(1)
        near, places = near.flatten(0, 1).topk(min(k + SPARE, most), dim=1)
        places += torch.arange(sentences, device=places.device).repeat_interleave(each).unsqueeze(1) * most
        scores = scores_of(self.keys.flatten(0, 1), queries.reshape(-1, width), places, self.metric)
        scores, best = largest(scores.masked_fill(near == float("-inf"), float("-inf")), min(k, most))
        entries = self.entries.flatten()[places.gather(1, best)]
        pad, missing = torch.nn.functional.pad, (0, max(0, k - most))
        return pad(scores, missing, value=float("-inf")), pad(entries, missing, value=-1)
