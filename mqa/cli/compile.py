"""`mqa compile`: fill the cache of compiled kernels ahead, and show what they take."""

from __future__ import annotations

import concurrent.futures
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mqa import config
from mqa.cli import machine
from mqa.cli.console import (
    Stop,
    one_line,
    print_whole,
    progress_bar,
    standard_error,
    standard_output,
)
from mqa.cuda import cache, compiler, variants
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.errors import CacheWarning, CompileError

_COMPILED, _COPIED, _BEFORE, _FAILED = "compiled", "copied", "before", "failed"


@dataclass(frozen=True)
class _Outcome:
    kernel: Kernel
    binary: Binary | None
    """None if it did not compile."""
    origin: str
    """`compiled`, `copied` from a directory that is only read, in place `before`, or `failed`."""
    seconds: float
    complaint: str
    """Why it is not fit for use; empty if it is."""


def compile(
    arch: Annotated[str, typer.Option(help="Architecture, like sm_90a, sm_100f or sm_86.")],
    name: Annotated[
        str, typer.Argument(help="Of all kernels, those whose full name has this in it.")
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Kernels at a time; default: one a core.")
    ] = None,
    covering: Annotated[
        bool, typer.Option("--covering", help="Only a set in which every two choices meet.")
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="Show the names; compile nothing.")
    ] = False,
) -> None:
    """Compile every kernel of an architecture into the cache. Needs no GPU.

    sm_90a has Hopper's kernels and sm_100f Blackwell's; sm_80, sm_86, sm_89, sm_90 and so on have
    the portable ones, and compute_80 their PTX, which MQA_PORTABLE_ARCH=compute_80 runs.

    First calls then find them and don't wait. Kernels go to MQA_CACHE_DIR: those that a directory
    of MQA_CACHE_PATH has are copied there, so that it is whole by itself.

    Exits with 1 if a kernel does not compile, spills registers, has its tensor-core instructions
    serialised, or cannot be kept on disk.

    \b
    Examples:
      mqa compile --arch sm_90a
      mqa compile --arch sm_100f
      mqa compile --arch sm_86
      mqa compile --arch sm_90a "dense_fp8<64, 128" --jobs 4
      mqa compile --arch sm_90a --covering --list
    """
    kernels = _chosen(arch, name, covering=covering)
    if only_list:
        for kernel in kernels:
            print_whole(standard_output(), str(kernel))
        return
    folder = config.cache_dir()
    if folder is None:
        raise Stop("no home directory to keep kernels in: set MQA_CACHE_DIR", exit_code=1)
    outcomes = compile_all(kernels, arch, folder, jobs or machine.usable_cores())
    standard_output().print(_table(outcomes))
    complaints = [outcome.complaint for outcome in outcomes if outcome.complaint]
    complaints += filter(None, [cache.trouble()])
    for complaint in complaints:
        print_whole(standard_error(), complaint)
    if complaints:
        raise typer.Exit(1)
    print_whole(standard_output(), f"{_total(outcomes)} of {arch} in {folder}: {_sum(outcomes)}")


def _total(outcomes: list[_Outcome]) -> str:
    return f"{len(outcomes)} kernel{'' if len(outcomes) == 1 else 's'}"


def _sum(outcomes: list[_Outcome]) -> str:
    """Where they come from, such as "3 compiled, 43 there before"."""
    words = {_COMPILED: "compiled", _COPIED: "copied from MQA_CACHE_PATH", _BEFORE: "there before"}
    counts = Counter(outcome.origin for outcome in outcomes)
    return ", ".join(f"{counts[origin]} {text}" for origin, text in words.items() if counts[origin])


def _chosen(arch: str, name: str, *, covering: bool) -> list[Kernel]:
    if name and covering:
        raise Stop(
            f"--covering takes no name, got {name!r}: names are looked for among all kernels"
        )
    try:
        known = variants.kernels(arch, every=not covering)
    except ValueError as error:
        raise Stop(str(error)) from error
    chosen = [kernel for kernel in known if name in str(kernel)]
    if not chosen:
        raise Stop(f"{name!r} is in the name of no kernel of {arch}: see --list")
    return chosen


def compile_all(kernels: list[Kernel], arch: str, folder: Path, jobs: int) -> list[_Outcome]:
    """Compile on several threads (NVRTC runs without Python's lock), with a progress bar."""
    missing = compiler.unavailable()
    if missing is not None:
        raise Stop(one_line(missing), exit_code=1)
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    with progress_bar() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # Told at the end.
        task = bar.add_task("compiling", total=len(kernels))
        try:
            running = [pool.submit(_compile_one, kernel, arch, folder) for kernel in kernels]
            for _ in concurrent.futures.as_completed(running):
                bar.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)  # After Ctrl-C too, what runs ends, no more starts.
    return [future.result() for future in running]


def _compile_one(kernel: Kernel, arch: str, folder: Path) -> _Outcome:
    """Get the kernel, and see to it that `folder` has it, whatever else does."""
    name = cache.key(kernel, arch)
    if cache.read(folder, name) is not None:
        origin = _BEFORE
    else:
        origin = _COMPILED if cache.find(kernel, arch) is None else _COPIED
    start = time.perf_counter()
    try:
        binary = cache.get(kernel, arch)
    except CompileError as error:
        return _Outcome(kernel, None, _FAILED, time.perf_counter() - start, str(error))
    if origin == _COPIED:
        cache.write(folder, name, binary)
    findings = "; ".join(compiler.findings(binary.log))
    complaint = f"{kernel}: {findings}" if findings else ""
    return _Outcome(kernel, binary, origin, time.perf_counter() - start, complaint)


def _table(outcomes: list[_Outcome]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    for title in ("registers", "spill bytes", "static shared", "cubin KiB", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for outcome in outcomes:
        style = "red" if outcome.complaint else ""
        table.add_row(Text(str(outcome.kernel)), *_facts(outcome), style=style)
    return table


def _facts(outcome: _Outcome) -> Iterator[str]:
    usage = compiler.usage(outcome.binary) if outcome.binary else None
    if usage:
        yield from (str(usage.registers), str(usage.spill_bytes), str(usage.shared_bytes))
    else:
        yield from "---"
    image = outcome.binary.image if outcome.binary else b""
    yield f"{len(image) / 1024:.0f}" if image else "-"
    yield f"{outcome.seconds:.2f} s" if outcome.origin == _COMPILED else outcome.origin
