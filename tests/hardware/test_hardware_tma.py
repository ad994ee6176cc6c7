"""Tensor loads and stores on SM90: what they count, write, clip and refuse."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs cuda-python, which brings NVRTC")

import harness
import tma_probe
from tma_probe import Loaded, Triple

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
DATA = tma_probe.tensor(3, 70, 208)  # pages, rows, bytes
LOW, HIGH = -(2**31), 2**31 - 1
SPANS = {"128B": 128, "64B": 64, "32B": 32}


def boxed(data: np.ndarray, box: Triple, at: Triple) -> np.ndarray:
    """The bytes of a box [pages, rows, bytes], zeros where it is outside."""
    indices, inside = [], np.ones(box[::-1], bool)
    for axis, (first, count, extent) in enumerate(
        zip(at[::-1], box[::-1], data.shape, strict=True)
    ):
        index = first + np.arange(count, dtype=np.int64)
        shape = [1, 1, 1]
        shape[axis] = count
        inside &= ((index >= 0) & (index < extent)).reshape(shape)
        indices.append(np.clip(index, 0, extent - 1))
    return np.where(inside, data[np.ix_(*indices)], 0)


def image(
    content: np.ndarray, base: int, swizzle: str = "NONE", offset: int = 0, pitch: int = 0
) -> np.ndarray:
    """All of shared memory with a box at `offset`, its rows `pitch` bytes apart (or dense)."""
    rows = content.reshape(-1, content.shape[-1])
    row, byte = np.indices(rows.shape)
    address = base + offset + row * (pitch or rows.shape[1]) + byte
    lines = SPANS.get(swizzle, 16) // 16
    address ^= (address >> 7) % lines << 4
    shared = np.full(tma_probe.SHARED_BYTES, tma_probe.UNTOUCHED, np.uint8)
    shared[address - base] = rows
    return shared


def assert_image(got: Loaded, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.shared, want)


OUTSIDE = [(208, 0, 0), (0, 70, 0), (-128, 0, 0), (0, -64, 0), (0, 0, -1), (0, 0, 3)]
FAR = [(-4096, 100000, 0), (0, 0, HIGH), (0, 0, LOW), (LOW, LOW, LOW), (HIGH - 15, HIGH, HIGH)]


@pytest.mark.parametrize("at", [(0, 0, 0), (128, 64, 0), (192, 0, 1), (-16, -3, 0)])
def test_a_load_counts_its_whole_box_however_much_is_outside_and_fills_with_zeros(
    at: Triple,
) -> None:
    got = tma_probe.load(DATA, (128, 64, 1), at)
    assert got.counted == 128 * 64
    assert_image(got, image(boxed(DATA, (128, 64, 1), at), got.base))


@pytest.mark.parametrize("at", OUTSIDE + FAR)
def test_a_load_fully_outside_counts_its_whole_box_and_writes_zeros(at: Triple) -> None:
    """Page -1 and page 2^31 - 1 included."""
    got = tma_probe.load(DATA, (128, 64, 1), at)
    assert got.counted == 128 * 64
    assert (got.shared[: 128 * 64] == 0).all()
    assert (got.shared[128 * 64 :] == tma_probe.UNTOUCHED).all()


def test_pages_before_the_first_are_zeros_and_later_ones_of_the_box_are_read() -> None:
    got = tma_probe.load(DATA, (64, 8, 4), (32, 2, -2))
    assert got.counted == 64 * 8 * 4
    assert_image(got, image(boxed(DATA, (64, 8, 4), (32, 2, -2)), got.base))


def test_a_load_clips_an_inner_extent_to_the_element() -> None:
    got = tma_probe.load(DATA, (64, 8, 1), (128, 0, 0), inner=200)  # 200 is no multiple of 16
    assert_image(got, image(boxed(DATA[..., :200], (64, 8, 1), (128, 0, 0)), got.base))


@pytest.mark.parametrize("swizzle", SPANS)
def test_the_swizzle_is_of_absolute_shared_addresses(swizzle: str) -> None:
    span = SPANS[swizzle]
    data = tma_probe.tensor(1, 16, 256)
    for offset in range(0, 16 * span, 128):  # two periods of the pattern
        got = tma_probe.load(data, (span, 16, 1), (0, 0, 0), offset=offset, swizzle=swizzle)
        assert_image(got, image(data[..., :span], got.base, swizzle, offset))


@pytest.mark.parametrize("swizzle", SPANS)
def test_rows_narrower_than_the_swizzle_span_lie_one_span_apart(swizzle: str) -> None:
    """And what lies between them is left alone; only the box's own bytes are counted."""
    span = SPANS[swizzle]
    data = tma_probe.tensor(1, 16, 256)
    for inner in range(16, span, 16):
        got = tma_probe.load(data, (inner, 16, 1), (0, 0, 0), swizzle=swizzle)
        assert got.counted == inner * 16
        assert_image(got, image(data[..., :inner], got.base, swizzle, pitch=span))


@pytest.mark.parametrize("element", ["FLOAT16", "BFLOAT16", "FLOAT32", "TFLOAT32", "FLOAT64"])
def test_the_nan_of_out_of_bounds_elements_is_7ff7_repeated(element: str) -> None:
    size = tma_probe.SIZES[element]
    for at in ((-16 // size, 0, 0), (0, 6, 0)):  # 16 bytes of each row; the last two rows
        data = tma_probe.tensor(1, 8, 128)
        got = tma_probe.load(data, (32 // size, 4, 1), at, element, fill="NAN_REQUEST_ZERO_FMA")
        assert got.counted == 128
        inside = boxed(data, (32, 4, 1), (at[0] * size, *at[1:])).reshape(-1) != 0
        filled = got.shared[:128][~inside].view(np.uint16)
        assert len(filled) == 32
        assert (filled == 0x7FF7).all()


def test_the_nan_fill_is_refused_for_integers() -> None:
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        tma_probe.load(
            tma_probe.tensor(1, 8, 128), (32, 4, 1), (0, 0, 0), "UINT8", fill="NAN_REQUEST_ZERO_FMA"
        )


STORES = [  # element, elements of a row, of them in the box, x, bytes from row to row
    ("FLOAT32", 10, 16, 0, 64),
    ("FLOAT32", 9, 16, 4, 64),
    ("FLOAT32", 11, 16, 8, 64),
    ("UINT8", 1, 64, 0, 64),
    ("UINT8", 47, 64, 0, 64),
    ("BFLOAT16", 17, 32, 0, 64),
    ("FLOAT32", 10, 8, 0, 64),
    ("FLOAT32", 10, 8, 8, 48),
]


@pytest.mark.parametrize(("element", "inner", "box", "x", "pitch"), STORES)
def test_a_store_writes_whole_16_byte_chunks_past_the_inner_extent(
    element: str, inner: int, box: int, x: int, pitch: int
) -> None:
    """The bytes behind the extent are overwritten with what shared memory holds; rows are exact."""
    size = tma_probe.SIZES[element]
    data = tma_probe.tensor(2, 6, pitch)
    got = tma_probe.store(data, (box, 4, 1), (x, 4, 0), element, inner)

    stored = (np.arange(box * size * 4) % 100 + 128).astype(np.uint8).reshape(4, box * size)
    end = min(-(-inner * size // 16) * 16, (x + box) * size)
    want = data.copy()
    want[0, 4:, x * size : end] = stored[:2, : end - x * size]  # rows 6 and 7 are outside
    guard = np.full(harness.GUARD_BYTES, harness.GUARD, np.uint8)
    np.testing.assert_array_equal(got, np.concatenate((guard, want.reshape(-1), guard)))


@pytest.mark.parametrize("at", [(64, 0, 0), (0, 6, 0), (0, 0, 2)])
def test_a_store_fully_past_the_end_completes_and_writes_nothing(at: Triple) -> None:
    data = tma_probe.tensor(2, 6, 64)
    got = tma_probe.store(data, (64, 4, 1), at)
    np.testing.assert_array_equal(got[harness.GUARD_BYTES : -harness.GUARD_BYTES], data.reshape(-1))


ILLEGAL, MISALIGNED = "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS"
FAULTS = {
    "load x=16": None,
    "load x=1": ILLEGAL,
    "load x=8": ILLEGAL,
    "load x=-4": ILLEGAL,
    "load x=1 of float32": ILLEGAL,
    "store x=16": None,
    "store x=8": ILLEGAL,
    "store x=1 of float32": ILLEGAL,
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_inner_coordinate_off_16_bytes_faults(name: str) -> None:
    assert tma_probe.fault(name) == FAULTS[name]


@pytest.mark.parametrize("name", ["store x=-16", "store y=-2", "store z=-1"])
def test_a_store_at_a_negative_coordinate_faults(name: str) -> None:
    assert tma_probe.fault(name) == ILLEGAL


def test_a_load_to_shared_memory_off_128_bytes_faults() -> None:
    assert tma_probe.fault("load to offset 64") == MISALIGNED
