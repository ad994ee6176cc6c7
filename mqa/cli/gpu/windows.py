"""Which KV tokens each row of a timed call sees, and how much work that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mqa.reference.schedule import query_block
from mqa.testing._codes import I64

_ALIGN = 4
"""A query block's splits count from its first token rounded down to this."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Row s sees tokens [start[s], end[s]) of `keys`; int64 [rows], within [0, keys]."""

    start: I64
    end: I64
    keys: int

    @property
    def rows(self) -> int:
        return len(self.start)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that have a logit."""
        return int(self._lengths().sum())

    @property
    def longest(self) -> int:
        return int(self._lengths().max())

    def hull(self, num_heads: int) -> int:
        """Pairs that a kernel scores which gives each query block one stretch of tokens.

        Sum over query blocks of their rows times (largest end - smallest start rounded down to 4),
        both over the block's non-empty rows.
        """
        block = query_block(num_heads)
        total = 0
        for first in range(0, self.rows, block):
            start, end = self.start[first : first + block], self.end[first : first + block]
            seen = start < end
            if seen.any():
                low = int(start[seen].min()) // _ALIGN * _ALIGN
                total += len(start) * (int(end[seen].max()) - low)
        return total

    def _lengths(self) -> I64:
        return (self.end - self.start).clip(min=0)


def causal(rows: int, keys: int) -> Windows:
    """The last `rows` tokens of a context of `keys`: row s sees [0, keys - rows + s + 1)."""
    position = np.arange(rows, dtype=np.int64)
    return Windows(np.zeros_like(position), keys - rows + position + 1, keys)


def packed(requests: Sequence[tuple[int, int]]) -> Windows:
    """Requests (rows, tokens) side by side, causal inside each: its rows are its last tokens."""
    starts, ends, first = [], [], 0
    for rows, tokens in requests:
        inside = causal(rows, tokens)
        starts.append(inside.start + first)
        ends.append(inside.end + first)
        first += tokens
    return Windows(np.concatenate(starts), np.concatenate(ends), first)


def halves(rows: int, keys: int) -> Windows:
    """What one of several context-parallel ranks gets: the first and the last tokens of a prompt.

    Half of the rows are tokens [0, rows / 2), the others the last rows / 2 of `keys`.
    """
    early = np.arange(rows // 2, dtype=np.int64)
    late = np.arange(keys - (rows - rows // 2), keys, dtype=np.int64)
    position = np.concatenate([early, late])
    return Windows(np.zeros_like(position), position + 1, keys)


def one_row(rows: int, keys: int, row: int) -> Windows:
    """Every row is empty but `row`, which sees all."""
    end = np.zeros(rows, np.int64)
    end[row] = keys
    return Windows(np.zeros_like(end), end, keys)
