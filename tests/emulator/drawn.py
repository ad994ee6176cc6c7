"""What is asked of drawn problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

import mqa
from mqa.emulator import scheduled
from mqa.emulator.backend import Emulated
from mqa.problem import DenseProblem, PagedProblem
from mqa.testing import make_case

Drawn = TypeVar("Drawn", DenseProblem, PagedProblem)


def right_or_refused(
    backend: Emulated, problem: Drawn, how: str, seed: int, check: Callable[[Drawn], None]
) -> None:
    """`check` passes under that schedule and seed, unless the backend has a reason against the
    problem: then a call is refused."""
    if any(backend.reasons_against(problem, torch.device("cpu"))):
        with pytest.raises(mqa.BackendUnavailableError):
            make_case(problem).run(backend=backend.name)
        return
    with scheduled(how, seed=seed):
        check(problem)
