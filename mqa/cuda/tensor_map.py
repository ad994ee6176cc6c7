"""Tensor maps: how the copy engine (TMA) sees a tensor, as a value that a driver encodes later.

Rules and their names are those of `cuTensorMapEncodeTiled` in the CUDA driver API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from mqa import arguments
from mqa.cuda import headers

ADDRESS_BYTES = 16
"""Alignment of addresses and strides."""
MAX_RANK = 5
MAX_BOX = 256
DESCRIPTOR_BYTES = 128

_DATA_TYPES = {
    torch.uint8: "UINT8",
    torch.int8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.uint16: "UINT16",
    torch.int16: "UINT16",
    torch.int32: "INT32",
    torch.uint32: "UINT32",
    torch.int64: "INT64",
    torch.uint64: "UINT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
}
"""Names behind CU_TENSOR_MAP_DATA_TYPE_. 8-bit types only move as bytes."""
_PACKED = {"16U4_ALIGN8B": 2, "16U4_ALIGN16B": 128}
"""Types of packed 4-bit elements, and what the innermost size has to be a multiple of. The second
one takes 16 bytes of shared memory for 16 elements: 8 of data, and 8 that mean nothing."""
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor without its address, and the box that one copy moves. Dimension 0 is contiguous.

    Raises ValueError naming what the copy engine could not take, in the order of the tensor's own
    dimensions: outermost first.
    """

    tensor: str
    """Name of the tensor whose address it will get."""
    data_type: str
    """As in `CU_TENSOR_MAP_DATA_TYPE_...`."""
    element_bytes: int
    """Of a packed type those of 16 elements."""
    shape: tuple[int, ...]
    """Elements, innermost first."""
    strides: tuple[int, ...]
    """Bytes, of dimensions 1, 2, ..."""
    box: tuple[int, ...]
    """Elements of one copy, innermost first."""
    swizzle: int = 0
    """Span in bytes of the swizzle in shared memory: 0, 32, 64 or 128."""

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= MAX_RANK:
            self._reject_shape(f"1 to {MAX_RANK} dimensions")
        if len(self.strides) != rank - 1:
            came = self.strides[::-1]
            expected = f"{rank - 1} of them, none for the last dimension"
            raise ValueError(f"byte strides of {self.tensor}={came}, expected {expected}")
        if len(self.box) != rank:
            self._reject_box(f"{rank} size{'' if rank == 1 else 's'}, one for each dimension")
        if not all(1 <= size <= 1 << 32 for size in self.shape):
            self._reject_shape("sizes from 1 to 2^32")
        align = self.address_bytes
        if any(step % align or not 0 <= step < 1 << 40 for step in self.strides):
            steps = (*(self.elements(step) for step in self.strides[::-1]), 1)
            expected = (
                f"multiples of {align} bytes, {self.elements(align)} elements, below 2^40 bytes, "
                "but for the last"
            )
            raise ValueError(f"{self.tensor}.stride()={steps}, expected {expected}")
        if not all(1 <= size <= MAX_BOX for size in self.box):
            self._reject_box(f"sizes from 1 to {MAX_BOX}")
        if self.swizzle not in _SWIZZLES:
            expected = f"one of {', '.join(map(str, _SWIZZLES))}"
            raise ValueError(f"swizzle={self.swizzle!r} for {self.tensor}, expected {expected}")
        inner = self.bytes(self.box[0])
        if inner % ADDRESS_BYTES:
            self._reject_box(f"a last size that makes a multiple of {ADDRESS_BYTES} bytes")
        if self.swizzle and inner > self.swizzle:
            self._reject_box(f"a last size of at most swizzle={self.swizzle} bytes")
        if self.data_type in _PACKED:
            self._check_packed(_PACKED[self.data_type])

    def _check_packed(self, multiple: int) -> None:
        if self.shape[0] % multiple:
            self._reject_shape(f"a last size that is a multiple of {multiple}")
        if not self.padded:
            return
        if self.box[0] != multiple:
            self._reject_box(f"a last size of {multiple}")
        if self.swizzle not in (0, 128):
            raise ValueError(f"swizzle={self.swizzle} for {self.tensor}, expected one of 0, 128")

    @property
    def padded(self) -> bool:
        """Whether shared memory has 8 bytes that mean nothing after each 8 bytes of data."""
        return self.data_type == "16U4_ALIGN16B"

    @property
    def address_bytes(self) -> int:
        """Alignment of the tensor's address and of its strides."""
        return 2 * ADDRESS_BYTES if self.padded else ADDRESS_BYTES

    def bytes(self, elements: int) -> int:
        """Bytes of so many elements beside each other in global memory."""
        return elements * self.element_bytes // (16 if self.data_type in _PACKED else 1)

    def elements(self, size: int) -> int:
        """The reverse of `bytes`."""
        return size * (16 if self.data_type in _PACKED else 1) // self.element_bytes

    @property
    def box_bytes(self) -> int:
        """What one copy adds to its barrier, also where the box leaves the tensor. Of a padded
        type too those of global memory."""
        return self.bytes(prod(self.box))

    def _reject_shape(self, expected: str) -> NoReturn:
        raise ValueError(f"{self.tensor}.shape={self.shape[::-1]}, expected {expected}")

    def _reject_box(self, expected: str) -> NoReturn:
        raise ValueError(f"box={self.box[::-1]} for {self.tensor}, expected {expected}")


def make_tma_descriptor(tensor: Tensor, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """How the copy engine (TMA) sees a tensor, for kernels that you launch yourself.

    The 128 bytes are a `CUtensorMap`. Pass them by value as a kernel parameter, `const
    __grid_constant__ CUtensorMap` (aligned to 64 bytes, in CUDA 13 to 128), or copy them to global
    memory of that alignment before the launch. They hold the tensor's address and not the tensor,
    which has to stay alive and in place as long as kernels use them; its contents may change.

    A copy moves one box between the tensor and shared memory, which has the box's elements in the
    order of the tensor's dimensions; the kernel gives the coordinates of its first one, innermost
    first. Elements outside the tensor are read as zeros and not written, but for the rest of a
    16-byte chunk at the inner end: docs/hardware.md has what was measured at the edges.

    Args:
        tensor: On a CUDA device, 1 to 5 dimensions, none empty, at an address that is a multiple
            of 16. The last dimension is contiguous; strides of others are multiples of 16 bytes.
            Integers and floats of 8, 16, 32 and 64 bits; 8-bit floats count as bytes.
        box: Elements of one copy, a size of 1 to 256 for each dimension of the tensor, in the
            same order; the last is a multiple of 16 bytes.
        swizzle: 0, or the span of the pattern in which shared memory has the box: 32, 64 or 128
            bytes. Then the last size of `box` is at most that, and its rows are that far apart.

    Returns:
        The descriptor, 128 bytes.

    Raises:
        TypeError: `tensor` is no tensor or of another dtype, or a size is no integer.
        ValueError: The tensor, the box or the swizzle is none that the copy engine takes.
        RuntimeError: The driver refuses, or cuda-python or the driver is missing.
    """
    arguments.tensor("tensor", tensor)
    if tensor.device.type != "cuda":
        arguments.reject("tensor.device", tensor.device, "a CUDA device")
    if not isinstance(box, Sequence):
        arguments.reject("box", box, "a size for each dimension of the tensor", TypeError)
    sizes = tuple(arguments.integer(f"box[{i}]", size, least=1) for i, size in enumerate(box))
    plan = tensor_map(tensor, sizes, name="tensor", swizzle=swizzle)
    encoded = encode(_driver(), plan, tensor.data_ptr())
    return ctypes.string_at(int(encoded.getPtr()), DESCRIPTOR_BYTES)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(f"cuda-python is not installed ({headers.INSTALL})") from error
    return driver


def tensor_map(tensor: Tensor, box: tuple[int, ...], *, name: str, swizzle: int = 0) -> TensorMap:
    """The map of a tensor of rank 1 to 5 whose last dimension is contiguous; box outermost first.

    Raises ValueError or TypeError naming what the copy engine could not take.
    """
    if tensor.dtype not in _DATA_TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DATA_TYPES)
        arguments.reject(f"{name}.dtype", tensor.dtype, f"one of {known}", TypeError)
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        arguments.reject(f"{name}.stride()", tensor.stride(), "a contiguous last dimension")
    size = tensor.element_size()
    return TensorMap(
        name,
        _DATA_TYPES[tensor.dtype],
        size,
        tuple(reversed(tensor.shape)),
        tuple(_byte_strides(tensor)),
        tuple(reversed(box)),
        swizzle,
    )


def _byte_strides(tensor: Tensor) -> Iterator[int]:
    """Strides of all dimensions but the last, innermost first; that of a size 1 may be anything."""
    inner = tensor.element_size() * (tensor.shape[-1] if tensor.dim() else 1)
    for size, step in list(zip(tensor.shape, tensor.stride(), strict=True))[-2::-1]:
        legal = -(-inner // ADDRESS_BYTES) * ADDRESS_BYTES
        stride = step * tensor.element_size() if size > 1 else legal
        yield stride
        inner = max(inner, size * stride)


def encode(driver: Any, plan: TensorMap, address: int) -> Any:
    """The driver's CUtensorMap of a tensor at `address`. `driver` is `cuda.bindings.driver`.

    Raises ValueError for an address that is not a multiple of 16 bytes, RuntimeError for what the
    driver refuses.
    """
    if address % plan.address_bytes:
        expected = f"a multiple of {plan.address_bytes}"
        raise ValueError(f"{plan.tensor}.data_ptr()={address:#x}, expected {expected}")
    rank = len(plan.shape)
    strides = plan.strides or (ADDRESS_BYTES,)  # of rank 1 none is read, yet the list must be there
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{plan.data_type}"),
        rank,
        address,
        [driver.cuuint64_t(size) for size in plan.shape],
        [driver.cuuint64_t(step) for step in strides],
        [driver.cuuint32_t(size) for size in plan.box],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[plan.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error.name} for {plan}")
    return encoded
