"""Roots, powers and tests of floats, and integer instructions that few intrinsics become."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mqa.emulator import halves, rounding
from mqa.emulator.alu import (
    DTYPES,
    LANES,
    Binder,
    Function,
    bind,
    fail,
    modifiers,
    opcode,
    simple,
)
from mqa.emulator.floats import Array
from mqa.emulator.memory import RANK_SHIFT, WINDOWS
from mqa.emulator.parser import Instruction


@opcode("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def root(b: Binder, at: Instruction) -> Function:
    """Where the ISA leaves an error, the nearest value."""
    name, *rest, kind = at.parts
    family = halves if kind in halves.HALVES else rounding
    function = None
    if family is rounding or name in ("ex2", "tanh"):
        function = family.function(name, tuple(rest), kind)
    if function is None:
        fail(at, "this form is not modelled")
    return simple(b, at, kind, function)


@opcode("copysign")
def copysign(b: Binder, at: Instruction) -> Function:
    """The first operand's sign with the second's value."""
    _, kind = modifiers(at)
    return simple(b, at, kind, lambda sign, value: np.copysign(value, sign))


def _normal(x: Array) -> Array:
    found: Array = np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny)
    return found


TESTS: dict[str, Callable[[Array], Array]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": _normal,
    "subnormal": lambda x: np.isfinite(x) & ~_normal(x) & (x != 0),
}


@opcode("testp")
def testp(b: Binder, at: Instruction) -> Function:
    name, kind = modifiers(at, *TESTS)
    dest, source = b.dest(at.operands[0], "pred", at), b.source(at.operands[1], kind, at)
    return bind(TESTS[name], dest, source)


@opcode("sad")
def sad(b: Binder, at: Instruction) -> Function:
    """|a - b| + c."""
    _, kind = modifiers(at)
    unsigned = DTYPES[kind.replace("s", "u")]

    def function(x: Array, y: Array, z: Array) -> Array:
        apart = np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)
        total: Array = apart + z.view(unsigned)
        return total.view(x.dtype)

    return simple(b, at, kind, function)


def _parts(x: Array, size: int, *, signed: bool) -> Array:
    """Integers of that many bytes, [threads, parts], as int64."""
    kind = f"{'i' if signed else 'u'}{size}"
    return np.ascontiguousarray(x).view(kind).reshape(LANES, -1).astype(np.int64)


@opcode("dp4a", "dp2a")
def dot(b: Binder, at: Instruction) -> Function:
    """Sum of products of four bytes, or of two 16-bit values with two bytes, onto an integer."""
    name, *which = at.parts
    one, other = which[-2:] if len(which) > 1 else ("", "")
    which = which[:-2]
    if {one, other} - {"u32", "s32"} or which not in ([], ["lo"], ["hi"]):
        fail(at, "this form is not modelled")
    if (name == "dp2a") != bool(which):
        fail(at, "expected .lo or .hi of dp2a alone")
    start = 2 if which == ["hi"] else 0
    count = 4 if name == "dp4a" else 2

    def function(x: Array, y: Array, z: Array) -> Array:
        first = _parts(x, 4 // count, signed=one == "s32")
        second = _parts(y, 1, signed=other == "s32")[:, start : start + count]
        total: Array = (first * second).sum(axis=1) + z.astype(np.int64)
        return total.astype(np.uint32)

    sources = (b.source(operand, "b32", at) for operand in at.operands[1:])
    return bind(function, b.dest(at.operands[0], "b32", at), *sources)


@opcode("vabsdiff4")
def vabsdiff4(b: Binder, at: Instruction) -> Function:
    """Bytes' distances; the third operand means nothing without a mask or a sum."""
    if at.parts[1:] != ("u32", "u32", "u32"):
        fail(at, "this form is not modelled")

    def function(x: Array, y: Array, z: Array) -> Array:
        first, second = (_parts(value, 1, signed=False) for value in (x, y))
        apart: Array = np.abs(first - second).astype(np.uint8)
        return apart.view(np.uint32)[:, 0]

    return simple(b, at, "u32", function)


@opcode("fns")
def fns(b: Binder, at: Instruction) -> Function:
    """Place of the n-th set bit from a place on, upward or (n < 0) downward; all ones if none."""

    def one(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [place for place in places if mask >> place & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    def function(mask: Array, base: Array, offset: Array) -> Array:
        rows = zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)
        return np.array([one(bits, start & 31, count) for bits, start, count in rows], np.uint32)

    kinds = ("b32", "b32", "s32")
    sources = (b.source(x, kind, at) for x, kind in zip(at.operands[1:], kinds, strict=True))
    return bind(function, b.dest(at.operands[0], "b32", at), *sources)


@opcode("isspacep")
def isspacep(b: Binder, at: Instruction) -> Function:
    """Whether a generic address lies in a state space; in .shared::cta unless it names a rank."""
    space = at.parts[-1]
    window = np.uint64(WINDOWS["shared" if space.startswith("shared") else space] >> 60)

    def function(place: Array) -> Array:
        held: Array = place >> np.uint64(60) == window
        if space == "shared::cluster" or window != np.uint64(WINDOWS["shared"] >> 60):
            return held
        named: Array = place >> np.uint64(RANK_SHIFT) & np.uint64(31)
        here: Array = held & (named == 0)
        return here

    dest, source = b.dest(at.operands[0], "pred", at), b.source(at.operands[1], "u64", at)
    return bind(function, dest, source)
