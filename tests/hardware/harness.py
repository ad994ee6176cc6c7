"""Compiles a CUDA file of this folder with NVRTC and runs its kernels on numpy arrays.

Needs cuda.bindings and numpy, and for running a GPU, for most files of compute capability 9.0.
Nothing of `mqa` takes part, and the kernels share no code with its kernels, so that one slip can't
hide in both.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

HERE = Path(__file__).resolve().parent
OPTIONS = ("-std=c++17", "-default-device")
HOPPER = "sm_90a"
GUARD_BYTES = 65536
GUARD = 0x55


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returned, its status removed; raises if that is an error."""
    status, *results = answer
    if int(status) != 0:
        raise RuntimeError(status.name)
    return results[0] if len(results) == 1 else results


def cubin(file: str, *defines: str, arch: str = HOPPER) -> bytes:
    """The machine code of a file, compiled with these macros ("NAME=value")."""
    return _compiled(file, defines, arch, "CUBIN")


def ptx(file: str, *defines: str, arch: str) -> str:
    """The same as PTX."""
    return _compiled(file, defines, arch, "PTX").rstrip(b"\0").decode()


@functools.cache
def _compiled(file: str, defines: tuple[str, ...], arch: str, kind: str) -> bytes:
    source = (HERE / file).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    flags = (f"-arch={arch}", *OPTIONS, *(f"-D{define}" for define in defines))
    options = [flag.encode() for flag in flags]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file} {' '.join(defines)}: {status.name}\n{log.decode()}")
    code = bytearray(checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


@functools.cache
def _context() -> Any:
    """The primary context of device 0, the one that torch uses too, made current."""
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    return context


def capability() -> tuple[int, int]:
    _context()
    attribute = driver.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return tuple(checked(driver.cuDeviceGetAttribute(name, 0)) for name in (major, minor))


class Buffer:
    """A copy of an array in device memory, `GUARD` bytes before and after it."""

    def __init__(self, array: np.ndarray) -> None:
        _context()
        self._like = array
        self._begin = checked(driver.cuMemAlloc(array.nbytes + 2 * GUARD_BYTES))
        self.address = int(self._begin) + GUARD_BYTES
        everything = np.full(array.nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        everything[GUARD_BYTES:-GUARD_BYTES] = np.frombuffer(array.tobytes(), np.uint8)
        checked(driver.cuMemcpyHtoD(self._begin, everything.ctypes.data, everything.nbytes))

    def __del__(self) -> None:
        driver.cuMemFree(self._begin)

    def bytes(self) -> np.ndarray:
        """All bytes as they are now, guards included."""
        everything = np.empty(self._like.nbytes + 2 * GUARD_BYTES, np.uint8)
        checked(driver.cuMemcpyDtoH(everything.ctypes.data, self._begin, everything.nbytes))
        return everything

    def read(self) -> np.ndarray:
        """The array as it is now. The guards must be whole."""
        everything = self.bytes()
        middle = everything[GUARD_BYTES:-GUARD_BYTES]
        assert (everything[:GUARD_BYTES] == GUARD).all()
        assert (everything[-GUARD_BYTES:] == GUARD).all()
        return middle.view(self._like.dtype).reshape(self._like.shape).copy()


def zeros(shape: int | tuple[int, ...], dtype: type) -> Buffer:
    return Buffer(np.zeros(shape, dtype))


@functools.cache
def _function(file: str, defines: tuple[str, ...], kernel: str) -> Any:
    _context()
    major, minor = capability()
    arch = HOPPER if (major, minor) == (9, 0) else f"sm_{major}{minor}"
    module = checked(driver.cuModuleLoadData(cubin(file, *defines, arch=arch)))
    return checked(driver.cuModuleGetFunction(module, kernel.encode()))


def launch(
    file: str,
    kernel: str,
    *arguments: Any,
    defines: tuple[str, ...] = (),
    grid: int = 1,
    block: int = 128,
    dynamic: int = 0,
) -> None:
    """Runs a kernel and waits. Arguments: Buffers, tensor maps, ints (32 bits)."""
    function = _function(file, defines, kernel)
    values = []  # alive until the launch
    pointers = (ctypes.c_void_p * len(arguments))()
    for i, argument in enumerate(arguments):
        if isinstance(argument, driver.CUtensorMap):
            pointers[i] = int(argument.getPtr())
            continue
        is_buffer = isinstance(argument, Buffer)
        value = ctypes.c_uint64(argument.address) if is_buffer else ctypes.c_int32(argument)
        values.append(value)
        pointers[i] = ctypes.addressof(value)
    where = ctypes.addressof(pointers)
    size = (grid, 1, 1, block, 1, 1, dynamic)
    checked(driver.cuLaunchKernel(function, *size, driver.CUstream(0), where, 0))
    checked(driver.cuCtxSynchronize())


def tensor_map(
    address: int,
    element: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: str = "NONE",
    fill: str = "NONE",
) -> Any:
    """A tiled tensor map. Innermost dimension first; strides in bytes, of the outer dimensions."""
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"),
            len(dims),
            address,
            [driver.cuuint64_t(n) for n in dims],
            [driver.cuuint64_t(n) for n in strides],
            [driver.cuuint32_t(n) for n in box],
            [driver.cuuint32_t(1) for _ in dims],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            getattr(driver.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )
    )
