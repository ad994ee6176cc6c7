"""What a GPU holds at a time: which CTAs of a grid run together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqa.emulator.program import Program


KIB = 1024
SHARED_RESERVED = KIB
"""What the system takes of each CTA's shared memory."""


@dataclass(frozen=True)
class Device:
    """A GPU, and what an SM of it holds."""

    name: str
    sms: int
    warps_of_sm: int = 64
    ctas_of_sm: int = 32
    shared_of_sm: int = 228 * KIB
    clusters: bool = True
    """Whether CTAs can be launched as clusters."""

    @property
    def shared_of_cta(self) -> int:
        """Static and dynamic shared memory that one CTA can have."""
        return self.shared_of_sm - SHARED_RESERVED


H200, B200 = Device("H200", 132), Device("B200", 148)
DEVICES = {
    80: Device("A100", 108, shared_of_sm=164 * KIB, clusters=False),
    86: Device("RTX 3090", 82, 48, 16, 100 * KIB, clusters=False),
    87: Device("Jetson AGX Orin", 16, 48, 16, 164 * KIB, clusters=False),
    89: Device("RTX 4090", 128, 48, 24, 100 * KIB, clusters=False),
    90: H200,
    100: B200,
    103: B200,
    120: Device("RTX 5090", 170, 48, 24, 100 * KIB),
    121: Device("GB10", 48, 48, 24, 100 * KIB),
}
"""The GPU that modules of a target run on, by the target's number. Sizes are those that NVIDIA's
tables of compute capabilities and data sheets have; none was measured but the H200's."""
WARP_THREADS = 32
REGISTERS_OF_SM = 65536
"""A CTA can have all of them."""
_REGISTER_STEP = 8


def number_of(target: str) -> int:
    """The number of a module's target, such as 90 of sm_90a; 0 if it has none."""
    found = re.fullmatch(r"sm_(\d+)[af]?", target)
    return int(found[1]) if found else 0


def device_of(target: str) -> Device:
    """The GPU that a module's target is run on; KeyError for one that is not modelled."""
    return DEVICES[number_of(target)]


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
    device = program.device
    limits = [
        device.ctas_of_sm,
        device.warps_of_sm // _warps(threads),
        device.shared_of_sm // (shared + SHARED_RESERVED),
    ]
    known = "maxnreg" in program.entry.directives or any(
        at.parts[0] == "setmaxnreg" for at in program.instructions
    )
    if known:
        taken = pool_of(launch_registers(program, threads), threads)
        limits.append(REGISTERS_OF_SM // taken)
    return max(device.sms * min(limits), 1)


def _warps(threads: int) -> int:
    return -(-threads // WARP_THREADS)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
