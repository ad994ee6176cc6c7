"""Planted faults: wrong logits that a good suite must notice.

A suite whose tolerance hides one of these proves nothing. `flagged_fraction` says in which share
of the valid entries a fault shows; it counts as detected from `DETECTED` on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mqa.problem import QUANTIZED_FORMATS
from mqa.testing._codes import F64
from mqa.testing.accumulators import EXACT, FLOAT32, Accumulator
from mqa.testing.cases import Case
from mqa.testing.compare import find_errors, round_once, to_tensor
from mqa.testing.data import Data
from mqa.testing.oracle import OracleResult, combine, logits
from mqa.testing.tolerance import tolerance

DETECTED = 0.2
"""The share of valid entries in which a fault must show."""


@dataclass(frozen=True)
class Fault:
    """A mistake a kernel might make, acted out on the oracle."""

    name: str
    applies: Callable[[Data], bool]
    """Whether the mistake makes a difference on data of this form."""
    score: Callable[[Data, Accumulator], OracleResult]
    """The logits with the mistake made."""

    def logits(self, case: Case, accumulator: Accumulator = EXACT) -> Tensor:
        """The wrong logits of `case`: [rows, width], rounded once to the problem's dtype."""
        return to_tensor(self.score(case.data, accumulator).values, case.problem.out)


def flagged_fraction(case: Case, wrong: Tensor, accumulator: Accumulator = FLOAT32) -> float:
    """The share of valid entries in which `wrong` [rows, width] is seen to be wrong.

    Seen: other bits than the definition's in the exact regime, out of tolerance under `accumulator`
    in the bounded one. 1 if nothing is valid.
    """
    if case.problem.regime == "exact":
        result = logits(case, EXACT)
        want = round_once(result.values, case.problem.out)
        flagged, _ = find_errors(wrong, want, np.zeros_like(want))
    else:
        result = logits(case, accumulator)
        bound = tolerance(result, case.problem.out)
        flagged, _ = find_errors(wrong, result.values, bound)
    return float(flagged[result.valid].mean()) if result.valid.any() else 1.0


def detects(case: Case, fault: Fault, accumulator: Accumulator = FLOAT32) -> bool:
    """Whether `fault` shows in at least `DETECTED` of the case's valid entries."""
    return flagged_fraction(case, fault.logits(case, accumulator), accumulator) >= DETECTED


def _altered(change: Callable[[Data], Data]) -> Callable[[Data, Accumulator], OracleResult]:
    def score(data: Data, accumulator: Accumulator) -> OracleResult:
        return combine(change(data), accumulator)

    return score


def _drop_head(data: Data) -> Data:
    weights = data.weights.copy()
    weights[:, -1] = 0
    return dataclasses.replace(data, weights=weights)


def _swap_weights(data: Data) -> Data:
    weights = data.weights.copy()
    weights[:, :2] = weights[:, 1::-1]
    return dataclasses.replace(data, weights=weights)


def _swap_dims(data: Data) -> Data:
    codes = data.q_codes.copy()
    codes[..., :2] = codes[..., 1::-1]
    return dataclasses.replace(data, q_codes=codes)


def _drop_last_step(data: Data) -> Data:
    codes = data.q_codes.copy()
    codes[..., -min(32, data.head_dim // 2) :] = 0
    return dataclasses.replace(data, q_codes=codes)


def _neighbour_scale(data: Data) -> Data:
    if data.k_scales is None:
        return dataclasses.replace(data, key_scale=np.roll(data.key_scale, 1))
    return dataclasses.replace(data, k_scales=np.roll(data.k_scales, 1, axis=0))


def _swap_nibbles(data: Data) -> Data:
    pairs = data.k_codes.reshape(len(data.k_codes), data.head_dim // 2, 2)
    return dataclasses.replace(data, k_codes=pairs[..., ::-1].reshape(data.k_codes.shape))


def _reverse_scale_bytes(data: Data) -> Data:
    assert data.k_scales is not None
    return dataclasses.replace(data, k_scales=data.k_scales[:, ::-1])


def _sum_heads_in_bfloat16(weights: F64, relus: F64) -> F64:
    total = np.zeros((relus.shape[0], relus.shape[2]))
    for head in range(relus.shape[1]):
        product = round_once(weights[:, head, None] * relus[:, head], "bfloat16")
        total = round_once(total + product, "bfloat16")
    return total


def _coarse_head_sum(data: Data, accumulator: Accumulator) -> OracleResult:
    return combine(data, accumulator, head_sum=_sum_heads_in_bfloat16)


def _no_relu(data: Data, accumulator: Accumulator) -> OracleResult:
    return combine(data, accumulator, relu=False)


def _always(data: Data) -> bool:
    return True


def _has_heads(data: Data) -> bool:
    return data.heads > 1


def _has_key_scales(data: Data) -> bool:
    return data.format in QUANTIZED_FORMATS and len(data.k_codes) > 1


def _has_blocks(data: Data) -> bool:
    return data.k_scales is not None and data.k_scales.shape[1] > 1


def _has_nibbles(data: Data) -> bool:
    return data.format == "mxfp4"


BOUNDED_FAULTS = (
    Fault("one head dropped", _always, _altered(_drop_head)),
    Fault("two weights swapped", _has_heads, _altered(_swap_weights)),
    Fault("two dims of q swapped", _always, _altered(_swap_dims)),
    Fault("last K-step dropped", _always, _altered(_drop_last_step)),
    Fault("a neighbour's k scale", _has_key_scales, _altered(_neighbour_scale)),
    Fault("head sum in bfloat16", _always, _coarse_head_sum),
)
"""What the bounded suite must flag (the last one with float32 logits, which can show it)."""

EXACT_FAULTS = (
    Fault("relu dropped", _always, _no_relu),
    Fault("nibbles of k swapped", _has_nibbles, _altered(_swap_nibbles)),
    Fault("scale bytes of k reversed", _has_blocks, _altered(_reverse_scale_bytes)),
)
"""What the exact suite must flag."""
