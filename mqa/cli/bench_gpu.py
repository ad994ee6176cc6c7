"""The suites of `mqa bench` that need a GPU: hopper, blackwell, portable and host."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mqa
from mqa import config
from mqa.cli import machine
from mqa.cli.apart import answers
from mqa.cli.console import (
    Stop,
    assert_writable,
    one_line,
    print_whole,
    progress_bar,
    require_matplotlib,
    standard_error,
    standard_output,
    write_json,
    write_whole,
)
from mqa.cli.gpu.calls import backend_of
from mqa.cli.gpu.ceilings import measure_ceilings
from mqa.cli.gpu.device import CLOCK_METHOD, Device, Gpu
from mqa.cli.gpu.host import HOST_ROWS, measure_host
from mqa.cli.gpu.inputs import L2_TIMES
from mqa.cli.gpu.measure import measure
from mqa.cli.gpu.peers import NoPeer, Peer, find_peer
from mqa.cli.gpu.rows import MQA, PEER, Party, Row
from mqa.cli.gpu.suite import blackwell_rows, hopper_rows, portable_rows
from mqa.cli.gpu.tables import interval, tables
from mqa.cli.plots import draw_groups
from mqa.cli.tables import markdown_page, rich_table
from mqa.cuda import targets

GPU_SUITES = ("hopper", "blackwell", "portable", "host")
_BACKENDS = {"blackwell": "sm100", "portable": "portable"}
"""What a suite is about: without it there is nothing to measure."""
ROUNDS = 40
_QUICK_ROUNDS = 10
_COMPILERS = 8
_PACKAGES = ("apache-tvm-ffi", "cuda-bindings", "nvidia-cuda-nvrtc")

Entry = dict[str, Any]
Job = tuple[Entry, Callable[[], Entry]]
"""What names a row, and what measures it."""


@dataclass(frozen=True)
class Options:
    """Options of the command line that the GPU suites take."""

    suite: str
    only: str | None = None
    rounds: int | None = None
    quick: bool = False
    json: Path | None = None
    plot: Path | None = None
    table: Path | None = None

    @property
    def pairs(self) -> int:
        return self.rounds or (_QUICK_ROUNDS if self.quick else ROUNDS)

    @property
    def command(self) -> list[str]:
        """The command that measures the same again, without the files it writes."""
        words = ["mqa", "bench", "--suite", self.suite]
        words += ["--only", self.only] if self.only else []
        words += ["--rounds", str(self.rounds)] if self.rounds else []
        return words + (["--quick"] if self.quick else [])


def run_suite(options: Options) -> None:
    """Measure a suite on the current GPU, print its tables, write its files.

    Stops before any work where `only` selects nothing, there is no GPU for the suite or a file
    can't be written. Rows against a peer are left out of the Blackwell suite where there is none.
    """
    names = selected(options)
    if reason := _unusable(options.suite):
        raise Stop(f"--suite {options.suite}: {reason}", exit_code=1)
    if not torch.cuda.is_available():
        here = f"torch {torch.__version__} finds none here"
        raise Stop(f"--suite {options.suite}: needs a GPU, {here}", exit_code=1)
    if options.plot is not None:
        require_matplotlib()
    for path in (options.json, options.plot, options.table):
        if path is not None:
            assert_writable(path)
    device = Gpu(torch.device("cuda", torch.cuda.current_device()))
    peer = find_peer()
    if options.suite == "blackwell" and isinstance(peer, NoPeer):
        print_whole(standard_error(), f"without rows against a peer: {peer.reason}")
        names = [row for row in names if not _against_peer(row)]
    show(measure_suite(options, names, device, peer), options)


def _unusable(suite: str) -> str:
    """Why the backend that the suite is about can't run here, in its own words; else nothing."""
    if suite not in _BACKENDS:
        return ""
    return {one.name: one.reason for one in mqa.backends()}.get(_BACKENDS[suite], "")


def _against_peer(row: Row | str) -> bool:
    return not isinstance(row, str) and any(party.who == PEER for party in row.parties)


def selected(options: Options) -> Sequence[Row | str]:
    """The rows that `only` and `quick` leave. Stops if there are none, or no picture of them."""
    if options.plot is not None and options.suite in ("host", "portable"):
        raise Stop(f"--plot: --suite {options.suite} has no picture")
    try:
        if options.suite == "hopper":
            rows: Sequence[Row | str] = hopper_rows(options.only, quick=options.quick)
        elif options.suite == "blackwell":
            rows = blackwell_rows(options.only, quick=options.quick)
        elif options.suite == "portable":
            rows = portable_rows(options.only, quick=options.quick)
        else:
            rows = [name for name in HOST_ROWS if re.search(options.only or "", name)]
    except re.error as error:
        raise Stop(f"--only {options.only!r}: {error}") from error
    if not rows:
        raise Stop(f"--only {options.only!r}: no row of suite {options.suite} matches")
    return rows


def measure_suite(
    options: Options, rows: Sequence[Row | str], device: Device, peer: Peer
) -> dict[str, Any]:
    """The report of these rows: one that fails holds the reason, and the next ones go on unless the
    GPU is gone, which is `given_up` then.

    The JSON file of `options`, if any, is written anew after each row.
    """
    begin = time.perf_counter()
    report = _facts(options, device, peer)
    if options.suite != "host":
        compiled = [row for row in rows if not isinstance(row, str)]
        report["warm_up"] = _warm_up(compiled, device.where)
        report["ceilings"] = _ceilings(device)
    report["setup_seconds"] = round(time.perf_counter() - begin, 1)
    jobs = [_job(row, options.pairs, device, peer, report.get("ceilings", {})) for row in rows]
    with progress_bar() as progress:
        task = progress.add_task("", total=len(jobs))
        for name, work in jobs:
            progress.update(task, description=name["name"])
            report["rows"].append(name | _surviving(work))
            report["seconds"] = round(time.perf_counter() - begin, 1)
            gone = "failure" in report["rows"][-1] and not answers(device.where)
            left = len(jobs) - len(report["rows"])
            if gone and left:
                report["given_up"] = f"the GPU is gone; rows not run: {left}"
            if options.json is not None:
                write_json(options.json, report)  # a run that is cut short keeps what it has
            progress.advance(task)
            _tell(report["rows"][-1])
            if gone:
                break
    return report


def _ceilings(device: Device) -> dict[str, float]:
    rates, missing = measure_ceilings(device)
    for name, why in missing.items():
        print_whole(standard_error(), f"no ceiling {name}: {one_line(why)}")
    return rates


def show(report: dict[str, Any], options: Options) -> None:
    """Print a report's tables, draw the picture that `options` names."""
    out = standard_output()
    for table in tables(report):
        out.print(rich_table(table))
    print_whole(out, f"{len(report['rows'])} rows in {report['seconds']} s")
    if "given_up" in report:
        print_whole(out, report["given_up"], style="red")
    if options.json is not None:
        print_whole(out, f"report: {options.json}")
    if options.table is not None:
        text = _page(report)
        write_whole(options.table, lambda file: file.write_text(text, encoding="utf-8"))
        print_whole(out, f"table: {options.table}")
    if options.plot is not None:
        _draw(options.plot, report)
        print_whole(out, f"picture: {options.plot}")


def _page(report: Entry) -> str:
    """The tables of a report as somebody can send them."""
    versions, peer, gpus = report["versions"], report["peer"], report["machine"]["gpus"]
    facts = {
        "GPU": gpus[0]["name"],
        "SMs": report["settings"]["num_sms"],
        "compiled for": report["settings"]["arch"],
        "command": shlex.join(report["command"]),
        "NVRTC options": shlex.join(report["settings"]["nvrtc_options"]),
        "pairs a row": report["rounds"],
        peer["name"]: peer["version"],
    }
    named = ("mqa", "commit", "kernels", "torch", "cuda", "driver", "nvidia-cuda-nvrtc")
    facts |= {name: versions.get(name) for name in named}
    notes = [report["given_up"]] if "given_up" in report else []
    return markdown_page(f"mqa bench, suite {report['suite']}", facts, tables(report), notes)


def _draw(path: Path, report: Entry) -> None:
    try:
        write_whole(path, lambda file: draw_groups(file, report))
    except ValueError as error:
        raise Stop(f"--plot: {error}", exit_code=1) from error


def _job(
    row: Row | str, rounds: int, device: Device, peer: Peer, ceilings: dict[str, float]
) -> Job:
    if isinstance(row, str):
        return {"name": row}, lambda: measure_host(row, device, peer, rounds)
    name = {"group": row.group, "name": row.name}
    return name, lambda: measure(row, device, peer, rounds, ceilings)


def _tell(entry: Entry) -> None:
    """A line a row on stderr where no progress bar can be."""
    err = standard_error()
    if not err.is_terminal:
        left_out = f"left out: {entry['left_out']}" if "left_out" in entry else "done"
        done = interval(entry["ratio"]) if "ratio" in entry else entry.get("failure", left_out)
        print_whole(err, f"{entry['row_seconds']:6.1f} s  {entry['name']}: {done}")


def _surviving(work: Callable[[], Entry]) -> Entry:
    """What `work` returns, with its seconds, or the reason why it failed.

    Any Exception: peers and drivers raise types of their own, and a row must not end the suite.
    """
    begin = time.perf_counter()
    try:
        entry = work()
    except Exception as error:
        said = machine.without_paths(one_line(str(error)))
        entry = {"failure": f"{type(error).__name__}: {said}"[:2000]}
    return entry | {"row_seconds": round(time.perf_counter() - begin, 2)}


def _warm_up(rows: Sequence[Row], where: torch.device) -> Entry:
    """Compile what our sides of these rows need, several at once; what fails is told by its row."""
    sides = [side for row in rows for side in row.parties if side.who == MQA]
    wanted = {(*side.variant().items(), side.call.by): side for side in sides}.values()

    def compile_one(side: Party) -> int:
        backend_of(side, where)
        named = backend_of(side, where) if side.call.by else None
        return len(mqa.warmup(**side.variant(), device=where, backend=named))

    begin = time.perf_counter()
    with ThreadPoolExecutor(_COMPILERS) as pool:
        found = pool.map(lambda one: _surviving(lambda: {"n": compile_one(one)}), wanted)
        variants = sum(one.get("n", 0) for one in found)
    return {"variants": variants, "seconds": round(time.perf_counter() - begin, 1)}


def _facts(options: Options, device: Device, peer: Peer) -> dict[str, Any]:
    where, portable = device.where, options.suite == "portable"
    versions = machine.versions() | {name: machine.installed(name) for name in _PACKAGES}
    versions["kernels"] = machine.kernels()
    if commit := machine.commit():
        versions["commit"] = commit
    return {
        "suite": options.suite,
        "command": options.command,
        "rounds": options.pairs,
        "machine": machine.machine(),
        "versions": versions | {"cuda": torch.version.cuda, "driver": machine.driver()},
        "peer": {"name": peer.name, "version": peer.version} | peer.settings(),
        "settings": {
            "num_sms": mqa.get_num_sms(where),
            "pdl": mqa.get_pdl(where),
            "l2_bytes": device.l2_bytes,
            "l2_times": L2_TIMES,
            "arch": targets.portable(where) if portable else device.arch,
            "nvrtc_options": list(config.nvrtc_options()),
        },
        "clock": CLOCK_METHOD,
        "rows": [],
    }
