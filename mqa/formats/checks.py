"""Argument checks that the format functions share: every message names argument, wanted and got."""

from __future__ import annotations

import torch
from torch import Tensor

from mqa.formats.elements import MX_BLOCK

MAX_MX_HEAD_DIM = 4 * MX_BLOCK
"""One int32 holds the UE8M0 codes of four blocks."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP4_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
"""Dtypes that hold two E2M1 elements a byte."""


def check_floats(function: str, x: Tensor, *, block_scaled: bool = False) -> None:
    """`x` is a float tensor of at least one dimension, its last one a legal number of elements."""
    check_tensor(function, "x", x, _FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{function}: x.ndim=0, expected at least 1: the last dimension is a row")
    if block_scaled:
        check_mx_head_dim(function, f"x.shape[-1]={x.shape[-1]}", x.shape[-1])
    elif x.shape[-1] == 0:
        raise ValueError(f"{function}: x.shape[-1]=0, expected at least 1 element a row")


def check_mx_head_dim(function: str, what: str, head_dim: int) -> None:
    """`head_dim` elements have one to four whole blocks; `what` says where the number is from."""
    if head_dim % MX_BLOCK or not 0 < head_dim <= MAX_MX_HEAD_DIM:
        raise ValueError(
            f"{function}: {what}, expected {MX_BLOCK}, 64, 96 or {MAX_MX_HEAD_DIM} elements: "
            f"whole blocks of {MX_BLOCK}, at most four scales in an int32"
        )


def check_tensor(
    function: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """`value`, which is a tensor of one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}, expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{function}: {name}.dtype={value.dtype}, expected {_listed(dtypes)}")
    return value


def check_scale(
    function: str, values: Tensor, scale: Tensor | None, dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """`scale`, which has one entry per row of `values`, on the same device."""
    scale = check_tensor(function, "scale", scale, dtypes)
    if values.ndim == 0 or scale.shape != values.shape[:-1]:
        expected = tuple(values.shape[:-1])
        raise ValueError(
            f"{function}: scale.shape={tuple(scale.shape)}, expected {expected}: "
            f"one per row of values, values.shape={tuple(values.shape)}"
        )
    if scale.device != values.device:
        raise ValueError(
            f"{function}: scale.device={scale.device}, expected {values.device} as values has"
        )
    return scale


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
