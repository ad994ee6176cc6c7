"""The machine while it runs: CTAs, clusters, and the queue of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator.alu import LANES
from mqa.emulator.floats import Array
from mqa.emulator.memory import Buffer, Checks, Global, Shared
from mqa.emulator.order import Order, Seen
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.sync import REGISTERS_OF_CTA, MBarrier, NamedBarrier
from mqa.emulator.warp import Wait, Warp

if TYPE_CHECKING:
    from mqa.emulator.program import Program


class Operation:
    """Something asynchronous: `act` is called once, when the scheduler decides."""

    def __init__(self, name: str, act: Callable[[], None], time: int = 0) -> None:
        self.name, self._act, self.time = name, act, time
        """Of the party whose operation it is, see `mqa.emulator.order`."""
        self.done = False
        self.after: list[Operation] = []
        """Operations that have to be done before."""
        self.priority = 0.0

    def __str__(self) -> str:
        return self.name

    def eligible(self) -> bool:
        return all(other.done for other in self.after)

    def complete(self) -> None:
        self._act()
        self.done = True
        self.after = []


class Cluster(list["Cta"]):
    """CTAs by rank, and their barrier."""

    def __init__(self, order: Order | None) -> None:
        super().__init__()
        self.arrived = self.round = self.warps = 0
        self.order = order
        self.told: Seen = {}
        """What arrivals of this round told."""

    def arrive(self) -> None:
        self.arrived += 1
        self._complete()

    def leave(self, warp: Warp) -> None:
        """A warp ended: nobody waits for it any more."""
        if warp.view is not None:
            warp.view.release(self.told)
        self.warps -= 1
        self._complete()

    def _complete(self) -> None:
        if self.warps and self.arrived == self.warps:
            self.arrived = 0
            self.round += 1
            self.told = {}  # those who wait hold theirs


class RegistersWait(Wait):
    """setmaxnreg.inc waits until other warps gave registers back."""

    retry = True

    def __init__(self, cta: Cta, warp: Warp, wanted: int) -> None:
        self.cta, self.more = cta, (wanted - warp.max_registers) * LANES

    def ready(self) -> bool:
        return self.cta.registers + self.more <= REGISTERS_OF_CTA

    def __str__(self) -> str:
        return f"{self.more} registers, of which {REGISTERS_OF_CTA - self.cta.registers} are free"


class Cta:
    """Shared memory, barriers and warps of one block."""

    def __init__(self, machine: Machine, index: int, rank: int, cluster: Cluster) -> None:
        self.machine, self.index, self.rank, self.cluster = machine, index, rank, cluster
        program = machine.program
        self.threads = machine.threads
        size = program.layout.static_shared + machine.dynamic_shared
        self.shared = Shared(size, machine.checks, program.grain, machine.names)
        self.barriers: dict[int, MBarrier] = {}
        self._named: dict[int, NamedBarrier] = {}
        self._local: dict[int, Array] = {}
        self.products: dict[int, Any] = {}
        """Of each warpgroup: what `mqa.emulator.wgmma` keeps."""
        self.warps = [
            Warp(self, i, min(LANES, self.threads - i * LANES), program)
            for i in range(-(-self.threads // LANES))
        ]
        self.registers = 0
        for warp in self.warps:
            self._start(warp)
        cluster.warps += len(self.warps)

    def _start(self, warp: Warp) -> None:
        """Special registers, and the registers that a launch gives each thread."""
        warp.max_registers = min(255, REGISTERS_OF_CTA // max(self.threads, 1) // 8 * 8)
        self.registers += warp.max_registers * LANES
        lane = np.arange(LANES, dtype=np.uint32)
        x, y, _ = self.machine.block
        thread = lane + np.uint32(warp.index * LANES)
        grid = self.machine.grid
        where = (
            self.index % grid[0],
            self.index // grid[0] % grid[1],
            self.index // grid[0] // grid[1],
        )
        known: dict[str, Any] = {
            "%laneid": lane,
            "%warpid": warp.index,
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": len(self.cluster) or self.machine.cluster,
            "%lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
        }
        for axis, name in enumerate("xyz"):
            known[f"%ctaid.{name}"] = where[axis]
            known[f"%nctaid.{name}"] = grid[axis]
            known[f"%ntid.{name}"] = self.machine.block[axis]
        for name, place in self.machine.program.binder.special.items():
            if name not in known:
                raise Finding(Kind.LAUNCH, f"special register {name} is not modelled")
            warp.registers[place] = np.broadcast_to(np.uint32(known[name]), LANES).copy()

    def named(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise Finding(Kind.BARRIER, f"barrier {number}, expected 0 to 15")
        return self._named.setdefault(number, NamedBarrier(number))

    def peer(self, rank: int) -> Cta:
        """Another CTA of the cluster."""
        if not 0 <= rank < len(self.cluster):
            raise Finding(
                Kind.OUT_OF_BOUNDS, f"rank {rank} of a cluster of {len(self.cluster)} CTAs"
            )
        other = self.cluster[rank]
        if all(warp.done for warp in other.warps):
            raise Finding(Kind.RACE, f"CTA {other.index} ended, its shared memory is gone")
        return other

    def local(self, warp: Warp) -> Array:
        """Local memory of a warp's threads."""
        if warp.index not in self._local:
            size = -(-self.machine.program.layout.local // 16) * 16
            self._local[warp.index] = np.full((LANES, size), 0xFF, np.uint8)
        return self._local[warp.index]

    def keep_barriers(self, shared: Shared, places: Array, size: int) -> None:
        """Raise a finding if ordinary stores hit a live barrier."""
        owner = (
            self
            if shared is self.shared
            else next(cta for cta in self.cluster if cta.shared is shared)
        )
        if not owner.barriers:
            return
        low, high = int(places.min()), int(places.max()) + size
        first, last = owner.barrier_span()
        if high <= first or low >= last + 8:
            return
        for address in owner.barriers:
            if np.count_nonzero((places < address + 8) & (places + size > address)):
                raise Finding(Kind.BARRIER, f"a store hits {owner.barriers[address]}")

    def barrier_span(self) -> tuple[int, int]:
        return min(self.barriers), max(self.barriers)

    def change_registers(self, warp: Warp, wanted: int) -> Wait | None:
        wait = RegistersWait(self, warp, wanted)
        if not wait.ready():
            return wait
        self.registers += wait.more
        warp.max_registers = wanted
        return None


class Machine:
    """One launch: memory, what runs, and what is in flight."""

    def __init__(
        self,
        program: Program,
        memory: Global,
        params: Buffer,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: int,
        dynamic_shared: int,
        maps: dict[int, Any],
        checks: Checks,
        names: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.program, self.memory = program, memory
        self.checks, self.names = checks, names
        self.params, self.maps = params, maps
        self.grid, self.block, self.cluster = grid, block, cluster
        self.threads = block[0] * block[1] * block[2]
        self.dynamic_shared = dynamic_shared
        self.ctas: list[Cta] = []
        self.operations: list[Operation] = []
        self.progress = 0
        """Counts what a spinning thread could be waiting for."""
        self.surrender = 0
        """Counts how often waits with a time limit gave up."""
        self.eager = True

    def issue(self, operation: Operation) -> None:
        """Begin something asynchronous."""
        if self.eager and operation.eligible():
            operation.complete()
            self.progress += 1
        else:
            self.operations.append(operation)

    def start_cluster(self, first: int) -> None:
        cluster = Cluster(Order() if self.checks.order else None)
        for rank in range(self.cluster):
            cta = Cta(self, first + rank, rank, cluster)
            cluster.append(cta)
            self.ctas.append(cta)
