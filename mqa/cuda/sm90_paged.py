"""Hopper: a paged call becomes a plan. The kernels are `csrc/sm90/paged_fp8.cuh` and, of converted
formats, `converted.cuh`."""

from __future__ import annotations

import functools

from mqa.cuda.operands import CXX, scale_bytes
from mqa.cuda.paged import PagedFacts, paged_arguments
from mqa.cuda.plan import Kernel, Plan
from mqa.cuda.sm90_tiles import (
    OWN_COLUMNS,
    ROLES,
    THREADS,
    Tiles,
    barriers,
    in_turn,
    k_swizzle,
    shared_parts,
)
from mqa.cuda.tensor_map import TensorMap
from mqa.reference.schedule import GROUP


@functools.cache
def paged_tiles(heads: int, dim: int, group_rows: int, elements: str = "Fp8") -> Tiles:
    """For groups of at most `group_rows` rows: the fewest columns that hold one."""
    wanted = max(heads, 64), 128, 256
    columns = next((size for size in wanted if group_rows * heads <= size), OWN_COLUMNS)
    if columns < OWN_COLUMNS or elements != "Fp8":
        return in_turn(heads, dim, columns, elements)
    return Tiles(heads, dim, *((128, 4) if dim == 128 else (256, 8)), columns)


@functools.cache
def paged_kernel(t: Tiles, logits: str) -> Kernel:
    numbers = (t.stages, t.stage_rows, t.columns, t.shared_bytes)
    arguments = tuple(map(str, (t.heads, t.dim, CXX[logits], *numbers)))
    if not t.converted:
        return Kernel("sm90/paged_fp8.cuh", "mqa::sm90::paged_fp8", arguments)
    names = (f"mqa::sm90::{t.elements}", *arguments)
    return Kernel("sm90/converted.cuh", "mqa::sm90::paged_converted", names)


def paged_kernels(heads: int, dim: int, logits: str, elements: str = "Fp8") -> dict[Kernel, int]:
    """Those that a call may reach, whatever next_n and indices are, and their dynamic shared
    memory."""
    tiles = (paged_tiles(heads, dim, rows, elements) for rows in range(1, GROUP + 1))
    return {paged_kernel(t, logits): t.shared_bytes for t in tiles}


@functools.lru_cache(maxsize=4096)
def paged_plan(facts: PagedFacts) -> Plan:
    """The launch of `csrc/sm90/paged_fp8.cuh` or `converted.cuh` for a call with these facts."""
    t = paged_tiles(facts.heads, facts.dim, facts.group_rows, facts.elements)
    heads, dim, rows = facts.heads, facts.dim, facts.requests * facts.next_n
    # Of no pages nothing is loaded, but a map has no empty dimension.
    k_shape = (t.row_bytes, facts.page_rows, max(facts.pages, 1))
    k_strides = (t.row_bytes, facts.page_stride)
    k_box = (t.panel_bytes, min(facts.page_rows, t.stage_rows), 1)
    q_box = (dim, heads, t.q_box_rows)
    q = TensorMap("q", "UINT8", 1, (dim, heads, rows), facts.q_strides, q_box, dim)
    k = TensorMap("cache", "UINT8", 1, k_shape, k_strides, k_box, k_swizzle(t))
    return Plan(
        paged_kernel(t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=(k,) if t.converted else (q, k),
        struct=paged_arguments(facts, t.q_pointers),
        barriers=barriers(t, 1, t.k_bytes + t.stage_rows * scale_bytes(t.elements)),
        roles=ROLES,
        parts=shared_parts(t),
    )
