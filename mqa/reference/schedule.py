"""Schedules: which SM does which tasks. The definition that metadata kernels match bit for bit.

Work comes in groups of rows that share KV tokens: in dense calls a query block of
max(1, 512 // num_heads) rows, in paged calls up to 8 rows of one request. A task is a group and
one of its splits, 256 KV tokens; tasks are in lexicographic order. A schedule is an int32 tensor
[M + 1, 2] of cut points (first, split): SM i does every task t with cut[i] <= t < cut[i + 1],
where the first and the last cut count as minus and plus infinity. `first` is the query block of a
dense task and the group's first row of a paged one.

A group of R rows and T tasks weighs 1 + u * R * T, where u is 1 in dense calls and 64 in paged
ones; the 1 belongs to its first task, and an empty group still has it. A task of one row reads its
keys for about as long as it takes to look past 64 empty groups, and engines pad batches with many.
Fresh cut i is the first task that begins at or after weight floor(i * total / M), so no SM's
weight exceeds ceil(total / M) plus the heaviest task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SPLIT = 256
"""KV tokens of a task."""
GROUP = 8
"""Most rows of a group in a paged call."""
PAGED_UNIT = 64
"""Weight of a paged task for each of its rows; an empty group weighs 1."""


class Group(NamedTuple):
    first: int
    """First coordinate of the group's tasks."""
    rows: int
    tasks: int


class _Groups(NamedTuple):
    """Groups by position, int64 [positions]; a position that starts no group has 0 rows."""

    rows: Tensor
    tasks: Tensor
    span: Tensor
    """Positions that a group takes."""


def query_block(num_heads: int) -> int:
    """Rows of a dense query block."""
    return max(1, 512 // num_heads)


def dense_metadata(
    start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, num_sms: int
) -> Tensor:
    """Cut points int32 [num_sms + 1, 2] for windows `start`, `end` int32 [S]."""
    return _cut_points(_dense(start, end, num_kv_tokens, num_heads), 1, num_sms)


def paged_metadata(context_lens: Tensor, num_sms: int, indices: Tensor | None = None) -> Tensor:
    """Cut points int32 [num_sms + 1, 2] for int32 lens [B, next_n], or [B] as next_n = 1."""
    return _cut_points(_paged(context_lens, indices), PAGED_UNIT, num_sms)


def dense_groups(start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int) -> list[Group]:
    return _listed(_dense(start, end, num_kv_tokens, num_heads))


def paged_groups(context_lens: Tensor, indices: Tensor | None = None) -> list[Group]:
    return _listed(_paged(context_lens, indices))


def tasks(schedule: Tensor, groups: Sequence[Group]) -> list[list[tuple[int, int]]]:
    """What each SM does: for every one of the M SMs its tasks (first, split), in order.

    `schedule` may hold anything: with sorted cuts every task of `groups` occurs exactly once,
    with any cuts at least once.
    """
    every = [(group.first, split) for group in groups for split in range(group.tasks)]
    cuts = [(int(first), int(split)) for first, split in schedule.tolist()]
    at = [0, *(bisect_left(every, cut) for cut in cuts[1:-1]), len(every)]
    return [every[low:high] for low, high in pairwise(at)]


def group_starts(next_n: int, rows: int, indices: Tensor | None, device: torch.device) -> Tensor:
    """Flags [rows] of the rows that start a group.

    A request's rows are cut every 8 from its first; in varlen calls a request is a maximal run of
    equal indices and is cut at multiples of 8, so that a row finds its group in the 7 before it.
    """
    row = torch.arange(rows, device=device)
    if indices is None:
        return row % next_n % GROUP == 0
    starts = row % GROUP == 0
    starts[1:] |= indices[1:] != indices[:-1]
    return starts


def _dense(start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int) -> _Groups:
    block = query_block(num_heads)
    count = start.shape[0]
    low, high = (bound.long().clamp(0, num_kv_tokens) for bound in (start, end))
    used = low < high
    padding = -count % block
    low = _padded(torch.where(used, low, num_kv_tokens), padding, num_kv_tokens)
    high = _padded(torch.where(used, high, 0), padding, 0)
    first = low.view(-1, block).amin(1) // 4 * 4
    tokens = (high.view(-1, block).amax(1) - first).clamp(min=0)
    rows = torch.full_like(first, block)
    rows[-1:] -= padding
    return _Groups(rows, _splits(tokens), torch.ones_like(rows))


def _paged(context_lens: Tensor, indices: Tensor | None) -> _Groups:
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    lens = context_lens.reshape(-1).long().clamp(min=0)
    starts = group_starts(next_n, lens.shape[0], indices, lens.device)
    group = starts.long().cumsum(0) - 1
    zeros = torch.zeros_like(lens)
    rows = zeros.scatter_add(0, group, torch.ones_like(lens))[group]
    longest = zeros.scatter_reduce(0, group, lens, "amax")[group]
    return _Groups(torch.where(starts, rows, 0), _splits(longest), rows)


def _splits(tokens: Tensor) -> Tensor:
    return (tokens + SPLIT - 1) // SPLIT


def _padded(values: Tensor, padding: int, fill: int) -> Tensor:
    return torch.cat((values, values.new_full((padding,), fill)))


def _cut_points(groups: _Groups, unit: int, num_sms: int) -> Tensor:
    # Positions that start no group weigh nothing, so a search for the last position at or before
    # a weight always lands on the start of a group, or on the end.
    rows, group_tasks, span = (_padded(column, 1, 1) for column in groups)
    weight = torch.where(groups.rows > 0, 1 + unit * groups.rows * groups.tasks, 0)
    before = torch.cat((weight.new_zeros(1), weight.cumsum(0)))
    # floor(i * total / num_sms), without a product that could pass 2^63.
    place, total = torch.arange(num_sms + 1, device=weight.device), before[-1]
    target = place * (total // num_sms) + place * (total % num_sms) // num_sms
    first = torch.searchsorted(before, target, right=True) - 1
    into = target - before[first]
    step = unit * rows[first]
    split = torch.where(into > 0, ((into + step - 2) // step).clamp(min=1), 0)
    over = (split > 0) & (split >= group_tasks[first])
    first = torch.where(over, first + span[first], first)
    return torch.stack((first, torch.where(over, 0, split)), dim=1).int()


def _listed(groups: _Groups) -> list[Group]:
    columns = zip(groups.rows.tolist(), groups.tasks.tolist(), strict=True)
    return [Group(first, rows, splits) for first, (rows, splits) in enumerate(columns) if rows]
