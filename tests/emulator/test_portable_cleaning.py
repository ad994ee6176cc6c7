"""-inf by ordinary stores: every entry outside the windows, no other, whatever the addresses."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MARKS

from mqa.cuda import compiler
from mqa.cuda.compiler import Binary
from mqa.cuda.operands import CXX
from mqa.cuda.plan import Kernel
from mqa.emulator import run

pytestmark = MARKS
SOURCE = Path(__file__).resolve().parent / "portable" / "clean.cuh"
MINUS_INFINITY = {"float32": 0xFF800000, "bfloat16": 0xFF80, "float16": 0xFC00}
KEPT = 0x5A5A
"""What entries hold that nobody is to write."""


@functools.cache
def binary(logits: str) -> Binary:
    kernel = Kernel(str(SOURCE), "mqa::test::clean", (CXX[logits],))
    return compiler.compile_kernel(kernel, "sm_80", assemble=False)


@pytest.mark.parametrize("logits", MINUS_INFINITY)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 6),
    width=st.sampled_from([1, 3, 8, 40, 531]),
    pad=st.integers(0, 9),
    offset=st.integers(0, 7),
    grid=st.integers(1, 14),
    threads=st.sampled_from([32, 64, 256]),
    compressed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_entries_outside_the_windows_alone_are_written(
    logits: str,
    rows: int,
    width: int,
    pad: int,
    offset: int,
    grid: int,
    threads: int,
    compressed: bool,
    seed: int,
) -> None:
    draw, tokens = np.random.default_rng(seed), width + 5 * compressed
    start, end = draw.integers(-3, tokens + 4, (2, rows)).astype(np.int32)
    kind = np.uint32 if logits == "float32" else np.uint16
    stride = width + pad
    whole = np.full(offset + rows * stride, KEPT, kind)
    seen = whole[offset:]
    args = [seen, start, end, stride, rows, tokens, width, int(compressed)]
    run(binary(logits).ptx, binary(logits).symbol, grid, threads, args, schedule="random")
    want = np.full((rows, stride), KEPT, kind)
    for row in range(rows):
        first, last = np.clip((start[row], end[row]), 0, tokens)
        length = max(last - first, 0)
        begin = 0 if compressed else first
        outside = np.ones(width, bool)
        outside[begin : begin + length] = False
        want[row, :width][outside] = MINUS_INFINITY[logits]
    assert np.array_equal(seen.reshape(rows, stride), want)
    assert (whole[:offset] == KEPT).all()
