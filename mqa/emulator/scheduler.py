"""Who goes next: warps and asynchronous operations, by a mode and a seed.

eager   operations complete when they are issued; warps take turns
lazy    operations complete only when no warp can go on
random  a random warp goes on for a random while; random operations complete in between
hunt    every warp and operation has a random priority, and the highest that can goes on; at a few
        random points of a run it gets the lowest one
The same seed gives the same run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from mqa.emulator.device import resident_ctas
from mqa.emulator.machine import Machine, Operation, RegistersWait
from mqa.emulator.sync import PhaseWait
from mqa.emulator.reports import EmulationError, Finding, Kind, Report
from mqa.emulator.warp import Warp

SCHEDULES = ("eager", "lazy", "random", "hunt")
MOST_STEPS = 1 << 26
_LONG = 1 << 11
"""Steps of a turn: one that spins takes them all."""
_CHANGES = 8
"""Priority changes of a hunt, spread over about as many steps as it may take."""


class Scheduler:
    """Runs a machine to its end."""

    def __init__(self, machine: Machine, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}, expected one of {', '.join(SCHEDULES)}")
        self.machine, self.schedule, self.seed = machine, schedule, seed
        self.random = random.Random(seed)
        self.steps = 0
        self.warps: list[Warp] = []
        self.priorities: dict[Warp, float] = {}
        self.running: Warp | None = None
        machine.eager = schedule == "eager"
        self.next_cluster = 0
        self.clusters = math.prod(machine.grid) // machine.ctas_of_cluster
        layout = machine.program.layout
        shared = layout.static_shared + machine.dynamic_shared
        self.resident = resident_ctas(machine.program, machine.threads, shared)
        self.stuck_at = -1
        self.lowest = 0.0
        self.changes = sorted(int(2 ** self.random.uniform(4, 14)) for _ in range(_CHANGES))

    def run(self) -> None:
        """To the end of the grid. Raises EmulationError with the first finding."""
        try:
            self._start_clusters()
            while self.warps:
                self._turn()
                if self.next_cluster < self.clusters:
                    self._start_clusters()
            for operation in list(self.machine.operations):
                self._complete(operation)
        except Finding as finding:
            raise EmulationError(self._report(finding)) from finding

    def _start_clusters(self) -> None:
        """As many as are resident at a time."""
        running = len({warp.cta.index for warp in self.warps})
        while self.next_cluster < self.clusters:
            if running and running + self.machine.ctas_of_cluster > self.resident:
                return
            started = self.machine.start_cluster(self.next_cluster)
            for cta in started:
                self.warps += cta.warps
                for warp in cta.warps:
                    self.priorities[warp] = self.random.random()
            self.next_cluster += 1
            running += len(started)

    def _turn(self) -> None:
        """One choice of the mode."""
        before = self.steps
        {
            "eager": self._in_turns,
            "lazy": self._in_turns,
            "random": self._at_random,
            "hunt": self._by_priority,
        }[self.schedule]()
        if self.steps > MOST_STEPS:
            raise Finding(
                Kind.STEPS,
                f"more than {MOST_STEPS} of all warps: the kernel spins, or the launch is too "
                "large to emulate; take fewer rows, tokens or CTAs",
            )
        if self.steps == before and not self._complete_any():
            self._stuck()

    def _in_turns(self) -> None:
        busy = [self._let(warp, _LONG) >= _LONG for warp in list(self.warps)]
        if all(busy):  # they may ask again and again whether one is over
            self._complete_any()

    def _at_random(self) -> None:
        able = [warp for warp in self.warps if warp.runnable()]
        ready = list(self._ready())
        if ready and (not able or self.random.random() < 0.5):
            self._complete(self.random.choice(ready))
            self.steps += 1
        elif able:
            self._let(self.random.choice(able), self.random.choice((1, 2, 8, 64)))

    def _by_priority(self) -> None:
        able: list[Warp | Operation] = [warp for warp in self.warps if warp.runnable()]
        able += self._ready()
        if not able:
            return
        best = max(able, key=self._priority)
        if self.changes and self.steps >= self.changes[0]:
            self.changes.pop(0)
            self.lowest -= 1.0
            if isinstance(best, Warp):
                self.priorities[best] = self.lowest
            else:
                best.priority = self.lowest
            best = max(able, key=self._priority)
        if isinstance(best, Warp):
            # One that spins must not keep the others out for ever.
            if self._let(best, 16) == 16 and self.random.random() < 0.05:
                self.lowest -= 1.0
                self.priorities[best] = self.lowest
        else:
            self._complete(best)
            self.steps += 1

    def _priority(self, one: Warp | Operation) -> float:
        if isinstance(one, Warp):
            return self.priorities[one]
        if one.priority == 0.0:
            one.priority = self.random.random()
        return one.priority

    def _let(self, warp: Warp, budget: int) -> int:
        self.running = warp
        steps = warp.run(budget)
        self.steps += steps
        if warp.done:
            self.warps.remove(warp)
            del self.priorities[warp]
            self.machine.instructions[warp.index] += warp.counts
            warp.cta.leave(warp)
            self.steps += 1
        return steps

    def _ready(self) -> Iterator[Operation]:
        return (operation for operation in self.machine.operations if operation.eligible())

    def _complete(self, operation: Operation) -> None:
        self.machine.operations.remove(operation)
        try:
            operation.complete()
        except Finding as finding:
            raise Finding(finding.kind, f"{finding.message} ({operation})") from finding
        self.machine.progress += 1

    def _complete_any(self) -> bool:
        """Where no warp can go on, an operation completes."""
        ready = list(self._ready())
        if ready:
            self._complete(self.random.choice(ready))
        return bool(ready)

    def _stuck(self) -> None:
        """Nothing can go on. Waits with a time limit give up once for each progress made."""
        waits = [f.wait for warp in self.warps for f in warp.fragments]
        limited = any(isinstance(wait, PhaseWait) for wait in waits)
        if limited and self.stuck_at != self.machine.progress:
            self.stuck_at = self.machine.progress
            self.machine.surrender += 1
            return
        kind = Kind.DEADLOCK
        if any(isinstance(wait, RegistersWait) for wait in waits):
            kind = Kind.REGISTERS
        told = [
            f"warp {warp.index} of CTA {warp.cta.index} "
            f"({warp.program.told(fragment.pc)}) waits for {fragment.wait}"
            for warp in self.warps
            for fragment in warp.fragments
        ]
        # Nobody is at fault alone.
        self.running = None
        raise Finding(kind, "; ".join(told[:40]))

    def _report(self, finding: Finding) -> Report:
        schedule, seed = self.schedule, self.seed
        warp = self.running
        if warp is None:
            return Report(finding.kind, finding.message, schedule=schedule, seed=seed)
        line, opcode, source = warp.program.place(warp.current.pc)
        place = (line, opcode, source, warp.index, warp.cta.index)
        callers = warp.program.callers(warp.current.pc)
        return Report(finding.kind, finding.message, *place, schedule, seed, callers)
