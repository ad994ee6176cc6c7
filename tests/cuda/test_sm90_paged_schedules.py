"""On Hopper a schedule of a paged call says who does what and never changes bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import paged_line
from schedule_contents import CONTENTS
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise, guards_intact

pytestmark = pytest.mark.gpu
LINES = [
    paged_line(64, 900, "next_n=1 H=64 D=128 clean=1 lens=random seed=1", B=50),
    paged_line(16, 700, "next_n=2 H=64 D=64 clean=1 lens=random out=bfloat16 seed=2", B=9),
    paged_line(
        8, 600, "next_n=8 H=128 D=32 clean=1 lens=ramp seed=3 out_off=4 out_stride=601", B=5
    ),
    paged_line(256, 2000, "next_n=1 H=8 D=128 clean=1 lens=full seed=4 lens_rank=1", B=1),
    paged_line(32, 600, "next_n=20 H=64 D=64 clean=1 lens=random seed=5 weights=bfloat16", B=3),
    paged_line(128, 800, "next_n=1 H=32 D=64 clean=1 lens=random seed=6 varlen=1", B=70),
    paged_line(64, 300, "next_n=4 H=16 D=32 clean=1 lens=zero seed=7", B=40),
]
SMS = (1, 67, 132, 200)


def scheduled(sm90: Any, case: Case, cuts: Tensor | None) -> Tensor:
    """The logits with this schedule, written over NaN; nothing around them is written."""
    out = case.new_out()
    sm90.run(case, out=out, schedule_meta=cuts)
    assert guards_intact(out)
    return out


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("line", LINES)
def test_contents_of_a_schedule_do_not_change_bits(sm90: Any, line: str, contents: str) -> None:
    case = sm90.case(line)
    want = scheduled(sm90, case, None)
    for sms in SMS:
        cuts = CONTENTS[contents](sm90.metadata(case, sms).cpu()).to(sm90.device)
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=f"{line} sms={sms}")


@pytest.mark.parametrize("line", LINES)
def test_a_schedule_of_another_batch_changes_nothing(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    want = scheduled(sm90, case, None)
    for other in LINES:
        cuts = sm90.metadata(sm90.case(other))
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=line)


@pytest.mark.parametrize("line", LINES)
def test_a_schedule_may_have_strides(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    want, fresh = scheduled(sm90, case, None), sm90.metadata(case)
    count = len(fresh)
    wide = torch.full((2 * count, 5), -77, dtype=torch.int32, device=sm90.device)
    moved = wide.flatten()[1 : 1 + 2 * count].view(count, 2)
    for cuts in (wide[::2, 3:5], wide[:count, :4:3], moved):
        cuts.copy_(fresh)
        assert_bitwise(scheduled(sm90, case, cuts), want, replay=line)


@pytest.mark.parametrize("line", LINES)
def test_no_schedule_is_needed_for_any_number_of_sms(sm90: Any, line: str) -> None:
    case = sm90.case(line)
    want = scheduled(sm90, case, None)
    for sms in (1, 2, 7, 131, 200, 1000):
        with sm90.num_sms(sms):
            assert_bitwise(scheduled(sm90, case, None), want, replay=f"{line}, {sms} SMs")


@pytest.mark.parametrize("sms", [1, 200])
def test_uncleaned_logits_with_garbage_schedules_are_right(sm90: Any, sms: int) -> None:
    for line in LINES:
        sm90.check(f"{line} regime=exact sms={sms}".replace("clean=1", "clean=0"))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("used", [(), (0,), (32767,), (5, 20000, 32767)])
@pytest.mark.parametrize("H", [8, 64])
def test_large_batches_of_padding_end_with_any_schedule(
    sm90: Any, H: int, used: tuple[int, ...], varlen: bool
) -> None:
    """32768 rows of which few or none have tokens."""
    B, L = 32768, 700
    small = sm90.case(paged_line(64, L, f"next_n=1 H={H} D=32 seed=3", B=4))
    t, device = small.tensors, sm90.device
    want = sm90.call(small)
    row = torch.arange(B, device=device) % 4
    lens = torch.zeros(B, 1, dtype=torch.int32, device=device)
    lens[list(used)] = L
    runs = torch.arange(B, dtype=torch.int32, device=device)
    indices = runs if varlen else None
    arguments = {
        "q": t["q"].view(torch.uint8)[row].view(t["q"].dtype),
        "weights": t["w"][row],
        "context_lens": lens,
        "block_table": t["table"][row],
        "indices": indices,
    }
    with sm90.guard():
        fresh = mqa.get_paged_mqa_logits_metadata(lens, 64, 132, indices)
    for cuts in (None, fresh, fresh.flip(0), torch.zeros_like(fresh), torch.full_like(fresh, B)):
        got = sm90.call(small, **arguments, schedule_meta=cuts)
        for at in used:
            assert_bitwise(got[at : at + 1], want[at % 4 : at % 4 + 1])
        assert int((got == -torch.inf).sum()) == (B - len(used)) * L
