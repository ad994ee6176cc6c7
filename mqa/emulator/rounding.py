"""Float arithmetic in every rounding of PTX, with `.ftz` and `.sat`, on single values and pairs.

`function` gives for one form always the same function, so that `mqa.emulator.batches` can tell
equal instructions. Nearest sums, products and quotients are numpy's own. The others are formed in
float64, exactly or rounded to odd, and then stepped to the side that was asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from mqa.emulator import floats
from mqa.emulator.floats import Array

Function = Callable[..., Array]
ROUNDINGS = ("rn", "rz", "rm", "rp")
"""To nearest even, toward zero, down and up."""
_LEAST_F32 = np.float32(2.0**-126)
_SIGNS = {4: np.uint32(1 << 31), 8: np.uint64(1 << 63)}


def flushed(values: Array) -> Array:
    """Subnormal float32 values become zeros of their sign."""
    small = np.abs(values) < _LEAST_F32
    return np.where(small, np.copysign(np.float32(0), values), values)


def saturated(values: Array) -> Array:
    """Within 0 and 1; NaN and -0 become +0."""
    limited = np.minimum(np.fmax(values, 0), 1).astype(values.dtype)
    return np.where(limited > 0, limited, values.dtype.type(0))


def directed(exact: Array, rounding: str) -> Array:
    """float64 values, which may be sums rounded to odd, as the float32 values on one side."""
    near = exact.astype(np.float32)
    return _stepped(near, near - exact, rounding)


def _stepped(near: Array, error: Array, rounding: str) -> Array:
    """`near`, or its neighbour where it is on the wrong side; `error` has the sign of the
    difference to the exact value."""
    down = np.nextafter(near, near.dtype.type(-np.inf))
    up = np.nextafter(near, near.dtype.type(np.inf))
    # What is rounded to zero has no sign of its own: the error tells it.
    positive = (near > 0) | ((near == 0) & (error < 0))
    lowers = (error > 0) & ((rounding == "rm") | ((rounding == "rz") & positive))
    raises = (error < 0) & ((rounding == "rp") | ((rounding == "rz") & ~positive))
    return np.where(lowers, down, np.where(raises, up, near))


def _sum(x: Array, y: Array, rounding: str) -> Array:
    """Of float64 values. Exact zeros that cancel are negative where it is rounded down."""
    total = x + y
    result = directed(floats.to_odd(x, y, total), rounding)
    if rounding == "rm":
        cancels = (total == 0) & (np.signbit(x) != np.signbit(y))
        result = np.where(cancels, np.float32(-0.0), result)
    return result


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _add(x: Array, y: Array, rounding: str) -> Array:
    return _sum(_wide(x), _wide(y), rounding)


def _subtract(x: Array, y: Array, rounding: str) -> Array:
    return _sum(_wide(x), -_wide(y), rounding)


def _multiply(x: Array, y: Array, rounding: str) -> Array:
    return directed(_wide(x) * _wide(y), rounding)


def _fma(x: Array, y: Array, z: Array, rounding: str) -> Array:
    return _sum(_wide(x) * _wide(y), _wide(z), rounding)


def _divide(x: Array, y: Array, rounding: str) -> Array:
    """The quotient times the divisor is exact in float64, and tells on which side it is."""
    near = np.divide(x, y)
    error = (_wide(near) * _wide(y) - _wide(x)) * np.sign(_wide(y))
    return _stepped(near, error, rounding)


def _reciprocal(x: Array, rounding: str) -> Array:
    return _divide(np.ones_like(x), x, rounding)


def _root(x: Array, rounding: str) -> Array:
    near = np.sqrt(x)
    return _stepped(near, _wide(near) * _wide(near) - _wide(x), rounding)


_DIRECTED: dict[str, Callable[..., Array]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "fma": _fma,
    "div": _divide,
    "rcp": _reciprocal,
    "sqrt": _root,
}


def _nearest_reciprocal(x: Array) -> Array:
    return np.divide(np.ones_like(x), x)


def _of_double(function: Function) -> Function:
    """The nearest float32 to what float64 gives."""

    def nearest(x: Array) -> Array:
        return function(_wide(x)).astype(np.float32)

    return nearest


_NEAREST: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": floats.fma_f32,
    "div": np.divide,
    "rcp": _nearest_reciprocal,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "neg": np.negative,
}
_APPROXIMATE: dict[str, Function] = {
    "div": floats.divide_approximately,
    "rcp": _nearest_reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _of_double(lambda x: 1 / np.sqrt(x)),
    "ex2": _of_double(np.exp2),
    "lg2": _of_double(np.log2),
    "sin": _of_double(np.sin),
    "cos": _of_double(np.cos),
    "tanh": _of_double(np.tanh),
}
"""Where the ISA leaves some error, hardware is that near; these give the nearest value."""
_F64: dict[tuple[str, str], Function] = {
    **{(name, "rn"): function for name, function in _NEAREST.items()},
    ("fma", "rn"): floats.fma_f64,
    ("rsqrt", "approx"): lambda x: 1 / np.sqrt(x),
}


def _canonical(function: Function) -> Function:
    """NaN comes out as the canonical one."""

    def canonical(x: Array) -> Array:
        value = function(x)
        bits = np.where(np.isnan(value), floats.CANONICAL_NAN_F32, value.view(np.uint32))
        return bits.view(np.float32)

    return canonical


ELEMENTWISE: set[Function] = {np.add, np.subtract, np.multiply, np.abs, np.negative}
"""Functions that do the same with many rows at once; all that are given out here."""


@functools.cache
def function(name: str, modifiers: tuple[str, ...], kind: str) -> Function | None:
    """What an opcode does to registers of type f32, f64 or f32x2; None if that is no form of it.

    Functions of f32x2 take and give the 64 bits of two float32 values.
    """
    if kind == "f32x2" and "sat" in modifiers:
        return None
    found = _form(name, modifiers, "f32" if kind == "f32x2" else kind)
    if found is not None and kind == "f32x2":
        found = PAIR_FMA if found is floats.fma_f32 else _of_pairs(found)
    if found is not None and kind != "f64":
        ELEMENTWISE.add(found)
    return found


def _form(name: str, modifiers: tuple[str, ...], kind: str) -> Function | None:
    modes = [x for x in modifiers if x in (*ROUNDINGS, "approx", "full")]
    flags = set(modifiers) - set(modes)
    if len(modes) > 1 or len(modes) + len(flags) != len(modifiers) or not flags <= {"ftz", "sat"}:
        return None
    mode = modes[0] if modes else "rn"
    if kind == "f64":
        return None if flags else _F64.get((name, mode))
    if mode == "rn":
        found = _NEAREST.get(name)
    elif mode in ROUNDINGS:
        found = None
        if name in _DIRECTED:
            found = functools.partial(_DIRECTED[name], rounding=mode)
    else:
        found = _approximate(name, mode)
    return found and _flagged(found, flags)


def _approximate(name: str, mode: str) -> Function | None:
    if mode == "full":
        return np.divide if name == "div" else None
    found = _APPROXIMATE.get(name)
    return found if found is None or name == "div" else _canonical(found)


def _flagged(function: Function, flags: set[str]) -> Function:
    if not flags:
        return function

    def flagged(*operands: Array) -> Array:
        if "ftz" in flags:
            result = flushed(function(*map(flushed, operands)))
        else:
            result = function(*operands)
        return saturated(result) if "sat" in flags else result

    return flagged


def _of_pairs(function: Function) -> Function:
    def pairs(*operands: Array) -> Array:
        return function(*(x.view(np.float32) for x in operands)).view(np.uint64)

    return pairs


PAIR_FMA = _of_pairs(floats.fma_f32)


@functools.cache
def extreme(name: str, modifiers: tuple[str, ...], count: int = 2) -> Function | None:
    """max and min of two or three float32 values; None if these modifiers are no form of them."""
    flags = set(modifiers)
    signs = flags & {"xorsign", "abs"}
    legal: tuple[set[str], ...] = ({"xorsign", "abs"}, set()) if count == 2 else ({"abs"}, set())
    if len(flags) != len(modifiers) or not flags <= {"NaN", "ftz", *signs} or signs not in legal:
        return None
    two = {
        ("max", True): floats.max_nan,
        ("max", False): floats.max_number,
        ("min", True): floats.min_nan,
        ("min", False): floats.min_number,
    }[name, "NaN" in flags]
    found = two if flags <= {"NaN"} and count == 2 else _of_sizes(two, flags)
    ELEMENTWISE.add(found)
    return found


def _of_sizes(two: Function, flags: set[str]) -> Function:
    def sized(*operands: Array) -> Array:
        if "ftz" in flags:
            operands = tuple(map(flushed, operands))
        sizes = [np.abs(x) if "abs" in flags else x for x in operands]
        result = functools.reduce(two, sizes)
        if "xorsign" in flags:
            signs = functools.reduce(np.logical_xor, [np.signbit(x) for x in operands])
            result = np.where(signs & ~np.isnan(result), -result, result)
        return result

    return sized
