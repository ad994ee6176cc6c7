"""What every kernel that scores takes: formats, sizes, and how q reaches it."""

from __future__ import annotations

from torch import Tensor

from mqa.cuda.plan import Scalar
from mqa.formats.kv_cache import SCALE_BYTES
from mqa.problem import MX_FORMATS, Format

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
MX_DIMS = (64, 128)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
CXX = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
"""Logits dtypes as C++ spells them."""
ELEMENTS: dict[Format, str] = {"fp8": "Fp8", "mxfp8": "Mxfp8", "mxfp4": "Mxfp4", "bf16": "Bf16"}
"""Of each format: how keys reach the tensor cores, a struct of the kernels' sources."""


def head_dims(format: Format) -> tuple[int, ...]:
    return MX_DIMS if format in MX_FORMATS else HEAD_DIMS


def row_bytes(elements: str, dim: int) -> int:
    """Bytes of a key of `dim` elements."""
    return {"Mxfp4": dim // 2, "Bf16": dim * 2}.get(elements, dim)


def scale_bytes(elements: str) -> int:
    """Bytes of a key's scale, or of its block scales."""
    return 0 if elements == "Bf16" else SCALE_BYTES


def strides(tensor: Tensor) -> tuple[int, int]:
    first, second = tensor.stride()
    return first, second


def byte_stride(tensor: Tensor, dimension: int) -> int:
    return tensor.stride(dimension) * tensor.element_size()


def q_nulls(q_pointers: tuple[str, ...]) -> tuple[Scalar, ...]:
    """Where a kernel reads neither q nor its scales by a pointer, its struct has two null ones."""
    return () if q_pointers else (Scalar("q", "p", 0), Scalar("q_scale", "p", 0))


def q_scalars(q_strides: tuple[int, int], scale_strides: tuple[int, int]) -> tuple[Scalar, ...]:
    """What stands in a struct for q: strides of rows and heads, of q in bytes."""
    return (
        Scalar("q_row_stride", "q", q_strides[1]),
        Scalar("q_head_stride", "q", q_strides[0]),
        Scalar("q_scale_row_stride", "q", scale_strides[0]),
        Scalar("q_scale_head_stride", "q", scale_strides[1]),
    )
