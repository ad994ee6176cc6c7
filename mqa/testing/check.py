"""The one question most tests ask: are these logits right for this case?"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mqa.testing.accumulators import EXACT, FLOAT32, Accumulator
from mqa.testing.cases import Case
from mqa.testing.compare import assert_bitwise, assert_within, replay_line
from mqa.testing.oracle import logits
from mqa.testing.tolerance import tolerance


def assert_logits(case: Case, got: Tensor, accumulator: Accumulator = FLOAT32) -> None:
    """`got` [rows, width] holds the logits of `case`, in its dtype.

    Exact regime: bit for bit the definition rounded once. Bounded regime: within the derived
    tolerance of the oracle with `accumulator`. Invalid entries must be -inf if the problem is
    cleaned and are not looked at if not. Raises AssertionError whose last line replays the case.
    """
    largest_error(case, got, accumulator, replay=case.problem)


def largest_error(
    case: Case, got: Tensor, accumulator: Accumulator = FLOAT32, *, replay: object = ""
) -> float | None:
    """The check of `assert_logits`, and of the bounded regime the largest error as a share of its
    bound: None in the exact regime, and where nothing was bounded.

    Raises AssertionError, whose last line is `replay` if that is given.
    """
    problem = case.problem
    if got.dtype != case.out_dtype:
        wanted = f"got {got.dtype}, wanted {case.out_dtype}"
        raise AssertionError(wanted + replay_line(replay))
    exact = problem.regime == "exact"
    result = logits(case, EXACT if exact else accumulator)
    where = None if problem.clean else result.valid
    if exact:
        assert_bitwise(got, result.values, where=where, replay=replay)
        return None
    bound = tolerance(result, problem.out)
    assert_within(got, result.values, bound, where=where, replay=replay)
    value = got.detach().cpu().double().numpy()
    counted = result.valid & (bound > 0) & np.isfinite(value) & np.isfinite(result.values)
    shares = np.abs(value[counted] - result.values[counted]) / bound[counted]
    return float(shares.max()) if shares.size else None
