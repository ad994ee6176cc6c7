"""Tensor loads and stores of one box. Those that may fault are run by name, as a script:

    python tests/hardware/tma_probe.py NAME

prints the driver's status if it is an error. A fault ends all use of its process's context.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np

UNTOUCHED = 0xAA
SHARED_BYTES = 24576
SIZES = {"UINT8": 1, "FLOAT16": 2, "BFLOAT16": 2, "FLOAT32": 4, "TFLOAT32": 4, "FLOAT64": 8}
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Loaded:
    counted: int  # bytes that complete_tx took off the barrier
    base: int  # shared address of shared[0]
    shared: np.ndarray  # uint8, UNTOUCHED where nothing was written


def tensor(pages: int, rows: int, row_bytes: int) -> np.ndarray:
    """Bytes 1 ... 99 at random: none is a fill value, a guard or UNTOUCHED."""
    draw = np.random.default_rng(11)
    return draw.integers(1, 100, (pages, rows, row_bytes)).astype(np.uint8)


def _map(buffer: harness.Buffer, data: np.ndarray, element: str, inner: int, **options: Any) -> Any:
    """The map of a [pages, rows, row bytes] array of which `inner` elements a row are named."""
    pages, rows, row_bytes = data.shape
    strides = (row_bytes, rows * row_bytes)
    return harness.tensor_map(buffer.address, element, (inner, rows, pages), strides, **options)


def load(
    data: np.ndarray,
    box: Triple,
    at: Triple,
    element: str = "UINT8",
    inner: int | None = None,
    offset: int = 0,
    **options: str,
) -> Loaded:
    """A box (inner, rows, pages) of a [pages, rows, row bytes] array, to shared[offset:]."""
    buffer = harness.Buffer(data)
    inner = data.shape[-1] // SIZES[element] if inner is None else inner
    view = _map(buffer, data, element, inner, box=box, **options)
    image, report = harness.zeros(SHARED_BYTES, np.uint8), harness.zeros(2, np.uint32)
    harness.launch("tma.cu", "load", view, *at, offset, image, report)
    counted, base = report.read().tolist()
    return Loaded(counted, base, image.read())


def store(
    data: np.ndarray, box: Triple, at: Triple, element: str = "UINT8", inner: int | None = None
) -> np.ndarray:
    """`data` after a store of a box that holds bytes 128 ... 227, guards before and after it."""
    buffer = harness.Buffer(data)
    inner = data.shape[-1] // SIZES[element] if inner is None else inner
    view = _map(buffer, data, element, inner, box=box)
    source = (np.arange(np.prod(box) * SIZES[element]) % 100 + 128).astype(np.uint8)
    harness.launch("tma.cu", "store", view, *at, harness.Buffer(source), len(source))
    return buffer.bytes()


def _load_at(at: Triple, element: str = "UINT8", offset: int = 0) -> Callable[[], object]:
    box = (32 // SIZES[element], 4, 1)
    return lambda: load(tensor(2, 8, 128), box, at, element, offset=offset)


def _store_at(at: Triple, element: str = "UINT8") -> Callable[[], object]:
    return lambda: store(tensor(2, 8, 128), (32 // SIZES[element], 4, 1), at, element)


PROBES: dict[str, Callable[[], object]] = {
    "load x=16": _load_at((16, 1, 0)),
    "load x=1": _load_at((1, 1, 0)),
    "load x=8": _load_at((8, 1, 0)),
    "load x=-4": _load_at((-4, 1, 0)),
    "load x=1 of float32": _load_at((1, 1, 0), "FLOAT32"),
    "load to offset 64": _load_at((0, 1, 0), offset=64),
    "store x=16": _store_at((16, 1, 0)),
    "store x=8": _store_at((8, 1, 0)),
    "store x=1 of float32": _store_at((1, 1, 0), "FLOAT32"),
    "store x=-16": _store_at((-16, 1, 0)),
    "store y=-2": _store_at((0, -2, 0)),
    "store z=-1": _store_at((0, 1, -1)),
}


def fault(name: str) -> str | None:
    """The driver's status after a probe in a process of its own, None if all went well."""
    command = [sys.executable, str(Path(__file__)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr}")
    return done.stdout.strip() or None


def main() -> None:
    try:
        PROBES[sys.argv[1]]()
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
