"""Float arithmetic that numpy lacks: one rounding in fma, small formats, PTX's max and min."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TIE = np.uint64(1 << 63)
_BELOW_F32 = np.uint64(35)
"""A float64's bits shifted left by this are those that float32 has no room for."""
_EXPONENT_F32 = np.uint32(0x7F800000)
CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once.

    The product is exact in float64 and the sum is rounded there. That can mislead the second
    rounding only where the first one lands halfway between two float32 values, or where float32
    has fewer bits than usual: there the sum is rounded to odd first.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    result = total.astype(np.float32)
    if np.count_nonzero(total == result) == total.size:
        return result  # what float32 can hold has been rounded once
    ties = np.count_nonzero((total.view(np.uint64) << _BELOW_F32) == _TIE)
    normal = np.count_nonzero(result.view(np.uint32) & _EXPONENT_F32)
    if ties == 0 and normal == result.size:
        return result
    return to_odd(product, c.astype(np.float64), total).astype(np.float32)


_LEAST_F32 = 2.0**-126


def rounds_once(totals: list[Array]) -> bool:
    """Whether float64 sums of exact products may be rounded to float32 as they are: none lies
    halfway between two float32 values, and none is subnormal there."""
    total = np.concatenate([x.ravel() for x in totals]) if len(totals) > 1 else totals[0]
    if np.count_nonzero((total.view(np.uint64) << _BELOW_F32) == _TIE):
        return False
    small = int(np.count_nonzero(np.abs(total) < _LEAST_F32))
    return small == total.size - int(np.count_nonzero(total))


def to_odd(a: Array, b: Array, total: Array) -> Array:
    """`total`, which is a + b rounded, moved to the neighbour with an odd last bit if inexact."""
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    # Away from zero where the error has the sum's sign, else toward zero.
    step = np.where((error > 0) == (total > 0), 1, -1)
    moves = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(moves, bits + step, bits).view(np.float64)


def divide_approximately(a: Array, b: Array) -> Array:
    """a / b as div.approx.f32 may give it, rounded to nearest: hardware is within 2 ulp of that.

    Divisors above 2^126 give 0, and NaN with an infinite dividend.
    """
    large = (np.abs(b) > 2.0**126) & np.isfinite(b)
    given = np.where(np.isinf(a), np.float32(np.nan), np.float32(0))
    return np.where(large, given, np.divide(a, b)).astype(np.float32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """Exactly, by integers: slow, and rare in kernels."""
    from fractions import Fraction

    out = a * b + c
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        if np.isfinite([x, y, z]).all() and np.isfinite(out[i]):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            if exact != 0:
                out[i] = float(exact)
    return out


def _signed(a: Array, b: Array, picked: Array, *, largest: bool) -> Array:
    """`picked`, negative if both are where the largest is wanted, else if one is. So of zeros +0
    is above -0. NaN is made canonical."""
    unsigned = np.uint32 if a.dtype.itemsize == 4 else np.uint64
    x: Array = a.view(unsigned)
    y: Array = b.view(unsigned)
    return _canonical(np.copysign(picked, (x & y if largest else x | y).view(a.dtype)))


def max_nan(a: Array, b: Array) -> Array:
    """NaN if either is; +0 is above -0."""
    return _signed(a, b, np.maximum(a, b), largest=True)


def min_nan(a: Array, b: Array) -> Array:
    return _signed(a, b, np.minimum(a, b), largest=False)


def max_number(a: Array, b: Array) -> Array:
    """The other one if one is NaN."""
    return _other(a, b, _signed(a, b, np.fmax(a, b), largest=True))


def min_number(a: Array, b: Array) -> Array:
    return _other(a, b, _signed(a, b, np.fmin(a, b), largest=False))


def _other(a: Array, b: Array, picked: Array) -> Array:
    """Where one is NaN, the other with its own sign; `picked` where both or none are."""
    one, other = np.isnan(a), np.isnan(b)
    return np.where(one & ~other, b, np.where(other & ~one, a, picked))


def _canonical(values: Array) -> Array:
    nan = np.isnan(values)
    if not np.count_nonzero(nan) or values.dtype != np.float32:
        return values
    return np.where(nan, CANONICAL_NAN_F32, values.view(np.uint32)).view(np.float32)


def f32_of_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_of(values: Array) -> Array:
    """Bits of the nearest bfloat16, ties to even; any NaN becomes 0x7FFF. Rounds once."""
    rounded = _round(values.astype(np.float64), 7, -126).astype(np.float32)
    bits = (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def f16_of(values: Array) -> Array:
    """Bits of the nearest float16, ties to even; any NaN becomes 0x7FFF."""
    bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def _round(values: Array, mantissa_bits: int, least_exponent: int) -> Array:
    """To a format with that many bits behind the leading one; exponents have no upper limit."""
    exponent = np.frexp(values)[1] - 1
    unit = np.maximum(exponent, least_exponent) - mantissa_bits
    return np.where(np.isfinite(values), np.ldexp(np.rint(np.ldexp(values, -unit)), unit), values)


def _e4m3_values() -> Array:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes > 127, -size, size)


E4M3 = _e4m3_values()
"""Value of each of the 256 codes, float64."""
E4M3_IN_F16 = f16_of(E4M3)
"""The same as float16 bits; exact."""


def _e5m2_values() -> Array:
    return (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float64)


E5M2 = _e5m2_values()
"""Value of each of the 256 codes, float64: a float16 without its low byte."""


def e4m3_of(values: Array) -> Array:
    """Codes of the nearest E4M3 values, ties to even; what is too large becomes ±448."""
    size = np.minimum(np.abs(_round(values.astype(np.float64), 3, -6)), 448.0)
    order = np.argsort(E4M3[:127])
    codes = order[np.searchsorted(E4M3[:127][order], np.where(np.isnan(size), 0, size))]
    codes = np.where(np.signbit(values), codes | 128, codes).astype(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)
