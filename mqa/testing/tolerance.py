"""How far right logits may be from the oracle's: derived, one line for each rounding step."""

from __future__ import annotations

import numpy as np

from mqa.testing._codes import F64
from mqa.testing.compare import half_ulp
from mqa.testing.oracle import OracleResult

UNIT = 2.0**-24
"""Relative rounding error of float32."""
SMALLEST = 2.0**-126
"""The smallest normal float32: what is below may be flushed to zero."""


def tolerance(result: OracleResult, out: str = "float32") -> F64:
    """The largest error of each entry of `result` rounded to dtype `out`: [rows, width] float64.

    0 where the logit must be exactly +0.0: on the zero plateau, and outside the windows.
    """
    heads, dims = result.heads, result.head_dim
    with np.errstate(invalid="ignore", over="ignore"):
        # H products, H - 1 additions, one scale and the products' reuse: each 2^-24, doubled
        # because partial sums are themselves off.
        head_sum = 2 * UNIT * (heads + 2) * result.magnitude
        # What the accumulator leaves open of each dot, weighed like the dot.
        dots = result.dot_error
        # D products or their sum, H weighted relus and the result may each be flushed to zero.
        flush = SMALLEST * (dims * result.weight + heads * result.scale + 1)
        # One rounding to the output dtype, of a value that may be that much larger.
        before = head_sum + dots + flush
        total = before + half_ulp(np.abs(result.values) + before, out)
    return np.where(result.valid & ~result.plateau, total, 0.0)
