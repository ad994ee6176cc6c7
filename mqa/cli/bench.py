"""`mqa bench`: how fast, and with how much memory, against what people use today."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from mqa.cli import machine
from mqa.cli.bench_gpu import GPU_SUITES, Options, run_suite
from mqa.cli.console import (
    Stop,
    one_line,
    parse_problems,
    print_whole,
    progress_bar,
    require_matplotlib,
    standard_output,
    write_json,
    write_whole,
)
from mqa.cli.contenders import SQUARE, Work, einsum, flops, ours, sgemm, square
from mqa.cli.memory import measure
from mqa.cli.plots import draw_ratios
from mqa.problem import PagedProblem, Problem
from mqa.testing import Case, Ratio, interleaved, make_case

SUITES = {
    "cpu": (
        "dense fp8 S=128 N=8192 H=64 D=128",
        "dense mxfp4 S=128 N=8192 H=64 D=128",
        "dense fp8 S=1 N=65536 H=64 D=128",
        "paged fp8 B=8 next_n=1 H=64 D=128 P=64 blocks=1024 columns=128 L=8192 clean=1",
    )
}
_NAMES = (*SUITES, *GPU_SUITES)
_ROUNDS = 10
_MIB = 1 << 20
_BUSY = 0.25
"""Load per core at the start from which the numbers deserve a warning."""
_STEPS = 5
"""Steps of the progress bar for each problem: three timings, two memories."""


@dataclass(frozen=True)
class Measured:
    """One problem. Each ratio is the other's time over ours: above 1, ours is faster."""

    problem: Problem
    flops: int
    einsum: Ratio
    sgemm: Ratio
    square: Ratio
    result_bytes: int
    memory: dict[str, int]
    """Peak growth of a fresh process in one call, result included, by contender; may be empty."""

    @property
    def gflops(self) -> float:
        return self.flops / self.einsum.b_seconds / 1e9

    @property
    def square_gflops(self) -> float:
        return 2 * SQUARE**3 / self.square.a_seconds / 1e9

    @property
    def of_square(self) -> float:
        """Our rate over that of the square product, taken pair by pair."""
        return self.square.median * self.flops / (2 * SQUARE**3)

    def as_json(self) -> dict[str, object]:
        """The problem's entry in a report."""
        ratios = {"einsum": self.einsum, "sgemm": self.sgemm}
        return {
            "problem": str(self.problem),
            "flops": self.flops,
            "gflops": self.gflops,
            "square": {
                "side": SQUARE,
                "gflops": self.square_gflops,
                "our_rate_over_it": self.of_square,
                "ratio": asdict(self.square),
            },
            "result_bytes": self.result_bytes,
            "peak_memory_bytes": self.memory,
            "contenders": [
                {"name": name, "ratio": asdict(ratio)} for name, ratio in ratios.items()
            ],
        }


def bench(
    problems: Annotated[
        list[str] | None, typer.Argument(help="Problem lines; without any, a suite is run.")
    ] = None,
    suite: Annotated[str, typer.Option(help=f"{', '.join(_NAMES)}.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="JSON file for all numbers.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the ratios.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved pairs per comparison (10; on a GPU 40).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in fresh processes.")] = True,
    only: Annotated[str | None, typer.Option(help="Regular expression: these GPU rows.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="GPU: 10 pairs, no long rows.")] = False,
    table: Annotated[Path | None, typer.Option(help="GPU: Markdown file for the tables.")] = None,
) -> None:
    """Time calls on the CPU against the usual einsum fallback and against float32 sgemm.

    \b
    einsum   widen to float32, einsum over [S, H, N], relu, weigh, sum over heads, scale, mask
    sgemm    the very same product [S*H, D] x [D, N] as one torch.mm, nothing else
    square   a torch.mm of 2048 x 2048 matrices: what this machine can do at best

    Runs alternate with ours in one process; a ratio is the other's time over ours, the median of
    the pairs with a 5-95 % interval. Memory is what a fresh process grows by in one call.

    Four suites run on a GPU, see docs/performance.md: hopper and blackwell time CUDA graphs
    against DeepGEMM and against other calls of ours, portable the portable kernels against Hopper's
    and the fallback, host the cost of a call on the host.

    \b
    Examples:
      mqa bench --json bench.json --plot bench.png
      mqa bench "dense mxfp8 S=16 N=32768 H=32 D=128" --rounds 20
      mqa bench --suite hopper --only "main: 2048" --json hopper.json
      mqa bench --suite blackwell --json blackwell.json --table blackwell.md
    """
    if suite not in _NAMES:
        raise Stop(f"--suite {suite!r}: expected one of {', '.join(_NAMES)}")
    if suite in GPU_SUITES:
        if problems:
            raise Stop(f"--suite {suite} takes no problem lines")
        return run_suite(Options(suite, only, rounds, quick, json, plot, table))
    if only is not None or quick or table is not None:
        raise Stop(f"--only, --quick and --table are for --suite {', '.join(GPU_SUITES)}")
    if plot is not None:
        require_matplotlib()
    chosen = parse_problems(problems or SUITES[suite])
    for problem in chosen:
        _refuse_unsuited(problem)
    out, load = standard_output(), machine.load()
    if load is not None and load > _BUSY * machine.usable_cores():
        print_whole(out, f"note: other work runs here (load {load:.1f}); numbers may be far off")
    rounds = rounds or _ROUNDS
    measured = _run(chosen, rounds, memory=memory)
    out.print(_table(measured))
    rows = [one.as_json() for one in measured]
    if json is not None:
        facts = {"versions": machine.versions(), "machine": machine.machine(), "load": load}
        write_json(json, facts | {"rounds": rounds, "results": rows})
        print_whole(out, f"report: {json}")
    if plot is not None:
        write_whole(plot, lambda file: draw_ratios(file, rows))
        print_whole(out, f"picture: {plot}")


def _refuse_unsuited(problem: Problem) -> None:
    """Stops at problems that the einsum fallback doesn't speak."""
    if isinstance(problem, PagedProblem):
        unsuited = problem.varlen or problem.lens != "full" or problem.rows * problem.width == 0
    else:
        unsuited = problem.compressed or problem.rows * problem.width == 0
    if unsuited or problem.layout:
        raise Stop(f"{problem}: bench takes full results, lens=full, no varlen, no strides, no 0")


def _run(problems: list[Problem], rounds: int, *, memory: bool) -> list[Measured]:
    measured = []
    with progress_bar() as progress:
        task = progress.add_task("timing", total=_STEPS * len(problems))

        def step(other: Work, mine: Work) -> Ratio:
            ratio = interleaved(other, mine, rounds=rounds)
            progress.advance(task)
            return ratio

        def grown(problem: Problem, contender: str) -> int:
            size = measure(problem, contender)
            progress.advance(task)
            return size

        best = square()
        for problem in problems:
            case = _case(problem)
            mine = ours(case)
            names = ("mqa", "einsum") if memory else ()
            measured.append(
                Measured(
                    problem,
                    flops(case),
                    einsum=step(einsum(case), mine),
                    sgemm=step(sgemm(case), mine),
                    square=step(best, mine),
                    result_bytes=problem.rows * problem.width * case.out_dtype.itemsize,
                    memory={name: grown(problem, name) for name in names},
                )
            )
    return measured


def _case(problem: Problem) -> Case:
    """The case, in which ours and the einsum agree: else their times mean nothing."""
    try:
        case = make_case(problem)
        mine, other = case.run(), einsum(case)()
    except (ValueError, RuntimeError, AssertionError) as error:
        raise Stop(f"{problem}: {one_line(str(error))}") from error
    assert isinstance(other, torch.Tensor)
    seen = other.isfinite()
    off = (mine.double() - other.double())[seen].norm() / other.double()[seen].norm()
    if not off <= 4 * torch.finfo(case.out_dtype).eps * case.problem.H:
        raise Stop(f"{problem}: ours and the einsum differ by {float(off):.2g}", exit_code=1)
    return case


def _table(measured: list[Measured]) -> Table:
    table = Table(
        title=f"time of the others over ours, {torch.get_num_threads()} threads",
        title_justify="left",
        caption="memory: peak growth of a fresh process in one call, result included",
        caption_justify="left",
    )
    table.add_column("problem", overflow="fold", min_width=30)
    names = ("mqa", "einsum / mqa", "sgemm / mqa", f"mqa rate / {SQUARE}³ mm", "memory mqa, einsum")
    for name in names:
        table.add_column(name, justify="right")
    for one in measured:
        sizes = ", ".join(f"{size / _MIB:.0f}" for size in one.memory.values())
        table.add_row(
            str(one.problem),
            f"{one.einsum.b_seconds * 1e3:.1f} ms\n{one.gflops:.0f} GFLOP/s",
            _interval(one.einsum),
            _interval(one.sgemm),
            f"{one.of_square:.2f}\n{one.square_gflops:.0f} GFLOP/s",
            f"{sizes} MiB" if sizes else "-",
        )
    return table


def _interval(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}×\n{ratio.low:.2f} to {ratio.high:.2f}"
