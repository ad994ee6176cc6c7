"""Checks of single arguments. Each error names the argument, what was expected and what came."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor


_MOST, _LONGEST = 8, 100


def reject(
    argument: str, came: object, expected: str, kind: type[Exception] = ValueError
) -> NoReturn:
    raise kind(f"{argument}={_shown(came)}, expected {expected}")


def _shown(value: object) -> str:
    """One short line for any value: a tensor by dtype and shape, never by its elements."""
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_shown, value[:_MOST])) + (", ..." if len(value) > _MOST else "")
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"({inner}{comma})" if isinstance(value, tuple) else f"[{inner}]"
    text = str(value) if isinstance(value, torch.device | torch.dtype) else repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def tensor(argument: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        reject(argument, value, "a torch.Tensor", TypeError)
    if value.layout != torch.strided:
        reject(f"{argument}.layout", value.layout, "torch.strided", TypeError)
    return value


def pair(argument: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        reject(argument, value, "a pair (values, scale)", TypeError)
    return value[0], value[1]


def rank(argument: str, value: Any, rank: int) -> tuple[int, ...]:
    shape = tuple(tensor(argument, value).shape)
    if len(shape) != rank:
        reject(f"{argument}.shape", shape, f"{rank} dimension{'s' if rank > 1 else ''}")
    return shape


def expect_shape(argument: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        reject(f"{argument}.shape", tuple(value.shape), str(shape))


def expect(
    argument: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    tensor(argument, value)
    if value.dtype not in dtypes:
        reject(f"{argument}.dtype", value.dtype, " or ".join(map(str, dtypes)), TypeError)
    expect_shape(argument, value, shape)


def size(argument: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        reject(argument, value, "an int", TypeError)
    if value < least:
        reject(argument, value, f"at least {least}")
