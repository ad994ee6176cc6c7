"""Blackwell: a problem becomes a plan. The kernels are `csrc/sm100/`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from mqa.cuda.plan import MAX_SHARED_BYTES, WARP, Kernel, Plan, Role, SharedPart
from mqa.cuda.sm90 import DenseFacts, _dense_arguments
from mqa.cuda.sm90_paged import GROUP, PagedFacts, _paged_arguments
from mqa.cuda.sm90_tiles import CXX, FEEDING_WARPS, FILL_BYTES, MATH_WARPS
from mqa.cuda.tensor_map import TensorMap

THREADS = MATH_WARPS * WARP + 256
TILE_ROWS = 128
MOST_COLUMNS = 256
TENSOR_COLUMNS = 512
ROLES = (
    Role("math", range(MATH_WARPS)),
    *(
        Role(name, range(MATH_WARPS + i, MATH_WARPS + i + 1))
        for i, name in enumerate(("load", "rows", "weights", "clean", "multiply"))
    ),
)


@dataclass(frozen=True, slots=True)
class Tiles:
    heads: int
    dim: int
    stages: int
    columns: int
    elements: str = "Fp8"

    @property
    def scaled(self) -> bool:
        return self.elements != "Fp8"

    @property
    def converted(self) -> bool:
        return self.scaled  # for arguments: q and its scales

    @property
    def set_columns(self) -> int:
        return max(self.heads, 64)

    @property
    def sets(self) -> int:
        return self.columns // self.set_columns

    @property
    def block(self) -> int:
        return self.columns // self.heads

    @property
    def row_bytes(self) -> int:
        return self.dim // 2 if self.elements == "Mxfp4" else self.dim

    @property
    def q_bytes(self) -> int:
        return self.columns * self.row_bytes

    @property
    def k_bytes(self) -> int:
        return TILE_ROWS * self.row_bytes

    @property
    def groups(self) -> int:
        if self.sets > 1:
            return self.sets
        return 2 if self.heads > 64 else 3

    @property
    def turns(self) -> int:
        return self.groups // self.sets

    @property
    def slots(self) -> int:
        most = (TENSOR_COLUMNS - (64 if self.scaled else 0)) // self.columns
        return min(most // self.turns, 2) * self.turns

    @property
    def aligned(self) -> int:
        return 4 if self.groups == self.sets else 1

    @property
    def paired(self) -> bool:
        return self.heads <= 32

    def q_map(self, rows: int, strides: tuple[int, int]) -> TensorMap:
        """Queries [rows, heads]; of paired rows, heads are outermost in a box."""
        row, head = (rows, strides[1], self.q_box_rows), (self.heads, strides[0], self.heads)
        (a, a_stride, a_box), (b, b_stride, b_box) = (row, head) if self.paired else (head, row)
        shape, box = (self.row_bytes, a, b), (self.row_bytes, a_box, b_box)
        return TensorMap("q", "UINT8", 1, shape, (a_stride, b_stride), box, self.row_bytes)

    @property
    def q_box_rows(self) -> int:
        if self.paired:
            return 2
        return self.block // 2 if self.block % 2 == 0 else self.block

    @property
    def shared_bytes(self) -> int:
        *_, last = _storage(self)
        return _aligned(last.offset + last.number * last.size, 1024)


class _Member(NamedTuple):
    name: str
    offset: int
    size: int
    number: int


@functools.cache
def _storage(t: Tiles) -> tuple[_Member, ...]:
    members = (
        ("q", t.q_bytes, 2, 1024),
        ("k", t.k_bytes, t.stages, 1024),
        ("q_scales", -(-t.columns // 128) * 512 if t.scaled else 16, 2, 128),
        ("k_scales", 512 if t.scaled else 16, t.stages, 128),
        ("fill", FILL_BYTES, 1, 128),
        ("pages", 16, WARP, 16),
        ("weights", t.columns * 4, 2, 16),
        ("k_scale", TILE_ROWS * 4, t.stages, 16),
        ("rows", t.block * 16, 2, 16),
        ("piece", 20, 2, 4),
        ("columns", t.sets * 16, 2, 16),
        ("q_full", 8, 2, 8),
        ("q_empty", 8, 2, 8),
        ("k_full", 8, t.stages, 8),
        ("k_empty", 8, t.stages, 8),
        ("scales_full", 8, t.stages, 8),
        ("sums_full", 8, t.slots, 8),
        ("loading", 8, 1, 8),
        ("range_known", 8, 1, 8),
        ("cuts", 8 * (THREADS // WARP) + 2 * 8, 1, 8),
        ("feeders", 2 * 8 + WARP * 12 + 4, FEEDING_WARPS, 4),
        ("used", 4, 2, 4),
        ("tensor_memory", 4, 1, 4),
    )
    found, end = [], 0
    for name, size, count, align in members:
        offset = _aligned(end, align)
        end = offset + size * count
        found.append(_Member(name, offset, size, count))
    return tuple(found)


@functools.cache
def shared_parts(t: Tiles) -> tuple[SharedPart, ...]:
    return tuple(
        SharedPart(f"{name}[{i}]" if count > 1 else name, offset + i * size)
        for name, offset, size, count in _storage(t)
        for i in range(count)
    )


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


@functools.cache
def tiles(heads: int, dim: int, columns: int, elements: str) -> Tiles:
    every = (Tiles(heads, dim, n, columns, elements) for n in range(16, 0, -1))
    return next(
        t for t in every if t.stages % t.aligned == 0 and t.shared_bytes <= MAX_SHARED_BYTES
    )


def kernel(kind: str, t: Tiles, logits: str) -> Kernel:
    arguments = (t.heads, t.dim, CXX[logits], t.stages, t.columns, t.shared_bytes)
    names = (f"mqa::sm100::{t.elements}", *map(str, arguments))
    return Kernel("sm100/score.cuh", f"mqa::sm100::{kind}", names)


def most_columns(heads: int, elements: str) -> int:
    return MOST_COLUMNS if elements == "Fp8" else 128 if heads == 128 else 192


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    most = most_columns(facts.heads, facts.elements)
    t = tiles(facts.heads, facts.dim, most, facts.elements)
    row = t.row_bytes
    q = t.q_map(facts.rows, facts.q_strides)
    stride = facts.k_stride if facts.tokens else row
    k = TensorMap("kv", "UINT8", 1, (row, max(facts.tokens, 1)), (stride,), (row, TILE_ROWS), row)
    return _plan("dense", t, facts.logits, facts.parts, (q, k), _dense_arguments(facts, t))


@functools.lru_cache(maxsize=4096)
def paged_plan(facts: PagedFacts) -> Plan:
    group_rows = GROUP if facts.varlen else min(facts.next_n, GROUP)
    most = most_columns(facts.heads, facts.elements)
    wanted = (max(facts.heads, 64), 128, most)
    columns = next((size for size in wanted if group_rows * facts.heads <= size), most)
    t = tiles(facts.heads, facts.dim, columns, facts.elements)
    row, rows = t.row_bytes, facts.requests * facts.next_n
    q = t.q_map(rows, facts.q_strides)
    k = TensorMap(
        "cache", "UINT8", 1, (row, facts.page_rows, max(facts.pages, 1)), (row, facts.page_stride),
        (row, min(facts.page_rows, TILE_ROWS), 1), row,
    )  # fmt: skip
    return _plan("paged", t, facts.logits, facts.parts, (q, k), _paged_arguments(facts, t))


def _plan(kind, t, logits, parts, maps, struct) -> Plan:
    return Plan(
        kernel(kind, t, logits), grid=parts, threads=THREADS, shared_bytes=t.shared_bytes,
        maps=maps, struct=struct, roles=ROLES, parts=shared_parts(t),
    )  # fmt: skip
