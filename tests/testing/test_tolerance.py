import dataclasses

import numpy as np
import pytest
import torch

from mqa.problem import parse
from mqa.testing import (
    EXACT,
    FLOAT32,
    HOPPER_FP8,
    OracleResult,
    assert_logits,
    largest_error,
    logits,
    make_case,
    to_tensor,
    tolerance,
)


def result_of(value: float, **changes: float) -> OracleResult:
    one, no = np.ones((1, 1)), np.zeros((1, 1), np.bool_)
    result = OracleResult(one * value, ~no, 0 * one, 0 * one, 0 * one, 0 * one, no, 2, 64)
    return dataclasses.replace(result, **{name: one * v for name, v in changes.items()})


def test_each_rounding_step_has_its_line() -> None:
    store = 2.0**-25
    base = 2.0**-126
    assert tolerance(result_of(0.5))[0, 0] == store + base
    assert tolerance(result_of(0.5, magnitude=8))[0, 0] == store + base + 2 * 2.0**-24 * 4 * 8
    assert tolerance(result_of(0.5, dot_error=0.25))[0, 0] == store + base + 0.25
    assert tolerance(result_of(0.0, weight=3, scale=5))[0, 0] == pytest.approx(
        base * (64 * 3 + 2 * 5 + 1), rel=1e-6
    )


def test_half_an_ulp_is_that_of_the_output_dtype_and_of_its_subnormals() -> None:
    for out, normal, smallest in (
        ("bfloat16", 2.0**-8, 2.0**-134),
        ("float16", 2.0**-11, 2.0**-25),
    ):
        assert tolerance(result_of(1.0), out)[0, 0] == pytest.approx(normal)
        assert tolerance(result_of(0.0), out)[0, 0] == pytest.approx(2.0**-126 + smallest)


def test_plateau_and_entries_outside_the_window_have_no_slack() -> None:
    case = make_case(parse("dense fp8 S=9 N=40 H=1 D=64 seed=3"))
    result = logits(case, FLOAT32)
    bound = tolerance(result)
    assert (bound[result.plateau | ~result.valid] == 0).all()
    assert (bound[result.valid & ~result.plateau] > 0).all()


def float32_logits(case_line: str) -> torch.Tensor:
    """A plain float32 kernel of dense fp8."""
    case = make_case(parse(case_line))
    q, k = case.tensors["q"].float(), case.tensors["kv"].float()
    dots = torch.einsum("shd,nd->shn", q, k).relu()
    scores = torch.einsum("sh,shn->sn", case.tensors["w"].float(), dots) + 0.0
    scores = scores * case.tensors["kv_scale"]
    return scores.masked_fill(torch.from_numpy(~logits(case).valid), float("-inf"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("heads", [1, 64])
def test_a_plain_float32_kernel_is_within_tolerance(seed: int, heads: int) -> None:
    line = f"dense fp8 S=12 N=200 H={heads} D=128 seed={seed}"
    assert_logits(make_case(parse(line)), float32_logits(line))


def test_a_truncating_tensor_unit_is_told_apart_from_float32_and_accepted_by_its_model() -> None:
    case = make_case(parse("dense fp8 S=6 N=100 H=8 D=128 windows=full seed=1"))
    got = to_tensor(logits(case, HOPPER_FP8).values, "float32")
    assert_logits(case, got, HOPPER_FP8)
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_logits(case, got, FLOAT32)


def test_exact_cases_are_exact_on_a_truncating_tensor_unit_too() -> None:
    for seed in range(10):
        case = make_case(parse(f"dense fp8 S=6 N=50 H=8 D=128 regime=exact seed={seed}"))
        want = logits(case, EXACT).values
        np.testing.assert_array_equal(logits(case, HOPPER_FP8).values, want)


def test_of_too_many_products_rows_spread_evenly_are_judged() -> None:
    most = 3 * 40 * 4 * 32  # those of three rows
    dense = "dense mxfp8 S=9 N=40 H=4 D=32 windows=full"
    paged = "paged fp8 B=9 next_n=1 H=4 D=32 P=16 blocks=36 columns=3 L=40"
    for line, seen in ((dense, {0, 5, 8}), (f"{dense} regime=exact", range(9)), (paged, range(9))):
        case = make_case(parse(line))
        right = case.run(backend="reference")
        share = largest_error(case, right, FLOAT32, most_products=most)
        assert share is None or 0 <= share <= 1
        for row in range(9):
            wrong = right.clone()
            wrong[row, 7] += 1 + wrong[row, 7].abs()
            if row in seen:
                at = f"at row {row}, column 7.*\nreplay: all of it"
                with pytest.raises(AssertionError, match=at):
                    largest_error(case, wrong, replay="all of it", most_products=most)
            else:
                assert largest_error(case, wrong, most_products=most) == share
            with pytest.raises(AssertionError):
                largest_error(case, wrong)


def test_of_rows_that_are_passed_over_nan_and_what_is_cleaned_are_seen() -> None:
    case = make_case(parse("dense fp8 S=9 N=40 H=4 D=32 windows=packed seed=3"))
    right = case.run(backend="reference")
    inside = logits(case).valid
    assert largest_error(case, right, most_products=1) is not None
    for row in range(1, 9):
        within, outside = inside[row].argmax(), (~inside[row]).argmax()
        for column, value in ((within, torch.nan), (outside, torch.nan), (outside, 1.0)):
            wrong = right.clone()
            wrong[row, column] = value
            with pytest.raises(AssertionError, match=f"row {row}, column {column}"):
                largest_error(case, wrong, most_products=1)
    open_case = make_case(parse("dense fp8 S=9 N=40 H=4 D=32 windows=packed seed=3 clean=0"))
    free = torch.where(torch.from_numpy(inside), right, torch.nan)
    assert largest_error(open_case, free, most_products=1) is not None
