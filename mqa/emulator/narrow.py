"""Conversions to and from narrow float formats, alone and in pairs, as functions of registers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mqa.emulator import floats
from mqa.emulator.floats import Array

Function = Callable[..., Array]
_TO_WHOLE: dict[str, Function] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
}
"""To the nearest, even or away from zero where two are, or to one side."""


@dataclass(frozen=True)
class Format:
    """A format of up to 8 bits with a sign, and no infinity that a conversion gives."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    most: float
    """The largest value."""
    nan: int
    """Code of what a NaN becomes; the largest value where the format has none."""

    @property
    def sign(self) -> int:
        return 1 << self.exponent_bits + self.mantissa_bits

    @functools.cached_property
    def values(self) -> Array:
        """Of each code, float64; infinities and NaN are not told apart here."""
        codes = np.arange(2 * self.sign)
        exponent = codes >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        mantissa = codes & (1 << self.mantissa_bits) - 1
        whole = np.where(exponent > 0, mantissa + (1 << self.mantissa_bits), mantissa)
        size: Array = np.ldexp(whole, np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        return np.where(codes & self.sign, -size, size)

    def codes_of(self, values: Array) -> Array:
        """Codes of the nearest values, ties to even; what is too large becomes the largest."""
        rounded = rounded_to(_finite(values), self.mantissa_bits, 1 - self.bias, "rn")
        size = np.minimum(np.abs(rounded), self.most)
        codes = np.searchsorted(self.values[: self.sign], size)
        codes = np.where(np.signbit(values), codes | self.sign, codes)
        return np.where(np.isnan(values), self.nan, codes).astype(np.uint8)


def _finite(values: Array) -> Array:
    """As float64; NaN is 0, and infinities are large."""
    return np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=2.0**200, neginf=-(2.0**200))


FORMATS = {
    "e4m3": Format(4, 3, 7, 448.0, 0x7F),
    "e5m2": Format(5, 2, 15, 57344.0, 0x7F),
    "e2m3": Format(2, 3, 1, 7.5, 0x1F),
    "e3m2": Format(3, 2, 3, 28.0, 0x1F),
    "e2m1": Format(2, 1, 1, 6.0, 0x7),
}
IN_F16 = {
    "e4m3": floats.E4M3_IN_F16,
    "e5m2": floats.f16_of(floats.E5M2),
    **{name: floats.f16_of(FORMATS[name].values) for name in ("e2m3", "e3m2", "e2m1")},
}
"""float16 bits of each code; exact, NaN canonical."""
_UE8M0_IN_BF16 = np.where(
    np.arange(256) == 0, 0x40, np.where(np.arange(256) == 255, 0x7FFF, np.arange(256) << 7)
).astype(np.uint16)
"""bfloat16 bits of each power of two; exact, the least one is subnormal."""


def rounded_to(values: Array, mantissa_bits: int, least_exponent: int, rounding: str) -> Array:
    """float64 values with that many bits behind the leading one; exponents have no upper limit."""
    exponent = np.frexp(values)[1] - 1
    unit = np.maximum(exponent, least_exponent) - mantissa_bits
    whole = _TO_WHOLE[rounding](np.ldexp(values, -unit))
    return np.where(np.isfinite(values), np.ldexp(whole, unit), values)


class _Wide(NamedTuple):
    """A format of float32's exponents or float16's."""

    mantissa_bits: int
    least_exponent: int
    most: float


_WIDE = {
    "f16": _Wide(10, -14, 65504.0),
    "bf16": _Wide(7, -126, (2 - 2.0**-7) * 2.0**127),
    "tf32": _Wide(10, -126, (2 - 2.0**-10) * 2.0**127),
}


def wide_of(
    values: Array, kind: str, rounding: str = "rn", flags: frozenset[str] = frozenset()
) -> Array:
    """Bits of float16, bfloat16 or TF32 (as float32) values; NaN becomes the canonical one.

    `flags` are of satfinite (to the largest value instead of an infinity), relu, sat and ftz.
    """
    format, exact = _WIDE[kind], values.astype(np.float64)
    if "ftz" in flags:
        exact = np.where(np.abs(exact) < 2.0**-126, np.copysign(0.0, exact), exact)
    value = rounded_to(exact, format.mantissa_bits, format.least_exponent, rounding)
    past = np.abs(value) > format.most
    stays = (
        (rounding == "rz") | ((rounding == "rp") & (value < 0)) | ((rounding == "rm") & (value > 0))
    )
    keeps = past & np.isfinite(exact) & stays | past & ("satfinite" in flags)
    largest = np.where(keeps, format.most, np.inf)
    value = np.where(past, np.copysign(largest, value), value)
    if "relu" in flags:
        value = np.where(value <= 0, 0.0, value)
    if "sat" in flags:
        value = np.where(value > 0, np.minimum(value, 1.0), 0.0)
    if kind == "f16":
        return floats.f16_of(value)
    bits = value.astype(np.float32).view(np.uint32)
    bits = np.where(np.isnan(value), np.uint32(0x7FFFFFFF), bits)
    return bits if kind == "tf32" else (bits >> np.uint32(16)).astype(np.uint16)


def _ue8m0_of(values: Array, rounding: str, *, satfinite: bool) -> Array:
    """Codes of powers of two: of float32 values without their signs, above or below."""
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    codes = bits >> np.uint32(23)
    if rounding == "rp":
        inexact = (bits & np.uint32(0x7FFFFF) > 0) & (bits > 0x400000) & (codes < 255)
        codes = codes + inexact
    if satfinite:
        codes = np.minimum(codes, 254)
    return np.where(np.isnan(values), 255, codes).astype(np.uint8)


def _halves_of(pair: Array, kind: str) -> tuple[Array, Array]:
    """Values of the upper and the lower half of 32 bits."""
    high, low = (pair >> np.uint32(16)).astype(np.uint16), pair.astype(np.uint16)
    if kind == "bf16x2":
        return floats.f32_of_bf16(high), floats.f32_of_bf16(low)
    return high.view(np.float16).astype(np.float32), low.view(np.float16).astype(np.float32)


def _joined(high: Array, low: Array, bits: int) -> Array:
    """Two codes in as many bits each."""
    whole = np.dtype(f"u{max(2 * bits // 8, 1)}").type
    joined: Array = low.astype(whole) | high.astype(whole) << whole(bits)
    return joined


def _to_narrow(name: str, source: str, flags: frozenset[str]) -> Function:
    format, bits = FORMATS[name], 4 if name == "e2m1" else 8

    def codes(values: Array) -> Array:
        if "relu" in flags:
            values = np.where(values <= 0, np.float32(0), values)
        return format.codes_of(values)

    if source == "f32":
        return lambda high, low: _joined(codes(high), codes(low), bits)

    def of_pair(pair: Array) -> Array:
        high, low = _halves_of(pair, source)
        return _joined(codes(high), codes(low), bits)

    return of_pair


def _from_narrow(name: str, flags: frozenset[str]) -> Function:
    table, bits = IN_F16[name], 4 if name == "e2m1" else 8
    if "relu" in flags:
        negative = (table & 0x8000 > 0) & (table & 0x7FFF <= 0x7C00)
        table = np.where(negative, 0, table).astype(np.uint16)

    def widen(pair: Array) -> Array:
        most = len(table) - 1
        return _joined(table[pair >> bits & most], table[pair & most], 16)

    return widen


def _to_powers(source: str, rounding: str, flags: frozenset[str]) -> Function:
    one = functools.partial(_ue8m0_of, rounding=rounding, satfinite="satfinite" in flags)
    if source == "f32":
        return lambda high, low: _joined(one(high), one(low), 8)

    def of_pair(pair: Array) -> Array:
        high, low = _halves_of(pair, source)
        return _joined(one(high), one(low), 8)

    return of_pair


def _from_powers(pair: Array) -> Array:
    return _joined(_UE8M0_IN_BF16[pair >> 8], _UE8M0_IN_BF16[pair & 255], 16)


class Conversion(NamedTuple):
    """A conversion's forms."""

    registers: tuple[str, str]
    """Types of the result's register and of the operands'."""
    roundings: tuple[str, ...]
    required: frozenset[str]
    optional: frozenset[str]
    make: Callable[[str, frozenset[str]], Function]
    """The function for a rounding and the other modifiers."""

    def function(self, modifiers: tuple[str, ...]) -> Function | None:
        """None if these modifiers are no form of it."""
        rounding, *flags = modifiers or ("",)
        given = frozenset(flags)
        if rounding not in self.roundings or len(given) != len(flags):
            return None
        if not self.required <= given <= self.required | self.optional:
            return None
        return self.make(rounding, given)


def _conversions() -> dict[tuple[str, str], Conversion]:
    """By result and source."""
    found: dict[tuple[str, str], Conversion] = {}
    must, may, none = frozenset({"satfinite"}), frozenset({"relu"}), frozenset[str]()
    for name in FORMATS:
        register = "b8" if name == "e2m1" else "b16"
        for source in ("f32",) if name in ("e2m3", "e3m2") else ("f32", "f16x2"):
            make = functools.partial(
                lambda r, flags, n, s: _to_narrow(n, s, flags), n=name, s=source
            )
            kinds = register, "f32" if source == "f32" else "b32"
            found[f"{name}x2", source] = Conversion(kinds, ("rn",), must, may, make)
        widen = functools.partial(lambda r, flags, n: _from_narrow(n, flags), n=name)
        found["f16x2", f"{name}x2"] = Conversion(("b32", register), ("rn",), none, may, widen)
    for source, kind in (("f32", "f32"), ("bf16x2", "b32")):
        power = functools.partial(lambda r, flags, s: _to_powers(s, r, flags), s=source)
        found["ue8m0x2", source] = Conversion(("b16", kind), ("rz", "rp"), none, must, power)
    found["bf16x2", "ue8m0x2"] = Conversion(
        ("b32", "b16"), ("rn",), none, none, lambda r, flags: _from_powers
    )
    return found | _wide_conversions(must, may)


def _wide_conversions(
    limited: frozenset[str], relu: frozenset[str]
) -> dict[tuple[str, str], Conversion]:
    """From float32 to formats of 16 bits and to TF32."""
    found: dict[tuple[str, str], Conversion] = {}
    none = frozenset[str]()
    for kind in ("f16", "bf16"):

        def single(rounding: str, flags: frozenset[str], kind: str = kind) -> Function:
            if rounding == "rn" and not flags:
                return floats.f16_of if kind == "f16" else floats.bf16_of
            return lambda x: wide_of(x, kind, rounding, flags)

        def pair(rounding: str, flags: frozenset[str], kind: str = kind) -> Function:
            one = single(rounding, flags, kind)
            return lambda high, low: _joined(one(high), one(low), 16)

        more = limited | relu | ({"ftz", "sat"} if kind == "f16" else none)
        every = ("rn", "rz", "rm", "rp")
        found[kind, "f32"] = Conversion(("b16", "f32"), every, none, more, single)
        found[f"{kind}x2", "f32"] = Conversion(
            ("b32", "f32"), ("rn", "rz"), none, limited | relu, pair
        )
    found["tf32", "f32"] = Conversion(
        ("b32", "f32"),
        ("rn", "rz", "rna"),
        none,
        limited | relu,
        lambda rounding, flags: lambda x: wide_of(x, "tf32", rounding, flags),
    )
    return found


CONVERSIONS = _conversions()
