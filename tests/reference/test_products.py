"""The masked path, which GPUs take, on CPU tensors; and the one shape that products have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from mqa.problem import DenseProblem, PagedProblem, parse
from mqa.reference import blockwise, paged
from mqa.testing import Case, assert_logits, guards_intact, make_case
from mqa.testing.strategies import dense_problems, paged_problems


def run(case: Case, out: Tensor, *, on_host: bool) -> None:
    t, problem = case.tensors, case.problem
    options: dict[str, Any] = {"clean": problem.clean, "on_host": on_host, "memory": 64 << 20}
    if isinstance(problem, DenseProblem):
        names = ("q", "q_scale", "kv", "kv_scale", "w", "start", "end")
        inputs = [t.get(name) for name in names]
        blockwise.dense(out, *inputs, compressed=problem.compressed, **options)
        return
    names = ("q", "q_scale", "cache", "w", "lens", "table", "indices")
    paged.paged(out, *[t.get(name) for name in names], **options)


def check_masked(problem: DenseProblem | PagedProblem) -> None:
    if problem.rows * problem.width == 0:
        return  # an empty result never reaches a backend
    case = make_case(problem)
    out = case.new_out()
    run(case, out, on_host=False)
    assert_logits(case, out)
    assert guards_intact(out)


@given(problem=dense_problems())
def test_masked_dense_problems_agree(problem: DenseProblem) -> None:
    check_masked(problem)


@given(problem=dense_problems(heads=(1, 2, 64), max_rows=40, max_keys=700, layouts=False))
def test_masked_problems_of_several_tiles_agree(problem: DenseProblem) -> None:
    check_masked(problem)


@given(problem=paged_problems())
def test_masked_paged_problems_agree(problem: PagedProblem) -> None:
    check_masked(problem)


@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1, -(2**31)])
def test_masked_lens_are_cut_and_bad_blocks_read_as_zeros(bad: int) -> None:
    line = "paged fp8 B=2 next_n=1 H=4 D=32 P=8 blocks=40 columns=3 L=24 clean=1"
    case = make_case(parse(line))
    want, got = torch.empty(2, 24), torch.empty(2, 24)
    run(case, want, on_host=False)
    case.tensors["lens"].copy_(torch.tensor([[2**31 - 1], [-(2**31)]], dtype=torch.int32))
    case.tensors["table"][0, 1] = bad
    run(case, got, on_host=False)
    want[0, 8:16] = 0
    want[1] = -torch.inf
    assert torch.equal(got, want)


LINES = [
    "dense fp8 S=70 N=900 H=24 D=40 windows=random",
    "dense fp8 S=3 N=5000 H=24 D=40 windows=random",
    "dense fp8 S=70 N=900 H=24 D=40 windows=random M=900",
    "paged fp8 B=9 next_n=3 H=24 D=40 P=7 blocks=900 columns=90 L=600 lens=random",
    "paged fp8 B=2 next_n=1 H=24 D=40 P=300 blocks=90 columns=9 L=900 lens=random",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("num_heads", "H"), [(24, 24), (7, 8)])
def test_every_product_has_one_shape(
    line: str, on_host: bool, num_heads: int, H: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H is padded to a multiple of 8, D = 40 to one of 16."""
    shapes, counts = set(), set()
    bmm = torch.bmm

    def spy(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        shapes.add((*a.shape[1:], *b.shape[1:]))
        counts.add(len(a))
        return bmm(a, b, **options)

    monkeypatch.setattr(torch, "bmm", spy)
    for name in ("mm", "matmul", "einsum", "addmm", "baddbmm"):
        monkeypatch.setattr(torch, name, None)
    case = make_case(parse(line.replace("H=24", f"H={num_heads}")))
    run(case, case.new_out(), on_host=on_host)
    assert min(counts) > 1
    assert shapes == {(H, 48, 48, 256), (1, H, H, 256)}
    assert on_host or len(counts) == 1
