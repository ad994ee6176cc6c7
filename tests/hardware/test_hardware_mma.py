"""`mma.sync` of bfloat16 on SM90 sums as `HOPPER_MMA_BF16` says, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from mqa.testing import HOPPER_MMA_BF16

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import harness
import tiles
from tiles import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def run(batch: Batch) -> np.ndarray:
    """Bits of D of every tile on the GPU."""
    d = harness.zeros((len(batch.a), tiles.ROWS, tiles.ROWS), np.float32)
    a, b = harness.Buffer(batch.a), harness.Buffer(batch.b)
    c = d if batch.c is None else harness.Buffer(batch.c)
    sizes = batch.a.shape[2], int(batch.c is not None)
    harness.launch("mma.cu", "multiply", a, b, c, d, *sizes, grid=len(batch.a))
    return d.read().view(np.uint32)


def model_bits(batch: Batch) -> np.ndarray:
    a, b = tiles.values(batch.a), tiles.values(batch.b)
    starts = [None] * len(a) if batch.c is None else list(batch.c.astype(np.float64))
    dots = HOPPER_MMA_BF16.dots
    return np.stack([tiles.bits(dots(*one)) for one in zip(a, b, starts, strict=True)])


@pytest.mark.parametrize("regime", tiles.PAIRS16)
def test_random_tiles_have_the_bits_of_the_model(regime: str) -> None:
    for batch in tiles.random_batches(False, regime):
        np.testing.assert_array_equal(run(batch), model_bits(batch), batch.name)


def test_zeros_nans_and_extremes_have_the_bits_of_the_model() -> None:
    with np.errstate(invalid="ignore"):
        for batch in tiles.special_batches(False):
            np.testing.assert_array_equal(run(batch), model_bits(batch), batch.name)
