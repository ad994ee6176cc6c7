"""`mqa check`: does a backend compute what the definition says?"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import mqa
from mqa import config
from mqa.backends import choose, on_gpus_alone
from mqa.cli import machine
from mqa.cli.apart import Apart, judge_problem
from mqa.cli.compile import compile_all
from mqa.cli.console import (
    Stop,
    assert_writable,
    parse_problems,
    print_whole,
    progress_bar,
    standard_output,
    usable_device,
    write_json,
    write_whole,
)
from mqa.cli.tables import TextTable, markdown_page, rich_table
from mqa.cli.verdict import FAILED, REFUSED, Outcome
from mqa.cuda import targets
from mqa.cuda.gpu import Gpu
from mqa.cuda.plan import Kernel
from mqa.problem import REGIMES, PagedProblem, Problem
from mqa.testing import CORPORA, corpus

_SHOWN_FAILURES = 20
_SECONDS = 120.0
_MOST_LOST = 10
"""Cases that may take their process with them before the others are given up."""


def check(
    problems: Annotated[
        list[str] | None, typer.Argument(help="Problem lines; without any, a suite is run.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend by name. Default: the one a call would get.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:<index>. Default: a GPU if there is one, but the CPU for a "
            "named backend that runs there."
        ),
    ] = None,
    suite_name: Annotated[
        str, typer.Option("--suite", help=f"{', '.join(CORPORA)}: more and more problems.")
    ] = "smoke",
    report: Annotated[
        Path | None, typer.Option(help="JSON file for versions, machine and every case.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="Markdown file for the table.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a GPU may take for a case.")
    ] = _SECONDS,
) -> None:
    """Compare a backend with an independent oracle in float64.

    Problems of the exact regime must agree bit for bit with the definition rounded once; those of
    the bounded regime must be within a derived tolerance, in which the largest error is given as a
    share of what is allowed. Dots are summed as the backend's tensor unit is said to; of a bounded
    dense problem with more than 2^30 products, rows spread evenly are judged. Exits with 1 if any
    case fails, and prints its line for a replay. A named backend that this machine cannot run is
    told at once, with the backend's reason.

    On a GPU all kernels are compiled first, on every core, and a process of its own judges the
    cases: one whose kernel faults or hangs has failed, the process is replaced, and the next case
    goes on. The report is written anew after each case.

    \b
    Examples:
      mqa check
      mqa check --suite ci --backend reference --report check.json
      mqa check --backend sm100 --suite all --report check.json --table check.md
      mqa check "dense fp8 S=5 N=70 H=64 D=128 regime=exact seed=3"
    """
    if suite_name not in CORPORA:
        raise Stop(f"--suite {suite_name!r}: expected one of {', '.join(CORPORA)}")
    where = _device_of(backend) if device is None else usable_device(device)
    for path in (report, table):
        if path is not None:
            assert_writable(path)
    chosen = parse_problems(problems) if problems else _suite(suite_name)
    options = _options(backend, device)
    about = [*(problems or ("--suite", suite_name)), *shlex.split(options)]
    if timeout != _SECONDS:
        about += ["--timeout", f"{timeout:g}"]
    facts = _facts(where, backend, None if problems else suite_name, about)
    begin = time.perf_counter()
    _compile_ahead(chosen, where, backend)
    outcomes: list[Outcome] = []
    for outcome in _judged(chosen, where, backend, timeout):
        outcomes.append(outcome)
        if report is not None:
            write_json(report, facts | _counts(outcomes, len(chosen)))
    who = f"backend {backend}" if backend else "default backend"
    title = f"{who} on {where}, {time.perf_counter() - begin:.1f} s"
    summed, missing = _table(outcomes, title), len(chosen) - len(outcomes)
    out = standard_output()
    out.print(rich_table(summed, words=3, bad=_failed_groups(outcomes)))
    _print_failures(out, outcomes, missing, options)
    if report is not None:
        print_whole(out, f"report: {report}")
    if table is not None:
        text = markdown_page("mqa check", _head(facts), [summed], _notes(outcomes, missing))
        write_whole(table, lambda file: file.write_text(text, encoding="utf-8"))
        print_whole(out, f"table: {table}")
    if any(outcome.status == FAILED for outcome in outcomes):
        raise typer.Exit(1)
    refusals = [outcome for outcome in outcomes if outcome.status == REFUSED]
    if outcomes and len(refusals) == len(outcomes):
        raise Stop(f"nothing was checked: {refusals[0].detail}")
    print_whole(out, f"{len(outcomes) - len(refusals)} cases passed", style="green")


def _device_of(backend: str | None) -> torch.device:
    """Where a call to this backend, or to that of MQA_BACKEND, runs: the GPU if there is one and
    the backend, where one is named, is a GPU's; else the CPU. Stops with the backend's reason if
    this machine cannot run it."""
    known = {status.name: status for status in mqa.backends()}
    if backend in known and not known[backend].usable:
        raise Stop(f"--backend {backend}: {known[backend].reason}", exit_code=1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.device("cuda", torch.cuda.current_device())
    # `judge` knows what to say of a name that no backend has.
    named = config.backend_name() if backend is None else backend
    on_gpu = named is None or (named in known and on_gpus_alone(named, gpu))
    return gpu if on_gpu else torch.device("cpu")


def _suite(name: str) -> list[Problem]:
    """The problems of a corpus, each in both regimes."""
    return [
        dataclasses.replace(problem, regime=regime)
        for problem in corpus(name)
        for regime in REGIMES
    ]


def _compile_ahead(problems: Sequence[Problem], device: torch.device, backend: str | None) -> None:
    """Have on disk what the process that judges would compile one by one. What does not compile
    fails its cases there."""
    folder = config.cache_dir()
    if device.type != "cuda" or folder is None or not machine.writable(folder):
        return
    kernels: dict[str, dict[Kernel, None]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mqa.FallbackWarning)
        for problem in problems:
            for kernel in _kernels_of(problem, device, backend):
                kernels.setdefault(targets.of(kernel, device), {})[kernel] = None
    with contextlib.suppress(RuntimeError):  # which judging tells, case by case
        for arch, needed in kernels.items():
            compile_all(list(needed), arch, folder, machine.usable_cores())


def _kernels_of(problem: Problem, device: torch.device, backend: str | None) -> Iterable[Kernel]:
    """Those that a call would reach; none where it is refused, which judging tells."""
    try:
        chosen = choose(problem, device, backend)
    except (ValueError, mqa.BackendUnavailableError):
        return ()
    return chosen.kernels_of(problem) if isinstance(chosen, Gpu) else ()


def _judged(
    problems: Sequence[Problem], device: torch.device, backend: str | None, timeout: float
) -> Iterator[Outcome]:
    """What becomes of each problem; fewer of them where too many take their process with them."""
    with progress_bar() as progress:
        task = progress.add_task("checking", total=len(problems))
        if device.type != "cuda":
            for problem in problems:
                yield judge_problem(problem, device, backend)
                progress.advance(task)
            return
        with Apart(device, backend, timeout) as judge:
            for problem in problems:
                yield judge(problem)
                progress.advance(task)
                if judge.lost >= _MOST_LOST:
                    return


def _kind(problem: Problem) -> str:
    return "paged" if isinstance(problem, PagedProblem) else "dense"


def _groups(outcomes: Sequence[Outcome]) -> dict[tuple[str, ...], list[Outcome]]:
    """Outcomes by format, kind of call and regime."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        problem = outcome.problem
        groups.setdefault((problem.format, _kind(problem), problem.regime), []).append(outcome)
    return groups


def _table(outcomes: Sequence[Outcome], title: str) -> TextTable:
    rows = []
    for key, members in _groups(outcomes).items():
        passed = sum(outcome.passed for outcome in members)
        refused = sum(outcome.status == REFUSED for outcome in members)
        counts = (str(len(members)), str(passed), str(refused))
        rows.append((*key, *counts, _largest(members, exact=key[2] == "exact")))
    columns = ("format", "calls", "regime", "cases", "passed", "refused", "largest float32 error")
    return TextTable(title, columns, tuple(rows))


def _failed_groups(outcomes: Sequence[Outcome]) -> list[int]:
    """Rows of the table that hold a failure."""
    groups = enumerate(_groups(outcomes).values())
    return [i for i, members in groups if any(one.status == FAILED for one in members)]


def _notes(outcomes: Sequence[Outcome], missing: int) -> list[str]:
    """What failed and where, and what was not checked."""
    failures = (outcome for outcome in outcomes if outcome.status == FAILED)
    notes = [f"failed: {outcome.problem}: {outcome.detail}" for outcome in failures]
    return notes + ([_given_up(missing)] if missing else [])


def _given_up(missing: int) -> str:
    return f"not checked: {missing} cases, after {_MOST_LOST} that took their process with them"


def _head(facts: Mapping[str, Any]) -> dict[str, object]:
    """What the table's page says of the machine and the command."""
    return {**facts["summary"], "command": shlex.join(facts["command"])}


def _largest(members: Sequence[Outcome], *, exact: bool) -> str:
    """The largest share of a bound. Of narrower logits it would be their own rounding."""
    wide = (outcome for outcome in members if outcome.problem.out == "float32")
    shares = [outcome.worst for outcome in wide if outcome.worst is not None]
    if exact or not shares:
        failed = any(outcome.status == FAILED for outcome in members)
        ran = any(outcome.passed for outcome in members)
        return "0 bits" if exact and ran and not failed else "-"
    return f"{max(shares):.2g} of bound"


def _options(backend: str | None, device: str | None) -> str:
    named = f" --backend {backend}" if backend else ""
    return f"{named} --device {device}" if device else named


def _print_failures(out: Console, outcomes: Sequence[Outcome], missing: int, options: str) -> None:
    failures = [outcome for outcome in outcomes if outcome.status == FAILED]
    for outcome in failures[:_SHOWN_FAILURES]:
        print_whole(out, f"failed: {outcome.detail}", style="red")
        print_whole(out, f'  mqa check "{outcome.problem}"{options}')
    if len(failures) > _SHOWN_FAILURES:
        print_whole(out, f"and {len(failures) - _SHOWN_FAILURES} more; --report lists them all")
    if missing:
        print_whole(out, _given_up(missing), style="red")


def _facts(
    device: torch.device, backend: str | None, name: str | None, about: Sequence[str]
) -> dict[str, Any]:
    """The head of a report. The command is without the files it writes."""
    return {
        "command": ["mqa", "check", *about],
        "versions": machine.versions(),
        "machine": machine.machine(),
        "summary": machine.summary(device),
        "device": str(device),
        "backend": backend,
        "suite": name,
    }


def _counts(outcomes: Sequence[Outcome], total: int) -> dict[str, Any]:
    return {
        "passed": sum(outcome.passed for outcome in outcomes),
        "failed": sum(outcome.status == FAILED for outcome in outcomes),
        "refused": sum(outcome.status == REFUSED for outcome in outcomes),
        "not_checked": total - len(outcomes),
        "cases": [outcome.as_json() for outcome in outcomes],
    }
