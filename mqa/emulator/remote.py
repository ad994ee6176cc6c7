"""Stores and reductions of threads that go on by themselves, and count bytes at a barrier.

They go to shared memory of any CTA of the cluster. The barrier has to be in the same CTA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mqa.emulator.alu import Binder, fail
from mqa.emulator.floats import Array
from mqa.emulator.machine import Operation
from mqa.emulator.memory import RANK_SHIFT, Shared, rank_of
from mqa.emulator.parser import BYTES, Instruction, Operand, Vector
from mqa.emulator.program import Effect, addresses, effect, values
from mqa.emulator.reductions import SHARED, change_of
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.sync import MBarrier, barrier_at
from mqa.emulator.warp import lanes

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp

_PLACE = {"shared::cluster", "mbarrier::complete_tx::bytes"}
_LENGTHS = {"v2": 2, "v4": 4}
_REDUCED = {**SHARED, "s64": {"add"}}
"""What is combined, by type."""
Done = Callable[[], None]
Into = Callable[["Warp", Shared, int, bytes, MBarrier], Done]
"""What takes a thread's bytes, and gives what is done when the operation completes."""


@effect("st.async", carries=(1,))
def st_async(b: Binder, at: Instruction) -> Effect:
    *rest, kind = at.parts[2:]
    count = next((_LENGTHS[part] for part in rest if part in _LENGTHS), 1)
    if not _PLACE <= set(rest) <= {*_PLACE, "weak", *_LENGTHS} or BYTES.get(kind, 0) < 4:
        fail(at, "this form is not modelled")
    return _issued(b, at, count, _stored)


@effect("red.async")
def red_async(b: Binder, at: Instruction) -> Effect:
    *rest, kind = at.parts[2:]
    name = next((part for part in rest if part in _REDUCED.get(kind, ())), "")
    if not name or set(rest) != {*_PLACE, "relaxed", "cluster", name}:
        fail(at, "this form is not modelled")
    change = change_of(name, "u64" if kind == "s64" else kind)

    def combined(warp: Warp, shared: Shared, place: int, data: bytes, barrier: MBarrier) -> Done:
        """Those to one place may be in flight together: what they give has no order to miss."""

        def act() -> None:
            if shared.unwritten(np.array([place]), len(data)) is not None:
                raise Finding(Kind.UNWRITTEN, f"{shared.told(place)} is reduced into")
            memory = shared.data[place - shared.start :][: len(data)]
            memory[:] = change(memory, np.frombuffer(data, np.uint8))

        return act

    return _issued(b, at, 1, combined)


def _stored(warp: Warp, shared: Shared, place: int, data: bytes, barrier: MBarrier) -> Done:
    """Nobody else may use the bytes until the barrier's phase is over."""
    words = (place - shared.start) // 4 + np.arange(len(data) // 4)
    name = f"st.async of {len(data)} bytes"
    shared.acquire(words, name, writes=True, proxy=False)
    shared.order_write(words, warp.view, barrier.party, barrier.phase + 1, name)

    def act() -> None:
        shared.data[place - shared.start :][: len(data)] = np.frombuffer(data, np.uint8)
        shared.release(words, writes=True)

    return act


def _issued(b: Binder, at: Instruction, count: int, into: Into) -> Effect:
    """One operation a thread."""
    kind = at.parts[-1]
    size = BYTES[kind]
    given = [values(b, x, f"b{8 * size}", at) for x in _elements(at.operands[1])]
    if len(given) != count:
        fail(at, f"expected {count} registers, got {len(given)}")
    where, barriers = (addresses(b, at.operands[i], at, "u32") for i in (0, 2))

    def run(warp: Warp, mask: int) -> None:
        data: Array = np.stack([read(warp) for read in given], axis=1)
        for lane in np.flatnonzero(lanes(mask)).tolist():
            place, barrier = int(where(warp)[lane]), int(barriers(warp)[lane])
            _issue(warp, at.parts[0], place, barrier, data[lane].tobytes(), into)

    return run


def _issue(warp: Warp, what: str, place: int, barrier: int, data: bytes, into: Into) -> None:
    rank, offset = rank_of(place), place & (1 << RANK_SHIFT) - 1
    cta = warp.cta if rank is None else warp.cta.peer(rank)
    found = barrier_at(warp, barrier)
    if found.cta is not cta:
        raise Finding(
            Kind.BARRIER, f"{found} counts bytes of CTA {cta.index}, expected one of its own"
        )
    cta.shared.check(np.array([offset]), len(data), f"{what}.async")
    warp.cta.keep_barriers(cta.shared, np.array([offset]), len(data))
    finish = into(warp, cta.shared, offset, data, found)

    def act() -> None:
        finish()
        found.deliver(len(data))

    name = f"{what}.async of {len(data)} bytes"
    warp.cta.machine.issue(Operation(name, act, bytes=len(data), address=offset))


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)
