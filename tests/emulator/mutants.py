"""Kernels of this library with one mistake each, made by editing their source."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel, Plan
from mqa.emulator import EmulationError, Kind, Report, engines, executor
from mqa.emulator import backend as emulated
from mqa.problem import DenseProblem, parse
from mqa.reference import schedule
from mqa.testing import Case, assert_logits, make_case

MARKS = [
    pytest.mark.skipif(
        compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
    ),
    pytest.mark.no_cover,
]
PARTS = 2
"""CTAs of a launch."""
SEEDS, DEEP_SEEDS, DEEP_STEP = 20, 200, 50
"""Of hunts."""
EMPTY_ROW = 11
"""Of dense cases; paged ones have such a request."""
FEED, DENSE, PAGES = "score/feed.cuh", "score/dense.cuh", "score/paged.cuh"
# Lines of the sources that both architectures share.
LOAD_K = "ptx::cp_async_bulk_tensor_2d_load(ptx::shared_address(shared.k[stage])"
EMPTY_WAIT = (
    "      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.k_empty[ring.stage]), "
    "ring.parity ^ 1);\n"
)
RANGE_WAIT = "    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);\n"


@dataclass(frozen=True)
class Edit:
    """One edit of a small kernel of the tests, and what is to be found."""

    name: str
    before: str
    after: str
    kind: Kind | None = None
    """Of the report that names the mistake; None: a wrong result alone tells."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Mutant:
    """One edit of one file, and what is to be found."""

    name: str
    file: str
    before: str
    after: str
    kind: Kind | None = None
    """Of the report that names the mistake; None: a wrong result alone tells."""
    names: str = ""
    """The barrier or buffer, as the report says it."""
    at: str = ""
    """A part of a source line that the report names."""
    seen: bool = True
    """Whether logits would be wrong, or never come, where nothing is checked and nothing late."""
    case: str = "dense"

    def __str__(self) -> str:
        return self.name


def edited(source: Path, folder: Path, before: str, after: str) -> Path:
    """A source in a folder with one edit, which has to fit exactly once."""
    text = source.read_text()
    if text.count(before) != 1:
        raise ValueError(f"{before!r}: {text.count(before)} places, expected 1")
    path = folder / source.name
    path.write_text(text.replace(before, after))
    return path


def compile_mutant(mutant: Mutant, kernel: Kernel, folder: Path, arch: str) -> Binary:
    """The kernel with the edit, which has to fit exactly once."""
    sources = folder / "csrc"
    shutil.copytree(compiler.sources(), sources)
    path = sources / mutant.file
    edited(path, path.parent, mutant.before, mutant.after)
    return compile_from(sources, kernel, arch)


def compile_from(sources: Path, kernel: Kernel, arch: str) -> Binary:
    original = compiler.sources
    try:
        compiler.sources = lambda: sources  # type: ignore[assignment]
        return compiler.compile_kernel(kernel, arch, assemble=False)
    finally:
        compiler.sources = original


def source_lines(report: Report, folder: Path) -> list[str]:
    """What stands in the source lines that a report names; a deadlock names those of all who wait.

    `folder` is that of the mutant, for what a report says without a path.
    """
    places = [place for place in (report.source, *report.callers) if place]
    if report.kind is Kind.DEADLOCK:
        # Names alone: files of both architectures may have them.
        named = dict.fromkeys(re.findall(r"(\w+\.cuh):(\d+)", report.message))
        places += [f"{path}:{line}" for name, line in named for path in folder.rglob(name)]
    split = (place.rpartition(":") for place in places)
    return ["".join(_lines_of(path)[int(line) - 1 : int(line)]) for path, _, line in split]


@functools.lru_cache(maxsize=64)
def _lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


class Launch:
    """What a backend would launch for a case in two CTAs, by the schedule of its windows."""

    def __init__(
        self,
        line: str,
        patch: pytest.MonkeyPatch,
        *,
        backend: str = "sm90-emulated",
        empty_row: int = -1,
    ) -> None:
        case = make_case(parse(line))
        self.case: Case = case if empty_row < 0 else _without_tokens(case, empty_row)
        found: list[tuple[Plan, dict[str, Any], str]] = []
        with patch.context() as inside:
            inside.setattr(emulated, "execute", lambda *launched: found.append(launched))
            self.case.run(backend=backend, schedule_meta=self._schedule())
        ((self.plan, self.tensors, self.arch),) = found

    def _schedule(self) -> Tensor:
        problem, t = self.case.problem, self.case.tensors
        if isinstance(problem, DenseProblem):
            return schedule.dense_metadata(t["start"], t["end"], problem.N, problem.H, PARTS)
        return schedule.paged_metadata(t["lens"], PARTS, t.get("indices"))

    def compiled(self, mutant: Mutant | None = None, folder: Path = Path()) -> Binary:
        """Its kernel, or the mutant of it, whose sources come to lie in `folder`."""
        if mutant is None:
            return compile_from(compiler.sources(), self.plan.kernel, self.arch)
        return compile_mutant(mutant, self.plan.kernel, folder, self.arch)

    def report(self, binary: Binary, how: str, seed: int = 0, **options: Any) -> Report | None:
        """What is found in a run under that schedule, with `options` of `run_plan`."""
        self.tensors["out"].fill_(torch.nan)
        try:
            executor.run_plan(
                binary.ptx,
                binary.symbol,
                self.plan,
                self.tensors,
                schedule=how,
                seed=seed,
                **options,
            )
        except EmulationError as error:
            return error.report
        return None

    def right(self) -> bool:
        try:
            assert_logits(self.case, self.tensors["out"])
        except AssertionError:
            return False
        return True


def _without_tokens(case: Case, row: int) -> Case:
    """The same with one row that sees nothing."""
    end = case.tensors["end"].clone()
    end[row] = case.tensors["start"][row]
    known = case.data.end.copy()
    known[row] = case.data.start[row]
    tensors = {**case.tensors, "end": end}
    return dataclasses.replace(
        case, tensors=tensors, data=dataclasses.replace(case.data, end=known)
    )


@contextmanager
def copies_by_cta(patch: pytest.MonkeyPatch) -> Iterator[dict[int, list[str]]]:
    """Names of the copies to shared memory that each CTA issues meanwhile."""
    found: dict[int, list[str]] = defaultdict(list)
    original = engines.copy_in

    def spy(warp: Any, name: str, *rest: Any) -> None:
        found[warp.cta.index].append(name)
        original(warp, name, *rest)

    with patch.context() as inside:
        inside.setattr(engines, "copy_in", spy)
        yield found


def assert_holds_what_mistakes_need(
    launch: Launch,
    patch: pytest.MonkeyPatch,
    *,
    stages: int,
    tile_rows: int,
    boxes: int,
    block_of: Callable[[int], int],
) -> None:
    """Two CTAs, each with three blocks of rows or more and key tiles for two turns of the ring and
    one more; a row without tokens; a last tile that is not whole.

    A tile's keys are `boxes` copies; `block_of` is the block of the row where a box of q begins.
    """
    binary = launch.compiled()
    with copies_by_cta(patch) as copies:
        assert launch.report(binary, "eager") is None
    assert launch.right()
    assert len(copies) == launch.plan.grid == PARTS
    for names in copies.values():
        first = {int(name.rstrip("]").rpartition(" ")[2]) for name in names if " q " in name}
        keys = sum(name.startswith(("tile of kv", "tile of cache")) for name in names)
        assert len(set(map(block_of, first))) >= 3
        assert keys // boxes >= 2 * stages + 1
    lengths = launch.case.data.end - launch.case.data.start
    assert (lengths <= 0).any()
    assert lengths.max() % tile_rows != 0


def assert_found(mutant: Mutant, launch: Launch, folder: Path, seeds: range) -> Report | None:
    """It is named in a hunt with one of the seeds, whose report is returned; or logits tell."""
    binary = launch.compiled(mutant, folder)
    if mutant.kind is None:
        assert launch.report(binary, "hunt") is None
        assert not launch.right()
        return None
    reports = (launch.report(binary, "hunt", seed) for seed in seeds)
    named = (
        report
        for report in reports
        if report is not None
        and report.kind is mutant.kind
        and mutant.names in report.message
        and any(mutant.at in line for line in source_lines(report, folder))
    )
    found = next(named, None)
    assert found is not None
    return found


def assert_found_again(launch: Launch, report: Report | None, folder: Path) -> None:
    """The same seed gives the same report."""
    binary = compile_from(folder / "csrc", launch.plan.kernel, launch.arch)
    assert report is not None
    assert launch.report(binary, "hunt", report.seed) == report


def assert_seen_or_not(mutant: Mutant, launch: Launch, folder: Path) -> None:
    """What a test of results alone sees, where copies and products are early as they mostly are."""
    binary = launch.compiled(mutant, folder)
    ended = launch.report(binary, "eager", checks=False) is None
    assert mutant.seen != (ended and launch.right())


def assert_most_are_named(mutants: Sequence[Mutant]) -> None:
    """13 of 15 are, and some would not be seen in results."""
    named = [mutant for mutant in mutants if mutant.kind is not None]
    assert len(mutants) >= 15
    assert 15 * len(named) >= 13 * len(mutants)
    assert all(mutant.names and mutant.at for mutant in named)
    assert sum(not mutant.seen for mutant in mutants) >= 5


def with_slow_ones(mutants: Iterable[Mutant | str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test: all of them, those that are not `quick` for the deep profile."""
    return [
        pytest.param(one, id=str(one), marks=() if str(one) in quick else pytest.mark.slow)
        for one in mutants
    ]


def relabelled(binary: Binary) -> Binary:
    """The same with other names of labels."""
    assert "$L__" in binary.ptx
    return dataclasses.replace(binary, ptx=binary.ptx.replace("$L__", "$other_"))


def hunt_nothing(launch: Launch, binary: Binary, seeds: range) -> None:
    for seed in seeds:
        assert launch.report(binary, "hunt", seed) is None
        assert launch.right()
