"""Kernels of the installed `nvidia-cutlass` package, compiled when tests run, for the emulator.

nvcc makes PTX of a tutorial and an object of its host code. That is linked with
`foreign/runtime.cpp`, which writes down what the tutorial launches, instead of CUDA's runtime. What
it wrote becomes arguments for `mqa.emulator.run`.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqa.cuda.tensor_map import DESCRIPTOR_BYTES, TensorMap
from mqa.emulator import BoundMap, Summary, parser, run

HERE = Path(__file__).resolve().parent
MAP_MAGIC = b"recorded map".ljust(16, b"\0")
Array = np.ndarray[Any, Any]
# As in the driver's API: packed data types, bytes of an element, of 16 packed ones, by data type,
# span by swizzle.
PACKED = {13: "16U4_ALIGN8B", 14: "16U4_ALIGN16B"}
ELEMENT_BYTES = {13: 8, 14: 8, 0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
SPANS = {0: 0, 1: 32, 2: 64, 3: 128}


def source() -> Path:
    """Where the package keeps headers and examples; skips the test where something is missing."""
    for program in ("nvcc", "g++"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        files = importlib.metadata.files("nvidia-cutlass") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package nvidia-cutlass is not installed")
    header = next((file for file in files if str(file).endswith("include/cute/tensor.hpp")), None)
    if header is None:
        pytest.skip("nvidia-cutlass has no cute/tensor.hpp")
    return Path(str(header.locate())).parents[2]


def example(name: str) -> Path:
    """A file of the package's examples; skips the test where it is missing."""
    file = source() / "examples" / name
    if not file.exists():
        pytest.skip(f"nvidia-cutlass has no {name}")
    return file


@dataclass
class Tutorial:
    """A tutorial as a program that records its launch, and its kernels' PTX."""

    program: Path
    ptx: str
    architecture: str
    sizes: dict[str, list[int]]


@dataclass
class Launch:
    """What a program asked for."""

    kernel: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    cluster: tuple[int, ...] = (1, 1, 1)
    shared: int = 0
    params: list[bytes] = field(default_factory=list)
    memory: dict[int, Array] = field(default_factory=dict)
    """Contents of allocations, uint8, by their address in the program."""
    maps: list[BoundMap] = field(default_factory=list)

    def arguments(self) -> list[list[Any]]:
        """For `mqa.emulator.run`: addresses and maps in parameters are those of `memory`."""
        return [self._parts(raw) for raw in self.params]

    def _parts(self, raw: bytes) -> list[Any]:
        parts: list[Any] = []
        at = 0
        while at < len(raw):
            word = raw[at : at + 8]
            address = struct.unpack("<Q", word)[0] if len(word) == 8 else -1
            if raw[at:].startswith(MAP_MAGIC):
                parts.append(self.maps[struct.unpack("<Q", raw[at + 16 : at + 24])[0]])
                at += DESCRIPTOR_BYTES
            elif address in self.memory:
                parts.append(self.memory[address])
                at += 8
            else:
                parts.append(word)
                at += len(word)
        return parts

    def run(self, ptx: str, **options: Any) -> Summary:
        """Execute the kernel; `memory` is changed."""
        shape = (self.grid, self.block, self.arguments())
        given: dict[str, Any] = {"smem_bytes": self.shared, "cluster": self.cluster, **options}
        return run(alone(ptx, self.kernel), self.kernel, *shape, **given)


HOPPER, BLACKWELL = "90a", "100a"


@dataclass(frozen=True)
class Source:
    """What nvcc compiles."""

    file: Path
    architecture: str
    includes: tuple[Path, ...] = ()
    definitions: tuple[str, ...] = ()


def once(factory: pytest.TempPathFactory, name: str, commands: Sequence[Sequence[str]]) -> Path:
    """The program that the last of these commands makes, in a folder of its own, once for all
    processes that run tests. It gets `-o` and the program's path."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / f"compiled-{name}"
    with (root / f"compiled-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "program").exists():
            folder.mkdir(exist_ok=True)
            *before, last = commands
            for command in (*before, [*last, "-o", "linking"]):
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                assert done.returncode == 0, done.stdout + done.stderr
            (folder / "linking").rename(folder / "program")
    return folder / "program"


def compiled(factory: pytest.TempPathFactory, name: str, what: Source) -> Tutorial:
    """The program of a source, linked with the runtime that records, and its PTX."""
    program = once(factory, name, _commands(what))
    ptx = (program.parent / f"{what.file.stem}.ptx").read_text()
    entries = parser.parse(ptx).entries
    # Kernels of CUB fill memory, as the tests do.
    sizes = {
        entry.name: [param.size for param in entry.params]
        for entry in entries.values()
        if not entry.name.startswith("_ZN3cub")
    }
    return Tutorial(program, ptx, what.architecture, sizes)


def _commands(what: Source) -> list[list[str]]:
    """nvcc makes an object file with PTX in it, and the PTX beside it."""
    places = [source() / "include", source() / "tools/util/include", *what.includes]
    target = f"arch=compute_{what.architecture},code=compute_{what.architecture}"
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-gencode", target]
    options += ["--keep", "--keep-dir", ".", *(f"-I{place}" for place in places)]
    options += [f"-D{definition}" for definition in what.definitions]
    recorder = str(HERE / "foreign" / "runtime.cpp")
    return [
        ["nvcc", *options, "-c", "-o", "host.o", str(what.file)],
        ["nvcc", "-std=c++17", "-c", "-o", "runtime.o", recorder],
        ["g++", "host.o", "runtime.o"],
    ]


def alone(ptx: str, kernel: str) -> str:
    """A module without its other kernels."""
    starts = [found.start() for found in re.finditer(r"(?m)^(\.visible )?\.entry", ptx)]
    for start, end in zip(starts, [*starts[1:], len(ptx)], strict=True):
        if re.match(rf"(\.visible )?\.entry {re.escape(kernel)}\(", ptx[start:end]):
            return ptx[: starts[0]] + ptx[start:end]
    raise ValueError(f"kernel={kernel!r}, expected one of the module")


def launch(tutorial: Tutorial, folder: Path, *arguments: object) -> Launch:
    """Run a tutorial's program up to its first launch."""
    lines = (" ".join(map(str, [name, *sizes])) for name, sizes in tutorial.sizes.items())
    (folder / "sizes").write_text("\n".join(lines) + "\n")
    command = [str(tutorial.program), *map(str, arguments)]
    capability = tutorial.architecture[:-2]
    environment = {**os.environ, "RECORD": str(folder), "CAPABILITY": capability}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return _read(folder)


def _read(folder: Path) -> Launch:
    found = Launch("")
    for line in (folder / "launch").read_text().splitlines():
        word, *rest = line.split()
        if word == "kernel":
            found.kernel = rest[0]
        elif word in ("grid", "block", "cluster"):
            setattr(found, word, tuple(map(int, rest)))
        elif word == "shared":
            found.shared = int(rest[0])
        elif word == "param":
            found.params.append((folder / rest[0]).read_bytes())
        elif word == "memory":
            found.memory[int(rest[1])] = _aligned((folder / rest[0]).read_bytes())
        else:
            found.maps.append(_map(found, [int(x) for x in rest]))
    return found


def _aligned(data: bytes) -> Array:
    """A copy at an address as aligned as an allocation's."""
    room = np.zeros(len(data) + 512, np.uint8)
    start = -room.ctypes.data % 512
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room[start : start + len(data)]


def _map(found: Launch, numbers: list[int]) -> BoundMap:
    """A tensor map from what the driver was asked to encode."""
    kind, rank, address, *rest = numbers
    shape, rest = rest[:rank], rest[rank:]
    strides, rest = rest[: rank - 1], rest[rank - 1 :]
    box, steps, (interleave, swizzle, _fill) = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
    assert set(steps) == {1}
    assert interleave == 0
    size = ELEMENT_BYTES[kind]
    name = f"map {len(found.maps)}"
    described = TensorMap(
        name,
        PACKED.get(kind, "BYTES"),
        size,
        tuple(shape),
        tuple(strides),
        tuple(box),
        SPANS[swizzle],
    )
    return BoundMap(described, found.memory[address])
