"""`mma.sync` sums as the models of the GPU at hand say, bit for bit: bfloat16, and float16 as the
portable kernels use it, with E4M3 in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mqa.testing import FusedTruncating
from mqa.testing.accumulators import AMPERE_BF16, AMPERE_F16, HOPPER_MMA_BF16, HOPPER_MMA_F16

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import harness
import tiles
from tiles import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ampere")]
MODELS = {"bf16": (AMPERE_BF16, HOPPER_MMA_BF16), "f16": (AMPERE_F16, HOPPER_MMA_F16)}
"""By type of operands, before Hopper and from it on."""
SHIFTS = {"plain": (0, 0), "shifted": (7, -8)}
"""Exponents that q and k get as well: for GPUs that convert E4M3 by its bits k comes as 2^-8 k, so
that its subnormals are those of float16."""


def run(batch: Batch, element: str) -> np.ndarray:
    """Bits of D of every tile on the GPU."""
    d = harness.zeros((len(batch.a), tiles.ROWS, tiles.ROWS), np.float32)
    a, b = harness.Buffer(batch.a), harness.Buffer(batch.b)
    c = d if batch.c is None else harness.Buffer(batch.c)
    sizes, defines = (batch.a.shape[2], int(batch.c is not None)), (f'TYPES="{element}.{element}"',)
    harness.launch("mma.cu", "multiply", a, b, c, d, *sizes, defines=defines, grid=len(batch.a))
    return d.read().view(np.uint32)


def model_bits(batch: Batch, model: FusedTruncating) -> np.ndarray:
    a, b = tiles.values(batch.a), tiles.values(batch.b)
    starts = [None] * len(a) if batch.c is None else list(batch.c.astype(np.float64))
    return np.stack([tiles.bits(model.dots(*one)) for one in zip(a, b, starts, strict=True)])


def model(before_hopper: FusedTruncating, later: FusedTruncating) -> FusedTruncating:
    return before_hopper if harness.capability() < (9, 0) else later


def in_float16(batches: Iterator[Batch], shifts: tuple[int, int]) -> Iterator[Batch]:
    """The same tiles of E4M3, times two powers of two; C with them."""
    for batch in batches:
        a, b = (
            np.ldexp(tiles.values(codes), shift).astype(np.float16)
            for codes, shift in zip((batch.a, batch.b), shifts, strict=True)
        )
        c = None if batch.c is None else np.ldexp(batch.c, sum(shifts)).astype(np.float32)
        yield replace(batch, a=a, b=b, c=c)


def assert_bits(batches: Iterator[Batch], element: str) -> None:
    """Those of the model that is said to be the GPU's."""
    wanted = model(*MODELS[element])
    for batch in batches:
        np.testing.assert_array_equal(run(batch, element), model_bits(batch, wanted), batch.name)


@pytest.mark.parametrize("regime", tiles.PAIRS16)
def test_random_tiles_have_the_bits_of_the_model(regime: str) -> None:
    assert_bits(tiles.random_batches(False, regime), "bf16")


def test_zeros_nans_and_extremes_have_the_bits_of_the_model() -> None:
    with np.errstate(invalid="ignore"):
        assert_bits(tiles.special_batches(False), "bf16")


@pytest.mark.parametrize("shifts", SHIFTS.values(), ids=SHIFTS)
@pytest.mark.parametrize("regime", tiles.PAIRS8)
def test_e4m3_in_float16_has_the_bits_of_the_model(regime: str, shifts: tuple[int, int]) -> None:
    assert_bits(in_float16(tiles.random_batches(True, regime), shifts), "f16")


@pytest.mark.parametrize("shifts", SHIFTS.values(), ids=SHIFTS)
def test_extremes_of_e4m3_in_float16_have_the_bits_of_the_model(shifts: tuple[int, int]) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        assert_bits(in_float16(tiles.special_batches(True), shifts), "f16")
