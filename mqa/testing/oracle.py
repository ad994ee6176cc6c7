"""What the logits of a case are, in float64: numpy alone, decoded from bits, blockwise.

    logits[r, n] = key_scale[n] * sum_h w[r, h] * relu(q[r, h] . k[n])

with each dot formed by an accumulator model. It shares no code with `mqa.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mqa.testing._codes import F64, Bool
from mqa.testing.accumulators import EXACT, Accumulator
from mqa.testing.data import Data, Group

if TYPE_CHECKING:
    from mqa.testing.cases import Case

_BLOCK_ELEMENTS = 2**22
"""Dots held at a time: 32 MiB each for values, errors and temporaries."""

HeadSum = Callable[[F64, F64], F64]
"""(weights [R, H], relus [R, H, K]) -> [R, K]"""


@dataclass(frozen=True)
class OracleResult:
    """Logits and what bounds their error; all arrays are [rows, width], float64 unless said."""

    values: F64
    """Unrounded logits; outside the windows -inf if the problem is cleaned, else NaN."""
    valid: Bool
    """Inside the row's window. Only these mean anything if the problem is not cleaned."""
    magnitude: F64
    """scale * sum_h |w_h| * relu(dot_h)"""
    dot_error: F64
    """scale * sum_h |w_h| * (the accumulator's error of dot_h)"""
    weight: F64
    """scale * sum_h |w_h|"""
    scale: F64
    """The key scale (fp8), or 1."""
    plateau: Bool
    """Every dot is <= 0 whatever its rounding: the logit must be exactly +0.0."""
    heads: int
    head_dim: int


def logits(case: Case, accumulator: Accumulator = EXACT) -> OracleResult:
    """The logits of `case` with dots as `accumulator` forms them, relu and head sum in float64."""
    return combine(case.data, accumulator)


def sum_heads(weights: F64, relus: F64) -> F64:
    """sum_h weights[r, h] * relus[r, h, n] as [R, K]; a sum of negative zeros is +0.0."""
    total: F64 = np.matmul(weights[:, None, :], relus)[:, 0] + 0.0
    return total


def combine(
    data: Data,
    accumulator: Accumulator = EXACT,
    relu: bool = True,  # noqa: FBT001, FBT002
    head_sum: HeadSum = sum_heads,
) -> OracleResult:
    """`logits` of bare data; `relu` and `head_sum` are there to be planted with faults."""
    shape = (data.rows, data.width)
    result = OracleResult(
        values=np.full(shape, -np.inf if data.clean else np.nan),
        valid=np.zeros(shape, np.bool_),
        **{name: np.zeros(shape) for name in ("magnitude", "dot_error", "weight", "scale")},
        plateau=np.zeros(shape, np.bool_),
        heads=data.heads,
        head_dim=data.head_dim,
    )
    rectify = _relu if relu else _identity
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for group in data.groups:
            for rows, first, last in _blocks(data, group):
                block = _Block(data, rows, group.keys[first:last], first)
                block.score(result, accumulator, rectify, head_sum)
    return result


def _relu(dots: F64) -> F64:
    return np.maximum(dots, 0.0)


def _identity(dots: F64) -> F64:
    return dots


def _blocks(data: Data, group: Group) -> list[tuple[slice, int, int]]:
    """Rows and positions [first, last) that cover the group's windows, few dots at a time."""
    blocks = []
    columns = max(1, min(len(group.keys), 4096, _BLOCK_ELEMENTS // data.heads))
    step = max(1, _BLOCK_ELEMENTS // (data.heads * columns))
    lengths = data.lengths()
    for row in range(group.first, group.last, step):
        rows = slice(row, min(row + step, group.last))
        seen = lengths[rows] > 0
        if not seen.any():
            continue
        low = int(data.start[rows][seen].min())
        high = int((data.start + lengths)[rows][seen].max())
        blocks += [(rows, at, min(at + columns, high)) for at in range(low, high, columns)]
    return blocks


@dataclass(frozen=True)
class _Block:
    data: Data
    rows: slice
    keys: np.ndarray
    first: int
    """Position of keys[0]."""

    def score(
        self,
        result: OracleResult,
        accumulator: Accumulator,
        rectify: Callable[[F64], F64],
        head_sum: HeadSum,
    ) -> None:
        """Compute all rows x keys of the block and store the entries inside the windows."""
        q, k = self.data.q(self.rows), self.data.k(self.keys)
        shape = (*q.shape[:2], len(k))
        flat = q.reshape(-1, q.shape[2])
        weights = self.data.weights[self.rows].astype(np.float64)
        scale = self.data.key_scale[self.keys].astype(np.float64)
        dots = accumulator.dots(flat, k).reshape(shape)
        error = accumulator.error(flat, k).reshape(shape)
        plateau = np.asarray((dots + error <= 0).all(axis=1))
        relus = rectify(dots)
        size = np.abs(weights)
        self._store(result.values, scale * head_sum(weights, relus))
        self._store(result.magnitude, scale * sum_heads(size, np.abs(relus)))
        self._store(result.dot_error, scale * sum_heads(size, error))
        self._store(result.weight, size.sum(axis=1)[:, None] * scale)
        self._store(result.scale, np.broadcast_to(scale, plateau.shape))
        self._store(result.plateau, plateau)
        self._store(result.valid, np.ones_like(plateau))

    def _store(self, target: np.ndarray, block: np.ndarray) -> None:
        lengths = self.data.lengths()[self.rows]
        for row, (length, part) in enumerate(zip(lengths, block, strict=True), self.rows.start):
            start, origin = int(self.data.start[row]), int(self.data.origin[row])
            low = max(start, self.first)
            high = min(start + int(length), self.first + len(part))
            if low < high:
                into = slice(low - origin, high - origin)
                target[row, into] = part[low - self.first : high - self.first]
