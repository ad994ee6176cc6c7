"""Instructions that touch registers alone, each bound once to a function of a warp's registers.

A function reads and writes a list with one array of 32 lanes for each register. Arrays are never
changed in place: a `mov` copies the reference. So a register whose value an asynchronous operation
still owns holds a `Pending` object, moves make aliases of it, and any other use is a type error,
which `mqa.emulator.warp` reports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from mqa.emulator import floats, halves, narrow, numbers, rounding
from mqa.emulator.floats import Array
from mqa.emulator.parser import (
    BYTES,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
)

Registers = list[Any]
Function = Callable[[Registers], None]
Cast = Callable[[Array], Array]
Slot = tuple[int, Cast | None]
"""Where a value is, and what makes it one of the type wanted; None if it is already."""
LANES = 32

DTYPES: dict[str, np.dtype[Any]] = {
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{"f16": np.dtype("u2"), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4")},
    **{"bf16x2": np.dtype("u4"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    **{"f32x2": np.dtype("u8"), "u16x2": np.dtype("u4"), "s16x2": np.dtype("u4")},
    "pred": np.dtype(bool),
}


_AXES = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid")
SPECIAL = frozenset(
    {f"%{name}.{axis}" for axis in "xyz" for name in (*_AXES, "cluster_ctaid", "cluster_nctaid")}
    | {f"%lanemask_{which}" for which in ("eq", "le", "lt", "ge", "gt")}
    | {"%laneid", "%warpid", "%nwarpid", "%cluster_ctarank", "%cluster_nctarank", "%smid"}
    | {"%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size", "%is_explicit_cluster"}
)
"""Special registers that never change; `mqa.emulator.clocks` has those that do."""


def storage(kind: str) -> np.dtype[Any]:
    """How a register declared so holds its value."""
    if kind in ("f32", "f64", "pred"):
        return DTYPES[kind]
    return DTYPES[f"b{8 * BYTES[kind]}"]


def fail(instruction: Instruction, why: str) -> NoReturn:
    raise PtxError(f"PTX line {instruction.line}: {instruction.opcode}: {why}")


class Binder:
    """Gives registers, constants and special registers their places in a warp's list."""

    def __init__(
        self, registers: list[Register], symbols: dict[str, int], spaces: dict[str, str]
    ) -> None:
        self.types = [storage(register.type) for register in registers]
        self.symbols, self.spaces = symbols, spaces
        """Of variables: addresses, and the state spaces that they lie in."""
        self.ranked = False
        """Whether addresses of shared variables carry the rank of their CTA."""
        self.target = ""
        """The module's."""
        self.constants: dict[int, Array] = {}
        self.special: dict[str, int] = {}
        self._known: dict[tuple[int, str], int] = {}
        self._fresh: Registers = []

    def source(self, operand: Operand, kind: str, at: Instruction) -> Slot:
        """A value read as `kind`."""
        wanted = np.dtype(DTYPES[kind])
        if isinstance(operand, Register):
            return operand.index, _view(self.types[operand.index], wanted)
        if isinstance(operand, Immediate):
            return self._constant(_bits(operand, kind), wanted), None
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            if self.ranked and self.spaces[operand.name] == "shared":
                return self._special(f"&{operand.name}", np.dtype("u8"), wanted)
            return self._constant(self.symbols[operand.name], wanted), None
        if isinstance(operand, Symbol) and operand.name == "WARP_SZ":
            return self._constant(LANES, wanted), None
        if isinstance(operand, Symbol) and operand.name.startswith("%"):
            if operand.name not in SPECIAL:
                fail(at, f"special register {operand.name} is not modelled")
            return self._special(operand.name, np.dtype("u4"), wanted)
        if isinstance(operand, Negated) and kind == "pred":
            return operand.register.index, np.logical_not
        fail(at, f"operand {operand} is not a value of type {kind}")

    def _special(self, name: str, dtype: np.dtype[Any], wanted: np.dtype[Any]) -> Slot:
        """What each warp has of its own from the start, by name; `&x` is the address of x."""
        if name not in self.special:
            self.special[name] = self._new(dtype)
        return self.special[name], _view(dtype, wanted)

    def dest(self, operand: Operand, kind: str, at: Instruction) -> Slot:
        """Where a result of type `kind` goes, and what makes it the register's."""
        if isinstance(operand, Symbol) and operand.name == "_":
            return self._new(np.dtype(DTYPES[kind])), None
        if not isinstance(operand, Register):
            fail(at, f"result {operand} is no register")
        return operand.index, _view(np.dtype(DTYPES[kind]), self.types[operand.index])

    def _new(self, dtype: np.dtype[Any]) -> int:
        self.types.append(dtype)
        return len(self.types) - 1

    def _constant(self, bits: int, dtype: np.dtype[Any]) -> int:
        key = (bits, dtype.str)
        if key not in self._known:
            self._known[key] = index = self._new(dtype)
            if dtype.kind == "b":
                self.constants[index] = np.full(LANES, bool(bits))
            else:
                size = dtype.itemsize
                value = np.array(bits & (1 << 8 * size) - 1, f"u{size}")
                self.constants[index] = np.full(LANES, value).view(dtype)
        return self._known[key]

    def fresh(self) -> Registers:
        """Registers of a new warp: poison, and constants."""
        if len(self._fresh) != len(self.types):
            self._fresh = [_POISON[dtype.str] for dtype in self.types]
            for index, constant in self.constants.items():
                self._fresh[index] = constant
        return self._fresh.copy()


_POISON: dict[str, Array] = {
    np.dtype(code).str: np.full(LANES * np.dtype(code).itemsize, 0xFF, np.uint8).view(code)
    for code in ("u1", "u2", "u4", "u8", "f4", "f8", "i1", "i2", "i4", "i8")
} | {np.dtype(bool).str: np.ones(LANES, bool)}
"""What registers hold at the start: NaN, or -1."""


def _bits(operand: Immediate, kind: str) -> int:
    if operand.float_bits == 64 and kind == "f32":
        value = np.array(operand.value, np.uint64).view(np.float64).astype(np.float32)
        return int(value.view(np.uint32))
    return operand.value


@functools.cache
def _view(have: np.dtype[Any], want: np.dtype[Any]) -> Cast | None:
    """From one dtype to another: the same bits, cut, or extended by the sign of a signed one.

    Equal casts are one object.
    """
    if have == want:
        return None
    if have.itemsize == want.itemsize and "b" not in (have.kind, want.kind):
        return lambda value: value.view(want)
    middle = np.dtype(f"u{want.itemsize}")
    return lambda value: value.astype(middle).view(want)


Casts = tuple[Cast | None, ...] | None


class Formula(NamedTuple):
    """registers[to] = function(*registers[sources]), result and sources cast."""

    function: Callable[..., Array]
    to: int
    sources: tuple[int, ...]
    casts: Casts = None
    """Of the result, then of the sources; None where there are none."""
    more: tuple[int, ...] = ()
    """Where further results go, which the function gives too."""


FORMULAS: WeakKeyDictionary[Function, Formula] = WeakKeyDictionary()
"""What bound functions compute, for `mqa.emulator.batches`."""


def bind(function: Callable[..., Array], dest: Slot, *sources: Slot) -> Function:
    """registers[dest] = function(registers[source], ...)."""
    bound = _bound(function, dest, sources)
    places, casts = zip(*sources, strict=True) if sources else ((), ())
    needed = dest[1] is not None or any(casts)
    FORMULAS[bound] = Formula(function, dest[0], places, (dest[1], *casts) if needed else None)
    return bound


def copied(value: Array) -> Array:
    """What a move does to a value, unless an asynchronous operation owns it."""
    return value


def _bound(function: Callable[..., Array], dest: Slot, sources: tuple[Slot, ...]) -> Function:
    to, out = dest
    if out is None and not any(cast for _, cast in sources):
        places = tuple(place for place, _ in sources)
        if len(places) == 1:
            (a,) = places

            def unary(values: Registers) -> None:
                values[to] = function(values[a])

            return unary
        if len(places) == 2:
            a, b = places

            def binary(values: Registers) -> None:
                values[to] = function(values[a], values[b])

            return binary
        if len(places) == 3:
            a, b, c = places

            def ternary(values: Registers) -> None:
                values[to] = function(values[a], values[b], values[c])

            return ternary

    def general(values: Registers) -> None:
        given = [cast(values[place]) if cast else values[place] for place, cast in sources]
        result = function(*given)
        values[to] = out(result) if out else result

    return general


ALU: dict[str, Callable[[Binder, Instruction], Function]] = {}


def opcode(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for name in names:
            ALU[name] = function
        return function

    return register


def modifiers(at: Instruction, *known: str) -> tuple[str, str]:
    """The modifiers but the last, which is the type; all have to be known."""
    _, *rest = at.parts
    kind = rest[-1] if rest else ""
    for modifier in rest[:-1]:
        if modifier not in known:
            fail(at, f"modifier .{modifier} is not modelled")
    if kind not in DTYPES:
        fail(at, f"type .{kind} is not modelled")
    return ".".join(rest[:-1]), kind


def is_float(kind: str) -> bool:
    return kind in ("f32", "f64")


def simple(b: Binder, at: Instruction, kind: str, function: Callable[..., Array]) -> Function:
    """All operands of one type."""
    sources = (b.source(operand, kind, at) for operand in at.operands[1:])
    return bind(function, b.dest(at.operands[0], kind, at), *sources)


def _halves(b: Binder, at: Instruction) -> Function | None:
    """Of float16 and bfloat16; None for other types."""
    name, *rest, kind = at.parts
    if kind not in halves.HALVES:
        return None
    function = halves.function(name, tuple(rest), kind)
    if function is None:
        fail(at, "this form is not modelled")
    return simple(b, at, kind, function)


def _floats(b: Binder, at: Instruction) -> Function | None:
    """Of all float types; None for integers. With float32 sums and products a factor or a term
    may be a float16 or bfloat16 value."""
    name, *rest, kind = at.parts
    if rest[-1:] == ["f32"] and kind in ("f16", "bf16"):
        return _mixed(b, at, tuple(rest[:-1]), kind)
    if kind not in ("f32", "f64", "f32x2"):
        return _halves(b, at)
    return simple(b, at, kind, _known(at, rounding.function(name, tuple(rest), kind)))


def _known(at: Instruction, function: Callable[..., Array] | None) -> Callable[..., Array]:
    if function is None:
        fail(at, "this form is not modelled")
    return function


def _mixed(b: Binder, at: Instruction, modes: tuple[str, ...], kind: str) -> Function:
    function = _known(at, rounding.function(at.parts[0], modes, "f32"))
    *given, last = at.operands[1:]
    sources = [b.source(x, "b16", at) for x in given]
    dest = b.dest(at.operands[0], "f32", at)

    def wide(*operands: Array) -> Array:
        *halved, single = operands
        return function(*(halves.wide(x, kind).astype(np.float32) for x in halved), single)

    return bind(wide, dest, *sources, b.source(last, "f32", at))


def _unsigned(kind: str) -> str:
    """Where signs don't matter, the type in which registers are kept."""
    return kind.replace("s", "u", 1) if kind[0] == "s" else kind


@opcode("add", "sub")
def add(b: Binder, at: Instruction) -> Function:
    if (of_floats := _floats(b, at)) is not None:
        return of_floats
    _, kind = modifiers(at)
    if kind.endswith("x2"):
        return simple(b, at, kind, _of_shorts(np.add, kind))
    return simple(b, at, _unsigned(kind), np.add if at.parts[0] == "add" else np.subtract)


def _of_shorts(function: Callable[..., Any], kind: str) -> Callable[..., Array]:
    """For both 16-bit integers of 32-bit registers."""
    part = DTYPES[kind.removesuffix("x2")]

    def pairs(*operands: Array) -> Array:
        parts = (np.ascontiguousarray(x).view(part) for x in operands)
        return np.asarray(function(*parts), part).view(np.uint32)

    return pairs


def _high(bits: int, *, signed: bool) -> Callable[[Array, Array], Array]:
    if bits == 64:
        return _high_of_long
    wide = np.dtype(("i" if signed else "u") + str(bits // 4))

    def function(x: Array, y: Array) -> Array:
        product: Array = x.astype(wide) * y.astype(wide)
        shifted: Array = (product >> wide.type(bits)).astype(x.dtype)
        return shifted

    return function


def _high_of_long(x: Array, y: Array) -> Array:
    """Upper 64 of the 128 bits of products."""
    products = (int(a) * int(b) >> 64 for a, b in zip(x, y, strict=True))
    return np.array(list(products), x.dtype)


@opcode("mul")
def mul(b: Binder, at: Instruction) -> Function:
    if (of_floats := _floats(b, at)) is not None:
        return of_floats
    mode, kind = modifiers(at, "lo", "hi", "wide")
    if mode == "lo":
        return simple(b, at, _unsigned(kind), np.multiply)
    bits = int(kind[1:])
    if mode == "hi":
        return simple(b, at, kind, _high(bits, signed=kind[0] == "s"))
    if mode != "wide" or bits > 32:
        fail(at, "this form of mul is not modelled")
    wide = f"{kind[0]}{2 * bits}"
    dtype = DTYPES[wide]
    sources = [b.source(operand, kind, at) for operand in at.operands[1:]]
    function = lambda x, y: np.multiply(x, y, dtype=dtype)  # noqa: E731
    return bind(function, b.dest(at.operands[0], wide, at), *sources)


@opcode("mad")
def mad(b: Binder, at: Instruction) -> Function:
    mode, kind = modifiers(at, "lo", "hi", "wide")
    a, c, d = at.operands[1:]
    if mode == "lo":
        return simple(b, at, _unsigned(kind), lambda x, y, z: x * y + z)
    if mode == "hi":
        high = _high(8 * BYTES[kind], signed=kind[0] == "s")
        return simple(b, at, kind, lambda x, y, z: high(x, y) + z)
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    dtype = DTYPES[wide]
    sources = (b.source(a, kind, at), b.source(c, kind, at), b.source(d, wide, at))
    function = lambda x, y, z: np.multiply(x, y, dtype=dtype) + z  # noqa: E731
    return bind(function, b.dest(at.operands[0], wide, at), *sources)


@opcode("fma")
def fma(b: Binder, at: Instruction) -> Function:
    of_floats = _floats(b, at)
    if of_floats is None:
        fail(at, f"type .{at.parts[-1]} is not modelled")
    return of_floats


def _quotient(x: Array, y: Array) -> Array:
    """Cut toward zero; of a division by zero all bits."""
    if x.dtype.kind == "u":
        return np.where(
            y == 0, x.dtype.type(-1 & (1 << 8 * x.itemsize) - 1), x // np.where(y, y, 1)
        )
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    quotient = x // safe
    inexact = (quotient * safe != x) & ((x < 0) != (safe < 0))
    return np.where(y == 0, -1, quotient + inexact).astype(x.dtype)


@opcode("div")
def div(b: Binder, at: Instruction) -> Function:
    kind = at.parts[-1]
    if is_float(kind):
        return simple(b, at, kind, _known(at, rounding.function("div", at.parts[1:-1], kind)))
    _, kind = modifiers(at)
    return simple(b, at, kind, _quotient)


@opcode("rem")
def rem(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    return simple(b, at, kind, lambda x, y: (x - _quotient(x, y) * y).astype(x.dtype))


@opcode("max", "min")
def extreme(b: Binder, at: Instruction) -> Function:
    name, *rest, kind = at.parts
    if (of_halves := _halves(b, at)) is not None:
        return of_halves
    if kind == "f32":
        return simple(
            b, at, kind, _known(at, rounding.extreme(name, tuple(rest), len(at.operands) - 1))
        )
    if kind == "f64":
        two = floats.max_number if name == "max" else floats.min_number
        return simple(b, at, kind, two)
    chosen: Callable[..., Array] = np.maximum if name == "max" else np.minimum
    function = chosen
    if rest == ["relu"]:
        function = lambda x, y: np.maximum(chosen(x, y), x.dtype.type(0))  # noqa: E731
    return simple(b, at, kind, _of_shorts(function, kind) if kind.endswith("x2") else function)


@opcode("abs", "neg")
def sign(b: Binder, at: Instruction) -> Function:
    if (of_floats := _floats(b, at)) is not None:
        return of_floats
    _, kind = modifiers(at)
    return simple(b, at, kind, np.abs if at.parts[0] == "abs" else np.negative)


_LOGIC: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
}


@opcode("and", "or", "xor", "not")
def logic(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    return simple(b, at, kind, _LOGIC[at.parts[0]])


def _shift_left(x: Array, y: Array) -> Array:
    bits = 8 * x.itemsize
    return np.where(y < bits, x << np.minimum(y, bits - 1).astype(x.dtype), 0).astype(x.dtype)


def _shift_right(x: Array, y: Array) -> Array:
    """Of a signed value the sign comes in."""
    bits = 8 * x.itemsize
    shifted = x >> np.minimum(y, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(y < bits, shifted, 0).astype(x.dtype)


@opcode("shl", "shr")
def shift(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    function = _shift_left if at.parts[0] == "shl" else _shift_right
    value, amount = at.operands[1:]
    if isinstance(amount, Immediate) and 0 <= amount.value < 8 * BYTES[kind]:
        by = DTYPES[kind].type(amount.value)
        plain = (lambda x: x << by) if at.parts[0] == "shl" else (lambda x: x >> by)
        return bind(plain, b.dest(at.operands[0], kind, at), b.source(value, kind, at))
    sources = (b.source(value, kind, at), b.source(amount, "u32", at))
    return bind(function, b.dest(at.operands[0], kind, at), *sources)


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "neu": np.not_equal,
    "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


def _less_or_greater(x: Array, y: Array) -> Array:
    return (x < y) | (x > y)


def _comparison(at: Instruction, name: str, kind: str) -> Callable[..., Array]:
    """Of values of a type, of both halves of a pair."""
    if name not in _COMPARE:
        fail(at, "this comparison is not modelled")
    compare: Callable[..., Any] = _COMPARE[name]
    if name == "ne" and (is_float(kind) or kind in halves.HALVES):
        compare = _less_or_greater
    flushes = "ftz" in at.parts
    if kind == "f32" and flushes:
        return lambda x, y: compare(rounding.flushed(x), rounding.flushed(y))
    if kind in halves.HALVES:
        return lambda x, y: compare(*(halves.wide(z, kind, flushes=flushes) for z in (x, y)))
    if flushes:
        fail(at, "modifier .ftz is not modelled")
    return compare


def _compared_as(name: str, kind: str) -> str:
    """The type in which operands of a comparison are read."""
    return _unsigned(kind) if name in ("eq", "ne") and not is_float(kind) else kind


@opcode("setp")
def setp(b: Binder, at: Instruction) -> Function:
    """With two results the second is that of the other half of pairs, else the opposite."""
    mode, kind = modifiers(at, *_COMPARE, "and", "or", "xor", "ftz")
    name, *combined = (x for x in mode.split(".") if x != "ftz")
    to, compare = at.operands[0], _comparison(at, name, kind)
    pairs = kind in ("f16x2", "bf16x2")
    if isinstance(to, Pair) or pairs:
        return _setp_two(b, at, compare, [combined[0] if combined else "", kind])
    sources = [b.source(operand, _compared_as(name, kind), at) for operand in at.operands[1:3]]
    dest = b.dest(to, "pred", at)
    if not combined:
        return bind(compare, dest, *sources)
    with_other, last = _LOGIC[combined[0]], b.source(at.operands[3], "pred", at)
    return bind(lambda x, y, p: with_other(compare(x, y), p), dest, *sources, last)


def _setp_two(
    b: Binder, at: Instruction, compare: Callable[..., Array], form: list[str]
) -> Function:
    combined, kind = form
    to = at.operands[0]
    if not isinstance(to, Pair):
        fail(at, "expected a pair of results")
    (one, _), (other, _) = (b.dest(x, "pred", at) for x in (to.first, to.second))
    sources = [b.source(operand, kind, at) for operand in at.operands[1:3]]
    last = b.source(at.operands[3], "pred", at) if combined else None

    def run(values: Registers) -> None:
        x, y = (cast(values[place]) if cast else values[place] for place, cast in sources)
        held = compare(x, y)
        first, second = (held[0::2], held[1::2]) if kind.endswith("x2") else (held, ~held)
        if last is not None:
            place, cast = last
            given = cast(values[place]) if cast else values[place]
            first, second = (_LOGIC[combined](part, given) for part in (first, second))
        values[one], values[other] = first, second

    return run


@opcode("set")
def set_(b: Binder, at: Instruction) -> Function:
    """All bits, or 1.0, where a comparison holds, else 0."""
    name, *combined = (x for x in at.parts[1:-2] if x != "ftz")
    to, kind = at.parts[-2:]
    compare = _comparison(at, name, kind)
    yes = _bits_of_yes(to, kind)

    def function(x: Array, y: Array, *more: Array) -> Array:
        held = compare(x, y)
        if more:
            held = _LOGIC[combined[0]](held, np.repeat(more[0], len(held) // LANES))
        found = np.where(held, yes, yes.dtype.type(0)).astype(yes.dtype)
        return found.view(np.uint32) if kind.endswith("x2") else found

    sources = [b.source(operand, _compared_as(name, kind), at) for operand in at.operands[1:3]]
    sources += [b.source(operand, "pred", at) for operand in at.operands[3:]]
    return bind(function, b.dest(at.operands[0], _unsigned(f"b{8 * BYTES[to]}"), at), *sources)


_ONES = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}


def _bits_of_yes(to: str, kind: str) -> np.unsignedinteger[Any]:
    """As wide as the result, or as half of it where pairs are compared."""
    size = BYTES[to] // (2 if kind.endswith("x2") else 1)
    dtype = np.dtype(f"u{size}")
    one = _ONES.get(to.removesuffix("x2"))
    found: np.unsignedinteger[Any] = dtype.type((1 << 8 * size) - 1 if one is None else one)
    return found


@opcode("selp")
def selp(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    yes, no, which = at.operands[1:]
    sources = (b.source(which, "pred", at), *(b.source(x, _unsigned(kind), at) for x in (yes, no)))
    return bind(np.where, b.dest(at.operands[0], _unsigned(kind), at), *sources)


@opcode("cvta")
def cvta(b: Binder, at: Instruction) -> Function:
    """Windows of the address spaces begin where `mqa.emulator.memory` says."""
    from mqa.emulator.memory import WINDOWS

    to_space = "to" in at.parts
    space, kind = at.parts[-2].split("::")[0], at.parts[-1]
    if space not in ("global", "shared", "local", "param", "const") or kind != "u64":
        fail(at, f"state space .{space} is not modelled")
    base = np.uint64(WINDOWS[space])
    function = (lambda x: x - base) if to_space else (lambda x: x + base)
    dest, source = b.dest(at.operands[0], kind, at), b.source(at.operands[1], kind, at)
    return bind(function, dest, source)


@opcode("popc", "clz", "brev")
def count(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    bits = 8 * BYTES[kind]
    count_by: dict[str, Callable[[str], int]] = {
        "popc": lambda text: text.count("1"),
        "clz": lambda text: bits - len(text.lstrip("0")),
        "brev": lambda text: int(text[::-1], 2),
    }
    digits = count_by[at.parts[0]]
    result = kind if at.parts[0] == "brev" else "u32"
    dtype = DTYPES[result]

    def function(x: Array) -> Array:
        return np.array([digits(f"{value:0{bits}b}") for value in x.tolist()], dtype)

    return bind(function, b.dest(at.operands[0], result, at), b.source(at.operands[1], kind, at))


@opcode("bfind")
def bfind(b: Binder, at: Instruction) -> Function:
    """Place of the highest bit, or how far it is from the top; all ones where there is none."""
    mode, kind = modifiers(at, "shiftamt")
    bits = 8 * BYTES[kind]
    if kind[0] != "u":
        fail(at, f"type .{kind} is not modelled")

    def function(x: Array) -> Array:
        places = (value.bit_length() - 1 for value in x.tolist())
        found = [
            0xFFFFFFFF if place < 0 else bits - 1 - place if mode else place for place in places
        ]
        return np.array(found, np.uint32)

    return bind(function, b.dest(at.operands[0], "u32", at), b.source(at.operands[1], kind, at))


@opcode("bfi", "bfe")
def bit_field(b: Binder, at: Instruction) -> Function:
    """With a sign the field's highest bit is repeated above it: that of the last bit there is."""
    _, kind = modifiers(at)
    *values, start, length = at.operands[1:]
    bits, dtype = 8 * BYTES[kind], DTYPES[kind]

    def field(start: Array, length: Array) -> tuple[Array, Array]:
        first, size = np.minimum(start & 255, bits), np.minimum(length & 255, bits)
        ones = [(1 << int(n)) - 1 for n in size]
        return first.astype(object), np.array(ones, object)

    def insert(x: Array, y: Array, start: Array, length: Array) -> Array:
        first, ones = field(start, length)
        kept = y.astype(object) & ~(ones << first)
        placed = (x.astype(object) & ones) << first
        return ((kept | placed) & (1 << bits) - 1).astype(dtype)

    def extract(x: Array, start: Array, length: Array) -> Array:
        first, ones = field(start, length)
        if kind[0] != "s":
            return (x.astype(object) >> first & ones).astype(dtype)
        # Below the sign bit Python's shifts repeat it, so a field past the end is of signs alone.
        found = x.astype(object) >> first & ones
        return np.where(found > ones >> 1, found - ones - 1, found).astype(dtype)

    sources = [b.source(value, kind, at) for value in values]
    sources += [b.source(start, "u32", at), b.source(length, "u32", at)]
    function = insert if at.parts[0] == "bfi" else extract
    return bind(function, b.dest(at.operands[0], kind, at), *sources)


@opcode("prmt")
def prmt(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)

    def function(x: Array, y: Array, selector: Array) -> Array:
        whole = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        result = np.zeros(LANES, np.uint32)
        for i in range(4):
            choice = selector >> np.uint32(4 * i) & np.uint32(15)
            byte = (whole >> (np.uint64(8) * (choice & np.uint32(7)))) & np.uint64(255)
            signs = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            picked = np.where(choice & np.uint32(8), signs, byte).astype(np.uint32)
            result = result | picked << np.uint32(8 * i)
        return result

    return simple(b, at, kind, function)


@opcode("lop3")
def lop3(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    *values, table = at.operands[1:]
    if not isinstance(table, Immediate):
        fail(at, "the table has to be a number")
    rows = [row for row in range(8) if table.value >> row & 1]

    def function(x: Array, y: Array, z: Array) -> Array:
        result = np.zeros(LANES, np.uint32)
        for row in rows:
            result |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        return result

    sources = (b.source(value, kind, at) for value in values)
    return bind(function, b.dest(at.operands[0], kind, at), *sources)


@opcode("shf")
def shf(b: Binder, at: Instruction) -> Function:
    """Funnel shift of the 64 bits {second, first}."""
    mode, _ = modifiers(at, "l", "r", "wrap", "clamp")
    left, wraps = mode.startswith("l"), mode.endswith("wrap")

    def function(low: Array, high: Array, amount: Array) -> Array:
        whole = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        by = (amount & np.uint32(31) if wraps else np.minimum(amount, 32)).astype(np.uint64)
        shifted = whole << by >> np.uint64(32) if left else whole >> by
        return shifted.astype(np.uint32)

    return simple(b, at, "b32", function)


_POLICIES = {f"L2::evict_{name}" for name in ("last", "normal", "first", "unchanged")}


@opcode("createpolicy")
def createpolicy(b: Binder, at: Instruction) -> Function:
    """A hint for caches, which there are none of: an opaque value."""
    form, *levels = at.parts[1:-1]
    if form != "fractional" or not levels or not _POLICIES.issuperset(levels):
        fail(at, "this form is not modelled")
    if len(at.operands) == 2:
        b.source(at.operands[1], "f32", at)
    dest = b.dest(at.operands[0], "b64", at)
    return bind(lambda x: x, dest, b.source(Immediate(0), "b64", at))


@opcode("mov")
def mov(b: Binder, at: Instruction) -> Function:
    _, kind = modifiers(at)
    to, value = at.operands
    if isinstance(value, Vector):
        return _pack(b, at, value, to, kind)
    if isinstance(to, Vector):
        return _unpack(b, at, value, to, kind)
    kind = _unsigned(kind)
    if isinstance(value, Register) and isinstance(to, Register):
        return _copy(b, to, value)
    dest, source = b.dest(to, kind, at), b.source(value, kind, at)
    return bind(lambda x: x, dest, source)


def _copy(b: Binder, target: Register, value: Register) -> Function:
    to, source = target.index, value.index
    cast = _view(b.types[source], b.types[to])

    def run(values: Registers) -> None:
        held = values[source]
        if isinstance(held, Pending):
            held.move(source, to, cast)
            values[to] = held
        else:
            values[to] = cast(held) if cast else held

    FORMULAS[run] = Formula(copied, to, (source,), (cast, None) if cast else None)
    return run


def _check_parts(at: Instruction, whole: Vector, kind: str) -> None:
    """Parts of a register have equal sizes that make the whole."""
    count = len(whole.parts)
    size = BYTES[kind] // count if count in (2, 4) else 0
    for part in whole.parts:
        if size == 0 or (isinstance(part, Register) and BYTES[part.type] != size):
            fail(at, f"{whole} are no parts of {8 * BYTES[kind]} bits")


def _pack(b: Binder, at: Instruction, value: Vector, to: Operand, kind: str) -> Function:
    _check_parts(at, value, kind)
    whole, part = (f"b{8 * BYTES[kind] // count}" for count in (1, len(value.parts)))
    sources = [b.source(x, part, at) for x in value.parts]
    dest = b.dest(to, whole, at)
    place, out = dest
    function = _packing(whole)

    def build(*parts: Array) -> Array:
        result = function(*(x.view(DTYPES[part]) for x in parts))
        return out(result) if out else result

    plain = bind(function, dest, *sources)

    def run(values: Registers) -> None:
        try:
            plain(values)
        except (TypeError, AttributeError):
            held = [values[source] for source, _ in sources]
            if not any(isinstance(x, Pending) for x in held):
                raise
            values[place] = Derived(held, build, place)

    if len({b.types[source] for source, _ in sources}) == 1 and out is None:
        # Parts of one kind are packed as they are, so that several instructions can be at once.
        FORMULAS[run] = Formula(function, place, tuple(source for source, _ in sources))
    return run


@functools.cache
def _packing(whole: str) -> Callable[..., Array]:
    """Packs registers of one dtype."""

    def packed(*parts: Array) -> Array:
        shape = max((part.shape for part in parts), key=len)
        found: Array = np.empty((*shape, len(parts)), parts[0].dtype)
        for i, part in enumerate(parts):
            found[..., i] = part
        return found.view(DTYPES[whole])[..., 0]

    rounding.ELEMENTWISE.add(packed)
    return packed


def _unpack(b: Binder, at: Instruction, value: Operand, to: Vector, kind: str) -> Function:
    _check_parts(at, to, kind)
    bits = 8 * BYTES[kind] // len(to.parts)
    whole = f"b{8 * BYTES[kind]}"
    source, cast = b.source(value, whole, at)
    dests = [b.dest(x, f"b{bits}", at) for x in to.parts]
    shifts = [DTYPES[whole].type(bits * i) for i in range(len(dests))]
    narrow = DTYPES[f"b{bits}"]

    def cut(number: int) -> Cast:
        _, out = dests[number]

        def build(given: Array) -> Array:
            part = (given.view(DTYPES[whole]) >> shifts[number]).astype(narrow)
            return out(part) if out else part

        return build

    cuts = [cut(i) for i in range(len(dests))]
    views = [(place, _bits_as(b.types[place])) for place, _ in dests]
    places, outs = zip(*dests, strict=True)

    def run(values: Registers) -> None:
        given = values[source]
        if isinstance(given, Pending):
            _unpack_pending(values, given, views, cuts)
            return
        given = cast(given) if cast else given
        for by, (place, out) in zip(shifts, dests, strict=True):
            part = (given >> by).astype(narrow)
            values[place] = out(part) if out else part

    if len(set(outs)) == 1:
        casts = (outs[0], cast) if cast or outs[0] else None
        FORMULAS[run] = Formula(_cutting(narrow), places[0], (source,), casts, places[1:])
    return run


@functools.cache
def _cutting(narrow: np.dtype[Any]) -> Callable[..., Any]:
    """Cuts registers of one dtype into parts, low ones first."""

    def cut(whole: Array) -> Any:
        parts = whole.view(narrow).reshape(*whole.shape, -1)
        return [np.ascontiguousarray(parts[..., i]) for i in range(parts.shape[-1])]

    rounding.ELEMENTWISE.add(cut)
    return cut


def _bits_as(dtype: np.dtype[Any]) -> Cast:
    return lambda value: value.view(dtype)


def _unpack_pending(
    values: Registers, given: Pending, views: list[tuple[int, Cast]], cuts: list[Cast]
) -> None:
    """Each part that was packed as it is comes out as it was."""
    parts = given.parts if isinstance(given, Derived) else []
    for number, (place, view) in enumerate(views):
        if len(parts) != len(views):
            values[place] = Derived([given], cuts[number], place)
        elif isinstance(part := parts[number], Pending):
            part.places.append((place, view))
            values[place] = part
        else:
            values[place] = view(part)


class Pending:
    """Value of a register that an asynchronous operation owns, in every register moved from it."""

    __slots__ = ("derived", "operation", "places")
    __array_ufunc__ = None

    def __init__(self, operation: object, slot: Slot) -> None:
        self.operation = operation
        self.places: list[Slot] = [slot]
        """Registers, each with what makes the operation's result their value."""
        self.derived: tuple[Derived, ...] = ()
        """Registers that it is a part of, or that are parts of it."""

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("an asynchronous operation owns this register")

    def move(self, source: int, to: int, cast: Cast | None) -> None:
        """A register that holds it is moved to another."""
        before = next(first for place, first in reversed(self.places) if place == source)
        if before is not None and cast is not None:
            first, then = before, cast
            self.places.append((to, lambda value: then(first(value))))
        else:
            self.places.append((to, before or cast))

    def owned(self) -> list[Pending]:
        """What an operation owns, of which it is made."""
        return [self]

    def holders(self, values: Registers) -> list[int]:
        """Registers whose value depends on it."""
        found = [place for place, _ in self.places if values[place] is self]
        for derived in self.derived:
            found += derived.holders(values)
        return list(dict.fromkeys(found))

    def settle(self, values: Registers, value: Array) -> None:
        """The operation gave the register its value: so it does all that hold it."""
        for place, cast in self.places:
            if values[place] is self:
                values[place] = cast(value) if cast else value
        for derived in self.derived:
            derived.settle_part(values, self, value)


class Derived(Pending):
    """A register packed from others, of which operations own some, or cut from one.

    Its value is what `build` makes of the bits of its parts.
    """

    __slots__ = ("build", "parts")

    def __init__(self, parts: list[Any], build: Callable[..., Array], place: int) -> None:
        self.parts, self.build = parts, build
        self.places = [(place, None)]
        self.derived = ()
        for part in dict.fromkeys(x for x in parts if isinstance(x, Pending)):
            part.derived += (self,)

    @property
    def operation(self) -> object:  # type: ignore[override]
        return next(part.operation for part in self.parts if isinstance(part, Pending))

    def owned(self) -> list[Pending]:
        parts = [part for part in self.parts if isinstance(part, Pending)]
        return list(dict.fromkeys(one for part in parts for one in part.owned()))

    def settle_part(self, values: Registers, settled: Pending, value: Array) -> None:
        self.parts = [value if part is settled else part for part in self.parts]
        if not any(isinstance(part, Pending) for part in self.parts):
            self.settle(values, self.build(*self.parts))


@opcode("cvt")
def cvt(b: Binder, at: Instruction) -> Function:
    *rest, to, source = at.parts[1:]
    narrowed = narrow.CONVERSIONS.get((to, source))
    if narrowed is not None:
        function = narrowed.function(tuple(rest))
        if function is None:
            fail(at, f"modifiers {rest} are not modelled")
        kind, given = narrowed.registers
        sources = [b.source(x, given, at) for x in at.operands[1:]]
        return bind(function, b.dest(at.operands[0], kind, at), *sources)
    known = numbers.conversion(to, source, tuple(rest))
    if isinstance(known, str):
        fail(at, known)
    dest, value = b.dest(at.operands[0], to, at), b.source(at.operands[1], source, at)
    return bind(known, dest, value)
