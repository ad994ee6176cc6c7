"""Hopper's kernels on CPU tensors, as a backend that a call gets only by its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mqa.cuda import cache, compiler
from mqa.cuda.plan import Plan
from mqa.cuda.sm90 import (
    SM90,
    SM90_ACCURATE,
    Hopper,
    dense_cuts_plan,
    dense_facts,
    dense_plan,
    paged_cuts_plan,
)
from mqa.cuda.sm90_paged import paged_facts, paged_plan
from mqa.prepared import Launch
from mqa.problem import Format, Problem
from mqa.validate import DenseCall, PagedCall

if TYPE_CHECKING:
    from mqa.emulator.summary import Summary
    from mqa.emulator.tensor_order import TensorPipe
    from mqa.emulator.trace import Timeline

ARCH = "sm_90a"


@dataclass
class _Setting:
    schedule: str = "eager"
    seed: int = 0
    tensor_pipe: TensorPipe = "isa"
    timeline: Timeline | None = None
    launches: list[Summary] = field(default_factory=list)


_setting: ContextVar[_Setting | None] = ContextVar("_setting", default=None)


@contextlib.contextmanager
def scheduled(
    schedule: str = "eager",
    seed: int = 0,
    *,
    tensor_pipe: TensorPipe = "isa",
    trace: str | os.PathLike[str] | None = None,
) -> Iterator[list[Summary]]:
    """Calls of emulated backends in this block run under that schedule and seed, and with what
    `run` says of `tensor_pipe`.

    Yields a list that gets a `Summary` for each launch. The file `trace` gets the timeline of all
    of them as Chrome-trace JSON when the block ends, however it ends; raises OSError where that
    cannot be written.
    """
    from mqa.emulator.executor import traced
    from mqa.emulator.tensor_order import check_pipe

    check_pipe(tensor_pipe)

    with traced(trace) as timeline:
        setting = _Setting(schedule, seed, tensor_pipe, timeline)
        token = _setting.set(setting)
        try:
            yield setting.launches
        finally:
            _setting.reset(token)


class Emulated:
    """What a backend of Hopper would launch, executed by `mqa.emulator`: slow, and checked."""

    by_default = False

    def __init__(self, hopper: Hopper) -> None:
        self._hopper = hopper

    @property
    def name(self) -> str:
        return f"{self._hopper.name}-emulated"

    def reasons_against(self, problem: Problem, device: torch.device) -> Iterator[str]:
        if device.type != "cpu":
            yield f"emulates on the CPU, this is {device}"
        elif (missing := self.unusable_here()) is not None:
            yield missing
        yield from self._hopper.problem_reasons(problem)

    def unusable_here(self) -> str | None:
        missing = compiler.unavailable()
        return None if missing is None else "; ".join(map(str.strip, missing.splitlines()))

    def dense(self, call: DenseCall, out: Tensor) -> Launch | None:
        plan = dense_plan(dense_facts(call, out, self._hopper.elements[call.problem.format]))
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
        execute(plan, tensors)
        return None

    def paged(self, call: PagedCall, out: Tensor) -> None:
        plan = paged_plan(paged_facts(call, out, self._hopper.elements[call.problem.format]))
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
        execute(plan, tensors)

    def dense_metadata(
        self, start: Tensor, end: Tensor, num_kv_tokens: int, num_heads: int, out: Tensor
    ) -> None:
        plan = dense_cuts_plan(start, end, num_kv_tokens, num_heads, out)
        execute(plan, {"start": start, "end": end, "out": out})

    def paged_metadata(self, context_lens: Tensor, indices: Tensor | None, out: Tensor) -> None:
        plan = paged_cuts_plan(context_lens, indices, out)
        execute(plan, {"lens": context_lens, "indices": indices, "out": out})

    def schedules_on(self, device: torch.device) -> bool:
        """The public metadata functions take no backend's name, and none gets this one unasked."""
        return False

    def accumulator(self, format: Format) -> str:
        return self._hopper.accumulator(format)

    def warmup(self, problem: Problem, device: torch.device) -> tuple[str, ...]:
        kernels = self._hopper.kernels_of(problem)
        for kernel in kernels:
            cache.get(kernel, ARCH)
        return tuple(map(str, kernels))


def execute(plan: Plan, tensors: Mapping[str, Tensor | None]) -> None:
    """Compile a plan's kernel and run it on CPU tensors, as `scheduled` says.

    Raises EmulationError where the kernel does what it must not.
    """
    # What interprets is loaded only where it is used: it needs longer than all else of mqa.
    from mqa.emulator import executor

    binary = cache.get(plan.kernel, ARCH)
    setting = _setting.get() or _Setting()
    summary = executor.run_plan(
        binary.ptx,
        binary.symbol,
        plan,
        tensors,
        schedule=setting.schedule,
        seed=setting.seed,
        tensor_pipe=setting.tensor_pipe,
        timeline=setting.timeline,
    )
    setting.launches.append(summary)


SM90_EMULATED = Emulated(SM90)
SM90_ACCURATE_EMULATED = Emulated(SM90_ACCURATE)
