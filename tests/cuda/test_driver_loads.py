"""Loading kernels, without a GPU: once, named where it fails, allowed while a stream captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_driver import DEVICE, GLOBAL, KERNEL, PLAN, RELAXED, FakeDriver, launch

from mqa import devices
from mqa.cuda import cache, compiler, driver
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.errors import CompileError

pytestmark = pytest.mark.usefixtures("fake")


def test_launchers_and_kernels_are_made_once(fake: FakeDriver) -> None:
    first = driver.launcher(PLAN, DEVICE)
    assert driver.launcher(PLAN, DEVICE) is first
    devices.set_pdl(True, DEVICE)
    assert driver.launcher(PLAN, DEVICE) is not first
    assert driver.loads() == 1
    driver.launcher(PLAN, torch.device("cuda", 1))
    driver.load(KERNEL, torch.device("cuda"), 0)  # the current one
    assert driver.loads() == 2
    assert fake.shared_limits == [200 * 1024] * 2


def test_little_shared_memory_needs_no_permission(fake: FakeDriver) -> None:
    driver.load(KERNEL, DEVICE, 48 * 1024)
    assert not fake.shared_limits


@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("cuLibraryLoadData", "load"),
        ("cuLibraryGetKernel", "find"),
        ("cuKernelGetFunction", "load"),
        ("cuFuncSetAttribute", "set up"),
    ],
)
def test_a_kernel_that_does_not_load_is_named_and_not_remembered(
    fake: FakeDriver, function: str, step: str
) -> None:
    fake.failing = function
    words = rf"^cannot {step} mqa::k<64, float>: CUDA_ERROR_NOT_FOUND, text of 500$"
    with pytest.raises(RuntimeError, match=words):
        launch()
    assert driver.loads() == 0
    assert fake.capture_modes == [RELAXED, GLOBAL]
    fake.failing = ""
    launch()
    assert driver.loads() == 1


def test_capture_is_relaxed_only_while_a_kernel_is_loaded(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = fake.cuLibraryLoadData

    def look(image: bytes, *rest: Any) -> Any:
        assert fake.capture_modes[-1] == RELAXED
        return load(image, *rest)

    monkeypatch.setattr(fake, "cuLibraryLoadData", look)
    fake.failing = "cuLibraryLoadData"
    with pytest.raises(RuntimeError, match="cannot load"):
        launch()
    assert fake.capture_modes == [RELAXED, GLOBAL]
    fake.failing = ""
    launch()
    launch()
    assert fake.capture_modes == [RELAXED, GLOBAL] * 2


def test_a_kernel_that_does_not_compile_is_no_kernel_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(kernel: Kernel, arch: str) -> Binary:
        assert (kernel, arch) == (KERNEL, "sm_90a")
        raise CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "get", get)
        with pytest.raises(CompileError):
            launch()
    assert driver.loads() == 0
    launch()
    assert driver.loads() == 1


@pytest.fixture
def _ask_again() -> Iterator[None]:
    for known in (driver.unavailable, driver._release):
        known.cache_clear()
    yield
    for known in (driver.unavailable, driver._release):
        known.cache_clear()


@pytest.mark.usefixtures("_ask_again")
def test_nothing_is_missing_here() -> None:
    assert driver.unavailable() is None


@pytest.mark.usefixtures("_ask_again")
def test_a_driver_from_before_the_compiler_is_what_is_missing(fake: FakeDriver) -> None:
    fake.version = 12090
    told = str(driver.unavailable())
    assert told.startswith("the NVIDIA driver is for CUDA 12.9, kernels are compiled by 13.")
    assert told.endswith(" and need one for CUDA 13.0 or newer (R580 or newer)")


@pytest.mark.usefixtures("_ask_again")
def test_ptx_needs_a_driver_as_new_as_the_compiler(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.compiler, "release", lambda: (13, 2))
    fake.version = 13010
    assert driver.ptx_misfit("sm_80") is None
    told = str(driver.ptx_misfit("compute_80"))
    assert told.startswith("compute_80 is PTX of NVRTC 13.2, the NVIDIA driver is for CUDA 13.1")
    assert told.endswith("nvidia-cuda-nvrtc 13.1")
    fake.version = 13020
    driver._release.cache_clear()
    assert driver.ptx_misfit("compute_80") is None


@pytest.mark.usefixtures("_ask_again")
def test_without_cuda_python_it_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda _: None)
    missing = "cuda-python is not installed (pip install 'mqa-logits[cuda]')"
    assert driver.unavailable() == missing


@pytest.mark.usefixtures("_ask_again")
def test_without_headers_or_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "unavailable", lambda: "no headers, looked in\n  /usr\nget them")
    assert driver.unavailable() == "no headers, looked in; /usr; get them"
