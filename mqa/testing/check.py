"""The one question most tests ask: are these logits right for this case?"""

from __future__ import annotations

from torch import Tensor

from mqa.testing.accumulators import EXACT, FLOAT32, Accumulator
from mqa.testing.cases import Case
from mqa.testing.compare import assert_bitwise, assert_within
from mqa.testing.oracle import logits
from mqa.testing.tolerance import tolerance


def assert_logits(case: Case, got: Tensor, accumulator: Accumulator = FLOAT32) -> None:
    """`got` [rows, width] holds the logits of `case`, in its dtype.

    Exact regime: bit for bit the definition rounded once. Bounded regime: within the derived
    tolerance of the oracle with `accumulator`. Invalid entries must be -inf if the problem is
    cleaned and are not looked at if not. Raises AssertionError whose last line replays the case.
    """
    problem = case.problem
    if got.dtype != case.out_dtype:
        raise AssertionError(f"got {got.dtype}, wanted {case.out_dtype}\nreplay: {problem}")
    exact = problem.regime == "exact"
    result = logits(case, EXACT if exact else accumulator)
    where = None if problem.clean else result.valid
    if exact:
        assert_bitwise(got, result.values, where=where, replay=problem)
    else:
        bound = tolerance(result, problem.out)
        assert_within(got, result.values, bound, where=where, replay=problem)
