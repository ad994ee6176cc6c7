"""Float instructions of sm_100f: packed sums, every rounding, narrow formats, other forms.

Wanted values come from exact fractions, from torch's formats, or from a search through all values
of a format, never from the functions under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_kernels import Array, apply
from test_isa import values_of


RANDOM = np.random.default_rng(23)
ROUNDINGS = ("rn", "rz", "rm", "rp")
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 2.0**-126],
    np.float32,
)
THREADS = 256
Operation = Callable[[Fraction, Fraction, Fraction], Fraction]


def drawn(count: int = THREADS) -> Array:
    """Values whose sums and products round, cancel, overflow and underflow."""
    scales = 2.0 ** RANDOM.choice([0, 0, 0, 12, -24, 60, -60, 120, -120], count)
    values = (RANDOM.normal(size=count) * scales).astype(np.float32)
    values[: len(SPECIAL)] = RANDOM.permutation(SPECIAL)
    return RANDOM.permutation(values)


A, B, C = drawn(), drawn(), drawn()
with np.errstate(all="ignore"):
    C[:80] = -(A[:80] * B[:80])
"""Sums that nearly cancel."""


MOST = Fraction(2) ** 128 - Fraction(2) ** 104
BEYOND = Fraction(2) ** 128


def rounded(exact: Fraction, rounding: str) -> float:
    """The float32 value that IEEE 754 asks for; zero without its sign."""
    size = abs(exact)
    exponent = -126
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    steps = exact / unit
    whole = {
        "rn": round(steps),
        "rz": math.trunc(steps),
        "rm": math.floor(steps),
        "rp": math.ceil(steps),
    }[rounding]
    value = whole * unit
    if abs(value) < BEYOND:
        return float(value)
    inward = (
        rounding == "rz" or (rounding == "rp" and exact < 0) or (rounding == "rm" and exact > 0)
    )
    return math.copysign(float(MOST) if inward else math.inf, exact)


EXACT: dict[str, Operation] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def check_rounded(name: str, rounding: str, got: Array, *operands: Array) -> None:
    for result, *given in zip(got.tolist(), *(x.tolist() for x in operands), strict=True):
        a, b, c = (*given, 0.0)[:3]
        if not all(map(math.isfinite, given)):
            with np.errstate(all="ignore"):
                want = {
                    "add": np.float64(a) + b,
                    "sub": np.float64(a) - b,
                    "mul": np.float64(a) * b,
                    "fma": np.float64(a) * b + c,
                }[name]
            assert result == want or (math.isnan(result) and math.isnan(want)), given
            continue
        exact = EXACT[name](*map(Fraction, (a, b, c)))
        assert result == rounded(exact, rounding), (given, result)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", EXACT)
def test_sums_and_products_round_to_the_side_that_is_asked_for(name: str, rounding: str) -> None:
    operands = [A, B, C][: 3 if name == "fma" else 2]
    names = ", ".join(f"in{i}" for i in range(len(operands)))
    got = apply(f"{name}.{rounding}.f32 out, {names};\n", operands, np.float32, threads=THREADS)
    check_rounded(name, rounding, got, *operands)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", EXACT)
def test_packed_sums_are_two_sums(name: str, rounding: str) -> None:
    operands = [A, B, C][: 3 if name == "fma" else 2]
    pairs = [x.view(np.uint64) for x in operands]
    names = ", ".join(f"in{i}" for i in range(len(operands)))
    text = f"{name}.{rounding}.f32x2 out, {names};\n"
    got = apply(text, pairs, np.uint64, threads=THREADS // 2, target="sm_100f")
    check_rounded(name, rounding, got.view(np.float32), *operands)


def test_packed_fma_rounds_once() -> None:
    one = np.float32(1 + 2**-12)
    pair = np.full(64, one, np.float32).view(np.uint64)
    tiny = np.tile(np.array([2.0**-60, -(2.0**-60)], np.float32), 32).view(np.uint64)
    got = apply(
        "fma.rn.f32x2 out, in0, in1, in2;\n", [pair, pair, tiny], np.uint64, target="sm_100f"
    )
    exact = Fraction(float(one)) ** 2
    want = [rounded(exact + Fraction(x), "rn") for x in (2.0**-60, -(2.0**-60))]
    assert want[0] != want[1]
    assert got.view(np.float32).tolist() == want * 32


def test_cancelled_sums_are_negative_zeros_where_it_is_rounded_down() -> None:
    ones = np.ones(32, np.float32)
    for rounding in ROUNDINGS:
        got = apply(f"add.{rounding}.f32 out, in0, in1;\n", [ones, -ones], np.float32)
        assert np.signbit(got).all() == (rounding == "rm")


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


SMALL = np.resize(np.array([1e-45, -1e-40, 2.0**-126, 1.5, -(2.0**-100), 0.0], np.float32), 32)


def test_subnormal_values_are_flushed_before_and_after() -> None:
    other = np.roll(SMALL, 1)
    for kind, target in (("f32", "sm_90a"), ("f32x2", "sm_100f")):
        for name, function in (("add", np.add), ("mul", np.multiply), ("sub", np.subtract)):
            given = [SMALL, other] if kind == "f32" else [x.view(np.uint64) for x in (SMALL, other)]
            text, threads = f"{name}.rn.ftz.{kind} out, in0, in1;\n", len(given[0])
            got = apply(text, given, given[0].dtype, threads=threads, target=target)
            want = flushed(function(flushed(SMALL), flushed(other)))
            assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()
    got = apply("fma.rn.ftz.f32 out, in0, in1, in1;\n", [SMALL, other], np.float32)
    small, add = flushed(SMALL).astype(np.float64), flushed(other).astype(np.float64)
    want = flushed((small * add + add).astype(np.float32))
    assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()
    held = apply(
        "setp.gt.ftz.f32 %p1, in0, 0f00000000;\nselp.u32 out, 1, 0, %p1;\n", [SMALL], np.uint32
    )
    assert held.tolist() == (flushed(SMALL) > 0).tolist()


def quotient_sides(
    opcode: str, got: Array, exact: Callable[[Fraction], Fraction], x: Array
) -> None:
    rounding = opcode.split(".")[1]
    for value, given in zip(got.tolist(), x.tolist(), strict=True):
        assert value == rounded(exact(Fraction(given)), rounding), given


POSITIVE = np.abs(np.where(np.isfinite(A) & (A != 0), A, np.float32(3))).astype(np.float32)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_reciprocals_quotients_and_roots_round_to_the_side_that_is_asked_for(rounding: str) -> None:
    signed = np.where(np.signbit(B), -POSITIVE, POSITIVE).astype(np.float32)
    got = apply(f"rcp.{rounding}.f32 out, in0;\n", [signed], np.float32, threads=THREADS)
    quotient_sides(f"rcp.{rounding}", got, lambda x: 1 / x, signed)
    got = apply(f"div.{rounding}.f32 out, in0, in1;\n", [C, signed], np.float32, threads=THREADS)
    for value, a, b in zip(got.tolist(), C.tolist(), signed.tolist(), strict=True):
        if math.isfinite(a):
            assert value == rounded(Fraction(a) / Fraction(b), rounding), (a, b)
    got = apply(f"sqrt.{rounding}.f32 out, in0;\n", [POSITIVE], np.float32, threads=THREADS)
    for value, x in zip(got.tolist(), POSITIVE.tolist(), strict=True):
        square, exact = Fraction(value) ** 2, Fraction(x)
        down, up = (float(np.nextafter(np.float32(value), np.float32(to))) for to in (0, np.inf))
        if rounding in ("rz", "rm"):
            assert square <= exact < Fraction(up) ** 2
        elif rounding == "rp":
            assert Fraction(down) ** 2 < exact <= square
        else:
            low, high = (Fraction(down) + Fraction(value)) / 2, (Fraction(up) + Fraction(value)) / 2
            assert low**2 <= exact <= high**2


APPROXIMATE: dict[str, Callable[[float], float]] = {
    "ex2": lambda x: 2.0**x if x < 128 else math.inf,
    "lg2": lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan,
    "rsqrt": lambda x: 1 / math.sqrt(x) if x > 0 else math.inf if x == 0 else math.nan,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "rcp": lambda x: 1 / x if x else math.inf,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_give_the_nearest_value(name: str) -> None:
    """To a last bit, in which libraries differ."""
    x = np.resize(np.array([0.0, 1.0, 2.5, -1.5, 100.0, 1e-3, -140.0, 3e38], np.float32), 32)
    got = apply(f"{name}.approx.f32 out, in0;\n", [x], np.float32)
    with np.errstate(over="ignore"):
        want = np.array([APPROXIMATE[name](value) for value in x.tolist()]).astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-23, atol=0)
    flushes = "" if name == "tanh" else ".ftz"
    nan = np.full(32, np.nan, np.float32)
    got = apply(f"{name}.approx{flushes}.f32 out, in0;\n", [nan], np.float32)
    assert (got.view(np.uint32) == 0x7FFFFFFF).all()


def test_results_are_saturated() -> None:
    x = np.resize(np.array([-1.5, -0.0, 0.25, 1.5, np.nan, np.inf], np.float32), 32)
    want = np.resize(np.array([0.0, 0.0, 0.25, 1.0, 0.0, 1.0], np.float32), 32)
    zeros, ones = np.zeros(32, np.float32), np.ones(32, np.float32)
    for text in ("add.sat.f32 out, in0, in1;", "cvt.sat.f32.f32 out, in0;"):
        got = apply(text + "\n", [x, -zeros], np.float32)
        assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()
    for text in ("mul.sat.f32 out, in0, in1;", "fma.rz.sat.f32 out, in0, in1, in2;"):
        got = apply(text + "\n", [x, ones, -zeros], np.float32)
        assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()


FORMATS: dict[str, tuple[int, int, int, float]] = {
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28.0),
    "e2m1": (2, 1, 1, 6.0),
}
"""Bits of exponent and mantissa, bias, largest value."""
NAN_CODES = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x7}


def value_of(name: str, code: int) -> float:
    """By the tables of the OCP formats."""
    exponents, bits, bias, _ = FORMATS[name]
    sign = -1.0 if code >> exponents + bits & 1 else 1.0
    exponent, mantissa = code >> bits & (1 << exponents) - 1, code & (1 << bits) - 1
    if name == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "e5m2" and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - bits)
    return sign * (1 + mantissa / 2**bits) * 2.0 ** (exponent - bias)


def code_of(name: str, x: float) -> int:
    """By a search through all values; of two that are as near the one with the even code."""
    exponents, bits, _, most = FORMATS[name]
    if math.isnan(x):
        return NAN_CODES[name]
    size = min(abs(x), most)
    codes = [code for code in range(1 << exponents + bits) if value_of(name, code) <= most]
    nearest = min(codes, key=lambda code: (abs(value_of(name, code) - size), code & 1))
    return nearest | (1 << exponents + bits if math.copysign(1, x) < 0 else 0)


def values_around(name: str) -> Array:
    """All values of a format, all ties, their float32 neighbours, and what is beyond."""
    exponents, bits, _, most = FORMATS[name]
    values = [value_of(name, code) for code in range(1 << exponents + bits)]
    values = sorted(x for x in values if x <= most)
    ties = [(a + b) / 2 for a, b in zip(values, [*values[1:], 2 * most], strict=True)]
    exact = np.array([*values, *ties, 1e9, 1e-9, 1e-45], np.float32)
    both = [np.nextafter(exact, np.float32(to)) for to in (0, np.inf)]
    found = np.concatenate([exact, *both, np.array([np.inf, np.nan], np.float32)])
    return np.concatenate([found, -found])


def narrow_text(name: str, source: str, flags: str = "") -> str:
    operands = "in0, in1" if source == "f32" else "in0"
    to = "code" if name == "e2m1" else "out"
    text = f"cvt.rn.satfinite{flags}.{name}x2.{source} {to}, {operands};\n"
    if name != "e2m1":
        return text
    return "{\n.reg .b8 code;\n" + text + "mov.b16 out, {code, 0};\n}\n"


def wide_text(name: str, flags: str = "") -> str:
    if name != "e2m1":
        return f"cvt.rn{flags}.f16x2.{name}x2 out, in0;\n"
    text = f"cvt.rn{flags}.f16x2.{name}x2 out, code;\n"
    return "{\n.reg .b8 code, rest;\nmov.b16 {code, rest}, in0;\n" + text + "}\n"


NARROWED = [
    (name, source)
    for name in FORMATS
    for source in (("f32",) if name in ("e2m3", "e3m2") else ("f32", "f16x2"))
]


@pytest.mark.parametrize("flags", ["", ".relu"])
@pytest.mark.parametrize(("name", "source"), NARROWED)
def test_narrow_formats_take_the_nearest_value(name: str, source: str, flags: str) -> None:
    values = values_around(name)
    if source == "f16x2":
        with np.errstate(over="ignore"):
            values = values.astype(np.float16).astype(np.float32)
    high, low = np.resize(values, 1024), np.resize(np.roll(values, 5), 1024)
    given = [high, low]
    if source == "f16x2":
        upper, lower = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in given)
        given = [upper << np.uint32(16) | lower]
    got = apply(narrow_text(name, source, flags), given, np.uint16, threads=1024, target="sm_100f")
    bits = 4 if name == "e2m1" else 8
    known = {x.tobytes(): code_of(name, 0.0 if flags and x <= 0 else float(x)) for x in values}
    for code, x in ((got >> bits, high), (got & (1 << bits) - 1, low)):
        assert code.tolist() == [known[one.tobytes()] for one in x]
    assert (got >> 2 * bits == 0).all() if bits < 8 else True


@pytest.mark.parametrize("flags", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_narrow_codes_become_float16_exactly(name: str, flags: str) -> None:
    """All codes in both halves."""
    exponents, bits, _, _ = FORMATS[name]
    width = 1 + exponents + bits
    codes = np.resize(np.arange(1 << width, dtype=np.uint16), 256)
    shift = 4 if name == "e2m1" else 8
    pairs = codes << np.uint16(shift) | codes[::-1]
    got = apply(wide_text(name, flags), [pairs], np.uint32, threads=256, target="sm_100f")
    for half, given in ((got >> np.uint32(16), codes), (got & np.uint32(0xFFFF), codes[::-1])):
        values = half.astype(np.uint16).view(np.float16)
        for value, code in zip(values, given.tolist(), strict=True):
            want = value_of(name, code)
            want = 0.0 if flags and want <= 0 else want
            if math.isnan(want):
                assert int(value.view(np.uint16)) == 0x7FFF
            else:
                assert float(value) == want
                assert np.signbit(value) == (math.copysign(1, want) < 0)


def power_code(x: float, rounding: str, *, satfinite: bool) -> int:
    """The least or greatest power of two that is not below or above |x|, by a search."""
    if math.isnan(x):
        return 255
    size = abs(x)
    if rounding == "rp":
        fits = [code for code in range(255) if 2.0 ** (code - 127) >= size]
        code = min(fits, default=255)
    else:
        fits = [code for code in range(255) if 2.0 ** (code - 127) <= size]
        code = max(fits, default=0) if not math.isinf(size) else 255
    return min(code, 254) if satfinite else code


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_powers_of_two_are_above_or_below(source: str, rounding: str, satfinite: bool) -> None:
    powers = np.ldexp(np.float64(1), np.arange(-127, 128)).astype(np.float32)
    some = np.array([0.0, np.inf, np.nan, 3.4028235e38, 1e-40, 1e-45], np.float32)
    values = np.concatenate(
        [powers, *(np.nextafter(powers, np.float32(x)) for x in (0, np.inf)), some]
    )
    values = np.concatenate([values, -values[:100]])
    if source == "bf16x2":
        values = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    high, low = np.resize(values, 1024), np.resize(np.roll(values, 3), 1024)
    given, flags = [high, low], ".satfinite" if satfinite else ""
    operands = "in0, in1"
    if source == "bf16x2":
        given = [
            high.view(np.uint32) & np.uint32(0xFFFF0000) | low.view(np.uint32) >> np.uint32(16)
        ]
        operands = "in0"
    text = f"cvt.{rounding}{flags}.ue8m0x2.{source} out, {operands};\n"
    got = apply(text, given, np.uint16, threads=1024, target="sm_100f")
    known = {x.tobytes(): power_code(float(x), rounding, satfinite=satfinite) for x in values}
    for codes, x in ((got >> 8, high), (got & 0xFF, low)):
        assert codes.tolist() == [known[one.tobytes()] for one in x]


def test_powers_of_two_become_bfloat16_exactly() -> None:
    codes = np.arange(256, dtype=np.uint16)
    pairs = codes << np.uint16(8) | codes[::-1]
    text = "cvt.rn.bf16x2.ue8m0x2 out, in0;\n"
    got = apply(text, [pairs], np.uint32, threads=256, target="sm_100f")
    want = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e8m0fnu).to(torch.bfloat16)
    bits = want.view(torch.int16).numpy().view(np.uint16)
    bits = np.where(codes == 255, 0x7FFF, bits).astype(np.uint32)
    assert (got == (bits << np.uint32(16) | bits[::-1])).all()


WIDE = {
    "f16": (10, -14, 65504.0),
    "bf16": (7, -126, 2.0**128 - 2.0**120),
    "tf32": (10, -126, 2.0**128 - 2.0**117),
}


def wide_value(kind: str, x: float, rounding: str, *, satfinite: bool) -> float:
    """By exact fractions, NaN and infinities apart."""
    bits, least, most = WIDE[kind]
    if math.isinf(x):
        return math.copysign(most, x) if satfinite else x
    exact = Fraction(x)
    exponent = max(math.frexp(x)[1] - 1, least) if x else least
    unit = Fraction(2) ** (exponent - bits)
    steps = exact / unit
    whole = {
        "rn": round(steps),
        "rz": math.trunc(steps),
        "rm": math.floor(steps),
        "rp": math.ceil(steps),
        "rna": math.copysign(math.floor(abs(steps) + Fraction(1, 2)), x),
    }[rounding]
    value = int(whole) * unit
    if abs(value) <= most:
        return float(value)
    inward = rounding == "rz" or (rounding == "rp" and x < 0) or (rounding == "rm" and x > 0)
    return math.copysign(most if satfinite or inward else math.inf, x)


def wide_cases() -> list[tuple[str, str, str]]:
    found = [(kind, r, f) for kind in ("f16", "bf16") for r in ROUNDINGS for f in ("", ".relu")]
    found += [(kind, r, ".satfinite") for kind in ("f16", "bf16") for r in ("rn", "rz")]
    found += [("tf32", r, f) for r in ("rn", "rz") for f in ("", ".relu", ".satfinite")]
    return [*found, ("tf32", "rna", ""), ("tf32", "rna", ".satfinite")]


@pytest.mark.parametrize(("kind", "rounding", "flags"), wide_cases())
def test_float32_is_rounded_to_wider_formats(kind: str, rounding: str, flags: str) -> None:
    ties = (RANDOM.integers(0, 2**16, 300, np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([drawn(), ties.view(np.float32), np.float32([65519.0, 65520.0, 7e4])])
    values = np.resize(values, 1024)
    size = np.uint32 if kind == "tf32" else np.uint16
    text = f"cvt.{rounding}{flags}.{kind}.f32 out, in0;\n"
    got = apply(text, [values], size, threads=1024, target="sm_100f")
    read = got.view(np.float32).astype(np.float64) if kind == "tf32" else values_of(got, kind)
    for value, code, x in zip(read.tolist(), got.tolist(), values.tolist(), strict=True):
        if math.isnan(x):
            assert code == (0x7FFFFFFF if kind == "tf32" else 0x7FFF)
            continue
        want = wide_value(kind, x, rounding, satfinite=flags == ".satfinite")
        assert value == (max(want, 0.0) if flags == ".relu" else want), x
        if kind == "tf32":
            assert code & 0x1FFF == 0


@pytest.mark.parametrize("flags", [".relu", ".satfinite", ".relu.satfinite"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_are_rounded_as_one_is(kind: str, flags: str) -> None:
    for rounding in ("rn", "rz"):
        text = f"cvt.{rounding}{flags}.{kind}x2.f32 out, in0, in1;\n"
        pair = apply(text, [A, B], np.uint32, threads=THREADS)
        one = f"cvt.{rounding}{flags}.{kind}.f32 out, in0;\n"
        high, low = (apply(one, [x], np.uint16, threads=THREADS).astype(np.uint32) for x in (A, B))
        assert (pair == (high << np.uint32(16) | low)).all()


def texts() -> list[str]:
    found = [
        f"{name}.{r}.{kind} a, b;" for name in EXACT for r in ROUNDINGS for kind in ("f32", "f32x2")
    ]
    found += [f"{name}.{r}.f32 a, b;" for name in ("rcp", "div", "sqrt") for r in ROUNDINGS]
    found += [f"{name}.approx.f32 a, b;" for name in APPROXIMATE]
    found += [narrow_text(name, source) for name, source in NARROWED]
    found += [wide_text(name) for name in FORMATS]
    found += [
        f"cvt.{r}.ue8m0x2.{source} a, b;" for r in ("rz", "rp") for source in ("f32", "bf16x2")
    ]
    return [*found, *(f"cvt.{r}{flags}.{kind}.f32 a, b;" for kind, r, flags in wide_cases())]


TEXTS = texts()
"""What these tests run, for `test_opcodes`."""
