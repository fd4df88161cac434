"""Entries of a token datastore grouped by token: where CLKNN draws its positives and its negatives from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# So many members of a cluster, at most, make its centre: enough for a mean, and the work no longer grows with the store.
CENTRE_MEMBERS = 64
BLOCK_ROWS = 1 << 14


class TokenClusters:
    """The clusters C_v of the CLKNN paper. Entries are addressed by *slot*: their place when sorted by token.

    Those of tokens that occur at least twice, which alone can be anchors, have the first `anchors` slots.

    Args:
        values: int [P], the token of each entry.
        entries: int64 [P], the entry's id.
    """

    def __init__(self, values: Tensor, entries: Tensor) -> None:
        count_of = torch.bincount(values.long())
        # Stable, and singletons last.
        order = (values.long() + (count_of[values.long()] == 1) * len(count_of)).argsort(stable=True)
        self.members = entries[order]  # [P], by slot
        self.tokens, self.counts = values[order].unique_consecutive(return_counts=True)  # [C]
        self.ends = self.counts.cumsum(0)
        self.starts = self.ends - self.counts
        self.anchors = int(self.counts[self.counts > 1].sum())

    def to(self, device: torch.device) -> TokenClusters:
        """Move, in place."""
        for name in ("members", "tokens", "counts", "ends", "starts"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def cluster_of(self, slots: Tensor) -> Tensor:
        """Find the cluster of each slot, int64, in the shape of `slots`."""
        return torch.searchsorted(self.ends, slots, right=True)

    def draw_positives(self, slots: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw other members of each anchor's cluster, all different where there are as many, else with replacement.

        Args:
            slots: int64 [B], anchors.

        Returns:
            Slots, int64 [B, count], never the anchor's own.
        """
        cluster = self.cluster_of(slots)
        others = (self.counts[cluster] - 1).unsqueeze(1)  # [B, 1]
        # One from each of `count` equal parts of the others, which are rotated at random: different, and equally likely.
        parts = torch.arange(count + 1, device=slots.device) * others // count  # [B, count + 1]
        low, size = parts[:, :-1], parts[:, 1:] - parts[:, :-1]
        enough = others >= count
        drawn = torch.where(
            enough, low + self._below(size, (len(slots), count), generator),
            self._below(others, (len(slots), count), generator),
        )  # fmt: skip
        drawn = (drawn + self._below(others, (len(slots), 1), generator)) % others
        start = self.starts[cluster].unsqueeze(1)
        rank = slots.unsqueeze(1) - start
        return start + (rank + 1 + drawn) % (others + 1)

    def draw_hard_negatives(
        self, slots: Tensor, similarities: Tensor, count: int, nearest: int, generator: torch.Generator
    ) -> Tensor:
        """Draw one random member of each of `count` clusters, drawn from those whose centres are nearest to the anchor.

        Args:
            slots: int64 [B], anchors.
            similarities: [B, C], of each anchor to each centre.
            nearest: K; with fewer than `count` other clusters, they are drawn with replacement.

        Returns:
            Slots, int64 [B, count], never of the anchor's own cluster.
        """
        own = self.cluster_of(slots).unsqueeze(1)
        near = min(nearest, len(self.tokens) - 1)
        close = similarities.scatter(1, own, float("-inf")).topk(near, dim=1).indices  # [B, K]
        if near >= count:
            chance = torch.rand(len(slots), near, generator=generator, device=slots.device)
            chosen = chance.topk(count, dim=1).indices
        else:
            chosen = torch.randint(near, (len(slots), count), generator=generator, device=slots.device)
        cluster = close.gather(1, chosen)
        return self.starts[cluster] + self._below(self.counts[cluster], cluster.shape, generator)

    def draw_random_negatives(self, slots: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw slots of any other cluster, each entry equally likely, int64 [B, count]."""
        cluster = self.cluster_of(slots)
        start, size = self.starts[cluster].unsqueeze(1), self.counts[cluster].unsqueeze(1)
        drawn = self._below(len(self.members) - size, (len(slots), count), generator)
        return torch.where(drawn < start, drawn, drawn + size)

    def centres(self, embed: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
        """Compute the mean z of up to `CENTRE_MEMBERS` members of each cluster, scaled to length 1, fp32 [C, d_o].

        Args:
            embed: z of given entries, int64 [n] -> [n, d_o].
        """
        taken = self.counts.clamp_max(CENTRE_MEMBERS)
        cluster = torch.arange(len(taken), device=taken.device).repeat_interleave(taken)
        ends = taken.cumsum(0)
        turn = torch.arange(len(cluster), device=taken.device) - (ends - taken)[cluster]
        # Small clusters give all their members; of the others, each part of a cluster gives one.
        low = turn * self.counts[cluster] // taken[cluster]
        size = (turn + 1) * self.counts[cluster] // taken[cluster] - low
        slots = self.starts[cluster] + low + self._below(size, size.shape, generator)
        total: Tensor | None = None
        for start in range(0, len(slots), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            z = embed(self.members[slots[block]]).float()
            if total is None:
                total = z.new_zeros(len(taken), z.size(1))
            total.index_add_(0, cluster[block], z)
        assert total is not None
        return torch.nn.functional.normalize(total, dim=1)

    def _below(self, bound: Tensor, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw random integers from 0 up to and without `bound`, int64; 0 where that is 0."""
        # In fp64: fp32 could not reach every member of a cluster of millions.
        uniform = torch.rand(shape, generator=generator, device=self.counts.device, dtype=torch.float64)
        return torch.minimum((uniform * bound).long(), (bound - 1).clamp_min(0))
