"""Sizes of the Hopper kernels: `csrc/sm90/score/storage.cuh`, constant by constant."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mqa.problem import Format
from mqa.validate import DenseCall, PagedCall
from mqa.cuda.plan import MAX_SHARED_BYTES, WARP, Barrier, Role, Scalar, SharedPart

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
MX_DIMS = (64, 128)
CXX = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
"""Logits dtypes as C++ spells them."""

MATH_WARPS = 16
THREADS = MATH_WARPS * WARP + 128
OWN_COLUMNS = 512
"""Columns (row, head) of a block of which each math warpgroup has 128 of its own."""
TILE_ROWS = 64
FILL_BYTES = 8192
FEEDING_WARPS = 3
ROLES = (
    Role("math", range(MATH_WARPS)),
    *(
        Role(name, range(MATH_WARPS + i, MATH_WARPS + i + 1))
        for i, name in enumerate(("load", "rows", "weights", "clean"))
    ),
)
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
        """Whether keys and queries become bfloat16."""
        return self.elements != "Fp8"

    @property
    def sets(self) -> int:
        """Of at most 128 columns, each the work of one, two or four math warpgroups."""
        return max(self.columns // 128, 1)

    @property
    def row_bytes(self) -> int:
        """Of a key."""
        return row_bytes(self.elements, self.dim)

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
    def shared_bytes(self) -> int:
        """sizeof(SharedStorage)."""
        *_, last = _storage(self)
        return _aligned(last.offset + last.number * last.size, 1024)


class _Member(NamedTuple):
    """One of SharedStorage: `number` elements of `size` bytes."""

    name: str
    offset: int
    size: int
    number: int


@functools.cache
def _storage(t: Tiles) -> tuple[_Member, ...]:
    """SharedStorage, member by member."""
    members = (
        ("q", t.q_bytes, t.q_buffers, 1024),
        ("k", t.k_bytes, t.stages, 1024),
        ("fill", FILL_BYTES, 1, 128),
        ("pages", 16, WARP, 16),
        ("weights", t.columns * 4, 2, 4),
        ("k_scale", t.stage_rows * 4, t.stages, 4),
        ("rows", t.block * 16, 2, 16),
        ("piece", 20, 2, 4),
        ("columns", t.sets * 16, 2, 16),
        ("q_full", 8, 2, 8),
        ("q_empty", 8, 2, 8),
        ("k_full", 8, t.stages, 8),
        ("k_empty", 8, t.stages, 8),
        ("loading", 8, 1, 8),
        ("range_known", 8, 1, 8),
        ("cuts", 8 * (THREADS // WARP) + 2 * 8, 1, 8),
        ("feeders", 2 * 8 + WARP * 12 + 4, FEEDING_WARPS, 4),
        ("used", 4, 2, 4),
    )
    found, end = [], 0
    for name, size, count, align in members:
        offset = _aligned(end, align)
        end = offset + size * count
        found.append(_Member(name, offset, size, count))
    return tuple(found)


@functools.cache
def shared_parts(t: Tiles) -> tuple[SharedPart, ...]:
    """Names and offsets of what lies in shared memory: `k_full[2]`, `fill`."""
    return tuple(
        SharedPart(f"{name}[{i}]" if count > 1 else name, offset + i * size)
        for name, offset, size, count in _storage(t)
        for i in range(count)
    )


ELEMENTS: dict[Format, str] = {"fp8": "Fp8", "mxfp8": "Mxfp8", "mxfp4": "Mxfp4"}
"""Of each format."""


def q_pointers(t: Tiles) -> tuple[str, ...]:
    """Tensors that a kernel reads itself: without a conversion q comes by a tensor map."""
    return () if not t.converted else ("q", "q_scale" if t.elements != "Fp8Accurate" else "")


def q_addresses(
    call: DenseCall | PagedCall, elements: str
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """That of q, and those that a plan's tensors begin and end with."""
    q, scale = call.q.data_ptr(), call.q_scale
    if elements == "Fp8":
        return q, (q,), ()
    return q, (), (q, 0 if scale is None else scale.data_ptr())


def strides(tensor: Tensor) -> tuple[int, int]:
    first, second = tensor.stride()
    return first, second


def q_scalars(q_strides: tuple[int, int], scale_strides: tuple[int, int]) -> tuple[Scalar, ...]:
    """What stands in a struct for q: strides of rows and heads, of q in bytes."""
    return (
        Scalar("q_row_stride", "q", q_strides[1]),
        Scalar("q_head_stride", "q", q_strides[0]),
        Scalar("q_scale_row_stride", "q", scale_strides[0]),
        Scalar("q_scale_head_stride", "q", scale_strides[1]),
    )


def k_swizzle(t: Tiles) -> int:
    """Keys that are converted lie swizzled only where their rows take every bank."""
    return t.row_bytes if t.row_bytes == 128 or not t.converted else 0


def no_q(t: Tiles) -> tuple[Scalar, ...]:
    return () if t.converted else (Scalar("q", "p", 0), Scalar("q_scale", "p", 0))


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


def row_bytes(elements: str, dim: int) -> int:
    """Bytes of a key of `dim` elements."""
    return dim // 2 if elements == "Mxfp4" else dim


def in_turn(heads: int, dim: int, columns: int, elements: str) -> Tiles:
    """Tiles of many small stages, each the work of one or two math warpgroups."""
    rows = 128 if dim == 128 or elements == "Fp8" else 256
    most = 20
    if elements == "Fp8" and columns == 64 and dim == 128:
        # One tile a stage, and not more than memory needs: SMs that have more keys on their way
        # get a larger share of its rate, and the others end late.
        rows, most = 64, 12
    # A multiple of the turns, so that a place of the ring is always the same warpgroups'.
    every = (Tiles(heads, dim, rows, n, columns, elements) for n in range(most, 0, -4))
    return next(t for t in every if t.shared_bytes <= MAX_SHARED_BYTES)


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step
