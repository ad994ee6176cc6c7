"""The logical content of a case: codes, scales, weights and windows as plain numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mqa.testing._codes import F32, F64, I64, U8, Bool, Codes, decode


@dataclass(frozen=True)
class Group:
    """Rows `first` .. `last` - 1 share keys; position n of theirs is key `keys[n]` of the data."""

    first: int
    last: int
    keys: I64


@dataclass(frozen=True)
class Data:
    """What a logit is made of, dense and paged alike. R rows, K keys, H heads, D dims.

    Row r is valid at positions start[r] .. end[r] - 1, already clamped; its column 0 of the result
    is position origin[r].
    """

    format: str
    q_codes: Codes
    """[R, H, D], one element code each (a nibble for mxfp4)."""
    q_scales: U8 | None
    """[R, H, D / 32] UE8M0 codes; None for fp8 and bf16."""
    k_codes: Codes
    """[K, D]"""
    k_scales: U8 | None
    """[K, D / 32] UE8M0 codes; None for fp8 and bf16."""
    key_scale: F32
    """[K], applied after the head sum; ones but for fp8."""
    weights: F32
    """[R, H]"""
    start: I64
    end: I64
    origin: I64
    groups: tuple[Group, ...]
    width: int
    clean: bool

    @property
    def rows(self) -> int:
        return int(self.q_codes.shape[0])

    @property
    def heads(self) -> int:
        return int(self.q_codes.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.q_codes.shape[2])

    def q(self, rows: slice) -> F64:
        """Values of these rows' queries with their block scales, [rows, H, D] float64."""
        scales = None if self.q_scales is None else self.q_scales[rows]
        return decode(self.q_codes[rows], scales, self.format)

    def k(self, keys: I64) -> F64:
        """Values of these keys with their block scales but without `key_scale`, [keys, D]."""
        scales = None if self.k_scales is None else self.k_scales[keys]
        return decode(self.k_codes[keys], scales, self.format)

    def inside(self) -> Bool:
        """Which entries of the result, [R, width], are inside the window of their row."""
        position = self.origin[:, None] + np.arange(self.width)
        return np.asarray((position >= self.start[:, None]) & (position < self.end[:, None]))

    def lengths(self) -> I64:
        """Valid entries of each row of the result, [R]."""
        stop = np.minimum(self.end, self.origin + self.width)
        return np.asarray(np.maximum(stop - np.maximum(self.start, self.origin), 0), np.int64)
