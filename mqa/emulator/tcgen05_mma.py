"""Matrix products of Blackwell: operands in shared and tensor memory, block scales, pairs of CTAs.

A product reads and writes when it completes. The rows of A and D, and the columns of B, are shared
out over a pair's CTAs; each has its own scales of its rows of A, and of all columns of B.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mqa.emulator.alu import Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.parser import Address, Immediate, Instruction, Operand, Vector
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.memory import words_of
from mqa.emulator.tcgen05 import ctas_of, group_of, issue
from mqa.emulator.tcgen05_units import (
    DATA_BYTES,
    cells_of,
    multiply,
    operand,
    scaled_operand,
    sums_of,
)
from mqa.emulator.tensor_layouts import (
    BLOCK_SCALED,
    LANES,
    QUARTER,
    InstructionDescriptor,
    chunks_across,
    chunks_of,
    instruction_descriptor,
    places_of_scales,
    places_of_sums,
    scales_of,
)
from mqa.emulator.tensor_memory import (
    ALL_LANES,
    HALF,
    Region,
    TensorMemory,
    TensorOperation,
    place_of,
    tensor_memory,
)
from mqa.emulator.tensor_order import Issuer, Piece, issuer_of
from mqa.emulator.warp import lanes
from mqa.emulator.wgmma import Matrix, Whole

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta
    from mqa.emulator.memory import Shared
    from mqa.emulator.warp import Warp

_ROW_BYTES = 32
"""Of an operand's row that one product takes."""
_ADDRESS = 0x3FFFFFFF
"""Of an address of scales; the two bits above are a scale id, which counts in the descriptor."""
_BLOCKS = {
    ("mxf8f6f4", ""): 32,
    ("mxf8f6f4", "scale_vec::1X"): 32,
    ("mxf8f6f4", "block32"): 32,
    ("mxf4", ""): 32,
    ("mxf4", "scale_vec::2X"): 32,
    ("mxf4", "block32"): 32,
    ("mxf4nvf4", "scale_vec::2X"): 32,
    ("mxf4nvf4", "block32"): 32,
    ("mxf4nvf4", "scale_vec::4X"): 16,
    ("mxf4nvf4", "block16"): 16,
}
"""Elements of a block, by kind and how an instruction spells it."""
_KINDS = ("f16", "tf32", "f8f6f4", "i8", *BLOCK_SCALED)
_COLLECTOR = {f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")}


class Given(NamedTuple):
    """What a product's operands are, of one thread."""

    d: int
    a: int
    """Descriptor, or an address in tensor memory."""
    b: int
    descriptor: int
    adds: bool
    disabled: Array | None
    """Lanes that are not written, of one CTA after the other."""
    shift: int
    """D is divided by 2 to that before the products are added."""
    scales: tuple[int, int] | None


@dataclass
class _Operand:
    """A or B in shared memory of one CTA."""

    shared: Shared
    kind: str
    across: bool
    """Whether the rows' dimension is the contiguous one."""
    chunks: Array
    """Offsets in shared memory."""
    words: Array
    """Index of the 4-byte words of these."""


class _Sums(NamedTuple):
    """Where a CTA's part of D is."""

    lanes: Array
    """Of each element, [rows, columns], and likewise the columns."""
    columns: Array
    part: tuple[Any, Any]
    """Of an array [lanes, columns]: of slices, which are faster, where the lanes are the rows."""
    region: Region


@functools.lru_cache(maxsize=256)
def _sums_at(address: int, rows: int, columns: int, group: int, cta: int) -> _Sums:
    """`rows` are M, of both CTAs in a pair. Raises a finding where they do not fit."""
    row, first = place_of(address)
    which, lane, column = places_of_sums(rows, columns, group)
    mine, shape = which == cta, (rows // group, columns)
    lane, column = lane[mine].reshape(shape) + row, column[mine].reshape(shape) + first
    if int(lane.max()) >= LANES or row % HALF:
        raise Finding(Kind.TENSOR_MEMORY, f"D of {rows} rows begins at lane {row}")
    halves = int(np.bitwise_or.reduce(1 << np.unique(lane // HALF)))
    region = Region(halves, first, int(column.max()) + 1)
    index: tuple[Any, Any] = lane, column
    if rows // group == LANES:
        index = slice(0, LANES), slice(first, region.end)
    return _Sums(lane, column, index, region)


@dataclass
class _Share:
    """A CTA's part of a product."""

    cta: Cta
    memory: TensorMemory
    a: _Operand | None
    b: _Operand
    d: _Sums


class Product(TensorOperation):
    """One tcgen05.mma."""

    def __init__(
        self,
        name: str,
        issuer: Issuer,
        at: InstructionDescriptor,
        given: Given,
        per: int,
        *,
        group: int,
        in_tensor_memory: bool,
    ) -> None:
        piece = Piece("mma", (given.d, at.rows, at.columns, group))
        super().__init__(name, issuer, piece)
        self.at, self.given, self.per, self.group = at, given, per, group
        self.in_tensor_memory = in_tensor_memory
        self.shares: list[_Share] = []
        self.packed = at.kind in ("mxf4", "mxf4nvf4")

    @property
    def rows(self) -> int:
        """Of each CTA."""
        return self.at.rows // self.group

    def begin(self, ctas: list[Cta]) -> list[Array]:
        """Take the operands; the words of shared memory that each CTA's part reads."""
        at, found = self.at, []
        for i, cta in enumerate(ctas):
            memory = tensor_memory(cta)
            b = self._place(
                cta.shared, self.given.b, at.columns // self.group, at.b, across=at.across_b
            )
            a = None
            if not self.in_tensor_memory:
                a = self._place(cta.shared, self.given.a, self.rows, at.a, across=at.across_a)
            d = _sums_at(self.given.d, at.rows, at.columns, self.group, i)
            self.shares.append(_Share(cta, memory, a, b, d))
            self._take_cells(memory, d.region)
            words = [b.words] if a is None else [a.words, b.words]
            found.append(np.concatenate(words))
            for part in words:
                cta.shared.acquire(part, self.name, writes=False, poison=True)
            self.bytes += 4 * sum(len(part) for part in words)
        self.address = ctas[0].shared.start + int(self.shares[0].b.chunks.min())
        return found

    def _take_cells(self, memory: TensorMemory, region: Region) -> None:
        self.takes(memory, region, writes=True)
        if self.in_tensor_memory:
            row, first = place_of(self.given.a)
            if row:
                raise Finding(Kind.TENSOR_MEMORY, f"{self.name}: A begins at lane {row}")
            halves = sum({1 << place // HALF for place in self._lanes_of_a().ravel().tolist()})
            self._reads(memory, Region(halves, first, first + _ROW_BYTES // 4), region, "A")
        if self.given.scales is not None:
            for address, (_, column) in zip(self.given.scales, self._scale_places(), strict=True):
                row, first = place_of(address & _ADDRESS)
                if row:
                    raise Finding(Kind.TENSOR_MEMORY, f"{self.name}: scales begin at lane {row}")
                end = first + int(column[-1]) + 1
                self._reads(memory, Region(ALL_LANES, first, end), region, "scales")

    def _reads(self, memory: TensorMemory, part: Region, d: Region, what: str) -> None:
        """Take cells of an operand, which are none of D."""
        if part.meets(d) and memory.cta.machine.checks.any:
            raise Finding(
                Kind.RACE,
                f"{memory.told(part)}: {what} of {self.name}, which writes D to {d}",
            )
        self.takes(memory, part, writes=False)

    def _scale_places(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Of A's and of B's."""
        parted = self.group == 2 and self.rows < LANES
        return places_of_scales(self.rows), places_of_scales(self.at.columns, parted=parted)

    def _place(
        self, shared: Shared, descriptor: int, rows: int, kind: str, *, across: bool
    ) -> _Operand:
        if across:
            chunks = chunks_across(descriptor, rows, self.at.depth, self._per_chunk(kind, rows))
        else:
            chunks = chunks_of(descriptor, rows, _ROW_BYTES)
        ends = np.array([chunks.min(), chunks.max() + 15])
        shared.check(ends, 1, f"operand of {self.name}")
        chunks = chunks - shared.start
        return _Operand(shared, kind, across, chunks, words_of(chunks))

    def _per_chunk(self, kind: str, rows: int = 0) -> int:
        """Elements of 16 bytes, where the rows' dimension is the contiguous one."""
        sizes = {"f16": 8, "bf16": 8, "e4m3": 16, "e5m2": 16}
        if kind not in sizes:
            raise Finding(
                Kind.DESCRIPTOR, f"{self.name}: operands of {kind} with their rows contiguous"
            )
        if rows % sizes[kind]:
            raise Finding(
                Kind.DESCRIPTOR,
                f"{self.name}: {rows} rows of {kind} with their rows contiguous, expected a "
                f"multiple of {sizes[kind]}",
            )
        return sizes[kind]

    def _lanes_of_a(self) -> Array:
        """In tensor memory, of each row: one, or two with the same where a pair shares 128 rows."""
        row: Array = np.arange(self.rows)[:, None]
        if self.rows == LANES:
            return row
        parted: Array = row % HALF + row // HALF * QUARTER
        return parted if self.group == 1 else np.concatenate([row, row + LANES // 2], axis=1)

    def compute(self) -> None:
        b_raw = b"".join(self._raw(share.b) for share in self.shares)
        b_bad = [self._unwritten(share.b) for share in self.shares]
        for share in self.shares:
            self._compute(share, b_raw, b_bad)
        for share in self.shares:
            for one in (share.a, share.b):
                if one is not None:
                    share.cta.shared.release(one.words, writes=False)
        self.finish()

    def _compute(self, share: _Share, b_raw: bytes, b_bad: list[tuple[Array, str] | None]) -> None:
        """A CTA's part of D."""
        at, given, memory = self.at, self.given, share.memory
        bad = np.zeros(share.d.lanes.shape, bool)
        origins: list[str] = []
        a_raw = self._a_of(share, bad, origins)
        a, b, exponents = self._operands(share, a_raw, b_raw, bad, origins)
        per_cta = at.columns // self.group
        for i, found in enumerate(b_bad):
            if found is not None:
                bad[:, i * per_cta : (i + 1) * per_cta] |= found[0]
                origins.append(found[1])
        start, before = None, Whole() if not given.adds else None
        if given.adds:
            start = sums_of(memory.cells[share.d.part], at.sums)
            if given.shift:
                start = start * 2.0**-given.shift
            else:
                before = memory.wholes.get(self._key, (None, None))[1]
        total, whole = multiply(a, b, start, before, at, exponents)
        self._write(share, cells_of(total, at.sums), bad, origins)
        memory.changed(share.d.region, but=self._key)
        memory.wholes.pop(self._key, None)
        if whole is not None and given.disabled is None:
            memory.wholes[self._key] = share.d.region, whole

    @property
    def _key(self) -> tuple[int, ...]:
        return (*self.piece.accumulator, ("f16", "f32", "s32").index(self.at.sums))

    def _write(self, share: _Share, cells: Array, bad: Array, origins: list[str]) -> None:
        memory, (lane, column, index, _) = share.memory, share.d
        if self.given.disabled is not None:
            first = self.shares.index(share) * LANES
            goes = ~self.given.disabled[first : first + LANES][lane]
            lane, column, cells, bad = (one[goes] for one in (lane, column, cells, bad))
            index = lane, column
        memory.cells[index] = cells
        if not memory.cta.machine.checks.any:
            return
        if not self.given.adds:
            memory.spoiled[index] = 0
        if np.count_nonzero(bad):
            fresh = bad & (memory.spoiled[index] == 0)
            memory.spoil(lane[fresh], column[fresh], f"{origins[0]}, read by {self.name}")

    def _raw(self, one: _Operand) -> bytes:
        raw: Array = one.shared.data.view("c16")[one.chunks >> 4]
        if one.across:
            size = np.uint16 if self._per_chunk(one.kind) == 8 else np.uint8
            raw = np.ascontiguousarray(raw.view(size).T)
        return raw.tobytes()

    def _unwritten(self, one: _Operand) -> tuple[Array, str] | None:
        """Rows of an operand that have elements which were never written, and where."""
        shared = one.shared
        if not shared.checks.any:
            return None
        bad = shared.unwritten(one.chunks.ravel() + shared.start, 16)
        if bad is None:
            return None
        parts = shared.written.data.reshape(-1, 16)[one.chunks >> 4] == 0
        if one.across:  # a chunk has one element of each of several rows
            count = self._per_chunk(one.kind)
            each = parts.reshape(*one.chunks.shape, count, -1)
            which: Array = np.any(each, axis=(0, 3)).ravel()
        else:
            used = 16 if self.packed else DATA_BYTES.get(one.kind, 16)
            which = np.any(parts[:, :, :used], axis=(1, 2))
        if not np.count_nonzero(which):
            return None
        return which, shared.told(int(one.chunks.ravel()[bad][0]) + shared.start)

    def _a_of(self, share: _Share, bad: Array, origins: list[str]) -> bytes:
        """Bytes of the CTA's rows of A."""
        if share.a is not None:
            found = self._unwritten(share.a)
            if found is not None:
                bad |= found[0][:, None]
                origins.append(found[1])
            return self._raw(share.a)
        _, first = place_of(self.given.a)
        lane = self._lanes_of_a()
        rows, columns = lane[:, :1], np.arange(first, first + _ROW_BYTES // 4)
        spoiled = share.memory.spoiled[rows, columns] != 0
        self._check_copies(share.memory, lane, columns)
        if np.count_nonzero(spoiled):
            bad |= np.any(spoiled, axis=1)[:, None]
            i, j = (int(x[0]) for x in np.nonzero(spoiled))
            origins.append(share.memory.origin(int(rows[i, 0]), int(columns[j])))
        return share.memory.cells[rows, columns].tobytes()

    def _check_copies(self, memory: TensorMemory, lane: Array, columns: Array) -> None:
        """Raise a finding where lanes that have to hold the same rows of A do not."""
        if lane.shape[1] == 1 or not memory.cta.machine.checks.any:
            return
        first, second = (memory.cells[lane[:, i : i + 1], columns] for i in (0, 1))
        if np.count_nonzero(first != second):
            raise Finding(
                Kind.TENSOR_MEMORY,
                f"{self.name}: A from column {int(columns[0])} of tensor memory is not the same in "
                "both halves of the lanes",
            )

    def _operands(
        self, share: _Share, a_raw: bytes, b_raw: bytes, bad: Array, origins: list[str]
    ) -> tuple[Matrix, Matrix, tuple[Array, Array] | None]:
        at, scales = self.at, self.given.scales
        if scales is None:
            a = operand(a_raw, self.rows, at.a, packed=self.packed)
            b = operand(b_raw, at.columns, at.b, packed=self.packed)
            return self._signed(a), b, None
        of_a, of_b = self._scale_places()
        a_codes, a_bad = self._scales(share.memory, scales[0], of_a, at.a_id, origins)
        b_codes, b_bad = self._scales(share.memory, scales[1], of_b, at.b_id, origins)
        bad |= a_bad[:, None] | b_bad
        a, a_exponents = scaled_operand(
            a_raw, self.rows, at.a, a_codes, at.scale, packed=self.packed
        )
        b, b_exponents = scaled_operand(
            b_raw, at.columns, at.b, b_codes, at.scale, packed=self.packed
        )
        return self._signed(a), b, (a_exponents, b_exponents)

    def _signed(self, a: Matrix) -> Matrix:
        if self.at.negate_a == self.at.negate_b:
            return a
        return dataclasses.replace(a, values=-a.values)

    def _scales(
        self,
        memory: TensorMemory,
        address: int,
        where: tuple[Array, Array],
        id: int,
        origins: list[str],
    ) -> tuple[bytes, Array]:
        """Codes of the scales of each row, and rows whose scales were never written."""
        _, first = place_of(address & _ADDRESS)
        lane, column = where
        picked = list(scales_of(self.at.kind, self.per, id))
        if picked[-1] > 3:
            raise Finding(
                Kind.DESCRIPTOR, f"{self.name} uses scales {picked} of words that have four"
            )
        places = lane, (column + first)[:, None]
        words = memory.cells[lane[:, 0], column + first]
        spoiled = memory.spoiled[places] != 0
        if memory.cta.machine.checks.any:
            if np.count_nonzero(spoiled):
                i, j = (int(x[0]) for x in np.nonzero(spoiled))
                origins.append(memory.origin(int(places[0][i, j]), int(column[i] + first)))
            elif np.count_nonzero(memory.cells[places] != words[:, None]):
                raise Finding(
                    Kind.TENSOR_MEMORY,
                    f"{self.name}: scales from column {first} of tensor memory are not the same in "
                    f"each quarter of the lanes that has them",
                )
        codes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4)[:, picked]
        return codes.tobytes(), np.any(spoiled, axis=1)


@effect("tcgen05.mma")
def tcgen05_mma(b: Binder, at: Instruction) -> Effect:
    group, kind, per = _form(at)
    read = _reader(b, at, kind, group)
    in_tensor_memory = isinstance(at.operands[1], Address)
    name = f"tcgen05.mma of kind::{kind} at PTX line {at.line}"

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            given = read(warp, lane)
            decoded = instruction_descriptor(given.descriptor, kind, group)
            if in_tensor_memory and decoded.a in DATA_BYTES and kind in ("f8f6f4", "mxf8f6f4"):
                raise Finding(
                    Kind.DESCRIPTOR, f"{name}: A of {decoded.a} in tensor memory is not modelled"
                )
            product = Product(
                name,
                issuer_of(warp),
                decoded,
                given,
                per,
                group=group,
                in_tensor_memory=in_tensor_memory,
            )
            words = product.begin(ctas_of(warp, group))
            issue(product, product.issuer, lane, words)

    return run


def _form(at: Instruction) -> tuple[int, str, int]:
    """CTAs, kind, and elements of a block of scales, 0 without."""
    rest = list(at.parts[2:])
    for part in ("ws", "sp"):
        if part in rest:
            fail(at, f".{part} is not modelled")
    kind = next((part[6:] for part in rest if part.startswith("kind::")), "")
    if kind not in _KINDS:
        fail(at, f"kind::{kind} is not modelled (modelled: {', '.join(_KINDS)})")
    group = group_of(at)
    rest = [
        part
        for part in rest
        if part not in (f"cta_group::{group}", f"kind::{kind}") and part not in _COLLECTOR
    ]
    if kind not in BLOCK_SCALED:
        if rest:
            fail(at, f"modifier .{rest[0]} is not modelled")
        return group, kind, 0
    if "block_scale" not in rest:
        fail(at, "expected .block_scale")
    rest.remove("block_scale")
    per = _BLOCKS.get((kind, ".".join(rest)))
    if per is None:
        fail(at, f"blocks of scales {rest} are none of kind::{kind}")
    return group, kind, per


Reader = Callable[["Warp", int], Given]


def _reader(b: Binder, at: Instruction, kind: str, group: int) -> Reader:
    """Of a thread's operands."""
    d, first, second, descriptor, *rest = at.operands
    where = addresses(b, d, at, "u32")
    if isinstance(first, Address):
        a = addresses(b, first, at, "u32")
    else:
        a = values(b, first, "b64", at)
    b_descriptor, bits = values(b, second, "b64", at), values(b, descriptor, "b32", at)
    scales: list[Any] = []
    if kind in BLOCK_SCALED:
        scales = [addresses(b, place, at, "u32") for place in rest[:2]]
        rest = rest[2:]
    disabled, adds, shift = _trailing(b, at, rest, kind, group)

    def read(warp: Warp, lane: int) -> Given:
        off = None
        if disabled:
            off = np.concatenate([lanes(int(one(warp)[lane])) for one in disabled])
            off = off if np.count_nonzero(off) else None
        return Given(
            int(where(warp)[lane]),
            int(a(warp)[lane]),
            int(b_descriptor(warp)[lane]),
            int(bits(warp)[lane]),
            bool(adds(warp)[lane]),
            off,
            shift,
            (int(scales[0](warp)[lane]), int(scales[1](warp)[lane])) if scales else None,
        )

    return read


def _trailing(
    b: Binder, at: Instruction, rest: list[Operand], kind: str, group: int
) -> tuple[list[Any], Any, int]:
    """Readers of the lanes that are not written and of whether D is added, and D's shift."""
    disabled: list[Any] = []
    if rest and isinstance(rest[0], Vector) and kind not in BLOCK_SCALED:
        parts = rest.pop(0).parts  # type: ignore[union-attr]
        if len(parts) != 4 * group:
            fail(at, f"{len(parts)} words of lanes that are not written, expected {4 * group}")
        disabled = [values(b, part, "b32", at) for part in parts]
    if not rest:
        fail(at, "expected a predicate: whether D is added")
    adds, shift = values(b, rest.pop(0), "pred", at), 0
    if rest and kind in ("f16", "tf32") and isinstance(rest[0], Immediate):
        shift = number(rest.pop(0), at)
        if not 0 <= shift <= 15:
            fail(at, f"D is divided by 2 to {shift}, expected 0 to 15")
    if rest:
        fail(at, f"{len(at.operands)} operands are too many")
    return disabled, adds, shift
