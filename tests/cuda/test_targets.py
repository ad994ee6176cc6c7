"""What kernels are compiled for, how that is loaded and launched; without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_driver import DEVICE, FakeDriver

from mqa import config, devices
from mqa.cuda import cache, compiler, driver, metadata, targets
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel, Plan, Struct
from mqa.cuda.portable import PORTABLE
from mqa.errors import CompileError

HOPPERS, ANYONES = Kernel("k.cuh", "mqa::k"), Kernel("p.cuh", "mqa::p", portable=True)
KNOWN = (75, 80, 86, 89, 90, 100, 120)
PLAN = Plan(ANYONES, grid=3, threads=256, shared_bytes=99 * 1024, maps=(), struct=Struct((), ()))


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the compute capability of the GPU that torch sees, and what NVRTC compiles for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    monkeypatch.setattr(compiler, "release", lambda: (13, 0))

    def change(major: int, minor: int, known: tuple[int, ...] = KNOWN) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(compiler, "architectures", lambda: known)

    return change


@pytest.mark.parametrize(
    ("found", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "compute_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "compute_100"),
        ((11, 0), "compute_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "compute_120"),
    ],
)
def test_portable_kernels_are_for_the_gpu_itself_or_the_newest_older_one(
    capability: Any, found: tuple[int, int], target: str
) -> None:
    capability(*found)
    assert targets.of(ANYONES, DEVICE) == target
    assert targets.portable_misfit(DEVICE) is None
    assert targets.of(HOPPERS, DEVICE) == targets.architecture(DEVICE)
    assert targets.architecture(DEVICE)[-1] in "af"


def test_virtual_architectures_can_be_asked_for(capability: Any, setenv: Any) -> None:
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    setenv("MQA_ARCH", "sm_90a")
    capability(9, 0)
    assert targets.of(ANYONES, DEVICE) == "compute_80"
    assert targets.of(HOPPERS, DEVICE) == "sm_90a"
    assert targets.portable_misfit(DEVICE) is None
    setenv("MQA_PORTABLE_ARCH", "compute_90")
    assert targets.portable_misfit(DEVICE) is None


@pytest.mark.parametrize(
    ("asked", "found", "known", "said"),
    [
        (
            "compute_90",
            (8, 9),
            KNOWN,
            (
                "MQA_PORTABLE_ARCH=compute_90 does not run on compute capability 8.9, "
                "only compute_80 to compute_89"
            ),
        ),
        (
            "compute_75",
            (8, 6),
            KNOWN,
            (
                "MQA_PORTABLE_ARCH=compute_75 does not run on compute capability 8.6, "
                "only compute_80 to compute_86"
            ),
        ),
        (
            "compute_87",
            (8, 9),
            KNOWN,
            (
                "MQA_PORTABLE_ARCH=compute_87 is none that NVRTC 13.0 compiles to: compute_80, "
                "compute_86, compute_89"
            ),
        ),
        ("", (8, 0), (90, 100), "NVRTC 13.0 compiles for compute capability 9.0 and newer only"),
    ],
)
def test_what_cannot_run_is_a_reason_against_the_backend(
    capability: Any,
    setenv: Any,
    asked: str,
    found: tuple[int, int],
    known: tuple[int, ...],
    said: str,
) -> None:
    setenv("MQA_PORTABLE_ARCH", asked)
    capability(*found, known)
    assert targets.portable_misfit(DEVICE) == said
    assert [*PORTABLE._device_reasons(DEVICE)] == [said]


@pytest.mark.parametrize("name", ["sm_80", "compute_90a", "80", "compute_"])
def test_only_virtual_architectures_can_be_asked_for(setenv: Any, name: str) -> None:
    setenv("MQA_PORTABLE_ARCH", name)
    with pytest.raises(ValueError, match=rf"MQA_PORTABLE_ARCH='{name}', expected a virtual one"):
        config.portable_arch()


def test_capabilities_are_the_numbers_of_architectures() -> None:
    names = ("sm_80", "sm_90a", "sm_100f", "compute_120")
    assert [targets.number(name) for name in names] == [80, 90, 100, 120]
    waiting = {name: targets.waits(name) for name in ("sm_89", "compute_80", "sm_90", "sm_100f")}
    assert waiting == {"sm_89": False, "compute_80": False, "sm_90": True, "sm_100f": True}


class Loads(FakeDriver):
    """Notes what is loaded, and may find fault with it, now or when it is asked for a function."""

    def __init__(self, log: bytes = b"") -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.options: list[Any] = []
        self.log = log

    def cuLibraryLoadData(self, image: bytes, names: Any, values: Any, count: int, *_: Any) -> Any:
        self.images.append(image)
        self.options.append((names, values, count))
        if self.log:
            values[0][: len(self.log)] = self.log
        return self._status("cuLibraryLoadData"), "library"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> Loads:
    """The driver of GPU 0, which has everything that the compiler would have made."""
    driver_ = Loads()
    monkeypatch.setattr(driver, "_driver", lambda: driver_)
    monkeypatch.setattr(compiler, "architectures", lambda: KNOWN)

    def get(kernel: Kernel, arch: str) -> Binary:
        image = b"" if arch.startswith("compute") else f"cubin of {arch}".encode()
        return Binary(image, "symbol", "", f".target {arch}")

    monkeypatch.setattr(cache, "get", get)
    return driver_


def test_binaries_are_loaded_as_they_are(loads: Loads) -> None:
    driver.load(ANYONES, DEVICE, 0)
    assert loads.images == [b"cubin of sm_90"]
    assert loads.options == [([], [], 0)]


def test_ptx_is_assembled_by_the_driver_with_a_log(loads: Loads, setenv: Any) -> None:
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    driver.load(ANYONES, DEVICE, 99 * 1024)
    assert loads.images == [b".target compute_80\0"]
    names, values, count = loads.options[0]
    assert [name.name for name in names] == [
        "CU_JIT_ERROR_LOG_BUFFER",
        "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES",
    ]
    assert (len(values[0]), count) == (values[1], 2)
    assert loads.shared_limits == [99 * 1024]


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuLibraryGetKernel"])
def test_what_the_driver_says_of_ptx_is_told(loads: Loads, setenv: Any, function: str) -> None:
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    loads.log, loads.failing = b"ptxas fatal : unsupported .version 9.9", function
    with pytest.raises(RuntimeError, match=r"(?s)cannot .* mqa::p: .*unsupported \.version 9\.9$"):
        driver.load(ANYONES, DEVICE, 0)


def test_another_target_is_another_binary(loads: Loads, setenv: Any) -> None:
    first = driver.launcher(PLAN, DEVICE)
    assert driver.launcher(PLAN, DEVICE) is first
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    assert driver.launcher(PLAN, DEVICE) is not first
    setenv("MQA_PORTABLE_ARCH", "")
    driver.launcher(PLAN, DEVICE)
    assert loads.images == [b"cubin of sm_90", b".target compute_80\0"]


def test_only_kernels_that_wait_may_start_early(loads: Loads, setenv: Any) -> None:
    devices.set_pdl(True, DEVICE)
    assert driver.launcher(PLAN, DEVICE)._pdl
    setenv("MQA_PORTABLE_ARCH", "compute_80")
    assert not driver.launcher(PLAN, DEVICE)._pdl


needs_nvrtc = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC")
SCHEDULES = metadata.PORTABLE_METADATA[0]


@needs_nvrtc
def test_a_virtual_architecture_gives_ptx_alone() -> None:
    binary = compiler.compile_kernel(SCHEDULES, "compute_80")
    assert binary.image == b""
    assert ".target sm_80\n" in binary.ptx
    assert f".entry {binary.symbol}(" in binary.ptx
    assert "griddepcontrol" not in binary.ptx
    assert "griddepcontrol.wait" in compiler.compile_kernel(SCHEDULES, "compute_90").ptx
    with pytest.raises(ValueError, match="arch='compute_90a', expected an architecture such as"):
        compiler.compile_kernel(SCHEDULES, "compute_90a")


@needs_nvrtc
def test_ptx_and_binaries_have_files_of_their_own() -> None:
    names = {cache.key(SCHEDULES, arch) for arch in ("sm_80", "compute_80", "compute_86")}
    assert len(names) == 3


@needs_nvrtc
def test_clusters_are_for_gpus_that_have_them() -> None:
    with pytest.raises(CompileError):
        compiler.compile_kernel(metadata.METADATA[0], "compute_80")


def test_older_gpus_get_no_portable_kernels(capability: Any) -> None:
    capability(7, 5, (75, 80))
    assert "8.0 or newer" in str(targets.portable_misfit(DEVICE))
