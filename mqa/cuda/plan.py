"""A launch as plain data: what a backend makes of a problem, and what an executor runs.

`mqa.cuda.driver` runs a plan on a GPU. Nothing here calls a driver, so that the host side of a
kernel (tiles, stages, bytes, barrier counts, arguments) is tested without one. A plan holds no
addresses: it names its tensors, and an executor binds them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from mqa.cuda.tensor_map import TensorMap

MAX_SHARED_BYTES = 227 * 1024
"""Dynamic shared memory of a block on SM90 and SM100."""
WARP = 32


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of a kernel template."""

    source: str
    """Header that defines it, relative to `csrc/` (or an absolute path)."""
    name: str
    """Qualified name of the template, as C++ spells it."""
    arguments: tuple[str, ...] = ()
    """Template arguments, as C++ spells them."""
    portable: bool = False
    """Whether it uses what every GPU from compute capability 8.0 on has, and is compiled for the
    one that runs it; else it is of one architecture and compiled for that."""

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(self.arguments)}>" if self.arguments else self.name


class Scalar(NamedTuple):
    """A number in a kernel's argument struct."""

    name: str
    code: str
    """Type as in the `struct` module: q int64, i int32, I uint32, f float32, ? bool; p for a
    pointer to nothing."""
    value: float


def divisor(name: str, value: int) -> tuple[Scalar, Scalar, Scalar]:
    """A `Divisor` of `csrc/common/divisor.cuh`, by which numbers below 2**31 are divided.

    `value` is from 1 to 2**31 - 1.
    """
    shift = 31 + (value - 1).bit_length()
    return (
        Scalar(f"{name}.value", "i", value),
        Scalar(f"{name}.multiplier", "I", (1 << shift) // value + 1),
        Scalar(f"{name}.shift", "I", shift),
    )


@dataclass(frozen=True, slots=True)
class Struct:
    """A kernel's argument struct: pointers, then scalars from large to small, so without gaps."""

    pointers: tuple[str, ...]
    """Names of the tensors that they point to; an absent tensor is null."""
    scalars: tuple[Scalar, ...]

    @property
    def layout(self) -> struct.Struct:
        """How it lies in memory, padded to 8 bytes as C++ does."""
        codes = "".join(scalar.code.replace("p", "q") for scalar in self.scalars)
        return struct.Struct(f"@{len(self.pointers)}Q{codes}0q")


class Barrier(NamedTuple):
    """One mbarrier of a kernel: how many arrivals and bytes complete a phase."""

    name: str
    arrivals: int
    bytes: int = 0


class Role(NamedTuple):
    """What some warps of a block do, for those who look at a launch."""

    name: str
    warps: range


class SharedPart(NamedTuple):
    """A member of a kernel's struct in shared memory, or one element of it."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch: `grid` blocks of `threads` threads, arguments the maps and then the struct."""

    kernel: Kernel
    grid: int
    threads: int
    shared_bytes: int
    """Dynamic shared memory of a block."""
    maps: tuple[TensorMap, ...]
    struct: Struct
    barriers: tuple[Barrier, ...] = ()
    roles: tuple[Role, ...] = ()
    """Empty where all warps do the same."""
    parts: tuple[SharedPart, ...] = ()
    """Of dynamic shared memory, in order, for who reports places in it."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors to bind, in the order in which an executor takes their addresses."""
        return tuple(map.tensor for map in self.maps) + self.struct.pointers
