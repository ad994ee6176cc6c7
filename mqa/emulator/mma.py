"""Matrix products of a warp, `mma.sync`, and `ldmatrix`, which loads their operands.

Both are for whole warps and are over at once: they own no registers, unlike `wgmma`. Products that
follow each other and do not need each other are formed together.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator import taint
from mqa.emulator.alu import LANES, Binder, Slot, fail, storage
from mqa.emulator.device import number_of
from mqa.emulator.engines import own_places
from mqa.emulator.floats import Array
from mqa.emulator.memory import WINDOWS
from mqa.emulator.memory_access import load
from mqa.emulator.parser import Instruction, Operand, Register, Vector
from mqa.emulator.program import Effect, Step, addresses, effect
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.taint import Taint
from mqa.emulator.units import Form, HalfSums, decode
from mqa.emulator.warp import FULL, Wait, lanes
from mqa.emulator.wgmma import Matrix, matrix, results_of, summed
from mqa.testing.accumulators import (
    AMPERE_BF16,
    AMPERE_F16,
    HOPPER_MMA_BF16,
    HOPPER_MMA_F16,
    FusedTruncating,
)

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

ROWS, COLUMNS = 16, 8
DEPTHS = (8, 16)
TYPES = ("f32.bf16.bf16.f32", "f32.f16.f16.f32", "f16.f16.f16.f16")
"""Of D, A, B and C."""
_HOPPER = 90
_MATRICES = {"x1": 1, "x2": 2, "x4": 4}


# ---- where elements lie ----


def places_of_a(depth: int) -> tuple[Array, Array]:
    """Row and K of both halves of each register of A of each lane, [registers, 32, 2].

    Four lanes hold a row, two neighbours in K each. A register holds them of rows 0 to 7, the next
    one of rows 8 to 15, and the two after that of the upper eight of K.
    """
    register, lane, half = np.ogrid[: depth // 4, :LANES, :2]
    row, k = np.broadcast_arrays(
        lane // 4 + 8 * (register % 2), 8 * (register // 2) + 2 * (lane % 4) + half
    )
    return row, k


def places_of_b(depth: int) -> tuple[Array, Array]:
    """Column and K of both halves of each register of B of each lane, [registers, 32, 2].

    Four lanes hold a column, as those of a row of A, a register for each eight of K.
    """
    register, lane, half = np.ogrid[: depth // 8, :LANES, :2]
    column, k = np.broadcast_arrays(lane // 4, 8 * register + 2 * (lane % 4) + half)
    return column, k


def places_of_d() -> tuple[Array, Array]:
    """Row and column of each of the four sums of each lane, of C and of D, [4, 32].

    Four lanes hold a row, two neighbours each, those of rows 0 to 7 first; float16 sums of a row
    share a register.
    """
    value, lane = np.ogrid[:4, :LANES]
    row, column = np.broadcast_arrays(lane // 4 + 8 * (value // 2), 2 * (lane % 4) + value % 2)
    return row, column


# ---- operands ----


def model_of(target: str, kind: str) -> FusedTruncating:
    """How a target's `mma.sync` sums products of bfloat16 or float16 in float32."""
    if number_of(target) < _HOPPER:
        return AMPERE_BF16 if kind == "bf16" else AMPERE_F16
    return HOPPER_MMA_BF16 if kind == "bf16" else HOPPER_MMA_F16


@functools.cache
def _form(target: str, types: str, depth: int) -> Form:
    sums, a, b, _ = types.split(".")
    model = model_of(target, a)
    if sums == "f16":
        model = HalfSums(model.bits, model.k, model.min_exponent)
    return Form(f"{types} of {target}", a, b, sums, depth, model)


@dataclass(frozen=True)
class Stacked:
    """Matrices under each other, and what tells that sums with them are exact."""

    values: Array
    """Float64, [rows, K]."""
    steps: tuple[Matrix, ...]
    """A part for each step of K: sums of a step are cut before the next one."""
    plain: bool
    """All are finite."""
    last: int
    """Exponent of a bit that all are whole multiples of."""
    largest: int
    """Exponent of the largest one."""


@functools.lru_cache(maxsize=2048)
def _operand(raw: bytes, kind: str, depth: int, rows: int, step: int) -> Stacked:
    """An operand from the registers of its matrices, [matrices, registers, 32]."""
    row, k = (places_of_a if rows == ROWS else places_of_b)(depth)
    halves = np.frombuffer(raw, np.uint16).reshape(-1, *row.shape)
    bits = np.zeros((len(halves), rows, depth), np.uint16)
    bits[:, row, k] = halves
    values, least = decode(bits.tobytes(), len(halves) * rows, kind)
    steps = tuple(matrix(values[:, i : i + step], least) for i in range(0, depth, step))
    plain = all(one.finite and not np.count_nonzero(one.nan) for one in steps)
    last = min(int(one.last.min()) for one in steps)
    largest = max(int(one.largest.max()) for one in steps)
    return Stacked(values, steps, plain, last, largest)


_MOST_EXPONENT = 100
"""Of terms that are far from float32's ends."""


def _exact(a: Stacked, b: Stacked, start: Array, model: FusedTruncating) -> Array | None:
    """a b^T + start if a look at the largest and the smallest terms tells that no sum on the way
    is rounded; None where that takes more."""
    last, largest = a.last + b.last, a.largest + b.largest
    if not (a.plain and b.plain) or isinstance(model, HalfSums):
        return None
    if last < -_MOST_EXPONENT or largest > _MOST_EXPONENT or largest - last > model.bits:
        return None
    scaled = np.ldexp(start, -last)
    # A term is below four times the power of two of its exponent.
    most = a.values.shape[1] * 2.0 ** (largest + 2 - last) + float(np.abs(scaled).max())
    if not most < 2.0**24 or np.count_nonzero(scaled != np.rint(scaled)):
        return None
    return np.asarray(a.values @ b.values.T + start) + 0.0


@dataclass(frozen=True)
class Product:
    """One mma.sync: its form, and the registers of A, B, C and D."""

    form: Form
    a: tuple[Slot, ...]
    b: tuple[Slot, ...]
    c: tuple[Slot, ...]
    d: tuple[Slot, ...]


def _held(warp: Warp, slots: Sequence[Slot]) -> Array:
    """Bits of registers, [registers, 32]."""
    found = [cast(warp.registers[at]) if cast else warp.registers[at] for at, cast in slots]
    if any(value.__class__ is not np.ndarray for value in found):
        raise TypeError("a register belongs to an asynchronous operation")
    return np.stack(found)


class Grid:
    """Products of each of some A with each of some B, as one large product."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.form = products[0].form
        rows = list(dict.fromkeys(product.a for product in products))
        columns = list(dict.fromkeys(product.b for product in products))
        self.a, self.b = ([slot for one in part for slot in one] for part in (rows, columns))
        self.c = [slot for product in products for slot in product.c]
        self.d = [slot for product in products for slot in product.d]
        self.size = ROWS * len(rows), COLUMNS * len(columns)
        row, column = places_of_d()
        self.row = np.concatenate([row + ROWS * rows.index(x.a) for x in products])
        self.column = np.concatenate([column + COLUMNS * columns.index(x.b) for x in products])

    def __call__(self, warp: Warp) -> None:
        form = self.form
        assert form.model is not None
        step = min(form.depth, form.model.k)
        a = _operand(_held(warp, self.a).tobytes(), form.a, form.depth, ROWS, step)
        b = _operand(_held(warp, self.b).tobytes(), form.b, form.depth, COLUMNS, step)
        total = np.zeros(self.size)
        total[self.row, self.column] = form.sums_of(_held(warp, self.c))
        exact = _exact(a, b, total, form.model)
        for one, other in zip(a.steps, b.steps, strict=True) if exact is None else ():
            total = summed(one, other, total, form.model)
        total = total if exact is None else exact
        registers = form.registers_of(total[self.row, self.column])
        for (place, cast), value in zip(self.d, registers, strict=True):
            warp.write(place, cast(value) if cast else value, FULL)


def _grids(products: Sequence[Product]) -> list[Grid]:
    """Products that do not need each other: one grid, or one for each A."""
    if _is_grid(products):
        return [Grid(products)]
    alike: dict[Any, list[Product]] = {}
    for product in products:
        alike.setdefault((product.form.name, product.a), []).append(product)
    groups = [[x] if _is_grid(x) else [[one] for one in x] for x in alike.values()]
    return [Grid(group) for parts in groups for group in parts]


def _is_grid(products: Sequence[Product]) -> bool:
    """Whether each A meets each B, once."""
    rows, columns, forms = ({getattr(x, name) for x in products} for name in ("a", "b", "form"))
    pairs = {(one.a, one.b) for one in products}
    return len(forms) == 1 and len(products) == len(pairs) == len(rows) * len(columns)


def _levels(products: Sequence[Product]) -> list[list[Product]]:
    """Products by who needs whose sums, or writes what another one reads or writes."""
    levels: list[list[Product]] = []
    written: dict[int, int] = {}
    used: dict[int, int] = {}
    for product in products:
        reads, writes = (
            {at for at, _ in x} for x in (product.a + product.b + product.c, product.d)
        )
        before = [written.get(at, -1) for at in reads] + [used.get(at, -1) for at in writes]
        level = max(before) + 1
        levels[level:] = levels[level:] or [[]]
        levels[level].append(product)
        written.update(dict.fromkeys(writes, level))
        for at in reads | writes:
            used[at] = max(used.get(at, -1), level)
    return levels


class Products:
    """The effect of one mma.sync, or of several that follow each other."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products
        self._grids = [grid for level in _levels(products) for grid in _grids(level)]
        self._alone = [Grid([product]) for product in products]

    def __call__(self, warp: Warp, mask: int) -> Wait | None:
        wait = _whole(warp, mask)
        if wait is not None:
            return wait
        if not warp.tainted:
            for grid in self._grids:
                grid(warp)
            return None
        for product, grid in zip(self.products, self._alone, strict=True):
            found = _tainted_sums(warp, product)
            grid(warp)
            for (place, _), one in zip(product.d, found, strict=True):
                taint.put(warp, place, one, lanes(FULL))
        return None


def _whole(warp: Warp, mask: int) -> Wait | None:
    """A wait for all threads of the warp to come to the instruction.

    Raises a finding where one of them ended, or stands there and does not take part.
    """
    if warp.exited and warp.cta.machine.checks.any:
        raise Finding(
            Kind.DIVERGENCE,
            f"threads {warp.exited:#010x} of warp {warp.index} ended or never were, and all 32 "
            "have to take part",
        )
    return warp.needs(mask, FULL)


def _tainted_sums(warp: Warp, product: Product) -> list[Taint | None]:
    """Of each register of D: in which lanes its sums have terms that were never written."""
    row, column = places_of_d()
    bad, origin = np.zeros((ROWS, COLUMNS), bool), ""
    halves = (places_of_a(product.form.depth)[0], places_of_b(product.form.depth)[0])
    for slots, places, whole in zip((product.a, product.b), halves, (bad, bad.T), strict=True):
        for (place, _), lines in zip(slots, places[..., 0], strict=True):
            held = warp.tainted.get(place)
            if held is not None:
                whole[lines[held.lanes]] = True
                origin = origin or held.origin
    several = product.form.sums_of_register
    for i, (place, _) in enumerate(product.c):
        held = warp.tainted.get(place)
        if held is not None:
            mine = slice(several * i, several * (i + 1))
            bad[row[mine, held.lanes], column[mine, held.lanes]] = True
            origin = origin or held.origin
    sums: Array = np.any(bad[row, column].reshape(-1, several, LANES), axis=1)
    return [Taint(one, origin) if np.count_nonzero(one) else None for one in sums]


@effect("mma.sync.aligned", carries=(1, 2, 3))
def mma_sync(b: Binder, at: Instruction) -> Effect:
    shape, *layouts = at.parts[3:6]
    types = ".".join(at.parts[6:])
    if shape not in (f"m16n8k{depth}" for depth in DEPTHS) or layouts != ["row", "col"]:
        fail(at, "expected .m16n8k8 or .m16n8k16, and .row.col")
    if types not in TYPES:
        fail(at, f"types .{types} are not modelled (modelled: {', '.join(TYPES)})")
    form = _form(b.target, types, int(shape[6:]))
    sums = 4 // form.sums_of_register
    counts = (sums, form.depth // 4, form.depth // 8, sums)
    d, *given = (
        _parts(operand, count, at) for operand, count in zip(at.operands, counts, strict=True)
    )
    for part in (*d, *(part for parts in given for part in parts)):
        _check_register(part, at)
    first, second, start = (tuple(b.source(x, "b32", at) for x in parts) for parts in given)
    return Products([Product(form, first, second, start, tuple(results_of(b, d, at)))])


def _parts(operand: Operand, count: int, at: Instruction) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.parts) != count:
        fail(at, f"{operand}, expected {count} registers in braces")
    return operand.parts


def _check_register(part: Operand, at: Instruction) -> None:
    if isinstance(part, Register) and (part.type == "pred" or storage(part.type).itemsize != 4):
        fail(at, f"register {part.name} is declared .{part.type}, expected 32 bits")


def join(steps: list[Any], starts: Collection[int]) -> None:
    """Let products that follow each other be executed by the first of them, up to a label."""
    first = 0
    while first < len(steps):
        end = first
        while end < len(steps) and _is_product(steps[end]) and (end == first or end not in starts):
            end += 1
        if end - first > 1:
            group = [product for step in steps[first:end] for product in step.effect.products]
            steps[first] = replace(steps[first], effect=Products(group), more=end - first - 1)
        first = max(end, first + 1)


def _is_product(step: Any) -> bool:
    return isinstance(step, Step) and isinstance(step.effect, Products) and step.predicate is None


# ---- ldmatrix ----


@effect("ldmatrix.sync.aligned")
def ldmatrix(b: Binder, at: Instruction) -> Effect:
    """Eight lanes give the rows of each matrix; every lane gets two neighbours of a row, or of a
    column with .trans, of each matrix."""
    count, across = _matrices(at)
    parts = _parts(at.operands[0], count, at)
    for part in parts:
        _check_register(part, at)
    dests = results_of(b, parts, at)
    where = addresses(b, at.operands[1], at, "b16")
    generic = not any(part.startswith("shared") for part in at.parts)

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = _whole(warp, mask)
        if wait is not None:
            return wait
        places = _rows(warp, where(warp)[: 8 * count], generic=generic)
        warp.unwritten = None
        loaded = load(warp, "shared", places, 8, 2, FULL)
        halves = np.stack(loaded, axis=1).view(np.uint16)
        registers = _dealt(halves, across=across).view(np.uint32)[..., 0]
        for (place, cast), value in zip(dests, registers, strict=True):
            warp.write(place, cast(value) if cast else value, FULL)
        if warp.unwritten is not None:
            _taint_loaded(warp, places, [place for place, _ in dests], across=across)
        return None

    return run


def _matrices(at: Instruction) -> tuple[int, bool]:
    """How many matrices are loaded, and whether transposed."""
    shape, number, *rest = (*at.parts[3:], "", "")
    known = [part for part in rest if part]
    spaces = {"shared", "shared::cta"}.intersection(known)
    legal = ({"trans"}, spaces) if len(spaces) < 2 else ()
    left = set(known[:-1]).difference(*legal)
    if shape != "m8n8" or number not in _MATRICES or known[-1:] != ["b16"] or left:
        fail(at, "expected .m8n8, one of .x1, .x2 and .x4, perhaps .trans and .shared, and .b16")
    return _MATRICES[number], "trans" in known


def _rows(warp: Warp, given: Array, *, generic: bool) -> Array:
    """Shared addresses of rows, which have to be those of the CTA's own memory."""
    if generic:
        outside = given >> 60 != WINDOWS["shared"] >> 60
        if np.count_nonzero(outside):
            bad = int(given[outside][0]) & (1 << 64) - 1
            raise Finding(Kind.OUT_OF_BOUNDS, f"ldmatrix at {bad:#x}, not in shared memory")
        given = given - WINDOWS["shared"]
    return own_places(warp, given)


def _dealt(elements: Array, *, across: bool) -> Array:
    """Rows of eight elements, eight to a matrix, as the pairs that lanes get, [matrices, 32, 2]."""
    whole = elements.reshape(-1, 8, 8)
    return np.ascontiguousarray(whole.mT if across else whole).reshape(-1, LANES, 2)


def _taint_loaded(warp: Warp, places: Array, dests: list[int], *, across: bool) -> None:
    """Registers got what was never written."""
    shared = warp.cta.shared
    bad = np.zeros((len(places), 8), bool)
    for i in range(8):
        part = shared.unwritten(places + 2 * i, 2)
        if part is not None:
            bad[:, i] = part
    row, element = np.argwhere(bad)[0].tolist()
    origin = f"{shared.told(int(places[row]) + 2 * element)}, loaded by {warp.place()}"
    dealt: Array = np.any(_dealt(bad, across=across), axis=2)
    for place, which in zip(dests, dealt, strict=True):
        taint.put(warp, place, Taint(which, origin), lanes(FULL))
