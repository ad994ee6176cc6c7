"""One case of `mqa check`: run it, judge it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mqa.backends import choose
from mqa.cli import machine
from mqa.cli.console import Stop, one_line
from mqa.errors import BackendUnavailableError
from mqa.problem import Problem
from mqa.testing import (
    Case,
    Tiled,
    accumulators,
    guards_intact,
    largest_error,
)

PASSED, FAILED, REFUSED = "passed", "failed", "refused"
Ran = Callable[[], None]
_MOST_PRODUCTS = 2**30
"""Products q * k of a case that are formed as a tensor unit does: some seconds of one core."""


@dataclass(frozen=True)
class Outcome:
    """What became of one problem."""

    problem: Problem
    backend: str
    """Who ran it, or was asked to."""
    status: str
    """`passed`, `failed`, or `refused`: the backend has a reason against it."""
    worst: float | None
    """Bounded regime: the largest error as a share of its bound. None where nothing was bounded."""
    detail: str
    """Empty if it passed."""
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    def as_json(self) -> dict[str, object]:
        """The case's entry in a report; an infinite or NaN error is told in `detail` alone."""
        finite = self.worst is not None and bool(np.isfinite(self.worst))
        return {
            "problem": str(self.problem),
            "backend": self.backend,
            "status": self.status,
            "worst": self.worst if finite else None,
            "detail": self.detail,
            "seconds": round(self.seconds, 6),
        }


def judge(case: Case, backend: str | None = None, ran: Ran = lambda: None) -> Outcome:
    """Run `case` on `backend` (default: the one a call would get) and hold it against the oracle.

    A backend that raises fails the case. Cases of odd seeds write to a strided `out` full of NaN
    whose surroundings must stay as they were. `ran` is called when the device is through and before
    the oracle computes. Stops at a name that no backend has.
    """
    try:
        chosen = choose(case.problem, case.device, backend)
    except BackendUnavailableError as error:
        return Outcome(
            case.problem, backend or "none", REFUSED, None, one_line(str(error)), seconds=0.0
        )
    except ValueError as error:
        raise Stop(str(error)) from error
    begin = time.perf_counter()
    worst = None
    try:
        got = _run(case, chosen.name)
        if got.is_cuda:
            torch.cuda.synchronize(got.device)
        ran()
        with torch.cuda.device(case.device) if got.is_cuda else contextlib.nullcontext():
            name = chosen.accumulator(case.problem.format)
        worst = _worst(case, got, name)
    except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
        detail = _detail(error)
    else:
        detail = ""
    status = FAILED if detail else PASSED
    return Outcome(case.problem, chosen.name, status, worst, detail, time.perf_counter() - begin)


def _run(case: Case, backend: str) -> Tensor:
    out = case.new_out() if case.problem.seed % 2 else None
    got = case.run(backend=backend, out=out)
    if out is not None and not guards_intact(out):
        raise AssertionError("something around the entries of out= was written")
    return got


def _worst(case: Case, got: Tensor, name: str) -> float | None:
    """`largest_error` by the accumulator of that name."""
    model = accumulators.named(name)
    if model is accumulators.FLOAT32:
        return largest_error(case, got, model)
    return largest_error(case, got, Tiled(model), most_products=_MOST_PRODUCTS)


def _detail(error: Exception) -> str:
    text = machine.without_paths(one_line(str(error)))
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
