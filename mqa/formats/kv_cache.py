"""The paged KV cache: blocks of P tokens, first all their values, then all their scales.

    block b:  value bytes of token 0 | ... | of token P-1 | scale of token 0 (4 bytes) | ... | P-1

The last dimension of the cache's shape, W + 4 bytes for W value bytes a token, only counts bytes:
`cache[b, p]` is *not* token p. A bfloat16 cache has no scales: there it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from mqa.formats.checks import FP4_BYTES, check_mx_head_dim, check_scale, check_tensor

if TYPE_CHECKING:
    from mqa.problem import Format

SCALE_BYTES = 4
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp8": (torch.float8_e4m3fn, torch.float32),
    "mxfp8": (torch.float8_e4m3fn, torch.int32),
    "mxfp4": (torch.uint8, torch.int32),
}
"""Dtype of values and of scales, of formats that have scales."""
_KNOWN = (*_DTYPES, "bf16")


def pack_kv_cache(values: Tensor, scale: Tensor | None = None) -> Tensor:
    """A paged cache from `values` [num_blocks, P, W] and `scale` [num_blocks, P].

    `float8_e4m3fn` values (W = D) go with float32 (fp8) or int32 (mxfp8) scales; packed E2M1
    values (W = D/2; uint8, int8 or `float4_e2m1fn_x2`) with int32; `bfloat16` values (W = D) with
    None. Any strides.

    Returns uint8 [num_blocks, P, 1, W + 4], or bfloat16 [num_blocks, P, 1, D], fresh and
    contiguous, every bit as it was given.

    Raises:
        TypeError: a dtype or a pair of dtypes other than these.
        ValueError: `values` is not of three dimensions, all but the first at least 1; D is no
            legal size of an MX row; `scale` has another shape or device.
    """
    dtypes = (torch.float8_e4m3fn, *FP4_BYTES, torch.bfloat16)
    check_tensor("pack_kv_cache", "values", values, dtypes)
    if values.ndim != 3 or 0 in values.shape[1:]:
        raise ValueError(
            f"pack_kv_cache: values.shape={tuple(values.shape)}, expected [num_blocks, P, W] with "
            "P and W at least 1"
        )
    if values.dtype == torch.bfloat16:
        if scale is not None:
            came = type(scale).__name__
            raise TypeError(f"pack_kv_cache: scale is a {came}, expected None for bfloat16 values")
        return values.unsqueeze(2).clone(memory_format=torch.contiguous_format)
    return _with_scales(values, scale)


def _with_scales(values: Tensor, scale: Tensor | None) -> Tensor:
    fp4 = values.dtype != torch.float8_e4m3fn
    scale = check_scale(
        "pack_kv_cache", values, scale, (torch.int32,) if fp4 else (torch.float32, torch.int32)
    )
    num_blocks, page, width = values.shape
    if scale.dtype == torch.int32:
        what = f"values.shape[-1]={width} {values.dtype}"
        check_mx_head_dim("pack_kv_cache", what, 2 * width if fp4 else width)
    value_bytes = values.contiguous().view(torch.uint8).reshape(num_blocks, page * width)
    scale_bytes = scale.contiguous().view(torch.uint8).reshape(num_blocks, page * SCALE_BYTES)
    blocks = torch.cat((value_bytes, scale_bytes), dim=1)
    return blocks.view(num_blocks, page, 1, width + SCALE_BYTES)


@overload
def unpack_kv_cache(
    cache: Tensor, format: Literal["fp8", "mxfp8", "mxfp4"]
) -> tuple[Tensor, Tensor]: ...
@overload
def unpack_kv_cache(cache: Tensor, format: Literal["bf16"]) -> tuple[Tensor, None]: ...
@overload
def unpack_kv_cache(cache: Tensor, format: Format) -> tuple[Tensor, Tensor | None]: ...
def unpack_kv_cache(cache: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Values and scales of a paged cache; the inverse of `pack_kv_cache`.

    Args:
        cache: uint8 [num_blocks, P, 1, W + 4] or [num_blocks, P, W + 4]; for bf16 bfloat16
            [num_blocks, P, 1, D] or [num_blocks, P, D]. Each block is contiguous, blocks may lie
            any distance apart, at any address.
        format: "fp8", "mxfp8", "mxfp4" or "bf16".

    Returns:
        values: `float8_e4m3fn` [num_blocks, P, D], uint8 [num_blocks, P, D/2] for mxfp4, or
            bfloat16 [num_blocks, P, D].
        scale: float32 for fp8, int32 for the MX formats, [num_blocks, P]; None for bf16.

    Both are contiguous copies, never views of the cache.

    Raises:
        TypeError: `cache` is no uint8 tensor, or for bf16 no bfloat16 tensor.
        ValueError: unknown format, or a shape or strides other than these.
    """
    if format not in _KNOWN:
        raise ValueError(f"unpack_kv_cache: format={format!r}, expected {', '.join(_KNOWN)}")
    plain = format == "bf16"
    dtype = torch.bfloat16 if plain else torch.uint8
    check_tensor("unpack_kv_cache", "cache", cache, (dtype,))
    num_blocks, page, width = _block_shape(cache, 0 if plain else SCALE_BYTES)
    if plain:
        copy = cache.clone(memory_format=torch.contiguous_format)
        return copy.view(num_blocks, page, width), None
    if format != "fp8":
        what = f"cache.shape[-1]={width + SCALE_BYTES} for {format}"
        check_mx_head_dim("unpack_kv_cache", what, 2 * width if format == "mxfp4" else width)
    values_dtype, scale_dtype = _DTYPES[format]
    blocks = cache.as_strided((num_blocks, page * (width + SCALE_BYTES)), (cache.stride(0), 1))
    values = blocks[:, : page * width].clone(memory_format=torch.contiguous_format)
    scale = blocks[:, page * width :].clone(memory_format=torch.contiguous_format)
    return (
        values.view(values_dtype).view(num_blocks, page, width),
        scale.view(scale_dtype).view(num_blocks, page),
    )


def _block_shape(cache: Tensor, behind: int) -> tuple[int, int, int]:
    """(num_blocks, P, W) of a legal cache, `behind` elements of whose last dimension are scales."""
    shape = tuple(cache.shape)
    squeezed = shape[:2] + shape[3:] if len(shape) == 4 and shape[2] == 1 else shape
    if len(squeezed) != 3 or squeezed[1] == 0 or squeezed[2] <= behind:
        width = f"W + {behind}" if behind else "W"
        raise ValueError(
            f"unpack_kv_cache: cache.shape={shape}, expected [num_blocks, P, 1, {width}] "
            f"or [num_blocks, P, {width}] with P and W at least 1"
        )
    num_blocks, page, row = squeezed
    if num_blocks and not cache[0].is_contiguous():
        raise ValueError(
            f"unpack_kv_cache: cache.stride()={cache.stride()}, expected contiguous blocks: "
            f"any stride(0), then {row} and 1"
        )
    return num_blocks, page, row - behind
