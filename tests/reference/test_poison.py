"""NaN goes exactly where it belongs: into the entries that use it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mqa
from mqa.problem import parse
from mqa.testing import Case, assert_bitwise, make_case

FORMATS = ("fp8", "mxfp8", "mxfp4")
NAN_CODE = 0x7F
NO_NAN = ("mxfp4", "value")


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


def poison_token(case: Case, n: int, how: str) -> None:
    values, scale = case.tensors["kv"].view(torch.uint8), case.tensors["kv_scale"]
    if how == "value":
        values[n, 5] = NAN_CODE
    elif scale.dtype == torch.float32:
        scale[n] = torch.nan
    else:
        scale.view(torch.uint8).view(300, 4)[n, 1] = 255


# E2M1 has no NaN, and plain FP8 no q scale.
@pytest.mark.parametrize(
    ("fmt", "how"),
    [(fmt, how) for fmt in FORMATS for how in ("value", "scale") if (fmt, how) != NO_NAN],
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
        tensor.view(torch.uint8)[row, 3, 7] = NAN_CODE
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
    if fmt == "fp8":
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
    q, k = case.tensors["q"].view(torch.uint8), case.tensors["kv"].view(torch.uint8)
    if fmt == "mxfp4":
        q &= 0x77
        k |= 0x88
    else:
        q &= 0x7F
        k |= 0x80
        q[q == NAN_CODE], k[k == 0xFF] = 0x38, 0xB8
    for weights in (case.tensors["w"], -case.tensors["w"].abs(), case.tensors["w"].abs()):
        kwargs = case.kwargs | {"weights": weights, "logits_dtype": out}
        got = mqa.fp8_fp4_mqa_logits(**kwargs)
        assert_bitwise(got, torch.zeros_like(got))


def test_entries_with_a_positive_dot_do_not_become_zero() -> None:
    case = dense_case("fp8", "full", 1)
    assert (case.run() != 0).float().mean() > 0.2
