"""Clocks that threads read. Time is not modelled, so they only go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mqa.emulator.alu import DTYPES, LANES, Binder, fail
from mqa.emulator.parser import Instruction, Symbol

if TYPE_CHECKING:
    from mqa.emulator.program import Effect
    from mqa.emulator.warp import Warp

CLOCKS = {"%clock": ("u32", 0), "%clock_hi": ("u32", 32), "%clock64": ("u64", 0)}
CLOCKS |= {"%globaltimer": ("u64", 0)}
"""Special registers: their type, and the first of its bits of the machine's clock."""
STEP = 4096
"""From one read to the next, by whatever warp: loops that wait for a time end soon."""


def reads_clock(at: Instruction) -> bool:
    return any(isinstance(x, Symbol) and x.name in CLOCKS for x in at.operands[1:])


def clock(b: Binder, at: Instruction) -> Effect:
    """`mov` from a clock, the one instruction that can read it."""
    name = at.operands[1].name if isinstance(at.operands[1], Symbol) else ""
    if at.parts[0] != "mov" or name not in CLOCKS:
        fail(at, "clocks are read by mov alone")
    kind, shift = CLOCKS[name]
    given = DTYPES[at.parts[-1]]
    if given.kind not in "iu" or given.itemsize != DTYPES[kind].itemsize:
        fail(at, f"{name} is read as .{kind}")
    place, cast = b.dest(at.operands[0], kind, at)

    def run(warp: Warp, mask: int) -> None:
        machine = warp.cta.machine
        machine.clock += STEP
        # Whole, then cut: %clock goes around.
        value = np.full(LANES, machine.clock >> shift, np.uint64).astype(DTYPES[kind])
        warp.write(place, cast(value) if cast else value, mask)

    return run
