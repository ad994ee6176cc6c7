"""Values that come from shared memory which was never written, on their way through registers.

Compilers load early what they may not use, and products take rows that nobody needs. So such a
value is no mistake before it decides something: what is stored to global memory, an address, a
branch, or an operand of what others see. A warp keeps, for each register that holds one, in which
threads. Only while it holds some does this cost anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mqa.emulator.floats import Array
from mqa.emulator.parser import Immediate, Instruction, Negated, Operand, Register
from mqa.emulator.reports import Finding, Kind

if TYPE_CHECKING:
    from mqa.emulator.warp import Warp


@dataclass(frozen=True, slots=True)
class Taint:
    """In which threads a register holds such a value, and where it came from."""

    lanes: Array
    origin: str
    why: str = "which was never written"
    """That the value is nobody's."""


def put(warp: Warp, place: int, taint: Taint | None, which: Array) -> None:
    """A register was written by these threads, with such values or with others."""
    before = warp.tainted.pop(place, None)
    kept = before.lanes & ~which if before is not None else None
    if taint is not None:
        new = taint.lanes & which
        held = replace(taint, lanes=new if kept is None else new | kept)
    elif before is not None and kept is not None:
        held = replace(before, lanes=kept)
    else:
        return
    if np.count_nonzero(held.lanes):
        warp.tainted[place] = held


def decides(warp: Warp, registers: tuple[Register, ...], which: Array) -> None:
    """Raise a finding if one of these holds such a value in one of these threads."""
    for register in registers:
        taint = warp.tainted.get(register.index)
        if taint is not None and np.count_nonzero(taint.lanes & which):
            raise Finding(
                Kind.UNWRITTEN,
                f"{register.name} decides, and comes from {taint.origin}, {taint.why}",
            )


def united(taints: list[Taint | None]) -> Taint | None:
    found = [taint for taint in taints if taint is not None]
    if len(found) < 2:
        return found[0] if found else None
    lanes = np.logical_or.reduce([taint.lanes for taint in found])
    return replace(found[0], lanes=lanes)


def carried(warp: Warp, at: Instruction, sources: tuple[Register, ...]) -> Taint | None:
    """What an instruction of the arithmetic units will make of its operands."""
    tainted = warp.tainted
    taint = united([tainted.get(register.index) for register in sources])
    if taint is not None:
        base = at.parts[0]
        if base == "selp":
            taint = _selected(warp, at)
        elif base in ("and", "or") or (base == "setp" and len(at.operands) > 3):
            taint = _unless_settled(warp, at, taint)
    if at.predicate is None:
        return taint
    negated = isinstance(at.predicate, Negated)
    guard = at.predicate.register if isinstance(at.predicate, Negated) else at.predicate
    before = tainted.get(at.operands[0].index) if isinstance(at.operands[0], Register) else None
    holds = warp.registers[guard.index] != negated
    return united([_in(taint, holds), _in(before, ~holds), tainted.get(guard.index)])


def _in(taint: Taint | None, which: Array) -> Taint | None:
    return None if taint is None else replace(taint, lanes=taint.lanes & which)


def _of(warp: Warp, operand: Operand) -> Taint | None:
    return warp.tainted.get(operand.index) if isinstance(operand, Register) else None


def _selected(warp: Warp, at: Instruction) -> Taint | None:
    yes, no, which = at.operands[1:]
    if not isinstance(which, Register):
        return united([_of(warp, yes), _of(warp, no)])
    holds = warp.registers[which.index]
    return united([_in(_of(warp, yes), holds), _in(_of(warp, no), ~holds), _of(warp, which)])


def _unless_settled(warp: Warp, at: Instruction, taint: Taint) -> Taint:
    """Less the threads in which another operand settles the result alone."""
    setp = at.parts[0] == "setp"
    joins = next((part for part in at.parts if part in ("and", "or")), "")
    lanes = taint.lanes
    for operand in at.operands[3:] if setp else at.operands[1:]:
        value = _value(warp, operand)
        if value is None or not joins:
            continue
        settled = value == 0 if joins == "and" else ~value == 0
        mine = _of(warp, operand)
        lanes = lanes & ~(settled if mine is None else settled & ~mine.lanes)
    return Taint(lanes, taint.origin)


def _value(warp: Warp, operand: Operand) -> Any:
    if isinstance(operand, Register):
        value = warp.registers[operand.index]
        return value if isinstance(value, np.ndarray) and value.dtype.kind in "bu" else None
    return np.int64(operand.value) if isinstance(operand, Immediate) else None
