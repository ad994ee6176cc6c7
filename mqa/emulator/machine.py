"""The machine while it runs: CTAs, clusters, and the queue of asynchronous operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator.alu import LANES
from mqa.emulator.floats import Array
from mqa.emulator.memory import Buffer, Checks, Global, Shared, ranked
from mqa.emulator.order import Order, Seen, merge
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.device import launch_registers, pool_of
from mqa.emulator.sync import GROUP_WARPS, MBarrier, NamedBarrier
from mqa.emulator.warp import Wait, Warp

if TYPE_CHECKING:
    from mqa.emulator.program import Program
    from mqa.emulator.trace import Recorder
    from mqa.emulator.tensor_order import TensorPipe


class Operation:
    """Something asynchronous: `act` is called once, when the scheduler decides."""

    def __init__(
        self,
        name: str,
        act: Callable[[], None],
        time: int = 0,
        *,
        bytes: int = 0,
        address: int | None = None,
    ) -> None:
        self.name, self._act, self.time = name, act, time
        """The time is that of the party whose operation it is, see `mqa.emulator.order`."""
        self.bytes, self.address = bytes, address
        """What it moves, and where in shared memory; for those who look."""
        self.place = ""
        """Likewise, what it uses of tensor memory."""
        self.done = False
        self.after: list[Operation] = []
        """Operations that have to be done before."""
        self.priority = 0.0
        self.watcher: Callable[[Operation], None] | None = None
        """Told when it is done."""

    def __str__(self) -> str:
        return self.name

    def eligible(self) -> bool:
        return all(other.done for other in self.after)

    def complete(self) -> None:
        self._act()
        self.done = True
        self.after = []
        if self.watcher is not None:
            self.watcher(self)


LEAST_REGISTERS = 24
"""Of a thread, that setmaxnreg can leave."""


class Cluster(list["Cta"]):
    """CTAs by rank, and their barrier."""

    def __init__(self, order: Order | None) -> None:
        super().__init__()
        self.arrived = self.round = self.warps = 0
        self.order = order
        self.told: Seen = {}
        """What arrivals of this round told."""
        self.tensor: Any = None
        """What `mqa.emulator.tensor_order` keeps."""

    def arrive(self) -> None:
        self.arrived += 1
        self._complete()

    def leave(self, warp: Warp) -> None:
        """A warp ended: nobody waits for it any more, and an arrival of its is taken back."""
        if warp.view is not None:
            warp.view.release(self.told)
        self.warps -= 1
        wait = warp.cluster_wait
        if wait is not None and not wait.ready():
            self.arrived -= 1
        self._complete()

    def _complete(self) -> None:
        if self.warps and self.arrived == self.warps:
            self.arrived = 0
            self.round += 1
            self.told = {}  # those who wait hold theirs


class RegistersWait(Wait):
    """setmaxnreg.inc waits until other warps gave registers back."""

    retry = True
    label = "registers"

    def __init__(self, cta: Cta, warp: Warp, wanted: int) -> None:
        self.cta, self.more = cta, (wanted - warp.max_registers) * LANES

    def ready(self) -> bool:
        return self.cta.registers + self.more <= self.cta.pool

    def __str__(self) -> str:
        return f"{self.more} registers, of which {self.cta.pool - self.cta.registers} are free"


class Cta:
    """Shared memory, barriers and warps of one block."""

    def __init__(
        self,
        machine: Machine,
        index: int,
        where: tuple[int, int, int],
        rank: int,
        cluster: Cluster,
    ) -> None:
        self.machine, self.index, self.rank, self.cluster = machine, index, rank, cluster
        self.where = where
        """Coordinates in the grid."""
        program = machine.program
        self.threads = machine.threads
        size = program.layout.static_shared + machine.dynamic_shared
        self.shared = Shared(size, machine.checks, program.grain, machine.names)
        self.barriers: dict[int, MBarrier] = {}
        self._named: dict[int, NamedBarrier] = {}
        self._local: dict[int, Array] = {}
        self.products: dict[int, Any] = {}
        """Of each warpgroup: what `mqa.emulator.wgmma` keeps."""
        self.tensor: Any = None
        """Tensor memory, once an instruction asked for it."""
        self.warps = [
            Warp(self, i, min(LANES, self.threads - i * LANES), program)
            for i in range(-(-self.threads // LANES))
        ]
        self.pool = pool_of(machine.registers, self.threads)
        """Registers that the launch took for this CTA: setmaxnreg shares them out."""
        self.registers = self.pool
        """Of these, what its warps have now."""
        self._budgets: dict[int, list[tuple[int, int]]] = {}
        self.party = cluster.order.new_party() if cluster.order else 0
        """Whoever has seen its time 1 knows that the CTA has begun."""
        for warp in self.warps:
            self._start(warp)
        cluster.warps += len(self.warps)

    def _start(self, warp: Warp) -> None:
        """Special registers, and the registers that a launch gives each thread."""
        warp.max_registers = self.pool // (len(self.warps) * LANES)
        if warp.view is not None:
            warp.view.saw(self.party, 1)
        known = self._special(warp)
        binder = self.machine.program.binder
        for name, place in binder.special.items():
            if name.startswith("&"):
                value = self._address(binder.symbols[name[1:]])
            elif name in known:
                value = known[name]
            else:
                raise Finding(Kind.LAUNCH, f"special register {name} is not modelled")
            warp.registers[place] = np.full(LANES, value, binder.types[place])

    def _address(self, symbol: int) -> int:
        """Of a shared variable, as its address is taken: with the rank in a cluster."""
        alone = self.machine.ctas_of_cluster == 1
        return symbol if alone else int(ranked(self.rank, symbol))

    def _special(self, warp: Warp) -> dict[str, Any]:
        lane = np.arange(LANES, dtype=np.uint32)
        machine, one = self.machine, np.uint32(1)
        x, y, _ = machine.block
        thread = lane + np.uint32(warp.index * LANES)
        static = machine.program.layout.static_shared
        known: dict[str, Any] = {
            "%laneid": lane,
            "%warpid": warp.index,
            "%nwarpid": len(self.warps),
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%cluster_ctarank": self.rank,
            "%cluster_nctarank": machine.ctas_of_cluster,
            "%is_explicit_cluster": int(machine.ctas_of_cluster > 1),
            "%smid": self.index % machine.program.device.sms,
            "%nsmid": machine.program.device.sms,
            "%gridid": 1,
            "%dynamic_smem_size": machine.dynamic_shared,
            "%total_smem_size": static + machine.dynamic_shared,
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": (one << lane) - one | one << lane,
            "%lanemask_ge": ~((one << lane) - one),
            "%lanemask_gt": ~((one << lane) - one | one << lane),
        }
        for axis, name in enumerate("xyz"):
            size = machine.cluster[axis]
            known[f"%ctaid.{name}"] = self.where[axis]
            known[f"%nctaid.{name}"] = machine.grid[axis]
            known[f"%ntid.{name}"] = machine.block[axis]
            known[f"%cluster_ctaid.{name}"] = self.where[axis] % size
            known[f"%cluster_nctaid.{name}"] = size
            known[f"%clusterid.{name}"] = self.where[axis] // size
            known[f"%nclusterid.{name}"] = machine.grid[axis] // size
        return known

    def live_threads(self) -> int:
        """Of warps that did not end, whole warps counted."""
        return LANES * sum(not warp.done for warp in self.warps)

    def threads_left(self, warp: Warp) -> None:
        """Threads of a warp ended: who of their sisters came to a barrier is all of the warp."""
        for barrier in self._named.values():
            barrier.complete_warp(warp)

    def leave(self, warp: Warp) -> None:
        """A warp ended."""
        self.cluster.leave(warp)
        for barrier in self._named.values():
            barrier.leave()
        if self.tensor is not None and all(other.done for other in self.warps):
            self.tensor.leave()
        looks = self.machine.checks.look_for(Kind.UNFINISHED)
        if looks and all(other.done for other in self.warps):
            self._check_end()

    def _check_end(self) -> None:
        """Raise a finding if others may still use the shared memory of the CTA, which ends."""
        for _, writes, user in self.shared.in_flight:
            raise Finding(
                Kind.UNFINISHED,
                f"CTA {self.index} ends, and in flight is {user}, which "
                f"{'writes' if writes else 'reads'} its shared memory",
            )
        if self.shared.users is None:
            return
        views = [warp.view for warp in self.warps if warp.view is not None]
        seen: Seen = {}
        for view in views:
            merge(seen, view.seen)
        use = self.shared.users.left(seen, {view.party for view in views}, views[0].order)
        if use is not None:
            raise Finding(
                Kind.UNFINISHED,
                f"CTA {self.index} ends, and nothing orders that after its shared memory was used "
                f"by {use.what}",
            )

    def check_begun(self, warp: Warp) -> None:
        """Raise a finding unless a warp of another CTA knows that this one has begun."""
        if warp.view is not None and self is not warp.cta and self.party not in warp.view.seen:
            raise Finding(
                Kind.RACE,
                f"shared memory of CTA {self.index} is used, and nothing orders that after the "
                "CTA began",
            )

    def named(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise Finding(Kind.BARRIER, f"barrier {number}, expected 0 to 15")
        return self._named.setdefault(number, NamedBarrier(number, self))

    def peer(self, rank: int) -> Cta:
        """Another CTA of the cluster."""
        if not 0 <= rank < len(self.cluster):
            raise Finding(
                Kind.OUT_OF_BOUNDS, f"rank {rank} of a cluster of {len(self.cluster)} CTAs"
            )
        other = self.cluster[rank]
        if all(warp.done for warp in other.warps):
            raise Finding(Kind.UNFINISHED, f"CTA {other.index} ended, its shared memory is gone")
        return other

    def local(self, warp: Warp) -> Array:
        """Local memory of a warp's threads."""
        if warp.index not in self._local:
            size = -(-self.machine.program.layout.local // 16) * 16
            self._local[warp.index] = np.full((LANES, size), 0xFF, np.uint8)
            if self.machine.checks.any:
                warp.local_taint = np.ones((LANES, size), bool)
        return self._local[warp.index]

    def keep_barriers(
        self, shared: Shared, places: Array, size: int, what: str = "a store"
    ) -> None:
        """Raise a finding if what writes these places hits a live barrier."""
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
                raise Finding(Kind.BARRIER, f"{what} hits {owner.barriers[address]}")

    def barrier_span(self) -> tuple[int, int]:
        return min(self.barriers), max(self.barriers)

    def change_registers(self, warp: Warp, wanted: int, line: int) -> Wait | None:
        """Give the warp another budget; a wait until its warps leave enough for that."""
        wait = RegistersWait(self, warp, wanted)
        others = (len(self.warps) - 1) * LANES * LEAST_REGISTERS
        if wanted * LANES + others > self.pool:
            raise Finding(
                Kind.REGISTERS,
                f"{wanted} registers a thread: with at least {LEAST_REGISTERS} of the others these "
                f"are more than the {self.pool} that the launch took for the CTA",
            )
        if not wait.ready():
            return wait
        self._check_budget(warp, wanted, line)
        self.registers += wait.more
        warp.max_registers = wanted
        return None

    def _check_budget(self, warp: Warp, wanted: int, line: int) -> None:
        """Raise a finding if the warp's warpgroup changes budgets by another instruction."""
        budgets = self._budgets.setdefault(warp.index // GROUP_WARPS, [])
        if warp.budgets == len(budgets):
            budgets.append((line, wanted))
        first = budgets[warp.budgets]
        if first != (line, wanted):
            raise Finding(
                Kind.DIVERGENCE,
                f"warp {warp.index} asks for {wanted} registers, others of its warpgroup at PTX "
                f"line {first[0]} for {first[1]}",
            )
        warp.budgets += 1


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
        cluster: tuple[int, int, int],
        dynamic_shared: int,
        maps: dict[int, Any],
        checks: Checks,
        names: Sequence[tuple[int, str]] = (),
        tensor_pipe: TensorPipe = "isa",
    ) -> None:
        self.program, self.memory = program, memory
        self.checks, self.names = checks, names
        self.params, self.maps = params, maps
        self.grid, self.block, self.cluster = grid, block, cluster
        self.ctas_of_cluster = math.prod(cluster)
        self.threads = math.prod(block)
        self.dynamic_shared = dynamic_shared
        self.registers = launch_registers(program, self.threads)
        """Of each thread at the start."""
        self.instructions: Counter[int] = Counter()
        """Of warps that ended, by their number in their CTA."""
        self.executed = [0] * len(program.steps)
        """How often warps came to each step; of a run, to its first."""
        self.operations: list[Operation] = []
        self.progress = 0
        """Counts what a spinning thread could be waiting for."""
        self.surrender = 0
        """Counts how often waits with a time limit gave up."""
        self.clock = 0
        """What threads read of it last."""
        self.printed: list[str] = []
        """Texts of printf, in the order of their calls."""
        self.eager = True
        self.tensor_pipe = tensor_pipe
        self.cta_group = 0
        """CTAs that instructions of tensor memory are for, once one was executed: 1 or 2."""
        self.recorder: Recorder | None = None

    def begin(self, operation: Operation) -> None:
        """Put something asynchronous into the queue."""
        self.operations.append(operation)
        if self.recorder is not None:
            self.recorder.issued(operation)

    def issue(self, operation: Operation) -> None:
        """Begin something asynchronous; in the eager schedule it is done at once."""
        self.begin(operation)
        if self.eager and operation.eligible():
            self.operations.remove(operation)
            operation.complete()
            self.progress += 1

    def start_cluster(self, number: int) -> list[Cta]:
        """The CTAs of the grid's cluster of that number."""
        sizes, cluster = self.cluster, Cluster(Order() if self.checks.order else None)
        across = [extent // size for extent, size in zip(self.grid, sizes, strict=True)]
        first = _coordinates(number, across)
        for rank in range(self.ctas_of_cluster):
            within = _coordinates(rank, sizes)
            x, y, z = (
                at * size + inner for at, size, inner in zip(first, sizes, within, strict=True)
            )
            index = (z * self.grid[1] + y) * self.grid[0] + x
            cluster.append(Cta(self, index, (x, y, z), rank, cluster))
        return list(cluster)


def _coordinates(number: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Of the element of that number, the first dimension fastest."""
    return number % sizes[0], number // sizes[0] % sizes[1], number // sizes[0] // sizes[1]
