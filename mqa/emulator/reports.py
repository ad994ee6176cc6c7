"""What the emulator finds, as an error that says where and how to see it again."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is wrong with a kernel."""

    OUT_OF_BOUNDS = "access out of bounds"
    MISALIGNED = "misaligned access"
    UNWRITTEN = "use of memory that was never written"
    RACE = "accesses to memory that nothing orders"
    UNFINISHED = "end of a CTA whose shared memory others still use"
    PROXY_FENCE = "asynchronous access to bytes written without a proxy fence after"
    PENDING_REGISTER = "use of a register that an asynchronous operation still owns"
    PRODUCT_FENCE = "matrix product without wgmma.fence since registers were given back"
    TENSOR_MEMORY = "misuse of tensor memory"
    TENSOR_FENCE = "access to tensor memory without a tcgen05.fence at the barrier between"
    BARRIER = "misuse of a barrier"
    DEADLOCK = "deadlock"
    DIVERGENCE = "not all threads that have to be there execute the instruction"
    REGISTERS = "illegal budget of registers"
    DESCRIPTOR = "illegal descriptor"
    LAUNCH = "illegal launch"
    TRAP = "trap, or an assertion of the kernel that does not hold"
    STEPS = "too many steps"


@dataclass(frozen=True)
class Report:
    """One finding. A launch ends with its first."""

    kind: Kind
    message: str
    ptx_line: int = 0
    instruction: str = ""
    source: str = ""
    """CUDA source, file:line."""
    warp: int = -1
    cta: int = -1
    schedule: str = ""
    seed: int = 0
    callers: tuple[str, ...] = ()
    """Where the functions that this line is in are called, innermost first."""

    def __str__(self) -> str:
        lines = [f"{self.kind.value}: {self.message}"]
        if self.ptx_line:
            lines.append(f"  at PTX line {self.ptx_line}: {self.instruction}")
        if self.source:
            lines.append(f"  from {self.source}")
        lines += [f"  called at {caller}" for caller in self.callers]
        if self.warp >= 0:
            lines.append(f"  by warp {self.warp} of CTA {self.cta}")
        lines.append(f"  seen with schedule={self.schedule!r}, seed={self.seed}")
        return "\n".join(lines)


class Finding(Exception):
    """Raised where something is found; the machine adds the place and makes a report of it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class EmulationError(RuntimeError):
    """A kernel does what it must not; `report` says what."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
