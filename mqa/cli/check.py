"""`mqa check`: does a backend compute what the definition says?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from mqa.cli import machine
from mqa.cli.console import (
    Stop,
    assert_writable,
    one_line,
    parse_problems,
    print_whole,
    progress_bar,
    standard_output,
    usable_device,
    write_json,
)
from mqa.cli.verdict import FAILED, REFUSED, Outcome, judge
from mqa.problem import REGIMES, PagedProblem, Problem
from mqa.testing import CORPORA, corpus, make_case

_SHOWN_FAILURES = 20


def check(
    problems: Annotated[
        list[str] | None, typer.Argument(help="Problem lines; without any, a suite is run.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend by name. Default: the one a call would get.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:<index>.")] = "cpu",
    suite_name: Annotated[
        str, typer.Option("--suite", help=f"{', '.join(CORPORA)}: more and more problems.")
    ] = "smoke",
    report: Annotated[
        Path | None, typer.Option(help="JSON file for versions, machine and every case.")
    ] = None,
) -> None:
    """Compare a backend with an independent oracle in float64.

    Problems of the exact regime must agree bit for bit with the definition rounded once; those of
    the bounded regime must be within a derived tolerance, in which the largest error is given as a
    share of what is allowed. Exits with 1 if any case fails, and prints its line for a replay.

    \b
    Examples:
      mqa check
      mqa check --suite ci --backend reference --report check.json
      mqa check "dense fp8 S=5 N=70 H=64 D=128 regime=exact seed=3"
    """
    if suite_name not in CORPORA:
        raise Stop(f"--suite {suite_name!r}: expected one of {', '.join(CORPORA)}")
    where = usable_device(device)
    if report is not None:
        assert_writable(report)
    chosen = parse_problems(problems) if problems else _suite(suite_name)
    begin = time.perf_counter()
    outcomes = _run(chosen, where, backend)
    seconds = time.perf_counter() - begin
    out = standard_output()
    out.print(_table(outcomes, f"{backend or 'default backend'} on {where}, {seconds:.1f} s"))
    failures = [outcome for outcome in outcomes if outcome.status == FAILED]
    _print_failures(out, failures, _options(backend, device))
    if report is not None:
        write_json(report, _report(outcomes, where, backend, None if problems else suite_name))
        print_whole(out, f"report: {report}")
    if failures:
        raise typer.Exit(1)
    refusals = [outcome for outcome in outcomes if outcome.status == REFUSED]
    if outcomes and len(refusals) == len(outcomes):
        raise Stop(f"nothing was checked: {refusals[0].detail}")
    print_whole(out, f"{len(outcomes) - len(refusals)} cases passed", style="green")


def _suite(name: str) -> list[Problem]:
    """The problems of a corpus, each in both regimes."""
    return [
        dataclasses.replace(problem, regime=regime)
        for problem in corpus(name)
        for regime in REGIMES
    ]


def _run(problems: Sequence[Problem], device: torch.device, backend: str | None) -> list[Outcome]:
    outcomes = []
    with progress_bar() as progress:
        task = progress.add_task("checking", total=len(problems))
        for problem in problems:
            try:
                case = make_case(problem, device)
            except (ValueError, AssertionError) as error:
                raise Stop(f"{problem}: {one_line(str(error))}") from error
            outcomes.append(judge(case, backend))
            progress.advance(task)
    return outcomes


def _kind(problem: Problem) -> str:
    return "paged" if isinstance(problem, PagedProblem) else "dense"


def _table(outcomes: Sequence[Outcome], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("format", "calls", "regime"):
        table.add_column(name)
    for name in ("cases", "passed", "refused", "largest float32 error"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        problem = outcome.problem
        group = (problem.format, _kind(problem), problem.regime)
        groups.setdefault(group, []).append(outcome)
    for key, members in groups.items():
        passed = sum(outcome.passed for outcome in members)
        refused = sum(outcome.status == REFUSED for outcome in members)
        style = None if passed + refused == len(members) else "bold red"
        counts = (str(len(members)), str(passed), str(refused))
        table.add_row(*key, *counts, _largest(members, exact=key[2] == "exact"), style=style)
    return table


def _largest(members: Sequence[Outcome], *, exact: bool) -> str:
    """The largest share of a bound. Of narrower logits it would be their own rounding."""
    wide = (outcome for outcome in members if outcome.problem.out == "float32")
    shares = [outcome.worst for outcome in wide if outcome.worst is not None]
    if exact or not shares:
        failed = any(outcome.status == FAILED for outcome in members)
        return "-" if failed or not exact else "0 bits"
    return f"{max(shares):.2g} of bound"


def _options(backend: str | None, device: str) -> str:
    named = f" --backend {backend}" if backend else ""
    return f"{named} --device {device}" if device != "cpu" else named


def _print_failures(out: Console, failures: Sequence[Outcome], options: str) -> None:
    for outcome in failures[:_SHOWN_FAILURES]:
        print_whole(out, f"failed: {outcome.detail}", style="red")
        print_whole(out, f'  mqa check "{outcome.problem}"{options}')
    if len(failures) > _SHOWN_FAILURES:
        print_whole(out, f"and {len(failures) - _SHOWN_FAILURES} more; --report lists them all")


def _report(
    outcomes: Sequence[Outcome], device: torch.device, backend: str | None, name: str | None
) -> dict[str, object]:
    return {
        "versions": machine.versions(),
        "machine": machine.machine(),
        "device": str(device),
        "backend": backend,
        "suite": name,
        "passed": sum(outcome.passed for outcome in outcomes),
        "failed": sum(outcome.status == FAILED for outcome in outcomes),
        "refused": sum(outcome.status == REFUSED for outcome in outcomes),
        "cases": [outcome.as_json() for outcome in outcomes],
    }
