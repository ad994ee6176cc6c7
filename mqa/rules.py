"""Rules about the tensors of a call, one function each: what the calls in `mqa.validate` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mqa import arguments
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.problem import MX_FORMATS, MX_HEAD_DIMS, Format, Layout

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
_PACKED = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
_ADDRESS_BYTES = 16


def query(q: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(q, Tensor):
        return arguments.tensor("q", q), None
    values, scale = arguments.pair("q", q, "a torch.Tensor, or a pair (values, scale or None)")
    return arguments.tensor("q[0]", values), None if scale is None else arguments.tensor(
        "q[1]", scale
    )


def format_of(q: Tensor, q_scale: Tensor | None) -> Format:
    if q_scale is None:
        if q.dtype == BF16:
            return "bf16"
        if q.dtype != FP8:
            wanted = f"{FP8}, {BF16}, or a pair (values, int32 scale) for MXFP8 and MXFP4"
            arguments.reject("q.dtype", q.dtype, wanted, TypeError)
        return "fp8"
    if q.dtype == FP8:
        return "mxfp8"
    if q.dtype == BF16:
        arguments.reject("q[1]", q_scale, f"None: queries in {BF16} have no scale", TypeError)
    if q.dtype not in _PACKED:
        arguments.reject("q[0].dtype", q.dtype, f"{FP8} (MXFP8) or int8, uint8 (MXFP4)", TypeError)
    return "mxfp4"


def keys(fmt: Format, kv: Any) -> tuple[Tensor, Tensor | None]:
    """k and its scale, which keys in bfloat16 alone have none of: those may come as a tensor."""
    if fmt == "bf16" and isinstance(kv, Tensor):
        same_elements(fmt, arguments.tensor("kv", kv))
        return kv, None
    alone = f"a torch.Tensor of {BF16}, as q is, or a pair (values, None)"
    k, scale = arguments.pair("kv", kv, *((alone,) if fmt == "bf16" else ()))
    same_elements(fmt, arguments.tensor("kv[0]", k))
    if fmt != "bf16":
        return k, arguments.tensor("kv[1]", scale)
    if scale is not None:
        arguments.reject("kv[1]", scale, f"None: keys in {BF16}, as q is, have no scale", TypeError)
    return k, None


def same_elements(fmt: Format, k: Tensor) -> None:
    if fmt == "mxfp4":
        if k.dtype not in _PACKED:
            arguments.reject(
                "kv[0].dtype", k.dtype, "int8 or uint8, as q is packed MXFP4", TypeError
            )
        return
    wanted = BF16 if fmt == "bf16" else FP8
    if k.dtype != wanted:
        arguments.reject("kv[0].dtype", k.dtype, f"{wanted}, as q is", TypeError)


def key_scale(fmt: Format, scale: Tensor | None, num_keys: int) -> Tensor | None:
    """The scale [N] of keys, which may come as [N, 1]."""
    if scale is None:
        return None
    if tuple(scale.shape) == (num_keys, 1):
        scale = scale.squeeze(1)
    dtype = torch.float32 if fmt == "fp8" else torch.int32
    arguments.expect("kv[1]", scale, (num_keys,), (dtype,))
    return scale


def stored(values: Tensor) -> Tensor:
    """Values as calls hold them: packed FP4 as bytes."""
    return values.view(torch.uint8) if values.dtype in _PACKED else values


def head_dim_of(fmt: Format, num_heads: int, stored: int) -> int:
    if num_heads == 0 or stored == 0:
        arguments.reject(
            "q.shape", f"[..., {num_heads}, {stored}]", "at least one head and one dimension"
        )
    if fmt not in MX_FORMATS:
        return stored
    return block_scaled_dim(fmt, stored * 2 if fmt == "mxfp4" else stored)


def block_scaled_dim(fmt: Format, head_dim: int) -> int:
    if head_dim not in MX_HEAD_DIMS:
        wanted = f"one of {MX_HEAD_DIMS} for {fmt}: an int32 holds four scales of 32 elements"
        arguments.reject("head_dim", head_dim, wanted)
    return head_dim


def flag(clean_logits: Any) -> None:
    if not isinstance(clean_logits, bool):
        wanted = (
            "True or False (some libraries of this kind take another argument in this place: "
            "pass everything after the fifth argument by name)"
        )
        arguments.reject("clean_logits", clean_logits, wanted, TypeError)


def schedule_sms(schedule_meta: Any) -> int:
    """SMs that a schedule is for; 0 without one. What it holds is never an error."""
    if schedule_meta is None:
        return 0
    arguments.tensor("schedule_meta", schedule_meta)
    if schedule_meta.dtype != torch.int32:
        arguments.reject("schedule_meta.dtype", schedule_meta.dtype, "torch.int32", TypeError)
    shape = tuple(schedule_meta.shape)
    if len(shape) != 2 or shape[0] < 2 or shape[1] != 2:
        arguments.reject("schedule_meta.shape", shape, "[number of SMs + 1, 2]")
    return int(shape[0]) - 1


def cache_sizes(fmt: Format, kv_cache: Any, stored: int) -> tuple[int, int]:
    """Blocks of a cache, and tokens in one."""
    arguments.tensor("kv_cache", kv_cache)
    dtype = BF16 if fmt == "bf16" else torch.uint8
    if kv_cache.dtype != dtype:
        wanted = f"{dtype} for q in format {fmt}"
        arguments.reject("kv_cache.dtype", kv_cache.dtype, wanted, TypeError)
    shape, token = tuple(kv_cache.shape), stored if fmt == "bf16" else stored + SCALE_BYTES
    squeezed = shape[:2] + shape[3:] if len(shape) == 4 and shape[2] == 1 else shape
    if len(squeezed) != 3 or squeezed[1] == 0 or squeezed[2] != token:
        arguments.reject(
            "kv_cache.shape", shape, f"[num_blocks, P >= 1, 1, {token}] for q's head_dim"
        )
    strides = kv_cache.stride()
    if strides[-1] != 1 or (shape[1] > 1 and strides[1] != token):
        arguments.reject(
            "kv_cache.stride()", strides, f"contiguous blocks: (any, {token}, {token}, 1)"
        )
    return shape[0], shape[1]


def lens(context_lens: Any, batch: int, next_n: int) -> None:
    arguments.tensor("context_lens", context_lens)
    if context_lens.dtype != torch.int32:
        arguments.reject("context_lens.dtype", context_lens.dtype, "torch.int32", TypeError)
    if tuple(context_lens.shape) not in ((batch,), (batch, next_n)):
        shape = tuple(context_lens.shape)
        arguments.reject("context_lens.shape", shape, f"{(batch, next_n)} or {(batch,)}")


def one_device(named: dict[str, Any]) -> None:
    first, *others = (item for item in named.items() if item[1] is not None)
    for name, value in others:
        if isinstance(value, Tensor) and value.device != first[1].device:
            wanted = f"{first[1].device}, where {first[0]} is"
            arguments.reject(f"{name}.device", value.device, wanted)


def output(out: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if out is None:
        return
    arguments.expect("out", out, shape, (dtype,))
    no_gradient({"out": out})
    rows, width = shape
    row_stride, column_stride = out.stride()
    if (width > 1 and column_stride != 1) or (rows > 1 and row_stride < width):
        arguments.reject("out.stride()", out.stride(), f"(at least {width}, 1)")


def no_gradient(named: dict[str, Tensor | None]) -> None:
    for argument, value in named.items():
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            wanted = "False: logits have no gradient; detach it or use torch.no_grad()"
            arguments.reject(f"{argument}.requires_grad", True, wanted)


def no_overlap(out: Tensor | None, inputs: dict[str, Tensor | None]) -> None:
    """Reject an `out` that shares bytes with an input, which may be read after they are written."""
    if out is None or out.numel() == 0:
        return
    low, high = reach(out)
    for name, value in inputs.items():
        if value is None or value.numel() == 0 or value.device != out.device:
            continue
        first, last = reach(value)
        if first < high and low < last:
            arguments.reject("out", out, f"memory of its own, but it overlaps {name}")


def reach(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def layout_of(names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> Layout:
    """Departures from contiguous, 16-byte-aligned tensors, as a problem's line shows them."""
    departures: list[tuple[str, tuple[int, ...]]] = []
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            departures.append((f"{name}_stride", tuple(tensor.stride())))
        offset = tensor.data_ptr() % _ADDRESS_BYTES
        if offset:
            departures.append((f"{name}_off", (offset,)))
    return tuple(sorted(departures))
