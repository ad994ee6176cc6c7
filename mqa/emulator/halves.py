"""Arithmetic of float16 and bfloat16, single and in pairs, on their bits.

Operands are widened to float64, where sums, products and differences of two are exact or so near
that rounding again gives the same; only fma needs more care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mqa.emulator import floats
from mqa.emulator.floats import Array

_LEAST_F16 = 2.0**-14
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def wide(bits: Array, kind: str, *, flushes: bool = False) -> Array:
    """Values of 16-bit floats as float64, of 32-bit registers those of both halves."""
    if bits.itemsize == 4:
        bits = np.ascontiguousarray(bits).view(np.uint16)
    if kind.startswith("bf16"):
        return floats.f32_of_bf16(bits).astype(np.float64)
    values = bits.view(np.float16).astype(np.float64)
    if flushes:
        values = np.where(np.abs(values) < _LEAST_F16, np.copysign(0.0, values), values)
    return values


def narrow(values: Array, kind: str) -> Array:
    """The nearest 16-bit floats, as bits."""
    return (floats.bf16_of if kind.startswith("bf16") else floats.f16_of)(values)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded to odd in float64, so that rounding again is right."""
    product = a * b  # of 22 bits at most
    return floats.to_odd(product, c, product + c)


def _extreme(name: str, *, nan: bool) -> Callable[[Array, Array], Array]:
    functions = {
        ("max", True): floats.max_nan,
        ("max", False): floats.max_number,
        ("min", True): floats.min_nan,
        ("min", False): floats.min_number,
    }
    return functions[name, nan]


_SIGN = np.uint16(0x8000)
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fma,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


def _forms(name: str, kind: str) -> tuple[set[str], set[str]]:
    """Modifiers that an opcode must have, and others that it may have."""
    single = kind.removesuffix("x2") == "f16"
    if name in ("max", "min"):
        return set(), {"NaN", "xorsign", "abs"} | ({"ftz"} if single else set())
    if name in ("abs", "neg"):
        return set(), {"ftz"} if single else set()
    if name == "ex2":
        return ({"approx"}, set()) if single else ({"approx", "ftz"}, set())
    if name == "tanh":
        return {"approx"}, set()
    more = {"ftz", "sat"} if single else set()
    return ({"rn"}, more | {"relu"}) if name == "fma" else (set(), more | {"rn"})


def function(name: str, modifiers: tuple[str, ...], kind: str) -> Callable[..., Array] | None:
    """What an opcode does to registers of a type; None if that is not modelled.

    `abs` and `neg` change the sign bit, of a NaN as well.
    """
    flags = set(modifiers)
    if kind not in HALVES or len(flags) != len(modifiers):
        return None
    required, optional = _forms(name, kind)
    if not required <= flags <= required | optional or {"relu", "sat"} <= flags:
        return None
    one = _of_signs(name, flags) if name in ("abs", "neg") else _of_values(name, flags, kind)
    if one is None:
        return None
    return _pairwise(one) if kind.endswith("x2") else one


def _of_signs(name: str, flags: set[str]) -> Callable[..., Array]:
    def one(bits: Array) -> Array:
        if "ftz" in flags:
            bits = np.where(bits & 0x7FFF < 0x400, bits & _SIGN, bits).astype(np.uint16)
        return bits ^ _SIGN if name == "neg" else bits & ~_SIGN

    return one


def _of_values(name: str, flags: set[str], kind: str) -> Callable[..., Array] | None:
    single = kind.removesuffix("x2")
    values = _ARITHMETIC.get(name) or _extreme(name, nan="NaN" in flags)
    signs, flushes = flags & {"xorsign", "abs"}, "ftz" in flags and single == "f16"
    if signs not in (set(), {"xorsign", "abs"}):
        return None

    def one(*operands: Array) -> Array:
        given = [wide(bits, single, flushes=flushes) for bits in operands]
        result = values(*(np.abs(x) for x in given) if signs else given)
        if signs:
            opposite = np.logical_xor.reduce([np.signbit(x) for x in given])
            result = np.where(opposite & ~np.isnan(result), -result, result)
        if "relu" in flags:
            result = np.where(result <= 0, 0.0, result)
        if "sat" in flags:
            result = np.where(result > 0, np.minimum(result, 1.0), 0.0)
        bits = narrow(result, single)
        if flushes:
            bits = np.where(bits & 0x7FFF < 0x400, bits & _SIGN, bits).astype(np.uint16)
        return bits

    return one


def _pairwise(one: Callable[..., Array]) -> Callable[..., Array]:
    """For both 16-bit parts of 32-bit registers."""

    def function(*operands: Array) -> Array:
        parts = [np.ascontiguousarray(x).view(np.uint16) for x in operands]
        return np.asarray(one(*parts), np.uint16).view(np.uint32)

    return function
