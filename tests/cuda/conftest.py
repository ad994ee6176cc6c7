"""What tests of this folder share. Of the Hopper backend: where they run, under which guard, by
which judge. Of launches: a driver that launches nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import mqa
from mqa.backends import BACKENDS, Backend
from mqa.problem import DenseProblem, parse
from mqa.testing import (
    Accumulator,
    Case,
    Group,
    accumulators,
    assert_logits,
    guards_intact,
    make_case,
)
from mqa.testing.check import largest_error

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for fake_driver
BACKEND, DEVICE = "sm90", torch.device("cuda")
Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
Guard = Callable[[], contextlib.AbstractContextManager[None]]

_TILE = 256
_MOST_PRODUCTS = 2**30
"""Products q * k that a bounded case may cost the oracle; of larger ones a few rows are judged."""


@dataclass(frozen=True)
class Tiled:
    """An accumulator model, evaluated a tile at a time on every core: the same values, sooner."""

    model: Accumulator

    def dots(self, q: F64, k: F64) -> F64:
        return self._tiled(self.model.dots, q, k)

    def error(self, q: F64, k: F64) -> F64:
        return self._tiled(self.model.error, q, k)

    def _tiled(self, fill: Callable[[F64, F64], F64], q: F64, k: F64) -> F64:
        result = np.empty((len(q), len(k)))

        def score(corner: tuple[int, int]) -> None:
            rows, keys = (slice(first, first + _TILE) for first in corner)
            with np.errstate(all="ignore"):
                result[rows, keys] = fill(q[rows], k[keys])

        corners = itertools.product(range(0, len(q), _TILE), range(0, len(k), _TILE))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(score, corners))
        return result


@dataclass(frozen=True)
class Harness:
    """Runs cases on one backend and device, and judges what comes back."""

    backend: Backend
    device: torch.device
    guard: Guard

    @property
    def model(self) -> Accumulator:
        """How the backend is said to sum a dot of FP8 values."""
        return getattr(accumulators, self.backend.accumulator("fp8"))  # type: ignore[no-any-return]

    def case(self, problem: DenseProblem | str) -> Case:
        return make_case(parse(problem) if isinstance(problem, str) else problem, self.device)

    def accepts(self, problem: DenseProblem) -> bool:
        return not list(self.backend.reasons_against(problem, self.device))

    def run(self, case: Case, **options: Any) -> Tensor:
        """The case by the backend, while anything that waits for the device raises."""
        if case.problem.sms and "schedule_meta" not in options:
            options["schedule_meta"] = case.stale_schedule()
        with self.guard():
            return case.run(backend=self.backend.name, **options)

    def call(self, case: Case, rows: slice = slice(None), **changes: Any) -> Tensor:
        """The public call of some rows of a case, with some arguments changed; float32, cleaned."""
        t = case.tensors
        arguments = {
            "q": t["q"][rows],
            "kv": (t["kv"], t["kv_scale"]),
            "weights": t["w"][rows],
            "cu_seq_len_k_start": t["start"][rows],
            "cu_seq_len_k_end": t["end"][rows],
            "backend": self.backend.name,
        }
        with self.guard():
            return mqa.fp8_fp4_mqa_logits(**(arguments | changes))

    def check(self, problem: DenseProblem | str) -> None:
        """Right logits, written over NaN, and nothing written around them."""
        case = self.case(problem)
        out = case.new_out()
        self.run(case, out=out)
        self.judge(case, out)
        assert guards_intact(out)

    def judge(self, case: Case, got: Tensor) -> None:
        """`assert_logits` by the backend's accumulator; of a few rows where all would take long."""
        problem = case.problem
        products_of_a_row = max(1, problem.N * problem.H * problem.D)
        count = max(1, _MOST_PRODUCTS // products_of_a_row)
        if problem.regime == "exact" or count >= problem.S:
            assert_logits(case, got, Tiled(self.model))
            return
        rows = np.unique(np.linspace(0, problem.S - 1, count).astype(np.int64))
        part = _rows_of(case, rows)
        largest_error(part, got[torch.from_numpy(rows)], Tiled(self.model), replay=problem)

    @staticmethod
    def valid(case: Case) -> Bool:
        """[rows, width]: the entry is inside the window of its row."""
        data = case.data
        position = data.origin[:, None] + np.arange(data.width)
        return np.asarray((position >= data.start[:, None]) & (position < data.end[:, None]))

    @contextlib.contextmanager
    def num_sms(self, count: int) -> Iterator[None]:
        """Schedules are made for `count` SMs."""
        before = mqa.get_num_sms(self.device)
        mqa.set_num_sms(count, self.device)
        try:
            yield
        finally:
            mqa.set_num_sms(before, self.device)

    def metadata(self, case: Case, sms: int | None = None) -> Tensor:
        """A fresh schedule of the case, for `sms` SMs or those of the device."""
        t, problem = case.tensors, case.problem
        with self.num_sms(sms or mqa.get_num_sms(self.device)), self.guard():
            return mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)


def _rows_of(case: Case, rows: npt.NDArray[np.int64]) -> Case:
    """What the oracle needs of a case that consists of these rows."""
    data = case.data
    of_rows = {name: getattr(data, name)[rows] for name in ("q_codes", "weights", "start", "end")}
    data = dataclasses.replace(
        data,
        **of_rows,
        origin=data.origin[rows],
        groups=(Group(0, len(rows), data.groups[0].keys),),
    )
    return dataclasses.replace(
        case, problem=dataclasses.replace(case.problem, S=len(rows)), data=data
    )


@pytest.fixture(scope="session")
def sm90(no_host_reads: Guard) -> Harness:
    capability = torch.cuda.get_device_capability(DEVICE)
    if capability != (9, 0):
        pytest.skip(f"needs a Hopper GPU, compute capability 9.0; this one has {capability}")
    backend = next(backend for backend in BACKENDS if backend.name == BACKEND)
    return Harness(backend, DEVICE, no_host_reads)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's view of a GPU that is not there: see `fake_driver.pretend_gpu`."""
    import fake_driver

    return fake_driver.pretend_gpu(monkeypatch)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> Iterator[Any]:
    """The driver of that GPU, a `fake_driver.FakeDriver`."""
    import fake_driver

    fake_driver.driver._launcher.cache_clear()
    yield fake_driver.pretend_driver(monkeypatch)
    fake_driver.driver._launcher.cache_clear()
