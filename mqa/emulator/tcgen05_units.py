"""Types that Blackwell's tensor unit multiplies and sums: their values, and how sums are rounded.

Sums follow the models of `mqa.testing.accumulators` for Blackwell. No hardware confirmed any of
them; where nothing is cut they are exact. How 6-bit elements lie in shared memory is assumed.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from mqa.emulator import units
from mqa.emulator.floats import CANONICAL_NAN_F32, E4M3, Array, f16_of
from mqa.emulator.tensor_layouts import BLOCK_SCALED, InstructionDescriptor
from mqa.emulator.units import HalfSums
from mqa.emulator.wgmma import Matrix, Whole, matrix, plain, summed
from mqa.testing.accumulators import (
    BLACKWELL_BF16,
    BLACKWELL_F16,
    BLACKWELL_FP8,
    BLACKWELL_MXFP4,
    BLACKWELL_MXFP8,
    BLACKWELL_TF32,
    FusedTruncating,
    GroupedTruncating,
)

_NO_LEAST = -2048
"""Exponent of subnormals where they are normalised."""


def _small(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """Values of all codes of a format that has neither infinities nor NaN, float64."""
    codes = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    mantissa = codes & (1 << mantissa_bits) - 1
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    one = 1 << mantissa_bits
    size = np.where(exponent > 0, one + mantissa, mantissa) / one
    size = np.ldexp(size, np.maximum(exponent, 1) - bias)
    signed: Array = np.where(codes >> mantissa_bits + exponent_bits, -size, size)
    return signed


_SMALL = {"e2m1": _small(2, 1, 1), "e2m3": _small(2, 3, 1), "e3m2": _small(3, 2, 3)}
_LEAST = {"e4m3": -6, "e5m2": -14, "e2m1": 0, "e2m3": 0, "e3m2": -2}
"""Exponent of subnormals."""
DATA_BYTES = {"e2m1": 8, "e2m3": 12, "e3m2": 12}
"""Of a chunk of 16 elements where elements have 8-bit places in instructions, of 16 bytes."""


def _nibbles(data: Array) -> Array:
    """Codes of 4 bits, the low ones first: [rows, bytes] to [rows, 2 bytes]."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def _codes(data: Array, kind: str) -> Array:
    """Codes of padded elements: 16 of them in the first bytes of each 16."""
    chunks = data.reshape(len(data), -1, 16)[:, :, : DATA_BYTES[kind]]
    if kind == "e2m1":
        return _nibbles(np.ascontiguousarray(chunks).reshape(len(data), -1))
    bits = np.unpackbits(chunks, axis=-1, bitorder="little").reshape(len(data), -1, 6)
    return np.packbits(bits, axis=-1, bitorder="little")[:, :, 0]


def decode(raw: bytes, rows: int, kind: str, *, packed: bool) -> tuple[Array, int]:
    """Values of an operand, float64 [rows, K], and the exponent of its type's subnormals.

    `packed`: elements of 4 bits lie two in a byte, else 16 of them in 16 bytes.
    """
    if kind not in _SMALL:
        return units.decode(raw, rows, kind)
    data = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    return _SMALL[kind][_nibbles(data) if packed else _codes(data, kind)], _LEAST[kind]


@functools.lru_cache(maxsize=1024)
def operand(raw: bytes, rows: int, kind: str, *, packed: bool) -> Matrix:
    """An operand from its rows' bytes. Queries come again and again, so they are kept."""
    return matrix(*decode(raw, rows, kind, packed=packed))


def scale_values(codes: Array, kind: str) -> Array:
    """Of block scales, float64."""
    if kind == "ue8m0":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))
    found: Array = E4M3[codes & 127]
    return found


@functools.lru_cache(maxsize=256)
def scaled_operand(
    raw: bytes, rows: int, kind: str, scales: bytes, scale: str, *, packed: bool
) -> tuple[Matrix, Array]:
    """An operand times its block scales, and the exponents of those for each 16 elements.

    `scales` has a byte for each row and block.
    """
    values, _ = decode(raw, rows, kind, packed=packed)
    factors = scale_values(np.frombuffer(scales, np.uint8).reshape(rows, -1), scale)
    blocks = factors.shape[1]
    scaled = values.reshape(rows, blocks, -1) * factors[:, :, None]
    least = -6 if scale == "ue4m3" else _NO_LEAST
    exponents = np.maximum(np.frexp(np.nan_to_num(factors))[1] - 1, least).astype(np.int32)
    groups = max(values.shape[1] // 16, blocks)
    return matrix(scaled.reshape(rows, -1), _NO_LEAST), np.repeat(exponents, groups // blocks, 1)


_MODELS = {"f16": BLACKWELL_F16, "bf16": BLACKWELL_BF16, "tf32": BLACKWELL_TF32}


@functools.cache
def model_of(kind: str, a: str, b: str, sums: str) -> FusedTruncating | None:
    """How products of a kind are summed; None for integers, which are exact modulo 2^32."""
    if sums == "s32":
        return None
    if kind in BLOCK_SCALED:
        return BLACKWELL_MXFP8 if kind == "mxf8f6f4" else BLACKWELL_MXFP4
    model = _MODELS.get(a) or replace(
        BLACKWELL_FP8, min_exponent=_LEAST[a], k_min_exponent=_LEAST[b]
    )
    if sums == "f16":
        return HalfSums(model.bits, model.k, model.min_exponent, False, model.k_min_exponent)
    return model


def multiply(
    a: Matrix,
    b: Matrix,
    start: Array | None,
    before: Whole | None,
    at: InstructionDescriptor,
    exponents: tuple[Array, Array] | None = None,
) -> tuple[Array, Whole | None]:
    """a b^T + start, float64 [rows of a, rows of b], and what is known of its bits.

    `before` is known of those of `start`; `exponents` are those of block scales.
    """
    model = model_of(at.kind, at.a, at.b, at.sums)
    if model is None:
        total = a.values @ b.values.T
        if start is not None:
            total += start
        return units.wrap(total, saturates=at.saturates), None
    whole = None if before is None else before.with_products(a, b, model)
    if whole is not None:
        return plain(a, b, start), whole
    if isinstance(model, GroupedTruncating):
        dots = functools.partial(model.dots, exponents=exponents)
        return summed(a, b, start, model, dots), None
    return summed(a, b, start, model), None


def cells_of(sums: Array, kind: str) -> Array:
    """Results as cells of tensor memory. Nobody tells the upper half of one that holds float16."""
    if kind == "s32":
        return sums.astype(np.int64).astype(np.uint32)
    if kind == "f16":
        return f16_of(sums).astype(np.uint32) | np.uint32(0xFFFF0000)
    bits = sums.astype(np.float32).view(np.uint32)
    nan = np.isnan(sums)
    return np.where(nan, CANONICAL_NAN_F32, bits) if np.count_nonzero(nan) else bits


def sums_of(cells: Array, kind: str) -> Array:
    """The reverse of `cells_of`."""
    if kind == "f16":
        return cells.astype(np.uint16).view(np.float16).astype(np.float64)
    return (
        np.ascontiguousarray(cells)
        .view(np.float32 if kind == "f32" else np.int32)
        .astype(np.float64)
    )
