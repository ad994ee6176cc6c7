"""The one question most tests ask: are these logits right for this case?"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mqa.testing.accumulators import EXACT, FLOAT32, Accumulator
from mqa.testing.cases import Case
from mqa.testing.compare import assert_bitwise, assert_within, replay_line
from mqa.testing.data import Group
from mqa.testing.oracle import logits
from mqa.testing.tolerance import tolerance
from mqa.problem import DenseProblem


def assert_logits(case: Case, got: Tensor, accumulator: Accumulator = FLOAT32) -> None:
    """`got` [rows, width] holds the logits of `case`, in its dtype.

    Exact regime: bit for bit the definition rounded once. Bounded regime: within the derived
    tolerance of the oracle with `accumulator`. Invalid entries must be -inf if the problem is
    cleaned and are not looked at if not. Raises AssertionError whose last line replays the case.
    """
    largest_error(case, got, accumulator, replay=case.problem)


def largest_error(
    case: Case,
    got: Tensor,
    accumulator: Accumulator = FLOAT32,
    *,
    replay: object = "",
    most_products: int | None = None,
) -> float | None:
    """The check of `assert_logits`, and of the bounded regime the largest error as a share of its
    bound: None in the exact regime, and where nothing was bounded.

    Models of tensor units take long. `most_products` is how many products q * k of a dense case of
    the bounded regime are formed: of one that has more, rows from its first to its last are judged,
    spread evenly, at least one.

    Raises AssertionError, whose last line is `replay` if that is given.
    """
    problem = case.problem
    if got.dtype != case.out_dtype:
        wanted = f"got {got.dtype}, wanted {case.out_dtype}"
        raise AssertionError(wanted + replay_line(replay))
    exact = problem.regime == "exact"
    if most_products is not None and not exact and isinstance(problem, DenseProblem):
        count = max(1, most_products // max(1, problem.N * problem.H * problem.D))
        if count < problem.S:
            rows = np.unique(np.linspace(0, problem.S - 1, count).astype(np.int64))
            case, got = _rows_of(case, rows), got[torch.from_numpy(rows)]
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


def _rows_of(case: Case, rows: npt.NDArray[np.int64]) -> Case:
    """What the oracle needs of a dense case that consists of these rows."""
    data = case.data
    of_rows = {name: getattr(data, name)[rows] for name in ("q_codes", "weights", "start", "end")}
    if data.q_scales is not None:
        of_rows["q_scales"] = data.q_scales[rows]
    data = dataclasses.replace(
        data,
        **of_rows,
        origin=data.origin[rows],
        groups=(Group(0, len(rows), data.groups[0].keys),),
    )
    return dataclasses.replace(case, data=data)
