"""A CUDA driver without a GPU: notes launches and what else it is asked for, fails on demand."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

from mqa import devices
from mqa.cuda import cache, compiler, driver
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel, Plan, Scalar, Struct
from mqa.cuda.tensor_map import TensorMap

DEVICE = torch.device("cuda", 0)
OK, MISSING = 0, 500
GLOBAL, RELAXED = 0, bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
KERNEL = Kernel("k.cuh", "mqa::k", ("64", "float"))
MAP = TensorMap("q", "UINT8", 1, (128, 8), (128,), (128, 4), swizzle=128)
PLAN = Plan(
    KERNEL,
    grid=132,
    threads=640,
    shared_bytes=200 * 1024,
    maps=(MAP, MAP),
    struct=Struct(
        ("w", "", "out"), (Scalar("stride", "q", -5), Scalar("rows", "i", 7), Scalar("on", "?", 1))
    ),
)
ADDRESSES = (0x10000, 0x20000, 0x30004, 0, 0x50002)


class FakeDriver:
    """The driver's types, and functions that note what they are asked for."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.statuses: list[int] = []  # of the next launches
        self.failing = ""  # a function of this name fails
        self.capture_modes: list[Any] = []
        self.encoded: list[int] = []
        self.shared_limits: list[int] = []
        self.bound: list[Any] = []
        self.version = 1000 * compiler.release()[0]

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("CU") or name.startswith("cuuint"), f"{name} is no type"
        return getattr(bindings, name)

    def _status(self, function: str) -> int:
        return MISSING if function == self.failing else OK

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return OK, self.version

    def cuInit(self, _flags: int) -> tuple[int]:
        return (OK,)

    def cuDevicePrimaryCtxRetain(self, index: int) -> tuple[int, Any]:
        return self._status("cuDevicePrimaryCtxRetain"), f"context {index}"

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self.bound.append(context)
        return (OK,)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[int, Any]:
        self.capture_modes.append(mode)
        return OK, GLOBAL

    def cuLibraryLoadData(self, image: bytes, *_: Any) -> tuple[int, Any]:
        assert image == b"cubin"
        return self._status("cuLibraryLoadData"), "library"

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[int, Any]:
        return self._status("cuLibraryGetKernel"), (library, name)

    def cuKernelGetFunction(self, entry: Any) -> tuple[int, Any]:
        return self._status("cuKernelGetFunction"), ("function", *entry)

    def cuFuncSetAttribute(self, _function: Any, attribute: Any, value: int) -> tuple[int]:
        assert "MAX_DYNAMIC_SHARED" in attribute.name
        self.shared_limits.append(value)
        return (self._status("cuFuncSetAttribute"),)

    def cuTensorMapEncodeTiled(self, _kind: Any, _rank: int, address: int, *_: Any) -> Any:
        self.encoded.append(address)
        encoded = bindings.CUtensorMap()
        encoded.opaque = [bindings.cuuint64_t(address)] * 16
        return bindings.CUresult.CUDA_SUCCESS, encoded

    def cuGetErrorString(self, error: Any) -> tuple[int, bytes]:
        return OK, f"text of {int(error)}".encode()

    def cuLaunchKernel(self, function: Any, *rest: Any) -> tuple[int]:
        *shape, stream, arguments, extra = rest
        assert extra == 0
        return self._launched(function, tuple(shape), stream, arguments)

    def cuLaunchKernelEx(self, launch: Any, function: Any, arguments: int, extra: int) -> Any:
        assert extra == 0
        assert launch.numAttrs == 1
        grid = (launch.gridDimX, launch.gridDimY, launch.gridDimZ)
        block = (launch.blockDimX, launch.blockDimY, launch.blockDimZ)
        attribute = launch.attrs[0]
        flag = attribute.value.programmaticStreamSerializationAllowed
        shape = (*grid, *block, launch.sharedMemBytes)
        stream = int(launch.hStream)
        return self._launched(function, shape, stream, arguments, dependent=(attribute.id, flag))

    def _launched(self, function: Any, shape: Any, stream: int, at: int, **more: Any) -> Any:
        """Note a launch of PLAN, its arguments as a GPU would find them."""
        count = len(PLAN.maps)
        pointers = (ctypes.c_uint64 * (count + 1)).from_address(at)
        maps = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers[:count]]
        content = ctypes.string_at(pointers[count], PLAN.struct.layout.size)
        facts = {"maps": maps, "struct": PLAN.struct.layout.unpack(content), "at": at}
        self.launches.append(
            {"function": function, "shape": shape, "stream": stream, **facts, **more}
        )
        return (self.statuses.pop(0) if self.statuses else OK,)


def pretend_gpu(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch says of the GPU, for tests to change; `calls` notes what it was asked to do."""
    gpu = SimpleNamespace(current=0, stream=77, capturing=False, calls=[], failure=None)

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, gpu.current = gpu.current, index
        yield
        gpu.current = before

    def synchronize() -> None:
        gpu.calls.append("synchronize")
        if gpu.failure:
            raise gpu.failure

    stream = SimpleNamespace(synchronize=synchronize)
    functions = {
        "current_device": lambda: gpu.current,
        "device": device,
        "device_count": lambda: 2,
        "get_device_capability": lambda _: (9, 0),
        "current_stream": lambda _: stream,
        "is_current_stream_capturing": lambda: gpu.capturing,
        "set_device": lambda index: gpu.calls.append(f"set_device {index}"),
    }
    for name, function in functions.items():
        patch.setattr(torch.cuda, name, function)
    for name, fake in (
        ("_cuda_getDevice", lambda: gpu.current),
        ("_cuda_getCurrentRawStream", lambda _: gpu.stream),
    ):
        patch.setattr(torch._C, name, fake, raising=False)
    return gpu


def pretend_driver(patch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver that nothing is loaded in yet, and a cache that has every kernel."""
    fake = FakeDriver()
    patch.setattr(driver, "_driver", lambda: fake)
    patch.setattr(driver, "_functions", {})
    patch.setattr(driver, "_libraries", [])
    patch.setattr(driver, "_contexts", {})
    patch.setattr(driver, "_loads", 0)
    patch.setattr(devices, "_pdl", {})
    patch.setattr(cache, "get", lambda kernel, arch: Binary(b"cubin", "symbol", "", ""))
    return fake


def launch(addresses: tuple[int, ...] = ADDRESSES) -> None:
    driver.launcher(PLAN, DEVICE).launch(addresses)
