"""Loads, stores and atomics of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator import halves, taint
from mqa.emulator.alu import DTYPES, LANES, Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.memory import RANK_SHIFT, WINDOWS, Buffer, Global, Shared, rank_of, ranked
from mqa.emulator.parser import BYTES, Address, Instruction, Operand, Register, Symbol, Vector
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.sync import cluster_address
from mqa.emulator.taint import Taint
from mqa.emulator.warp import FULL, lanes

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

_HINTS = {"nc", "relaxed", "acquire", "release", "weak", "volatile", "gpu", "cta", "cluster", "sys"}
_HINTS |= {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last"}
_HINTS |= {f"L1::evict_{which}" for which in ("first", "normal", "unchanged")}
_HINTS |= {f"L2::evict_{which}" for which in ("first", "normal", "last")}
_HINTS |= {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "global"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_MOST_BYTES = 16
"""Of an access but to global memory, where 32 bytes are one."""
_STRONG = {"relaxed", "acquire", "release", "volatile"}
_ORDERS = {"", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "cluster", "sys"}
_ORDERS |= {"global", "shared", "shared::cta", "shared::cluster"}
_SPACES = ("global", "shared", "local", "param", "const", "shared::cta", "shared::cluster")


def _named(at: Instruction) -> str:
    """The variable that an instruction's address names, if it does."""
    found = next((x.base for x in at.operands if isinstance(x, Address)), None)
    return found.name if isinstance(found, Symbol) else ""


def _form(b: Binder, at: Instruction) -> tuple[str, str, int]:
    """State space ("" if generic), type and vector length. Parameters of calls are local."""
    *rest, kind = at.parts[1:]
    space = next((part for part in rest if part in _SPACES), "")
    expected = 2 + ("L2::cache_hint" in rest)
    if len(at.operands) != expected:
        fail(at, f"{len(at.operands)} operands, expected {expected}")
    for part in rest:
        if part not in _HINTS and part not in _SPACES and part not in _VECTORS:
            fail(at, f"modifier .{part} is not modelled")
    if kind not in BYTES:
        fail(at, f"type .{kind} is not modelled")
    if space == "param" and b.spaces.get(_named(at)) == "local":
        space = "local"
    count = _length(at)
    most = 2 * _MOST_BYTES if space == "global" and BYTES[kind] >= 4 else _MOST_BYTES
    if count * BYTES[kind] > most or (count == 8 and BYTES[kind] != 4):
        fail(at, f"{count} elements of .{kind}, expected at most {most} bytes and .v8 of 32 bits")
    return space, kind, count


def _length(at: Instruction) -> int:
    """Elements of a vector."""
    lengths = [_VECTORS[part] for part in at.parts if part in _VECTORS]
    if len(lengths) > 1:
        fail(at, "expected one length of a vector")
    return lengths[0] if lengths else 1


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


@effect("ld")
def ld(b: Binder, at: Instruction) -> Effect:
    space, kind, count = _form(b, at)
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
    """The shared memories that addresses name by ranks."""
    ranks = places >> RANK_SHIFT
    if not np.count_nonzero(ranks):
        yield slice(None), warp.cta.shared, places
        return
    codes = sorted(set(ranks.tolist()))
    for code in codes:
        which = ranks == code if len(codes) > 1 else slice(None)
        rank = rank_of(code << RANK_SHIFT)
        cta = warp.cta if rank is None else warp.cta.peer(rank)
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
    space, kind, count = _form(b, at)
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
    "add": ("u32", "u64", "s32", "f32", "f64", *halves.HALVES),
    "exch": ("b32", "b64"),
    "cas": ("b16", "b32", "b64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}
_SHORT_VECTORS = {"f16": (2, 4, 8), "bf16": (2, 4, 8), "f16x2": (2, 4), "bf16x2": (2, 4)}
_VECTOR_TYPES: dict[str, dict[str, tuple[int, ...]]] = {
    "add": {"f32": (2, 4), **_SHORT_VECTORS},
    "min": _SHORT_VECTORS,
    "max": _SHORT_VECTORS,
}
"""Lengths of vectors in global memory, of which each element is changed for itself."""


def _atomic_form(at: Instruction) -> tuple[str, str, int]:
    """Operation, type and elements."""
    *rest, kind = at.parts[1:]
    name = next((part for part in rest if part in _ATOMIC_TYPES), "")
    count = _length(at)
    known = kind in _ATOMIC_TYPES.get(name, ())
    if count > 1:
        known = count in _VECTOR_TYPES.get(name, {}).get(kind, ()) and "global" in rest
    extra = {name, "L2::cache_hint", *_VECTORS} | ({"noftz"} if kind in halves.HALVES else set())
    if not known or not (_ORDERS | extra).issuperset(rest):
        fail(at, "this form is not modelled")
    if kind in halves.HALVES and "noftz" not in rest:
        fail(at, "expected .noftz, which says that subnormal numbers stay")
    return name, kind, count


def _change_of(name: str, kind: str) -> Callable[[Any, Any], Any] | None:
    """Old and new value to what memory holds then; None for cas."""
    if kind not in halves.HALVES:
        return _ATOMIC.get(name)
    function, dtype = halves.function(name, (), kind), DTYPES[kind]
    assert function is not None
    return lambda old, new: function(*(np.array([x], dtype) for x in (old, new)))[0].item()


@effect("atom", "red")
def atom(b: Binder, at: Instruction) -> Effect:
    """Thread after thread, in the order of their numbers."""
    name, kind, count = _atomic_form(at)
    space = next((part for part in at.parts if part in _SPACES), "")
    returns, compares = at.parts[0] == "atom", name == "cas"
    if compares and not returns:
        fail(at, "cas without a result is not modelled")
    expected = 2 + returns + compares
    if len(at.operands) - ("L2::cache_hint" in at.parts) != expected:
        fail(at, f"{len(at.operands)} operands, expected {expected}")
    change, size, dtype = _change_of(name, kind), BYTES[kind], DTYPES[kind]
    operands = at.operands[1:] if returns else at.operands
    where = addresses(b, operands[0], at, kind)
    given = [
        [values(b, element, kind, at) for element in _elements(operand)]
        for operand in operands[1 : 3 if compares else 2]
    ]
    dests = [b.dest(x, kind, at) for x in _elements(at.operands[0])] if returns else []
    lengths = {len(elements) for elements in given} | ({len(dests)} if returns else {count})
    if lengths != {count}:
        fail(at, f"expected {count} registers")

    def changed(old: Any, new: list[Any]) -> Array:
        if change is not None:
            result = change(old.item(), new[0])
        else:
            result = new[1] if old.item() == new[0] else old.item()
        if dtype.kind in "iu":
            return np.array(result % (1 << 8 * size), f"u{size}").reshape(1)
        return np.array([result], dtype).view(f"u{size}")

    @strong
    def exchange(warp: Warp, space: str, here: Array, new: list[Any], mask: int) -> list[Any]:
        loaded = load(warp, space, here, size, count, mask)
        if warp.unwritten is not None:
            raise Finding(Kind.UNWRITTEN, "an atomic operation changes what was never written")
        old = [bits.view(dtype)[0] for bits in loaded]
        results = [changed(x, [y[i] for y in new]) for i, x in enumerate(old)]
        store(warp, space, here, size, results, mask)
        return old

    def run(warp: Warp, mask: int) -> None:
        warp.unwritten = None
        places, new = where(warp), [[read(warp) for read in elements] for elements in given]
        before = np.zeros((count, 32), dtype)
        for lane in np.flatnonzero(lanes(mask)):
            here = places[lane : lane + 1]
            mine = [[x[lane].item() for x in elements] for elements in new]
            before[:, lane] = exchange(warp, space, here, mine, 1 << int(lane))
        for (place, out), value in zip(dests, before, strict=False):
            warp.write(place, out(value) if out else value, mask)

    return run


@effect("st.bulk")
def st_bulk(b: Binder, at: Instruction) -> Effect:
    """Each thread clears a range of shared memory, in 8-byte words."""
    if not {"weak", "shared::cta"}.issuperset(at.parts[2:]) or number(at.operands[2], at) != 0:
        fail(at, "this form is not modelled")
    space = "shared" if "shared::cta" in at.parts else ""
    where, sizes = addresses(b, at.operands[0], at, "b64"), values(b, at.operands[1], "u64", at)

    def run(warp: Warp, mask: int) -> None:
        for place, size in zip(
            *(x(warp)[lanes(mask)].tolist() for x in (where, sizes)), strict=True
        ):
            if size % 8:
                raise Finding(Kind.MISALIGNED, f"st.bulk of {size} bytes, expected a multiple of 8")
            words = np.arange(place, place + size, 8)
            if not size:
                continue
            if space == "" and place >> 60 != WINDOWS["shared"] >> 60:
                raise Finding(Kind.OUT_OF_BOUNDS, f"st.bulk at {place:#x}, not in shared memory")
            store(warp, space, words, 8, [np.zeros(len(words), np.uint64)], mask)

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
        value = (given >> 60 << 60 | ranked(ranks.astype(np.int64), given)).astype(DTYPES[kind])
        place, out = dest
        warp.write(place, out(value) if out else value, mask)

    return run


@effect("trap", "brkpt")
def trap(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> None:
        raise Finding(Kind.TRAP, f"by threads {mask:#010x}")

    return run
