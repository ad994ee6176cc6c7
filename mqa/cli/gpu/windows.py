"""Which KV tokens each row of a timed call sees, and how much work that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mqa.reference.schedule import query_block
from mqa.testing._codes import I64

_ALIGN = 4
"""A query block's splits count from its first token rounded down to this."""
PAGE = 64
"""Tokens of a page."""


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

    @property
    def tokens(self) -> int:
        """KV tokens that there are to read."""
        return self.keys

    @property
    def result_width(self) -> int:
        """Columns of a result that holds each window, compressed where the call is dense."""
        return self.longest

    def sizes(self) -> dict[str, int]:
        """As a report names them."""
        return {"S": self.rows, "N": self.keys}

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


@dataclass(frozen=True, eq=False)
class Batch(Windows):
    """Rows of requests in a paged cache, `next_n` each, in order: row r sees the first end[r]
    tokens of its request. `keys` is the width of the result, max_context_len."""

    next_n: int
    page: int = PAGE

    @property
    def lens(self) -> I64:
        """[B, next_n]"""
        return self.end.reshape(-1, self.next_n)

    @property
    def request_tokens(self) -> I64:
        """Tokens that each request has: what its longest row sees, [B]."""
        return np.asarray(self.lens.max(axis=1), np.int64)

    @property
    def tokens(self) -> int:
        return int(self.request_tokens.sum())

    @property
    def result_width(self) -> int:
        return self.keys

    def sizes(self) -> dict[str, int]:
        shape = {"B": self.rows // self.next_n, "next_n": self.next_n, "page": self.page}
        return shape | {"L": self.keys, "tokens": self.tokens}


def batch(requests: int, next_n: int, length: int, width: int = 0) -> Batch:
    """Requests of `length` tokens whose rows are the last ones, causal; width 0: `length`."""
    lens = np.tile(np.arange(length - next_n, length, dtype=np.int64) + 1, requests)
    return Batch(np.zeros_like(lens), lens, width or length, next_n)


def ending(requests: int, last: int, width: int) -> Batch:
    """Requests of one row that have no tokens, but the last one has `last`."""
    lens = np.zeros(requests, np.int64)
    lens[-1] = last
    return Batch(np.zeros_like(lens), lens, width, 1)


def drawn(requests: int, next_n: int, width: int, seed: int = 0) -> Batch:
    """Lens from 0 to `width`, each drawn for itself."""
    lens = np.random.default_rng(seed).integers(0, width, requests * next_n, endpoint=True)
    return Batch(np.zeros_like(lens), lens, width, next_n)
