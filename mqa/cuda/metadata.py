"""Schedules: the launches of `csrc/score/metadata.cuh`, the same for every architecture."""

from __future__ import annotations

import functools

from torch import Tensor

from mqa.cuda.paged import groups_of_request
from mqa.cuda.plan import Kernel, Plan, Scalar, Struct, divisor
from mqa.reference.schedule import query_block

CTAS = 8
THREADS = 1024
METADATA = tuple(
    Kernel("score/metadata.cuh", "mqa::score::metadata", (f"mqa::score::{kind}",))
    for kind in ("DenseMetadata", "PagedMetadata")
)
"""For dense and for paged calls."""


@functools.lru_cache(maxsize=1024)
def dense_metadata_plan(
    rows: int,
    tokens: int,
    block: int,
    parts: int,
    start_stride: int,
    end_stride: int,
    out_stride: int,
) -> Plan:
    """The launch of `csrc/score/metadata.cuh` for a dense schedule: one cluster."""
    scalars = (
        Scalar("start_stride", "q", start_stride),
        Scalar("end_stride", "q", end_stride),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("rows", "i", rows),
        Scalar("tokens", "i", tokens),
        Scalar("block", "i", block),
        Scalar("parts", "i", parts),
    )
    struct = Struct(("start", "end", "out"), scalars)
    return Plan(METADATA[0], CTAS, THREADS, 0, (), struct)


@functools.lru_cache(maxsize=1024)
def paged_metadata_plan(
    requests: int,
    next_n: int,
    parts: int,
    lens_strides: tuple[int, int],
    indices_stride: int | None,
    out_stride: int,
) -> Plan:
    """The launch of `csrc/score/metadata.cuh` for a paged schedule; None: no indices."""
    scalars = (
        Scalar("lens_request_stride", "q", lens_strides[0]),
        Scalar("lens_row_stride", "q", lens_strides[1]),
        Scalar("indices_stride", "q", indices_stride or 0),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("requests", "i", requests),
        *divisor("next_n", next_n),
        *divisor("groups_of_request", groups_of_request(next_n)),
        Scalar("parts", "i", parts),
    )
    struct = Struct(("lens", "" if indices_stride is None else "indices", "out"), scalars)
    return Plan(METADATA[1], CTAS, THREADS, 0, (), struct)


def dense_cuts_plan(
    start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
) -> Plan:
    """The launch that writes the cut points of these windows to `out`."""
    rows, parts = start.shape[0], out.shape[0] - 1
    block = query_block(num_heads)
    strides = (start.stride(0), end.stride(0), out.stride(0))
    return dense_metadata_plan(rows, num_kv_tokens, block, parts, *strides)


def paged_cuts_plan(context_lens: Tensor, indices: Tensor | None, out: Tensor) -> Plan:
    """The launch that writes the cut points of these lens, [B, next_n] or [B], to `out`."""
    requests, next_n = context_lens.shape if context_lens.dim() == 2 else (len(context_lens), 1)
    row_stride = context_lens.stride(1) if context_lens.dim() == 2 else 0
    return paged_metadata_plan(
        requests,
        next_n,
        out.shape[0] - 1,
        (context_lens.stride(0), row_stride),
        None if indices is None else indices.stride(0),
        out.stride(0),
    )
