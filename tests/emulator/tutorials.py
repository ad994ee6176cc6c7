"""Kernels of the installed `nvidia-cutlass` package, compiled when tests run, for the emulator.

nvcc makes PTX of a tutorial and an object of its host code. That is linked with
`foreign/runtime.cpp`, which writes down what the tutorial launches, instead of CUDA's runtime. What
it wrote becomes arguments for `mqa.emulator.run`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqa.cuda.tensor_map import DESCRIPTOR_BYTES, TensorMap
from mqa.emulator import BoundMap, parser, run

HERE = Path(__file__).resolve().parent
MAP_MAGIC = b"recorded map".ljust(16, b"\0")
Array = np.ndarray[Any, Any]
# As in the driver's API: bytes of an element by data type, span by swizzle.
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
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


@dataclass
class Tutorial:
    """A tutorial as a program that records its launch, and its kernels' PTX."""

    folder: Path
    program: Path
    ptx: str
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

    def run(self, ptx: str, **options: Any) -> None:
        """Execute the kernel; `memory` is changed."""
        shape = (self.grid, self.block, self.arguments())
        run(ptx, self.kernel, *shape, smem_bytes=self.shared, cluster=self.cluster, **options)


def start_compiling(source: Path, file: Path, folder: Path) -> subprocess.Popen[bytes]:
    """nvcc on a tutorial: an object file with PTX in it, and the PTX beside it."""
    folder.mkdir()
    includes = [f"-I{source / part}" for part in ("include", "tools/util/include")]
    target = ["-gencode", "arch=compute_90a,code=compute_90a", "--expt-relaxed-constexpr"]
    options = [
        "-std=c++17",
        "--keep",
        "--keep-dir",
        str(folder),
        "-c",
        "-o",
        str(folder / "host.o"),
    ]
    with (folder / "log").open("wb") as log:
        command = ["nvcc", *target, *options, *includes, str(file)]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def link(folder: Path, name: str) -> Tutorial:
    """The program of a tutorial that was compiled, with the runtime that records."""
    runtime, program = folder / "runtime.o", folder / "program"
    made = ["nvcc", "-std=c++17", "-c", "-o", str(runtime), str(HERE / "foreign" / "runtime.cpp")]
    for command in (made, ["g++", "-o", str(program), str(folder / "host.o"), str(runtime)]):
        subprocess.run(command, check=True, capture_output=True)
    ptx = (folder / f"{name}.ptx").read_text()
    entries = parser.parse(ptx).entries
    sizes = {entry.name: [param.size for param in entry.params] for entry in entries.values()}
    return Tutorial(folder, program, ptx, sizes)


def launch(tutorial: Tutorial, folder: Path, *arguments: object) -> Launch:
    """Run a tutorial's program up to its first launch."""
    lines = (" ".join(map(str, [name, *sizes])) for name, sizes in tutorial.sizes.items())
    (folder / "sizes").write_text("\n".join(lines) + "\n")
    command = [str(tutorial.program), *map(str, arguments)]
    environment = {**os.environ, "RECORD": str(folder)}
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
        name, "BYTES", size, tuple(shape), tuple(strides), tuple(box), SPANS[swizzle]
    )
    return BoundMap(described, found.memory[address])
