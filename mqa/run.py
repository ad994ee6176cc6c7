"""One call: validate, choose a backend, allocate, compute. What eager calls and operators share."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa import prepared, rules, validate
from mqa.backends import check_name, choose, scheduler

ROW_BYTES = 1024
"""Row strides of results are multiples of this: the top-k kernels that come next rely on it."""


def dense(
    q: validate.Query,
    kv: validate.Keys,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    clean: bool,
    max_seqlen_k: int,
    dtype: torch.dtype,
    schedule_meta: Tensor | None,
    backend: str | None,
    out: Tensor | None,
) -> Tensor:
    check_name(backend)
    tensors = (q, kv, weights, start, end)
    options = (clean, max_seqlen_k, dtype, schedule_meta)
    call = validate.dense(*tensors, *options, out)
    chosen = choose(call.problem, call.q.device, backend)
    given, version = out, prepared.settings()
    if out is None:
        out = new_result(call.q, call.problem.rows, call.problem.width, dtype)
    if out.numel():
        launch = chosen.dense(call, out)
        if launch is not None:
            prepared.keep(*tensors, *options, backend, given, launch, out, version)
    return out


def paged(
    q: validate.Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean: bool,
    dtype: torch.dtype,
    indices: Tensor | None,
    backend: str | None,
    out: Tensor | None,
) -> Tensor:
    check_name(backend)
    tensors = (kv_cache, weights, context_lens, block_table, schedule_meta)
    call = validate.paged(q, *tensors, max_context_len, clean, dtype, indices, out)
    chosen = choose(call.problem, call.q.device, backend)
    if out is None:
        out = new_result(call.q, call.problem.rows, call.problem.width, dtype)
    if out.numel():
        chosen.paged(call, out)
    return out


def new_result(like: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] on the device of `like`, the row stride a positive multiple of 1024 bytes."""
    step = ROW_BYTES // dtype.itemsize
    stride = torch.sym_max(-(-width // step), 1) * step
    return like.new_empty((rows, stride), dtype=dtype)[:, :width]


def dense_metadata(
    start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, num_sms: int, out: Tensor | None
) -> Tensor:
    validate.dense_metadata(start, end, num_kv_tokens, num_heads)
    validate.metadata_out(out, num_sms, start.device)
    rules.no_overlap(out, {"cu_seq_len_k_start": start, "cu_seq_len_k_end": end})
    if out is None:
        out = start.new_empty((num_sms + 1, 2))
    scheduler(start.device).dense_metadata(start, end, num_kv_tokens, num_heads, out)
    return out


def paged_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None, out: Tensor | None
) -> Tensor:
    validate.paged_metadata(context_lens, block_kv, num_sms, indices)
    validate.metadata_out(out, num_sms, context_lens.device)
    rules.no_overlap(out, {"context_lens": context_lens, "indices": indices})
    if out is None:
        out = context_lens.new_empty((num_sms + 1, 2))
    scheduler(context_lens.device).paged_metadata(context_lens, indices, out)
    return out
