"""Checks of single arguments. Each error names the argument, what was expected and what came."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor


INT32_MAX = 2**31 - 1
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
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def tensor(argument: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        reject(argument, value, "a torch.Tensor", TypeError)
    if value.layout != torch.strided:
        reject(f"{argument}.layout", value.layout, "torch.strided", TypeError)
    return value


def pair(argument: str, value: Any, wanted: str = "a pair (values, scale)") -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        reject(argument, value, wanted, TypeError)
    return value[0], value[1]


def rank(argument: str, value: Any, shape: str) -> tuple[int, ...]:
    """The sizes of a tensor that has as many dimensions as a shape like `[S, H, D]` names."""
    sizes = tuple(tensor(argument, value).shape)
    if len(sizes) != shape.count(",") + 1:
        reject(f"{argument}.shape", sizes, f"the dimensions {shape}")
    return sizes


def expect_shape(argument: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        reject(f"{argument}.shape", tuple(value.shape), str(shape))


def expect(
    argument: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    tensor(argument, value)
    if value.dtype not in dtypes:
        reject(f"{argument}.dtype", value.dtype, " or ".join(map(str, dtypes)), TypeError)
    expect_shape(argument, value, shape)


def integer(argument: str, value: Any, least: int = 0) -> int:
    """An int, a numpy integer or a symbolic int from `least` to the largest int32; no bool, no
    tensor."""
    if not isinstance(value, torch.SymInt):
        if isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
            reject(argument, value, "an int", TypeError)
        value = operator.index(value)
    if value < least:
        reject(argument, value, f"at least {least}")
    if value > INT32_MAX:
        reject(argument, value, f"at most {INT32_MAX}: positions and counts are int32")
    return value  # type: ignore[no-any-return]


def one_of(argument: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """A dtype among some."""
    if not isinstance(value, torch.dtype) or value not in dtypes:
        reject(argument, value, " or ".join(map(str, dtypes)), TypeError)


def device(argument: str, value: Any) -> torch.device:
    """A device by name, index or itself."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        reject(argument, value, f"a device: {str(error).splitlines()[0]}")


def countable(argument: str, value: Tensor, size: Any) -> None:
    """Raise ValueError for a tensor whose rows or tokens an int32 cannot number."""
    if not isinstance(size, torch.SymInt) and size > INT32_MAX:
        reject(
            f"{argument}.shape",
            tuple(value.shape),
            f"at most {INT32_MAX} rows: positions are int32",
        )
