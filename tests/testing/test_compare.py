import ml_dtypes
import numpy as np
import pytest
import torch

from mqa.testing import assert_bitwise, assert_within, round_once, to_tensor

DTYPES = ("float32", "bfloat16", "float16")
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def finite_codes(dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        values = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype]).astype(np.float64)
    return values[np.isfinite(values)]


def test_round_once_keeps_every_bfloat16_and_float16() -> None:
    for dtype in ("bfloat16", "float16"):
        values = finite_codes(dtype)
        assert_bitwise(round_once(values, dtype)[None], values[None])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_round_once_goes_to_the_nearest_and_middles_to_even(dtype: str) -> None:
    values = np.unique(np.abs(finite_codes(dtype)))
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    # A hair off a middle: float32 can't hold it, so rounding through float32 would go wrong.
    hair = (high - low) * 2.0**-30
    for sign in (1, -1):
        np.testing.assert_array_equal(round_once(sign * middle, dtype), sign * even)
        np.testing.assert_array_equal(round_once(sign * (middle + hair), dtype), sign * high)
        np.testing.assert_array_equal(round_once(sign * (middle - hair), dtype), sign * low)


def test_round_once_to_float32_equals_numpy_subnormals_and_overflow_included() -> None:
    draw = np.random.default_rng(1)
    values = np.ldexp(draw.uniform(-2, 2, 20000), draw.integers(-160, 130, 20000))
    with np.errstate(over="ignore"):
        want = values.astype(np.float32).astype(np.float64)
    assert_bitwise(round_once(values, "float32")[None], want[None])


def test_round_once_at_the_edge_of_infinity() -> None:
    edge = {"float32": 2.0**128 - 2.0**103, "bfloat16": 255.5 * 2.0**120, "float16": 65520.0}
    for dtype, first in edge.items():
        assert np.isposinf(round_once(np.array([first]), dtype)[0])
        assert np.isfinite(round_once(np.array([np.nextafter(first, 0)]), dtype)[0])
    special = np.array([np.inf, -np.inf, np.nan, -0.0, -(2.0**-200)])
    for dtype in DTYPES:
        assert_bitwise(round_once(special, dtype)[None], np.array([[*special[:4], -0.0]]))


def test_to_tensor_has_the_bits_of_numpy() -> None:
    values = np.array([[1 + 2.0**-8, 1e-7, -65504.0, 3e38, np.nan]])
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            want = values.astype(NUMPY[dtype]).astype(np.float32)
        assert_bitwise(to_tensor(values, dtype).float(), torch.from_numpy(want))


def test_bitwise_tells_zeros_apart_and_takes_any_nan() -> None:
    nan = torch.tensor([[0x7FC00000, -1]], dtype=torch.int32).view(torch.float32)
    assert_bitwise(nan, nan.flip(1))
    with pytest.raises(AssertionError, match=r"got -0.0 \(0x80000000\), wanted 0.0 \(0x00000000\)"):
        assert_bitwise(torch.tensor([[-0.0]]), torch.tensor([[0.0]]))


def test_bitwise_reports_count_place_and_replay_line() -> None:
    got, want = torch.zeros(3, 4), torch.zeros(3, 4)
    got[1, 2], got[2, 0] = 1.5, 2.0
    with pytest.raises(AssertionError) as caught:
        assert_bitwise(got, want, replay="dense fp8 S=3")
    text = str(caught.value)
    assert text.startswith("2 of 12 entries differ in bits; first at row 1, column 2: got 1.5")
    assert text.endswith("\nreplay: dense fp8 S=3")
    assert_bitwise(got, want, where=np.asarray(got == 0))


def test_bitwise_refuses_other_shapes_and_dtypes() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_bitwise(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(AssertionError, match=r"wanted torch\.float16"):
        assert_bitwise(torch.zeros(2, 3), torch.zeros(2, 3).half())


def within(got: float, want: float, bound: float, dtype: torch.dtype = torch.float32) -> None:
    tensor = torch.tensor([[got]], dtype=torch.float64).to(dtype)
    assert_within(tensor, np.array([[want]]), np.array([[bound]]))


@pytest.mark.parametrize(
    ("got", "want", "bound"),
    [
        (1.5, 1.0, 0.5),
        (0.0, 0.0, 0.0),
        (-np.inf, -np.inf, 0.0),
        (np.nan, np.nan, 0.0),
        (-0.0, 0.0, 0.1),
    ],
)
def test_within_accepts(got: float, want: float, bound: float) -> None:
    within(got, want, bound)


@pytest.mark.parametrize(
    ("got", "want", "bound"),
    [
        (1.5, 1.0, 0.25),
        (-0.0, 0.0, 0.0),
        (1e-30, 0.0, 0.0),
        (-np.inf, 0.0, 1e9),
        (0.0, -np.inf, 1e9),
        (-3e38, -np.inf, 1e9),
        (np.nan, 0.0, 1e9),
        (0.0, np.nan, 1e9),
        (np.inf, -np.inf, 1e9),
        (np.inf, 3e38, 1.0),
    ],
)
def test_within_rejects(got: float, want: float, bound: float) -> None:
    with pytest.raises(AssertionError, match="1 of 1 entries are out of bounds"):
        within(got, want, bound)


def test_within_lets_float16_overflow_exactly_where_it_must() -> None:
    within(np.inf, 1e9, 1.0, torch.float16)
    within(-np.inf, -1e9, 1.0, torch.float16)
    within(65504.0, 65515.0, 16.0, torch.float16)
    for got, want in ((65504.0, 1e9), (np.inf, 60000.0), (-np.inf, 1e9)):
        with pytest.raises(AssertionError):
            within(got, want, 16.0, torch.float16)


def test_within_reports_the_worst_entry_and_masks() -> None:
    got = torch.tensor([[1.0, 2.0, 9.0], [1.0, 5.0, 1.0]])
    want, bound = np.ones((2, 3)), np.array([[0.5, 0.5, 100.0], [0.5, 0.5, 0.5]])
    with pytest.raises(AssertionError) as caught:
        assert_within(got, want, bound, replay="line")
    assert str(caught.value) == (
        "2 of 6 entries are out of bounds; worst at row 1, column 1: got 5.0, wanted "
        "1.0 within 0.5\nreplay: line"
    )
    assert_within(got, want, bound, where=np.asarray(got < 1.5))
