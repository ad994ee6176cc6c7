"""The one question most tests ask: are these logits right for this case?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from mqa.problem import DenseProblem, Problem
from mqa.testing._codes import F64, I64, Bool
from mqa.testing.accumulators import EXACT, FLOAT32, Accumulator
from mqa.testing.cases import Case
from mqa.testing.compare import assert_bitwise, assert_within, replay_line
from mqa.testing.data import Group
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
    the bounded regime are formed: of one that has more, rows from its first to its last are held
    against the oracle, spread evenly, at least one. Of the others it is known that nothing is NaN
    and that what lies outside windows is -inf, if the problem is cleaned.

    Raises AssertionError, whose last line is `replay` if that is given.
    """
    problem = case.problem
    if got.dtype != case.out_dtype:
        wanted = f"got {got.dtype}, wanted {case.out_dtype}"
        raise AssertionError(wanted + replay_line(replay))
    if problem.regime == "exact":
        result = logits(case, EXACT)
        where = None if problem.clean else result.valid
        assert_bitwise(got, result.values, where=where, replay=replay)
        return None
    bounds = _bounds(case, accumulator, _spread(problem, most_products))
    assert_within(got, bounds.want, bounds.tolerance, where=bounds.where, replay=replay)
    value = got.detach().cpu().double().numpy()
    lost = np.argwhere(bounds.passed_over & np.isnan(value))
    if len(lost):
        found = f"{len(lost)} entries are NaN; first at row {lost[0][0]}, column {lost[0][1]}"
        raise AssertionError(found + replay_line(replay))
    counted = bounds.where & (bounds.tolerance > 0) & np.isfinite(value) & np.isfinite(bounds.want)
    shares = np.abs(value[counted] - bounds.want[counted]) / bounds.tolerance[counted]
    return float(shares.max()) if shares.size else None


@dataclass(frozen=True)
class _Bounds:
    """What the logits of a case have to be; all arrays are [rows, width]."""

    want: F64
    tolerance: F64
    where: Bool
    """The entries that are held against these."""
    passed_over: Bool
    """Inside a window, in a row that is not held against the oracle."""


def _bounds(case: Case, accumulator: Accumulator, rows: I64 | None) -> _Bounds:
    """Of these rows, or of all."""
    judged: I64 | slice = slice(None) if rows is None else rows
    result = logits(case if rows is None else _rows_of(case, rows), accumulator)
    inside = case.data.inside()
    want, bound = np.full(inside.shape, -np.inf), np.zeros(inside.shape)
    want[judged], bound[judged] = result.values, tolerance(result, case.problem.out)
    where, passed_over = ~inside & case.problem.clean, inside.copy()
    where[judged] |= inside[judged]
    passed_over[judged] = False
    return _Bounds(want, bound, where, passed_over)


def _spread(problem: Problem, most_products: int | None) -> I64 | None:
    """As many rows as have no more products, the first and the last among them; None: all."""
    if most_products is None or not isinstance(problem, DenseProblem):
        return None
    count = max(1, most_products // max(1, problem.N * problem.H * problem.D))
    if count >= problem.S:
        return None
    last, step = problem.S - 1, (problem.S - 1) // max(1, count - 1)
    rows = np.linspace(0, last, count).astype(np.int64)
    # Each one place further, or all might be at the same place of a kernel's blocks of rows.
    rows[1:-1] += np.arange(1, max(1, count - 1)) % max(1, step)
    return np.unique(rows)


def _rows_of(case: Case, rows: I64) -> Case:
    """What the oracle needs of a dense case that consists of these rows."""
    data = case.data
    of_rows = {name: getattr(data, name)[rows] for name in ("q_codes", "weights", "start", "end")}
    if data.q_scales is not None:
        of_rows["q_scales"] = data.q_scales[rows]
    data = replace(
        data,
        **of_rows,
        origin=data.origin[rows],
        groups=(Group(0, len(rows), data.groups[0].keys),),
    )
    return replace(case, data=data)
