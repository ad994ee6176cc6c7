"""Copies that go on by themselves: tensor tiles (TMA), bulk copies, cp.async.

Each becomes an operation in the machine's queue, and its bytes move when the scheduler completes
it. What a tile looks like in shared memory follows from the address bits alone.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.cuda.tensor_map import ADDRESS_BYTES, DESCRIPTOR_BYTES, TensorMap
from mqa.emulator.alu import LANES, Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.machine import Operation
from mqa.emulator.memory import (
    PARAM_START,
    POISON,
    RANK_SHIFT,
    WINDOWS,
    Global,
    Shared,
    rank_of,
    ranked,
    words_of,
)
from mqa.emulator.memory_access import buffers_of
from mqa.emulator.order import Seen, merge
from mqa.emulator.parser import Address, Instruction, Negated
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.sync import MBarrier, barrier_at, barrier_places
from mqa.emulator.tensor_layouts import swizzled
from mqa.emulator.warp import Wait, lanes

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

MAP_MAGIC = b"mqa.map\0"
TILE_ALIGN = 128
_OFFSET = (1 << RANK_SHIFT) - 1
_LOAD = "shared::cluster.global", "shared::cta.global"


def encode_map(key: int) -> bytes:
    """128 bytes that only this engine reads: which of the launch's maps it is."""
    return (MAP_MAGIC + struct.pack("<Q", key)).ljust(DESCRIPTOR_BYTES, b"\xff")


def _decode_map(warp: Warp, address: int) -> tuple[TensorMap, int]:
    """The map at a generic address, and where its tensor is."""
    machine = warp.cta.machine
    if address >> 60 == WINDOWS["param"] >> 60:
        start = address - WINDOWS["param"] - PARAM_START
        raw = machine.params.data[start : start + 16].tobytes()
    else:
        raw = machine.memory.range(address, 16, "tensor map").tobytes()
    key = struct.unpack("<Q", raw[8:])[0] if raw[:8] == MAP_MAGIC else -1
    if key not in machine.maps:
        raise Finding(Kind.DESCRIPTOR, f"there is no tensor map at {address:#x}")
    found: tuple[TensorMap, int] = machine.maps[key]
    return found


class Tile:
    """One box of a tensor: its bytes in global memory, and their places in shared memory."""

    def __init__(self, warp: Warp, map: TensorMap, address: int, corner: list[int]) -> None:
        self.warp, self.map, self.address, self.corner = warp, map, address, corner
        self.row_bytes = map.bytes(map.box[0])
        self.rows = int(np.prod(map.box[1:], dtype=np.int64))
        self.bytes = self.rows * self.row_bytes
        step = map.box[0] if map.padded else map.elements(ADDRESS_BYTES)
        if corner[0] % step:
            raise Finding(
                Kind.MISALIGNED,
                f"tile of {map.tensor} at byte {map.bytes(corner[0])} of a row, expected a "
                f"multiple of {map.bytes(step)}",
            )
        self.first = map.bytes(corner[0])
        self.line_bytes = 2 * self.row_bytes if map.padded else self.row_bytes
        """Of a row in shared memory."""

    def __str__(self) -> str:
        return f"tile of {self.map.tensor} at {self.corner}"

    def _row_offsets(self) -> tuple[Array, Array]:
        """Byte offset of each row of the box in the tensor, and whether the row exists."""
        offsets, exists = np.zeros(1, np.int64), np.ones(1, bool)
        dims = zip(self.map.shape[1:], self.map.strides, self.map.box[1:], strict=True)
        for (size, stride, box), start in zip(dims, self.corner[1:], strict=True):
            index = start + np.arange(box, dtype=np.int64)
            inside = (index >= 0) & (index < size)
            offsets = (index[:, None] * stride + offsets).ravel()
            exists = (inside[:, None] & exists).ravel()
        return offsets, exists

    def _columns(self) -> tuple[int, int]:
        """Bytes [from, to) of a row of the box that exist."""
        width = self.map.bytes(self.map.shape[0])
        low = min(max(-self.first, 0), self.row_bytes)
        return low, max(min(width - self.first, self.row_bytes), low)

    def _global(self) -> tuple[Any, Array, int, int]:
        """Existing rows, their bytes' places in the buffer, and the columns."""
        offsets, exists = self._row_offsets()
        low, high = self._columns()
        starts = self.address + offsets[exists] + self.first + low
        return exists, starts, low, high

    def load(self) -> Array:
        """The box's bytes in shared memory, [rows, line bytes], zero outside the tensor."""
        box = np.zeros((self.rows, self.row_bytes), np.uint8)
        exists, starts, low, high = self._global()
        if len(starts) and high > low:
            buffer = self.warp.cta.machine.memory.find(int(starts[0]))
            buffer.check(starts, 1, str(self))
            buffer.check(starts + (high - low - 1), 1, str(self))
            wide = 16 if (high - low) % 16 == 0 and not np.count_nonzero(starts & 15) else 1
            view = buffer.data.view("c16") if wide == 16 else buffer.data
            index = (starts - buffer.origin)[:, None] // wide + np.arange((high - low) // wide)
            box[exists, low:high] = view[index].view(np.uint8).reshape(len(starts), -1)
        if not self.map.padded:
            return box
        halves = box.reshape(-1, 1, 8)
        return np.concatenate([halves, np.full_like(halves, POISON)], axis=1)

    def store(self, box: Array, change: Callable[[Array, Array], Array] | None = None) -> None:
        """Write the part of the box that exists, in whole 16-byte chunks at its inner end, or
        what `change` makes of what is there and of the box."""
        exists, starts, low, high = self._global()
        memory = self.warp.cta.machine.memory
        if high > low:
            high = min(-(-high // ADDRESS_BYTES) * ADDRESS_BYTES, self.row_bytes)
        for start, row in zip(starts.tolist(), box[exists, low:high], strict=True):
            if high > low:
                target = memory.range(start, high - low, str(self))
                target[:] = change(target, row) if change else row

    def places(self, target: int, shared: Shared) -> Array:
        """Offset in shared memory of each 16-byte chunk of the box."""
        pitch = self.map.swizzle or self.line_bytes
        if target % TILE_ALIGN:
            raise Finding(
                Kind.MISALIGNED, f"{self} goes to {target:#x}, expected a multiple of {TILE_ALIGN}"
            )
        row = np.arange(self.rows)[:, None] * pitch
        chunks = target + row + np.arange(0, self.line_bytes, 16)
        shared.check(np.array([target]), 1, str(self))
        shared.check(
            np.array([target + (self.rows - 1) * pitch + self.line_bytes - 1]), 1, str(self)
        )
        offsets: Array = swizzled(chunks, self.map.swizzle).ravel() - shared.start
        return offsets


def copy_in(
    warp: Warp,
    name: str,
    read: Callable[[], Array],
    targets: list[tuple[Shared, Array, MBarrier]],
    size: int,
    *,
    combines: bool = False,
) -> None:
    """Issue a copy to shared memory; its bytes go to 16-byte chunks, in order.

    `combines`: `read` gives what it makes of the bytes that are there.
    """
    words = [words_of(chunks) for _, chunks, _ in targets]
    for (shared, chunks, barrier), index in zip(targets, words, strict=True):
        if warp.cta.machine.checks.any:
            warp.cta.keep_barriers(shared, chunks + shared.start, 16, name)
        shared.acquire(index, name, writes=True, combines=combines)
        order = shared.order_change if combines else shared.order_write
        order(index, warp.view, barrier.party, barrier.phase + 1, name)

    def act() -> None:
        data = read().reshape(-1).view("c16")
        for (shared, chunks, barrier), index in zip(targets, words, strict=True):
            shared.data.view("c16")[chunks // 16] = data
            shared.release(index, writes=True, combines=combines)
            barrier.deliver(size)

    first, chunks, _ = targets[0]
    address = first.start + int(chunks[0])
    warp.cta.machine.issue(Operation(name, act, bytes=size * len(targets), address=address))


def targets_of(
    warp: Warp, target: int, barrier: int, multicast: int | None, *, pairs: bool = False
) -> Any:
    """CTAs that get a copy, with the address in each and its barrier.

    A copy to many is told at the barrier of each; with `pairs` at that of the even or of the odd
    CTA of its pair, whichever the given barrier is one of.
    """
    if multicast is None:
        place = rank_of(target)
        cta = warp.cta if place is None else warp.cta.peer(place)
        yield cta, target & _OFFSET, _known(barrier_at(warp, barrier))
        return
    ctas = len(warp.cta.cluster)
    if not 0 < multicast < 1 << ctas:
        raise Finding(
            Kind.OUT_OF_BOUNDS, f"multicast mask {multicast:#x} in a cluster of {ctas} CTAs"
        )
    given = rank_of(barrier & (1 << 60) - 1)
    parity = (warp.cta.rank if given is None else given) & 1
    for rank in range(ctas):
        if multicast >> rank & 1:
            moved = ranked(rank & ~1 | parity if pairs else rank, barrier)
            yield warp.cta.peer(rank), target & _OFFSET, _known(barrier_at(warp, moved))


def _known(barrier: MBarrier) -> MBarrier:
    if not barrier.known_to_engines and barrier.cta.machine.checks.any:
        raise Finding(Kind.BARRIER, f"a copy uses {barrier} without fence.mbarrier_init before")
    return barrier


_TENSOR_LOAD = {"tile", "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint"}


@effect("cp.async.bulk.tensor")
def tensor_copy(b: Binder, at: Instruction) -> Effect:
    # A pair of CTAs may have one barrier for what either of them gets.
    group = next((part for part in at.parts if part.startswith("cta_group")), "")
    rank, *words = (part for part in at.parts[4:] if part != group)
    form, rest = ".".join(words[:2]), set(words[2:])
    if group not in ("", "cta_group::1", "cta_group::2"):
        fail(at, f"modifier .{group} is not modelled")
    if rank not in ("1d", "2d", "3d", "4d", "5d"):
        fail(at, f"expected 1d to 5d, got {rank}")
    if form == "global.shared::cta" and rest <= {"tile", "bulk_group", "L2::cache_hint"}:
        return _tensor_store(b, at, int(rank[0]))
    if form not in _LOAD or not rest <= _TENSOR_LOAD:
        fail(at, "this form is not modelled")
    target, source = addresses(b, at.operands[0], at, "u32"), at.operands[1]
    barrier = addresses(b, at.operands[2], at, "u32")
    cast = values(b, at.operands[3], "u16", at) if "multicast::cluster" in rest else None
    where, corner = _tensor_operand(b, source, at, int(rank[0]))

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)):
            map, address = _decode_map(warp, int(where(warp)[lane]))
            tile = _tile(warp, map, address, [int(read(warp)[lane]) for read in corner])
            chosen = int(cast(warp)[lane]) if cast else None
            targets = [
                (cta.shared, tile.places(place, cta.shared), found)
                for cta, place, found in targets_of(
                    warp,
                    int(target(warp)[lane]),
                    int(barrier(warp)[lane]),
                    chosen,
                    pairs=group == "cta_group::2",
                )
            ]
            copy_in(warp, str(tile), tile.load, targets, tile.bytes)

    return run


def _tile(warp: Warp, map: TensorMap, address: int, corner: list[int]) -> Tile:
    if len(map.shape) != len(corner):
        raise Finding(
            Kind.DESCRIPTOR,
            f"{len(corner)} coordinates for a tensor map of {len(map.shape)} dimensions",
        )
    return Tile(warp, map, address, corner)


def _tensor_operand(b: Binder, operand: Any, at: Instruction, rank: int) -> tuple[Any, Any]:
    """Readers of the map's address and of the coordinates."""
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        fail(at, f"expected a tensor map and {rank} coordinates")
    corner = [values(b, part, "s32", at) for part in operand.coordinates]
    return addresses(b, Address(operand.base, operand.offset), at, "u64"), corner


def own_place(warp: Warp, address: int) -> int:
    """A shared address without a rank. Raises a finding if it is that of another CTA."""
    rank = rank_of(address)
    if rank is not None and rank != warp.cta.rank:
        raise Finding(
            Kind.OUT_OF_BOUNDS,
            f"shared address {address:#x} of CTA {rank} of the cluster, expected one of its own",
        )
    return address & _OFFSET


def own_places(warp: Warp, addresses: Array) -> Array:
    """The same of several."""
    if not np.count_nonzero(addresses >> RANK_SHIFT):
        return addresses
    return np.array([own_place(warp, address) for address in addresses.tolist()])


def _tensor_store(b: Binder, at: Instruction, rank: int) -> Effect:
    return tensor_out(b, at, rank, lambda tile: None)


Change = Callable[[Array, Array], Array]
"""Bytes that are there and bytes that come, to bytes."""


def tensor_out(
    b: Binder, at: Instruction, rank: int, change_for: Callable[[Tile], Change | None]
) -> Effect:
    """A tile from shared memory to global: a store, or a reduction by what `change_for` gives."""
    where, corner = _tensor_operand(b, at.operands[0], at, rank)
    source = addresses(b, at.operands[1], at, "u32")

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            map, address = _decode_map(warp, int(where(warp)[lane]))
            tile = _tile(warp, map, address, [int(read(warp)[lane]) for read in corner])
            if min(tile.corner) < 0:
                raise Finding(Kind.OUT_OF_BOUNDS, f"{tile} is stored, expected coordinates >= 0")
            if map.padded:
                raise Finding(Kind.DESCRIPTOR, f"{tile} is stored, and its type is padded")
            chunks = tile.places(own_place(warp, int(source(warp)[lane])), warp.cta.shared)
            _copy_out(warp, lane, str(tile), chunks, _into_tile(tile, change_for(tile)))

    return run


def _into_tile(tile: Tile, change: Change | None) -> Callable[[Array], None]:
    return lambda data: tile.store(data.reshape(tile.rows, tile.row_bytes), change)


def _copy_out(
    warp: Warp, lane: int, name: str, chunks: Array, write: Callable[[Array], None]
) -> None:
    """Issue a copy from 16-byte chunks of shared memory, in the thread's open bulk group."""
    shared, index = warp.cta.shared, words_of(chunks)
    shared.acquire(index, name, writes=False)
    warp.stores += 1
    shared.order(index, warp.view, warp.store_party, warp.stores, name)

    def act() -> None:
        write(shared.data.view("c16")[chunks // 16].view(np.uint8))
        shared.release(index, writes=False)

    address = shared.start + int(chunks[0])
    operation = Operation(name, act, warp.stores, bytes=16 * len(chunks), address=address)
    warp.bulk.setdefault(lane, [[]])[-1].append(operation)
    warp.cta.machine.issue(operation)


def check_bulk(place: int, other: int, size: int) -> None:
    if place % 16 or other % 16 or size % 16 or size <= 0:
        raise Finding(
            Kind.MISALIGNED,
            f"bulk copy, {size} bytes between {place:#x} and {other:#x}, not multiples of 16",
        )


@effect("cp.async.bulk")
def bulk_copy(b: Binder, at: Instruction) -> Effect:
    form, rest = ".".join(at.parts[3:5]), set(at.parts[5:])
    if form == "global.shared::cta" and rest <= {"bulk_group", "L2::cache_hint", "cp_mask"}:
        return _bulk_store(b, at)
    if form not in (*_LOAD, "shared::cluster.shared::cta") or not rest <= _TENSOR_LOAD - {"tile"}:
        fail(at, "this form is not modelled")
    from_shared = form == "shared::cluster.shared::cta"
    target, source = (addresses(b, operand, at, "u64") for operand in at.operands[:2])
    sizes, barrier = values(b, at.operands[2], "u32", at), addresses(b, at.operands[3], at, "u32")
    cast = values(b, at.operands[4], "u16", at) if "multicast::cluster" in rest else None

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)):
            place, origin = int(target(warp)[lane]), int(source(warp)[lane])
            size, chosen = int(sizes(warp)[lane]), int(cast(warp)[lane]) if cast else None
            check_bulk(place, origin, size)
            name = f"bulk copy of {size} bytes to shared address {place:#x}"
            targets = []
            for cta, offset, found in targets_of(warp, place, int(barrier(warp)[lane]), chosen):
                cta.shared.words(offset, size)
                chunks = np.arange(offset, offset + size, 16) - cta.shared.start
                targets.append((cta.shared, chunks, found))
            read = _reader(warp, origin, size, name, targets[0][2], from_shared=from_shared)
            copy_in(warp, name, read, targets, size)

    return run


def _reader(
    warp: Warp, origin: int, size: int, name: str, barrier: MBarrier, *, from_shared: bool
) -> Callable[[], Array]:
    if from_shared:
        return shared_reader(warp, origin, size, name, barrier)
    return lambda: warp.cta.machine.memory.range(origin, size, name)


def shared_reader(
    warp: Warp, origin: int, size: int, name: str, barrier: MBarrier
) -> Callable[[], Array]:
    """What reads bytes of a CTA's own shared memory once, when the operation completes."""
    shared, origin = warp.cta.shared, own_place(warp, origin)
    words = shared.words(origin, size)
    shared.acquire(words, name, writes=False)
    shared.order(words, warp.view, barrier.party, barrier.phase + 1, name)

    def read() -> Array:
        shared.release(words, writes=False)
        return shared.data[origin - shared.start :][:size]

    return read


def _bulk_store(b: Binder, at: Instruction) -> Effect:
    return bulk_out(b, at, None)


def bulk_out(b: Binder, at: Instruction, change: Change | None) -> Effect:
    """Bytes from shared memory to global: a store, or a reduction by `change`."""
    target, source = (addresses(b, operand, at, "u64") for operand in at.operands[:2])
    sizes = values(b, at.operands[2], "u32", at)
    bytes_of = None
    if "cp_mask" in at.parts:
        bytes_of = values(b, at.operands[3 + ("L2::cache_hint" in at.parts)], "u16", at)

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            place, origin = int(target(warp)[lane]), own_place(warp, int(source(warp)[lane]))
            size = int(sizes(warp)[lane])
            check_bulk(place, origin, size)
            name = f"bulk {'reduction' if change else 'store'} of {size} bytes"
            memory = warp.cta.machine.memory
            if bytes_of is None:
                write = _into(memory.range(place, size, name), change)
            else:
                write = _into_masked(memory, place, size, int(bytes_of(warp)[lane]))
            warp.cta.shared.words(origin, size)
            chunks = np.arange(origin, origin + size, 16) - warp.cta.shared.start
            _copy_out(warp, lane, name, chunks, write)

    return run


def _into_masked(memory: Global, place: int, size: int, mask: int) -> Callable[[Array], None]:
    """Writes of each 16 bytes those that have a bit in the mask; others may be no one's."""
    keeps = np.resize([bool(mask >> i & 1) for i in range(16)], size)
    kept = np.flatnonzero(keeps)
    if not len(kept):
        return lambda data: None
    part = slice(int(kept[0]), int(kept[-1]) + 1)
    target = memory.range(place + part.start, part.stop - part.start, "masked bulk store")

    def write(data: Array) -> None:
        target[keeps[part]] = data.reshape(-1)[keeps]

    return write


def _into(target: Array, change: Change | None) -> Callable[[Array], None]:
    def write(data: Array) -> None:
        given = data.reshape(-1)
        target[:] = change(target, given) if change else given

    return write


class OperationsWait(Wait):
    """For operations that a party has done for this warp."""

    label = "asynchronous copies"

    def __init__(self, operations: list[Operation], party: int, time: int = 0) -> None:
        """`time` of the party that is over with them, where there may be later ones."""
        self.operations, self.party, self.time = operations, party, time

    def ready(self) -> bool:
        return all(operation.done for operation in self.operations)

    def over(self, warp: Warp) -> None:
        if warp.view is not None:
            times = (operation.time for operation in self.operations)
            warp.view.saw(self.party, max(self.time, *times, 0))

    def __str__(self) -> str:
        return ", ".join(str(x) for x in self.operations if not x.done)


@effect("cp.async.bulk.commit_group")
def bulk_commit(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)).tolist():
            warp.bulk.setdefault(lane, [[]]).append([])

    return run


@effect("cp.async.bulk.wait_group")
def bulk_wait(b: Binder, at: Instruction) -> Effect:
    newest = number(at.operands[0], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        waited: list[Operation] = []
        for lane in np.flatnonzero(lanes(mask)).tolist():
            committed = warp.bulk.get(lane, [[]])[:-1]
            waited += itertools.chain(*committed[: len(committed) - newest])
        return OperationsWait(waited, warp.store_party).unless_ready(warp)

    return run


@effect("cp.async.bulk.prefetch")
def bulk_prefetch(b: Binder, at: Instruction) -> Effect:
    """Changes nothing that a kernel could see."""
    return lambda warp, mask: None


@effect("cp.async.ca", "cp.async.cg")
def cp_async(b: Binder, at: Instruction) -> Effect:
    target, source = (
        addresses(b, at.operands[0], at, "u32"),
        addresses(b, at.operands[1], at, "u64"),
    )
    size = number(at.operands[2], at)
    if size not in (4, 8, 16):
        fail(at, f"{size} bytes, expected 4, 8 or 16")
    amount = _source_bytes(b, at, size)

    def run(warp: Warp, mask: int) -> None:
        which = lanes(mask)
        places = own_places(warp, target(warp)[which])
        origins = source(warp)[which]
        counts = amount(warp)[which]
        if int(counts.max()) > size:
            raise Finding(Kind.OUT_OF_BOUNDS, f"cp.async of {int(counts.max())} bytes into {size}")
        shared = warp.cta.shared
        shared.check(places, size, "cp.async")
        offsets = places - shared.start
        words = (offsets[:, None] // 4 + np.arange(size // 4)).ravel()
        name = f"cp.async of {size} bytes by warp {warp.index}"
        if warp.cta.machine.checks.any:
            warp.cta.keep_barriers(shared, places, size, name)
        shared.acquire(words, name, writes=True, proxy=False)
        warp.copied += 1
        shared.order_write(words, warp.view, warp.copy_party, warp.copied, name)

        def act() -> None:
            data = _gather(warp, origins, counts, size)
            shared.data[offsets[:, None] + np.arange(size)] = data
            shared.release(words, writes=True)
            shared.soil(words, warp.index)

        address = int(places[0])
        operation = Operation(name, act, warp.copied, bytes=size * len(places), address=address)
        warp.copies.append(operation)
        warp.cta.machine.issue(operation)

    return run


def _source_bytes(b: Binder, at: Instruction, size: int) -> Callable[[Warp], Array]:
    """Reader of the bytes that each thread reads of its source; the rest of its `size` are zero."""
    given = at.operands[3] if len(at.operands) - ("L2::cache_hint" in at.parts) > 3 else None
    if given is None:
        every = np.full(LANES, size)
        return lambda warp: every
    predicate = given.register if isinstance(given, Negated) else given
    if getattr(predicate, "type", "") != "pred":
        return values(b, given, "u32", at)
    ignored = values(b, given, "pred", at)
    return lambda warp: np.where(ignored(warp), 0, size)


def _gather(warp: Warp, origins: Array, counts: Array, size: int) -> Array:
    """[threads, size] bytes, zero where a thread reads fewer."""
    data = np.zeros((len(origins), size), np.uint8)
    memory = warp.cta.machine.memory
    if np.count_nonzero(origins[counts > 0] % size):
        raise Finding(Kind.MISALIGNED, f"cp.async of {size} bytes")
    whole = np.flatnonzero(counts == size)
    for which, buffer in buffers_of(memory, origins[whole], size, "cp.async") if len(whole) else ():
        first = (origins[whole][which] - buffer.origin) // 4
        for word in range(size // 4):
            data.view(np.uint32)[whole[which], word] = buffer.view(4)[first + word]
    for byte in range(int(counts.max(where=counts < size, initial=0))):
        these = np.flatnonzero((counts > byte) & (counts < size))
        places = origins[these] + byte
        for which, buffer in buffers_of(memory, places, 1, "cp.async"):
            data[these[which], byte] = buffer.data[places[which] - buffer.origin]
    return data


@effect("cp.async.mbarrier.arrive")
def cp_async_arrive(b: Binder, at: Instruction) -> Effect:
    where = barrier_places(b, at.operands[0], at)
    counted = "noinc" in at.parts

    def run(warp: Warp, mask: int) -> None:
        found = [barrier_at(warp, place) for place in where(warp)[lanes(mask)].tolist()]
        if not counted:
            for barrier in found:
                barrier.pending += 1

        told: Seen = {}
        if warp.view is not None:
            warp.view.release(told)
            told[warp.copy_party] = warp.copied

        def act() -> None:
            warp.cta.shared.tell(warp.index)
            for barrier in found:
                merge(barrier.told, told)
                barrier.arrive()

        operation = Operation(f"arrival after cp.async of warp {warp.index}", act)
        operation.after = [copy for copy in warp.copies if not copy.done]
        warp.copies = operation.after.copy()
        warp.cta.machine.issue(operation)

    return run


@effect("cp.async.commit_group")
def cp_async_commit(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> None:
        warp.copy_groups.append((warp.copied, warp.copies))
        warp.copies = []

    return run


@effect("cp.async.wait_group", "cp.async.wait_all")
def cp_async_wait(b: Binder, at: Instruction) -> Effect:
    newest = number(at.operands[0], at) if at.operands else 0
    every = at.parts[2] == "wait_all"

    def run(warp: Warp, mask: int) -> Wait | None:
        groups = warp.copy_groups[: max(len(warp.copy_groups) - newest, 0)]
        if every:
            groups = [*groups, (warp.copied, warp.copies)]
        waited = list(itertools.chain(*(copies for _, copies in groups)))
        time = groups[-1][0] if groups else 0
        return OperationsWait(waited, warp.copy_party, time).unless_ready(warp)

    return run
