"""A made-up long-context workload of an indexer, in which the right answer is known.

Keys follow a topic that changes every few dozen tokens, plus a walk and noise, with a few loud
channels, as keys of real models have them. Some tokens are *planted*: each group of queries asks
for a few of them, some louder than others, and the indexer ought to rank them first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUPS = 4
_PLANTED_PER_GROUP = 8
_TOPIC_TOKENS = 48
_LOUD_CHANNELS = 4


@dataclass(frozen=True)
class Workload:
    """Queries [S, H, D], keys [N, D] and weights [S, H], float32, before any quantisation."""

    q: Tensor
    k: Tensor
    weights: Tensor
    end: Tensor
    """int32 [S]: query s sees keys [0, end[s]), spread over the second half of the context."""
    planted: Tensor
    """bool [S, N]: the tokens that a query ought to find."""

    @property
    def start(self) -> Tensor:
        return torch.zeros_like(self.end)

    @property
    def outside(self) -> Tensor:
        """bool [S, N]: what a query may not see."""
        return torch.arange(len(self.k)) >= self.end[:, None]


def make_workload(rows: int, tokens: int, heads: int, dims: int, seed: int) -> Workload:
    """The same workload for the same numbers."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    loud = torch.ones(dims)
    loud[torch.randperm(dims, generator=draw)[:_LOUD_CHANNELS]] = 4.0
    topics = normal(tokens // _TOPIC_TOKENS + 1, dims)
    topic = torch.cumsum(torch.rand(tokens, generator=draw) < 1 / _TOPIC_TOKENS, 0)
    walk = torch.cumsum(normal(tokens, dims), 0) / tokens**0.5
    k = topics[topic % len(topics)] + walk + 0.7 * normal(tokens, dims)
    wanted = normal(_GROUPS, dims)
    group = torch.arange(rows) * _GROUPS // max(rows, 1)
    places = torch.randperm(tokens // 2, generator=draw)[: _GROUPS * _PLANTED_PER_GROUP]
    owner = torch.arange(len(places)) % _GROUPS
    strength = torch.linspace(0.4, 1.2, _PLANTED_PER_GROUP).repeat_interleave(_GROUPS)[:, None]
    k[places] = strength * wanted[owner] + 0.7 * normal(len(places), dims)
    leaning = torch.rand(rows, heads, 1, generator=draw)
    q = leaning * wanted[group][:, None] + normal(rows, heads, dims)
    end = tokens // 2 + (torch.arange(rows) + 1) * (tokens - tokens // 2) // max(rows, 1)
    planted = torch.zeros(rows, tokens, dtype=torch.bool)
    planted[:, places] = owner == group[:, None]
    return Workload(
        q=q,
        k=k * loud,
        weights=(0.25 + torch.rand(rows, heads, generator=draw)) / (heads * dims**0.5),
        end=end.to(torch.int32),
        planted=planted,
    )


def float32_scores(workload: Workload) -> Tensor:
    """The scores [S, N] that no quantisation has touched, row by row; -inf outside the windows."""
    scores = torch.empty(len(workload.q), len(workload.k))
    for row, (q, weights) in enumerate(zip(workload.q, workload.weights, strict=True)):
        scores[row] = weights @ (q @ workload.k.T).relu()
    return scores.masked_fill_(workload.outside, float("-inf"))
