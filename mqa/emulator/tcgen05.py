"""Instructions of tensor memory: allocation, loads, stores, copies into it, commits and fences.

What they do to cells and who may follow whom is in `mqa.emulator.tensor_memory` and `tensor_order`;
products are in `tcgen05_mma`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator import memory_access, sync
from mqa.emulator.alu import Binder, Pending, fail
from mqa.emulator.engines import OperationsWait
from mqa.emulator.floats import Array
from mqa.emulator.machine import Operation
from mqa.emulator.memory import WINDOWS, ranked, words_of
from mqa.emulator.order import Seen, merge
from mqa.emulator.parser import Instruction, Operand, Register, Vector
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.taint import Taint
from mqa.emulator.tensor_layouts import (
    COLUMNS,
    COPIES,
    FRAGMENTS,
    QUARTER,
    chunks_of,
    fragment,
    lanes_of_copy,
)
from mqa.emulator.tensor_memory import (
    ALL_LANES,
    HALF,
    Region,
    TensorMemory,
    TensorOperation,
    place_of,
    quarter_of,
    tensor_memory,
)
from mqa.emulator.tensor_order import Issuer, Piece, issuer_of
from mqa.emulator.warp import FULL, Wait, lanes
from mqa.emulator.wgmma import give_back, results_of

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta
    from mqa.emulator.warp import Warp


def group_of(at: Instruction) -> int:
    """1 or 2 CTAs."""
    found = [part for part in at.parts if part in ("cta_group::1", "cta_group::2")]
    if len(found) != 1:
        fail(at, "expected .cta_group::1 or .cta_group::2")
    return int(found[0][-1])


def expect_parts(at: Instruction, *known: str) -> None:
    """Modifiers behind the name have to be these, but for .cta_group."""
    for part in at.parts[2:]:
        if part not in known and not part.startswith("cta_group"):
            fail(at, f"modifier .{part} is not modelled")


def use_group(warp: Warp, group: int) -> None:
    """Raise a finding unless all instructions of the kernel are for as many CTAs."""
    machine = warp.cta.machine
    machine.cta_group = machine.cta_group or group
    if machine.cta_group != group:
        raise Finding(
            Kind.TENSOR_MEMORY,
            f".cta_group::{group}, and an instruction before had .cta_group::{machine.cta_group}",
        )


def ctas_of(warp: Warp, group: int) -> list[Cta]:
    """The warp's CTA, or its pair, the even one first."""
    use_group(warp, group)
    if group == 1:
        return [warp.cta]
    if len(warp.cta.cluster) % 2:
        raise Finding(
            Kind.TENSOR_MEMORY,
            f".cta_group::2 in a cluster of {len(warp.cta.cluster)} CTAs, expected an even number",
        )
    even = warp.cta.rank & ~1
    return [warp.cta if rank == warp.cta.rank else warp.cta.peer(rank) for rank in (even, even + 1)]


class RoomWait(Wait):
    """Until there are columns, in both CTAs of a pair, and both ask for them."""

    retry = True
    label = "columns of tensor memory"

    def __init__(self, memories: list[TensorMemory], warp: Warp, columns: int) -> None:
        self.memories, self.warp, self.columns = memories, warp, columns

    def ready(self) -> bool:
        own = tensor_memory(self.warp.cta)
        if self.warp.index in own.granted:
            return True
        return _room(self.memories, self.columns) is not None and all(
            memory is own or self.columns in memory.asked.values() for memory in self.memories
        )

    def __str__(self) -> str:
        held = "; ".join(
            f"CTA {memory.cta.index} has {int(memory.live.sum())} allocated"
            for memory in self.memories
        )
        both = " by both CTAs of the pair" if len(self.memories) > 1 else ""
        return f"{self.columns} columns of tensor memory{both}: {held}"


def _room(memories: list[TensorMemory], columns: int) -> int | None:
    """First of so many columns that are free in each; None where there is no room.

    They lie as far up as their number allows, so that the first address is mostly not 0.
    """
    for first in range(COLUMNS - columns, -1, -columns):
        if not any(memory.live[first : first + columns].any() for memory in memories):
            return first
    return None


def _allocate(memories: list[TensorMemory], warp: Warp, columns: int) -> int | None:
    """First of the columns that a warp gets now; None while it has to wait."""
    own = tensor_memory(warp.cta)
    own.asked[warp.index] = columns
    others = [memory for memory in memories if memory is not own]
    askers = [
        (memory, index)
        for memory in others
        for index, asked in memory.asked.items()
        if asked == columns
    ]
    first = _room(memories, columns)
    if first is None or len(askers) < len(others):
        return None
    del own.asked[warp.index]
    for memory in memories:
        memory.allocate(first, columns)
    for memory, index in askers[:1]:
        del memory.asked[index]
        memory.granted[index] = first
    return first


@effect("tcgen05.alloc")
def tcgen05_alloc(b: Binder, at: Instruction) -> Effect:
    expect_parts(at, "sync", "aligned", "shared::cta", "b32")
    group, space = group_of(at), "shared" if "shared::cta" in at.parts else ""
    where = addresses(b, at.operands[0], at, "u32" if space else "u64")
    count = values(b, at.operands[1], "u32", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        columns, own = int(count(warp)[0]), tensor_memory(warp.cta)
        if warp.index in own.granted:  # the pair's other CTA may have ended since
            first: int | None = own.granted.pop(warp.index)
        else:
            memories = [tensor_memory(x) for x in ctas_of(warp, group)]
            own.may_allocate(columns)
            first = _allocate(memories, warp, columns)
        if first is None:
            return RoomWait(memories, warp, columns)
        place = where(warp)[:1]
        if not space and int(place[0]) >> 60 != WINDOWS["shared"] >> 60:
            raise Finding(
                Kind.OUT_OF_BOUNDS,
                f"the address of columns goes to {int(place[0]):#x}, which is not in shared memory",
            )
        memory_access.store(warp, space, place, 4, [np.full(1, first, np.uint32)], FULL)
        return None

    return run


@effect("tcgen05.dealloc")
def tcgen05_dealloc(b: Binder, at: Instruction) -> Effect:
    expect_parts(at, "sync", "aligned", "b32")
    group = group_of(at)
    address, count = (values(b, operand, "b32", at) for operand in at.operands)

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is None:
            use_group(warp, group)
            memory = tensor_memory(warp.cta)
            memory.free(int(address(warp)[0]), int(count(warp)[0]), issuer_of(warp))
        return wait

    return run


@effect("tcgen05.relinquish_alloc_permit")
def tcgen05_relinquish(b: Binder, at: Instruction) -> Effect:
    expect_parts(at, "sync", "aligned")
    group = group_of(at)

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is None:
            use_group(warp, group)
            tensor_memory(warp.cta).relinquished = True
        return wait

    return run


class Load(TensorOperation):
    """One tcgen05.ld of a warp: its registers are there after the wait."""

    def __init__(self, name: str, issuer: Issuer, at: tuple[Array, Array], *, packs: bool) -> None:
        super().__init__(name, issuer, Piece("ld"))
        self.at, self.packs = at, packs
        """Lane and column of each register of each thread; of its low half if it is packed."""
        self.pending: list[Pending] = []
        self.registers: list[Array] = []
        self.taints: list[Taint] | None = None

    def compute(self) -> None:
        (memory, _, _), (lane, column) = self.regions[0], self.at
        found, bad = memory.cells[lane, column], memory.spoiled[lane, column] != 0
        if self.packs:
            high = memory.cells[lane, column + 1]
            found = found & np.uint32(0xFFFF) | high << np.uint32(16)
            bad |= memory.spoiled[lane, column + 1] != 0
        self.registers = list(found)
        if memory.cta.machine.checks.any and np.count_nonzero(bad):
            register, thread = (int(one[0]) for one in np.nonzero(bad))
            place = int(lane[register, thread]), int(column[register, thread])
            place = place if memory.spoiled[place] else (place[0], place[1] + 1)
            origin = f"{memory.origin(*place)}, read by {self.name}"
            self.taints = [Taint(one, origin) for one in bad]
        self.finish()

    def settle(self, warp: Warp, pending: Pending) -> Wait | None:
        """Give a register its value before the warp waited for it."""
        if not self.done:
            return LoadsWait([self], 0)
        pending.settle(warp.registers, self.registers[self.pending.index(pending)])
        return None


class LoadsWait(OperationsWait):
    """When they are there, the instruction is executed again and gives the registers back."""

    retry = True
    label = "tensor memory"


class Store(TensorOperation):
    """One tcgen05.st of a warp."""

    def __init__(self, name: str, issuer: Issuer, at: tuple[Array, Array], data: Array) -> None:
        super().__init__(name, issuer, Piece("st"))
        self.at, self.data = at, data
        self.taints: list[Taint | None] = []
        """Of the registers."""

    def compute(self) -> None:
        (memory, _, _), (lane, column) = self.regions[0], self.at
        memory.cells[lane, column] = self.data
        memory.spoiled[lane, column] = 0
        for i, taint in enumerate(self.taints):
            if taint is not None:
                which = taint.lanes
                memory.spoil(lane[i, which], column[i, which], taint.origin)
        for _, region, _ in self.regions:
            memory.changed(region)
        self.finish()


def _shape(at: Instruction, unit: str) -> tuple[str, int, bool]:
    """Shape, registers of a thread for the count, and whether halves are packed."""
    for part in ("sync", "aligned", "b32"):
        if part not in at.parts:
            fail(at, f"expected .{part}")
    rest = [part for part in at.parts[2:] if part not in ("sync", "aligned", "b32")]
    packs = unit in rest
    rest = [part for part in rest if part != unit]
    for part in rest:
        if part not in FRAGMENTS and not (part[:1] == "x" and part[1:].isdigit()):
            fail(at, f"modifier .{part} is not modelled")
    if len(rest) != 2 or rest[0] not in FRAGMENTS:
        fail(at, "expected a shape and a count")
    per, most = FRAGMENTS[rest[0]]
    count = int(rest[1][1:])
    if count & (count - 1) or not 1 <= count <= most or rest[1] != f"x{count}":
        fail(at, f"count {count}, expected a power of two up to {most}")
    return rest[0], per * count, packs


def _registers(operand: Operand, count: int, at: Instruction) -> tuple[Operand, ...]:
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(parts) != count:
        fail(at, f"{len(parts)} registers, expected {count}")
    for part in parts:
        if isinstance(part, Register) and part.type[-2:] != "32":
            fail(at, f"register {part} has to have 32 bits")
    return parts


Cells = Callable[["Warp"], tuple[tuple[Array, Array], list[Region]]]


def _cells(
    b: Binder,
    at: Instruction,
    address: Operand,
    offset: int,
    shape: str,
    count: int,
    *,
    packs: bool,
) -> Cells:
    """Reader of an address: lane and column of each register, and the cells that these are in.

    The halves of 16x32bx2 may lie apart, and what is between is not used.
    """
    where = addresses(b, address, at, "u32")
    per, _ = FRAGMENTS[shape]
    lane, column = fragment(shape, count // per)
    step = 2 if packs else 1
    if shape == "16x32bx2":
        column = column + np.where(np.arange(32) < HALF, 0, offset // step)
    column = column * step
    threads = (slice(None),) if shape != "16x32bx2" else (slice(0, HALF), slice(HALF, None))
    spans = [(int(part.min()), int(part.max()) + step) for part in (column[:, t] for t in threads)]
    height = QUARTER if shape == "32x32b" else HALF

    def read(warp: Warp) -> tuple[tuple[Array, Array], list[Region]]:
        given = where(warp)
        if np.count_nonzero(given != given[0]):
            raise Finding(Kind.TENSOR_MEMORY, f"threads of warp {warp.index} give other addresses")
        row, first = place_of(int(given[0]) & 0xFFFFFFFF)
        _check_lanes(warp, row, height)
        halves = (1 << height // HALF) - 1 << row // HALF
        regions = [Region(halves, first + low, first + end) for low, end in spans]
        return (lane + row, column + first), regions

    return read


def _check_lanes(warp: Warp, row: int, height: int) -> None:
    """Raise a finding unless the warp may access these lanes."""
    low = quarter_of(warp.index)
    legal = low <= row and row + height <= low + QUARTER and row % HALF == 0
    if not legal and (warp.cta.machine.checks.any or not 0 <= row <= 128 - height):
        raise Finding(
            Kind.TENSOR_MEMORY,
            f"warp {warp.index} accesses lanes {row}-{row + height - 1}, and reaches {low}-"
            f"{low + QUARTER - 1} alone" + (", from multiples of 16" if row % HALF else ""),
        )


def _offset(at: Instruction, shape: str, place: int) -> tuple[int, list[Operand]]:
    """The second half's offset, and the other operands."""
    operands = list(at.operands)
    if shape != "16x32bx2":
        if len(operands) != 2:
            fail(at, f"{len(operands)} operands, expected 2")
        return 0, operands
    if len(operands) != 3:
        fail(at, f"{len(operands)} operands, expected 3")
    return number(operands.pop(place), at), operands


@effect("tcgen05.ld")
def tcgen05_ld(b: Binder, at: Instruction) -> Effect:
    shape, count, packs = _shape(at, "pack::16b")
    offset, (to, address) = _offset(at, shape, 2)
    parts = _registers(to, count, at)
    slots = results_of(b, parts, at)
    cells = _cells(b, at, address, offset, shape, count, packs=packs)
    name = f"tcgen05.ld at PTX line {at.line}"

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        issuer, (places, regions) = issuer_of(warp), cells(warp)
        load = Load(name, issuer, places, packs=packs)
        _begin(load, issuer, warp, regions, writes=False)
        load.pending = [Pending(load, slot) for slot in slots]
        for (place, _), pending in zip(slots, load.pending, strict=True):
            warp.registers[place] = pending
            if warp.tainted:
                warp.tainted.pop(place, None)
        warp.cta.machine.issue(load)
        return None

    return run


def _begin(
    operation: TensorOperation, issuer: Issuer, warp: Warp, regions: list[Region], *, writes: bool
) -> None:
    """A warp's load or store is looked at, and gets its time."""
    flow = issuer.stores if writes else issuer.loads
    operation.party = flow.party
    for region in regions:
        operation.takes(tensor_memory(warp.cta), region, writes=writes)
    issuer.issue(flow, operation.piece, operation)
    operation.order()


@effect("tcgen05.st", carries=(1, 2))
def tcgen05_st(b: Binder, at: Instruction) -> Effect:
    shape, count, packs = _shape(at, "unpack::16b")
    offset, (address, source) = _offset(at, shape, 1)
    parts = _registers(source, count, at)
    readers = [values(b, part, "b32", at) for part in parts]
    cells = _cells(b, at, address, offset, shape, count, packs=packs)
    name = f"tcgen05.st at PTX line {at.line}"

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        issuer, ((lane, column), regions) = issuer_of(warp), cells(warp)
        data = np.stack([read(warp) for read in readers])
        taints: list[Taint | None] = [None] * len(parts)
        if warp.tainted:
            taints = [
                warp.tainted.get(part.index) if isinstance(part, Register) else None
                for part in parts
            ]
        if packs:
            lane, column = np.concatenate([lane, lane]), np.concatenate([column, column + 1])
            data = np.concatenate([data & np.uint32(0xFFFF), data >> np.uint32(16)])
            taints = taints * 2
        store = Store(name, issuer, (lane, column), data)
        store.taints = taints
        _begin(store, issuer, warp, regions, writes=True)
        warp.cta.machine.issue(store)
        return None

    return run


@effect("tcgen05.wait::ld", "tcgen05.wait::st")
def tcgen05_wait(b: Binder, at: Instruction) -> Effect:
    what = at.parts[1][-2:]

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        issuer = issuer_of(warp)
        waited = (issuer.loads if what == "ld" else issuer.stores).open
        if not all(operation.done for operation in waited):
            return LoadsWait(waited, 0)
        for operation in waited:
            if isinstance(operation, Load):
                owned, operation.pending = operation.pending, []
                give_back(warp, operation, owned, operation.registers, operation.taints)
        issuer.over(what)
        return None

    return run


@effect("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def tcgen05_fence(b: Binder, at: Instruction) -> Effect:
    before = at.parts[1] == "fence::before_thread_sync"

    def run(warp: Warp, mask: int) -> None:
        issuer = issuer_of(warp)
        if before:
            issuer.before_sync()
        else:
            issuer.after_sync()

    return run


@effect("tcgen05.commit")
def tcgen05_commit(b: Binder, at: Instruction) -> Effect:
    """When all that the thread issued is done, an arrival comes to a barrier, or to those at the
    same place of several CTAs."""
    expect_parts(at, "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64")
    group, cast = group_of(at), None
    if "mbarrier::arrive::one" not in at.parts:
        fail(at, "expected .mbarrier::arrive::one")
    if len(at.operands) != 1 + ("multicast::cluster" in at.parts):
        fail(at, f"{len(at.operands)} operands")
    where = addresses(b, at.operands[0], at, "b64")
    if "multicast::cluster" in at.parts:
        cast = values(b, at.operands[1], "u16", at)

    def run(warp: Warp, mask: int) -> None:
        use_group(warp, group)
        for lane in np.flatnonzero(lanes(mask)).tolist():
            address = int(where(warp)[lane])
            ranks = int(cast(warp)[lane]) if cast is not None else None
            _commit(warp, lane, _barriers(warp, address, ranks), at.line)

    return run


def _barriers(warp: Warp, address: int, ranks: int | None) -> list[sync.MBarrier]:
    if ranks is None:
        return [sync.barrier_at(warp, address)]
    if ranks >> len(warp.cta.cluster):
        raise Finding(
            Kind.OUT_OF_BOUNDS,
            f"commit to CTAs {ranks:#x} of a cluster of {len(warp.cta.cluster)}",
        )
    chosen = [rank for rank in range(len(warp.cta.cluster)) if ranks >> rank & 1]
    return [sync.barrier_at(warp, ranked(rank, address)) for rank in chosen]


def _commit(warp: Warp, lane: int, barriers: list[sync.MBarrier], line: int) -> None:
    issuer = issuer_of(warp)
    flow, told = issuer.pipe(lane), Seen()
    if warp.view is not None:
        issuer.before_sync()
        warp.view.release(told)
        if issuer.ledger is not None:
            merge(told, issuer.ledger.behind.get(flow.party, {}))
        told[flow.party] = flow.time

    def act() -> None:
        for barrier in barriers:
            merge(barrier.told, told)
            barrier.arrive()

    operation = Operation(f"tcgen05.commit at PTX line {line}", act)
    operation.after = [one for one in flow.open if not one.done]
    warp.cta.machine.issue(operation)


class Copy(TensorOperation):
    """One tcgen05.cp: rows of shared memory of each CTA to its tensor memory."""

    def __init__(self, name: str, issuer: Issuer, shape: str, columns: int) -> None:
        super().__init__(name, issuer, Piece("cp"))
        self.shape, self.columns = shape, columns
        self.chunks: list[tuple[Any, Array, Array]] = []
        """Of each CTA: shared memory, offsets of the chunks of 16 bytes, and words."""

    def begin(self, cta: Cta, descriptor: int, first: int) -> None:
        rows, row_bytes = COPIES[self.shape]
        shared = cta.shared
        chunks = chunks_of(descriptor, rows, row_bytes)
        shared.check(np.array([chunks.min(), chunks.max() + 15]), 1, "rows of tcgen05.cp")
        chunks = chunks - shared.start
        words = words_of(chunks)
        shared.acquire(words, self.name, writes=False, poison=True)
        self.chunks.append((shared, chunks, words))
        self.bytes += rows * row_bytes
        self.address = shared.start + int(chunks.min())
        region = Region(ALL_LANES, first, first + self.columns)
        self.takes(tensor_memory(cta), region, writes=True)

    def compute(self) -> None:
        where = lanes_of_copy(self.shape)
        for (shared, chunks, words), (memory, region, _) in zip(
            self.chunks, self.regions, strict=True
        ):
            rows = shared.data.view("c16")[chunks >> 4].view(np.uint32)
            columns = np.arange(region.first, region.end)
            written = shared.written.view(4)[words].reshape(rows.shape) == 0xFFFFFFFF
            for lane in where.T:
                memory.cells[lane[:, None], columns] = rows
                memory.spoiled[lane[:, None], columns] = 0
            if shared.checks.any and not written.all():
                self._spoil(shared, chunks, written, memory, region)
            shared.release(words, writes=False)
            memory.changed(region)
        self.finish()

    def _spoil(
        self, shared: Any, chunks: Array, written: Array, memory: TensorMemory, region: Region
    ) -> None:
        row, word = np.nonzero(~written)
        place = int(chunks[row[0], word[0] // 4]) + 4 * int(word[0] % 4) + shared.start
        origin = f"{shared.told(place)}, copied by {self.name}"
        for lane in lanes_of_copy(self.shape).T:
            memory.spoil(lane[row], region.first + word, origin)


@effect("tcgen05.cp")
def tcgen05_cp(b: Binder, at: Instruction) -> Effect:
    group = group_of(at)
    shape = ".".join(part for part in at.parts[2:] if not part.startswith("cta_group"))
    if shape not in COPIES:
        fail(at, f"shape .{shape} is not modelled (modelled: {', '.join(COPIES)})")
    where, source = addresses(b, at.operands[0], at, "u32"), values(b, at.operands[1], "b64", at)
    name, columns = f"tcgen05.cp at PTX line {at.line}", COPIES[shape][1] // 4

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            issuer = issuer_of(warp)
            copy = Copy(name, issuer, shape, columns)
            row, first = place_of(int(where(warp)[lane]))
            if row:
                raise Finding(Kind.TENSOR_MEMORY, f"{name} to lane {row}, expected lane 0")
            for cta in ctas_of(warp, group):
                copy.begin(cta, int(source(warp)[lane]), first)
            issue(copy, issuer, lane, [words for _, _, words in copy.chunks])

    return run


def issue(operation: TensorOperation, issuer: Issuer, lane: int, words: list[Array]) -> None:
    """A thread's product or copy goes to the tensor pipe; `words` are those of shared memory that
    it reads, of each CTA."""
    warp, flow = issuer.warp, issuer.pipe(lane)
    operation.party = flow.party
    issuer.issue(flow, operation.piece, operation)
    operation.order()
    memories = list({id(one): one for one, _, _ in operation.regions}.values())
    for memory, index in zip(memories, words, strict=True):
        shared = memory.cta.shared
        shared.order(index, warp.view, flow.party, operation.time, operation.told)
    pipe = warp.cta.machine.tensor_pipe
    for memory in memories:
        memory.pipe = [one for one in memory.pipe if not one.done]
        operation.after += [one for one in memory.pipe if operation.piece.follows(one.piece, pipe)]
        memory.pipe.append(operation)
    warp.cta.machine.issue(operation)
