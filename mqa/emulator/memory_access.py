"""Loads, stores and atomics of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator import taint
from mqa.emulator.alu import DTYPES, LANES, Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.memory import RANK_SHIFT, WINDOWS, Buffer, Global, Shared
from mqa.emulator.parser import BYTES, Address, Instruction, Operand, Register, Symbol, Vector
from mqa.emulator.program import Effect, addresses, effect, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.sync import cluster_address
from mqa.emulator.taint import Taint
from mqa.emulator.warp import FULL, lanes

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

_HINTS = {"nc", "relaxed", "acquire", "release", "weak", "volatile", "gpu", "cta", "cluster", "sys"}
_HINTS |= {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last"}
_HINTS |= {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "global", "v2", "v4"}
_STRONG = {"relaxed", "acquire", "release", "volatile"}
_ORDERS = {"", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "cluster", "sys"}
_ORDERS |= {"global", "shared", "shared::cta", "shared::cluster"}
_SPACES = ("global", "shared", "local", "param", "const", "shared::cta", "shared::cluster")


def _form(at: Instruction) -> tuple[str, str, int]:
    """State space ("" if generic), type and vector length."""
    *rest, kind = at.parts[1:]
    space = next((part for part in rest if part in _SPACES), "")
    expected = 2 + ("L2::cache_hint" in rest)
    if len(at.operands) != expected:
        fail(at, f"{len(at.operands)} operands, expected {expected}")
    for part in rest:
        if part not in _HINTS and part not in _SPACES:
            fail(at, f"modifier .{part} is not modelled")
    if kind not in BYTES:
        fail(at, f"type .{kind} is not modelled")
    return space, kind, 2 if "v2" in rest else 4 if "v4" in rest else 1


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


@effect("ld")
def ld(b: Binder, at: Instruction) -> Effect:
    space, kind, count = _form(at)
    size, dtype = BYTES[kind], DTYPES[kind]
    access = strong(load) if _STRONG.intersection(at.parts) else load
    dests = [b.dest(operand, kind, at) for operand in _elements(at.operands[0])]
    if len(dests) != count:
        fail(at, f"expected {count} registers, got {len(dests)}")
    where = addresses(b, at.operands[1], at, kind)

    def run(warp: Warp, mask: int) -> None:
        at_full = mask | warp.exited == FULL and not warp.exited
        places = where(warp) if at_full else where(warp)[lanes(mask)]
        warp.unwritten = None
        loaded = access(warp, space, places, size, count, mask)
        for (place, out), value in zip(dests, loaded, strict=True):
            if not at_full:
                full = np.zeros(32, value.dtype)
                full[lanes(mask)] = value
                value = full
            value = value.view(dtype)
            warp.write(place, out(value) if out else value, mask)
        if warp.unwritten is not None:
            _taint_loaded(warp, space, places, size, [place for place, _ in dests], mask)

    return run


def _taint_loaded(
    warp: Warp, space: str, places: Array, size: int, dests: list[int], mask: int
) -> None:
    """Registers got what was never written."""
    for at, known, inside in _windows(space, places):
        here = _threads(mask, at)
        which = np.flatnonzero(lanes(here))
        for i, dest in enumerate(dests):
            bad = _unwritten(warp, known, inside + i * size, size, here)
            if not np.count_nonzero(bad):
                continue
            where = int(inside[bad][0]) + i * size
            origin = f"byte {where} of local memory"
            if known != "local":
                origin = warp.cta.shared.told(where & (1 << RANK_SHIFT) - 1)
            threads = np.zeros(LANES, bool)
            threads[which[bad]] = True
            found = Taint(threads, f"{origin}, loaded by {warp.place()}")
            taint.put(warp, dest, found, lanes(here))


def _unwritten(warp: Warp, space: str, places: Array, size: int, mask: int) -> Array:
    bad = np.zeros(len(places), bool)
    if space == "local":
        assert warp.local_taint is not None
        rows = np.flatnonzero(lanes(mask))
        found: Array = warp.local_taint.reshape(LANES, -1, size)[rows, places // size].any(axis=1)
        return found
    if not space.startswith("shared"):
        return bad
    for which, shared, where in _by_cta(warp, places):
        part = shared.unwritten(where, size)
        if part is not None:
            bad[which] = part
    return bad


def strong(access: Any) -> Any:
    """An access that tells others, and hears from them, by the places that it names."""

    def run(warp: Warp, space: str, places: Array, *rest: Any) -> Any:
        order = warp.cta.cluster.order
        if order is None or warp.view is None:
            return access(warp, space, places, *rest)
        keys: list[Any] = []
        for _, known, inside in _windows(space, places):
            if known.startswith("shared"):
                keys += [
                    (shared, place // 4)
                    for _, shared, where in _by_cta(warp, inside)
                    for place in where.tolist()
                ]
            else:
                keys += (inside // 4).tolist()
        order.hear(warp.view, keys)
        result = access(warp, space, places, *rest)
        order.tell(warp.view, keys)
        return result

    return run


def load(warp: Warp, space: str, places: Array, size: int, count: int, mask: int) -> list[Array]:
    """What threads load: `count` elements of `size` bytes from each address."""
    if space == "":
        parts = list(_windows(space, places))
        if len(parts) > 1:
            return _load_parts(warp, parts, _zeros(places, size, count), size, mask)
        ((_, space, places),) = parts
    if space.startswith("shared"):
        found = _zeros(places, size, count)
        for which, shared, where in _by_cta(warp, places):
            before = warp.unwritten
            loaded = shared.load(where, size, count, warp)
            if isinstance(which, slice):
                return loaded
            warp.unwritten = before if warp.unwritten is None else warp.unwritten
            for whole, part in zip(found, loaded, strict=True):
                whole[which] = part
        return found
    if space == "local":
        rows = lanes(mask)
        data = warp.cta.local(warp)[rows]
        _check_local(warp, places, size * count)
        warp.unwritten = warp.local_taint
        return [_local(data, places + i * size, size) for i in range(count)]
    found = []
    for which, buffer in _buffers(warp, space, places, size * count, "load"):
        first = (places[which] - buffer.origin) // size
        view = buffer.view(size)
        if isinstance(which, slice):
            return [view[first + i] for i in range(count)]
        found = found or _zeros(places, size, count)
        for i, whole in enumerate(found):
            whole[which] = view[first + i]
    return found


def _zeros(places: Array, size: int, count: int) -> list[Array]:
    return [np.zeros(len(places), f"u{size}") for _ in range(count)]


def _load_parts(
    warp: Warp, parts: list[Any], found: list[Array], size: int, mask: int
) -> list[Array]:
    """Threads load from several address spaces."""
    unwritten = None
    for which, space, inside in parts:
        loaded = load(warp, space, inside, size, len(found), _threads(mask, which))
        unwritten = unwritten if warp.unwritten is None else warp.unwritten
        warp.unwritten = None
        for whole, part in zip(found, loaded, strict=True):
            whole[which] = part
    warp.unwritten = unwritten
    return found


def _check_local(warp: Warp, places: Array, size: int) -> None:
    """Raise a finding unless all accesses are aligned and inside."""
    if np.count_nonzero(places & (size - 1)):
        bad = int(places[(places & (size - 1)) != 0][0])
        raise Finding(Kind.MISALIGNED, f"access of {size} bytes at byte {bad} of local memory")
    low, high = int(places.min()), int(places.max())
    most = warp.cta.machine.program.layout.local
    if low < 0 or high + size > most:
        bad = low if low < 0 else high
        raise Finding(
            Kind.OUT_OF_BOUNDS, f"access of {size} bytes at byte {bad} of {most} of local memory"
        )


def _local(data: Array, places: Array, size: int) -> Array:
    found: Array = data.view(f"u{size}")[np.arange(len(data)), places // size]
    return found


_SPACE_OF = {base >> 60: name for name, base in WINDOWS.items()}


def _windows(space: str, places: Array) -> Iterator[tuple[Any, str, Array]]:
    """The address spaces that addresses lie in: which of them, and the addresses there."""
    windows = places >> 60 if space == "" else None
    if windows is None or not np.count_nonzero(windows):
        yield slice(None), space or "global", places
        return
    for window in sorted(set(windows.tolist())):
        which = windows == window
        if window not in _SPACE_OF:
            bad = int(places[which][0]) & (1 << 64) - 1
            raise Finding(Kind.OUT_OF_BOUNDS, f"generic address {bad:#x} is in no address space")
        name = _SPACE_OF[window]
        yield slice(None) if which.all() else which, name, places[which] - WINDOWS[name]


def _threads(mask: int, which: Any) -> int:
    """Of the threads of a mask those that are told by their numbers in it."""
    if isinstance(which, slice):
        return mask
    return sum(1 << lane for lane in np.flatnonzero(lanes(mask))[which].tolist())


def _by_cta(warp: Warp, places: Array) -> Iterator[tuple[Any, Shared, Array]]:
    """The shared memories that addresses name: the rank above `RANK_SHIFT`, 0 for one's own."""
    ranks = places >> RANK_SHIFT
    if not np.count_nonzero(ranks):
        yield slice(None), warp.cta.shared, places
        return
    for rank in sorted(set(ranks.tolist())):
        which = ranks == rank
        cta = warp.cta if rank == 0 else warp.cta.peer(rank - 1)
        cta.check_begun(warp)
        yield which, cta.shared, places[which] & (1 << RANK_SHIFT) - 1


def _buffers(
    warp: Warp, space: str, places: Array, size: int, what: str
) -> Iterator[tuple[Any, Buffer]]:
    """The buffers that accesses lie in: mostly all in one."""
    machine = warp.cta.machine
    if space == "param":
        machine.params.check(places, size, what)
        yield slice(None), machine.params
    else:
        yield from buffers_of(machine.memory, places, size, what)


def buffers_of(memory: Global, places: Array, size: int, what: str) -> Iterator[tuple[Any, Buffer]]:
    """The same of global memory."""
    first = memory.find(int(places[0]))
    try:
        first.check(places, size, what)
    except Finding:
        found: dict[Buffer, list[int]] = {}
        for number, place in enumerate(places.tolist()):
            found.setdefault(memory.find(place), []).append(number)
        if len(found) == 1:
            raise
        for buffer, numbers in found.items():
            buffer.check(places[numbers], size, what)
            yield np.array(numbers), buffer
    else:
        yield slice(None), first


@effect("st", carries=(1,))
def st(b: Binder, at: Instruction) -> Effect:
    space, kind, count = _form(at)
    size = BYTES[kind]
    unsigned = f"b{8 * size}"
    given = [values(b, operand, unsigned, at) for operand in _elements(at.operands[1])]
    if len(given) != count:
        fail(at, f"expected {count} registers, got {len(given)}")
    where = addresses(b, at.operands[0], at, kind)
    access = strong(store) if _STRONG.intersection(at.parts) else store
    registers = tuple(part for part in _elements(at.operands[1]) if isinstance(part, Register))

    def run(warp: Warp, mask: int) -> None:
        which = lanes(mask)
        data = [read(warp) for read in given]
        places = where(warp) if mask == FULL else where(warp)[which]
        if mask == FULL:
            access(warp, space, places, size, data, mask)
        else:
            access(warp, space, places, size, [x[which] for x in data], mask)
        if warp.tainted or warp.local_taint is not None:
            _taint_stored(warp, space, places, size, registers, mask)

    return run


def _taint_stored(
    warp: Warp, space: str, places: Array, size: int, registers: tuple[Register, ...], mask: int
) -> None:
    """Raise a finding if what was never written goes to global memory; elsewhere it stays so."""
    if space == "":
        for at, known, inside in _windows(space, places):
            _taint_stored(warp, known, inside, size, registers, _threads(mask, at))
        return
    which = lanes(mask)
    if not space.startswith(("shared", "local")):
        taint.decides(warp, registers, which)
        return
    rows = np.flatnonzero(which)
    for i, register in enumerate(registers):
        held = warp.tainted.get(register.index)
        bad = held.lanes[rows] if held is not None else np.zeros(len(rows), bool)
        if space == "local":
            if warp.local_taint is None:
                warp.local_taint = np.zeros(warp.cta.local(warp).shape, bool)
            element = places // size + i
            warp.local_taint.reshape(LANES, -1, size)[rows, element] = bad[:, None]
        elif np.count_nonzero(bad):
            for part, shared, where in _by_cta(warp, places + i * size):
                shared.spoil(where[bad[part]], size)


def store(warp: Warp, space: str, places: Array, size: int, data: list[Array], mask: int) -> None:
    """Store consecutive elements to each address."""
    if space == "":
        for at, known, there in _windows(space, places):
            store(warp, known, there, size, [value[at] for value in data], _threads(mask, at))
        return
    if space.startswith("shared"):
        for which, shared, where in _by_cta(warp, places):
            warp.cta.keep_barriers(shared, where, size * len(data))
            shared.store(where, size, [value[which] for value in data], warp)
        return
    if space == "local":
        local = warp.cta.local(warp)
        rows = np.flatnonzero(lanes(mask))
        _check_local(warp, places, size * len(data))
        for i, value in enumerate(data):
            local.view(f"u{size}")[rows, (places + i * size) // size] = value
        return
    if not warp.cta.machine.checks.any:
        inside = _inside(warp, space, places, size * len(data))
        places, data = places[inside], [value[inside] for value in data]
        if not len(places):
            return
    for which, buffer in _buffers(warp, space, places, size * len(data), "store"):
        first = (places[which] - buffer.origin) // size
        for i, value in enumerate(data):
            buffer.view(size)[first + i] = value[which]


def _inside(warp: Warp, space: str, places: Array, size: int) -> list[int]:
    """Numbers of the accesses that lie in some tensor."""
    found = []
    for i in range(len(places)):
        here = places[i : i + 1]
        with contextlib.suppress(Finding):
            list(_buffers(warp, space, here, size, "store"))
            found.append(i)
    return found


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
    "inc": lambda old, limit: 0 if old >= limit else old + 1,
    "dec": lambda old, limit: limit if old == 0 or old > limit else old - 1,
}
_ATOMIC_TYPES = {
    "add": ("u32", "u64", "s32", "f32", "f64"),
    "exch": ("b32", "b64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "cas"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


@effect("atom", "red")
def atom(b: Binder, at: Instruction) -> Effect:
    """Thread after thread, in the order of their numbers."""
    *rest, name, kind = ("", "", *at.parts[1:])
    space = next((part for part in rest if part in _SPACES), "")
    returns, compares = at.parts[0] == "atom", name == "cas"
    if kind not in _ATOMIC_TYPES.get(name, ()) or not _ORDERS.issuperset(rest):
        fail(at, "this form is not modelled")
    if compares and not returns:
        fail(at, "cas without a result is not modelled")
    expected = 2 + returns + compares
    if len(at.operands) != expected:
        fail(at, f"{len(at.operands)} operands, expected {expected}")
    change, size, dtype = _ATOMIC.get(name), BYTES[kind], DTYPES[kind]
    operands = at.operands[1:] if returns else at.operands
    where = addresses(b, operands[0], at, kind)
    given = [values(b, operand, kind, at) for operand in operands[1 : 3 if compares else 2]]
    dest = b.dest(at.operands[0], kind, at) if returns else None

    @strong
    def exchange(warp: Warp, space: str, here: Array, new: list[Any], mask: int) -> Any:
        (bits,) = load(warp, space, here, size, 1, mask)
        if warp.unwritten is not None:
            raise Finding(Kind.UNWRITTEN, "an atomic operation changes what was never written")
        old = bits.view(dtype)[0]
        if change is not None:
            result = change(old.item(), new[0])
        else:
            result = new[1] if old.item() == new[0] else old.item()
        if dtype.kind in "iu":
            result = np.array(result % (1 << 8 * size), f"u{size}").reshape(1)
        else:
            result = np.array([result], dtype).view(f"u{size}")
        store(warp, space, here, size, [result], mask)
        return old

    def run(warp: Warp, mask: int) -> None:
        warp.unwritten = None
        places, new = where(warp), [read(warp) for read in given]
        before = np.zeros(32, dtype)
        for lane in np.flatnonzero(lanes(mask)):
            here = places[lane : lane + 1]
            before[lane] = exchange(
                warp, space, here, [x[lane].item() for x in new], 1 << int(lane)
            )
        if dest is not None:
            place, out = dest
            warp.write(place, out(before) if out else before, mask)

    return run


@effect("prefetch", "prefetchu", "discard", "applypriority", carries=(0,))
def hint(b: Binder, at: Instruction) -> Effect:
    """Changes nothing that a kernel could see."""
    return lambda warp, mask: None


@effect("mapa")
def mapa(b: Binder, at: Instruction) -> Effect:
    """The same place of another CTA of the cluster, as a shared or generic address."""
    kind = cluster_address(at)
    dest = b.dest(at.operands[0], kind, at)
    where, rank = values(b, at.operands[1], kind, at), values(b, at.operands[2], "u32", at)

    def run(warp: Warp, mask: int) -> None:
        ranks = rank(warp)
        if int(ranks[lanes(mask)].max()) >= len(warp.cta.cluster):
            raise Finding(
                Kind.OUT_OF_BOUNDS,
                f"rank {int(ranks[lanes(mask)].max())} of a cluster of {len(warp.cta.cluster)}",
            )
        given = where(warp).astype(np.int64)
        # A generic address keeps the window that it lies in.
        offset = given >> 60 << 60 | given & (1 << RANK_SHIFT) - 1
        value = (offset | (ranks.astype(np.int64) + 1) << RANK_SHIFT).astype(DTYPES[kind])
        place, out = dest
        warp.write(place, out(value) if out else value, mask)

    return run


@effect("trap")
def trap(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> None:
        raise Finding(Kind.TRAP, f"by threads {mask:#010x}")

    return run


@effect("call")
def call(b: Binder, at: Instruction) -> Effect:
    """Of the runtime's own functions only that of failed assertions is modelled."""
    named = next((x.name for x in at.operands if isinstance(x, Symbol)), "")
    if named != "__assertfail" or not isinstance(at.operands[-1], Vector):
        fail(at, f"function {named or at.operands[0]} is not modelled")
    message, file, line, *_ = (
        addresses(b, _there(x, at), at, "b64") for x in at.operands[-1].parts
    )

    def run(warp: Warp, mask: int) -> None:
        texts = [_text(warp, int(_parameter(warp, x, 8))) for x in (message, file)]
        where = f"{texts[1]}:{int(_parameter(warp, line, 4))}"
        raise Finding(Kind.TRAP, f"assertion {texts[0]!r} of {where} by threads {mask:#010x}")

    return run


def _there(operand: Operand, at: Instruction) -> Address:
    if not isinstance(operand, Symbol):
        fail(at, f"{operand} is no parameter")
    return Address(operand)


def _parameter(warp: Warp, where: Callable[[Warp], Array], size: int) -> Any:
    (bits,) = load(warp, "param", where(warp)[:1], size, 1, 1)
    return bits[0]


def _text(warp: Warp, address: int) -> str:
    """A string of the module, to its end or that of its variable."""
    if address >> 60 == WINDOWS["const"] >> 60:
        address -= WINDOWS["const"]
    buffer = warp.cta.machine.memory.find(address)
    raw = buffer.data[address - buffer.origin :].tobytes()
    return raw.split(b"\0")[0].decode(errors="replace")
