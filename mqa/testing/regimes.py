"""The two ways to fill a case: `exact`, where every backend must agree bit for bit, and `bounded`.

Each has an assertion that states its limits; `make_case` runs it on what it drew.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from mqa.problem import MX_FORMATS, Problem
from mqa.testing._codes import BLOCK, F32, F64, U8, Codes, decode, encode
from mqa.testing.data import Data
from mqa.testing.draws import Draw, bounded_elements, direction, small_values
from mqa.testing.oracle import combine

UNITS = 2**24
"""Integers up to here are exact in float32."""
FP8_DOT_UNITS = 2**13
"""Sums of magnitudes up to here are exact beside 13 fraction bits."""
MIN_NONZERO = 0.6
"""Share of valid logits of an exact case that are not 0."""


@dataclass(frozen=True)
class Operands:
    """q, k, their scales and the weights, shaped as in `Data`."""

    q_codes: Codes
    q_scales: U8 | None
    k_codes: Codes
    k_scales: U8 | None
    key_scale: F32
    weights: F32


# ---- exact ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """How much of the 2^24 units a draw may use: less and less until it fits."""

    spread: int
    """Block exponents q + k of a dot differ by at most this."""
    weight: int
    """Largest weight, in units."""
    density: int
    """One in how many dims of q is not zeroed."""


_ATTEMPTS = (
    *(_Attempt(spread, 8, 1) for spread in range(8, 1, -1)),
    *(_Attempt(spread, weight, 1) for weight in (4, 2, 1) for spread in (2, 1, 0)),
    *(_Attempt(0, 1, density) for density in (2, 4, 8)),
)


def draw_exact(problem: Problem, num_keys: int, lean: float) -> Operands:
    """The most varied operands whose sums of magnitudes stay within 2^24 units."""
    for attempt in _ATTEMPTS:
        operands = _attempt_exact(problem, num_keys, lean, attempt)
        if _head_sum_units(operands, problem.format).max(initial=0) <= UNITS:
            return operands
    raise AssertionError(f"H={problem.H} D={problem.D}: no exact case within 2^24 units")


def _attempt_exact(problem: Problem, num_keys: int, lean: float, attempt: _Attempt) -> Operands:
    fmt, seed, dims, mx = problem.format, problem.seed, problem.D, problem.format in MX_FORMATS
    towards = direction(seed, dims)
    top = max(1, min(7, math.isqrt(FP8_DOT_UNITS // dims)))
    draw_q, draw_k, draw_w = (Draw(seed, name) for name in ("q", "k", "weights"))
    q = small_values(draw_q, fmt, (problem.rows, problem.H, dims), towards, top, lean)
    k = small_values(draw_k, fmt, (num_keys, dims), towards, top, lean)
    q = np.where(draw_q.below(attempt.density, q.shape) == 0, q, 0.0)
    # Logits in float16 are to be finite, and no scale undoes a key's power in bfloat16.
    row_powers, key_powers = ((-20, 20), (-3, 3)) if fmt == "bf16" else ((-9, 6), (-9, 6))
    row_power = draw_q.between(*row_powers, (problem.rows,))
    key_power = draw_k.between(*key_powers, (num_keys,))
    weights = draw_w.between(1, attempt.weight, q.shape[:2]) * _mixed_signs(draw_w, q.shape[:2])
    weight_power = draw_w.between(-2, 2, (problem.rows, 1)) - 6 - row_power[:, None]
    scale_power = np.zeros(num_keys, np.int64)
    if not mx:
        if fmt == "fp8":
            scale_power = draw_k.between(-3, 3, (num_keys,)) - key_power
        q, k = np.ldexp(q, row_power[:, None, None]), np.ldexp(k, key_power[:, None])
        q_scales = k_scales = None
    else:
        half = attempt.spread // 2
        q_offset = draw_q.between(0, attempt.spread - half, (*q.shape[:2], dims // BLOCK))
        k_offset = draw_k.between(0, half, (num_keys, dims // BLOCK))
        q_scales = (127 + row_power[:, None, None] + q_offset).astype(np.uint8)
        k_scales = (127 + key_power[:, None] // 2 + k_offset).astype(np.uint8)
    return Operands(
        q_codes=encode(q, fmt),
        q_scales=q_scales,
        k_codes=encode(k, fmt),
        k_scales=k_scales,
        key_scale=np.ldexp(1.0, scale_power).astype(np.float32),
        weights=np.ldexp(weights, weight_power).astype(np.float32),
    )


def _mixed_signs(draw: Draw, shape: tuple[int, ...]) -> F64:
    signs = draw.below(2, shape).astype(np.float64) * 2 - 1
    signs.reshape(-1)[:1], signs.reshape(-1)[-1:] = 1.0, -1.0
    return signs


def _lowest_bit(values: F64) -> F64:
    """The largest power of two that divides each value; infinity for 0."""
    fraction, exponent = np.frexp(values)
    digits = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    bit = np.ldexp((digits & -digits).astype(np.float64), exponent - 53)
    return np.asarray(np.where(values == 0, np.inf, bit), np.float64)


def _in_units(values: F64, axes: tuple[int, ...]) -> F64:
    """Magnitudes divided by the largest power of two that divides all values along `axes`."""
    unit = _lowest_bit(values).min(axis=axes, keepdims=True, initial=np.inf)
    return np.asarray(np.abs(values) / np.where(np.isinf(unit), 1.0, unit), np.float64)


def _as_data(operands: Operands, fmt: str) -> Data:
    nothing = np.zeros(len(operands.weights), np.int64)
    fields = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    return Data(
        fmt, **fields, start=nothing, end=nothing, origin=nothing, groups=(), width=0, clean=True
    )


def _units(data: Data) -> tuple[F64, F64]:
    """Each dot's sum of magnitudes at most, [R, H], and the weights, [R, H], both in units.

    A row's unit is shared by its heads; a key is measured in its own unit and the largest key
    magnitude of each dim stands for all keys.
    """
    q = _in_units(data.q(slice(None)), (1, 2))
    k = _in_units(data.k(np.arange(len(data.k_codes))), (1,))
    dots = np.asarray(q @ k.max(axis=0, initial=0.0), np.float64)
    return dots, _in_units(data.weights.astype(np.float64), (1,))


def _head_sum_units(operands: Operands, fmt: str) -> F64:
    dots, weights = _units(_as_data(operands, fmt))
    return np.asarray((dots * weights).sum(axis=1), np.float64)


def assert_exact(data: Data) -> None:
    """Every partial sum of every dot and head sum is exact in any order and any accumulator.

    Raises AssertionError with the number that breaks a limit of the exact regime, or where a head
    or a slice of 16 dims has no influence, weights have one sign or too many logits are 0.
    """
    dots, weights = _units(data)
    worst = dots.max(initial=0)
    if data.format not in MX_FORMATS and worst > FP8_DOT_UNITS:
        raise AssertionError(f"exact regime: sum |q.k| is {worst:.0f} units, limit {FP8_DOT_UNITS}")
    worst = (dots * weights).sum(axis=1).max(initial=0)
    if worst > UNITS:
        raise AssertionError(f"exact regime: sum |w| sum |q.k| is {worst:.0f} units, limit {UNITS}")
    _assert_block_spread(data)
    _assert_magnitudes(data)
    _assert_everything_matters(data)


def _assert_block_spread(data: Data) -> None:
    if data.q_scales is None or data.k_scales is None:
        return
    spread = sum(
        int(np.ptp(codes.astype(np.int64), axis=-1).max(initial=0))
        for codes in (data.q_scales, data.k_scales)
    )
    if spread > 8:
        raise AssertionError(f"exact regime: block exponents spread over {spread}, limit 8")


def _assert_magnitudes(data: Data) -> None:
    parts = (
        data.q(slice(None)),
        data.k(np.arange(len(data.k_codes))),
        data.weights,
        data.key_scale,
    )
    low = high = 0.0
    for part in parts:
        nonzero = np.abs(part[part != 0]).astype(np.float64)
        if nonzero.size == 0:
            return
        low += math.log2(float(_lowest_bit(nonzero).min()))
        high += math.log2(float(nonzero.max()))
    high += math.log2(data.heads * data.head_dim)
    if low < -100 or high > 100:
        raise AssertionError(
            f"exact regime: partials in [2^{low:.0f}, 2^{high:.0f}], limit 2^+-100"
        )


def _assert_everything_matters(data: Data) -> None:
    if data.rows == 0 or len(data.k_codes) == 0 or data.rows * data.heads < 16:
        return
    q = data.q(slice(None)) != 0
    k = data.k(np.arange(len(data.k_codes))) != 0
    heads = ((data.weights != 0) & q.any(axis=2)).any(axis=0)
    if not heads.all():
        raise AssertionError(f"exact regime: head {int(np.argmin(heads))} has no influence")
    dims = q.any(axis=(0, 1)) & k.any(axis=0)
    for first in range(0, data.head_dim, 16):
        if not dims[first : first + 16].any():
            raise AssertionError(f"exact regime: dims {first}..{first + 15} have no influence")
    if data.weights.min() >= 0 or data.weights.max() <= 0:
        raise AssertionError("exact regime: weights have one sign")
    share = nonzero_share(data)
    if share < MIN_NONZERO:
        raise AssertionError(f"exact regime: {share:.0%} of logits differ from 0, want 60%")


def nonzero_share(data: Data) -> float:
    """The share of valid logits that differ from 0, in up to 12 rows and 512 columns; 1 if few."""
    seen = np.flatnonzero(data.lengths() > 0)
    seen = seen[np.linspace(0, len(seen) - 1, min(len(seen), 12)).astype(np.int64)]
    end = data.start.copy()
    end[seen] = np.minimum(data.end, data.start + 512)[seen]
    sample = combine(dataclasses.replace(data, end=end))
    valid = sample.values[sample.valid]
    return float((valid != 0).mean()) if valid.size >= 64 else 1.0


# ---- bounded -------------------------------------------------------------------------------------


def draw_bounded(problem: Problem, num_keys: int) -> Operands:
    """Ordinary values, and one row in 8 and one key in 8 with codes spread over all exponents.

    In one seed of four the exponents of q's and k's scales, or in bfloat16 of their elements, move
    apart, to both ends of the guaranteed range.
    """
    fmt, seed = problem.format, problem.seed
    towards = direction(seed, problem.D)
    draw_q, draw_k = Draw(seed, "q"), Draw(seed, "k")
    odd_rows = np.repeat(draw_q.one_in(8, (problem.rows, 1)), problem.H, axis=1)
    odd_keys = draw_k.one_in(8, (num_keys,))
    q_codes = bounded_elements(draw_q, fmt, (*odd_rows.shape, problem.D), towards, odd_rows)
    k_codes = bounded_elements(draw_k, fmt, (num_keys, problem.D), towards, odd_keys)
    q_scales = k_scales = None
    tilt = (0, 0, 0, -1, 0, 0, 0, 1)[Draw(seed, "tilt").number(0, 7)]
    if fmt in MX_FORMATS:
        q_scales = _block_codes(draw_q, fmt, q_codes, odd_rows, tilt * 100)
        k_scales = _block_codes(draw_k, fmt, k_codes, odd_keys, -tilt * 100)
    elif fmt == "bf16":
        q_codes, k_codes = _tilted(q_codes, tilt * 60), _tilted(k_codes, -tilt * 60)
    key_scale = _key_scales(draw_k, odd_keys) if fmt == "fp8" else np.ones(num_keys, np.float32)
    weights = _weights(Draw(seed, "weights"), odd_rows.shape, problem.weights)
    return Operands(q_codes, q_scales, k_codes, k_scales, key_scale, weights)


def _tilted(codes: Codes, power: int) -> Codes:
    return encode(np.ldexp(decode(codes, None, "bf16"), power), "bf16") if power else codes


def _block_codes(draw: Draw, fmt: str, codes: Codes, odd: np.ndarray, tilt: int) -> U8:
    low, high, centre = (2, 252, 125) if fmt == "mxfp4" else (10, 246, 121)
    shape = (*codes.shape[:-1], codes.shape[-1] // BLOCK)
    offset = np.where(odd[..., None], draw.between(-60, 30, shape), draw.between(-3, 3, shape))
    return np.asarray(np.clip(centre + tilt + offset, low, high), np.uint8)


def _key_scales(draw: Draw, odd: np.ndarray) -> F32:
    """Full mantissas around 2^-11; odd keys anywhere in 2^-40 .. 2^10, some exactly 0."""
    power = np.where(odd, draw.between(-40, 10, odd.shape), draw.between(-13, -10, odd.shape))
    scales = np.ldexp(1 + draw.below(2**23, odd.shape) * 2.0**-23, power)
    scales[odd & draw.one_in(8, odd.shape)] = 0.0
    return np.asarray(scales, np.float32)


def _weights(draw: Draw, shape: tuple[int, ...], dtype: str) -> F32:
    """About normal, full mantissas, rows scaled by 2^-2 .. 2^2, one in 64 tiny or zero."""
    digits = draw.bell(shape) * 2**14 + draw.below(2**14, shape)
    values = np.ldexp(digits * 2.0**-23, draw.between(-2, 2, (shape[0], 1)))
    values[draw.one_in(64, shape)] *= 2.0**-30
    values[draw.one_in(128, shape)] = 0.0
    weights: F32 = values.astype(np.float32)
    if dtype == "bfloat16":
        weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return weights


def assert_bounded(data: Data) -> None:
    """Scale codes and sums are within the range for which backends guarantee finite results.

    Raises AssertionError with the number that leaves it.
    """
    low, high = (2, 252) if data.format == "mxfp4" else (10, 246)
    for codes in (data.q_scales, data.k_scales):
        if codes is not None and codes.size and not low <= codes.min() <= codes.max() <= high:
            raise AssertionError(f"bounded regime: scale codes {codes.min()}..{codes.max()}")
    k = np.abs(data.k(np.arange(len(data.k_codes)))).max(axis=0, initial=0.0)
    dots = np.abs(data.q(slice(None))) @ k
    heads = (np.abs(data.weights) * dots).sum(axis=1)
    scaled = heads.max(initial=0.0) * float(data.key_scale.max(initial=0.0))
    worst = max(dots.max(initial=0.0), heads.max(initial=0.0), scaled)
    if not worst < 2.0**127:
        raise AssertionError(
            f"bounded regime: a sum of magnitudes may reach {worst:.3g}, not < 2^127"
        )
