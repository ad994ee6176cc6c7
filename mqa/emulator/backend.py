"""Kernels of a GPU on CPU tensors, as a backend that a call gets only by its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mqa.cuda import cache, compiler
from mqa.cuda.plan import Kernel, Plan
from mqa.cuda.portable import PORTABLE
from mqa.cuda.sm90 import SM90, SM90_ACCURATE
from mqa.cuda.sm100 import SM100
from mqa.prepared import Launch
from mqa.problem import Format, Problem
from mqa.validate import DenseCall, PagedCall

if TYPE_CHECKING:
    from mqa.emulator.reports import Kind
    from mqa.emulator.summary import Summary
    from mqa.emulator.tensor_order import TensorPipe
    from mqa.emulator.trace import Timeline

ARCH, BLACKWELL_ARCH, PORTABLE_ARCH = "sm_90a", "sm_100f", "sm_80"


class Plans(Protocol):
    """What a backend of a GPU would launch, and what it says of problems on whatever device."""

    @property
    def name(self) -> str: ...

    def problem_reasons(self, problem: Problem) -> Iterator[str]: ...

    def plan_dense(self, call: DenseCall, out: Tensor) -> Plan: ...

    def plan_paged(self, call: PagedCall, out: Tensor) -> Plan: ...

    def plan_dense_cuts(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> Plan: ...

    def plan_paged_cuts(
        self, context_lens: Tensor, indices: Tensor | None, out: Tensor
    ) -> Plan: ...

    def accumulator_of(self, format: Format, arch: str | None) -> str: ...

    def kernels_of(self, problem: Problem) -> Mapping[Kernel, int]: ...


@dataclass
class _Setting:
    schedule: str = "eager"
    seed: int = 0
    tensor_pipe: TensorPipe = "isa"
    checks: bool | None = None
    ignore: Collection[Kind] = ()
    timeline: Timeline | None = None
    launches: list[Summary] = field(default_factory=list)


_setting: ContextVar[_Setting | None] = ContextVar("_setting", default=None)


@contextlib.contextmanager
def scheduled(
    schedule: str = "eager",
    seed: int = 0,
    *,
    tensor_pipe: TensorPipe = "isa",
    checks: bool | None = None,
    ignore: Collection[Kind] = (),
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[list[Summary]]:
    """Calls of emulated backends in this block run under that schedule and seed, and with what
    `run` says of `tensor_pipe`.

    `checks` and `ignore` say what is looked for, as those of `run` do; raises ValueError where
    `ignore` has what cannot be left out. Yields a list that gets a `Summary` for each launch. The
    file `trace` gets the timeline of all of them as Chrome-trace JSON when the block ends, however
    it ends; raises OSError where that cannot be written.
    """
    from mqa.emulator.executor import check_ignored, traced
    from mqa.emulator.tensor_order import check_pipe

    check_pipe(tensor_pipe)

    check_ignored(ignore)
    with traced(trace) as timeline:
        setting = _Setting(schedule, seed, tensor_pipe, checks, ignore, timeline)
        token = _setting.set(setting)
        try:
            yield setting.launches
        finally:
            _setting.reset(token)


class Emulated:
    """What a backend would launch, compiled for `arch` and executed by `mqa.emulator`: slow, and
    checked."""

    by_default = False

    def __init__(self, backend: Plans, arch: str) -> None:
        self._backend, self._arch = backend, arch

    @property
    def name(self) -> str:
        return f"{self._backend.name}-emulated"

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        if device.type != "cpu":
            yield f"emulates on the CPU, this is {device}"
        elif (missing := self.unusable_here()) is not None:
            yield missing
        yield from self._backend.problem_reasons(problem)

    def unusable_here(self) -> str | None:
        missing = compiler.unavailable()
        return None if missing is None else "; ".join(map(str.strip, missing.splitlines()))

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        plan = self._backend.plan_dense(call, out)
        tensors = {
            "q": call.q,
            "q_scale": call.q_scale,
            "kv": call.k if call.problem.N else call.q,
            "kv_scale": call.kv_scale,
            "w": call.weights,
            "start": call.start,
            "end": call.end,
            "schedule": call.schedule,
            "out": out,
        }
        execute(plan, tensors, self._arch)
        return None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        plan = self._backend.plan_paged(call, out)
        tensors = {
            "q": call.q,
            "q_scale": call.q_scale,
            "cache": call.kv_cache if call.problem.blocks else call.q,
            "w": call.weights,
            "lens": call.context_lens,
            "table": call.block_table,
            "indices": call.indices,
            "schedule": call.schedule,
            "out": out,
        }
        execute(plan, tensors, self._arch)

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        plan = self._backend.plan_dense_cuts(start, end, num_kv_tokens, num_heads, out)
        execute(plan, {"start": start, "end": end, "out": out}, self._arch)

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        plan = self._backend.plan_paged_cuts(context_lens, indices, out)
        execute(plan, {"lens": context_lens, "indices": indices, "out": out}, self._arch)

    def schedules_on(self, device: torch.device) -> bool:
        """The public metadata functions take no backend's name, and none gets this one unasked."""
        return False

    def accumulator(self, format: Format) -> str:
        return self._backend.accumulator_of(format, self._arch)

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernels = self._backend.kernels_of(problem)
        for kernel in kernels:
            cache.get(kernel, self._arch)
        return tuple(map(str, kernels))

    def warmup_schedules(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        return ()


def execute(plan: Plan, tensors: Mapping[str, Tensor | None], arch: str) -> None:
    """Compile a plan's kernel for an architecture and run it on CPU tensors, as `scheduled` says.

    Raises EmulationError where the kernel does what it must not.
    """
    # What interprets is loaded only where it is used: it needs longer than all else of mqa.
    from mqa.emulator import executor

    binary = cache.get(plan.kernel, arch)
    setting = _setting.get() or _Setting()
    summary = executor.run_plan(
        binary.ptx,
        binary.symbol,
        plan,
        tensors,
        schedule=setting.schedule,
        seed=setting.seed,
        tensor_pipe=setting.tensor_pipe,
        checks=setting.checks,
        ignore=setting.ignore,
        timeline=setting.timeline,
    )
    setting.launches.append(summary)


SM90_EMULATED = Emulated(SM90, ARCH)
SM90_ACCURATE_EMULATED = Emulated(SM90_ACCURATE, ARCH)
SM100_EMULATED = Emulated(SM100, BLACKWELL_ARCH)
PORTABLE_EMULATED = Emulated(PORTABLE, PORTABLE_ARCH)
EMULATED = {
    one.name: one
    for one in (SM100_EMULATED, SM90_EMULATED, SM90_ACCURATE_EMULATED, PORTABLE_EMULATED)
}
