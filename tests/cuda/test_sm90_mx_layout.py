"""MX logits on Hopper take the strides and addresses that the contract allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mx_cases import FORMATS, mx_line, short_dtype

import mqa
from mqa.testing import assert_bitwise

pytestmark = pytest.mark.gpu

BOTH = (
    "q_scale_stride={scale} q_scale_off=4",
    "q_scale_off=12 w_stride=129 w_off=4",
    "w_stride=131 w_off=6 weights=bfloat16",
    "out_off=12 out_stride=333",
    "out={short} out_off=2 out_stride=303",
)
DENSE = (
    "q_stride=32768x160",
    "q_stride=160x16384 q_scale_stride=1x40",
    "q_scale_stride=300x2 kv_scale_off=12",
    "kv_scale_stride=3 kv_scale_off=4",
    "kv_stride=160 kv_scale_off=8",
    "start_stride=2 end_stride=3 start_off=4",
)
PAGED = (
    "q_stride=65536x32768x160",
    "cache_stride=9216",
    "cache_stride=8464 q_scale_stride=600x300x2",
    "lens_stride=7x3 lens_off=4 table_stride=20x3 table_off=12",
)
SHAPES = ((8, 128), (64, 64), (128, 128))


def test_views_are_taken_as_they_are(sm90: Any) -> None:
    """Padded heads of q, a transposed scale, the same weights for every row."""
    case = sm90.case("dense mxfp8 S=12 N=70 H=16 D=64 windows=full seed=3")
    q, scale = case.tensors["q"], case.tensors["q_scale"]
    wide = torch.zeros(12, 16, 96, dtype=torch.uint8, device=sm90.device)[..., :64]
    wide.copy_(q.view(torch.uint8))
    turned = scale.T.contiguous().T
    assert turned.stride() != scale.stride()
    got = sm90.call(case, q=(wide.view(q.dtype), turned))
    assert_bitwise(got, sm90.call(case))
    weights = case.tensors["w"][:1].expand(12, -1)
    assert_bitwise(sm90.call(case, weights=weights), sm90.call(case, weights=weights.clone()))


@pytest.mark.parametrize("layout", BOTH + DENSE)
@pytest.mark.parametrize("format", FORMATS)
def test_strided_and_offset_dense_tensors_are_right(sm90: Any, format: str, layout: str) -> None:
    for at, (H, D) in enumerate(SHAPES):
        facts = layout.format(scale="300x2", short=short_dtype(format, H, D))
        S = 19 if at % 2 else 5
        line = f"dense {format} S={S} N=301 H={H} D={D} windows=random seed=6 regime=exact {facts}"
        sm90.check(line)
        sm90.check(f"{line} M=302 clean=0")


@pytest.mark.parametrize("layout", BOTH + PAGED)
@pytest.mark.parametrize("format", FORMATS)
def test_strided_and_offset_paged_tensors_are_right(sm90: Any, format: str, layout: str) -> None:
    for at, (H, D) in enumerate(SHAPES):
        facts = layout.format(scale="600x300x2", short=short_dtype(format, H, D))
        line = f"next_n=2 H={H} D={D} lens=random regime=exact clean={at % 2} seed=6 {facts}"
        sm90.check(mx_line(format, 64, 301, line))


REFUSED = (
    ("dense", "q_stride=2056", "q is not rows"),
    ("dense", "q_off=8", "q is 8 bytes off"),
    ("dense", "kv_stride=72", "kv is not rows"),
    ("paged", "q_stride=20480x4096", "q has 20480 from one request"),
    ("paged", "q_scale_stride=700x300", "q_scale has 700 from one request"),
    ("paged", "cache_stride=4360", "pages of cache"),
)


@pytest.mark.parametrize(("kind", "layout", "reason"), REFUSED)
@pytest.mark.parametrize("format", FORMATS)
def test_other_layouts_are_refused_with_a_reason(
    sm90: Any, format: str, kind: str, layout: str, reason: str
) -> None:
    sizes = "S=3 N=40" if kind == "dense" else "B=2 next_n=2 P=64 blocks=9 columns=3 L=99"
    case = sm90.case(f"{kind} {format} {sizes} H=32 D=64 {layout}")
    with pytest.raises(mqa.BackendUnavailableError, match=reason):
        sm90.run(case)
