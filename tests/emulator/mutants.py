"""Kernels of this library with one mistake each, made by editing their source."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
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
from mqa.emulator import EmulationError, Kind, Report, backend, engines, executor
from mqa.emulator.backend import ARCH
from mqa.problem import DenseProblem, parse
from mqa.reference import schedule
from mqa.testing import Case, assert_logits, make_case

PARTS = 2
"""CTAs of a launch."""


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


def compile_mutant(mutant: Mutant, kernel: Kernel, folder: Path) -> Binary:
    """The kernel with the edit, which has to fit exactly once."""
    sources = folder / "csrc"
    shutil.copytree(compiler.sources(), sources)
    path = sources / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.before)} places, expected 1")
    path.write_text(text.replace(mutant.before, mutant.after))
    return compile_from(sources, kernel)


def compile_from(sources: Path, kernel: Kernel) -> Binary:
    original = compiler.sources
    try:
        compiler.sources = lambda: sources  # type: ignore[assignment]
        return compiler.compile_kernel(kernel, ARCH)
    finally:
        compiler.sources = original


def source_lines(report: Report, folder: Path) -> list[str]:
    """What stands in the source lines that a report names; a deadlock names those of all who wait.

    `folder` is that of the mutant, for what a report says without a path.
    """
    places = [place for place in (report.source, *report.callers) if place]
    if report.kind is Kind.DEADLOCK:
        paths = {path.name: path for path in (folder / "csrc").rglob("*.cuh")}
        named = re.findall(r"(\w+\.cuh):(\d+)", report.message)
        places += [f"{paths[name]}:{line}" for name, line in dict.fromkeys(named)]
    split = (place.rpartition(":") for place in places)
    return [Path(path).read_text().splitlines()[int(line) - 1] for path, _, line in split]


class Launch:
    """What the backend would launch for a case in two CTAs, by the schedule of its windows."""

    def __init__(self, line: str, patch: pytest.MonkeyPatch, *, empty_row: int = -1) -> None:
        case = make_case(parse(line))
        self.case: Case = case if empty_row < 0 else _without_tokens(case, empty_row)
        found: list[tuple[Plan, dict[str, Any]]] = []
        with patch.context() as inside:
            inside.setattr(
                backend, "execute", lambda plan, tensors, arch: found.append((plan, tensors))
            )
            self.case.run(backend="sm90-emulated", schedule_meta=self._schedule())
        ((self.plan, self.tensors),) = found

    def _schedule(self) -> Tensor:
        problem, t = self.case.problem, self.case.tensors
        if isinstance(problem, DenseProblem):
            return schedule.dense_metadata(t["start"], t["end"], problem.N, problem.H, PARTS)
        return schedule.paged_metadata(t["lens"], PARTS, t.get("indices"))

    def report(
        self, binary: Binary, how: str, seed: int = 0, checks: bool | None = None
    ) -> Report | None:
        """What is found in a run under that schedule."""
        self.tensors["out"].fill_(torch.nan)
        try:
            executor.run_plan(
                binary.ptx,
                binary.symbol,
                self.plan,
                self.tensors,
                schedule=how,
                seed=seed,
                checks=checks,
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
