"""Runs plans on a GPU through the CUDA driver API.

A launch goes to torch's current stream, never waits for the device and can be captured in a graph,
also the first one of a process: loading, compile included, is bracketed by a relaxed capture mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import struct
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mqa import config, devices
from mqa.cuda import cache, compiler, headers, targets
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel, Plan
from mqa.cuda.tensor_map import TensorMap, encode

_MAPS = 1024
"""Addresses for which a launcher keeps a tensor map encoded: more than a model has layers."""
_NO_CONTEXT = (4, 201)
"""CUresult of a thread that has not used the device: deinitialized, invalid context."""
_DEFAULT_SHARED_BYTES = 48 * 1024
_R580 = 13
"""The major release of CUDA whose first driver is R580."""

_lock = threading.Lock()
_loads = 0


def loads() -> int:
    """Kernels loaded on a device so far, by this process."""
    return _loads


@functools.cache
def unavailable() -> str | None:
    """What is missing to compile and launch, whatever the device, in a line; None if nothing is.

    Loads the compiler, so it is asked only where there is a GPU to compile for.
    """
    if not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")):
        return f"cuda-python is not installed ({headers.INSTALL})"
    missing = compiler.unavailable()
    if missing is not None:
        return "; ".join(map(str.strip, missing.splitlines()))
    return _too_old()


def _too_old() -> str | None:
    """Whether the NVIDIA driver is from before the CUDA release that compiles the kernels."""
    has, (major, minor) = _release(), compiler.release()
    if has is None or has[0] >= major:
        return None
    needs = f"kernels are compiled by {major}.{minor} and need one for CUDA {major}.0 or newer"
    branch = " (R580 or newer)" if major == _R580 else ""
    return f"the NVIDIA driver is for CUDA {has[0]}.{has[1]}, {needs}{branch}"


def assembles() -> bool:
    """Whether the driver knows the compiler's PTX. Unlike binaries, that of a later release of the
    same CUDA is unknown to it."""
    has = _release()
    return has is None or has >= compiler.release()


def ptx_misfit(arch: str) -> str | None:
    """Why the driver does not take what is compiled for `arch`, None if that is no PTX or PTX that
    it assembles."""
    has = _release()
    if not arch.startswith("compute_") or has is None or assembles():
        return None
    by, knows = (".".join(map(str, release)) for release in (compiler.release(), has))
    return (
        f"{arch} is PTX of NVRTC {by}, the NVIDIA driver is for CUDA {knows} and assembles none "
        f"of later releases: it needs a newer driver, or nvidia-cuda-nvrtc {knows}"
    )


@functools.cache
def _release() -> tuple[int, int] | None:
    """The CUDA release that the driver is for; None if there is no driver at all, so that torch
    finds no device either."""
    try:
        error, version = _driver().cuDriverGetVersion()
    except RuntimeError:
        return None
    return (0, 0) if int(error) else (version // 1000, version % 1000 // 10)


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class Launcher:
    """A plan on one device, its kernel compiled and loaded. Threads may share it."""

    def __init__(self, plan: Plan, device: torch.device, *, pdl: bool) -> None:
        self.plan = plan
        self.index = device.index
        self._driver = _driver()
        self._pdl = pdl and targets.waits(targets.of(plan.kernel, device))
        self._function = load(plan.kernel, device, plan.shared_bytes)
        self._shape = (plan.grid, 1, 1, plan.threads, 1, 1, plan.shared_bytes)
        self._maps = [_Encoded(map) for map in plan.maps]
        self._values = tuple(scalar.value for scalar in plan.struct.scalars)
        # One buffer: pointers to the arguments, then the argument struct.
        count = len(plan.maps)
        self._struct_at = 8 * (count + 1)
        self._layout = plan.struct.layout
        self._pointers = struct.Struct(f"@{count + 1}Q")
        self._thread = threading.local()

    def launch(self, addresses: tuple[int, ...]) -> None:
        """Launch on the current stream; `addresses` are those of `plan.tensors`.

        Raises RuntimeError with the driver's reason and the kernel's name.
        """
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                self.launch(addresses)
            return
        count = len(self._maps)
        maps = [map.at(addresses[i]) for i, map in enumerate(self._maps)]
        try:
            buffer, base = self._thread.buffer
        except AttributeError:
            buffer, base = self._thread.buffer = self._new_buffer()
        self._layout.pack_into(buffer, self._struct_at, *addresses[count:], *self._values)
        pointers = [map.getPtr() for map in maps]
        self._pointers.pack_into(buffer, 0, *pointers, base + self._struct_at)
        error = self._call(base)
        if error in _NO_CONTEXT:
            _bind(self.index)
            error = self._call(base)
        if error:
            raise RuntimeError(f"launch of {self.plan.kernel}: {_reason(error)}")
        if config.debug() and not torch.cuda.is_current_stream_capturing():
            self._wait()

    def _new_buffer(self) -> tuple[bytearray, int]:
        """Room for pointers and struct, and its address."""
        buffer = bytearray(self._struct_at + self._layout.size)
        return buffer, ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def _call(self, arguments: int) -> int:
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if self._pdl:
            launch = self._configuration()
            launch.hStream = self._driver.CUstream(stream)
            (error,) = self._driver.cuLaunchKernelEx(launch, self._function, arguments, 0)
        else:
            (error,) = self._driver.cuLaunchKernel(
                self._function, *self._shape, stream, arguments, 0
            )
        return int(error)

    def _configuration(self) -> Any:
        """This thread's launch configuration, with programmatic dependent launch."""
        found = getattr(self._thread, "configuration", None)
        if found is not None:
            return found
        driver = self._driver
        kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute = driver.CUlaunchAttribute()
        attribute.id = kind
        attribute.value.programmaticStreamSerializationAllowed = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = self._shape[:3]
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._shape[3:6]
        launch.sharedMemBytes = self.plan.shared_bytes
        launch.attrs, launch.numAttrs = [attribute], 1
        self._thread.configuration = launch
        return launch

    def _wait(self) -> None:
        """MQA_DEBUG: what goes wrong on the device is told here, with the kernel's name."""
        try:
            torch.cuda.current_stream(self.index).synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"{self.plan.kernel} failed on the device") from error


def launcher(plan: Plan, device: torch.device) -> Launcher:
    """The launcher of a plan, compiled and loaded at the first request."""
    return _launcher(plan, device, devices.get_pdl(device), config.version())


@functools.lru_cache(maxsize=1024)
def _launcher(
    plan: Plan,
    device: torch.device,
    pdl: bool,  # noqa: FBT001
    _version: int,
) -> Launcher:
    """`_version`: of the settings, which may say what kernels are compiled for."""
    return Launcher(plan, device, pdl=pdl)


_functions: dict[tuple[Kernel, int, str], Any] = {}
_libraries: list[tuple[Any, bytearray]] = []
"""With the logs that the driver may still write to: it may assemble PTX later than it is given."""
_LOG_BYTES = 16 * 1024


def load(kernel: Kernel, device: torch.device, shared_bytes: int) -> Any:
    """The driver's function of a kernel on `device`, which may use `shared_bytes` a block."""
    global _loads
    given: int | None = device.index
    index = torch.cuda.current_device() if given is None else given
    arch = targets.of(kernel, index)
    key = (kernel, index, arch)
    found = _functions.get(key)
    if found is not None:
        return found
    binary = cache.get(kernel, arch)
    with _lock, torch.cuda.device(index):
        _bind(index)
        if key in _functions:
            return _functions[key]
        with _relaxed_capture():
            _functions[key] = _load(kernel, binary, shared_bytes)
        _loads += 1
        return _functions[key]


_contexts: dict[int, Any] = {}


def _bind(index: int) -> None:
    """Make the device's primary context, which torch uses too, current in this thread: torch does
    so only when the thread first needs the device."""
    driver = _driver()
    if index not in _contexts:
        driver.cuInit(0)
        error, context = driver.cuDevicePrimaryCtxRetain(index)
        if int(error):
            raise RuntimeError(f"no context on CUDA device {index}: {_reason(int(error))}")
        _contexts[index] = context
    driver.cuCtxSetCurrent(_contexts[index])


def _load(kernel: Kernel, binary: Binary, shared_bytes: int) -> Any:
    """A cubin is loaded as it is; PTX is assembled by the driver, which tells in a log what is
    wrong with it."""
    driver = _driver()
    names = driver.CUjit_option
    none: list[Any] = []
    image, options, values, log = binary.image, none, none, bytearray(_LOG_BYTES)
    if not image:
        image = binary.ptx.encode() + b"\0"
        options = [names.CU_JIT_ERROR_LOG_BUFFER, names.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        values = [log, len(log)]
    loaded = driver.cuLibraryLoadData(image, options, values, len(options), none, none, 0)
    library = _checked(loaded, kernel, "load", log)
    _libraries.append((library, log))
    entry = _checked(
        driver.cuLibraryGetKernel(library, binary.symbol.encode()), kernel, "find", log
    )
    function = _checked(driver.cuKernelGetFunction(entry), kernel, "load", log)
    if shared_bytes > _DEFAULT_SHARED_BYTES:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes), kernel, "set up")
    return function


def _checked(
    result: tuple[Any, ...], kernel: Kernel, step: str, log: bytes | bytearray = b""
) -> Any:
    error, *values = result
    if int(error):
        said = log.partition(b"\0")[0].decode(errors="replace").strip()
        text = f"cannot {step} {kernel}: {_reason(int(error))}"
        raise RuntimeError(f"{text}\n{said}" if said else text)
    return values[0] if values else None


def _reason(error: int) -> str:
    driver = _driver()
    status, text = driver.cuGetErrorString(driver.CUresult(error))
    name = driver.CUresult(error).name
    return f"{name}, {text.decode()}" if not int(status) else name


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets this thread do what a stream capture forbids, such as loading code."""
    driver = _driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


class _Encoded:
    """A tensor map as the driver has it, for the addresses that were seen last."""

    def __init__(self, map: TensorMap) -> None:
        self._map = map
        self._known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= _MAPS:
                self._known.clear()
            found = self._known[address] = encode(_driver(), self._map, address)
        return found
