"""Single instructions on SM90 give what the PTX manual leaves open."""

from __future__ import annotations

import numpy as np
import pytest

from mqa.testing._codes import E4M3

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import harness

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def floats() -> np.ndarray:
    """Every sign and exponent with every high mantissa, any bits, and NaNs of all kinds."""
    draw = np.random.default_rng(1)
    high = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    drawn = draw.integers(0, 2**32, 65536, dtype=np.uint32)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    return draw.permutation(np.concatenate((high, drawn, nans))).view(np.float32)


def converted(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x as E4M3 and as bfloat16 codes, the same whichever half of a pair it is."""
    y = x[::-1].copy()
    e4m3, bf16 = harness.zeros(len(x), np.uint16), harness.zeros(len(x), np.uint32)
    arguments = (harness.Buffer(x), harness.Buffer(y), e4m3, bf16, len(x))
    harness.launch("instructions.cu", "convert", *arguments, grid=64)
    bytes_, halves = e4m3.read(), bf16.read()
    np.testing.assert_array_equal(bytes_ >> 8, (bytes_ & 0xFF)[::-1])
    np.testing.assert_array_equal(halves >> 16, (halves & 0xFFFF)[::-1])
    return bytes_ >> 8, halves >> 16


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest code of each number, ties to the even one, saturating; 0x7F for NaN."""
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    middles = (E4M3[1:127] + E4M3[:126]) / 2
    code = np.searchsorted(middles, magnitude)
    tie = (code < 126) & (magnitude == middles[np.minimum(code, 125)])
    code = code + (tie & (code % 2 == 1))
    return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))


def test_e4m3x2_rounds_to_nearest_even_saturates_and_makes_any_nan_7f() -> None:
    x = floats()
    np.testing.assert_array_equal(converted(x)[0], nearest_e4m3(x))


def test_bf16x2_rounds_to_nearest_even_and_makes_any_nan_7fff() -> None:
    x = floats()
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & 1)) >> np.uint64(16)
    np.testing.assert_array_equal(converted(x)[1], np.where(np.isnan(x), 0x7FFF, rounded))


def test_elect_sync_chooses_the_lowest_lane_of_the_mask() -> None:
    drawn = np.random.default_rng(1).integers(1, 2**32, 40, dtype=np.uint32)
    masks = np.append(drawn, [0xFFFFFFFF, 1, 0x80000000, 0xFFFF0000, 0xAAAAAAAA]).astype(np.uint32)
    lowest = [(int(mask) & -int(mask)).bit_length() - 1 for mask in masks]
    leaders, named = (harness.zeros(len(masks), np.int32) for _ in range(2))
    arguments = (harness.Buffer(masks), leaders, named, len(masks))
    harness.launch("instructions.cu", "elect", *arguments, block=32)
    assert leaders.read().tolist() == lowest
    assert named.read().tolist() == lowest


def test_the_cluster_rank_is_bits_24_and_up_of_a_shared_address() -> None:
    """Also of the address that a CTA sees for its own memory: &0xFEFFFFFF names the even CTA."""
    out = harness.zeros((4, 9), np.uint32)
    harness.launch("instructions.cu", "cluster_addresses", out, grid=4, block=32)
    table = out.read()
    for rank, row in enumerate(table):
        offset = int(row[0]) & 0xFFFFFF
        assert row[0] == rank << 24 | offset
        assert row[1:5].tolist() == [target << 24 | offset for target in range(4)]
        assert row[5:].tolist() == [100, 101, 102, 103]


def test_shared_memory_starts_at_400() -> None:
    """The first KiB is the system's: offset 0 of the window is not the first byte of a kernel."""
    out = harness.zeros(1, np.uint32)
    harness.launch("instructions.cu", "shared_start", out, block=32, dynamic=1024)
    assert out.read().tolist() == [0x400]
