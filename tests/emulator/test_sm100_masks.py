"""What kernels of Blackwell make of windows, lens and block ids that are errors on CPU tensors, and
masks on those of a GPU, whose values nobody looks at before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import paged_line, seen
from torch import Tensor

import mqa
from mqa import values
from mqa.cuda import compiler, sm100
from mqa.problem import DenseProblem, parse
from mqa.reference import schedule
from mqa.testing import Case, assert_bitwise, make_case

pytestmark = [
    pytest.mark.skipif(
        compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
    ),
    pytest.mark.no_cover,
]
FORMATS = (*sm100.MODELS,)
INT32 = torch.iinfo(torch.int32)
FAR = (0, INT32.min, 1, 301, 385, INT32.max)
"""Lens around the ends of a result of 300 columns and of a table of 384 tokens."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "readable", lambda q: False)


def run(case: Case, **changes: Any) -> Tensor:
    """The public call with some arguments changed, written over NaN; nothing is written around."""
    dense = isinstance(case.problem, DenseProblem)
    function = mqa.fp8_fp4_mqa_logits if dense else mqa.fp8_fp4_paged_mqa_logits
    given = case.kwargs | {"schedule_meta": None, "backend": "sm100-emulated"} | changes
    width = given.get("max_seqlen_k") or case.problem.width
    rows = len(given["weights"])
    buffer = torch.full((rows + 2, width + 9), 7.0)
    out = buffer[1 : rows + 1, 4 : width + 4].fill_(torch.nan)
    function(**given, out=out)
    got = out.clone()
    out.fill_(7.0)
    assert (buffer == 7.0).all()
    return got


@pytest.mark.parametrize("fmt", FORMATS)
def test_windows_longer_than_the_result_are_cut(fmt: str) -> None:
    case = make_case(parse(f"dense {fmt} S=7 N=300 H=64 D=64 windows=full seed=1"))
    whole = run(case)
    start = torch.tensor([0, 299, -5, INT32.min, 100, 171, INT32.max], dtype=torch.int32)
    end = torch.tensor([300, INT32.max, 300, INT32.max, 90, 300, 300], dtype=torch.int32)
    windows = {"cu_seq_len_k_start": start, "cu_seq_len_k_end": end}
    got = run(case, max_seqlen_k=129, **windows)
    first = start.clamp(0, 300).long()
    position = first[:, None] + torch.arange(129)
    valid = position < end.clamp(0, 300)[:, None]
    want = torch.where(valid, whole.gather(1, position.clamp(max=299)), -torch.inf)
    assert valid[5].sum() == 129
    assert_bitwise(got, want)


@pytest.mark.parametrize(
    ("fmt", "P", "bad"),
    [
        ("fp8", 64, -1),
        ("mxfp8", 8, 10**6),
        ("mxfp4", 128, INT32.min),
        ("fp8", 256, INT32.max),
        ("mxfp4", 16, "blocks"),
    ],
)
def test_block_ids_that_name_no_page_read_as_zeros(fmt: str, P: int, bad: Any) -> None:
    facts = "next_n=2 H=64 D=64 clean=1 lens=full seed=4"
    case = make_case(parse(paged_line(P, 150, facts, B=2, format=fmt)))
    case.tensors["lens"].copy_(torch.tensor([[150, 31], [70, 149]]))
    table, valid, want = case.tensors["table"], seen(case), run(case)
    assert (want[valid] != 0).float().mean() > 0.5
    for column in (0, table.shape[1] - 1):
        table[1, column] = case.problem.blocks if bad == "blocks" else bad
        window = slice(column * P, (column + 1) * P)
        want[2:, window][valid[2:, window]] = 0.0
    assert_bitwise(run(case), want)


@pytest.mark.parametrize("L", [300, 450])
def test_lens_are_cut_at_the_result_and_at_the_table(L: int) -> None:
    """3 columns of 128 tokens."""
    sizes = f"B={len(FAR)} next_n=1 P=128 blocks=30 columns=3 L={L} H=64 D=64"
    case = make_case(parse(f"paged mxfp8 {sizes} clean=1 seed=2"))
    whole, lens = run(case), torch.tensor(FAR, dtype=torch.int32)[:, None]
    want = torch.where(torch.arange(L) < lens.clamp(max=384), whole, -torch.inf)
    case.tensors["lens"].copy_(lens)
    for meta in (None, schedule.paged_metadata(lens, 3)):
        assert_bitwise(run(case, schedule_meta=meta), want)


def test_lens_of_rank_one_leave_earlier_rows_less() -> None:
    """9 rows a request, two groups; lens are cut once each row has its own."""
    case = make_case(parse(paged_line(64, 300, "next_n=9 H=64 D=64 clean=1 seed=2", B=2)))
    whole, lens = run(case), torch.tensor([304, INT32.max], dtype=torch.int32)
    # A table of 5 columns of 64 holds 320 tokens, the result 300.
    of_rows = (lens.long()[:, None] - 8 + torch.arange(9)).clamp(0, 300).flatten()
    want = torch.where(torch.arange(300) < of_rows[:, None], whole, -torch.inf)
    assert_bitwise(run(case, context_lens=lens), want)


def test_runs_of_a_varlen_batch_read_the_table_of_their_longest_row_as_given() -> None:
    """Both rows are cut to the same len, and the second one, which was longer, names the pages."""
    line = paged_line(64, 128, "next_n=1 H=64 D=64 clean=1 lens=full seed=3", B=2)
    case = make_case(parse(line.replace("columns=2", "columns=3")))
    table = case.tensors["table"]
    table[0], table[1, :2] = -1, torch.tensor([3, 1], dtype=torch.int32)
    lens = torch.tensor([500, 501], dtype=torch.int32)
    apart = run(case, context_lens=lens, indices=torch.tensor([4, 5], dtype=torch.int32))
    together = run(case, context_lens=lens, indices=torch.tensor([4, 4], dtype=torch.int32))
    assert (apart[0] == 0).all()
    assert (together[0] != 0).float().mean() > 0.5
    assert_bitwise(together[1], apart[1])
