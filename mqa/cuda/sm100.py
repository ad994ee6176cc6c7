"""Blackwell: a problem becomes a plan. The kernels are `csrc/sm100/`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from mqa.cuda.covering import covering
from mqa.cuda.dense import DenseFacts, dense_arguments
from mqa.cuda.gpu import Gpu
from mqa.cuda.metadata import METADATA
from mqa.cuda.operands import CXX, ELEMENTS, HEADS, head_dims
from mqa.cuda.paged import PagedFacts, paged_arguments
from mqa.cuda.plan import WARP, Kernel, Plan, Struct
from mqa.cuda.sm100_tiles import (
    ROLES,
    THREADS,
    TILE_ROWS,
    Tiles,
    barriers,
    dense_tiles,
    most_columns,
    paged_tiles,
    shared_parts,
)
from mqa.cuda.tensor_map import TensorMap
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.problem import LOGITS_DTYPES, Format
from mqa.reference.schedule import GROUP

DENSE, PAGED = "mqa::sm100::dense", "mqa::sm100::paged"


@functools.cache
def kernel(name: str, t: Tiles, logits: str) -> Kernel:
    numbers = (t.stages, t.columns, t.shared_bytes)
    arguments = map(str, (t.heads, t.dim, CXX[logits], *numbers))
    return Kernel("sm100/score.cuh", name, (f"mqa::sm100::{t.elements}", *arguments))


def dense_kernels(heads: int, dim: int, logits: str, elements: str = "Fp8") -> dict[Kernel, int]:
    """Those that a call may reach, and their dynamic shared memory."""
    t = dense_tiles(heads, dim, elements)
    return {kernel(DENSE, t, logits): t.shared_bytes}


def paged_kernels(heads: int, dim: int, logits: str, elements: str = "Fp8") -> dict[Kernel, int]:
    """Those that a call may reach, whatever next_n and indices are, and their dynamic shared
    memory."""
    tiles = (paged_tiles(heads, dim, rows, elements) for rows in range(1, GROUP + 1))
    return {kernel(PAGED, t, logits): t.shared_bytes for t in tiles}


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    """The launch of `mqa::sm100::dense` for a call with these facts."""
    t = dense_tiles(facts.heads, facts.dim, facts.elements)
    # Without tokens nothing is loaded, but a map has no empty dimension.
    row, k_shape = t.row_bytes, (t.row_bytes, max(facts.tokens, 1))
    k_strides = (facts.k_stride if facts.tokens else row,)
    k = TensorMap("kv", "UINT8", 1, k_shape, k_strides, (row, TILE_ROWS), row)
    struct = dense_arguments(facts, t.q_pointers)
    # 1 arrival, and the scales' bytes too, where these come in bulk.
    arrivals = (1 + WARP, t.k_bytes)
    maps = (_q_map(facts, t, facts.rows), k)
    return _plan(DENSE, t, facts, maps, struct, arrivals)


@functools.lru_cache(maxsize=4096)
def paged_plan(facts: PagedFacts) -> Plan:
    """The launch of `mqa::sm100::paged` for a call with these facts."""
    t = paged_tiles(facts.heads, facts.dim, facts.group_rows, facts.elements)
    # Of no pages nothing is loaded, but a map has no empty dimension.
    row, k_shape = t.row_bytes, (t.row_bytes, facts.page_rows, max(facts.pages, 1))
    k_box = (row, min(facts.page_rows, TILE_ROWS), 1)
    k = TensorMap("cache", "UINT8", 1, k_shape, (row, facts.page_stride), k_box, row)
    struct = paged_arguments(facts, t.q_pointers)
    arrivals = (1, t.k_bytes + TILE_ROWS * SCALE_BYTES)
    maps = (_q_map(facts, t, facts.requests * facts.next_n), k)
    return _plan(PAGED, t, facts, maps, struct, arrivals)


def _q_map(facts: DenseFacts | PagedFacts, t: Tiles, rows: int) -> TensorMap:
    """Queries [rows, heads]; of paired rows, heads are outermost in a box."""
    head, row = facts.q_strides
    heads, some = (t.heads, head, t.heads), (rows, row, t.q_box_rows)
    (a, a_stride, a_box), (b, b_stride, b_box) = (some, heads) if t.paired else (heads, some)
    shape, box = (t.row_bytes, a, b), (t.row_bytes, a_box, b_box)
    return TensorMap("q", "UINT8", 1, shape, (a_stride, b_stride), box, t.row_bytes)


def _plan(
    name: str,
    t: Tiles,
    facts: DenseFacts | PagedFacts,
    maps: tuple[TensorMap, ...],
    struct: Struct,
    k_full: tuple[int, int],
) -> Plan:
    return Plan(
        kernel(name, t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=maps,
        struct=struct,
        barriers=barriers(t, *k_full),
        roles=ROLES,
        parts=shared_parts(t),
    )


class Blackwell(Gpu):
    """A backend of GPUs of compute capability 10.x: their kernels use what all of these have."""

    capability = "10.x"

    def takes(self, major: int, minor: int) -> bool:
        return major == 10

    def dense_plan(self, facts: DenseFacts) -> Plan:
        return dense_plan(facts)

    def paged_plan(self, facts: PagedFacts) -> Plan:
        return paged_plan(facts)

    def scoring_kernels(
        self, heads: int, dim: int, logits: str, elements: str, *, paged: bool
    ) -> dict[Kernel, int]:
        kernels = paged_kernels if paged else dense_kernels
        return kernels(heads, dim, logits, elements)


@functools.cache
def kernels(*, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels that a call can reach: all, or a set in which every two values of a choice meet."""
    scoring = dict(_choices())
    return (*METADATA, *(scoring if every else covering(scoring)))


def _choices() -> Iterator[tuple[Kernel, tuple[object, ...]]]:
    """Kernels, and of each: format, H, D, logits dtype, dense or of how many columns paged."""
    for format, h in itertools.product(MODELS, HEADS):
        for d, logits in itertools.product(head_dims(format), LOGITS_DTYPES):
            facts = (h, d, logits, ELEMENTS[format])
            for found in dense_kernels(*facts):
                yield found, (format, h, d, logits, "dense")
            for found in paged_kernels(*facts):
                columns = int(found.arguments[5])
                largest = columns == most_columns(h, ELEMENTS[format])
                yield found, (format, h, d, logits, "largest" if largest else columns)


MODELS: dict[Format, str] = {
    "fp8": "BLACKWELL_FP8",
    "mxfp8": "BLACKWELL_MXFP8",
    "mxfp4": "BLACKWELL_MXFP4",
}
"""How each format is summed: a name in `mqa.testing.accumulators`."""
SM100 = Blackwell("sm100", {format: ELEMENTS[format] for format in MODELS}, MODELS, by_default=True)
