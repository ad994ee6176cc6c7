"""Schedules: the launches of `csrc/score/metadata.cuh` and `csrc/portable/metadata.cuh`."""

from __future__ import annotations

import functools

from torch import Tensor

from mqa.cuda.paged import groups_of_request
from mqa.cuda.plan import Kernel, Plan, Scalar, Struct, divisor
from mqa.reference.schedule import query_block

CTAS = 8
"""Of the cluster; portable kernels have one CTA."""
THREADS = 1024
_KINDS = ("mqa::score::DenseMetadata", "mqa::score::PagedMetadata")
METADATA = tuple(Kernel("score/metadata.cuh", "mqa::score::metadata", (kind,)) for kind in _KINDS)
"""For dense and for paged calls."""
PORTABLE_METADATA = tuple(
    Kernel("portable/metadata.cuh", "mqa::portable::metadata", (kind,), portable=True)
    for kind in _KINDS
)


def _plan(kernel: Kernel, struct: Struct) -> Plan:
    return Plan(kernel, 1 if kernel.portable else CTAS, THREADS, 0, (), struct)


@functools.lru_cache(maxsize=1024)
def dense_metadata_plan(
    rows: int,
    tokens: int,
    block: int,
    parts: int,
    start_stride: int,
    end_stride: int,
    out_stride: int,
    kernel: Kernel = METADATA[0],
) -> Plan:
    """The launch of `kernel` for a dense schedule: one cluster, or one CTA."""
    scalars = (
        Scalar("start_stride", "q", start_stride),
        Scalar("end_stride", "q", end_stride),
        Scalar("cuts_stride", "q", out_stride),
        Scalar("rows", "i", rows),
        Scalar("tokens", "i", tokens),
        Scalar("block", "i", block),
        Scalar("parts", "i", parts),
    )
    return _plan(kernel, Struct(("start", "end", "out"), scalars))


@functools.lru_cache(maxsize=1024)
def paged_metadata_plan(
    requests: int,
    next_n: int,
    parts: int,
    lens_strides: tuple[int, int],
    indices_stride: int | None,
    out_stride: int,
    kernel: Kernel = METADATA[1],
) -> Plan:
    """The launch of `kernel` for a paged schedule; None: no indices."""
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
    indices = "" if indices_stride is None else "indices"
    return _plan(kernel, Struct(("lens", indices, "out"), scalars))


def dense_cuts_plan(
    start: Tensor,
    end: Tensor,
    num_kv_tokens: int,
    num_heads: int,
    out: Tensor,
    kernel: Kernel = METADATA[0],
) -> Plan:
    """The launch that writes the cut points of these windows to `out`."""
    rows, parts = start.shape[0], out.shape[0] - 1
    block = query_block(num_heads)
    strides = (start.stride(0), end.stride(0), out.stride(0))
    return dense_metadata_plan(rows, num_kv_tokens, block, parts, *strides, kernel)


def paged_cuts_plan(
    context_lens: Tensor, indices: Tensor | None, out: Tensor, kernel: Kernel = METADATA[1]
) -> Plan:
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
        kernel,
    )
