"""Comparing logits: bit for bit, or within a bound; one rounding from float64 to any dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mqa.testing._codes import F64, I64, Bool

Logits: TypeAlias = Tensor | F64


@dataclass(frozen=True)
class _Kind:
    dtype: torch.dtype
    bits: int
    """Significant bits, the leading one included."""
    min_exponent: int
    max_exponent: int


_KINDS = {
    "float32": _Kind(torch.float32, 24, -126, 127),
    "bfloat16": _Kind(torch.bfloat16, 8, -126, 127),
    "float16": _Kind(torch.float16, 11, -14, 15),
}
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def round_once(values: F64, dtype: str) -> F64:
    """float64 values rounded once, to nearest even, to `dtype`; still float64.

    `dtype` is "float32", "bfloat16" or "float16". Subnormals are kept, values past the largest
    finite one become infinite, signs of zero and NaN stay. Never rounds through a third format.
    """
    kind = _KINDS[dtype]
    unit = _ulp(values, kind)
    with np.errstate(invalid="ignore"):
        rounded = np.rint(values / unit) * unit
    largest = _largest(kind)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)


def to_tensor(values: F64, dtype: str) -> Tensor:
    """float64 values rounded once to a CPU tensor of `dtype`; see `round_once`."""
    return torch.from_numpy(round_once(values, dtype)).to(_KINDS[dtype].dtype)


def half_ulp(values: F64, dtype: str) -> F64:
    """Half the distance between neighbours of `dtype` at each value, its subnormals included."""
    return _ulp(values, _KINDS[dtype]) / 2


def assert_bitwise(
    got: Logits, want: Logits, *, where: Bool | None = None, replay: object = ""
) -> None:
    """Every entry has the same bits, or both are NaN.

    `want` may be float64 numpy: it is rounded once to the dtype of `got`, which then must be a
    tensor. `where` masks the entries that count (default: all). `replay` (a problem) ends the
    message. Raises AssertionError with the number of wrong entries and the first one.
    """
    got, want = _as_tensor(got), _matching(got, want)
    _assert_shapes(got, want.shape, replay)
    if got.dtype != want.dtype:
        raise AssertionError(f"got {got.dtype}, wanted {want.dtype}{replay_line(replay)}")
    same = _words(got) == _words(want)
    both_nan = np.asarray(torch.isnan(got) & torch.isnan(want))
    wrong = ~(same | both_nan)
    if where is not None:
        wrong &= where
    if wrong.any():
        at = _first(wrong)
        texts = [f"{_value(t, at)!r} (0x{_hex(t, at)})" for t in (got, want)]
        raise AssertionError(
            f"{_count(wrong)} entries differ in bits; first at row {at[0]}, column {at[1]}: "
            f"got {texts[0]}, wanted {texts[1]}{replay_line(replay)}"
        )


def assert_within(
    got: Logits,
    want: F64,
    tolerance: F64,
    *,
    where: Bool | None = None,
    replay: object = "",
) -> None:
    """Every entry is within `tolerance` of `want`; both float64 of the shape of `got`.

    -inf and NaN must be where `want` has them and nowhere else. Where `tolerance` is 0 and `want`
    +0.0 (the zero plateau) only +0.0 will do. An infinite `got` stands for a finite `want` that may
    round past the largest finite value of got's dtype. `where` masks the entries that count.
    Raises AssertionError with the number of wrong entries and the worst one.
    """
    tensor = _as_tensor(got)
    _assert_shapes(tensor, want.shape, replay)
    wrong, excess = find_errors(tensor, want, tolerance)
    if where is not None:
        wrong &= where
    if wrong.any():
        at = _first(wrong & (excess == excess[wrong].max()))
        raise AssertionError(
            f"{_count(wrong)} entries are out of bounds; worst at row {at[0]}, column {at[1]}: "
            f"got {_value(tensor, at)!r}, wanted {float(want[at])!r} within {tolerance[at]:.6g}"
            f"{replay_line(replay)}"
        )


def find_errors(got: Tensor, want: F64, tolerance: F64) -> tuple[Bool, F64]:
    """Which entries `assert_within` objects to, and each error over its bound (for the worst)."""
    value = got.detach().cpu().to(torch.float64).numpy()
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(value - want)
        close = error <= tolerance
        excess = np.where(close, 0.0, error / tolerance)
    special = ~np.isfinite(want)
    alike = (np.isnan(value) & np.isnan(want)) | (value == want)
    plateau = (tolerance == 0) & (want == 0)
    exact_zero = (value == 0) & ~np.signbit(value)
    overflow = np.isinf(value) & (np.sign(value) == np.sign(want))
    overflow &= np.abs(want) + tolerance >= _overflow_from(got.dtype)
    right = np.where(special, alike, np.where(plateau, exact_zero, close | overflow))
    excess = np.where(right, 0.0, np.where(np.isnan(excess), np.inf, excess))
    return ~right, excess


def _ulp(values: F64, kind: _Kind) -> F64:
    with np.errstate(invalid="ignore"):
        exponent = np.asarray(np.frexp(values)[1], np.int64) - 1
    exponent = np.clip(exponent, kind.min_exponent, kind.max_exponent)
    return np.ldexp(1.0, exponent - (kind.bits - 1))


def _largest(kind: _Kind) -> float:
    return float((2 - 2.0 ** (1 - kind.bits)) * 2.0**kind.max_exponent)


def _overflow_from(dtype: torch.dtype) -> float:
    """Magnitudes from here on round to infinity."""
    for kind in _KINDS.values():
        if kind.dtype == dtype:
            return float((2 - 2.0**-kind.bits) * 2.0**kind.max_exponent)
    return float("inf")


def _as_tensor(logits: Logits) -> Tensor:
    return logits.detach().cpu() if isinstance(logits, Tensor) else torch.from_numpy(logits)


def _matching(got: Logits, want: Logits) -> Tensor:
    """`want` as a tensor; float64 numpy is rounded to got's dtype."""
    if isinstance(want, np.ndarray) and isinstance(got, Tensor):
        for name, kind in _KINDS.items():
            if kind.dtype == got.dtype:
                return to_tensor(want, name)
    return _as_tensor(want)


def _words(tensor: Tensor) -> I64:
    return tensor.contiguous().view(_WORDS[tensor.element_size()]).to(torch.int64).numpy()


def _assert_shapes(got: Tensor, want: tuple[int, ...], replay: object) -> None:
    if tuple(got.shape) != tuple(want):
        raise AssertionError(
            f"got shape {tuple(got.shape)}, wanted {tuple(want)}{replay_line(replay)}"
        )


def _first(mask: Bool) -> tuple[int, int]:
    row, column = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return int(row), int(column)


def _count(wrong: Bool) -> str:
    return f"{int(wrong.sum())} of {wrong.size}"


def _value(tensor: Tensor, at: tuple[int, int]) -> float:
    return float(tensor[at])


def _hex(tensor: Tensor, at: tuple[int, int]) -> str:
    digits = 2 * tensor.element_size()
    word = int(_words(tensor[at[0] : at[0] + 1, at[1] : at[1] + 1])[0, 0])
    return f"{word & (1 << 4 * digits) - 1:0{digits}x}"


def replay_line(replay: object) -> str:
    return f"\nreplay: {replay}" if str(replay) else ""
