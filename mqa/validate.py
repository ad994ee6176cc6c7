"""The only place that rejects a wrong call: rules that are true on every machine.

Each public function passes here once and comes out as a call: a frozen problem and tensors in one
normal form (k scale [N], packed FP4 as uint8). What is right but beyond a backend is that
backend's business (`mqa.backends`). Every error names the argument, what was expected and what
came, and is raised before anything is written or launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mqa import arguments, rules, values
from mqa.problem import (
    FORMATS,
    MX_FORMATS,
    TENSORS,
    DenseProblem,
    Format,
    PagedProblem,
    Problem,
)

_WEIGHTS = (torch.float32, torch.bfloat16)
_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
Query: TypeAlias = Tensor | tuple[Tensor, Tensor | None]
"""q of a call: FP8 or bfloat16 values alone, or values and a scale (None for those two)."""
Keys: TypeAlias = Tensor | tuple[Tensor, Tensor | None]
"""kv of a dense call: values and a scale; bfloat16 values alone, or with None."""

_DENSE_ARGUMENTS = (
    "q",
    "q[1]",
    "kv[0]",
    "kv[1]",
    "weights",
    "cu_seq_len_k_start",
    "cu_seq_len_k_end",
    "schedule_meta",
)
_PAGED_ARGUMENTS = (
    "q",
    "q[1]",
    "kv_cache",
    "weights",
    "context_lens",
    "block_table",
    "indices",
    "schedule_meta",
)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*_WEIGHTS, *_LOGITS)}


@dataclass(frozen=True, slots=True)
class DenseCall:
    """One dense call. Shapes as `DenseProblem`: q [S, H, D or D/2], q_scale int32 [S, H] or None,
    k [N, D or D/2], kv_scale [N] (None for bf16), weights [S, H], start and end int32 [S]."""

    problem: DenseProblem
    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    kv_scale: Tensor | None
    weights: Tensor
    start: Tensor
    end: Tensor
    schedule: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedCall:
    """One paged call. Shapes as `PagedProblem`: q [B, next_n, H, D or D/2], q_scale int32
    [B, next_n, H] or None, kv_cache uint8 [blocks, P, (1,) bytes] or bfloat16
    [blocks, P, (1,) D], weights [B * next_n, H], context_lens int32 [B, next_n] or [B],
    block_table int32 [B, columns]."""

    problem: PagedProblem
    q: Tensor
    q_scale: Tensor | None
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    indices: Tensor | None
    schedule: Tensor | None


class DenseTensors(NamedTuple):
    """Tensors of a dense call in their normal form, and the sizes that they have."""

    format: Format
    q: Tensor
    q_scale: Tensor | None
    k: Tensor
    kv_scale: Tensor | None
    sizes: tuple[int, int, int, int]
    """S, N, H, D."""
    width: int


def check_dense(
    q: Any,
    kv: Any,
    weights: Any,
    start: Any,
    end: Any,
    clean_logits: Any,
    max_seqlen_k: Any,
    logits_dtype: Any,
    schedule_meta: Any,
    out: Any,
) -> DenseTensors:
    """Check all that can be checked without reading values or addresses: of traced tensors too."""
    q, q_scale = rules.query(q)
    fmt = rules.format_of(q, q_scale)
    k, kv_scale = rules.keys(fmt, kv)
    q, k = rules.stored(q), rules.stored(k)
    (S, H, stored), (N, _) = (
        arguments.rank("q", q, "[S, H, D]"),
        arguments.rank("kv[0]", k, "[N, D]"),
    )
    D = rules.head_dim_of(fmt, H, stored)
    arguments.countable("q", q, S)
    arguments.countable("kv[0]", k, N)
    arguments.expect_shape("kv[0]", k, (N, stored))
    if q_scale is not None:
        _expect_q_scale(q_scale, (S, H))
    kv_scale = rules.key_scale(fmt, kv_scale, N)
    arguments.expect("weights", weights, (S, H), _WEIGHTS)
    arguments.expect("cu_seq_len_k_start", start, (S,), (torch.int32,))
    arguments.expect("cu_seq_len_k_end", end, (S,), (torch.int32,))
    rules.flag(clean_logits)
    width = arguments.integer("max_seqlen_k", max_seqlen_k) or N
    arguments.one_of("logits_dtype", logits_dtype, _LOGITS)
    rules.schedule_sms(schedule_meta)
    inputs = (q, q_scale, k, kv_scale, weights, start, end, schedule_meta)
    rules.one_device(dict(zip(_DENSE_ARGUMENTS, inputs, strict=True)) | {"out": out})
    rules.output(out, (S, width), logits_dtype)
    rules.no_gradient({"q": q, "kv[0]": k, "kv[1]": kv_scale, "weights": weights})
    return DenseTensors(fmt, q, q_scale, k, kv_scale, (S, N, H, D), width)


def dense(
    q: Any,
    kv: Any,
    weights: Any,
    start: Any,
    end: Any,
    clean_logits: Any,
    max_seqlen_k: Any,
    logits_dtype: Any,
    schedule_meta: Any,
    out: Any,
) -> DenseCall:
    """Check the arguments of `mqa.fp8_fp4_mqa_logits`."""
    options = (clean_logits, max_seqlen_k, logits_dtype, schedule_meta, out)
    t = check_dense(q, kv, weights, start, end, *options)
    S, N, H, D = t.sizes
    M = arguments.integer("max_seqlen_k", max_seqlen_k)
    if M and values.readable(t.q):
        values.windows_fit(start, end, N, M)
    inputs = (t.q, t.q_scale, t.k, t.kv_scale, weights, start, end)
    rules.no_overlap(out, dict(zip(_DENSE_ARGUMENTS, (*inputs, schedule_meta), strict=True)))
    problem = DenseProblem(
        format=t.format,
        S=S,
        N=N,
        H=H,
        D=D,
        M=M,
        weights=_NAMES[weights.dtype],
        out=_NAMES[logits_dtype],
        clean=clean_logits,
        sms=rules.schedule_sms(schedule_meta),
        layout=rules.layout_of(TENSORS["dense"], (*inputs, out)),
    )
    return DenseCall(problem, *inputs, schedule_meta)


class PagedTensors(NamedTuple):
    """Tensors of a paged call in their normal form, and the sizes that they have."""

    format: Format
    q: Tensor
    q_scale: Tensor | None
    sizes: tuple[int, int, int, int]
    """B, next_n, H, D."""
    pages: tuple[int, int, int]
    """Blocks, tokens in a page, columns of the block table."""


def check_paged(
    q: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_table: Any,
    schedule_meta: Any,
    max_context_len: Any,
    clean_logits: Any,
    logits_dtype: Any,
    indices: Any,
    out: Any,
) -> PagedTensors:
    """Check all that can be checked without reading values or addresses: of traced tensors too."""
    q, q_scale = rules.query(q)
    fmt = rules.format_of(q, q_scale)
    q = rules.stored(q)
    B, next_n, H, stored = arguments.rank("q", q, "[B, next_n, H, D]")
    if next_n == 0:
        wanted = "at least one query token a request (next_n >= 1)"
        arguments.reject("q.shape", tuple(q.shape), wanted)
    D = rules.head_dim_of(fmt, H, stored)
    if q_scale is not None:
        _expect_q_scale(q_scale, (B, next_n, H))
    blocks, page_size = rules.cache_sizes(fmt, kv_cache, stored)
    arguments.expect("weights", weights, (B * next_n, H), _WEIGHTS)
    rules.lens(context_lens, B, next_n)
    columns = arguments.rank("block_table", block_table, "[B, columns]")[1]
    arguments.expect("block_table", block_table, (B, columns), (torch.int32,))
    if indices is not None:
        arguments.expect("indices", indices, (B,), (torch.int32,))
        if next_n != 1:
            arguments.reject("q.shape", tuple(q.shape), "next_n = 1 where indices are given")
    width = arguments.integer("max_context_len", max_context_len)
    rules.flag(clean_logits)
    arguments.one_of("logits_dtype", logits_dtype, _LOGITS)
    rules.schedule_sms(schedule_meta)
    inputs = (q, q_scale, kv_cache, weights, context_lens, block_table, indices, schedule_meta)
    rules.one_device(dict(zip(_PAGED_ARGUMENTS, inputs, strict=True)) | {"out": out})
    rules.output(out, (B * next_n, width), logits_dtype)
    rules.no_gradient({"q": q, "kv_cache": kv_cache, "weights": weights})
    return PagedTensors(fmt, q, q_scale, (B, next_n, H, D), (blocks, page_size, columns))


def paged(
    q: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_table: Any,
    schedule_meta: Any,
    max_context_len: Any,
    clean_logits: Any,
    logits_dtype: Any,
    indices: Any,
    out: Any,
) -> PagedCall:
    """Check the arguments of `mqa.fp8_fp4_paged_mqa_logits`."""
    tensors = (kv_cache, weights, context_lens, block_table)
    options = (schedule_meta, max_context_len, clean_logits, logits_dtype, indices, out)
    t = check_paged(q, *tensors, *options)
    (B, next_n, H, D), (blocks, page_size, columns) = t.sizes, t.pages
    L = arguments.integer("max_context_len", max_context_len)
    if values.readable(t.q):
        values.lens_fit(context_lens, next_n, L, columns * page_size)
        values.blocks_exist(context_lens, next_n, block_table, indices, page_size, blocks)
    inputs = (t.q, t.q_scale, *tensors, indices)
    rules.no_overlap(out, dict(zip(_PAGED_ARGUMENTS, (*inputs, schedule_meta), strict=True)))
    problem = PagedProblem(
        format=t.format,
        B=B,
        next_n=next_n,
        H=H,
        D=D,
        P=page_size,
        blocks=blocks,
        columns=columns,
        L=L,
        weights=_NAMES[weights.dtype],
        out=_NAMES[logits_dtype],
        clean=clean_logits,
        lens_rank=context_lens.dim(),
        varlen=indices is not None,
        sms=rules.schedule_sms(schedule_meta),
        layout=rules.layout_of(TENSORS["paged"], (*inputs, out)),
    )
    return PagedCall(problem, *inputs, schedule_meta)


def dense_metadata(start: Any, end: Any, num_kv_tokens: Any, num_heads: Any) -> None:
    """Check the arguments of `mqa.get_mqa_logits_metadata`."""
    rows = arguments.rank("cu_seq_len_k_start", start, "[S]")
    arguments.countable("cu_seq_len_k_start", start, rows[0])
    arguments.expect("cu_seq_len_k_start", start, rows, (torch.int32,))
    arguments.expect("cu_seq_len_k_end", end, rows, (torch.int32,))
    arguments.integer("num_kv_tokens", num_kv_tokens)
    arguments.integer("num_heads", num_heads, least=1)
    rules.one_device({"cu_seq_len_k_start": start, "cu_seq_len_k_end": end})


def _expect_q_scale(scale: Any, shape: tuple[int, ...]) -> None:
    if getattr(scale, "dtype", None) == torch.float32:
        wanted = "torch.int32, packed scales of an MX format; scales of fp8 queries go into weights"
        arguments.reject("q[1].dtype", scale.dtype, wanted, TypeError)
    arguments.expect("q[1]", scale, shape, (torch.int32,))


def paged_metadata(context_lens: Any, block_kv: Any, num_sms: Any, indices: Any) -> None:
    """Check the arguments of `mqa.get_paged_mqa_logits_metadata`."""
    arguments.tensor("context_lens", context_lens)
    shape = tuple(context_lens.shape)
    if len(shape) not in (1, 2) or shape[1:] == (0,):
        arguments.reject("context_lens.shape", shape, "[B, next_n] with next_n >= 1, or [B]")
    arguments.expect("context_lens", context_lens, shape, (torch.int32,))
    arguments.integer("block_kv", block_kv, least=1)
    arguments.integer("num_sms", num_sms, least=1)
    if indices is not None:
        if shape[1:] not in ((), (1,)):
            arguments.reject("context_lens.shape", shape, "next_n = 1 where indices are given")
        arguments.expect("indices", indices, shape[:1], (torch.int32,))
    rules.one_device({"context_lens": context_lens, "indices": indices})


def metadata_out(out: Any, num_sms: int, device: torch.device) -> None:
    """Check the `out` of a metadata function: int32 [num_sms + 1, 2], rows that do not overlap."""
    if out is None:
        return
    arguments.expect("out", out, (num_sms + 1, 2), (torch.int32,))
    if out.stride(1) != 1 or out.stride(0) < 2:
        arguments.reject("out.stride()", out.stride(), "(at least 2, 1)")
    if out.device != device:
        arguments.reject("out.device", out.device, f"{device}, where the other tensors are")


def configuration(
    num_heads: Any,
    head_dim: Any,
    format: Any,
    page_size: Any,
    weights_dtype: Any,
    logits_dtype: Any,
    clean: Any,
    compressed: Any,
) -> Problem:
    """The smallest problem of a configuration, for the arguments of `mqa.supports`."""
    if format not in FORMATS:
        arguments.reject("format", format, f"one of {', '.join(FORMATS)}")
    arguments.integer("num_heads", num_heads, least=1)
    arguments.integer("head_dim", head_dim, least=1)
    if format in MX_FORMATS:
        rules.block_scaled_dim(format, head_dim)
    arguments.one_of("weights_dtype", weights_dtype, _WEIGHTS)
    arguments.one_of("logits_dtype", logits_dtype, _LOGITS)
    for argument, flag in (("clean", clean), ("compressed", compressed)):
        if not isinstance(flag, bool):
            arguments.reject(argument, flag, "True or False", TypeError)
    facts = {"weights": _NAMES[weights_dtype], "out": _NAMES[logits_dtype], "clean": clean}
    if page_size is None:
        M = int(compressed)
        return DenseProblem(format, S=1, N=1, H=num_heads, D=head_dim, M=M, **facts)
    arguments.integer("page_size", page_size, least=1)
    if compressed:
        arguments.reject("compressed", compressed, "False where page_size is given")
    sizes = {"B": 1, "next_n": 1, "blocks": 1, "columns": 1, "L": page_size}
    return PagedProblem(format, H=num_heads, D=head_dim, P=page_size, **sizes, **facts)
