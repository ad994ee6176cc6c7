"""The GPU under test: captured graphs, times between two events, the clock under load."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mqa.cuda.targets import architecture
from mqa.testing.timing import Work

_GATE = 200_000
"""Clocks, some 100 us, for which the GPU is kept busy while the host queues what is timed."""
_LOAD_SECONDS = 300e-6
"""Shortest load beside which the clock is read."""
_SPIN_SHARE, _SPIN_HZ = 0.6, 1.5e9
_CLOCK_READS = 5
CLOCK_METHOD = (
    "one thread spins for a known number of clocks beside back-to-back replays of ours; its time "
    "between two events, less that of an empty spin, median of 5"
)


class Device(Protocol):
    """What the suites need of a GPU. Tests put a CPU in its place."""

    where: torch.device
    sms: int
    major: int
    """Of its compute capability."""
    l2_bytes: int

    @property
    def arch(self) -> str:
        """What kernels for it are compiled for."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Work, Tensor]:
        """A replay of `work`, which has run before, and the result that each replay fills."""
        ...

    def keep_busy(self) -> None:
        """Occupy the device while the host queues a timed run: no launch gap is timed."""
        ...

    def seconds(self, work: Work) -> float:
        """Run `work` once and return its time: a timer."""
        ...

    def clock_hz(self, work: Work, seconds: float) -> float:
        """SM clock while `work`, which takes `seconds`, runs again and again."""
        ...

    def synchronize(self) -> None: ...

    def free(self) -> None:
        """Give back the memory that dropped graphs and tensors held."""
        ...


class Gpu:
    """A CUDA device."""

    def __init__(self, where: torch.device) -> None:
        facts = torch.cuda.get_device_properties(where)
        self.where = where
        self.sms = int(facts.multi_processor_count)
        self.major = int(facts.major)
        self.l2_bytes = int(facts.L2_cache_size)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._side = torch.cuda.Stream(where)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def arch(self) -> str:
        return architecture(self.where)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Work, Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            graph.capture_begin(pool=self._pool)
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._side)
        return graph.replay, result

    def keep_busy(self) -> None:
        torch.cuda._sleep(_GATE)

    def seconds(self, work: Work) -> float:
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def clock_hz(self, work: Work, seconds: float) -> float:
        count = math.ceil(_LOAD_SECONDS / seconds)
        clocks = int(_SPIN_SHARE * _SPIN_HZ * count * seconds)
        reads = []
        for _ in range(_CLOCK_READS):
            empty = self._spin_beside(1, [])
            reads.append(clocks / (self._spin_beside(clocks, [work] * count) - empty))
        return float(np.median(reads))

    def _spin_beside(self, clocks: int, load: Sequence[Work]) -> float:
        """Seconds of a one-thread spin that starts just before `load` does."""
        opened = torch.cuda.Event()
        torch.cuda._sleep(_GATE + 20_000 * len(load))
        opened.record()
        with torch.cuda.stream(self._side):
            self._side.wait_event(opened)
            self._begin.record()
            torch.cuda._sleep(clocks)
            self._end.record()
        torch.cuda._sleep(10_000)
        for work in load:
            work()
        self.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def free(self) -> None:
        self.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
