"""On Hopper a schedule, whatever it holds, says who does what and never changes bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_contents import CONTENTS
from torch import Tensor

from mqa.testing import Case, assert_bitwise, guards_intact

pytestmark = pytest.mark.gpu
LINES = [
    "dense fp8 S=300 N=1500 H=8 D=64 windows=random seed=1",
    "dense fp8 S=70 N=900 H=64 D=128 windows=packed seed=2 M=900 out=bfloat16",
    "dense fp8 S=70 N=900 H=128 D=32 windows=causal seed=3 out_off=4 out_stride=901",
    "dense fp8 S=3 N=4100 H=64 D=128 windows=full seed=4",
    "dense fp8 S=1 N=4100 H=16 D=128 windows=full seed=5 out=float16 out_off=2",
    "dense fp8 S=40 N=300 H=32 D=64 windows=empty seed=6",
    "dense fp8 S=9 N=2 H=32 D=64 windows=full seed=7 weights=bfloat16",
]
SMS = (1, 67, 132, 200)


def scheduled(sm90: Any, case: Case, cuts: Tensor) -> Tensor:
    """The logits with this schedule, written over NaN; nothing around them is written."""
    out = case.new_out()
    sm90.run(case, out=out, schedule_meta=cuts)
    assert guards_intact(out)
    return out


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("line", LINES)
def test_contents_of_a_schedule_do_not_change_bits(sm90: Any, line: str, contents: str) -> None:
    case = sm90.case(line)
    want = sm90.run(case, out=case.new_out())
    for sms in SMS:
        cuts = CONTENTS[contents](sm90.metadata(case, sms).cpu()).to(sm90.device)
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=f"{line} sms={sms}")


@pytest.mark.parametrize("line", LINES)
def test_a_schedule_of_another_batch_changes_nothing(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    want = sm90.run(case, out=case.new_out())
    for other in LINES:
        cuts = sm90.metadata(sm90.case(other))
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=line)


@pytest.mark.parametrize("line", LINES)
def test_a_schedule_may_have_strides(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    want = sm90.run(case, out=case.new_out())
    fresh = sm90.metadata(case)
    count = len(fresh)
    wide = torch.full((2 * count, 5), -77, dtype=torch.int32, device=sm90.device)
    moved = wide.flatten()[1 : 1 + 2 * count].view(count, 2)
    for cuts in (wide[::2, 3:5], wide[:count, :4:3], moved):
        cuts.copy_(fresh)
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=line)


def test_no_schedule_is_needed_for_any_number_of_sms(sm90: Any) -> None:
    case = sm90.case(LINES[0])
    want = sm90.run(case, out=case.new_out())
    for sms in (1, 2, 7, 131, 200, 1000):
        with sm90.num_sms(sms):
            assert_bitwise(sm90.run(case, out=case.new_out()), want)


@pytest.mark.parametrize("sms", [1, 200])
def test_uncleaned_logits_with_garbage_schedules_are_right(sm90: Any, sms: int) -> None:
    for line in LINES:
        sm90.check(f"{line} regime=exact clean=0 sms={sms}")
