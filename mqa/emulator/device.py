"""What a GPU holds at a time: which CTAs of a grid run together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqa.emulator.program import Program


@dataclass(frozen=True)
class Device:
    """A GPU. What an SM holds is the same for all that are known here."""

    name: str
    sms: int


H200, B200 = Device("H200", 132), Device("B200", 148)
WARP_THREADS = 32
CTAS_OF_SM = 32
WARPS_OF_SM = 64
REGISTERS_OF_SM = 65536
"""A CTA can have all of them."""
SHARED_OF_SM = 228 * 1024
SHARED_RESERVED = 1024
"""What the system takes of each CTA's shared memory."""
_REGISTER_STEP = 8


def device_of(target: str) -> Device:
    """The GPU that a module's target is run on."""
    return B200 if target.startswith("sm_10") else H200


def launch_registers(program: Program, threads: int) -> int:
    """Registers that a launch gives each thread: what the kernel's bounds leave room for.

    An assembler may take fewer, which PTX does not tell; with setmaxnreg it takes all of them.
    """
    directives = program.entry.directives
    if "maxnreg" in directives:
        return directives["maxnreg"][0]
    bound = _product(directives.get("maxntid", directives.get("reqntid", (threads,))))
    ctas = directives.get("minnctapersm", (1,))[0]
    most = REGISTERS_OF_SM // (ctas * _warps(bound) * WARP_THREADS)
    return min(most // _REGISTER_STEP * _REGISTER_STEP, 255)


def pool_of(registers: int, threads: int) -> int:
    """Registers that a launch takes for a CTA: in steps of 8 a thread, for whole warps."""
    step = -(-registers // _REGISTER_STEP) * _REGISTER_STEP
    return step * _warps(threads) * WARP_THREADS


def resident_ctas(program: Program, threads: int, shared: int) -> int:
    """CTAs that run at a time, at least one.

    Registers limit only kernels whose PTX tells how many they take, by .maxnreg or setmaxnreg.
    """
    limits = [
        CTAS_OF_SM,
        WARPS_OF_SM // _warps(threads),
        SHARED_OF_SM // (shared + SHARED_RESERVED),
    ]
    known = "maxnreg" in program.entry.directives or any(
        at.parts[0] == "setmaxnreg" for at in program.instructions
    )
    if known:
        taken = pool_of(launch_registers(program, threads), threads)
        limits.append(REGISTERS_OF_SM // taken)
    return max(program.device.sms * min(limits), 1)


def _warps(threads: int) -> int:
    return -(-threads // WARP_THREADS)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
