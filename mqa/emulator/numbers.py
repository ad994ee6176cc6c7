"""Conversions between integers and floats of 16, 32 and 64 bits, as functions of registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mqa.emulator import halves, narrow, rounding
from mqa.emulator.floats import Array

Cast = Callable[[Array], Array]
TO_INTEGER: dict[str, Cast] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_HALVES = ("f16", "bf16")
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_INTEGERS = {f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)}
_UNKNOWN = "this conversion is not modelled"


def conversion(to: str, source: str, modifiers: tuple[str, ...]) -> Cast | str:
    """The function of a conversion's form, or why there is none."""
    modes = [x for x in modifiers if x in (*TO_INTEGER, *rounding.ROUNDINGS)]
    flags = set(modifiers) - set(modes)
    known = {*_INTEGERS, *_BITS}
    if not {to, source} <= known or not flags <= {"ftz", "sat"} or len(modes) > 1:
        return _UNKNOWN
    if len(flags) + len(modes) != len(modifiers) or ("ftz" in flags and "f32" not in (to, source)):
        return _UNKNOWN
    mode = modes[0] if modes else ""
    if source in _INTEGERS:
        if to in _INTEGERS:
            return _UNKNOWN if mode else _between_integers(to, source, saturates="sat" in flags)
        found = _from_integer(to, source, mode)
    elif to in _INTEGERS:
        if mode not in TO_INTEGER:
            return "expected how to round to an integer"
        return _to_integer(to, source, mode, flags)
    else:
        found = _between_floats(to, source, mode)
    return found if isinstance(found, str) else _flagged(found, to, source, flags)


def _integer(kind: str) -> np.dtype[np.integer]:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def _between_integers(to: str, source: str, *, saturates: bool) -> Cast:
    dtype, given = _integer(to), _integer(source)
    if not saturates:
        return lambda x: x.astype(dtype)
    least = max(np.iinfo(dtype).min, np.iinfo(given).min)
    most = min(np.iinfo(dtype).max, np.iinfo(given).max)
    return lambda x: np.clip(x, given.type(least), given.type(most)).astype(dtype)


def _widened(x: Array, source: str) -> Array:
    """Values of a float type as float64."""
    return halves.wide(x, source) if source in _HALVES else x.astype(np.float64)


def _from_integer(to: str, source: str, mode: str) -> Cast | str:
    if mode not in rounding.ROUNDINGS:
        return "expected how to round"
    exact = int(source[1:]) <= 32
    if mode == "rn" and to in ("f32", "f64"):
        dtype = np.dtype(f"f{_BITS[to] // 8}")
        return lambda x: x.astype(dtype)
    if not exact:
        return _UNKNOWN  # float64 has no room for what is to be rounded
    if to == "f64":
        return lambda x: x.astype(np.float64)
    return _rounded(to, mode, lambda x: x.astype(np.float64))


def _rounded(to: str, mode: str, widen: Cast) -> Cast:
    """To a type that is narrower than float64."""
    if to == "f32":
        return lambda x: rounding.directed(widen(x), mode)
    return lambda x: narrow.wide_of(widen(x), to, mode)


def _to_integer(to: str, source: str, mode: str, flags: set[str]) -> Cast:
    """Within the limits of the integers. NaN is 0, or the highest bit alone where either has 64."""
    rounded, dtype = TO_INTEGER[mode], _integer(to)
    limits = np.iinfo(dtype)
    of_nan = 0
    if source == "f64" or to[1:] == "64":
        of_nan = limits.min if limits.min else limits.max // 2 + 1

    def function(x: Array) -> Array:
        if "ftz" in flags:
            x = rounding.flushed(x)
        values = rounded(_widened(x, source))
        # 2^31 and the like are exact in float64, the largest 64-bit integers are not.
        inside = (values > limits.min) & (values < float(limits.max))
        cut = np.where(values > 0, dtype.type(limits.max), dtype.type(limits.min))
        found = np.where(inside, np.where(inside, values, 0).astype(dtype), cut)
        return np.where(np.isnan(values), dtype.type(of_nan), found)

    return function


def _between_floats(to: str, source: str, mode: str) -> Cast | str:
    """Narrower ones are rounded, wider ones are exact; a value may be rounded to an integer."""
    if mode in TO_INTEGER:
        return _to_whole(to, TO_INTEGER[mode]) if to == source else _UNKNOWN
    narrows = _BITS[to] < _BITS[source] or (to != source and {to, source} == set(_HALVES))
    if not narrows:
        if mode not in ("", "rn"):
            return _UNKNOWN
        return _widening(to, source)
    if mode == "":
        return "expected how to round"
    return _rounded(to, mode, lambda x: _widened(x, source))


def _to_whole(kind: str, rounded: Cast) -> Cast:
    if kind in _HALVES:
        return lambda x: narrow.wide_of(rounded(halves.wide(x, kind)), kind)
    return lambda x: rounded(x)


def _widening(to: str, source: str) -> Cast:
    if to == source:
        return lambda x: x
    dtype = np.dtype(f"f{_BITS[to] // 8}")
    return lambda x: _widened(x, source).astype(dtype)


def _flagged(found: Cast, to: str, source: str, flags: set[str]) -> Cast | str:
    if not flags:
        return found
    if "sat" in flags and to in ("bf16", "f16"):
        return _UNKNOWN

    def flagged(x: Array) -> Array:
        result = found(rounding.flushed(x) if "ftz" in flags and source == "f32" else x)
        if "ftz" in flags and to == "f32":
            result = rounding.flushed(result)
        return rounding.saturated(result) if "sat" in flags else result

    return flagged
