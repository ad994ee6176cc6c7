"""What tests of this folder share. Of the Hopper backend: where they run, under which guard, by
which judge. Of launches: a driver that launches nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import mqa
from mqa.backends import BACKENDS, Backend
from mqa.cuda import driver
from mqa.cuda.gpu import Gpu
from mqa.emulator.backend import SM90_EMULATED
from mqa.problem import Format, PagedProblem, Problem, parse
from mqa.testing import (
    Accumulator,
    Case,
    Tiled,
    accumulators,
    guards_intact,
    make_case,
)
from mqa.testing.check import largest_error

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for fake_driver
BACKENDS_OF = {9: "sm90", 10: "sm100"}
"""By major compute capability: what most tests here are run on."""
ACCURATE, DEVICE = "sm90-accurate", torch.device("cuda")
Bool = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
Guard = Callable[[], contextlib.AbstractContextManager[None]]

_MOST_PRODUCTS = 2**30
"""Products q * k that a bounded case may cost the oracle; of larger ones a few rows are judged."""


@dataclass(frozen=True)
class Harness:
    """Runs cases on one backend and device, and judges what comes back."""

    backend: Backend
    device: torch.device
    guard: Guard

    @property
    def model(self) -> Accumulator:
        """How the backend is said to sum a dot of FP8 values."""
        return self.model_of("fp8")

    def model_of(self, format: Format) -> Accumulator:
        return accumulators.named(self.backend.accumulator(format))

    def case(self, problem: Problem | str) -> Case:
        return make_case(parse(problem) if isinstance(problem, str) else problem, self.device)

    def accepts(self, problem: Problem) -> bool:
        return not list(self.backend.reasons_against(problem, self.device))

    def run(self, case: Case, **options: Any) -> Tensor:
        """The case by the backend, while anything that waits for the device raises."""
        if case.problem.sms and "schedule_meta" not in options:
            options["schedule_meta"] = case.stale_schedule()
        with self.guard():
            return case.run(backend=self.backend.name, **options)

    def call(self, case: Case, rows: slice = slice(None), **changes: Any) -> Tensor:
        """The public call of some rows (of a paged case: requests) of a case, with some arguments
        changed; float32, cleaned."""
        paged = isinstance(case.problem, PagedProblem)
        arguments = _paged_arguments(case, rows) if paged else _dense_arguments(case, rows)
        call = mqa.fp8_fp4_paged_mqa_logits if paged else mqa.fp8_fp4_mqa_logits
        with self.guard():
            return call(**(arguments | {"backend": self.backend.name} | changes))

    def check(self, problem: Problem | str) -> None:
        """Right logits, written over NaN, and nothing written around them."""
        case = self.case(problem)
        out = case.new_out()
        self.run(case, out=out)
        self.judge(case, out)
        assert guards_intact(out)

    def judge(self, case: Case, got: Tensor) -> None:
        """`assert_logits` by the backend's accumulator; of a few rows where all would take long."""
        model, most = Tiled(self.model_of(case.problem.format)), _MOST_PRODUCTS
        largest_error(case, got, model, replay=case.problem, most_products=most)

    @staticmethod
    def valid(case: Case) -> Bool:
        """[rows, width]: the entry is inside the window of its row."""
        return case.data.inside()

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
        count = sms or mqa.get_num_sms(self.device)
        if isinstance(problem, PagedProblem):
            lens = t["lens"]
            if lens.dim() == 1:
                lens = lens[:, None].expand(-1, problem.next_n)
            with self.guard():
                return mqa.get_paged_mqa_logits_metadata(lens, problem.P, count, t.get("indices"))
        with self.num_sms(count), self.guard():
            return mqa.get_mqa_logits_metadata(t["start"], t["end"], problem.N, problem.H)


def _query(case: Case, rows: slice) -> Tensor | tuple[Tensor, Tensor]:
    """These rows or requests of q, with their scales if there are any."""
    values, scales = case.tensors["q"][rows], case.tensors.get("q_scale")
    return values if scales is None else (values, scales[rows])


def _dense_arguments(case: Case, rows: slice) -> dict[str, Any]:
    t = case.tensors
    return {
        "q": _query(case, rows),
        "kv": (t["kv"], t.get("kv_scale")),
        "weights": t["w"][rows],
        "cu_seq_len_k_start": t["start"][rows],
        "cu_seq_len_k_end": t["end"][rows],
    }


def _paged_arguments(case: Case, requests: slice) -> dict[str, Any]:
    t, problem = case.tensors, case.problem
    assert isinstance(problem, PagedProblem)
    weights = t["w"].unflatten(0, (problem.B, problem.next_n))[requests]
    return {
        "q": _query(case, requests),
        "kv_cache": t["cache"],
        "weights": weights.flatten(0, 1),
        "context_lens": t["lens"][requests],
        "block_table": t["table"][requests],
        "schedule_meta": None,
        "max_context_len": problem.L,
        "clean_logits": True,
        "indices": t["indices"][requests] if problem.varlen else None,
    }


def _harness(name: str, guard: Guard) -> Harness:
    backend = next(backend for backend in BACKENDS if backend.name == name)
    assert isinstance(backend, Gpu)
    capability = torch.cuda.get_device_capability(DEVICE)
    if not backend.takes(*capability):
        wanted = f"{name} needs compute capability {backend.capability}"
        pytest.skip(f"{wanted}; this GPU has {capability}")
    return Harness(backend, DEVICE, guard)


@pytest.fixture(scope="session")
def harness_of(no_host_reads: Guard) -> Callable[[str], Harness]:
    """The harness of a backend by name; what this GPU cannot run is skipped."""
    return lambda name: _harness(name, no_host_reads)


@pytest.fixture(scope="session")
def sm90(no_host_reads: Guard) -> Harness:
    """The backend of this GPU: what holds on Hopper has to hold on Blackwell too."""
    major, _ = torch.cuda.get_device_capability(DEVICE)
    return _harness(BACKENDS_OF.get(major, "sm90"), no_host_reads)


@pytest.fixture(scope="session", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def bf16(request: pytest.FixtureRequest) -> Harness:
    """Hopper's own kernels for bfloat16, on a GPU and emulated."""
    if request.param == "gpu":
        return _harness("sm90", request.getfixturevalue("no_host_reads"))
    if (missing := SM90_EMULATED.unusable_here()) is not None:
        pytest.skip(missing)
    return Harness(SM90_EMULATED, torch.device("cpu"), contextlib.nullcontext)


@pytest.fixture(scope="session")
def accurate(no_host_reads: Guard) -> Harness:
    """FP8 by way of bfloat16."""
    return _harness(ACCURATE, no_host_reads)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """Names and addresses of the tensors of each launch, in order; nothing is launched."""
    launched: list[list[tuple[str, int]]] = []

    def launcher(plan: Any, _device: torch.device) -> SimpleNamespace:
        bind = lambda addresses: [*zip(plan.tensors, addresses, strict=True)]  # noqa: E731
        return SimpleNamespace(launch=lambda addresses: launched.append(bind(addresses)))

    monkeypatch.setattr(driver, "launcher", launcher)
    return launched


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
