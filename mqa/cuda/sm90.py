"""Hopper: a problem becomes a plan. The kernels are `csrc/sm90/`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from mqa.cuda.dense import DenseFacts, dense_arguments
from mqa.cuda.gpu import Gpu
from mqa.cuda.metadata import METADATA
from mqa.cuda.operands import CXX, ELEMENTS, HEAD_DIMS, HEADS, MX_DIMS, scale_bytes
from mqa.cuda.paged import PagedFacts
from mqa.cuda.plan import WARP, Kernel, Plan
from mqa.cuda.sm90_paged import paged_kernels, paged_plan
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
from mqa.problem import LOGITS_DTYPES, Format


@functools.cache
def tiles(heads: int, dim: int, elements: str = "Fp8") -> Tiles:
    """What measured best (see docs/performance.md)."""
    if elements == "Fp8":
        return Tiles(heads, dim, 128 if dim == 128 else 512, 4)
    return in_turn(heads, dim, OWN_COLUMNS, elements)


@functools.cache
def dense_kernel(tiles: Tiles, logits: str) -> Kernel:
    first = (str(tiles.heads), str(tiles.dim), CXX[logits], str(tiles.stages))
    rows, last = str(tiles.stage_rows), str(tiles.shared_bytes)
    if not tiles.converted:
        return Kernel("sm90/dense_fp8.cuh", "mqa::sm90::dense_fp8", (*first, rows, last))
    arguments = (f"mqa::sm90::{tiles.elements}", *first, rows, str(tiles.columns), last)
    return Kernel("sm90/converted.cuh", "mqa::sm90::dense_converted", arguments)


def dense_kernels(heads: int, dim: int, logits: str, elements: str = "Fp8") -> dict[Kernel, int]:
    """Those that a call may reach, and their dynamic shared memory."""
    t = tiles(heads, dim, elements)
    return {dense_kernel(t, logits): t.shared_bytes}


@functools.lru_cache(maxsize=4096)
def dense_plan(facts: DenseFacts) -> Plan:
    """The launch of `csrc/sm90/dense_fp8.cuh` or `converted.cuh` for a call with these facts."""
    t = tiles(facts.heads, facts.dim, facts.elements)
    heads, dim = facts.heads, facts.dim
    q_shape, q_box = (dim, heads, facts.rows), (dim, heads, t.q_box_rows)
    # Without tokens nothing is loaded, but a map has no empty dimension.
    row = t.row_bytes
    k_shape, k_stride = (row, max(facts.tokens, 1)), facts.k_stride if facts.tokens else row
    q = TensorMap("q", "UINT8", 1, q_shape, facts.q_strides, q_box, swizzle=dim)
    k_box = (t.panel_bytes, min(t.stage_rows, 256))
    k = TensorMap("kv", "UINT8", 1, k_shape, (k_stride,), k_box, swizzle=k_swizzle(t))
    maps = (k,) if t.converted else (q, k)
    return Plan(
        dense_kernel(t, facts.logits),
        grid=facts.parts,
        threads=THREADS,
        shared_bytes=t.shared_bytes,
        maps=maps,
        struct=dense_arguments(facts, t.q_pointers),
        # 1 arrival, and the scales' bytes too, where these come in bulk.
        barriers=barriers(t, 1 + WARP if scale_bytes(t.elements) else 1, t.k_bytes),
        roles=ROLES,
        parts=shared_parts(t),
    )


class Hopper(Gpu):
    """A backend of GPUs of compute capability 9.0, for `elements`, by format."""

    capability = "9.0"

    def __init__(self, name: str, elements: dict[Format, str], *, by_default: bool) -> None:
        models = {format: ACCUMULATORS[each] for format, each in elements.items()}
        super().__init__(name, elements, models, by_default=by_default)

    def takes(self, major: int, minor: int) -> bool:
        return (major, minor) == (9, 0)

    def dense_plan(self, facts: DenseFacts) -> Plan:
        return dense_plan(facts)

    def paged_plan(self, facts: PagedFacts) -> Plan:
        return paged_plan(facts)

    def scoring_kernels(
        self, heads: int, dim: int, logits: str, elements: str, *, paged: bool
    ) -> dict[Kernel, int]:
        kernels = paged_kernels if paged else dense_kernels
        return kernels(heads, dim, logits, elements)


def kernels(*, every: bool = False) -> tuple[Kernel, ...]:
    """Kernels that a call can reach: all, or a set in which every two values of a choice meet."""
    scoring = [kernel for elements in ACCUMULATORS for kernel in _kernels_of(elements, every=every)]
    return (*METADATA, *scoring)


def _kernels_of(elements: str, *, every: bool) -> Iterator[Kernel]:
    dims = MX_DIMS if elements.startswith("Mx") else HEAD_DIMS
    kind = (*ACCUMULATORS,).index(elements)
    for h, d, logits in itertools.product(HEADS, dims, LOGITS_DTYPES):
        facts = (h, d, logits, elements)
        dense, paged = [*dense_kernels(*facts)], [*paged_kernels(*facts)]
        number = HEADS.index(h) + dims.index(d)
        one_paged = paged[dims.index(d) % len(paged)]
        if every:
            yield from (*dense, *paged)
        # A Latin square: each pair of heads and dim once, each logits dtype with all of them.
        elif (number + kind + LOGITS_DTYPES.index(logits)) % len(LOGITS_DTYPES):
            continue
        elif elements == "Fp8":
            yield from (*dense, one_paged)
        # The converted formats share their code: each with every H, dense or paged, in turn.
        elif (number + kind) % len(dims) == 0:
            yield (*dense, one_paged)[HEADS.index(h) // 2 % 2]


ACCUMULATORS = {
    "Fp8": "HOPPER_FP8",
    "Mxfp8": "HOPPER_E4M3_IN_BF16",
    "Mxfp4": "HOPPER_E2M1_IN_BF16",
    "Fp8Accurate": "HOPPER_E4M3_IN_BF16",
    "Bf16": "HOPPER_BF16_IN_CHUNKS",
}
"""How each kind of elements is summed: a name in `mqa.testing.accumulators`."""
SM90 = Hopper("sm90", ELEMENTS, by_default=True)
SM90_ACCURATE = Hopper("sm90-accurate", {"fp8": "Fp8Accurate"}, by_default=False)
"""FP8 by way of bfloat16, whose sums keep float32's bits: for validation."""
