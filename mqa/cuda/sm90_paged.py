"""Hopper: a paged FP8 call becomes a plan. The kernel is `csrc/sm90/paged_fp8.cuh`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from mqa import devices
from mqa.cuda.plan import Kernel, Plan, Scalar, Struct, divisor
from mqa.cuda.sm90_tiles import (
    CXX,
    OWN_COLUMNS,
    THREADS,
    ROLES,
    Tiles,
    barriers,
    in_turn,
    k_swizzle,
    no_q,
    q_addresses,
    q_pointers,
    q_scalars,
    row_bytes,
    shared_parts,
    strides,
)
from mqa.cuda.tensor_map import TensorMap
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.reference.schedule import GROUP
from mqa.validate import PagedCall

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
LINE_ENTRIES = 32
"""Of a block table, in 128 bytes."""
_INT32_MAX = 2**31 - 1


@functools.cache
def paged_tiles(heads: int, dim: int, group_rows: int, elements: str = "Fp8") -> Tiles:
    """For groups of at most `group_rows` rows: the fewest columns that hold one."""
    wanted = max(heads, 64), 128, 256
    columns = next((size for size in wanted if group_rows * heads <= size), OWN_COLUMNS)
    if columns < OWN_COLUMNS or elements != "Fp8":
        return in_turn(heads, dim, columns, elements)
    return Tiles(heads, dim, *((128, 4) if dim == 128 else (256, 8)), columns)


def groups_of_request(next_n: int) -> int:
    """Groups that the rows of a request are cut into."""
    return -(-next_n // GROUP)


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


@dataclass(frozen=True, slots=True)
class PagedFacts:
    """All that a paged launch depends on, addresses and values aside. Strides in elements."""

    requests: int
    next_n: int
    heads: int
    dim: int
    page_rows: int
    pages: int
    columns: int
    """Of the block table."""
    width: int
    logits: str
    bf16_weights: bool
    clean: bool
    last_only: bool
    """Lens are [B]."""
    varlen: bool
    parts: int
    scheduled: bool
    q_strides: tuple[int, int]
    """Of heads, of rows."""
    page_stride: int
    weights_strides: tuple[int, int]
    lens_strides: tuple[int, int]
    table_strides: tuple[int, int]
    indices_stride: int
    schedule_strides: tuple[int, int]
    logits_stride: int
    elements: str = "Fp8"
    q_scale_strides: tuple[int, int] = (0, 0)


@functools.lru_cache(maxsize=4096)
def paged_plan(facts: PagedFacts) -> Plan:
    """The launch of `csrc/sm90/paged_fp8.cuh` or `converted.cuh` for a call with these facts."""
    group_rows = GROUP if facts.varlen else min(facts.next_n, GROUP)
    t = paged_tiles(facts.heads, facts.dim, group_rows, facts.elements)
    heads, dim, rows = facts.heads, facts.dim, facts.requests * facts.next_n
    # Of no pages nothing is loaded, but a map has no empty dimension.
    k_shape = (t.row_bytes, facts.page_rows, max(facts.pages, 1))
    k_strides = (t.row_bytes, facts.page_stride)
    k_box = (t.row_bytes, min(facts.page_rows, t.stage_rows), 1)
    q_box = (dim, heads, t.q_box_rows)
    q = TensorMap("q", "UINT8", 1, (dim, heads, rows), facts.q_strides, q_box, dim)
    k = TensorMap("cache", "UINT8", 1, k_shape, k_strides, k_box, k_swizzle(t))
    return Plan(
        paged_kernel(t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=(k,) if t.converted else (q, k),
        struct=_paged_arguments(facts, t),
        barriers=barriers(t, 1, t.k_bytes + t.stage_rows * SCALE_BYTES),
        roles=ROLES,
        parts=shared_parts(t),
    )


def _paged_arguments(facts: PagedFacts, t: Tiles) -> Struct:
    """PagedArguments, field by field."""
    indices = "indices" if facts.varlen else ""
    schedule = "schedule" if facts.scheduled else ""
    per_request = groups_of_request(facts.next_n)
    limit = min(facts.width, facts.columns * facts.page_rows, _INT32_MAX)
    return Struct(
        ("cache", "w", "lens", "table", indices, schedule, "out", *q_pointers(t)),
        (
            *no_q(t),
            Scalar("page_stride", "q", facts.page_stride),
            *q_scalars(facts.q_strides, facts.q_scale_strides),
            Scalar("weights_row_stride", "q", facts.weights_strides[0]),
            Scalar("weights_head_stride", "q", facts.weights_strides[1]),
            Scalar("lens_request_stride", "q", facts.lens_strides[0]),
            Scalar("lens_row_stride", "q", facts.lens_strides[1]),
            Scalar("table_row_stride", "q", facts.table_strides[0]),
            Scalar("table_column_stride", "q", facts.table_strides[1]),
            Scalar("indices_stride", "q", facts.indices_stride),
            Scalar("schedule_row_stride", "q", facts.schedule_strides[0]),
            Scalar("schedule_column_stride", "q", facts.schedule_strides[1]),
            Scalar("logits_stride", "q", facts.logits_stride),
            Scalar("rows", "i", facts.requests * facts.next_n),
            Scalar("requests", "i", facts.requests),
            *divisor("next_n", facts.next_n),
            *divisor("groups_of_request", per_request),
            *divisor("table_lines", max(-(-limit // (facts.page_rows * LINE_ENTRIES)), 1)),
            Scalar("limit", "i", limit),
            Scalar("pages", "i", facts.pages),
            Scalar("page_shift", "i", facts.page_rows.bit_length() - 1),
            Scalar("width", "i", facts.width),
            Scalar("groups_of_part", "f", facts.requests * per_request / facts.parts),
            Scalar("last_only", "?", facts.last_only),
            Scalar("weights_are_bf16", "?", facts.bf16_weights),
            Scalar("clean", "?", facts.clean),
        ),
    )


def paged_facts(call: PagedCall, out: Tensor, elements: str = "Fp8") -> PagedFacts:
    """What the launch for `call` depends on."""
    problem, schedule, indices = call.problem, call.schedule, call.indices
    rows = problem.B * problem.next_n
    lens = call.context_lens
    # The stride of a dimension of size 1 means nothing, and may be anything.
    dimension = 1 if problem.next_n > 1 else 0
    row = row_bytes(elements, problem.D)
    scale = call.q_scale
    return PagedFacts(
        requests=problem.B,
        next_n=problem.next_n,
        heads=problem.H,
        dim=problem.D,
        page_rows=problem.P,
        pages=problem.blocks,
        columns=problem.columns,
        width=problem.L,
        logits=problem.out,
        bf16_weights=problem.weights == "bfloat16",
        clean=problem.clean,
        last_only=problem.lens_rank == 1,
        varlen=problem.varlen,
        parts=problem.sms or devices.get_num_sms(out.device),
        scheduled=schedule is not None,
        q_strides=(call.q.stride(2), call.q.stride(dimension) if rows > 1 else problem.H * row),
        page_stride=(
            call.kv_cache.stride(0) if problem.blocks > 1 else problem.P * (row + SCALE_BYTES)
        ),
        weights_strides=strides(call.weights),
        lens_strides=(lens.stride(0), lens.stride(1) if lens.dim() == 2 else 0),
        table_strides=strides(call.block_table),
        indices_stride=0 if indices is None else indices.stride(0),
        schedule_strides=(0, 0) if schedule is None else strides(schedule),
        logits_stride=out.stride(0),
        elements=elements,
        q_scale_strides=(0, 0) if scale is None else (scale.stride(dimension), scale.stride(2)),
    )


def paged_addresses(call: PagedCall, out: Tensor, elements: str = "Fp8") -> tuple[int, ...]:
    """Addresses of `paged_plan(...).tensors`."""
    q, first, last = q_addresses(call, elements)
    cache = call.kv_cache.data_ptr() if call.problem.blocks else q
    return (
        *first,
        cache,
        cache,
        call.weights.data_ptr(),
        call.context_lens.data_ptr(),
        call.block_table.data_ptr(),
        0 if call.indices is None else call.indices.data_ptr(),
        0 if call.schedule is None else call.schedule.data_ptr(),
        out.data_ptr(),
        *last,
    )
