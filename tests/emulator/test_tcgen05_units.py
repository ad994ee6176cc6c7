"""Values of Blackwell's types, and sums of block-scaled 4-bit elements, against exact fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ptx_kernels import Array

from mqa.emulator import tcgen05_units
from mqa.emulator.tensor_layouts import instruction_descriptor
from mqa.emulator.wgmma import Whole
from mqa.testing._codes import E2M1
from mqa.testing.accumulators import BLACKWELL_MXFP4, GroupedTruncating

RANDOM = np.random.default_rng(11)


def value(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    sign = -1 if code >> exponent_bits + mantissa_bits else 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = Fraction(code & (1 << mantissa_bits) - 1, 1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


@pytest.mark.parametrize(
    ("kind", "fields"), [("e2m1", (2, 1, 1)), ("e2m3", (2, 3, 1)), ("e3m2", (3, 2, 3))]
)
def test_values_of_all_codes_of_small_formats(kind: str, fields: tuple[int, int, int]) -> None:
    table = tcgen05_units._SMALL[kind]
    assert len(table) == 1 << 1 + fields[0] + fields[1]
    for code, got in enumerate(table.tolist()):
        assert Fraction(got) == value(code, *fields)


def test_the_largest_and_least_values_are_those_of_the_formats() -> None:
    for kind, largest, normal, least in (
        ("e2m1", 6, 1, 0.5),
        ("e2m3", 7.5, 1, 0.125),
        ("e3m2", 28, 0.25, 0.0625),
    ):
        table = tcgen05_units._SMALL[kind]
        assert table.max() == -table.min() == largest
        assert table[table > 0].min() == least
        assert normal in table


def test_values_of_all_codes_of_scales() -> None:
    codes = np.arange(256)
    powers = tcgen05_units.scale_values(codes, "ue8m0")
    assert np.isnan(powers[255])
    assert all(Fraction(powers[code]) == Fraction(2) ** (code - 127) for code in range(255))
    scales = tcgen05_units.scale_values(codes, "ue4m3")
    assert np.isnan(scales[127])
    assert all(Fraction(scales[code]) == value(code, 4, 3, 7) for code in range(127))


def exact_scale(code: int, kind: str) -> tuple[Fraction, int]:
    """A scale's significand and exponent."""
    if kind == "ue8m0":
        return Fraction(1), code - 127
    exponent, mantissa = code >> 3, Fraction(code & 7, 8)
    return (mantissa, -6) if exponent == 0 else (1 + mantissa, exponent - 7)


def cut(x: Fraction, unit: Fraction) -> Fraction:
    return Fraction(int(x / unit)) * unit


def fused(
    a: list[int], b: list[int], sa: list[int], sb: list[int], per: int, kind: str, start: float
) -> float:
    """One sum of 64 products, by the words of the model."""
    terms, exponents = [], []
    for first in range(0, 64, 16):
        block = first // per
        total = sum(
            (Fraction(E2M1[a[i]]) * Fraction(E2M1[b[i]]) for i in range(first, first + 16)),
            Fraction(0),
        )
        (x, i), (y, j) = exact_scale(sa[block], kind), exact_scale(sb[block], kind)
        if any(E2M1[a[i]] * E2M1[b[i]] for i in range(first, first + 16)) and x * y:
            exponents.append(i + j)
        terms.append(total * x * y * Fraction(2) ** (i + j))
    if start:
        exponents.append(max(int(np.frexp(start)[1]) - 1, -126))
        terms.append(Fraction(start))
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(*exponents, -133, -133) - 35)
    total = sum((cut(term, unit) for term in terms), Fraction(0))
    if not total:
        return 0.0
    leading = np.frexp(float(total))[1] - 1
    return float(cut(total, Fraction(2) ** max(int(leading) - 23, -149)))


CASES = [("ue8m0", 32, (90, 160)), ("ue8m0", 16, (124, 130)), ("ue4m3", 16, (0, 127))]


@pytest.mark.parametrize(("kind", "per", "codes"), CASES)
@pytest.mark.parametrize("adds", [False, True])
def test_sums_of_scaled_4_bit_elements(
    kind: str, per: int, codes: tuple[int, int], adds: bool
) -> None:
    rows, columns = 16, 8
    a, b = (RANDOM.integers(0, 16, (n, 64)).astype(np.uint8) for n in (rows, columns))
    sa, sb = (RANDOM.integers(*codes, (n, 64 // per)).astype(np.uint8) for n in (rows, columns))
    start = RANDOM.normal(size=(rows, columns)).astype(np.float32).astype(np.float64)
    start = start * 2.0 ** RANDOM.integers(-40, 40, start.shape)
    got = multiplied(a, b, sa, sb, kind, start if adds else None)
    for i, j in itertools.product(range(rows), range(columns)):
        first = float(start[i, j]) if adds else 0.0
        lists = [x.tolist() for x in (a[i], b[j], sa[i], sb[j])]
        assert got[i, j] == fused(*lists, per, kind, first)


def packed(codes: Array) -> bytes:
    return np.asarray(codes[:, 0::2] | codes[:, 1::2] << 4, np.uint8).tobytes()


def multiplied(a: Array, b: Array, sa: Array, sb: Array, kind: str, start: Array | None) -> Array:
    bits = 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24 | (kind == "ue8m0") << 23
    at = instruction_descriptor(bits, "mxf4nvf4")
    (x, ex), (y, ey) = (
        tcgen05_units.scaled_operand(packed(one), len(one), "e2m1", s.tobytes(), kind, packed=True)
        for one, s in ((a, sa), (b, sb))
    )
    before = Whole() if start is None else None
    total, _ = tcgen05_units.multiply(x, y, start, before, at, (ex, ey))
    return total


@pytest.mark.parametrize(("kind", "per", "codes"), CASES)
def test_the_short_cut_gives_what_the_model_gives(
    kind: str, per: int, codes: tuple[int, int]
) -> None:
    a, b = (RANDOM.integers(0, 16, (n, 64)).astype(np.uint8) for n in (32, 16))
    sa, sb = (np.full((n, 64 // per), sum(codes) // 2, np.uint8) for n in (32, 16))
    x, ex = tcgen05_units.scaled_operand(packed(a), 32, "e2m1", sa.tobytes(), kind, packed=True)
    y, ey = tcgen05_units.scaled_operand(packed(b), 16, "e2m1", sb.tobytes(), kind, packed=True)
    assert Whole().with_products(x, y, BLACKWELL_MXFP4) is not None
    want = BLACKWELL_MXFP4.dots(x.values, y.values, None, (ex, ey))
    assert (multiplied(a, b, sa, sb, kind, None) == want).all()


def test_a_scale_that_is_nan_spoils_its_row_or_column() -> None:
    a, b = (np.full((n, 64), 2, np.uint8) for n in (16, 8))
    sa, sb = (np.full((n, 2), 127, np.uint8) for n in (16, 8))
    sa[3, 1] = sb[5, 0] = 255
    nan = np.isnan(multiplied(a, b, sa, sb, "ue8m0", None))
    want = np.zeros((16, 8), bool)
    want[3] = want[:, 5] = True
    assert (nan == want).all()


def test_groups_of_another_size_are_cut_apart() -> None:
    """Two products that cancel leave what the smaller scale brings only in one group."""
    q, k = np.array([[6.0, -6.0, 2.0**-30, 0.0]]), np.ones((1, 4))
    one, two = (GroupedTruncating(bits=20, k=4, group=group) for group in (4, 2))
    assert one.dots(q, k)[0, 0] == 2.0**-30 // 2.0**-18 * 2.0**-18
    assert two.dots(q, k)[0, 0] == 0.0


def test_float16_cells_come_back() -> None:
    sums = np.array([[0.5, -65504.0, np.inf, np.nan]])
    back = tcgen05_units.sums_of(tcgen05_units.cells_of(sums, "f16"), "f16")
    assert np.array_equal(back, sums, equal_nan=True)


def test_nan_is_canonical_in_cells() -> None:
    cells: Any = tcgen05_units.cells_of(np.array([[np.nan, 1.0]]), "f32")
    assert cells.tolist() == [[0x7FFFFFFF, 0x3F800000]]
