"""NaN goes exactly where it belongs: into the entries that use it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mqa
from mqa.problem import FORMATS, parse
from mqa.reference import definition
from mqa.testing import Case, assert_bitwise, make_case

NAN_CODE = 0x7F
NO_NAN = (("mxfp4", "value"), ("bf16", "scale"))


def dense_case(fmt: str, windows: str = "random", H: int = 8) -> Case:
    return make_case(parse(f"dense {fmt} S=20 N=300 H={H} D=64 windows={windows} seed=4"))


def inside(case: Case) -> Tensor:
    """[S, N]: position n is in the window of row s."""
    position = torch.arange(300)
    t = case.tensors
    return (position >= t["start"][:, None]) & (position < t["end"][:, None])


def assert_nan_exactly(got: Tensor, want: Tensor, poisoned: Tensor) -> None:
    """NaN where poisoned, the bits of `want` elsewhere."""
    assert poisoned.any()
    assert not poisoned.all()
    assert_bitwise(got, torch.where(poisoned, torch.nan, want))


def poison_element(values: Tensor, at: tuple[int, ...]) -> None:
    if values.dtype == torch.bfloat16:
        values[at] = torch.nan
    else:
        values.view(torch.uint8)[at] = NAN_CODE


def poison_token(case: Case, n: int, how: str) -> None:
    values = case.tensors["kv"]
    if how == "value":
        poison_element(values, (n, 5))
        return
    scale = case.tensors["kv_scale"]
    if scale.dtype == torch.float32:
        scale[n] = torch.nan
    else:
        scale.view(torch.uint8).view(300, 4)[n, 1] = 255


# E2M1 has no NaN, plain FP8 no q scale, and bfloat16 no scale at all.
@pytest.mark.parametrize(
    ("fmt", "how"),
    [(fmt, how) for fmt in FORMATS for how in ("value", "scale") if (fmt, how) not in NO_NAN],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_nan_token_reaches_its_own_column_only(fmt: str, how: str, compressed: bool) -> None:
    case = dense_case(fmt)
    want = case.run()
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    for n in (0, 37, 255, 256, 299):
        poison_token(case, n, how)
        poisoned[:, n] = inside(case)[:, n]
    if not compressed:
        assert_nan_exactly(case.run(), want, poisoned)
        return
    got = mqa.fp8_fp4_mqa_logits(**case.kwargs | {"max_seqlen_k": 300})
    for row in range(20):
        low, high = (int(case.tensors[side][row].clamp(0, 300)) for side in ("start", "end"))
        if low < high:
            wanted = torch.where(poisoned, torch.nan, want)[row : row + 1, low:high]
            assert_bitwise(got[row : row + 1, : high - low], wanted)


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        ("fp8", "q"),
        ("fp8", "w"),
        ("mxfp8", "q"),
        ("mxfp8", "q_scale"),
        ("mxfp8", "w"),
        ("mxfp4", "q_scale"),
        ("mxfp4", "w"),
        ("bf16", "q"),
        ("bf16", "w"),
    ],
)
def test_a_nan_of_a_row_reaches_that_row_only(fmt: str, name: str) -> None:
    case = dense_case(fmt)
    want = case.run()
    row = int(inside(case).any(1).nonzero()[2])
    tensor = case.tensors[name]
    if name == "w":
        tensor[row, 3] = torch.nan
    elif name == "q":
        poison_element(tensor, (row, 3, 7))
    else:
        tensor.view(torch.uint8).view(20, 8, 4)[row, 3, 1] = 255
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    poisoned[row] = inside(case)[row]
    assert_nan_exactly(case.run(), want, poisoned)


def test_scale_bytes_past_the_head_dim_are_ignored() -> None:
    case = make_case(parse("dense mxfp8 S=4 N=30 H=2 D=64 windows=full"))
    want = case.run()
    for name in ("q_scale", "kv_scale"):
        scale = case.tensors[name]
        scale.view(torch.uint8).view(*scale.shape, 4)[..., 2:] = 255
    assert_bitwise(case.run(), want)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("P", [3, 64])
def test_nan_pages_reach_the_rows_that_use_them_only(fmt: str, P: int) -> None:
    columns = -(-300 // P)
    line = f"paged {fmt} B=3 next_n=2 H=4 D=64 P={P} blocks={4 * columns} columns={columns} L=300"
    case = make_case(parse(f"{line} lens=random clean=1 seed=3"))
    want, t = case.run(), case.tensors
    cache, lens = t["cache"], t["lens"]
    b = int(lens.amax(1).argmax())
    n = int(lens[b].max()) // 2
    block, slot = int(t["table"][b, n // P]), n % P
    stored = cache.shape[3] - 4
    scale = cache[block].view(-1)[P * stored + 4 * slot :][:4]
    if fmt == "bf16":
        poison_element(cache, (block, slot, 0, 9))
    elif fmt == "fp8":
        scale.copy_(torch.tensor([torch.nan]).view(torch.uint8))
    else:
        scale.fill_(255)
    poisoned = torch.zeros_like(want, dtype=torch.bool)
    poisoned[2 * b : 2 * b + 2, n] = lens[b] > n
    assert_nan_exactly(case.run(), want, poisoned)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("H", [1, 2, 64])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_the_zero_plateau_is_plus_zero(fmt: str, H: int, out: torch.dtype) -> None:
    """All dots at most 0: exactly +0.0, whatever the signs of the weights."""
    case = dense_case(fmt, "full", H)
    q, k = (case.tensors[name] for name in ("q", "kv"))
    if fmt == "bf16":
        q.abs_(), k.abs_().neg_()
    elif fmt == "mxfp4":
        q.view(torch.uint8).bitwise_and_(0x77)
        k.view(torch.uint8).bitwise_or_(0x88)
    else:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
        q &= 0x7F
        k |= 0x80
        q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    for weights in (case.tensors["w"], -case.tensors["w"].abs(), case.tensors["w"].abs()):
        kwargs = case.kwargs | {"weights": weights, "logits_dtype": out}
        got = mqa.fp8_fp4_mqa_logits(**kwargs)
        assert_bitwise(got, torch.zeros_like(got))


@pytest.mark.parametrize("H", [1, 3, 8, 64])
@pytest.mark.parametrize("windows", ["full", "random"])
def test_infinities_of_bf16_do_what_the_definition_says(H: int, windows: str) -> None:
    """An infinite dot is cut to 0 by relu if negative, gives NaN beside a zero weight or element,
    and heads and dims that pad products add nothing."""
    line = f"dense bf16 S=20 N=300 H={H} D=35 windows={windows} regime=exact seed=4"
    case = make_case(parse(line))
    t = case.tensors
    for n in range(0, 300, 7):
        t["kv"][n, n % 35] = torch.inf if n % 2 else -torch.inf
    t["kv"][8, 3], t["kv"][8, 4] = torch.inf, torch.inf
    t["q"][:10].abs_()
    t["q"][0, 0, 7] = t["q"][4, :, 9] = torch.inf
    t["q"][1, :, 14] = 0
    t["w"][2, -1] = 0
    t["w"][3] = torch.inf
    want = definition.dense(
        t["q"], None, t["kv"], None, t["w"], t["start"], t["end"], case.problem.M
    )
    got = case.run()
    assert_bitwise(got, definition.round_once(want, torch.float32))
    seen = inside(case)
    for kind in (torch.isinf, torch.isnan, torch.isfinite):
        assert kind(got[seen]).any()
    lens = torch.full((1, 20), 300, dtype=torch.int32)
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    cache = torch.zeros(4, 80, 1, 35, dtype=torch.bfloat16)
    cache.view(-1, 35)[:300] = t["kv"]
    paged = mqa.fp8_fp4_paged_mqa_logits(t["q"][None], cache, t["w"], lens, table, None, 300)
    assert_bitwise(torch.where(seen, paged, -torch.inf), got)


def test_entries_with_a_positive_dot_do_not_become_zero() -> None:
    case = dense_case("fp8", "full", 1)
    assert (case.run() != 0).float().mean() > 0.2
