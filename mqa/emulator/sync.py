"""Synchronisation: mbarriers, barriers of warps, CTAs and clusters, and what threads exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mqa.emulator import taint
from mqa.emulator.alu import DTYPES, LANES, Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.memory import RANK_SHIFT
from mqa.emulator.order import Seen, merge
from mqa.emulator.parser import Instruction, Operand, Pair, Symbol
from mqa.emulator.program import Effect, addresses, effect, number, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.taint import Taint
from mqa.emulator.warp import FULL, Wait, lanes, mask_of

if TYPE_CHECKING:
    from mqa.emulator.machine import Cta
    from mqa.emulator.warp import Warp

MOST_ARRIVALS = (1 << 20) - 1


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
        self.made = view.joined(0, warp.where, warp.current.pc) if view else 0
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

    def done(self, parity: int) -> bool:
        """Whether the phase of that parity is over, as far as one bit tells."""
        return self.phase & 1 != parity

    def expect(self, size: int) -> None:
        self.bytes += size
        self._check_bytes()

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise Finding(Kind.BARRIER, f"{count} arrivals at {self}, which is in {self.state()}")
        self.pending -= count
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
            self.cta.machine.progress += 1
            merge(self.known, self.told)
            self.known[self.party] = self.phase
            self.told = {}


Members = Callable[["Warp", int], "tuple[int, Wait | None]"]


class PhaseWait(Wait):
    """For the end of a phase. Where nothing else can happen, try_wait gives up and says no."""

    retry = True

    def __init__(self, barrier: MBarrier, parity: int) -> None:
        self.barrier, self.parity = barrier, parity
        self.since = barrier.cta.machine.surrender

    def ready(self) -> bool:
        return self.barrier.done(self.parity) or self.gave_up()

    def gave_up(self) -> bool:
        return self.barrier.cta.machine.surrender > self.since

    def __str__(self) -> str:
        return f"{self.barrier} to end a phase of parity {self.parity}: {self.barrier.state()}"


def barrier_at(warp: Warp, address: int) -> MBarrier:
    """The live barrier at a shared address, perhaps of another CTA of the cluster."""
    rank, offset = address >> RANK_SHIFT, address & (1 << RANK_SHIFT) - 1
    cta = warp.cta if rank == 0 else warp.cta.peer(rank - 1)
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


def _each(where: Array, mask: int) -> list[int]:
    """Addresses of the threads of a mask."""
    picked: list[int] = where[lanes(mask)].tolist()
    return picked


@effect("mbarrier.init")
def mbarrier_init(b: Binder, at: Instruction) -> Effect:
    where, counts = addresses(b, at.operands[0], at, "b64"), values(b, at.operands[1], "u32", at)

    def run(warp: Warp, mask: int) -> None:
        for address, count in zip(_each(where(warp), mask), _each(counts(warp), mask), strict=True):
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
    where = addresses(b, at.operands[0], at, "b64")

    def run(warp: Warp, mask: int) -> None:
        for address in _each(where(warp), mask):
            barrier_at(warp, address)
            del warp.cta.barriers[address]

    return run


@effect("mbarrier.arrive")
def mbarrier_arrive(b: Binder, at: Instruction) -> Effect:
    known = {"arrive", "expect_tx", "shared", "shared::cta", "shared::cluster", "b64"}
    known |= {"release", "relaxed", "cta", "cluster"}
    if not known.issuperset(at.parts[1:]):
        fail(at, "this form is not modelled")
    expects, releases = "expect_tx" in at.parts, "relaxed" not in at.parts
    token, place, *rest = at.operands
    where = addresses(b, place, at, "b64")
    amount = values(b, rest[0], "u32", at) if rest else None
    sink = isinstance(token, Symbol) and token.name == "_"
    dest = None if sink else b.dest(token, "b64", at)

    def run(warp: Warp, mask: int) -> None:
        warp.cta.shared.tell(warp.index)
        told: dict[MBarrier, int] = {}
        tokens = np.zeros(LANES, np.uint64)
        amounts = _each(amount(warp), mask) if amount else [1] * mask.bit_count()
        threads = np.flatnonzero(lanes(mask))
        for lane, address, value in zip(threads, _each(where(warp), mask), amounts, strict=True):
            barrier = barrier_at(warp, address)
            tokens[lane] = barrier.phase
            if releases and warp.view is not None and told.get(barrier) != barrier.phase:
                warp.view.release(barrier.told)
                told[barrier] = barrier.phase
            if expects:
                barrier.expect(value)
            barrier.arrive(1 if expects else value)
        if dest is not None:
            warp.write(dest[0], tokens, mask)

    return run


@effect("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(b: Binder, at: Instruction) -> Effect:
    where, sizes = addresses(b, at.operands[0], at, "b64"), values(b, at.operands[1], "u32", at)
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
    """try_wait suspends until the phase is over; test_wait answers at once."""
    by_parity, suspends = "parity" in at.parts, at.parts[1] == "try_wait"
    acquires = "relaxed" not in at.parts
    place, cast = b.dest(at.operands[0], "pred", at)
    where = addresses(b, at.operands[1], at, "b64")
    phases = values(b, at.operands[2], "u32" if by_parity else "b64", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        asked = list(zip(where(warp).tolist(), phases(warp).tolist(), strict=True))
        answers: dict[tuple[int, int], bool] = {}
        waits: list[PhaseWait] = []
        # All threads of a fragment mostly ask the same; it goes on when the first one may.
        for address, phase in dict.fromkeys(itertools.compress(asked, lanes(mask))):
            barrier = barrier_at(warp, address)
            answers[address, phase] = barrier.done(phase & 1)
            if not answers[address, phase]:
                waits.append(PhaseWait(barrier, phase & 1))
            elif acquires and warp.view is not None:
                warp.view.acquire(barrier.known)
        if suspends and len(waits) == len(answers) and not warp.gives_up():
            return waits[0]
        done = np.array([answers.get(pair, False) for pair in asked])
        warp.write(place, cast(done) if cast else done, mask)
        return None

    return run


class NamedBarrier:
    """One of the 16 barriers of a CTA."""

    def __init__(self, number: int) -> None:
        self.number, self.arrived, self.expected, self.round = number, 0, 0, 0
        self.told: Seen = {}

    def arrive(self, threads: int, expected: int) -> None:
        if self.arrived and expected != self.expected:
            raise Finding(
                Kind.BARRIER,
                f"barrier {self.number} is used with {expected} threads, and in the same round "
                f"with {self.expected}",
            )
        self.expected = expected
        self.arrived += threads
        if self.arrived > expected:
            raise Finding(
                Kind.BARRIER, f"{self.arrived} threads at barrier {self.number} of {expected}"
            )
        if self.arrived == expected:
            self.arrived = 0
            self.round += 1
            self.told = {}  # those of this round hold theirs


class RoundWait(Wait):
    def __init__(self, barrier: NamedBarrier) -> None:
        self.barrier, self.round, self.told = barrier, barrier.round, barrier.told

    def ready(self) -> bool:
        return self.barrier.round > self.round

    def over(self, warp: Warp) -> None:
        if warp.view is not None:
            warp.view.acquire(self.told)

    def __str__(self) -> str:
        barrier = self.barrier
        return f"barrier {barrier.number}: {barrier.arrived} of {barrier.expected} threads came"


@effect("bar.sync", "bar.arrive", "barrier.sync", "barrier.cta.sync", "barrier.arrive")
@effect("barrier.cta.arrive")
def bar(b: Binder, at: Instruction) -> Effect:
    which = values(b, at.operands[0], "u32", at)
    count = values(b, at.operands[1], "u32", at) if len(at.operands) > 1 else None
    waits = "sync" in at.parts

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        lane = (mask & -mask).bit_length() - 1
        barrier = warp.cta.named(int(which(warp)[lane]))
        live = warp.cta.threads
        expected = int(count(warp)[lane]) if count else live
        if expected % LANES or not 0 < expected <= 1024:
            raise Finding(Kind.BARRIER, f"{expected} threads, expected a multiple of {LANES}")
        warp.cta.shared.tell(warp.index)
        after = RoundWait(barrier)
        if warp.view is not None:
            warp.view.release(barrier.told)
        barrier.arrive(LANES, expected)
        return after.unless_ready(warp) if waits else None

    return run


@effect("bar.warp.sync")
def bar_warp_sync(b: Binder, at: Instruction) -> Effect:
    needed = values(b, at.operands[0], "b32", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        lane = (mask & -mask).bit_length() - 1
        return warp.needs(mask, int(needed(warp)[lane]), anywhere=True)

    return run


class ClusterWait(Wait):
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
    releases = "relaxed" not in at.parts

    def run(warp: Warp, mask: int) -> Wait | None:
        wait = warp.needs(mask, FULL)
        if wait is not None:
            return wait
        if warp.cluster_wait is not None:
            raise Finding(Kind.BARRIER, "a second arrival at the cluster barrier without a wait")
        warp.cta.shared.tell(warp.index)
        warp.cluster_wait = ClusterWait(warp.cta)
        if releases and warp.view is not None:
            warp.view.release(warp.cta.cluster.told)
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


@effect("fence", "membar")
def fence(b: Binder, at: Instruction) -> Effect:
    if "proxy" in at.parts and "async" in at.parts:

        def run(warp: Warp, mask: int) -> None:
            warp.cta.shared.fence(warp.index)
            _make_known(warp)

        return run
    if "mbarrier_init" in at.parts:
        return lambda warp, mask: _make_known(warp)
    return lambda warp, mask: None


def _make_known(warp: Warp) -> None:
    """Barriers that the warp initialised may now be used by asynchronous engines."""
    for barrier in warp.new_barriers:
        barrier.known_to_engines = True
    warp.new_barriers.clear()


@effect("griddepcontrol", "nanosleep")
def nothing(b: Binder, at: Instruction) -> Effect:
    """Grids run one after the other, so dependencies are met."""
    return lambda warp, mask: None


REGISTERS_OF_CTA = 65536


@effect("setmaxnreg")
def setmaxnreg(b: Binder, at: Instruction) -> Effect:
    wanted = number(at.operands[0], at)
    if not 24 <= wanted <= 256 or wanted % 8:
        fail(at, f"{wanted} registers, expected a multiple of 8 from 24 to 256")
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
        return warp.cta.change_registers(warp, wanted)

    return run


@effect("elect.sync")
def elect(b: Binder, at: Instruction) -> Effect:
    """The lowest thread of the mask."""
    to = at.operands[0]
    if not isinstance(to, Pair):
        fail(at, "expected a pair of results")
    chosen, flag = b.dest(to.first, "b32", at), b.dest(to.second, "pred", at)
    members = values(b, at.operands[1], "b32", at)

    def run(warp: Warp, mask: int) -> Wait | None:
        needed = int(members(warp)[(mask & -mask).bit_length() - 1])
        wait = warp.needs(mask, needed)
        if wait is not None:
            return wait
        lane = (needed & -needed).bit_length() - 1
        warp.write(chosen[0], np.full(LANES, lane, np.uint32), mask)
        warp.write(flag[0], np.arange(LANES) == lane, mask)
        return None

    return run


def _members(b: Binder, operand: Operand, at: Instruction) -> Members:
    """Reader of the mask of threads that take part; a wait if they are not all there."""
    given = values(b, operand, "b32", at)

    def read(warp: Warp, mask: int) -> tuple[int, Wait | None]:
        needed = int(given(warp)[(mask & -mask).bit_length() - 1])
        return needed, warp.needs(mask, needed)

    return read


@effect("shfl.sync", carries=(1,))
def shfl(b: Binder, at: Instruction) -> Effect:
    mode = at.parts[2]
    to = at.operands[0]
    result, valid = (to.first, to.second) if isinstance(to, Pair) else (to, None)
    dest = b.dest(result, "b32", at)
    flag = b.dest(valid, "pred", at) if valid is not None else None
    given, by, form = (values(b, operand, "b32", at) for operand in at.operands[1:4])
    members = _members(b, at.operands[4], at)
    source_register, _ = b.source(at.operands[1], "b32", at)
    lane = np.arange(LANES)

    def run(warp: Warp, mask: int) -> Wait | None:
        _, wait = members(warp, mask)
        if wait is not None:
            return wait
        value = given(warp)
        amount, shape = by(warp).astype(np.int64) & 31, form(warp).astype(np.int64)
        segment, clamp = shape >> 8 & 31, shape & 31
        limit = lane & segment | clamp & ~segment
        if mode == "idx":
            source = lane & segment | amount & ~segment
        else:
            source = {"up": lane - amount, "down": lane + amount, "bfly": lane ^ amount}[mode]
        inside = source >= limit if mode == "up" else source <= limit
        taken = np.where(inside, source, lane)
        place, out = dest
        moved = value[taken]
        held = warp.tainted.get(source_register)
        warp.write(place, out(moved) if out else moved, mask)
        if held is not None:
            taint.put(warp, place, Taint(held.lanes[taken], held.origin), lanes(mask))
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
    place, out = b.dest(at.operands[0], kind, at)
    flags, (asked, _) = values(b, at.operands[1], "pred", at), b.source(at.operands[1], "pred", at)
    members = _members(b, at.operands[2], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        needed, wait = members(warp, mask)
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


def _united(warp: Warp, register: int, members: int) -> Taint | None:
    """What all threads get of a register that some hold what was never written in."""
    held = warp.tainted.get(register)
    if held is None or not np.count_nonzero(held.lanes & lanes(members)):
        return None
    return Taint(np.ones(LANES, bool), held.origin)


@effect("redux.sync", carries=(1,))
def redux(b: Binder, at: Instruction) -> Effect:
    name, kind = at.parts[2], at.parts[-1]
    if name not in _REDUCE or kind not in ("u32", "s32", "b32"):
        fail(at, "this reduction is not modelled")
    reduce, dtype = _REDUCE[name], DTYPES[kind]
    place, out = b.dest(at.operands[0], kind, at)
    given, (source, _) = values(b, at.operands[1], kind, at), b.source(at.operands[1], kind, at)
    members = _members(b, at.operands[2], at)

    def run(warp: Warp, mask: int) -> Wait | None:
        needed, wait = members(warp, mask)
        if wait is not None:
            return wait
        held = _united(warp, source, needed & ~warp.exited)
        picked = given(warp)[lanes(needed & ~warp.exited)]
        value = np.full(LANES, reduce.reduce(picked, dtype=dtype), dtype)
        warp.write(place, out(value) if out else value, mask)
        if held is not None:
            taint.put(warp, place, held, lanes(mask))
        return None

    return run
