"""Which keys a row sees: windows of dense problems, lens, pages and requests of paged ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mqa.problem import DenseProblem, PagedProblem
from mqa.testing._codes import I32, I64
from mqa.testing.data import Group
from mqa.testing.draws import Draw

HUGE = 1_073_741_824
"""A page id or length that no pool has: what lies where nobody may look."""


def draw_windows(problem: DenseProblem) -> tuple[I64, I64]:
    """cu_seq_len_k_start and _end of the problem's window pattern, [S] each, not clamped."""
    draw = Draw(problem.seed, "windows")
    start, end = _PATTERNS[problem.windows](draw, problem.S, problem.N)
    if problem.M:
        low, high = np.clip(start, 0, problem.N), np.clip(end, 0, problem.N)
        start = np.where(high - low > problem.M, high - problem.M, start)
    return start, end


def cut_windows(start: I64, end: I64, num_keys: int, longest: int) -> I64:
    """`end` where no window is longer than `longest` (0: any)."""
    if not longest:
        return end
    low, high = np.clip(start, 0, num_keys), np.clip(end, 0, num_keys)
    return np.where(high - low > longest, low + longest, end)


def _causal(draw: Draw, rows: int, keys: int) -> tuple[I64, I64]:
    position = np.arange(rows, dtype=np.int64)
    return np.zeros_like(position), np.clip(keys - rows + position + 1, 0, keys)


def _full(draw: Draw, rows: int, keys: int) -> tuple[I64, I64]:
    return np.zeros(rows, np.int64), np.full(rows, keys, np.int64)


def _random(draw: Draw, rows: int, keys: int) -> tuple[I64, I64]:
    """Half ordinary; the rest empty, inverted, from before 0, past N, or both."""
    ends = np.sort(draw.between(0, keys, (rows, 2)), axis=1)
    start, end = ends[:, 0], ends[:, 1]
    kind = draw.below(10, (rows,))
    beyond = draw.between(1, 9, (rows,))
    start, end = np.where(kind == 0, end, start), end
    start, end = np.where(kind == 1, end + beyond, start), np.where(kind == 1, start, end)
    start = np.where((kind == 2) | (kind == 4), -beyond, start)
    end = np.where((kind == 3) | (kind == 4), keys + beyond, end)
    return start, end


def _packed(draw: Draw, rows: int, keys: int) -> tuple[I64, I64]:
    """Up to 4 requests side by side, causal inside each, some keys of theirs cached before."""
    requests = draw.number(1, 4)
    row_cuts = np.sort(draw.between(0, rows, (requests - 1,)))
    key_cuts = np.sort(draw.between(0, keys, (requests - 1,)))
    request = np.searchsorted(row_cuts, np.arange(rows), side="right")
    first = np.concatenate(([0], key_cuts))[request]
    last = np.concatenate((key_cuts, [keys]))[request]
    rows_left = np.concatenate((row_cuts, [rows]))[request] - np.arange(rows)
    return first.astype(np.int64), np.clip(last - rows_left + 1, first, last).astype(np.int64)


def _empty(draw: Draw, rows: int, keys: int) -> tuple[I64, I64]:
    start = draw.between(0, keys, (rows,))
    return start, start - draw.between(0, 2, (rows,))


_PATTERNS: dict[str, Callable[[Draw, int, int], tuple[I64, I64]]] = {
    "causal": _causal,
    "full": _full,
    "random": _random,
    "packed": _packed,
    "empty": _empty,
}


def draw_lens(problem: PagedProblem) -> I32:
    """context_lens of the problem's pattern: [B] or [B, next_n], within L and the table."""
    draw = Draw(problem.seed, "lens")
    shape = (problem.B,) if problem.lens_rank == 1 else (problem.B, problem.next_n)
    top = min(problem.L, problem.columns * problem.P) if problem.blocks else 0
    if problem.lens == "zero":
        lens = np.zeros(shape, np.int64)
    elif problem.lens == "full":
        lens = np.full(shape, top, np.int64)
    elif problem.lens == "ramp":
        count = int(np.prod(shape))
        lens = (np.arange(count, dtype=np.int64) * top // max(count - 1, 1)).reshape(shape)
    else:
        kind = draw.below(8, shape)
        lens = draw.between(0, top, shape)
        lens = np.select([kind == 0, kind == 1, kind == 2], [0, min(1, top), top], lens)
    return lens.astype(np.int32)


def valid_counts(problem: PagedProblem, lens: I32) -> I64:
    """How many tokens each row sees, [B * next_n]."""
    wide = lens.astype(np.int64)
    if lens.ndim == 1:
        wide = wide[:, None] - problem.next_n + np.arange(problem.next_n) + 1
    return np.maximum(wide, 0).reshape(-1)


@dataclass(frozen=True)
class Paging:
    """Block table, varlen indices and the requests they make; `groups` point at pool slots."""

    table: I32
    """[B, columns]; entries past a row's need hold -1, HUGE or some other page."""
    indices: I32
    """[B], equal in runs; empty unless varlen."""
    groups: tuple[Group, ...]
    """Keys of a group are slots page * P + token of the pool."""


def draw_paging(problem: PagedProblem, counts: I64) -> Paging:
    """Pages for rows that see `counts` tokens: shuffled, shared only if the pool is too small."""
    draw = Draw(problem.seed, "pages")
    shape = (problem.B, problem.columns)
    other = draw.below(max(problem.blocks, 1), shape)
    table = np.choose(draw.below(3, shape), [np.full(shape, -1), np.full(shape, HUGE), other])
    order = draw.shuffled(problem.blocks)
    indices, taken, groups = _runs(problem, draw), 0, []
    for first, last in _requests(problem, indices):
        rows = slice(first * problem.next_n, last * problem.next_n)
        tokens = int(counts[rows].max())
        need = -(-tokens // problem.P)
        pages = order[np.arange(taken, taken + need) % max(problem.blocks, 1)]
        taken += need
        for entry in range(first, last):
            own = need if not problem.varlen else -(-int(counts[entry]) // problem.P)
            table[entry, :own] = pages[:own]
        position = np.arange(tokens)
        slots = pages[position // problem.P] * problem.P + position % problem.P
        groups.append(Group(rows.start, rows.stop, slots.astype(np.int64)))
    return Paging(table.astype(np.int32), indices, tuple(groups))


def _runs(problem: PagedProblem, draw: Draw) -> I32:
    """Runs of 1 to 11 equal indices; an index may come back later as another request."""
    indices: list[int] = []
    while problem.varlen and len(indices) < problem.B:
        index = draw.number(0, problem.B)
        if indices and index == indices[-1]:
            index += 1
        indices += [index] * draw.number(1, 11)
    return np.array(indices[: problem.B], np.int32)


def _requests(problem: PagedProblem, indices: I32) -> list[tuple[int, int]]:
    """Batch entries [first, last) of each request."""
    if not problem.varlen:
        return [(entry, entry + 1) for entry in range(problem.B)]
    cuts = np.flatnonzero(np.diff(indices)) + 1
    edges = [0, *cuts.tolist(), problem.B] if problem.B else [0]
    return list(itertools.pairwise(edges))
