"""`mqa emulate` says that a problem is right, or what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from mqa.cuda import compiler

SMALL = "dense fp8 S=2 N=70 H=8 D=32 regime=exact"


def test_an_unknown_schedule_is_an_error(run: Any) -> None:
    result = run("emulate", SMALL, "--schedule", "late")
    assert result.exit_code == 2
    assert "expected one of eager, lazy, random, hunt" in result.stderr


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_problem_is_run_and_instructions_are_counted(run: Any) -> None:
    result = run("emulate", SMALL, "--schedule", "hunt", "--seed", "3")
    assert result.exit_code == 0
    assert "as the oracle says, schedule=hunt seed=3" in result.stdout
    assert "feed" in result.stdout


@pytest.mark.skipif(compiler.unavailable() is not None, reason="NVRTC is missing")
def test_a_problem_that_has_no_kernel_says_why(run: Any) -> None:
    result = run("emulate", "dense fp8 S=2 N=70 H=8 D=96")
    assert result.exit_code == 1
    assert "D=96 is not one of" in result.stderr
