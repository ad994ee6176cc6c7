"""Warpgroup matrix products of Hopper: descriptors, operands, sums, and when they are there.

A product reads shared memory and owns its accumulator's registers from issue to completion. Its
sums follow `mqa.testing.accumulators`. Descriptors are decoded from their bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator.alu import Binder, Pending, Slot, fail
from mqa.emulator.engines import OperationsWait
from mqa.emulator.floats import Array
from mqa.emulator.machine import Operation
from mqa.emulator.memory import words_of
from mqa.emulator.order import Order, View
from mqa.emulator.parser import Immediate, Instruction, Operand, Register, Vector
from mqa.emulator.program import Effect, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.taint import Taint, decides, put, united
from mqa.emulator.tensor_layouts import SharedDescriptor, chunks_along, chunks_over
from mqa.emulator.warp import FULL, Wait, lanes
from mqa.emulator.units import FORMS, OPCODES, Form, HalfSums, decode, round_half, wrap
from mqa.testing.accumulators import FusedTruncating, GroupedTruncating

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta
    from mqa.emulator.warp import Warp

GROUP_WARPS = 4
ROWS = 64
_K_BYTES = 32
"""Bytes of an operand's row that one product takes."""
_K_ACROSS = 16
"""Elements of it where the rows' dimension is contiguous, which 16-bit types alone can have."""
_SPANS = (0, 128, 64, 32)
"""Swizzle of a descriptor, by its two bits."""
_KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62


def _decoded_descriptor(bits: int) -> SharedDescriptor:
    if bits & ~_KNOWN_BITS:
        raise Finding(Kind.DESCRIPTOR, f"{bits:#018x} has bits that no field has")
    if bits >> 49 & 7:
        raise Finding(Kind.DESCRIPTOR, f"{bits:#018x} has a base offset, which is not modelled")
    start, leading, stride = ((bits >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    return SharedDescriptor(start, leading, stride, _SPANS[bits >> 62 & 3])


@functools.lru_cache(maxsize=4096)
def chunks_of(descriptor: int, rows: int) -> Array:
    """Shared address of both 16-byte chunks of each row of a K-major operand, [rows, 2]."""
    return chunks_along(_decoded_descriptor(descriptor), rows)


@functools.lru_cache(maxsize=4096)
def chunks_across(descriptor: int, rows: int) -> Array:
    """Shared address of each 8 rows of an operand whose rows' dimension is contiguous, for each
    of its 16 elements along K, [16, rows / 8]."""
    return chunks_over(_decoded_descriptor(descriptor), rows, _K_ACROSS, 8)


@dataclass(frozen=True)
class Matrix:
    """An operand's values, and what tells whether sums with it are exact."""

    values: Array
    """Float64, [rows, K]; 0 where NaN."""
    largest: Array
    """Exponent of each row's largest term, subnormals not normalised; low where there is none."""
    last: Array
    """Exponent of the lowest bit that a row uses; high where there is none."""
    nan: Array
    """Rows that hold a NaN."""
    finite: bool
    peak: Array
    """Largest magnitude of each row."""


_NONE = 4096
_SCALES_ABOVE = 8
"""An E2M1 product's exponent and that of its scales differ by no more."""


def matrix(values: Array, least: int) -> Matrix:
    """What sums need to know of values [rows, K]; subnormals have the exponent `least`."""
    nan: Array = np.isnan(values)
    clean = np.where(nan, 0.0, values)
    mantissa, exponent = np.frexp(clean)
    zero = clean == 0
    # The lowest set bit of a float64's 53-bit significand.
    whole = np.abs(np.where(np.isfinite(mantissa), mantissa, 0.0) * 2.0**53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    last = np.where(zero, _NONE, exponent - 53 + lowest)
    largest = np.where(zero, -_NONE, np.maximum(exponent - 1, least))
    rows_nan: Array = np.any(nan, axis=1)
    finite, peak = bool(np.isfinite(clean).all()), np.abs(clean).max(axis=1)
    return Matrix(clean, largest.max(axis=1), last.min(axis=1), rows_nan, finite, peak)


@functools.lru_cache(maxsize=1024)
def _decoded(raw: bytes, rows: int, kind: str) -> Matrix:
    """An operand from its rows' bytes. Queries come again and again, so they are kept."""
    return matrix(*decode(raw, rows, kind))


@dataclass(frozen=True)
class Whole:
    """Sums so far are whole multiples, at most `most`, of 2^(rows[i] + columns[j])."""

    rows: Array | int = _NONE
    columns: Array | int = _NONE
    most: float = 0.0

    def with_products(self, a: Matrix, b: Matrix, model: FusedTruncating) -> Whole | None:
        """After another product; None where its sums may need more bits than the unit keeps.

        Then no term is cut, nor is the sum, and it is what float64 says.
        """
        if not (a.finite and b.finite):
            return None
        rows, columns = np.minimum(self.rows, a.last), np.minimum(self.columns, b.last)
        least, largest = (-24, 15) if isinstance(model, HalfSums) else (-100, 100)
        if int(rows.min()) + int(columns.min()) < least:
            return None
        shift = int(np.max(self.rows - rows)) + int(np.max(self.columns - columns))
        before = math.ldexp(self.most, min(shift, 100)) if self.most else 0.0
        scaled = [np.ldexp(x.peak, -y).max() for x, y in ((a, rows), (b, columns))]
        most = before + a.values.shape[1] * float(scaled[0] * scaled[1])
        units = _highest(rows) + _highest(columns)
        fits = most < 2.0 ** (_kept(model) + 1) and units + math.frexp(most)[1] <= largest
        return Whole(rows, columns, most) if fits else None


def _highest(exponents: Array) -> int:
    """Of rows that are not zero."""
    return int(np.max(exponents, where=exponents < _NONE, initial=-_NONE))


def _kept(model: FusedTruncating) -> int:
    """Bits of a sum behind the leading one."""
    return 10 if isinstance(model, HalfSums) else min(model.bits, 23)


_ONE_THREAD = 1 << 18
"""Multiplications of a product that BLAS does not share out over threads, which take longer to
begin than such a product does."""


def _times(a: Array, b: Array) -> Array:
    """a b^T."""
    rows = max(_ONE_THREAD // b.size, 1)
    if len(a) <= rows:
        return np.asarray(a @ b.T)
    total = np.empty((len(a), len(b)))
    for first in range(0, len(a), rows):
        np.matmul(a[first : first + rows], b.T, out=total[first : first + rows])
    return total


def plain(a: Matrix, b: Matrix, start: Array | None) -> Array:
    """a b^T + start where nothing is rounded."""
    total = _times(a.values, b.values)
    if start is not None:
        total += start
    return with_nan(total, a, b)


def multiply(a: Matrix, b: Matrix, start: Array | None, kind: str) -> Array:
    """a b^T + start, float64 [rows of a, rows of b], as the tensor unit sums it.

    `kind` is the name of a `mqa.emulator.units.Form`.
    """
    model = FORMS[kind].model
    if model is None:
        total = a.values @ b.values.T
        return wrap(total if start is None else total + start, saturates=FORMS[kind].saturates)
    return summed(a, b, start, model)


def summed(
    a: Matrix,
    b: Matrix,
    start: Array | None,
    model: FusedTruncating,
    dots: Callable[[Array, Array, Array | None], Array] | None = None,
) -> Array:
    """a b^T + start as a model of floats says; `dots` forms sums that are not exact, if another
    function does than the model's."""
    total = exact(a, b, start, model)
    if total is None:
        total = (dots or model.dots)(a.values, b.values, start)
    return with_nan(total, a, b)


def with_nan(total: Array, a: Matrix, b: Matrix) -> Array:
    if a.nan.any():
        total[a.nan] = np.nan
    if b.nan.any():
        total[:, b.nan] = np.nan
    return total


def exact(a: Matrix, b: Matrix, start: Array | None, model: FusedTruncating) -> Array | None:
    """The sums if no term loses a bit and none is subnormal or infinite, else None."""
    if not (a.finite and b.finite):
        return None
    largest = a.largest[:, None] + b.largest
    last = a.last[:, None] + b.last
    product = _times(a.values, b.values)
    if start is not None:
        size = np.abs(start)
        # A sum so far has at most 24 bits: what it is a multiple of follows from its own value.
        units = np.ldexp(1.0, np.where(last < _NONE // 2, np.maximum(last, -1000), -1000))
        if np.count_nonzero(np.fmod(start, units)) or not np.isfinite(size).all():
            return None
        largest = np.maximum(largest, np.frexp(size)[1] - 1)
        product = product + start
    used = last < _NONE // 2
    # Exponents of block scales may be above those of the terms.
    bits = model.bits - _SCALES_ABOVE if isinstance(model, GroupedTruncating) else model.bits
    if np.count_nonzero(used & ((largest - last > bits) | (last < -100) | (largest > 100))):
        return None
    if isinstance(model, HalfSums):
        return round_half(product)
    kept = _kept(model)
    mask = np.int64(-1) << np.int64(52 - kept)
    return (product.view(np.int64) & mask).view(np.float64) + 0.0


class Product(Operation):
    """One wgmma.mma_async of a warpgroup. It is there when all four warps came and it completed."""

    def __init__(
        self, cta: Cta, line: int, form: Form, columns: int, before: Product | None
    ) -> None:
        super().__init__(f"wgmma at PTX line {line}", self._compute)
        self.cta, self.line, self.form, self.columns = cta, line, form, columns
        self.key: tuple[int, ...] = ()
        self.joined = 0
        self.a_chunks: Array | None = None
        self.b_chunks: Array = np.zeros((0, 2), np.int64)
        self.across = False, False
        """Whether the rows' dimension of A, and of B, is the contiguous one."""
        self.words: list[Array] = []
        self.a_registers: list[Array] = [np.zeros((0, 0), np.uint8)] * GROUP_WARPS
        self.a_held: list[list[tuple[Register, Any]]] = [[] for _ in range(GROUP_WARPS)]
        """Of each warp: registers of A, and what they held."""
        self.signs = 1
        self.starts: list[list[Array] | None] = [None] * GROUP_WARPS
        self.chained: Product | None = None
        """The product whose result is the accumulator, while registers own none."""
        self.pending: list[list[Pending]] = [[] for _ in range(GROUP_WARPS)]
        self.result: Array | None = None
        self.whole: Whole | None = None
        self.taint: Array | None = None
        """Sums with elements that were never written, [rows, columns]."""
        self.origin = ""
        self.after = [before] if before is not None and not before.done else []

    def eligible(self) -> bool:
        return self.joined == GROUP_WARPS and super().eligible()

    def begin(self, a: int | None, b: int) -> None:
        """Take the operands in shared memory."""
        shared = self.cta.shared
        if a is not None:
            self.a_chunks = self._place(a, ROWS, across=self.across[0])
            self.words.append(words_of(self.a_chunks))
        self.b_chunks = self._place(b, self.columns, across=self.across[1])
        self.words.append(words_of(self.b_chunks))
        for words in self.words:
            shared.acquire(words, self.name, writes=False, poison=True)
        self.bytes = 4 * sum(len(words) for words in self.words)
        self.address = shared.start + int(self.b_chunks.min())

    def order(self, view: View | None) -> None:
        """All four warps came, and `view` has seen what they have."""
        if view is not None:
            for words in self.words:
                self.cta.shared.order(words, view, view.party, self.time, self.name)

    def _place(self, descriptor: int, rows: int, *, across: bool) -> Array:
        chunks = (chunks_across if across else chunks_of)(descriptor, rows)
        shared = self.cta.shared
        ends = np.array([chunks.min(), chunks.max() + 15])
        shared.check(ends, 1, "operand of wgmma")
        return chunks - shared.start

    def _read(self, chunks: Array, rows: int, kind: str, *, across: bool) -> Matrix:
        raw = self.cta.shared.data.view("c16")[chunks >> 4]
        if across:
            raw = np.ascontiguousarray(raw.view(np.uint16).T)
        return _decoded(raw.tobytes(), rows, kind)

    def _compute(self) -> None:
        shared, form = self.cta.shared, self.form
        if self.a_chunks is not None:
            a = self._read(self.a_chunks, ROWS, form.a, across=self.across[0])
        else:
            a = _decoded(b"".join(x.tobytes() for x in self.a_registers), ROWS, form.a)
        b = self._read(self.b_chunks, self.columns, form.b, across=self.across[1])
        if shared.checks.any:
            self._look_for_unwritten()
        for words in self.words:
            shared.release(words, writes=False)
        if self.signs < 0:
            a = dataclasses.replace(a, values=-a.values)
        start = self._start()
        before = Whole() if start is None else self.chained.whole if self.chained else None
        self.whole = None
        if before is not None and form.model is not None:
            self.whole = before.with_products(a, b, form.model)
        if self.whole is not None:
            self.result = plain(a, b, start)
        else:
            self.result = multiply(a, b, start, form.name)
        self.chained = None

    def _look_for_unwritten(self) -> None:
        if self.chained is not None and self.chained.taint is not None:
            self.mark(self.chained.taint, self.chained.origin)
        shared = self.cta.shared
        for operand, chunks in enumerate((self.a_chunks, self.b_chunks)):
            if chunks is None:
                continue
            bad = shared.unwritten(chunks.ravel() + shared.start, 16)
            if bad is not None:
                parts = shared.written.data.reshape(-1, 16)[chunks >> 4] == 0
                if self.across[operand]:  # a chunk has one element of each of 8 rows
                    which: Array = np.any(parts.reshape(*chunks.shape, 8, -1), axis=(0, 3)).ravel()
                else:
                    which = np.any(parts, axis=(1, 2))
                place = int(chunks.ravel()[bad][0]) + shared.start
                origin = f"{shared.told(place)}, read by {self.name}"
                self.mark(which[:, None] if operand == 0 else which[None, :], origin)

    def mark(self, sums: Array, origin: str) -> None:
        """These sums have elements that were never written."""
        if self.taint is None:
            self.taint, self.origin = np.zeros((ROWS, self.columns), bool), origin
        self.taint |= sums

    def start_with(self, warp: int, held: list[Taint | None]) -> None:
        """Accumulator registers of a warp hold what was never written."""
        row, column = fragment(self.columns)
        several = self.form.sums_of_register
        for i, taint in enumerate(held):
            if taint is not None:
                part = slice(i * several, (i + 1) * several)
                sums = np.zeros((ROWS, self.columns), bool)
                sums[row[part] + 16 * warp, column[part]] = taint.lanes
                self.mark(sums, taint.origin)

    def _start(self) -> Array | None:
        if self.chained is not None:
            return self.chained.result
        if self.starts[0] is None:
            return None
        total = np.zeros((ROWS, self.columns))
        row, column = fragment(self.columns)
        for i, registers in enumerate(self.starts):
            if registers is not None:
                total[row + 16 * i, column] = self.form.sums_of(np.stack(registers))
        return total

    def registers(self, warp: int) -> list[Array]:
        """The result as a warp's accumulator registers."""
        assert self.result is not None
        row, column = fragment(self.columns)
        return list(self.form.registers_of(self.result[row + 16 * warp, column]))

    def settle(self, warp: Warp, pending: Pending) -> Wait | None:
        """Give one of a warp's registers its value before the warp waited for it."""
        if not self.done:
            return ProductsWait([self], 0)
        member = warp.index % GROUP_WARPS
        value = self.registers(member)[self.pending[member].index(pending)]
        pending.settle(warp.registers, value)
        return None

    def held(self, warp: int) -> Array | None:
        """Which of them have elements that were never written, [registers, 32], if any."""
        if self.taint is None:
            return None
        row, column = fragment(self.columns)
        sums = self.taint[row + 16 * warp, column]
        found: Array = np.any(sums.reshape(-1, self.form.sums_of_register, 32), axis=1)
        return found


@functools.cache
def fragment(columns: int) -> tuple[Array, Array]:
    """Row in a warp's 16 and column of each accumulator register of each lane, [N / 2, 32]."""
    register, lane = np.arange(columns // 2)[:, None], np.arange(32)
    row = lane // 4 + 8 * (register >> 1 & 1)
    column = 8 * (register // 4) + 2 * (lane % 4) + (register & 1)
    return row, column


@functools.cache
def _fragment_a() -> tuple[Array, Array]:
    """Row and byte along K of each byte of the four registers of A, [4, 32, 4]."""
    register, lane = np.arange(4)[:, None, None], np.arange(32)[:, None]
    byte = np.arange(4)
    row = lane // 4 + 8 * (register & 1)
    column = 4 * (lane % 4) + byte + 16 * (register >> 1)
    # Two bfloat16 or four E4M3 values: the 4 bytes of a register lie side by side in both.
    return row, column


class Warpgroup:
    """The products of four warps."""

    def __init__(self, order: Order | None) -> None:
        self.view = View(order) if order is not None else None
        self.products: list[Product] = []
        self.issued = [0] * GROUP_WARPS

    def product(self, warp: Warp, line: int, form: Form, columns: int) -> Product:
        """The one that this warp issues now, which another warp may have begun."""
        member = warp.index % GROUP_WARPS
        place = self.issued[member]
        self.issued[member] += 1
        if place == len(self.products):
            before = self.products[-1] if self.products else None
            self.products.append(Product(warp.cta, line, form, columns, before))
            self.products[-1].time = place + 1
        found = self.products[place]
        if found.line != line:
            raise Finding(
                Kind.DIVERGENCE,
                f"warp {warp.index} is at the wgmma of PTX line {line}, others of its warpgroup "
                f"at that of line {found.line}",
            )
        return found


def _group(warp: Warp) -> Warpgroup:
    groups = warp.cta.products
    number = warp.index // GROUP_WARPS
    if number not in groups:
        groups[number] = Warpgroup(warp.cta.cluster.order)
    found: Warpgroup = groups[number]
    return found


_SHAPE = re.compile(r"m64n(\d+)k(\d+)\Z")


def _form(at: Instruction) -> tuple[Form, int]:
    """Types and columns of a product."""
    shape = _SHAPE.match(at.parts[4]) if len(at.parts) > 4 else None
    form = OPCODES.get(".".join(at.parts[5:]))
    if shape is None or form is None:
        fail(at, f"these types are not modelled (modelled: {', '.join(OPCODES)})")
    columns = int(shape[1])
    legal = 8 <= columns <= 256 and columns % form.column_step(columns) == 0
    if int(shape[2]) != form.depth or not legal:
        fail(at, f"shape {at.parts[4]} is none of {form.name}")
    return form, columns


@effect("wgmma.mma_async.sync.aligned", carries=(1,))
def wgmma_mma_async(b: Binder, at: Instruction) -> Effect:
    form, columns = _form(at)
    if len(at.operands) < 4:
        fail(at, f"expected at least 4 operands, got {len(at.operands)}")
    d, a, second, scale, *rest = at.operands
    count = columns // (4 if form.sums == "f16" else 2)
    if not isinstance(d, Vector) or len(d.parts) != count:
        fail(at, f"expected {count} registers of the accumulator")
    slots = results_of(b, d.parts, at)
    if any(b.types[place].itemsize != 4 for place, _ in slots):
        fail(at, "registers of the accumulator have to have 32 bits")
    signs, across = _trailing(rest, at, form, from_registers=isinstance(a, Vector))
    source = _a_source(b, a, at)
    parts = a.parts if isinstance(a, Vector) else ()
    held_parts = [part for part in parts if isinstance(part, Register)]
    descriptor = values(b, second, "b64", at)
    adds = values(b, scale, "pred", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        if not warp.fenced_products and warp.cta.machine.checks.look_for(Kind.PRODUCT_FENCE):
            raise Finding(Kind.PRODUCT_FENCE, f"by warp {warp.index}")
        group = _group(warp)
        product = group.product(warp, at.line, form, columns)
        member = warp.index % GROUP_WARPS
        a_value, b_value = source(warp), int(descriptor(warp)[0])
        from_shared = isinstance(a_value, int)
        key = (b_value, a_value if from_shared else -1, bool(adds(warp)[0]))
        if product.joined == 0:
            product.key, product.signs, product.across = key, signs, across
            product.begin(a_value if from_shared else None, b_value)
            warp.cta.machine.begin(product)
        elif product.key != key:
            raise Finding(Kind.DIVERGENCE, "warps of a warpgroup give wgmma different operands")
        if not from_shared:
            product.a_registers[member] = a_value
            product.a_held[member] = [(part, warp.registers[part.index]) for part in held_parts]
            if warp.tainted:
                _mark_rows(warp, product, a)
        elif warp.tainted:
            decides(warp, tuple(x for x in (a,) if isinstance(x, Register)), lanes(FULL))
        _own(warp, product, slots, adds=key[2])
        product.joined += 1
        if group.view is not None and warp.view is not None:
            group.view.acquire(warp.view.seen)
        if product.joined == GROUP_WARPS:
            product.order(group.view)
        warp.open_products.append(product)
        if warp.cta.machine.eager and product.eligible():
            warp.cta.machine.operations.remove(product)
            product.complete()
        return None

    return run


def _trailing(
    rest: list[Operand], at: Instruction, form: Form, *, from_registers: bool
) -> tuple[int, tuple[bool, bool]]:
    """Sign of the products, and whether the rows' dimension of A and B is the contiguous one."""
    numbers = [number(operand, at) for operand in rest]
    signs = 0 if form.model is None else 2
    majors = 2 - from_registers if form.transposes else 0
    legal = all(x in (1, -1) for x in numbers[:signs]) and all(x in (0, 1) for x in numbers[signs:])
    if len(numbers) != signs + majors or not legal:
        fail(at, f"trailing operands {numbers}, expected {signs} signs and {majors} majors")
    given = [bool(x) for x in numbers[signs:]]
    across = ([False] * (2 - len(given)) + given)[:2]
    return math.prod(numbers[:signs]), (across[0], across[1])


def _a_source(b: Binder, a: Operand, at: Instruction) -> Any:
    """Reader of A: a descriptor, or the 16 rows of a warp as bytes."""
    if not isinstance(a, Vector):
        descriptor = values(b, a, "b64", at)
        return lambda warp: int(descriptor(warp)[0])
    parts = [values(b, part, "b32", at) for part in a.parts]
    if len(parts) != 4:
        fail(at, f"expected 4 registers of A, got {len(parts)}")

    def read(warp: Warp) -> Array:
        rows = np.zeros((16, _K_BYTES), np.uint8)
        row, column = _fragment_a()
        given = np.stack([part(warp) for part in parts]).view(np.uint8).reshape(4, 32, 4)
        rows[row, column] = given
        return rows

    return read


def _mark_rows(warp: Warp, product: Product, a: Operand) -> None:
    """Rows of A in registers that hold what was never written."""
    assert isinstance(a, Vector)
    row, _ = _fragment_a()
    for i, part in enumerate(a.parts):
        held = warp.tainted.get(part.index) if isinstance(part, Register) else None
        if held is not None:
            rows = np.zeros((ROWS, 1), bool)
            rows[row[i, held.lanes, 0] + 16 * (warp.index % GROUP_WARPS)] = True
            product.mark(rows, held.origin)


def _own(warp: Warp, product: Product, slots: list[Slot], *, adds: bool) -> None:
    """Make a warp's accumulator registers the product's, and take what they hold as its start."""
    member = warp.index % GROUP_WARPS
    held = [warp.registers[place] for place, _ in slots]
    if isinstance(held[0], Pending) and adds:
        owner = held[0].operation
        if not isinstance(owner, Product) or not _same(held, owner.pending[member]):
            raise Finding(Kind.PENDING_REGISTER, f"the accumulator belongs to {owner}")
        if owner.form.sums != product.form.sums:
            raise Finding(Kind.PENDING_REGISTER, f"{owner} has sums of another type")
        product.chained, product.pending[member] = owner, held
        for pending in held:
            pending.operation = product
        return
    if adds:
        if any(isinstance(value, Pending) for value in held):
            raise Finding(Kind.PENDING_REGISTER, "a part of the accumulator belongs to a product")
        product.starts[member] = held
        if warp.tainted:
            product.start_with(member, [warp.tainted.get(place) for place, _ in slots])
    product.pending[member] = [Pending(product, slot) for slot in slots]
    for (place, _), pending in zip(slots, product.pending[member], strict=True):
        warp.registers[place] = pending
        if warp.tainted:
            warp.tainted.pop(place, None)


def results_of(b: Binder, parts: Sequence[Operand], at: Instruction) -> list[Slot]:
    """Where results of 32 bits go, and what makes each the register's."""
    places = (b.dest(part, "b32", at)[0] for part in parts)
    return [(place, _as_declared(b.types[place])) for place in places]


@functools.cache
def _as_declared(kind: Any) -> Any:
    """What makes a result, kept as 32 bits, a value of the register."""
    return None if kind == np.dtype(np.uint32) else lambda value: value.view(kind)


def _same(held: list[Any], owned: list[Pending]) -> bool:
    return held == owned  # of lists, whose elements are the same objects or differ


@effect("wgmma.fence.sync.aligned")
def wgmma_fence(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        warp.fenced_products = wait is None
        return wait

    return run


@effect("wgmma.commit_group.sync.aligned")
def wgmma_commit_group(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is None:
            warp.product_groups.append(warp.open_products)
            warp.open_products = []
        return wait

    return run


class ProductsWait(OperationsWait):
    """When they are there, the instruction is executed again and gives the registers back."""

    retry = True
    label = "wgmma"


@effect("wgmma.wait_group.sync.aligned")
def wgmma_wait_group(b: Binder, at: Instruction) -> Effect:
    if not isinstance(at.operands[0], Immediate):
        fail(at, "expected a number of groups")
    newest = at.operands[0].value

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        groups = warp.product_groups
        over = groups[: len(groups) - newest] if newest else groups
        waited = [product for group in over for product in group]
        if not all(product.done for product in waited):
            return ProductsWait(waited, 0)
        view = _group(warp).view
        if view is not None:
            OperationsWait(waited, view.party).over(warp)
        for product in waited:
            if warp.cta.machine.checks.any:
                _check_operand(warp, product)
            _give_back(warp, product)
        warp.fenced_products = warp.fenced_products and newest > 0
        del groups[: len(over)]
        return None

    return run


def _give_back(warp: Warp, product: Product) -> None:
    """The result is in the registers, and in those that they were moved to."""
    member = warp.index % GROUP_WARPS
    if not product.pending[member] or product.pending[member][0].operation is not product:
        return  # a later product adds to it
    held = product.held(member)
    taints = None if held is None else [Taint(one, product.origin) for one in held]
    give_back(warp, product, product.pending[member], product.registers(member), taints)
    product.pending[member] = []


def give_back(
    warp: Warp,
    owner: Operation,
    owned: list[Pending],
    registers: list[Array],
    taints: list[Taint] | None,
) -> None:
    """Registers of an operation that is done get their values, and so do those moved from them."""
    if warp.cta.machine.checks.any:
        _check_kept(warp, owner, owned)
    for i, (pending, value) in enumerate(zip(owned, registers, strict=True)):
        if taints is not None:
            for place in pending.holders(warp.registers):
                put(warp, place, united([warp.tainted.get(place), taints[i]]), lanes(FULL))
        pending.settle(warp.registers, value)


def _check_kept(warp: Warp, owner: Operation, owned: list[Pending]) -> None:
    """Raise a finding if a result went nowhere: its register was written before the wait."""
    for pending in owned:
        place = pending.places[0][0]
        if warp.registers[place].__class__ is not np.ndarray or pending.derived:
            continue
        if not any(warp.registers[other] is pending for other, _ in pending.places):
            name = warp.program.entry.registers[place].name
            raise Finding(
                Kind.PENDING_REGISTER,
                f"{name} belongs to {owner}, and was written before the wait for it",
            )


def _check_operand(warp: Warp, product: Product) -> None:
    """Raise a finding if registers of A do not hold what they held when it was issued."""
    for register, value in product.a_held[warp.index % GROUP_WARPS]:
        if warp.registers[register.index] is not value:
            raise Finding(
                Kind.PENDING_REGISTER,
                f"{register.name} holds A of {product}, and was written before the wait for it",
            )
