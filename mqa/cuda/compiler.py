"""A kernel becomes a binary: NVRTC, what it reads, and what its log says.

Nothing but NVRTC and headers is needed: no GPU, no driver, no nvcc, no host compiler. Binaries
are kept by `mqa.cuda.cache`; this module compiles anew each time that it is asked.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mqa
from mqa import config
from mqa.cuda import headers
from mqa.cuda.plan import Kernel
from mqa.errors import CompileError, CompilerUnavailableError

_UNIT_NAME = "mqa_kernel.cu"
_FLAGS = (
    "-std=c++17",
    "-default-device",
    "-lineinfo",
    "--ptxas-options=-v",
    # NVRTC's own cache, which it has where there is a driver, answers without a ptxas log.
    "--no-cache",
)

_WIDE = re.DOTALL | re.MULTILINE
_POSITION = re.compile(
    r"""^(?P<file>\S.*?)\((?P<line>\d+)\):[ ]
      | \bat[ ]line[ ](?P<user>\d+)(?:[ ]of[ ](?P<user_file>\S+))?  # who instantiated the template
      | ^ptxas[ ].*?,[ ]line[ ](?P<ptx>\d+);""",
    re.MULTILINE | re.VERBOSE,
)
"""Where a log points to. An instantiation names its file only if it isn't that of the error."""

_lock = threading.Lock()
_compilations = 0


@dataclass(frozen=True, slots=True)
class Binary:
    """What NVRTC made of a kernel."""

    image: bytes
    """The cubin; empty if it was not asked for, and of virtual architectures."""
    symbol: str
    """Mangled name of the kernel in it."""
    log: str
    """What the compiler and ptxas said: warnings, registers, spills."""
    ptx: str
    """PTX that the cubin is assembled from. Files in it are those of the compiling machine."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes, by ptxas."""

    registers: int
    spill_bytes: int
    """Stores and loads of spilled registers, added up."""
    shared_bytes: int
    """Static shared memory; what a launch adds is not in it."""


def compile_kernel(kernel: Kernel, arch: str, *, assemble: bool = True) -> Binary:
    """Compile `kernel` for an architecture such as "sm_90a"; for a virtual one ("compute_80"), or
    with `assemble=False`, to PTX alone, in a third to a half less time.

    Any thread may call it, and threads compile at the same time. Raises `CompileError` where the
    source is wrong, `CompilerUnavailableError` where NVRTC or headers are missing, and
    `ValueError` where `arch` is not of the form sm_<number>[a or f] or compute_<number>.
    """
    if not re.fullmatch(r"sm_\d+[af]?|compute_\d+", arch):
        expected = "an architecture such as 'sm_90a' or 'compute_80'"
        raise ValueError(f"arch={arch!r}, expected {expected}")
    assemble = assemble and not arch.startswith("compute_")
    nvrtc = _nvrtc()
    options = (*flags(arch, assemble=assemble), *_include_flags())
    unit, name = translation_unit(kernel).encode(), str(kernel).encode()
    program = _value(nvrtc.nvrtcCreateProgram(unit, _UNIT_NAME.encode(), 0, [], []))
    try:
        _value(nvrtc.nvrtcAddNameExpression(program, name))
        _count()
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        if int(status):
            raise CompileError(_report(kernel, arch, options, log, ptx))
        image = b""
        if assemble:
            image = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        symbol = _value(nvrtc.nvrtcGetLoweredName(program, name)).decode()
        return Binary(image, symbol, log, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compilations() -> int:
    """How many kernels this process has given to NVRTC, failures included."""
    return _compilations


def unavailable() -> str | None:
    """Why nothing can be compiled here and what to install; None if all is there."""
    try:
        _nvrtc()
        headers.find()
    except CompilerUnavailableError as error:
        return str(error)
    return None


def translation_unit(kernel: Kernel) -> str:
    """What is compiled. The instantiation is asked for by name and is not in it."""
    return f'#include "{kernel.source}"\n'


def flags(arch: str, *, assemble: bool = True) -> tuple[str, ...]:
    """Options of every compilation for `arch`, the include path aside."""
    target = arch if assemble else arch.replace("sm_", "compute_")
    return (*_FLAGS, f"-arch={target}", *config.nvrtc_options())


def sources() -> Path:
    """Directory of the CUDA sources: the checkout's `csrc`, else the wheel's."""
    package = Path(mqa.__file__).resolve().parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "csrc").is_dir():
        return checkout / "csrc"
    return package / "csrc"


def sources_digest() -> str:
    """SHA-256 of the names and contents of all CUDA sources, in hex: what computed with the same
    one ran the same kernels."""
    root, digest = sources(), hashlib.sha256()
    for path in sorted(root.rglob("*.cuh")):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@functools.cache
def release() -> tuple[int, int]:
    """Major and minor release of NVRTC, which are those of the CUDA that its cubins need."""
    major, minor = _nvrtc().nvrtcVersion()[1:]
    return int(major), int(minor)


@functools.cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities, times 10, that NVRTC compiles for."""
    nvrtc = _nvrtc()
    return tuple(sorted(map(int, _value(nvrtc.nvrtcGetSupportedArchs()))))


@functools.cache
def identity() -> str:
    """Differs between releases and builds of NVRTC; `nvrtcVersion` leaves out the patch level."""
    nvrtc = _nvrtc()
    program = _value(nvrtc.nvrtcCreateProgram(b"", b"empty.cu", 0, [], []))
    try:
        _value(nvrtc.nvrtcCompileProgram(program, 0, []))
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.partition(".target")[0]


def findings(log: str) -> list[str]:
    """Lines of a log that a kernel for tensor cores must not have.

    `setmaxnreg` ignored (C7508), `wgmma` serialised (C7510 to C7519), registers spilled.
    """
    wrong = re.compile(r"\(C75(?:08|1\d)\)|\b[1-9]\d* bytes spill (?:stores|loads)")
    return [line.strip() for line in log.splitlines() if wrong.search(line)]


def usage(binary: Binary) -> Usage | None:
    """Registers and memory of the kernel; None where the log doesn't tell."""
    name = re.escape(binary.symbol)
    entry = re.search(
        rf"Compiling entry function '{name}'.*?\n([^\n]*Used .*?)$", binary.log, _WIDE
    )
    spills = re.search(rf"Function properties for {name}\n(.*?)$", binary.log, _WIDE)
    if entry is None or spills is None:
        return None
    return Usage(
        registers=_number(r"(\d+) registers", entry[1]),
        spill_bytes=_number(r"(\d+) bytes spill stores", spills[1])
        + _number(r"(\d+) bytes spill loads", spills[1]),
        shared_bytes=_number(r"(\d+) bytes smem", entry[1]),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _count() -> None:
    global _compilations
    with _lock:
        _compilations += 1


@functools.cache
def _nvrtc() -> Any:
    """The bindings, with the library behind them loaded."""
    try:
        from cuda.bindings import nvrtc

        _value(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise CompilerUnavailableError(
            f"NVRTC, which compiles the CUDA kernels, cannot be loaded: {error}\n"
            f"To install it: {headers.INSTALL}"
        ) from error
    return nvrtc


def _value(answer: tuple[Any, ...]) -> Any:
    """What a call of NVRTC returned beside its status."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"NVRTC failed: {status!r}")
    return values[0] if values else None


def _bytes(size: Callable[..., Any], read: Callable[..., Any], program: Any) -> bytes:
    buffer = bytearray(_value(size(program)))
    _value(read(program, buffer))
    return bytes(buffer)


def _text(size: Callable[..., Any], read: Callable[..., Any], program: Any) -> str:
    return _bytes(size, read, program).rstrip(b"\0 \n").decode(errors="replace")


def _include_flags() -> Iterator[str]:
    for directory in (sources(), *headers.find().directories):
        yield f"-I{directory}"


def _report(kernel: Kernel, arch: str, options: tuple[str, ...], log: str, ptx: str) -> str:
    """All that is needed to understand a failure without running it again."""
    lines = [f"cannot compile {kernel} of {kernel.source} for {arch}"]
    lines.append(f"options: {' '.join(options)}")
    lines += dict.fromkeys(_places(kernel, log, ptx))  # Each once: macros and templates repeat.
    return "\n".join([*lines, "log:", log])


def _places(kernel: Kernel, log: str, ptx: str) -> Iterator[str]:
    """file:line and text of each line that the log refers to."""
    file = ""
    for found in re.finditer(_POSITION, log):
        file = found["file"] or file
        if found["file"] == _UNIT_NAME:
            yield _place(file, int(found["line"]), translation_unit(kernel))
        elif found["ptx"]:
            yield _place("ptx", int(found["ptx"]), ptx)
            yield from _source_of(int(found["ptx"]), ptx)
        else:
            yield from _source_place(found["user_file"] or file, found["line"] or found["user"])


def _source_of(number: int, ptx: str) -> Iterator[str]:
    """The source line that a line of PTX comes from, if the PTX tells."""
    before = "\n".join(ptx.splitlines()[:number])
    positions = re.findall(r"^\s*\.loc\s+(\d+) (\d+) ", before, re.MULTILINE)
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(.*?)"', ptx, re.MULTILINE))
    for index, line in positions[-1:]:
        if index in files:
            yield from _source_place(files[index], line)


def _source_place(file: str, number: str) -> Iterator[str]:
    """Nothing for what is no file, such as the name expression, which has lines in the log too."""
    try:
        text = Path(file).read_text(errors="replace")
    except OSError:
        return
    yield _place(file, int(number), text)


def _place(file: str, number: int, text: str) -> str:
    lines = text.splitlines()
    return f"{file}:{number}: {lines[number - 1].strip() if 0 < number <= len(lines) else ''}"
