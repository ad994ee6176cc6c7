"""A timeline of launches as Chrome-trace JSON, which Perfetto and chrome://tracing open.

Time is the emulator's own: one instruction issued by any warp is one microsecond of the trace. A
process is a CTA; its threads are its warps, and the engines that work beside them. A warp's track
has what it executed in one go and what it waited for; an engine's has its operations from issue to
completion, with an arrow from the warp that issued each. Counters are the phases of mbarriers.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqa.cuda.plan import Role
from mqa.emulator.sync import GROUP_WARPS
from mqa.emulator.warp import FULL

if TYPE_CHECKING:
    from mqa.emulator.machine import Operation
    from mqa.emulator.program import Program
    from mqa.emulator.sync import MBarrier
    from mqa.emulator.warp import Fragment, Warp

Event = dict[str, Any]
Track = tuple[int, str]
"""CTA and name."""
_ENGINES = (
    ("cp.async.bulk.tensor", "TMA"),
    ("cp.reduce.async.bulk.tensor", "TMA"),
    ("cp.async.bulk", "bulk copy"),
    ("cp.reduce.async.bulk", "bulk copy"),
    ("cp.async", "cp.async"),
    ("wgmma", "wgmma"),
    *((f"tcgen05.{what}", f"tcgen05.{what}") for what in ("mma", "cp", "ld", "st", "commit")),
)
"""Track of what an opcode that begins so issues; the first that fits counts."""


@dataclass(slots=True)
class _Slice:
    """Something that took time."""

    name: str
    args: dict[str, Any]
    start: int
    end: int
    issuer: str = ""
    """Of an operation: track of the warp that an arrow comes from."""


@dataclass
class Timeline:
    """Events of one launch after the other."""

    events: list[Event] = field(default_factory=list)
    processes: int = 0
    threads: int = 0
    flows: int = 0
    now: int = 0
    """Instructions of the launches so far."""

    def recorder(self, kernel: str, program: Program, roles: Sequence[Role]) -> Recorder:
        """What a launch tells its events."""
        return Recorder(self, kernel, program, roles)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError where the file cannot be written."""
        content = {
            "traceEvents": sorted(self.events, key=lambda event: event.get("ts", -1)),
            "displayTimeUnit": "ms",
            "otherData": {"time": "1 us is one instruction issued by any warp"},
        }
        Path(path).write_text(json.dumps(content, separators=(",", ":")) + "\n")

    def process(self, name: str) -> int:
        """Number of a new process."""
        self.processes += 1
        self._metadata("process", name, self.processes, 0, self.processes)
        return self.processes

    def thread(self, process: int, name: str) -> int:
        """Number of a new thread; no two of a file have the same."""
        self.threads += 1
        self._metadata("thread", name, process, self.threads, self.threads)
        return self.threads

    def _metadata(self, what: str, name: str, process: int, thread: int, place: int) -> None:
        common = {"ph": "M", "pid": process, "tid": thread}
        self.events.append({**common, "name": f"{what}_name", "args": {"name": name}})
        self.events.append({**common, "name": f"{what}_sort_index", "args": {"sort_index": place}})


class Recorder:
    """Listens to one launch."""

    def __init__(
        self, timeline: Timeline, kernel: str, program: Program, roles: Sequence[Role]
    ) -> None:
        self.timeline, self.kernel, self.program, self.roles = timeline, kernel, program, roles
        self.start = self._clock = timeline.now
        self._running: Warp | None = None
        self._seen: dict[Warp, int] = {}
        """Instructions of each warp that the clock has counted."""
        self._waits: dict[Fragment, tuple[Track, _Slice]] = {}
        self._runs: dict[Track, list[_Slice]] = {}
        self._waited: dict[Track, list[_Slice]] = {}
        self._operations: dict[Track, list[_Slice]] = {}
        self._pending: dict[Operation, _Slice] = {}
        self._flips: dict[Track, list[tuple[int, int]]] = {}
        """Of an mbarrier: times, and the phases that began."""

    @property
    def now(self) -> int:
        """Instructions issued before the one that is executed now."""
        warp = self._running
        return self._clock + (0 if warp is None else warp.counts - self._seen.get(warp, 0))

    def follow(
        self,
        warp: Warp,
        advance: Callable[[Fragment, int], int],
        fragment: Fragment,
        budget: int,
    ) -> int:
        """Let a fragment go on, and keep what it did and what it waits for after."""
        track = (warp.cta.index, self._name(warp))
        piece = _Slice(*self._what(fragment.pc), self._clock, self._clock)
        if fragment.mask != FULL:
            piece.args["threads"] = f"{fragment.mask:#010x}"
        if fragment in self._waits:
            self._end_wait(fragment)
        self._running = warp
        try:
            return advance(fragment, budget)
        finally:
            piece.end = self._clock = self.now
            self._seen[warp], self._running = warp.counts, None
            piece.args["instructions"] = piece.end - piece.start
            if piece.end > piece.start:
                self._runs.setdefault(track, []).append(piece)
            if fragment.wait is not None:
                _, args = self._what(fragment.pc)
                args["waits for"] = str(fragment.wait)
                wait = _Slice(fragment.wait.label, args, self._clock, self._clock)
                self._waits[fragment] = (track, wait)

    def issued(self, operation: Operation) -> None:
        """The warp that runs put an operation into the queue."""
        warp = self._running
        if warp is None:
            return
        _, args = self._what(warp.current.pc)
        args["by"] = issuer = self._name(warp)
        if operation.bytes:
            args["bytes"] = operation.bytes
        if operation.address is not None:
            args["shared address"] = f"{operation.address:#x}"
        if operation.place:
            args["tensor memory"] = operation.place
        engine = _engine(self.program.place(warp.current.pc)[1], warp)
        found = _Slice(operation.name, args, self.now, self.now, issuer)
        self._operations.setdefault((warp.cta.index, engine), []).append(found)
        self._pending[operation] = found
        operation.watcher = self._completed

    def flipped(self, barrier: MBarrier) -> None:
        """A phase of an mbarrier is over."""
        track = (barrier.cta.index, f"mbarrier {barrier.address:#x}")
        self._flips.setdefault(track, []).append((self.now, barrier.phase))

    def finish(self, finding: str | None) -> None:
        """The launch ended, with a finding or without: its events are added to the timeline."""
        for fragment in list(self._waits):
            self._waits[fragment][1].args["over"] = False
            self._end_wait(fragment)
        for found in self._pending.values():
            found.end = max(self._clock, found.start + 1)
            found.args["completed"] = False
        timeline = self.timeline
        everything = (self._runs, self._waited, self._operations, self._flips)
        for cta in sorted({cta for tracks in everything for cta, _ in tracks}):
            self._add_cta(cta, timeline.process(f"CTA {cta} of {self.kernel}"))
        if finding is not None:
            place = {"pid": timeline.processes, "tid": timeline.threads, "ts": self._clock}
            timeline.events.append(
                {"ph": "i", "s": "g", "name": "finding", "args": {"report": finding}, **place}
            )
        timeline.now = self._clock

    def _end_wait(self, fragment: Fragment) -> None:
        track, wait = self._waits.pop(fragment)
        wait.end = self._clock
        if wait.end > wait.start:
            self._waited.setdefault(track, []).append(wait)

    def _completed(self, operation: Operation) -> None:
        # Who issues takes a step for it, so what is done at once takes one too.
        found = self._pending.pop(operation)
        found.end = max(self.now, found.start + 1)

    def _name(self, warp: Warp) -> str:
        role = next((role.name for role in self.roles if warp.index in role.warps), "")
        return f"warp {warp.index:02} {role}".rstrip()

    def _what(self, place: int) -> tuple[str, dict[str, Any]]:
        """Where an instruction comes from, short, and in full."""
        line, opcode, source = self.program.place(place)
        if not line:
            return "end", {}
        short = source.rsplit("/", 1)[-1]
        found = {"PTX": f"{opcode} at line {line}"} | ({"source": short} if short else {})
        return short or f"PTX line {line}", found

    def _add_cta(self, cta: int, process: int) -> None:
        threads: dict[str, int] = {}
        warps = sorted(name for index, name in self._runs.keys() | self._waited if index == cta)
        for name in dict.fromkeys(warps):
            runs = self._runs.get((cta, name), [])
            rows = _rows([runs, self._waited.get((cta, name), [])])
            for number, row in enumerate(rows):
                # While threads of a warp wait, others of it may run.
                apart = f", divided {number}" if number else ""
                thread = self.timeline.thread(process, name + apart)
                threads.setdefault(name, thread)
                self.timeline.events += (_complete(one, process, thread) for one in row)
        for (index, engine), operations in sorted(self._operations.items()):
            if index == cta:
                self._add_engine(engine, operations, process, threads)
        for (index, barrier), flips in sorted(self._flips.items()):
            if index == cta:
                self._add_counter(barrier, flips, process)

    def _add_engine(
        self, name: str, operations: list[_Slice], process: int, threads: dict[str, int]
    ) -> None:
        timeline = self.timeline
        for number, row in enumerate(_rows([operations])):
            thread = timeline.thread(process, f"{name} {number}")
            for one in row:
                timeline.events.append(_complete(one, process, thread))
                if one.start == self._clock:
                    continue  # the instruction that issued it ended the launch
                timeline.flows += 1
                arrow = {"name": "issue", "cat": "issue", "id": timeline.flows, "pid": process}
                issued = {"ph": "s", "tid": threads[one.issuer], "ts": one.start}
                # Inside the slice, whose end belongs to the next one.
                done = {"ph": "f", "bp": "e", "tid": thread, "ts": one.end - 0.5}
                timeline.events += ({**arrow, **issued}, {**arrow, **done})

    def _add_counter(self, name: str, flips: list[tuple[int, int]], process: int) -> None:
        common = {"ph": "C", "name": name, "pid": process, "tid": 0}
        before = (self.start, flips[0][1] - 1)
        for time, phase in (before, *flips):
            self.timeline.events.append({**common, "ts": time, "args": {"phase": phase}})


def _engine(opcode: str, warp: Warp) -> str:
    name = next((name for start, name in _ENGINES if opcode.startswith(start)), "other")
    return f"{name} of warpgroup {warp.index // GROUP_WARPS}" if name == "wgmma" else name


def _complete(one: _Slice, process: int, thread: int) -> Event:
    place = {"pid": process, "tid": thread, "ts": one.start, "dur": one.end - one.start}
    return {"ph": "X", "name": one.name, **place, "args": one.args}


def _rows(groups: Sequence[list[_Slice]]) -> Iterator[list[_Slice]]:
    """Slices shared out over rows in which none overlaps another; the first group goes first."""
    rows: list[list[_Slice]] = []
    for group in groups:
        for one in sorted(group, key=lambda one: (one.start, one.end)):
            for row in rows:
                place = bisect.bisect(row, one.start, key=lambda other: other.start)
                free_before = place == 0 or row[place - 1].end <= one.start
                if free_before and (place == len(row) or one.end <= row[place].start):
                    row.insert(place, one)
                    break
            else:
                rows.append([one])
    yield from rows
