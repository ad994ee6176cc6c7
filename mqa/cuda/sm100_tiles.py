"""Sizes of the Blackwell kernels: `csrc/sm100/score/storage.cuh`, constant by constant."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mqa.cuda.operands import row_bytes
from mqa.cuda.plan import MAX_SHARED_BYTES, WARP, Barrier, Role, SharedPart
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

MATH_GROUPS = MATH_WARPS // 4
THREADS = MATH_WARPS * WARP + 256
TILE_ROWS = 128
"""Keys of one product, a lane of tensor memory each."""
TENSOR_COLUMNS = 512
"""Of tensor memory, all of which a CTA takes."""
SCALE_ROWS, SCALE_BYTES, SCALE_COLUMNS = 128, 512, 4
"""Rows whose block scales are copied at once, what these take in shared memory and in tensor
memory."""
ROLES = (*roles("multiply", "scales"), Role("idle", range(MATH_WARPS + 6, THREADS // WARP)))
"""Of the warps that score: `csrc/sm100/score/kernel.cuh` shares them out."""
SCHEDULE_COLUMNS = 512
"""Columns of a block of a dense schedule."""
_FEWEST_COLUMNS = 64
_MOST_STAGES = 16
_MOST_COLUMNS = {"Fp8": 256, "Mxfp8": 192, "Mxfp4": 192}
"""Of one product: with block scales two of 256 leave tensor memory no room."""
_PASSES_FROM = {"Fp8": 256, "Mxfp8": 64, "Mxfp4": 128}
"""Heads from which the largest block is all that a schedule names at once."""
_SCALE_ROOM = 64
"""Columns of tensor memory that block scales take at most."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shared and tensor memory of a kernel: two blocks of rows, a ring of key stages, and
    accumulators of a tile each."""

    heads: int
    dim: int
    stages: int
    columns: int
    """Of a block: its rows times H."""
    elements: str = "Fp8"
    """How keys are multiplied: a struct of `csrc/sm100/score/storage.cuh`."""

    @property
    def scaled(self) -> bool:
        """Whether blocks of elements have scales."""
        return self.elements != "Fp8"

    @property
    def q_pointers(self) -> tuple[str, ...]:
        """Tensors that a kernel reads itself: q comes by a tensor map, its scales do not."""
        return ("", "q_scale") if self.scaled else ()

    @property
    def pass_columns(self) -> int:
        """Of a product; the last of a tile may have fewer."""
        return min(self.columns, _MOST_COLUMNS[self.elements])

    @property
    def passes(self) -> int:
        """Products of a tile, one after the other."""
        return -(-self.columns // self.pass_columns)

    @property
    def strips(self) -> tuple[int, ...]:
        """Of 64 columns, in each pass."""
        return tuple(
            min(self.pass_columns, self.columns - first) // _FEWEST_COLUMNS
            for first in range(0, self.columns, self.pass_columns)
        )

    @property
    def sets(self) -> int:
        """Of columns, of which a warpgroup sums one; a quarter each where there are passes."""
        of_one = max(self.heads, _FEWEST_COLUMNS)
        return MATH_GROUPS if self.passes > 1 else self.columns // of_one

    @property
    def groups(self) -> int:
        """Math warpgroups that work: one for each set, or those that take tiles in turn."""
        if self.sets > 1:
            return self.sets
        # Threads that sum 8 rows, or 128 heads, take more registers than three would have.
        return 2 if self.heads > 64 or self.heads == 8 else 3

    @property
    def turns(self) -> int:
        """Warpgroups that share a set."""
        return self.groups // self.sets

    @property
    def aligned(self) -> int:
        """What the stages of a piece come in multiples of."""
        if self.turns > 1:
            return 1
        return 2 if self.passes > 1 else 4

    @property
    def read_again(self) -> int:
        """Weights that a math thread reads again for every tile: registers hold the others."""
        return 8 if self.passes > 1 else 0

    @property
    def paired(self) -> bool:
        """Whether columns are (pair of rows, head, row of the pair), not (row, head)."""
        return self.heads <= 32

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.columns // self.heads

    @property
    def q_box_rows(self) -> int:
        """Rows of q that come at once: some of a block may be enough."""
        if self.paired:
            return 2
        return self.block // 2 if self.block % 2 == 0 else self.block

    @property
    def row_bytes(self) -> int:
        """Of a key."""
        return row_bytes(self.elements, self.dim)

    @property
    def q_bytes(self) -> int:
        return self.columns * self.row_bytes

    @property
    def k_bytes(self) -> int:
        return TILE_ROWS * self.row_bytes

    @property
    def slots(self) -> int:
        """Accumulators: two for each warpgroup that takes tiles in turn, if there is room."""
        most = (TENSOR_COLUMNS - (_SCALE_ROOM if self.scaled else 0)) // self.pass_columns
        return min(most // self.turns, 2) * self.turns

    @property
    def sums(self) -> int:
        """Barrier pairs of products: of each pass, or of each accumulator."""
        return self.passes if self.passes > 1 else self.slots

    @property
    def q_scale_tiles(self) -> int:
        """Copies that the block scales of a block of queries take."""
        return -(-self.columns // SCALE_ROWS) if self.scaled else 0

    @property
    def tensor_columns(self) -> int:
        """Those in use: accumulators, block scales of as many tiles of keys and of two blocks."""
        scales = (self.slots + 2 * self.q_scale_tiles) * SCALE_COLUMNS if self.scaled else 0
        return self.slots * self.pass_columns + scales

    @property
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage)."""
        return size_of(_storage(self))


@functools.cache
def _storage(t: Tiles) -> tuple[Member, ...]:
    """SharedStorage, member by member."""
    # Without block scales there are places of 16 bytes that nobody uses.
    return laid_out(
        (
            ("q", t.q_bytes, 2, 1024),
            ("k", t.k_bytes, t.stages, 1024),
            ("q_scales", t.q_scale_tiles * SCALE_BYTES or 16, 2, 128),
            ("k_scales", SCALE_BYTES if t.scaled else 16, t.stages, 128),
            ("fill", FILL_BYTES, 1, 128),
            ("pages", 16, WARP, 16),
            ("weights", t.columns * 4, 2, 16),
            ("k_scale", TILE_ROWS * 4, t.stages, 16),
            ("rows", t.block * 16, 2, 16),
            ("piece", 20, 2, 4),
            ("columns", t.sets * 16, 2, 16),
            *barrier_members(
                t.stages, ("scales_full", t.stages), ("sums_full", t.sums), ("sums_empty", t.sums)
            ),
            *range_members(THREADS),
            ("tensor_memory", 4, 1, 4),
        )
    )


@functools.cache
def shared_parts(t: Tiles) -> tuple[SharedPart, ...]:
    return parts_of(_storage(t))


@functools.cache
def barriers(t: Tiles, k_arrivals: int, k_bytes: int) -> tuple[Barrier, ...]:
    active, in_passes = 4 * t.groups, t.passes > 1
    scales = (Barrier("scales_full", 1),) if t.scaled else ()
    # Of the warps of a warpgroup, for each strip.
    empty = (Barrier("sums_empty", 4 * n) for n in t.strips if in_passes)
    return (
        Barrier("q_full", 2 + WARP, t.q_bytes),
        # Math, multiply's commit and, with block scales, who reorders those of keys.
        Barrier("q_empty", active + 1 + t.scaled),
        Barrier("k_full", k_arrivals, k_bytes),
        Barrier("k_empty", 1 if in_passes else 4 * t.sets + 1),
        *scales,
        Barrier("sums_full", 1),
        *empty,
        Barrier("range_known", 2),
        Barrier("loading", 1),
    )


@functools.cache
def most_columns(heads: int, elements: str) -> int:
    """Columns of the largest block: those of a product, or many in passes."""
    return SCHEDULE_COLUMNS if heads >= _PASSES_FROM[elements] else _MOST_COLUMNS[elements]


@functools.cache
def tiles(heads: int, dim: int, columns: int, elements: str = "Fp8") -> Tiles:
    """With as many stages as shared memory holds."""
    every = (Tiles(heads, dim, n, columns, elements) for n in range(_MOST_STAGES, 0, -1))
    fits = (t for t in every if t.shared_bytes <= MAX_SHARED_BYTES)
    return next(t for t in fits if t.stages % t.aligned == 0)


@functools.cache
def dense_tiles(heads: int, dim: int, elements: str = "Fp8") -> Tiles:
    return tiles(heads, dim, most_columns(heads, elements), elements)


@functools.cache
def paged_tiles(heads: int, dim: int, group_rows: int, elements: str = "Fp8") -> Tiles:
    """For groups of at most `group_rows` rows: the fewest columns that hold one, or the most."""
    most = most_columns(heads, elements)
    wanted = (max(heads, _FEWEST_COLUMNS), 128)
    columns = next((size for size in wanted if group_rows * heads <= size), most)
    return tiles(heads, dim, columns, elements)
