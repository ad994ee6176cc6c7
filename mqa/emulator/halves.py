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

HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def wide(bits: Array, kind: str) -> Array:
    """Values of 16-bit floats as float64."""
    if kind.startswith("bf16"):
        return floats.f32_of_bf16(bits).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)


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
}


def function(name: str, modifiers: tuple[str, ...], kind: str) -> Callable[..., Array] | None:
    """What an opcode does to registers of a type; None if that is not modelled.

    `abs` and `neg` change the sign bit, of a NaN as well.
    """
    allowed = {"NaN"} if name in ("max", "min") else {"rn"} if name in _ARITHMETIC else set()
    if kind not in HALVES or not allowed.issuperset(modifiers):
        return None
    if name == "neg":
        one: Callable[..., Array] = lambda bits: bits ^ _SIGN  # noqa: E731
    elif name == "abs":
        one = lambda bits: bits & ~_SIGN  # noqa: E731
    else:
        values = _ARITHMETIC.get(name) or _extreme(name, nan="NaN" in modifiers)

        def one(*operands: Array) -> Array:
            return narrow(values(*(wide(bits, kind) for bits in operands)), kind)

    return _pairwise(one) if kind.endswith("x2") else one


def _pairwise(one: Callable[..., Array]) -> Callable[..., Array]:
    """For both 16-bit parts of 32-bit registers."""

    def function(*operands: Array) -> Array:
        parts = [np.ascontiguousarray(x).view(np.uint16) for x in operands]
        return np.asarray(one(*parts), np.uint16).view(np.uint32)

    return function
