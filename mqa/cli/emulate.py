"""`mqa emulate`: one problem by the PTX emulator, under a schedule and a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqa.cli.console import Stop, parse_problems, print_whole, standard_output
from mqa.emulator import EmulationError, Summary, scheduled
from mqa.emulator.backend import EMULATED, SM90_EMULATED
from mqa.emulator.scheduler import SCHEDULES
from mqa.errors import BackendUnavailableError, CompileError
from mqa.testing import Accumulator, Case, accumulators, assert_logits, make_case


def emulate(
    problem: Annotated[
        str, typer.Argument(help="One line, like 'dense fp8 S=16 N=512 H=64 D=128'.")
    ],
    backend: Annotated[str, typer.Option(help=", ".join(EMULATED))] = SM90_EMULATED.name,
    schedule: Annotated[str, typer.Option(help=", ".join(SCHEDULES))] = "hunt",
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    checks: Annotated[
        bool | None,
        typer.Option(
            "--checks/--no-checks",
            help="Look for all mistakes, or for none that a kernel could go on after; by default "
            "all but races in eager.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File for a timeline as Chrome-trace JSON, which Perfetto opens."),
    ] = None,
) -> None:
    """Run one problem's kernel on the CPU, compare with the oracle, and count instructions.

    Races are looked for in all schedules but eager, unless --checks.

    \b
    Example:
      mqa emulate "dense fp8 S=16 N=512 H=64 D=128" --schedule hunt --seed 3
      mqa emulate "dense mxfp4 S=16 N=512 H=64 D=128" --backend sm100-emulated
      mqa emulate "dense bf16 S=16 N=512 H=48 D=128" --backend portable-emulated
      mqa emulate "dense fp8 S=16 N=512 H=64 D=128 sms=2" --trace timeline.json
    """
    if schedule not in SCHEDULES:
        raise Stop(f"--schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if backend not in EMULATED:
        raise Stop(f"--backend {backend!r}: expected one of {', '.join(EMULATED)}")
    case = make_case(parse_problems([problem])[0])
    try:
        with scheduled(schedule, seed, checks=checks, trace=trace) as launches:
            got = case.run(backend=backend)
        assert_logits(case, got, _model(case, backend))
    except (EmulationError, BackendUnavailableError, CompileError, AssertionError) as error:
        raise Stop(str(error), exit_code=1) from error
    except OSError as error:
        raise Stop(f"--trace {trace}: {error}", exit_code=1) from error
    lines = [f"{case.problem}: as the oracle says, schedule={schedule} seed={seed}"]
    for launch in launches:
        lines += _told(launch)
    print_whole(standard_output(), "\n".join(lines))


def _model(case: Case, backend: str) -> Accumulator:
    """How the backend, which has run the case, sums its dots."""
    if case.problem.regime == "exact":
        return accumulators.EXACT
    return accumulators.named(EMULATED[backend].accumulator(case.problem.format))


def _told(launch: Summary) -> list[str]:
    """A launch's instructions, by role where its warps have roles, and by kind."""
    total = sum(launch.instructions.values())
    lines = [f"{launch.kernel}: {total} instructions of {len(launch.instructions)} warps a CTA"]
    for title, counts in (("by role", launch.roles), ("by kind", launch.classes)):
        lines += [f"  {title}"] if counts else []
        lines += [f"    {name:<20} {count:>9}" for name, count in counts.items()]
    return lines
