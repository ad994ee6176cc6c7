"""Tensors with the strides and addresses that a problem's layout asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mqa.problem import Problem

Raw = npt.NDArray[Any]
_GUARD = 0xA5
"""Byte around the entries of an `out` tensor."""
_GUARD_BYTES = 64


class Layout:
    """The departures of one problem from contiguous tensors.

    `<name>_stride` lists strides in elements from the first dimension on; trailing ones that it
    leaves out are contiguous (`w_stride=100` is a row stride). `<name>_off` is the address mod 16.
    """

    def __init__(self, problem: Problem) -> None:
        self._facts = dict(problem.layout)
        self._unused = set(self._facts)
        self._problem = problem

    def mentions(self, name: str) -> bool:
        return f"{name}_stride" in self._facts or f"{name}_off" in self._facts

    def strides(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of tensor `name`; raises ValueError if it lists more than it has dims."""
        self._unused.discard(f"{name}_stride")
        given = self._facts.get(f"{name}_stride", ())
        if len(given) > len(shape):
            raise ValueError(f"{name}_stride={given}, expected at most {len(shape)} strides")
        contiguous: list[int] = []
        step = 1
        for size in reversed(shape):
            contiguous.insert(0, step)
            step *= max(size, 1)
        return (*given, *contiguous[len(given) :])

    def offset(self, name: str, item_bytes: int) -> int:
        """Address mod 16; raises ValueError unless a multiple of the element size."""
        self._unused.discard(f"{name}_off")
        (offset,) = self._facts.get(f"{name}_off", (0,))
        if offset >= 16 or offset % item_bytes:
            raise ValueError(f"{name}_off={offset}, expected < 16 and a multiple of {item_bytes}")
        return offset

    def settle(self, name: str, values: Raw) -> Raw:
        """The values as strides of 0 leave them: constant along such dimensions."""
        for axis, stride in enumerate(self.strides(name, values.shape)):
            if stride == 0 and values.shape[axis] > 1:
                first = np.take(values, [0], axis=axis)
                values = np.broadcast_to(first, values.shape).copy()
        return values

    def place(self, name: str, raw: Raw, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`raw` as a tensor of `dtype` (same element size) in an allocation that ends behind it.

        Gaps are NaN in float tensors, large positive numbers in integer ones. Raises ValueError if
        two elements that differ would share an address.
        """
        item = raw.dtype.itemsize
        strides, offset = self.strides(name, raw.shape), self.offset(name, item)
        gap = 0xFF if dtype.is_floating_point else 0x7F
        buffer = np.full(offset + _span(raw.shape, strides) * item, gap, np.uint8)
        if raw.size:
            view = _strided(buffer[offset:].view(raw.dtype), raw.shape, strides)
            view[...] = raw
            if not np.array_equal(view.view(f"u{item}"), raw.view(f"u{item}")):
                raise ValueError(f"{name}_stride={strides}: elements of {raw.shape} overlap")
        owned = torch.empty(buffer.size, dtype=torch.uint8, device=device)
        owned.copy_(torch.from_numpy(buffer))
        typed = owned[offset:].view(dtype)
        return typed.as_strided(raw.shape, strides, offset // item)

    def out(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A result tensor full of NaN between guard bytes; see `guards_intact`."""
        item = dtype.itemsize
        strides, offset = self.strides("out", shape), self.offset("out", item)
        lead = _GUARD_BYTES + offset
        count = lead + _span(shape, strides) * item + _GUARD_BYTES
        buffer = torch.full((-(-count // 16) * 16,), _GUARD, dtype=torch.uint8, device=device)
        result = buffer.view(dtype) if offset % item == 0 else buffer
        return result.as_strided(shape, strides, lead // item).fill_(float("nan"))

    def assert_all_used(self) -> None:
        """Raises ValueError if the layout speaks of a tensor that the problem does not have."""
        unused = self._unused - {"out_stride", "out_off"}
        if unused:
            raise ValueError(f"{self._problem}: no tensor for {', '.join(sorted(unused))}")


def guards_intact(out: Tensor) -> bool:
    """Whether everything around the entries of a tensor from `Case.new_out` is untouched."""
    storage = torch.empty(0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage())
    host = storage.cpu().numpy().copy()
    item = out.element_size()
    view = _strided(
        host[out.storage_offset() * item :], (*out.shape, item), (*_scaled(out, item), 1)
    )
    view[...] = _GUARD
    return bool((host == _GUARD).all())


def _scaled(tensor: Tensor, factor: int) -> tuple[int, ...]:
    return tuple(stride * factor for stride in tensor.stride())


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, both included; 0 if there are none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _strided(flat: Raw, shape: Sequence[int], strides: Sequence[int]) -> Raw:
    bytes_strides = [stride * flat.dtype.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, tuple(shape), bytes_strides)
