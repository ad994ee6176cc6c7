"""Sizes of the Hopper kernels: `csrc/sm90/score/storage.cuh`, constant by constant."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mqa.cuda.operands import row_bytes, scale_bytes
from mqa.cuda.plan import MAX_SHARED_BYTES, WARP, Barrier, SharedPart
from mqa.cuda.storage import (
    FILL_BYTES,
    MATH_WARPS,
    Member,
    barrier_members,
    laid_out,
    parts_of,
    range_members,
    roles,
    size_of,
)

THREADS = MATH_WARPS * WARP + 128
OWN_COLUMNS = 512
"""Columns (row, head) of a block of which each math warpgroup has 128 of its own."""
TILE_ROWS = 64
ROLES = roles()
"""Of the warps that score: `csrc/sm90/score/kernel.cuh` shares them out."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shared memory of a kernel: two blocks of rows and a ring of key stages."""

    heads: int
    dim: int
    stage_rows: int
    stages: int
    columns: int = OWN_COLUMNS
    """Of a block: its rows times H."""
    elements: str = "Fp8"
    """How keys reach the tensor cores: a struct of `csrc/sm90/score/elements.cuh`."""

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.columns // self.heads

    @property
    def q_box_rows(self) -> int:
        """Rows of q that come at once: half a block may be enough."""
        return max(self.block // 2, 1)

    @property
    def converted(self) -> bool:
        """Whether keys and queries reach the tensor cores as bfloat16."""
        return self.elements != "Fp8"

    @property
    def scaled(self) -> bool:
        """Whether blocks of elements have scales."""
        return self.elements.startswith("Mx")

    @property
    def sets(self) -> int:
        """Of at most 128 columns, each the work of one, two or four math warpgroups."""
        return max(self.columns // 128, 1)

    @property
    def row_bytes(self) -> int:
        """Of a key."""
        return row_bytes(self.elements, self.dim)

    @property
    def panel_bytes(self) -> int:
        """What one copy brings of a key: longer rows lie in two panels."""
        return min(self.row_bytes, 128)

    @property
    def scale_rows(self) -> int:
        """Places for scales of keys, in a stage."""
        return self.stage_rows if scale_bytes(self.elements) else 1

    @property
    def q_bytes(self) -> int:
        # Converted queries lie in panels of 64 dims.
        return self.columns * (max(self.dim, 64) * 2 if self.converted else self.dim)

    @property
    def q_buffers(self) -> int:
        return 1 if self.converted and self.sets > 1 else 2

    @property
    def k_bytes(self) -> int:
        return self.stage_rows * self.row_bytes

    @property
    def q_pointers(self) -> tuple[str, ...]:
        """Tensors that a kernel reads itself: without a conversion q comes by a tensor map."""
        return () if not self.converted else ("q", "q_scale" if self.scaled else "")

    @property
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage)."""
        return size_of(_storage(self))


@functools.cache
def _storage(t: Tiles) -> tuple[Member, ...]:
    """SharedStorage, member by member."""
    return laid_out(
        (
            ("q", t.q_bytes, t.q_buffers, 1024),
            ("k", t.k_bytes, t.stages, 1024),
            ("fill", FILL_BYTES, 1, 128),
            ("pages", 16, WARP, 16),
            ("weights", t.columns * 4, 2, 4),
            ("k_scale", t.scale_rows * 4, t.stages, 4),
            ("rows", t.block * 16, 2, 16),
            ("piece", 20, 2, 4),
            ("columns", t.sets * 16, 2, 16),
            *barrier_members(t.stages),
            *range_members(THREADS),
        )
    )


@functools.cache
def shared_parts(t: Tiles) -> tuple[SharedPart, ...]:
    return parts_of(_storage(t))


def k_swizzle(t: Tiles) -> int:
    """Keys that are converted lie swizzled only where their rows take every bank."""
    return t.panel_bytes if t.panel_bytes == 128 or not t.converted else 0


@functools.cache
def barriers(t: Tiles, k_arrivals: int, k_bytes: int) -> tuple[Barrier, ...]:
    return (
        Barrier("q_full", 2 + WARP, t.q_bytes),
        Barrier("q_empty", MATH_WARPS),
        Barrier("k_full", k_arrivals, k_bytes),
        Barrier("k_empty", MATH_WARPS // 4 if t.converted else MATH_WARPS * t.sets // 4),
        Barrier("range_known", 2),
        Barrier("loading", 1),
    )


def in_turn(heads: int, dim: int, columns: int, elements: str) -> Tiles:
    """Tiles of many small stages, each the work of one or two math warpgroups."""
    rows = 128 if dim == 128 or elements == "Fp8" else 256
    if elements == "Bf16":
        rows = 16384 // row_bytes(elements, dim)
    most = 20
    if elements == "Fp8" and columns == 64 and dim == 128:
        # One tile a stage, and not more than memory needs: SMs that have more keys on their way
        # get a larger share of its rate, and the others end late.
        rows, most = 64, 12
    # A multiple of the turns, so that a place of the ring is always the same warpgroups'.
    every = (Tiles(heads, dim, rows, n, columns, elements) for n in range(most, 0, -4))
    return next(t for t in every if t.shared_bytes <= MAX_SHARED_BYTES)
