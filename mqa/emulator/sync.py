"""Synchronisation: mbarriers, barriers of warps, CTAs and clusters, and what threads exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mqa.emulator import floats, rounding, taint
from mqa.emulator.alu import DTYPES, LANES, Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.memory import RANK_SHIFT, WINDOWS, rank_of
from mqa.emulator.order import Seen, Use, merge
from mqa.emulator.parser import Instruction, Operand, Pair, Symbol
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.taint import Taint
from mqa.emulator.warp import FULL, Wait, lanes, mask_of

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta
    from mqa.emulator.warp import Warp

MOST_ARRIVALS = (1 << 20) - 1
GROUP_WARPS = 4
"""Warps of a warpgroup."""
_PENDING_BITS = 20
"""Of a state that an arrival returns; the phase stands above."""
_OWN = {"shared", "shared::cta", "b64"}
_ANY = {*_OWN, "shared::cluster"}
_SCOPES = {"cta", "cluster"}


class MBarrier:
    """An mbarrier object: phase, arrivals and bytes still to come."""

    def __init__(self, warp: Warp, address: int, count: int) -> None:
        self.cta, self.address = warp.cta, address
        self.expected = self.pending = count
        self.phase = self.bytes = 0
        self.known_to_engines = False
        """Whether a fence followed the initialisation."""
        view = warp.view
        self.party = view.order.new_party() if view else 0
        self.made = 0
        if view is not None:
            warp.inits += 1
            view.saw(warp.init_party, warp.inits)
            self.made = view.order.number(Use(warp.init_party, warp.inits, warp.where()))
        self.known: Seen = {}
        """What those know that waited for the last phase that is over."""
        self.told: Seen = {}
        """What arrivals of this phase told."""
        self._made_at = warp.place()

    def __str__(self) -> str:
        name = self.cta.shared.name_of(self.address)
        made = "" if name else f", initialised at {self._made_at}"
        return (
            f"mbarrier {name}{' ' if name else ''}at shared address {self.address:#x} of CTA "
            f"{self.cta.index}{made}"
        )

    def state(self) -> str:
        return (
            f"phase {self.phase}, {self.pending} of {self.expected} arrivals and "
            f"{self.bytes} bytes to come"
        )

    def token(self) -> int:
        """What an arrival returns: the phase and the arrivals to come before it."""
        return self.phase << _PENDING_BITS | self.pending

    def done(self, parity: int) -> bool:
        """Whether the phase of that parity is over, as far as one bit tells."""
        return self.phase & 1 != parity

    def expect(self, size: int) -> None:
        self.bytes += size
        self._check_bytes()

    def arrive(self, count: int = 1, *, drop: bool = False, completes: bool = True) -> None:
        """`drop`: later phases expect as many fewer. Unless `completes`, the phase must not end."""
        if not 1 <= count <= self.pending:
            raise Finding(Kind.BARRIER, f"{count} arrivals at {self}, which is in {self.state()}")
        self.pending -= count
        if drop:
            self.expected -= count
        if not completes and self.pending == 0 and self.bytes == 0:
            raise Finding(Kind.BARRIER, f"an arrival with .noComplete ends a phase of {self}")
        self._complete()

    def deliver(self, size: int) -> None:
        """Bytes that an asynchronous copy brought."""
        self.bytes -= size
        self._check_bytes()
        self._complete()

    def _check_bytes(self) -> None:
        if abs(self.bytes) > MOST_ARRIVALS:
            raise Finding(Kind.BARRIER, f"{self} counts {self.bytes} bytes, more than it can")

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected
            machine = self.cta.machine
            machine.progress += 1
            if machine.recorder is not None:
                machine.recorder.flipped(self)
            merge(self.known, self.told)
            self.known[self.party] = self.phase
            self.told = {}


Members = Callable[["Warp", int], "tuple[int, int, Wait | None]"]


class Awaited(NamedTuple):
    """The end of a phase, named by its parity or by a state."""

    barrier: MBarrier
    phase: int
    by_parity: bool

    def over(self) -> bool:
        if self.by_parity:
            return self.barrier.done(self.phase)
        return self.barrier.phase != self.phase


class PhaseWait(Wait):
    """Until one of the phases that threads wait for is over. Where nothing else can happen,
    try_wait gives up and says no."""

    retry = True

    def __init__(self, awaited: Iterable[Awaited]) -> None:
        self.awaited = tuple(dict.fromkeys(awaited))
        self.machine = self.awaited[0].barrier.cta.machine
        self.since = self.machine.surrender

    @property
    def label(self) -> str:
        names = (
            f"mbarrier {one.barrier.address:#x} {'parity' if one.by_parity else 'phase'} "
            f"{one.phase}"
            for one in self.awaited
        )
        return ", ".join(names)

    def ready(self) -> bool:
        return any(one.over() for one in self.awaited) or self.gave_up()

    def gave_up(self) -> bool:
        return self.machine.surrender > self.since

    def __str__(self) -> str:
        told = []
        for barrier, phase, by_parity in self.awaited:
            which = f"a phase of parity {phase}" if by_parity else f"phase {phase}"
            told.append(f"{barrier} to end {which}: {barrier.state()}")
        return "; or ".join(told)


def _place(warp: Warp, address: int) -> tuple[Cta, int]:
    """CTA and offset that a shared or generic address names."""
    window = WINDOWS["shared"]
    if address < 0:
        bad = ~address & (1 << 64) - 1
        raise Finding(Kind.OUT_OF_BOUNDS, f"mbarrier at generic {bad:#x}, not in shared memory")
    if address >= window:
        if address >> 60 != window >> 60:
            raise Finding(Kind.OUT_OF_BOUNDS, f"mbarrier at {address:#x}, not in shared memory")
        address -= window
    rank, offset = rank_of(address), address & (1 << RANK_SHIFT) - 1
    return warp.cta if rank is None else warp.cta.peer(rank), offset


def barrier_at(warp: Warp, address: int) -> MBarrier:
    """The live barrier at a shared or generic address, perhaps of another CTA of the cluster."""
    cta, offset = _place(warp, address)
    found = cta.barriers.get(offset)
    if found is None:
        name = cta.shared.name_of(offset)
        where = f"{address:#x}{' (' * bool(name)}{name}{')' * bool(name)}"
        raise Finding(Kind.BARRIER, f"no mbarrier was initialised at shared address {where}")
    if warp.view is not None and (use := warp.view.later(found.made)) is not None:
        raise Finding(
            Kind.RACE,
            f"{found} is used, and nothing orders that after its initialisation by {use.what}",
        )
    return found


def _own_place(warp: Warp, address: int, what: str) -> int:
    """Offset in the CTA's own shared memory."""
    cta, offset = _place(warp, address)
    if cta is not warp.cta:
        raise Finding(
            Kind.BARRIER, f"{what} at {address:#x} of CTA {cta.index}, expected one of its own CTA"
        )
    return offset


def _each(where: Array, mask: int) -> list[int]:
    """Values of the threads of a mask."""
    picked: list[int] = where[lanes(mask)].tolist()
    return picked


def _check_form(at: Instruction, known: set[str]) -> None:
    unknown = [part for part in at.parts[2:] if part not in known]
    if unknown:
        fail(at, f"modifier .{unknown[0]} is not modelled")


def barrier_places(b: Binder, operand: Operand, at: Instruction) -> Callable[[Warp], Array]:
    """Reader of addresses of mbarriers. Generic ones come complemented unless they are shared."""
    read = addresses(b, operand, at, "b64")
    if any(part.startswith("shared") for part in at.parts):
        return read

    def generic(warp: Warp) -> Array:
        found = read(warp)
        places: Array = np.where(found >> 60 == WINDOWS["shared"] >> 60, found, ~found)
        return places

    return generic


@effect("mbarrier.init")
def mbarrier_init(b: Binder, at: Instruction) -> Effect:
    _check_form(at, _OWN)
    where, counts = barrier_places(b, at.operands[0], at), values(b, at.operands[1], "u32", at)

    def run(warp: Warp, mask: int) -> None:
        for given, count in zip(_each(where(warp), mask), _each(counts(warp), mask), strict=True):
            address = _own_place(warp, given, "mbarrier.init")
            warp.cta.shared.check(np.array([address]), 8, "mbarrier.init")
            if not 1 <= count <= MOST_ARRIVALS:
                raise Finding(Kind.BARRIER, f"count {count}, expected 1 to {MOST_ARRIVALS}")
            if address in warp.cta.barriers and warp.cta.machine.checks.any:
                raise Finding(Kind.BARRIER, f"{warp.cta.barriers[address]} is initialised again")
            warp.cta.barriers[address] = MBarrier(warp, address, count)
            warp.new_barriers.append(warp.cta.barriers[address])

    return run


@effect("mbarrier.inval")
def mbarrier_inval(b: Binder, at: Instruction) -> Effect:
    _check_form(at, _OWN)
    where = barrier_places(b, at.operands[0], at)

    def run(warp: Warp, mask: int) -> None:
        for address in _each(where(warp), mask):
            offset = _own_place(warp, address, "mbarrier.inval")
            barrier_at(warp, address)
            del warp.cta.barriers[offset]

    return run


@effect("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(b: Binder, at: Instruction) -> Effect:
    """Threads arrive one after the other; each gets the state before its arrival."""
    _check_form(at, {*_ANY, *_SCOPES, "release", "relaxed", "expect_tx", "noComplete"})
    drop, expects = at.parts[1] == "arrive_drop", "expect_tx" in at.parts
    completes = "noComplete" not in at.parts
    releases = "relaxed" not in at.parts
    token, place, *rest = at.operands
    if (expects or not completes) and len(rest) != 1:
        fail(at, "expected a number after the address")
    sink = isinstance(token, Symbol) and token.name == "_"
    if "shared::cluster" in at.parts and not sink:
        fail(at, "an arrival at .shared::cluster returns no state, expected _")
    where = barrier_places(b, place, at)
    amount = values(b, rest[0], "u32", at) if rest else None
    dest = None if sink else b.dest(token, "b64", at)

    def run(warp: Warp, mask: int) -> None:
        warp.cta.shared.tell(warp.index)
        told: dict[MBarrier, int] = {}
        tokens = np.zeros(LANES, np.uint64)
        amounts = _each(amount(warp), mask) if amount else [1] * mask.bit_count()
        threads = np.flatnonzero(lanes(mask))
        for lane, address, value in zip(threads, _each(where(warp), mask), amounts, strict=True):
            barrier = barrier_at(warp, address)
            tokens[lane] = barrier.token()
            if warp.view is not None and told.get(barrier) != barrier.phase:
                if releases:
                    warp.view.release(barrier.told)
                else:
                    merge(barrier.told, warp.fenced)
                told[barrier] = barrier.phase
            if not releases and warp.tensor is not None:
                merge(barrier.told, warp.tensor.handed)
            if expects:
                barrier.expect(value)
            barrier.arrive(1 if expects else value, drop=drop, completes=completes)
        if dest is not None:
            warp.write(dest[0], dest[1](tokens) if dest[1] else tokens, mask)

    return run


@effect("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(b: Binder, at: Instruction) -> Effect:
    _check_form(at, {*_ANY, *_SCOPES, "relaxed"})
    where, sizes = barrier_places(b, at.operands[0], at), values(b, at.operands[1], "u32", at)
    expects = at.parts[1] == "expect_tx"

    def run(warp: Warp, mask: int) -> None:
        for address, size in zip(_each(where(warp), mask), _each(sizes(warp), mask), strict=True):
            barrier = barrier_at(warp, address)
            if expects:
                barrier.expect(size)
            else:
                barrier.deliver(size)

    return run


@effect("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(b: Binder, at: Instruction) -> Effect:
    """try_wait suspends until the phase is over; test_wait answers at once.

    How long try_wait may suspend, its last operand, means nothing where there is no time.
    """
    _check_form(at, {*_OWN, *_SCOPES, "acquire", "relaxed", "parity"})
    by_parity, suspends = "parity" in at.parts, at.parts[1] == "try_wait"
    if len(at.operands) not in ((3, 4) if suspends else (3,)):
        fail(at, f"{len(at.operands)} operands")
    acquires = "relaxed" not in at.parts
    place, cast = b.dest(at.operands[0], "pred", at)
    if cast is not None:
        fail(at, f"{at.operands[0]} is no predicate")
    where = barrier_places(b, at.operands[1], at)
    phases = values(b, at.operands[2], "u32" if by_parity else "b64", at)
    if suspends and len(at.operands) == 4:
        values(b, at.operands[3], "u32", at)

    def awaited(warp: Warp, address: int, given: int) -> Awaited:
        barrier = barrier_at(warp, address)
        _own_place(warp, address, f"{at.parts[1]}")
        return Awaited(barrier, given & 1 if by_parity else given >> _PENDING_BITS, by_parity)

    def run(warp: Warp, mask: int) -> Wait | None:
        asked = list(zip(_each(where(warp), mask), _each(phases(warp), mask), strict=True))
        # All threads of a fragment mostly ask the same.
        wanted = {one: awaited(warp, *one) for one in dict.fromkeys(asked)}
        over = {one: wait.over() for one, wait in wanted.items()}
        if suspends and not any(over.values()) and not warp.gives_up():
            return PhaseWait(wanted.values())
        if warp.view is not None:
            for one, wait in wanted.items():
                if over[one]:
                    merge(warp.view.seen if acquires else warp.heard, wait.barrier.known)
        done = np.zeros(LANES, bool)
        done[lanes(mask)] = [over[one] for one in asked]
        warp.write(place, done, mask)
        return None

    return run


@effect("mbarrier.pending_count")
def mbarrier_pending_count(b: Binder, at: Instruction) -> Effect:
    """Arrivals that were to come when the state was made."""
    _check_form(at, {"b64"})
    place, cast = b.dest(at.operands[0], "u32", at)
    states = values(b, at.operands[1], "b64", at)

    def run(warp: Warp, mask: int) -> None:
        count = (states(warp) & np.uint64(MOST_ARRIVALS)).astype(np.uint32)
        warp.write(place, cast(count) if cast else count, mask)

    return run


class NamedBarrier:
    """One of the 16 barriers of a CTA."""

    def __init__(self, number: int, cta: Cta) -> None:
        self.number, self.cta = number, cta
        self.arrived = self.expected = self.round = 0
        self.of_all = False
        """Whether the round is for all threads that did not end, not for a number of them."""
        self.told: Seen = {}
        """What those told who came in this round."""
        self.reduced: list[tuple[int, int, Callable[[int, int], None]]] = []
        """Of bar.red: how many predicates held, of how many, and who takes the result."""
        self.parts: dict[Warp, tuple[int, int | None]] = {}
        """Warps of which only some threads came, and how many threads these expect."""

    def join(self, warp: Warp, mask: int, expected: int | None) -> None:
        """Threads of a warp came. It arrives when all of its threads that live did."""
        before, _ = self.parts.get(warp, (0, None))
        if before & mask:
            raise Finding(
                Kind.BARRIER,
                f"threads {before & mask:#010x} come to barrier {self.number} again before others "
                "of their warp",
            )
        self.parts[warp] = before | mask, expected
        self.complete_warp(warp)

    def complete_warp(self, warp: Warp) -> None:
        came, expected = self.parts.get(warp, (0, None))
        if came and came | warp.exited == FULL:
            del self.parts[warp]
            self.arrive(LANES, expected)

    def arrive(self, threads: int, expected: int | None) -> None:
        """`expected`: threads of a round; None for all that did not end."""
        wanted = self.cta.live_threads() if expected is None else expected
        if self.arrived and wanted != self.expected:
            raise Finding(
                Kind.BARRIER,
                f"barrier {self.number} is used with {wanted} threads, and in the same round "
                f"with {self.expected}",
            )
        self.of_all = expected is None and (self.of_all or not self.arrived)
        self.expected = wanted
        self.arrived += threads
        if self.arrived > wanted:
            raise Finding(
                Kind.BARRIER, f"{self.arrived} threads at barrier {self.number} of {wanted}"
            )
        self._complete()

    def leave(self) -> None:
        """A warp ended: who waits for all threads does not wait for its."""
        if self.arrived and self.of_all:
            self.expected = self.cta.live_threads()
            self._complete()

    def _complete(self) -> None:
        if self.arrived != self.expected:
            return
        self.arrived = 0
        self.round += 1
        self.told = {}  # those of this round hold theirs
        held = sum(one[0] for one in self.reduced)
        total = sum(one[1] for one in self.reduced)
        for _, _, take in self.reduced:
            take(held, total)
        self.reduced.clear()


class RoundWait(Wait):
    def __init__(self, barrier: NamedBarrier) -> None:
        self.barrier, self.round, self.told = barrier, barrier.round, barrier.told

    @property
    def label(self) -> str:
        return f"barrier {self.barrier.number}"

    def ready(self) -> bool:
        return self.barrier.round > self.round

    def over(self, warp: Warp) -> None:
        if warp.view is not None:
            warp.view.acquire(self.told)

    def __str__(self) -> str:
        barrier = self.barrier
        parts = [
            f", and {mask:#010x} of warp {warp.index}" for warp, (mask, _) in barrier.parts.items()
        ]
        came = f"{barrier.arrived} of {barrier.expected} threads came"
        return f"barrier {barrier.number}: {came}{''.join(parts)}"


_BARRIERS = [
    f"{name}.{action}"
    for name in ("bar", "bar.cta", "barrier", "barrier.cta")
    for action in ("sync", "arrive", "red")
]


@effect(*_BARRIERS)
def bar(b: Binder, at: Instruction) -> Effect:
    """Whole warps arrive. Unless aligned, their threads may come one by one."""
    aligned = at.parts[0] == "bar" or "aligned" in at.parts
    waits, reduces = "arrive" not in at.parts, "red" in at.parts
    operands = at.operands[1:] if reduces else at.operands
    which = values(b, operands[0], "u32", at)
    count = values(b, operands[1], "u32", at) if len(operands) > 1 + reduces else None
    if not waits and count is None:
        fail(at, "expected a number of threads")
    taker = _taker(b, at) if reduces else None
    readers = [read for read in (which, count) if read is not None]

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL) if aligned else None
        if wait is not None:
            return wait
        lane = (mask & -mask).bit_length() - 1
        if not aligned:
            for read in readers:
                mask = _alike(warp, mask, read(warp))
        elif warp.cta.machine.checks.any:
            _check_uniform(warp, [read(warp)[lanes(mask)] for read in readers])
        barrier = warp.cta.named(int(which(warp)[lane]))
        expected = int(count(warp)[lane]) if count else None
        if expected is not None and (expected % LANES or not 0 < expected <= 1024):
            raise Finding(Kind.BARRIER, f"{expected} threads, expected a multiple of {LANES}")
        warp.cta.shared.tell(warp.index)
        after = RoundWait(barrier)
        if taker is not None:
            barrier.reduced.append(taker(warp, mask))
        if warp.view is not None:
            warp.view.release(barrier.told)
        barrier.join(warp, mask, expected)
        return after.unless_ready(warp) if waits else None

    return run


def _check_uniform(warp: Warp, given: list[Array]) -> None:
    """Raise a finding unless all threads name the same barrier and number of threads."""
    for found in given:
        if np.count_nonzero(found != found[0]):
            raise Finding(
                Kind.BARRIER,
                f"threads of warp {warp.index} name barriers or numbers of threads that differ: "
                f"{', '.join(map(str, sorted(set(found.tolist()))[:4]))}",
            )


Taker = Callable[["Warp", int], tuple[int, int, Callable[[int, int], None]]]


def _taker(b: Binder, at: Instruction) -> Taker:
    """Of bar.red: counts a warp's predicates, and gives it the result when all came."""
    mode = next((x for x in ("popc", "and", "or") if x in at.parts), "")
    kind = at.parts[-1]
    if (mode, kind) not in (("popc", "u32"), ("and", "pred"), ("or", "pred")):
        fail(at, "this reduction is not modelled")
    place, cast = b.dest(at.operands[0], kind, at)
    flags = values(b, at.operands[-1], "pred", at)

    def taker(warp: Warp, mask: int) -> tuple[int, int, Callable[[int, int], None]]:
        def take(held: int, total: int) -> None:
            value: Array = np.full(LANES, held, np.uint32)
            if kind == "pred":
                value = np.full(LANES, held == total if mode == "and" else held > 0)
            warp.write(place, cast(value) if cast else value, mask)

        return (mask_of(flags(warp)) & mask).bit_count(), mask.bit_count(), take

    return taker


@effect("bar.warp.sync")
def bar_warp_sync(b: Binder, at: Instruction) -> Effect:
    members = _members(b, at.operands[0], at, anywhere=True)
    return lambda warp, mask: members(warp, mask)[2]


class ClusterWait(Wait):
    label = "cluster barrier"

    def __init__(self, cta: Cta) -> None:
        self.cluster, self.round, self.told = cta.cluster, cta.cluster.round, cta.cluster.told

    def ready(self) -> bool:
        return self.cluster.round > self.round

    def over(self, warp: Warp) -> None:
        if warp.view is not None:
            warp.view.acquire(self.told)

    def __str__(self) -> str:
        return f"its cluster: {self.cluster.arrived} of {self.cluster.warps} warps arrived"


@effect("barrier.cluster.arrive")
def cluster_arrive(b: Binder, at: Instruction) -> Effect:
    """A release at cluster scope unless .relaxed, so what fence.mbarrier_init does is done too."""
    releases = "relaxed" not in at.parts

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        if warp.cluster_wait is not None:
            raise Finding(Kind.BARRIER, "a second arrival at the cluster barrier without a wait")
        warp.cta.shared.tell(warp.index)
        if releases:
            _make_known(warp)
        warp.cluster_wait = ClusterWait(warp.cta)
        if warp.view is not None and releases:
            warp.view.release(warp.cta.cluster.told)
        elif warp.view is not None:
            begun = {warp.cta.party: 1, warp.init_party: warp.fenced_inits}
            merge(warp.cta.cluster.told, {**begun, **warp.fenced})
        warp.cta.cluster.arrive()
        return None

    return run


@effect("barrier.cluster.wait")
def cluster_wait(b: Binder, at: Instruction) -> Effect:
    def run(warp: Warp, mask: int) -> Wait | None:
        wait: Wait | None = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        wait, warp.cluster_wait = warp.cluster_wait, None
        if wait is None:
            raise Finding(Kind.BARRIER, "a wait at the cluster barrier without an arrival")
        return wait.unless_ready(warp)

    return run


@effect("getctarank")
def getctarank(b: Binder, at: Instruction) -> Effect:
    """The rank of the CTA that a shared or generic address belongs to."""
    place, cast = b.dest(at.operands[0], "u32", at)
    where = values(b, at.operands[1], cluster_address(at), at)

    def run(warp: Warp, mask: int) -> None:
        given = where(warp).astype(np.int64) & (1 << 60) - 1
        found = (rank_of(address) for address in given.tolist())
        value = np.array([warp.cta.rank if rank is None else rank for rank in found], np.uint32)
        warp.write(place, cast(value) if cast else value, mask)

    return run


def cluster_address(at: Instruction) -> str:
    """Type of the addresses of shared memory of a cluster that an instruction takes."""
    *space, kind = at.parts[1:]
    if kind not in ("u32", "u64") or space not in ([], ["shared::cluster"]):
        fail(at, "this form is not modelled")
    if not space and kind == "u32":
        fail(at, "generic addresses have 64 bits")
    return kind


@effect("fence", "membar")
def fence(b: Binder, at: Instruction) -> Effect:
    if "proxy" in at.parts and "async" in at.parts:

        def run(warp: Warp, mask: int) -> None:
            warp.cta.shared.fence(warp.index)
            _make_known(warp)

        return run
    if "mbarrier_init" in at.parts:
        return lambda warp, mask: _make_known(warp)
    if "proxy" in at.parts:
        return lambda warp, mask: None
    return _fence


def _fence(warp: Warp, mask: int) -> None:
    """Relaxed arrivals after it are releases, and relaxed waits before it acquired."""
    if warp.view is not None:
        warp.view.acquire(warp.heard)
        warp.fenced = warp.view.seen.copy()
        warp.view.begin_anew()


def _make_known(warp: Warp) -> None:
    """Barriers that the warp initialised may now be used by asynchronous engines, and by CTAs of
    the cluster that its next arrival is known to."""
    warp.fenced_inits = warp.inits
    for barrier in warp.new_barriers:
        barrier.known_to_engines = True
    warp.new_barriers.clear()


@effect("griddepcontrol")
def griddepcontrol(b: Binder, at: Instruction) -> Effect:
    """Grids run one after the other: the one before has ended, and its stores are there."""
    if at.parts[1:] not in (("wait",), ("launch_dependents",)):
        fail(at, "expected .wait or .launch_dependents")
    return lambda warp, mask: None


@effect("nanosleep")
def nanosleep(b: Binder, at: Instruction) -> Effect:
    """There is no time."""
    return lambda warp, mask: None


@effect("setmaxnreg")
def setmaxnreg(b: Binder, at: Instruction) -> Effect:
    """Warps of a warpgroup each change their budget, and all by the same instructions."""
    wanted = number(at.operands[0], at)
    if not 24 <= wanted <= 256 or wanted % 8:
        fail(at, f"{wanted} registers, expected a multiple of 8 from 24 to 256")
    if at.parts[1] not in ("inc", "dec"):
        fail(at, "expected .inc or .dec")
    grows = at.parts[1] == "inc"

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        if (wanted < warp.max_registers) == grows and wanted != warp.max_registers:
            raise Finding(
                Kind.REGISTERS,
                f"from {warp.max_registers} to {wanted} registers with .{at.parts[1]}",
            )
        return warp.cta.change_registers(warp, wanted, at.line)

    return run


@effect("elect.sync")
def elect(b: Binder, at: Instruction) -> Effect:
    """The lowest thread of the mask."""
    to = at.operands[0]
    if not isinstance(to, Pair):
        fail(at, "expected a pair of results")
    chosen, flag = b.dest(to.first, "b32", at), b.dest(to.second, "pred", at)
    members = _members(b, at.operands[1], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        mask, _, wait = members(warp, mask)
        if wait is not None:
            return wait
        lane = (mask & -mask).bit_length() - 1
        warp.write(chosen[0], np.full(LANES, lane, np.uint32), mask)
        warp.write(flag[0], np.arange(LANES) == lane, mask)
        return None

    return run


def _alike(warp: Warp, mask: int, given: Array) -> int:
    """The threads of a mask that give what its first one gives; the others come anew."""
    first = given[(mask & -mask).bit_length() - 1]
    if np.count_nonzero(given != first):
        mask &= mask_of(given == first)
        warp.part(mask)
    return mask


def _members(b: Binder, operand: Operand, at: Instruction, *, anywhere: bool = False) -> Members:
    """Reader of the masks of threads that take part, each of them by itself.

    Gives the threads that go on now, their mask, and a wait if they are not all there.
    """
    given = values(b, operand, "b32", at)

    def read(warp: Warp, mask: int) -> tuple[int, int, Wait | None]:
        masks = given(warp)
        mask = _alike(warp, mask, masks)
        needed = int(masks[(mask & -mask).bit_length() - 1])
        if mask & ~needed and warp.cta.machine.checks.any:
            raise Finding(
                Kind.DIVERGENCE,
                f"threads {mask & ~needed:#010x} are not in the mask {needed:#010x} that they give",
            )
        return mask, needed, warp.needs(mask, needed, anywhere=anywhere)

    return read


@functools.lru_cache(maxsize=1024)
def _sources(mode: str, amounts: bytes, shapes: bytes) -> tuple[Array, Array]:
    """The thread that each takes a shuffled value from, and whether it is inside the segment."""
    lane = np.arange(LANES)
    amount = np.frombuffer(amounts, np.uint32).astype(np.int64) & 31
    shape = np.frombuffer(shapes, np.uint32).astype(np.int64)
    segment, clamp = shape >> 8 & 31, shape & 31
    limit = lane & segment | clamp & ~segment
    if mode == "idx":
        source = lane & segment | amount & ~segment
    else:
        source = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount}[mode]
    inside = source >= limit if mode == "up" else source <= limit
    return np.where(inside, source, lane), inside


def _absent(warp: Warp, mask: int, taken: Array) -> Taint | None:
    """What threads get from those that take no part."""
    bad = ~lanes(mask)[taken] & lanes(mask)
    if not np.count_nonzero(bad):
        return None
    thread = int(taken[bad][0])
    return Taint(bad, f"thread {thread} by {warp.place()}", "in which that takes no part")


@effect("shfl.sync", carries=(1,))
def shfl(b: Binder, at: Instruction) -> Effect:
    mode = at.parts[2]
    if mode not in ("up", "down", "bfly", "idx") or at.parts[3:] != ("b32",):
        fail(at, "expected one of .up, .down, .bfly and .idx, and .b32")
    to = at.operands[0]
    result, valid = (to.first, to.second) if isinstance(to, Pair) else (to, None)
    place, out = b.dest(result, "b32", at)
    flag = b.dest(valid, "pred", at) if valid is not None else None
    given, by, form = (values(b, operand, "b32", at) for operand in at.operands[1:4])
    members = _members(b, at.operands[4], at)
    source, _ = b.source(at.operands[1], "b32", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        mask, _, wait = members(warp, mask)
        if wait is not None:
            return wait
        taken, inside = _sources(mode, by(warp).tobytes(), form(warp).tobytes())
        moved = given(warp)[taken]
        held = warp.tainted.get(source)
        if held is not None:
            held = replace(held, lanes=held.lanes[taken])
        if mask != FULL and warp.cta.machine.checks.any:
            held = taint.united([_absent(warp, mask, taken), held])
        warp.write(place, out(moved) if out else moved, mask)
        if held is not None:
            taint.put(warp, place, held, lanes(mask))
        if flag is not None:
            warp.write(flag[0], inside, mask)
        return None

    return run


@effect("vote.sync", carries=(1,))
def vote(b: Binder, at: Instruction) -> Effect:
    """What all say about what was never written is taken as an answer: a kernel may ask about
    rows that it then does not store. A ballot keeps them apart, so it holds such bits."""
    mode = at.parts[2]
    kind = "b32" if mode == "ballot" else "pred"
    if mode not in ("any", "all", "uni", "ballot") or at.parts[3:] != (kind,):
        fail(at, "expected one of .any, .all and .uni with .pred, or .ballot with .b32")
    place, out = b.dest(at.operands[0], kind, at)
    flags, (asked, _) = values(b, at.operands[1], "pred", at), b.source(at.operands[1], "pred", at)
    members = _members(b, at.operands[2], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        mask, needed, wait = members(warp, mask)
        if wait is not None:
            return wait
        needed &= ~warp.exited
        votes = mask_of(flags(warp)) & needed
        held = _united(warp, asked, needed) if mode == "ballot" else None
        if mode == "ballot":
            value: Array = np.full(LANES, votes, np.uint32)
        else:
            answers = {"any": votes != 0, "all": votes == needed}
            answers["uni"] = votes in (0, needed)
            value = np.full(LANES, answers[mode])
        warp.write(place, out(value) if out else value, mask)
        if held is not None:
            taint.put(warp, place, held, lanes(mask))
        return None

    return run


@effect("match.any.sync", "match.all.sync")
def match(b: Binder, at: Instruction) -> Effect:
    """Mask of the threads that have the same value; with .all nothing unless all have."""
    everyone, to = at.parts[1] == "all", at.operands[0]
    result, valid = (to.first, to.second) if isinstance(to, Pair) else (to, None)
    place, out = b.dest(result, "b32", at)
    flag = b.dest(valid, "pred", at) if valid is not None else None
    given, members = values(b, at.operands[1], at.parts[-1], at), _members(b, at.operands[2], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        mask, needed, wait = members(warp, mask)
        if wait is not None:
            return wait
        needed &= ~warp.exited
        value = given(warp)
        same = [mask_of(value == one) & needed for one in value]
        if everyone:
            same = [found if found == needed else 0 for found in same]
        masks = np.array(same, np.uint32)
        warp.write(place, out(masks) if out else masks, mask)
        if flag is not None:
            warp.write(flag[0], masks != 0, mask)
        return None

    return run


@effect("activemask")
def activemask(b: Binder, at: Instruction) -> Effect:
    place, out = b.dest(at.operands[0], "b32", at)

    def run(warp: Warp, mask: int) -> None:
        value = np.full(LANES, mask, np.uint32)
        warp.write(place, out(value) if out else value, mask)

    return run


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


_REDUX_TYPES = (("u32", "s32"), ("b32",))


def _united(warp: Warp, register: int, members: int) -> Taint | None:
    """What all threads get of a register that some hold what was never written in."""
    held = warp.tainted.get(register)
    if held is None or not np.count_nonzero(held.lanes & lanes(members)):
        return None
    return Taint(np.ones(LANES, bool), held.origin)


def _reduction(at: Instruction) -> Callable[[Array], Any]:
    """Many values to one. Of float32 values NaN counts for nothing unless .NaN says so."""
    name, *flags, kind = at.parts[2:]
    bitwise = name in ("and", "or", "xor")
    if kind == "f32" and name in ("max", "min") and flags in ([], ["abs"], ["NaN"], ["abs", "NaN"]):
        two = rounding.extreme(name, ("NaN",) if "NaN" in flags else ())
        assert two is not None
        start = np.full(1, floats.CANONICAL_NAN_F32).view(np.float32)

        def reduce(values: Array) -> Any:
            sizes = np.abs(values) if "abs" in flags else values
            first = start if "NaN" not in flags else sizes[:1]
            return functools.reduce(two, sizes.reshape(-1, 1), first)[0]

        return reduce
    if name not in _REDUCE or flags or kind not in _REDUX_TYPES[bitwise]:
        fail(at, "this reduction is not modelled")
    return lambda values: _REDUCE[name].reduce(values, dtype=DTYPES[kind])


@effect("redux.sync", carries=(1,))
def redux(b: Binder, at: Instruction) -> Effect:
    kind = at.parts[-1]
    reduce, dtype = _reduction(at), DTYPES[kind]
    place, out = b.dest(at.operands[0], kind, at)
    given, (source, _) = values(b, at.operands[1], kind, at), b.source(at.operands[1], kind, at)
    members = _members(b, at.operands[2], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        mask, needed, wait = members(warp, mask)
        if wait is not None:
            return wait
        held = _united(warp, source, needed & ~warp.exited)
        picked = given(warp)[lanes(needed & ~warp.exited)]
        value = np.full(LANES, reduce(picked), dtype)
        warp.write(place, out(value) if out else value, mask)
        if held is not None:
            taint.put(warp, place, held, lanes(mask))
        return None

    return run
