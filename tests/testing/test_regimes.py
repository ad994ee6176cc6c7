import dataclasses
from typing import Any

import numpy as np
import pytest

from mqa.problem import FORMATS, parse
from mqa.testing import EXACT, Case, Data, assert_bounded, assert_exact, logits, make_case
from mqa.testing.oracle import combine

FP8 = "dense fp8 S=4 N=80 H=8 D=64 windows=full regime=exact"
MXFP8 = "dense mxfp8 S=4 N=80 H=8 D=64 windows=full regime=exact"


def changed(case: Case, **changes: Any) -> Data:
    return dataclasses.replace(case.data, **changes)


def with_entry(array: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    copy = array.copy()
    copy[at] = value
    return copy


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [1, 8, 32, 128])
@pytest.mark.parametrize("dims", [32, 64, 128])
def test_exact_cases_meet_their_limits_and_are_mostly_nonzero(
    fmt: str, heads: int, dims: int
) -> None:
    for seed in range(3):
        line = f"dense {fmt} S=5 N=60 H={heads} D={dims} windows=full regime=exact seed={seed}"
        case = make_case(parse(line))  # asserts the limits
        result = logits(case, EXACT)
        assert (result.values != 0).mean() >= 0.6
        weights = case.data.weights
        assert weights.min() < 0 < weights.max()
        # bfloat16 holds them: the low 16 bits are 0.
        assert not (weights.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("dims", [256, 512, 1024])
def test_exact_fp8_shrinks_for_wide_heads(dims: int) -> None:
    make_case(parse(f"dense fp8 S=3 N=40 H=64 D={dims} regime=exact"))


@pytest.mark.parametrize(
    "line", [FP8, MXFP8, FP8.replace("fp8", "mxfp4"), FP8.replace("fp8", "bf16")]
)
def test_every_head_and_slice_of_dims_matters_somewhere(line: str) -> None:
    data = make_case(parse(line)).data
    whole = combine(data).values
    for head in range(data.heads):
        weights = data.weights.copy()
        weights[:, head] = 0
        assert (combine(dataclasses.replace(data, weights=weights)).values != whole).any()
    for first in range(0, data.head_dim, 16):
        codes = data.q_codes.copy()
        codes[..., first : first + 16] = 0
        assert (combine(dataclasses.replace(data, q_codes=codes)).values != whole).any()


def test_exact_fp8_dots_beyond_13_bits_are_refused() -> None:
    case = make_case(parse(FP8))
    codes = with_entry(case.data.q_codes, (0, 0, 0), 0x7E)  # 448 beside small integers
    codes[0, 0, 1] = 0x01
    with pytest.raises(AssertionError, match=r"sum \|q.k\| is \d+ units, limit 8192"):
        assert_exact(changed(case, q_codes=codes))


def test_exact_head_sums_beyond_24_bits_are_refused() -> None:
    case = make_case(parse(MXFP8))
    weights = with_entry(case.data.weights, (0, 0), case.data.weights[0, 0] * 2.0**22)
    with pytest.raises(AssertionError, match=r"sum \|w\| sum \|q.k\| is \d+ units, limit 16777216"):
        assert_exact(changed(case, weights=weights))


def test_exact_limits_each_have_an_error() -> None:
    case = make_case(parse(MXFP8))
    data = case.data
    assert data.k_scales is not None
    # A block of zeros under a far scale: no more units, but spread wide.
    empty = data.k_codes.copy()
    empty[0, 32:] = 0
    scales = with_entry(data.k_scales, (0, 1), int(data.k_scales[0, 0]) + 9)
    with pytest.raises(AssertionError, match=r"block exponents spread over \d+, limit 8"):
        assert_exact(changed(case, k_codes=empty, k_scales=scales))
    with pytest.raises(AssertionError, match="limit 2"):
        assert_exact(changed(case, k_scales=data.k_scales - 90))
    with pytest.raises(AssertionError, match="head 0 has no influence"):
        assert_exact(changed(case, weights=data.weights * (np.arange(8) > 0)))
    codes = data.q_codes.copy()
    codes[..., 16:32] = 0
    with pytest.raises(AssertionError, match=r"dims 16..31 have no influence"):
        assert_exact(changed(case, q_codes=codes))
    with pytest.raises(AssertionError, match="one sign"):
        assert_exact(changed(case, weights=np.abs(data.weights)))
    codes = data.k_codes.copy()
    codes[: len(codes) * 2 // 3] = 0
    with pytest.raises(AssertionError, match="differ from 0, want 60%"):
        assert_exact(changed(case, k_codes=codes))


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
def test_bounded_draws_reach_awkward_codes(fmt: str) -> None:
    codes, scales = set(), set()
    for seed in range(12):
        data = make_case(parse(f"dense {fmt} S=20 N=60 H=4 D=128 seed={seed}")).data
        codes |= set(data.q_codes.flat) | set(data.k_codes.flat)
        if data.q_scales is not None and data.k_scales is not None:
            scales |= set(data.q_scales.flat) | set(data.k_scales.flat)
    if fmt == "mxfp4":
        assert codes == set(range(16))
    else:
        assert codes == set(range(256)) - {0x7F, 0xFF}
    if fmt != "fp8":
        ends = (2, 252) if fmt == "mxfp4" else (10, 246)
        assert ends[0] <= min(scales) < ends[0] + 20
        assert ends[1] - 20 < max(scales) <= ends[1]


def test_bounded_bf16_draws_reach_subnormals_and_far_exponents_on_both_sides() -> None:
    smallest: set[int] = set()
    exponents = []
    for seed in range(12):
        data = make_case(parse(f"dense bf16 S=20 N=60 H=4 D=128 seed={seed}")).data
        for codes in (data.q_codes, data.k_codes):
            assert codes.dtype == np.uint16
            smallest |= set(codes[(codes & 0x7FFF) < 8].flat)
            used = codes[(codes & 0x7FFF) >= 8] >> 7 & 255
            exponents.append((used.min(), used.max()))
    assert smallest == {sign | low for sign in (0, 0x8000) for low in range(8)}
    assert min(low for low, _ in exponents) == 0
    assert max(high for _, high in exponents) > 127 + 100


def test_bounded_bf16_beyond_the_range_is_refused() -> None:
    case = make_case(parse("dense bf16 S=3 N=9 H=2 D=64"))
    with pytest.raises(AssertionError, match="not < 2\\^127"):
        assert_bounded(changed(case, k_codes=np.full_like(case.data.k_codes, 0x7F7F)))


def test_bounded_limits_each_have_an_error() -> None:
    case = make_case(parse("dense mxfp8 S=3 N=9 H=2 D=64"))
    data = case.data
    assert data.k_scales is not None
    with pytest.raises(AssertionError, match="scale codes 9"):
        assert_bounded(changed(case, k_scales=with_entry(data.k_scales, (0, 0), 9)))
    with pytest.raises(AssertionError, match="not < 2\\^127"):
        assert_bounded(changed(case, k_scales=np.full_like(data.k_scales, 246)))
