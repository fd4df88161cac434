"""Entries of a token datastore grouped by token: the source of CLKNN's positives and negatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CENTRE_MEMBERS = 64  # of a cluster, at most: enough for a mean, and the work does not grow with the store
PROJECTED_ROWS = 1 << 14
# marks slots, int64 [B, C], that may not serve the B anchors: bool [B, C]
Barred = Callable[[Tensor], Tensor]


class TokenClusters:
    """The clusters C_v of the CLKNN paper.

    Entries are addressed by *slot*: their place when sorted by token and group. The entries of a cluster that
    belong to one group are a *run*. Only tokens that occur in at least two groups, which have the first
    `anchors` slots, can be anchors: a copy of the anchor's own sentence does not count as another context.

    Args:
        values: int [P], the token of each entry.
        entries: int64 [P], the entry's id.
        groups: int64 [P], a number from 0 for each group of equal sentences.
    """

    def __init__(self, values: Tensor, entries: Tensor, groups: Tensor) -> None:
        self._groups = int(groups.max()) + 1
        marks = values.long() * self._groups + groups  # token, then group
        order = marks.argsort(stable=True)
        marks = marks[order]
        groups_of = torch.bincount(marks.unique_consecutive() // self._groups)  # by token
        single = groups_of[marks // self._groups] == 1  # to the end
        marks = torch.cat([marks[~single], marks[single] + len(groups_of) * self._groups])
        self.members = entries[torch.cat([order[~single], order[single]])]  # [P], by slot
        self._run_marks, sizes = marks.unique_consecutive(return_counts=True)  # [R]
        self._run_ends = sizes.cumsum(0)
        # [C]
        self._cluster_marks, self.runs = (self._run_marks // self._groups).unique_consecutive(
            return_counts=True
        )
        self.tokens = self._cluster_marks % len(groups_of)
        self._last_runs = self.runs.cumsum(0)
        self.ends = self._run_ends[self._last_runs - 1]
        self.starts = torch.cat([self.ends.new_zeros(1), self.ends[:-1]])
        self.counts = self.ends - self.starts
        self.anchors = int(self.counts[self.runs > 1].sum())

    def to(self, device: torch.device) -> TokenClusters:
        """Move, in place."""
        for name, tensor in list(vars(self).items()):
            if isinstance(tensor, Tensor):
                setattr(self, name, tensor.to(device))
        return self

    def cluster_of(self, slots: Tensor) -> Tensor:
        """Find the cluster of each slot, int64, in the shape of `slots`."""
        return torch.searchsorted(self.ends, slots, right=True)

    def own_run(self, clusters: Tensor, groups: Tensor) -> Tensor:
        """Find which run of its cluster a group, any number, is, int64 [B], from 0.

        -1 where it has no entry there.
        """
        marks = self._cluster_marks[clusters] * self._groups + groups
        place = torch.searchsorted(self._run_marks, marks).clamp_max(len(self._run_marks) - 1)
        found = (self._run_marks[place] == marks) & (groups >= 0) & (groups < self._groups)
        return torch.where(found, place - self._last_runs[clusters] + self.runs[clusters], -1)

    def draw_positives(self, clusters: Tensor, own: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Draw slots, int64 [B, count], of clusters from groups other than the anchor's run `own` (-1: none).

        All are of different groups where there are as many, else with replacement. Groups are equally likely,
        as are the members of each.
        """
        own, runs = own.unsqueeze(1), self.runs[clusters].unsqueeze(1)  # [B, 1]
        others = runs - (own >= 0).long()
        # One from each of `count` equal parts of the others, which are rotated at random: different, and
        # equally likely.
        parts = torch.arange(count + 1, device=clusters.device) * others // count  # [B, count + 1]
        low, size = parts[:, :-1], parts[:, 1:] - parts[:, :-1]
        enough = others >= count
        shape = (len(clusters), count)
        drawn = torch.where(
            enough, low + self._below(size, shape, generator), self._below(others, shape, generator)
        )
        drawn = (drawn + self._below(others, (len(clusters), 1), generator)) % others
        run = (self._last_runs[clusters].unsqueeze(1) - runs) + (own + 1 + drawn) % runs
        start = torch.where(run > 0, self._run_ends[run - 1], 0)
        return start + self._below(self._run_ends[run] - start, shape, generator)

    def draw_negatives(
        self,
        clusters: Tensor,
        similarities: Tensor,
        count: int,
        nearest: int,
        barred: Barred,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw a random member of each of `count` clusters of those nearest to the anchor; slots [B, count].

        Args:
            clusters: int64 [B], those of the anchors, which give no negatives.
            similarities: [B, C], of each anchor to each centre.
            nearest: K; with fewer than `count` other clusters, they are drawn several times.
            barred: slots not to choose, unless no others were drawn.
        """
        near = min(nearest, len(self.tokens) - 1)
        # [B, K]
        close = similarities.scatter(1, clusters.unsqueeze(1), float("-inf")).topk(near, dim=1).indices
        close = close.repeat(1, -(-count // near))
        drawn = self.starts[close] + self._below(self.counts[close], close.shape, generator)
        # Those that are not barred at random, some repeatedly if they are too few.
        no = barred(drawn)
        chance = torch.rand(drawn.shape, generator=generator, device=drawn.device)
        order = chance.masked_fill(no, -1.0).argsort(dim=1, descending=True)
        allowed = (~no).sum(dim=1, keepdim=True)
        allowed = torch.where(allowed > 0, allowed, drawn.size(1))  # a store of next to nothing
        return drawn.gather(1, order.gather(1, torch.arange(count, device=drawn.device) % allowed))

    def centres(self, embed: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
        """Compute the mean z, of length 1, of up to `CENTRE_MEMBERS` of each cluster, fp32 [C, d_o]."""
        taken = self.counts.clamp_max(CENTRE_MEMBERS)
        cluster = torch.arange(len(taken), device=taken.device).repeat_interleave(taken)
        ends = taken.cumsum(0)
        turn = torch.arange(len(cluster), device=taken.device) - (ends - taken)[cluster]
        # Small clusters give all their members; of the others, each part of a cluster gives one.
        low = turn * self.counts[cluster] // taken[cluster]
        size = (turn + 1) * self.counts[cluster] // taken[cluster] - low
        slots = self.starts[cluster] + low + self._below(size, size.shape, generator)
        total: Tensor | None = None
        for some, owners in zip(slots.split(PROJECTED_ROWS), cluster.split(PROJECTED_ROWS)):
            z = embed(self.members[some]).float()
            total = z.new_zeros(len(taken), z.size(1)) if total is None else total
            total.index_add_(0, owners, z)
        assert total is not None
        return torch.nn.functional.normalize(total, dim=1)

    def _below(
        self, bound: Tensor, shape: torch.Size | tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        # In fp64: fp32 could not reach every member of a cluster of millions.
        uniform = torch.rand(shape, generator=generator, device=self.counts.device, dtype=torch.float64)
        return torch.minimum((uniform * bound).long(), (bound - 1).clamp_min(0))
