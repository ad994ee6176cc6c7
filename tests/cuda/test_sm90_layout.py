"""On Hopper any window, stride and address that a call may have gives the right logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mqa
from mqa.testing import assert_bitwise, guards_intact, to_tensor
from mqa.testing.oracle import logits

pytestmark = pytest.mark.gpu
HEADS = (8, 16, 32, 64, 128)


def ints(device: torch.device, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


ODD_WINDOWS = (
    (0, 0), (300, 300), (5, 5), (7, 3), (300, 0), (0, 1), (299, 300), (127, 128), (128, 129),
    (255, 257), (-9, 1), (-9, -2), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31)), (290, 301),
    (0, 2**31 - 1), (301, 400), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31)), (150, 300),
)  # fmt: skip


@pytest.mark.parametrize("fill", [None, (0, 0), (0, 300)])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("H", HEADS)
def test_empty_inverted_and_far_windows_are_clamped(
    sm90: Any, H: int, clean: bool, fill: tuple[int, int] | None
) -> None:
    """All of them in one call, each beside rows with an empty or a full window, each alone."""
    case = sm90.case(f"dense fp8 S=40 N=300 H={H} D=64 windows=full seed=2 clean={int(clean)}")
    want = sm90.call(case)
    other = fill or (17, 190)
    windows = [w for odd in ODD_WINDOWS for w in (odd, other)]
    bounds = ints(sm90.device, windows)
    position = torch.arange(300, device=sm90.device)
    valid = (position >= bounds[:, :1]) & (position < bounds[:, 1:])
    want = torch.where(valid, want, -torch.inf)
    where = None if clean else valid.cpu().numpy()
    case.tensors["start"].copy_(bounds[:, 0])
    case.tensors["end"].copy_(bounds[:, 1])
    for meta in (None, sm90.metadata(case)):
        out = case.new_out()
        assert_bitwise(sm90.run(case, out=out, schedule_meta=meta), want, where=where)
        assert guards_intact(out)
    for row in range(0, 40, 2):
        rows = slice(row, row + 1)
        part = None if clean else where[rows]
        assert_bitwise(sm90.call(case, rows, clean_logits=clean), want[rows], where=part)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 127, 128, 255, 256, 511, 512, 699])
def test_a_single_token_is_scored(sm90: Any, n: int) -> None:
    case = sm90.case("dense fp8 S=20 N=700 H=32 D=128 windows=full regime=exact seed=5")
    want = torch.full_like(sm90.call(case), -torch.inf)
    want[:, n] = to_tensor(logits(case).values, "float32")[:, n]
    case.tensors["start"].fill_(n)
    case.tensors["end"].fill_(n + 1)
    assert_bitwise(sm90.call(case), want)
    assert_bitwise(sm90.call(case, max_seqlen_k=1), want[:, n : n + 1])


@pytest.mark.parametrize("N", [1, 2, 3, 5, 127, 129, 255, 257, 1021, 1022, 1023, 4100])
def test_sizes_that_no_tile_divides_are_right(sm90: Any, N: int) -> None:
    all_facts = ("windows=full", "windows=random clean=0 out=bfloat16", f"M={N + 2}")
    for at, S in enumerate((1, 3, 7, 65, 129)):
        H = HEADS[(N + at) % 5] if S * N < 2**15 else 8
        for facts in all_facts if S < 65 else all_facts[:1]:
            sm90.check(f"dense fp8 S={S} N={N} H={H} D=64 regime=exact seed={N} {facts}")


INPUTS = (
    "start_stride=2 end_stride=2",
    "start_stride=3 end_stride=1 start_off=4 end_off=12",
    "start_stride=0 end_stride=0",
    "w_stride=130",
    "w_stride=129 w_off=4",
    "w_stride=131 w_off=12 weights=bfloat16",
    "w_stride=200 w_off=2 weights=bfloat16",
    "w_stride=0",
    "kv_scale_off=4",
    "kv_scale_off=8",
    "kv_scale_off=12",
    "kv_scale_stride=2",
    "kv_scale_stride=5 kv_scale_off=4",
    "kv_stride=160",
    "kv_stride=144 kv_scale_off=12 start_stride=2 w_stride=133 w_off=8",
)


@pytest.mark.parametrize("layout", INPUTS)
def test_strided_and_offset_inputs_are_right(sm90: Any, layout: str) -> None:
    for S, H in ((1, 16), (2, 128), (5, 32), (19, 8), (19, 64)):
        line = f"dense fp8 S={S} N=301 H={H} D=128 windows=random seed=6 regime=exact {layout}"
        sm90.check(line)
        if S < 19:
            sm90.check(f"{line} M=302 clean=0")


OUTPUTS = (
    "out_off=4 out_stride=301",
    "out_off=8 out_stride=303",
    "out_off=12 out_stride=1000",
    "out=bfloat16 out_off=2 out_stride=301",
    "out=bfloat16 out_off=6 out_stride=307",
    "out=float16 out_off=2 out_stride=302",
    "out=float16 out_off=14 out_stride=305",
)


@pytest.mark.parametrize("layout", OUTPUTS)
def test_any_aligned_out_is_filled_and_nothing_around_it(sm90: Any, layout: str) -> None:
    for S, H in ((1, 128), (3, 64), (9, 32), (19, 16), (70, 8)):
        line = f"dense fp8 S={S} H={H} D=64 windows=random seed=7 regime=exact {layout}"
        for facts in ("N=301", "N=301 clean=0", "N=297 M=301", "N=400 M=301 clean=0"):
            sm90.check(f"{line} {facts}")


def test_windows_that_share_one_tensor_are_read(sm90: Any) -> None:
    case = sm90.case("dense fp8 S=33 N=301 H=64 D=128 windows=random seed=6")
    t = case.tensors
    both = torch.stack((t["start"], t["end"]), 1)
    want = sm90.call(case)
    windows = {"cu_seq_len_k_start": both[:, 0], "cu_seq_len_k_end": both[:, 1]}
    assert_bitwise(sm90.call(case, **windows), want)
    cut = both.flatten()[1:]
    for rows in (slice(0, 32), slice(0, 1)):
        part = {"cu_seq_len_k_start": t["start"][rows], "cu_seq_len_k_end": cut[::2][rows]}
        assert_bitwise(sm90.call(case, rows, **part), want[rows])


def test_strides_of_dimensions_of_size_one_mean_nothing(sm90: Any) -> None:
    case = sm90.case("dense fp8 S=5 N=301 H=16 D=64 windows=full seed=8")
    t, want = case.tensors, sm90.call(case)
    q = t["q"].view(torch.uint8)[:1].as_strided((1, 16, 64), (7, 64, 1)).view(torch.float8_e4m3fn)
    out = torch.empty(400, device=sm90.device).as_strided((1, 301), (1, 1), 3)
    one = slice(0, 1)
    assert_bitwise(sm90.call(case, one, q=q, out=out), want[one])
    k = t["kv"].view(torch.uint8).as_strided((1, 64), (33, 1)).view(torch.float8_e4m3fn)
    kv = (k, t["kv_scale"][:1].as_strided((1,), (9,)))
    column = torch.full((60,), torch.nan, device=sm90.device).as_strided((5, 1), (11, 7), 2)
    assert_bitwise(sm90.call(case, kv=kv, out=column), want[:, :1])


UNUSUAL = (
    "w_stride=1x20",
    "w_stride=300x2",
    "kv_stride=0",
    "kv_stride=16",
    "kv_stride=65",
    "kv_stride=64x0",
    "kv_off=8",
    "q_off=4",
    "q_stride=1040",
    "kv_scale_stride=0",
)


@pytest.mark.parametrize("layout", UNUSUAL)
def test_unusual_strides_are_right_or_refused(sm90: Any, layout: str) -> None:
    """Overlapping k, transposed weights and the like: never a wrong result, never a crash."""
    case = sm90.case("dense fp8 S=20 N=301 H=16 D=64 windows=random seed=6")
    t = dict(case.tensors)
    name, _, fact = layout.rpartition("_")
    aspect, _, numbers = fact.partition("=")
    raw = t[name].view(torch.uint8) if t[name].element_size() == 1 else t[name]
    strides = [*map(int, numbers.split("x"))] if aspect == "stride" else list(raw.stride())
    strides += raw.stride()[len(strides) :]
    offset = int(numbers) if aspect == "off" else 0
    memory = torch.cat((raw.flatten(), raw.flatten()[:64], *[raw.flatten()[:320]] * 20))
    t[name] = memory.as_strided(raw.shape, strides, offset).view(t[name].dtype)
    changes = {"q": t["q"], "kv": (t["kv"], t["kv_scale"]), "weights": t["w"]}
    try:
        got = sm90.call(case, **changes)
    except mqa.BackendUnavailableError:
        return
    dense = {name: value.clone(memory_format=torch.contiguous_format) for name, value in t.items()}
    plain = {"q": dense["q"], "kv": (dense["kv"], dense["kv_scale"]), "weights": dense["w"]}
    assert_bitwise(got, sm90.call(case, **plain))
