"""What every kernel that scores keeps in shared memory, and who works: `csrc/score/storage.cuh`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mqa.cuda.plan import WARP, Role, SharedPart

MATH_WARPS = 16
FEEDING_WARPS = 3
FILL_BYTES = 8192
ROLES = ("load", "rows", "weights", "clean")
"""Of the warps behind those of math, one each."""
_STORAGE_ALIGN = 1024


class Member(NamedTuple):
    """One of SharedStorage: `number` elements of `size` bytes."""

    name: str
    offset: int
    size: int
    number: int


def roles(*more: str) -> tuple[Role, ...]:
    """Warps of math, then one for each of `ROLES` and of `more`."""
    others = (
        Role(name, range(warp, warp + 1)) for warp, name in enumerate((*ROLES, *more), MATH_WARPS)
    )
    return (Role("math", range(MATH_WARPS)), *others)


def laid_out(members: Iterable[tuple[str, int, int, int]]) -> tuple[Member, ...]:
    """Where members (name, bytes of an element, elements, alignment) lie, as C++ says."""
    found, end = [], 0
    for name, size, number, align in members:
        offset = aligned(end, align)
        end = offset + size * number
        found.append(Member(name, offset, size, number))
    return tuple(found)


def size_of(members: tuple[Member, ...]) -> int:
    """sizeof(SharedStorage)."""
    last = members[-1]
    return aligned(last.offset + last.number * last.size, _STORAGE_ALIGN)


def parts_of(members: tuple[Member, ...]) -> tuple[SharedPart, ...]:
    """Names and offsets of what lies in shared memory: `k_full[2]`, `fill`."""
    return tuple(
        SharedPart(f"{name}[{i}]" if count > 1 else name, offset + i * size)
        for name, offset, size, count in members
        for i in range(count)
    )


def range_members(threads: int) -> tuple[tuple[str, int, int, int], ...]:
    """What every storage has of the range of a CTA and of its feeding warps."""
    return (
        ("cuts", 8 * (threads // WARP) + 2 * 8, 1, 8),
        ("feeders", 2 * 8 + WARP * 12 + 4, FEEDING_WARPS, 4),
        ("used", 4, 2, 4),
    )


def barrier_members(stages: int, *more: tuple[str, int]) -> tuple[tuple[str, int, int, int], ...]:
    """The barriers of every storage, with `more` of them, (name, number), behind those of keys."""
    numbers = (
        ("q_full", 2),
        ("q_empty", 2),
        ("k_full", stages),
        ("k_empty", stages),
        *more,
        ("loading", 1),
        ("range_known", 1),
    )
    return tuple((name, 8, number, 8) for name, number in numbers)


def aligned(size: int, step: int) -> int:
    return -(-size // step) * step
