"""Operand tiles on which accumulation is compared with its models, and the run of one batch.

E4M3 codes are uint8 and bfloat16 codes uint16: a, b [tiles, 64, K], c [tiles, 64, 64] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import numpy as np

from mqa.testing._codes import E4M3, encode

Codes = np.ndarray
Random = np.random.Generator
ROWS = 64
NAN_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class Batch:
    name: str
    a: Codes
    b: Codes
    c: np.ndarray | None

    @property
    def is_fp8(self) -> bool:
        return self.a.dtype == np.uint8

    def run(self, *, separate: bool = False, swizzled: bool = False) -> np.ndarray:
        """D of every tile on the GPU, bits and all."""
        tiles, rows, K = self.a.shape
        assert (rows, self.b.shape) == (ROWS, self.a.shape)
        d = harness.zeros((tiles, ROWS, ROWS), np.float32)
        flags = {"FP8": self.is_fp8, "SEPARATE": separate, "SWIZZLED": swizzled}
        harness.launch(
            "accumulate.cu",
            "accumulate",
            harness.Buffer(self.a),
            harness.Buffer(self.b),
            d if self.c is None else harness.Buffer(self.c),
            d,
            K * self.a.itemsize // 32,
            int(self.c is not None),
            defines=tuple(f"{name}={int(value)}" for name, value in flags.items()),
            grid=tiles,
        )
        return d.read()


def bits(sums: np.ndarray) -> np.ndarray:
    """float32 bits of a model's sums, NaN as the hardware writes it."""
    with np.errstate(invalid="ignore"):
        as_float32 = sums.astype(np.float32)
    return np.where(np.isnan(sums), np.uint32(NAN_BITS), as_float32.view(np.uint32))


def values(codes: Codes) -> np.ndarray:
    """float64 values of E4M3 or bfloat16 codes, and of float16 numbers."""
    if codes.dtype == np.uint8:
        return E4M3[codes]
    if codes.dtype == np.float16:
        return codes.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bfloat16(x: np.ndarray) -> Codes:
    """Codes of float32 values cut to bfloat16."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _signed(draw: Random, codes: Codes) -> Codes:
    sign = codes.dtype.type(1 << (codes.itemsize * 8 - 1))
    return codes | sign * draw.integers(0, 2, codes.shape).astype(codes.dtype)


# E4M3


def _normal8(draw: Random, shape: tuple[int, ...]) -> Codes:
    return encode(draw.standard_normal(shape) * 2.0 ** draw.integers(-4, 7), "fp8")


def _any8(draw: Random, shape: tuple[int, ...]) -> Codes:
    return _signed(draw, draw.integers(0, 127, shape).astype(np.uint8))


def _subnormal8(draw: Random, shape: tuple[int, ...]) -> Codes:
    return _signed(draw, draw.integers(0, 8, shape).astype(np.uint8))


def _low8(draw: Random, shape: tuple[int, ...]) -> Codes:
    """Subnormals and the first normals."""
    return _signed(draw, draw.integers(0, 24, shape).astype(np.uint8))


def _sparse8(draw: Random, shape: tuple[int, ...]) -> Codes:
    return np.where(draw.random(shape) < 0.8, np.uint8(0x80), _any8(draw, shape))


def _peaks8(draw: Random, shape: tuple[int, ...]) -> Codes:
    """Small values of both signs, and here and there a large one."""
    high = _signed(draw, draw.integers(96, 127, shape).astype(np.uint8))
    low = _signed(draw, draw.integers(1, 72, shape).astype(np.uint8))
    return np.where(draw.random(shape) < 1 / 32, high, low)


PAIRS8: dict[str, tuple[Callable[..., Codes], Callable[..., Codes]]] = {
    "normal": (_normal8, _normal8),
    "any codes": (_any8, _any8),
    "subnormal": (_subnormal8, _subnormal8),
    "subnormal by any": (_subnormal8, _any8),
    "low": (_low8, _low8),
    "sparse": (_sparse8, _any8),
    "peaks": (_peaks8, _peaks8),
}

# bfloat16


def _normal16(draw: Random, shape: tuple[int, ...]) -> Codes:
    return bfloat16(draw.standard_normal(shape))


def _spread16(low: int, high: int) -> Callable[..., Codes]:
    """Exponents drawn from low ... high - 1, -127 for subnormals."""

    def draw_codes(draw: Random, shape: tuple[int, ...]) -> Codes:
        exponent = draw.integers(low + 127, high + 127, shape)
        return _signed(draw, (exponent << 7 | draw.integers(0, 128, shape)).astype(np.uint16))

    return draw_codes


def _sparse16(draw: Random, shape: tuple[int, ...]) -> Codes:
    codes = _spread16(-12, 13)(draw, shape)
    return np.where(draw.random(shape) < 0.8, np.uint16(0x8000), codes)


def _peaks16(draw: Random, shape: tuple[int, ...]) -> Codes:
    high, low = _spread16(6, 9)(draw, shape), _spread16(-8, 0)(draw, shape)
    return np.where(draw.random(shape) < 1 / 32, high, low)


PAIRS16: dict[str, tuple[Callable[..., Codes], Callable[..., Codes]]] = {
    "normal": (_normal16, _normal16),
    "spread": (_spread16(-8, 9), _spread16(-8, 9)),
    "wide spread": (_spread16(-40, 41), _spread16(-20, 21)),
    "sparse": (_sparse16, _spread16(-12, 13)),
    "peaks": (_peaks16, _peaks16),
    "subnormal": (_spread16(-127, -126), _spread16(100, 128)),
    "subnormal and low": (_spread16(-127, -120), _spread16(110, 128)),
    "below normal": (_spread16(-80, -60), _spread16(-80, -50)),
    "vanishing": (_spread16(-127, -60), _spread16(-127, -60)),
    "any": (_spread16(-127, 60), _spread16(-127, 60)),
    "high": (_spread16(50, 66), _spread16(50, 62)),
}


def _c(kind: str, draw: Random, dots: np.ndarray) -> np.ndarray | None:
    """Accumulators to start from, next to dots of these exact values."""
    size = float(np.sqrt(np.mean(dots**2))) or 1.0
    noise = draw.standard_normal(dots.shape)
    with np.errstate(over="ignore", under="ignore"):
        if kind == "none":
            return None
        if kind == "similar":
            return (noise * size).astype(np.float32)
        if kind == "larger":
            return (noise * size * 2.0 ** draw.integers(0, 30, dots.shape)).astype(np.float32)
        if kind == "smaller":
            return (noise * size * 2.0 ** -draw.integers(0, 30, dots.shape)).astype(np.float32)
        if kind == "opposite":
            off = 2.0 ** -draw.integers(6, 26, dots.shape)
            return (-dots * (1 + noise * off)).astype(np.float32)
        assert kind == "any"
        bits = draw.integers(0, 2**32, dots.shape, dtype=np.uint32)
        c = bits.view(np.float32)
        return np.where(np.isfinite(c), c, np.float32(0)).astype(np.float32)


C_KINDS = ("none", "similar", "larger", "smaller", "opposite", "any")


def random_batches(fp8: bool, regime: str) -> Iterator[Batch]:
    """One tile for each way to start and each chain length. Always the same ones."""
    pairs = PAIRS8 if fp8 else PAIRS16
    draw_a, draw_b = pairs[regime]
    for steps in (1, 2, 8):
        draw = np.random.default_rng([int(fp8), list(pairs).index(regime), steps])
        shape = (1, ROWS, (32 if fp8 else 16) * steps)
        for kind in C_KINDS:
            a, b = draw_a(draw, shape), draw_b(draw, shape)
            if kind == "opposite":  # the products cancel in pairs, but for a few
                half = shape[-1] // 2
                sign = a.dtype.type(1 << (a.itemsize * 8 - 1))
                kept = draw.random((1, ROWS, half)) < 0.9
                a[..., half:] = np.where(kept, a[..., :half] ^ sign, a[..., half:])
                b[..., half:] = b[..., :half]
            c = _c(kind, draw, values(a[0]) @ values(b[0]).T)
            yield Batch(f"{regime}, {steps} steps, c {kind}", a, b, None if c is None else c[None])


def single_products() -> Batch:
    """All pairs of E4M3 codes, NaN included, one product a dot: 16 tiles of 64 by 64 codes."""
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    a, b = np.zeros((16, ROWS, 32), np.uint8), np.zeros((16, ROWS, 32), np.uint8)
    for tile in range(16):
        a[tile, :, tile], b[tile, :, tile] = codes[tile // 4], codes[tile % 4]
    return Batch("single products", a, b, None)


def _both_signs(codes: str, dtype: type) -> Codes:
    positive = np.array([int(code, 16) for code in codes.split()], dtype)
    return np.concatenate((positive, positive | dtype(1 << (positive.itemsize * 8 - 1))))


SPECIAL8 = _both_signs("0 1 7 8 38 39 77 7E 7F", np.uint8)
SPECIAL16 = _both_signs(
    "0 1 3F 40 7E 7F 80 81 FF 100 1000 1234 2000 2080 2100 3C00 3F00 3F80 3FC0 4000 5000 5F80 6000"
    " 7E80 7F00 7F7F 7F80 7F81 7FA5 7FC0 7FC1 7FFF",
    np.uint16,
)
SPECIAL32 = _both_signs(
    "0 1 7FFFFF 800000 3F800000 3F800001 7F7FFFFF 7F000000 7F800000 7F800001 7FC00000 7FC12345"
    " 7FFFFFFF",
    np.uint32,
)


def special_batches(fp8: bool) -> Iterator[Batch]:
    """Zeros of both signs, NaN, infinities, extremes: as products, as C, and mixed."""
    draw = np.random.default_rng(9 + int(fp8))
    codes, K = (SPECIAL8, 32) if fp8 else (SPECIAL16, 16)
    shape = (1, ROWS, K)
    zero = np.zeros(shape, codes.dtype)
    a, b = zero.copy(), zero.copy()
    a[0, :, 3], b[0, :, 3] = np.resize(codes, ROWS), np.resize(codes, ROWS)
    for name, start in (("none", None), ("+0", 0.0), ("-0", -0.0)):
        c = None if start is None else np.full((1, ROWS, ROWS), start, np.float32)
        yield Batch(f"one special product, c {name}", a, b, c)
        yield Batch(f"negative zeros, c {name}", zero | _signed(draw, zero), zero, c)
        minus = zero | codes.dtype.type(1 << (codes.itemsize * 8 - 1))
        yield Batch(f"all products -0, c {name}", minus, zero, c)
    for count in (1, 2, 3):
        a, b = zero.copy(), zero.copy()
        for i in range(count):
            a[0, :, i], b[0, :, i] = draw.choice(codes, ROWS), draw.choice(codes, ROWS)
        c = draw.choice(SPECIAL32, (1, ROWS, ROWS)).view(np.float32)
        yield Batch(f"{count} special products, c special", a, b, c)
        yield Batch(f"{count} special products, c none", a, b, None)
    c = draw.choice(SPECIAL32, (1, ROWS, ROWS)).view(np.float32)
    yield Batch("no products, c special", zero, zero, c)
    bits = draw.integers(0, 2**32, (2, 1, ROWS, ROWS), dtype=np.uint32)
    yield Batch("no products, c any bits", zero, zero, bits[0].view(np.float32))
    low = bits[1] & np.uint32(0x87FFFFFF)  # below 2^-111, one in 16 subnormal
    yield Batch("no products, c low", zero, zero, low.view(np.float32))
