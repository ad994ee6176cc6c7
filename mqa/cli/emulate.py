"""`mqa emulate`: one problem by the PTX emulator, under a schedule and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from mqa.cli.console import Stop, parse_problems, print_whole, standard_output
from mqa.emulator import EmulationError, scheduled
from mqa.emulator.backend import SM90_EMULATED
from mqa.emulator.scheduler import SCHEDULES
from mqa.errors import BackendUnavailableError
from mqa.testing import accumulators, assert_logits, make_case

ROLES = (("math", range(16)), ("feed", range(16, 19)), ("clean", range(19, 20)))
"""Warps of the scoring kernels, as `csrc/sm90/score/kernel.cuh` shares them out."""


def emulate(
    problem: Annotated[
        str, typer.Argument(help="One line, like 'dense fp8 S=16 N=512 H=64 D=128'.")
    ],
    schedule: Annotated[str, typer.Option(help=", ".join(SCHEDULES))] = "eager",
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
) -> None:
    """Run one problem's kernel on the CPU, compare with the oracle, and count instructions.

    \b
    Example:
      mqa emulate "dense fp8 S=16 N=512 H=64 D=128" --schedule hunt --seed 3
    """
    if schedule not in SCHEDULES:
        raise Stop(f"--schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    case = make_case(parse_problems([problem])[0])
    model = accumulators.EXACT
    if case.problem.regime != "exact":
        model = getattr(accumulators, SM90_EMULATED.accumulator(case.problem.format))
    try:
        with scheduled(schedule, seed) as launches:
            got = case.run(backend=SM90_EMULATED.name)
        assert_logits(case, got, model)
    except (EmulationError, BackendUnavailableError, AssertionError) as error:
        raise Stop(str(error), exit_code=1) from error
    lines = [f"{case.problem}: as the oracle says, schedule={schedule} seed={seed}"]
    for launch in launches:
        roles = _by_role(launch.instructions)
        lines += [f"  {name:<6} {count:>9} instructions" for name, count in roles]
    print_whole(standard_output(), "\n".join(lines))


def _by_role(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    return [(name, sum(counts.get(warp, 0) for warp in warps)) for name, warps in ROLES]
