"""Launches of the small Blackwell kernel of tests: a product of FP8, MXFP8 or MXFP4 matrices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.plan import Kernel
from mqa.cuda.tensor_map import tensor_map
from mqa.emulator import BoundMap, EmulationError, Report, run

Array = np.ndarray[Any, Any]
SOURCE = Path(__file__).resolve().parent / "blackwell" / "product.cuh"
ARCH = "sm_100f"
FORMATS = {"fp8": "kFp8", "mxfp8": "kMxFp8", "mxfp4": "kMxFp4"}
ROWS, COLUMNS, STEP_BYTES, WARPS, CTAS = 128, 64, 128, 6, 2
SHARED_BYTES = 54272
TILES, STEPS = 7, 3
"""At least three tiles for each of two CTAs, and more steps of K than stages."""
E4M3_INTEGERS = (0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44)
"""-3 to 3."""
E2M1_NUMBERS = {0: 0.0, 1: 0.5, 2: 1.0, 4: 2.0, 5: 3.0, 10: -1.0, 11: -1.5, 14: -4.0}


def compile_product(format: str, source: Path = SOURCE) -> Binary:
    template = f"mqa::test::Format::{FORMATS[format]}"
    kernel = Kernel(str(source), "mqa::test::product", (template,))
    return compiler.compile_kernel(kernel, ARCH, assemble=False)


@dataclass
class Product:
    """Operands, and what the kernel has to make of them."""

    a: Array
    b: Array
    scales: Array
    out: Array
    right: Array

    def launch(self, binary: Binary, schedule: str, seed: int = 0, **options: Any) -> Report | None:
        """The report of a run, if there is one."""
        self.out[:] = np.nan
        maps = [
            BoundMap(tensor_map(torch.from_numpy(x), (rows, STEP_BYTES), name=name, swizzle=128),
                     torch.from_numpy(x))
            for name, x, rows in (("a", self.a, ROWS), ("b", self.b, COLUMNS))
        ]  # fmt: skip
        args = [*maps, self.scales, self.out, len(self.a) // ROWS, self.a.shape[1] // STEP_BYTES]
        try:
            run(
                binary.ptx,
                binary.symbol,
                CTAS,
                WARPS * 32,
                args,
                smem_bytes=SHARED_BYTES,
                schedule=schedule,
                seed=seed,
                **options,
            )
        except EmulationError as error:
            return error.report
        return None

    def is_right(self) -> bool:
        return np.array_equal(self.out, self.right)


def make_product(format: Literal["fp8", "mxfp8", "mxfp4"], seed: int = 0) -> Product:
    """Small numbers and scales near 1: no sum is rounded, and the emulator knows."""
    generator = np.random.default_rng(seed)
    rows, width = TILES * ROWS, STEPS * STEP_BYTES
    a, a_values = _operand(generator, format, rows, width)
    b, b_values = _operand(generator, format, COLUMNS, width)
    scales = np.zeros(16, np.uint8)
    if format != "fp8":
        a_scales, b_scales = (
            generator.integers(126, 130, (len(x), x.shape[1] // 32), np.uint8)
            for x in (a_values, b_values)
        )
        a_values = a_values * np.repeat(2.0 ** (a_scales - 127.0), 32, axis=1)
        b_values = b_values * np.repeat(2.0 ** (b_scales - 127.0), 32, axis=1)
        scales = np.concatenate([_images(a_scales), _images(b_scales)])
    right = (a_values @ b_values.T).astype(np.float32)
    return Product(a, b, scales, np.zeros((rows, COLUMNS), np.float32), right)


def _operand(
    generator: np.random.Generator, format: str, rows: int, width: int
) -> tuple[Array, Array]:
    """Bytes and values of a matrix."""
    if format != "mxfp4":
        chosen = generator.integers(0, len(E4M3_INTEGERS), (rows, width))
        return np.array(E4M3_INTEGERS, np.uint8)[chosen], chosen - 3.0
    codes = np.array(list(E2M1_NUMBERS), np.uint8)
    chosen = generator.integers(0, len(codes), (rows, 2 * width))
    nibbles = codes[chosen]
    values = np.array(list(E2M1_NUMBERS.values()))[chosen]
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, values


def _images(scales: Array) -> Array:
    """Each 128 rows and 4 blocks as the 512 bytes that tcgen05.cp takes: row r and block b lie at
    16 (r % 32) + 4 (r / 32) + b. Tiles of rows first, then blocks."""
    rows, blocks = -(-len(scales) // ROWS) * ROWS, scales.shape[1]
    padded = np.full((rows, blocks), 127, np.uint8)
    padded[: len(scales)] = scales
    tiles = padded.reshape(rows // ROWS, 4, 32, blocks // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)
