"""Models of how hardware and libraries sum a dot product.

A model has `dots(q, k)`, the sums it stands for, and `error(q, k)`, how far an implementation may
be from them. Both take q [R, D] and k [K, D] (float64, block scales included) and return float64
[R, K]. The oracle builds on `dots`, the tolerance on `error`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mqa.testing._codes import F64, I32

_NOTHING = -2000
"""Stands for the exponent of zero: below that of every float64."""
_FLOAT32_MIN = -126
_LEAST_ALIGNMENT = -133
"""Terms are never aligned to less than this exponent, measured with bfloat16 on SM90."""
_TILE = 256


class Accumulator(Protocol):
    def dots(self, q: F64, k: F64) -> F64: ...

    def error(self, q: F64, k: F64) -> F64: ...


@dataclass(frozen=True)
class Float64:
    """Sums in float64, taken as exact: right for the exact regime, where nothing is rounded."""

    def dots(self, q: F64, k: F64) -> F64:
        return np.asarray(q @ k.T, np.float64)

    def error(self, q: F64, k: F64) -> F64:
        return np.zeros((len(q), len(k)))


@dataclass(frozen=True)
class Float32AnyOrder:
    """Exact products, summed in float32 (or better) in any order, fused or not.

    Each of the D - 1 additions rounds to nearest, by at most 2^-24 of a partial sum, and no partial
    sum exceeds sum_d |q.k| (to first order in 2^-24).
    """

    def dots(self, q: F64, k: F64) -> F64:
        return np.asarray(q @ k.T, np.float64)

    def error(self, q: F64, k: F64) -> F64:
        magnitude: F64 = np.abs(q) @ np.abs(k).T
        return np.asarray((q.shape[1] - 1) * 2.0**-24 * magnitude, np.float64)


@dataclass(frozen=True)
class FusedTruncating:
    """A tensor unit: per MMA one fused sum of `k` products and the accumulator.

    All terms are aligned to the largest exponent of a term, at least to -133 (a product's is
    ea + eb, as if both significands were below 2 and their product not normalised), cut toward
    zero at `bits` fraction bits, added exactly; the sum is normalised and cut toward zero to
    min(bits, 23) mantissa bits, at 2^-149 below float32's normal numbers. From 2^128 on it is
    infinite. Zeros have no exponent, and a sum of zero is +0. `min_exponent` is that of an
    operand's subnormals, which are not normalised (-6 for E4M3, -126 for bfloat16; None where
    operands carry block scales); a subnormal accumulator has -126.

    `confirmed` says that hardware agreed bit for bit; until then `error` allows one unit of the
    last aligned bit for each of the k + 1 terms of each MMA.
    """

    bits: int
    k: int
    min_exponent: int | None = None
    confirmed: bool = False
    k_min_exponent: int | None = None
    """Of k, where its type is another one than that of q."""

    def dots(self, q: F64, k: F64, start: F64 | None = None) -> F64:
        """The sums, added to accumulators `start` [R, K] (float32 values) if given."""
        return self._run(q, k, start)[0]

    def error(self, q: F64, k: F64) -> F64:
        return np.zeros((len(q), len(k))) if self.confirmed else self._run(q, k, None)[1]

    def _run(self, q: F64, k: F64, start: F64 | None) -> tuple[F64, F64]:
        """The sums, and k + 1 units of the last aligned bit added up over the MMAs."""
        total, bound = np.zeros((len(q), len(k))), np.zeros((len(q), len(k)))
        if start is not None:
            total += start
        k_least = self.min_exponent if self.k_min_exponent is None else self.k_min_exponent
        q_exponent, k_exponent = _exponent(q, self.min_exponent), _exponent(k, k_least)
        for first in range(0, q.shape[1], self.k):
            dims = slice(first, first + self.k)
            largest = _exponent(total, _FLOAT32_MIN)
            for a, b in zip(q_exponent[:, dims].T, k_exponent[:, dims].T, strict=True):
                np.maximum(largest, a[:, None] + b[None, :], out=largest)
            any_term = largest > _NOTHING
            np.maximum(largest, np.int32(_LEAST_ALIGNMENT), out=largest)
            bound += (self.k + 1) * _power(largest - self.bits) * any_term
            total = self._add(total, q[:, dims].T, k[:, dims].T, largest)
        return total, bound

    def _add(self, total: F64, q: F64, k: F64, largest: I32) -> F64:
        unit = _power(largest - self.bits)
        per_unit = _power(self.bits - largest)
        with np.errstate(invalid="ignore"):  # infinities that meet are NaN
            units = np.trunc(total * per_unit)
            for a, b in zip(q, k, strict=True):
                units += np.trunc(np.multiply.outer(a, b) * per_unit)
        return _cut(units * unit, min(self.bits, 23))


@dataclass(frozen=True)
class GroupedTruncating(FusedTruncating):
    """A tensor unit for 4-bit elements: `group` products are summed exactly and multiplied by the
    significands of their two block scales; these terms have the sum of the scales' exponents.

    Terms are aligned, cut and added as in `FusedTruncating`. A group of zeros has no exponent.
    """

    group: int = 16

    def dots(
        self,
        q: F64,
        k: F64,
        start: F64 | None = None,
        exponents: tuple[I32, I32] | None = None,
    ) -> F64:
        """`exponents`: of the scales of each group of q [R, D / group] and of k [K, D / group].
        Without them a group's term has the exponent of its largest product."""
        total = np.zeros((len(q), len(k)))
        if start is not None:
            total += start
        for first in range(0, q.shape[1], self.k):
            total = self._fused(q, k, first, total, exponents)
        return total

    def error(self, q: F64, k: F64) -> F64:
        """One unit of the last aligned bit for each term, and one of the sum's last bit."""
        terms = min(self.k, q.shape[1]) // self.group + 1
        magnitude: F64 = np.abs(q) @ np.abs(k).T
        steps = -(-q.shape[1] // self.k)
        unit = 2.0**-23 + terms * 2.0 ** (10 - self.bits)
        return np.asarray(steps * unit * magnitude, np.float64)

    def _fused(
        self, q: F64, k: F64, first: int, total: F64, exponents: tuple[I32, I32] | None
    ) -> F64:
        largest, sums = _exponent(total, _FLOAT32_MIN), []
        for start in range(first, min(first + self.k, q.shape[1]), self.group):
            a, b = q[:, start : start + self.group], k[:, start : start + self.group]
            size = np.abs(a) @ np.abs(b).T
            if exponents is None:
                exponent = _largest_product(a, b)
            else:
                mine, theirs = (one[:, start // self.group] for one in exponents)
                exponent = np.where(size == 0, np.int32(_NOTHING), mine[:, None] + theirs)
            np.maximum(largest, exponent, out=largest)
            sums.append(a @ b.T)
        np.maximum(largest, np.int32(_LEAST_ALIGNMENT), out=largest)
        unit, per_unit = _power(largest - self.bits), _power(self.bits - largest)
        with np.errstate(invalid="ignore"):  # infinities that meet are NaN
            units = np.trunc(total * per_unit)
            for one in sums:
                units += np.trunc(one * per_unit)
        return _cut(units * unit, min(self.bits, 23))


def _largest_product(a: F64, b: F64) -> I32:
    """Exponents of the largest products of rows of a and of b, [rows of a, rows of b]."""
    found = np.full((len(a), len(b)), _NOTHING, np.int32)
    for x, y in zip(_exponent(a).T, _exponent(b).T, strict=True):
        np.maximum(found, x[:, None] + y[None, :], out=found)
    return found


_PAIRS = {
    4: ((0, 4), (1, 5), (2, 6), (3, 7)),
    8: ((0, 2), (1, 3)),
    16: ((0, 1), (2, 3)),
}
"""By bits of an element: which ones of a word, of 16-bit ones of two words, share a half of K."""


@dataclass(frozen=True)
class Reordered:
    """A model whose kernels take the dims of a dot in another order, steps of 16 after each other.

    A row of `bits`-bit elements is shared out to four threads, 16 bytes at a time (less where it is
    shorter than 64, and of 16-bit ones not longer). A step takes four elements of each thread, two
    for the lower eight of K, then two for the upper: of a 4-byte word of 8-bit ones 0, 2 and 1, 3
    (`in_turn`: 0, 1 and 2, 3); of eight 4-bit ones 0, 4 and 1, 5, then 2, 6 and 3, 7; of 16-bit
    ones a word each.
    """

    model: FusedTruncating
    bits: int
    in_turn: bool = False

    def dots(self, q: F64, k: F64) -> F64:
        order = self._order(q.shape[1])
        return self.model.dots(q[:, order], k[:, order])

    def error(self, q: F64, k: F64) -> F64:
        order = self._order(q.shape[1])
        return self.model.error(q[:, order], k[:, order])

    def _order(self, dims: int) -> list[int]:
        chunk = min(16, dims * self.bits // (64 if self.bits == 16 else 32))
        parts, unit = dims * self.bits // 32 // chunk, 8 if self.bits == 16 else 4
        pairs = ((0, 1), (2, 3)) if self.in_turn else _PAIRS[self.bits]
        return [
            ((part * 4 + thread) * chunk + at) * 8 // self.bits + element
            for part in range(parts)
            for at in range(0, chunk, unit)
            for pair in pairs
            for thread in range(4)
            for element in pair
        ]


def _exponent(values: F64, least: int | None = None) -> I32:
    """floor(log2 |value|), raised to `least` if given; `_NOTHING` for 0."""
    exponent = np.asarray(np.frexp(values)[1], np.int32) - np.int32(1)
    if least is not None:
        np.maximum(exponent, np.int32(least), out=exponent)
    return np.where(values == 0, np.int32(_NOTHING), exponent)


def _power(exponent: I32) -> F64:
    """2^exponent, cut to normal float64 powers: what is cut multiplies zeros only."""
    biased = np.clip(exponent.astype(np.int64), -1022, 1023) + 1023
    return (biased << 52).view(np.float64)


def _cut(values: F64, mantissa_bits: int) -> F64:
    """To float32, toward zero, with only `mantissa_bits` bits behind the leading one; +0 for 0."""
    last = np.maximum(_exponent(values) - np.int32(mantissa_bits), np.int32(_FLOAT32_MIN - 23))
    cut = np.trunc(values * _power(-last)) * _power(last)
    return np.where(np.abs(cut) >= 2.0**128, np.copysign(np.inf, cut), cut) + 0.0


@dataclass(frozen=True)
class Tiled:
    """A tensor unit's model, evaluated a tile at a time on every core: the same values, sooner."""

    model: Accumulator

    def dots(self, q: F64, k: F64) -> F64:
        return self._tiled(self.model.dots, q, k)

    def error(self, q: F64, k: F64) -> F64:
        return self._tiled(self.model.error, q, k)

    def _tiled(self, fill: Callable[[F64, F64], F64], q: F64, k: F64) -> F64:
        result = np.empty((len(q), len(k)))

        def score(corner: tuple[int, int]) -> None:
            rows, keys = (slice(first, first + _TILE) for first in corner)
            with np.errstate(all="ignore"):  # each thread has its own
                result[rows, keys] = fill(q[rows], k[keys])

        corners = itertools.product(range(0, len(q), _TILE), range(0, len(k), _TILE))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(score, corners))
        return result


def named(name: str) -> Accumulator:
    """The model that this module has by that name, as backends tell theirs."""
    model: Accumulator = globals()[name]
    return model


EXACT = Float64()
FLOAT32 = Float32AnyOrder()
HOPPER_FP8 = FusedTruncating(bits=13, k=32, min_exponent=-6, confirmed=True)
"""E4M3 `wgmma` with float32 sums on SM90, confirmed on an H200 (docs/hardware.md)."""
HOPPER_BF16 = FusedTruncating(bits=25, k=16, min_exponent=-126, confirmed=True)
"""bfloat16 `wgmma` on SM90, confirmed on an H200 (docs/hardware.md)."""
AMPERE_BF16 = FusedTruncating(bits=24, k=8, min_exponent=-126)
"""bfloat16 `mma.sync` on SM80 to SM89, as published (MMA-Sim), not confirmed: eight products and
the accumulator at once, so that m16n8k16 are two sums, the lower eight of K first."""
AMPERE_F16 = FusedTruncating(bits=24, k=8, min_exponent=-14)
"""float16, likewise."""
HOPPER_MMA_BF16 = FusedTruncating(bits=25, k=16, min_exponent=-126)
"""bfloat16 `mma.sync` on SM90, SM100 and SM120: as published (MMA-Sim) what `wgmma` does, not
confirmed."""
HOPPER_MMA_F16 = FusedTruncating(bits=25, k=16, min_exponent=-14)
"""float16, likewise."""
HOPPER_E4M3_IN_BF16 = Reordered(HOPPER_BF16, 8)
"""E4M3, scaled or not, that the `sm90` backends convert to bfloat16."""
HOPPER_E2M1_IN_BF16 = Reordered(HOPPER_BF16, 4)
"""E2M1 with block scales, converted likewise."""
HOPPER_BF16_IN_CHUNKS = Reordered(HOPPER_BF16, 16)
"""bfloat16 as the `sm90` backend takes it from memory."""
AMPERE_E4M3_IN_BF16 = Reordered(AMPERE_BF16, 8)
"""E4M3 with block scales that the `portable` backend converts to bfloat16, on SM80 to SM89."""
AMPERE_E2M1_IN_BF16 = Reordered(AMPERE_BF16, 4)
AMPERE_BF16_IN_CHUNKS = Reordered(AMPERE_BF16, 16)
AMPERE_E4M3_IN_F16 = Reordered(AMPERE_F16, 8, in_turn=True)
"""E4M3 that it converts to float16, by instructions of SM89."""
AMPERE_E4M3_SHIFTED_IN_F16 = Reordered(replace(AMPERE_F16, min_exponent=-21, k_min_exponent=-6), 8)
"""The same by code for older GPUs: k is multiplied by 2^-8, so that its subnormals are float16's, q
by 2^7."""
HOPPER_MMA_E4M3_IN_BF16 = Reordered(HOPPER_MMA_BF16, 8)
"""These five from SM90 on."""
HOPPER_MMA_E2M1_IN_BF16 = Reordered(HOPPER_MMA_BF16, 4)
HOPPER_MMA_BF16_IN_CHUNKS = Reordered(HOPPER_MMA_BF16, 16)
HOPPER_MMA_E4M3_IN_F16 = Reordered(HOPPER_MMA_F16, 8, in_turn=True)
HOPPER_MMA_E4M3_SHIFTED_IN_F16 = Reordered(
    replace(HOPPER_MMA_F16, min_exponent=-21, k_min_exponent=-6), 8
)
BLACKWELL_F16 = FusedTruncating(bits=25, k=16, min_exponent=-14)
"""float16 `tcgen05.mma`; like all models of Blackwell as published (MMA-Sim), not confirmed."""
BLACKWELL_BF16 = FusedTruncating(bits=25, k=16, min_exponent=-126)
BLACKWELL_TF32 = FusedTruncating(bits=25, k=8, min_exponent=-126)
BLACKWELL_FP8 = FusedTruncating(bits=25, k=32, min_exponent=-6)
"""E4M3 by E4M3 with kind::f8f6f4."""
BLACKWELL_MXFP8 = FusedTruncating(bits=25, k=32)
"""kind::mxf8f6f4: exponents of block scales are added to those of the products."""
BLACKWELL_MXFP4 = GroupedTruncating(bits=35, k=64)
"""kind::mxf4 and kind::mxf4nvf4."""
