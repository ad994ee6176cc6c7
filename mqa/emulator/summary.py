"""What a launch did, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mqa.cuda.plan import Role

if TYPE_CHECKING:
    from mqa.emulator.program import Program

_CLASSES = {
    "wgmma": ("wgmma",),
    "mma": ("mma",),
    "tcgen05": ("tcgen05",),
    "asynchronous copies": ("cp", "prefetch", "prefetchu"),
    "mbarriers": ("mbarrier",),
    "barriers and fences": ("bar", "barrier", "fence", "membar", "griddepcontrol", "setmaxnreg"),
    "shared memory": ("ldmatrix",),
    "other memory": ("ld", "st", "atom", "red", "mapa"),
    "exchange": ("shfl", "vote", "match", "redux", "elect", "activemask"),
    "branches": ("bra", "brx", "ret", "exit"),
    "predicates": ("setp", "selp", "set", "testp", "isspacep"),
    "moves": ("mov", "cvta"),
    "conversions": ("cvt",),
    "floating point": (),
}
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


@dataclass(frozen=True)
class Summary:
    """What a launch did."""

    steps: int
    """Instructions that others could see: memory, barriers, asynchronous operations."""
    instructions: Mapping[int, int]
    """Instructions executed, by the warp's number in its CTA."""
    opcodes: Mapping[str, int] = field(default_factory=dict)
    """The same by opcode with its modifiers."""
    kernel: str = ""
    warp_roles: tuple[Role, ...] = ()
    """Empty where the kernel has none."""
    printed: str = ""
    """What the kernel's threads wrote by printf."""

    @property
    def roles(self) -> dict[str, int]:
        """Instructions by what their warps do; empty where no warp has a role."""
        return {
            role.name: sum(self.instructions.get(warp, 0) for warp in role.warps)
            for role in self.warp_roles
        }

    @property
    def classes(self) -> dict[str, int]:
        """Instructions by kind of opcode, the most frequent first."""
        found: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            found[class_of(opcode)] += count
        return dict(found.most_common())


def class_of(opcode: str) -> str:
    """The kind of an opcode, such as "shared memory"."""
    base, *modifiers = opcode.split(".")
    name = next((name for name, bases in _CLASSES.items() if base in bases), "")
    if name == "other memory" and any(part.startswith("shared") for part in modifiers):
        return "shared memory"
    if name:
        return name
    return "floating point" if _FLOATS.intersection(modifiers) else "integer"


def opcodes(program: Program, executed: Sequence[int]) -> dict[str, int]:
    """Instructions by opcode, from how often warps came to each step."""
    found: Counter[str] = Counter()
    for start, count in enumerate(executed):
        if count:
            for opcode in _executed_at(program, start):
                found[opcode] += count
    return dict(sorted(found.items()))


def _executed_at(program: Program, start: int) -> Iterator[str]:
    run = program.runs.get(start)
    for at in program.instructions[start : run.end if run is not None else start + 1]:
        yield at.opcode
    if start == len(program.instructions):
        yield "ret"
