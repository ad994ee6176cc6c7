"""On Hopper no len, block id or size of a paged call reads foreign memory or writes beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import HEADS, PAGE_SIZES, VARIANTS, paged_line, seen
from torch import Tensor

from mqa.testing import assert_bitwise, guards_intact

pytestmark = pytest.mark.gpu
INT32 = torch.iinfo(torch.int32)


@pytest.mark.parametrize("bad", [-1, 10**6, INT32.min, INT32.max, "blocks"])
@pytest.mark.parametrize(("H", "next_n", "D"), VARIANTS)
def test_block_ids_that_name_no_page_read_as_zeros(
    sm90: Any, H: int, next_n: int, D: int, bad: Any
) -> None:
    for P in (8, 64, 256):
        case = sm90.case(paged_line(P, 700, f"next_n={next_n} H={H} D={D} lens=random seed=4"))
        table, valid = case.tensors["table"], seen(case)
        want = sm90.call(case)
        for column in {0, 1, table.shape[1] - 1}:
            table[1:, column] = case.problem.blocks if bad == "blocks" else bad
            window = want[next_n:, column * P : (column + 1) * P]
            window[valid[next_n:, column * P : (column + 1) * P]] = 0.0
        assert_bitwise(sm90.call(case), want, replay=case.problem)


@pytest.mark.parametrize("P", PAGE_SIZES)
def test_columns_of_the_table_past_the_need_are_not_used(sm90: Any, P: int) -> None:
    """Neither with ids of pages full of NaN nor where the allocation ends."""
    facts = "next_n=3 H=64 D=64 lens=random seed=5"
    case = sm90.case(paged_line(P, 700, facts))
    want, table = sm90.call(case), case.tensors["table"]
    longest = case.tensors["lens"].amax(1)
    needed = torch.arange(table.shape[1], device=sm90.device) * P < longest[:, None]
    assert not needed.all()
    unused = set(range(case.problem.blocks)) - set(table[needed].tolist())
    table[~needed] = min(unused)
    assert_bitwise(sm90.call(case), want)
    memory = torch.full((3 * 2**20,), -1, dtype=torch.int32, device=sm90.device)
    columns = int(needed[2].sum())
    end = memory[len(memory) - 3 * columns :].view(3, columns)
    end.copy_(table[2, :columns].expand(3, columns))
    case.tensors["q"].view(torch.uint8)[:2] = 0x7F
    case.tensors["lens"][:2] = 0
    assert_bitwise(sm90.call(case, block_table=end)[6:], want[6:])


FAR = (0, -1, INT32.min, 1, 299, 300, 301, 384, 385, 10**6, INT32.max)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("L", [300, 384, 450])
@pytest.mark.parametrize("H", HEADS)
def test_lens_are_cut_at_the_result_and_at_the_table(
    sm90: Any, H: int, L: int, clean: bool
) -> None:
    """3 columns of 128 tokens. Rows of far lens beside ordinary ones, then each alone."""
    sizes = f"B=22 next_n=1 P=128 blocks=70 columns=3 L={L} H={H} D=64"
    case = sm90.case(f"paged fp8 {sizes} clean={int(clean)} seed=2")
    lens = torch.tensor([n for far in FAR for n in (far, 77)], device=sm90.device).int()[:, None]
    valid = torch.arange(L, device=sm90.device) < lens.clamp(max=384)
    want = torch.where(valid, sm90.call(case), -torch.inf)
    where = None if clean else valid.cpu().numpy()
    case.tensors["lens"].copy_(lens)
    for meta in (None, sm90.metadata(case)):
        out = case.new_out()
        assert_bitwise(sm90.run(case, out=out, schedule_meta=meta), want, where=where)
        assert guards_intact(out)
    for row in range(0, 22, 2):
        rows = slice(row, row + 1)
        part = None if clean else where[rows]
        got = sm90.call(case, rows, clean_logits=clean)
        assert_bitwise(got, want[rows], where=part)


@pytest.mark.parametrize("next_n", [1, 2, 9])
def test_lens_of_rank_one_leave_earlier_rows_less(sm90: Any, next_n: int) -> None:
    facts = f"next_n={next_n} H=64 D=64 seed=2"
    case = sm90.case(paged_line(64, 300, facts, B=len(FAR)))
    whole = sm90.call(case)
    lens = torch.tensor(FAR, dtype=torch.int32, device=sm90.device)
    row = torch.arange(next_n, device=sm90.device)
    # A table of 5 columns of 64 holds 320 tokens, the result 300.
    of_rows = (lens.long()[:, None] - next_n + row + 1).clamp(0, 300).flatten()
    valid = torch.arange(300, device=sm90.device) < of_rows[:, None]
    got = sm90.call(case, context_lens=lens)
    assert_bitwise(got, torch.where(valid, whole, -torch.inf))


def test_batches_padded_with_rows_of_no_or_one_token_are_right(sm90: Any) -> None:
    for H, next_n, D in VARIANTS:
        case = sm90.case(paged_line(64, 700, f"next_n={next_n} H={H} D={D} seed=3", B=40))
        whole, lens = sm90.call(case), case.tensors["lens"]
        for pad in (0, 1):
            for kept in (slice(0, 1), slice(39, 40), slice(17, 19)):
                before = lens[kept].clone()
                lens.fill_(pad)
                lens[kept] = before
                want = torch.where(seen(case), whole, -torch.inf)
                for meta in (None, sm90.metadata(case)):
                    assert_bitwise(sm90.call(case, schedule_meta=meta), want)
                lens.fill_(700)


@pytest.mark.parametrize("sms", [0, 67])
@pytest.mark.parametrize(
    "facts",
    ["B=0 next_n=2 L=9 columns=2", "B=2 next_n=2 L=0 columns=2", "B=0 next_n=1 L=0 columns=0"],
)
def test_results_without_entries_are_legal(sm90: Any, facts: str, sms: int) -> None:
    case = sm90.case(f"paged fp8 {facts} H=64 D=128 P=64 blocks=9 lens=zero sms={sms}")
    assert sm90.run(case).numel() == 0


@pytest.mark.parametrize("columns", [0, 3])
def test_without_pages_every_token_is_zero(sm90: Any, columns: int) -> None:
    for H, next_n, D in VARIANTS:
        facts = f"B=3 next_n={next_n} H={H} D={D} P=64 blocks=0 columns={columns} L=150 clean=1"
        for lens in (0, 1, 100, 10**6):
            case = sm90.case(f"paged fp8 {facts}")
            case.tensors["lens"].fill_(lens)
            want = torch.full((3 * next_n, 150), -torch.inf)
            want[:, : min(lens, columns * 64)] = 0.0
            out = case.new_out()
            assert_bitwise(sm90.run(case, out=out), want.to(sm90.device))
            assert guards_intact(out)


def test_strides_of_dimensions_of_size_one_mean_nothing(sm90: Any) -> None:
    case = sm90.case(paged_line(64, 301, "next_n=1 H=16 D=64 lens=full seed=8"))
    t, one = case.tensors, slice(0, 1)
    want = sm90.call(case, one)

    def odd(tensor: Tensor, *strides: int) -> Tensor:
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return raw.as_strided(tensor.shape, strides).view(tensor.dtype)

    changes = {
        "q": odd(t["q"][one], 7, 33, 64, 1),
        "context_lens": odd(t["lens"][one], 5, 9),
        "block_table": odd(t["table"][one], 1, 1),
    }
    assert_bitwise(sm90.call(case, one, **changes), want)
    page = t["cache"][:1].as_strided((1, 64, 1, 68), (1, 68, 3, 1))
    zero = torch.zeros(1, 1, dtype=torch.int32, device=sm90.device)
    single = {"kv_cache": page, "block_table": zero, "context_lens": zero + 50}
    plain = single | {"kv_cache": t["cache"][:1]}
    assert_bitwise(sm90.call(case, one, **single), sm90.call(case, one, **plain))


@pytest.mark.parametrize("B", [1, 2, 7, 50, 66, 67, 131, 133, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_results_are_cleaned_by_many_ctas(sm90: Any, dtype: torch.dtype, B: int) -> None:
    """A row is shared out where there are fewer rows than CTAs, with any number of CTAs."""
    out = "float32" if dtype is torch.float32 else "bfloat16"
    layout = f"out_off={4 if out == 'float32' else 2} out_stride=60007 out={out}"
    line = f"next_n=1 H=8 D=64 lens=random clean=1 regime=exact {layout} seed={B}"
    problem = paged_line(64, 600, line, B=B).replace("L=600", "L=60001")
    for sms in ("", " sms=1", " sms=5", " sms=131"):
        sm90.check(problem + sms)
