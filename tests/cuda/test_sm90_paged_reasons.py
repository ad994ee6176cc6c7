"""Which paged calls the Hopper backend refuses, and why; without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from mqa.cuda import operands
from mqa.cuda.sm90 import SM90
from mqa.problem import parse

GPU = torch.device("cuda", 0)
SIZES = "blocks=20 columns=3 L=99"
LINE = f"paged fp8 B=3 next_n=2 H=64 D=128 P=64 {SIZES}"
RUNS = f"paged fp8 B=5 next_n=1 H=64 D=128 P=64 {SIZES} varlen=1"
SHAPES = [*itertools.product(operands.HEADS, operands.HEAD_DIMS)]


def reasons(line: str) -> list[str]:
    return [*SM90.reasons_against(parse(line), GPU)]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("facts", ["", "clean=1 lens_rank=1", "out=float16 weights=bfloat16 sms=7"])
def test_what_the_kernels_do_has_no_reason_against_it(facts: str) -> None:
    for (H, D), P in itertools.product(SHAPES, (8, 16, 32, 64, 128, 256)):
        for rows in ("next_n=1", "next_n=1 varlen=1", "next_n=9"):
            assert reasons(f"paged fp8 B=3 {rows} H={H} D={D} P={P} {SIZES} {facts}") == []
    for layout in (
        "cache_stride=9216",
        "q_stride=32768x16384x256",
        "w_stride=65x1 w_off=4",
        "lens_stride=5x2 lens_off=4",
        "table_stride=7x2 table_off=12",
        "table_stride=0",
        "out_stride=101 out_off=4",
    ):
        assert reasons(f"{LINE} {layout} {facts.replace('lens_rank=1', '')}") == []
    assert reasons(f"{RUNS} indices_stride=2 indices_off=4 {facts}") == []


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE.replace("P=64", "P=4"), "P=4 is not one of 8, 16, 32, 64, 128, 256"),
        (LINE.replace("P=64", "P=24"), "P=24 is not one of 8, 16, 32, 64, 128, 256"),
        (LINE.replace("P=64", "P=512"), "P=512 is not one of 8, 16, 32, 64, 128, 256"),
        (LINE.replace("H=64", "H=24"), "H=24 is not one of 8, 16, 32, 64, 128"),
        (LINE.replace("D=128", "D=96"), "D=96 is not one of 32, 64, 128"),
        (LINE.replace("fp8", "mxfp8").replace("D=128", "D=32"), "D=32 is not one of 64, 128"),
        (LINE.replace("fp8", "mxfp4").replace("D=128", "D=96"), "D=96 is not one of 64, 128"),
        (f"{LINE} q_off=8", "q is 8 bytes off a multiple of 16"),
        (f"{LINE} cache_off=4", "cache is 4 bytes off a multiple of 16"),
        (f"{LINE} cache_stride=8456", "pages of cache overlap, or do not begin at"),
        (f"{LINE} cache_stride=64", "pages of cache overlap, or do not begin at"),
        (f"{LINE} q_stride=16400x8200x128x1", "q is not rows of 128 contiguous bytes"),
        (f"{LINE} q_stride=16384x8192x136x1", "q is not rows of 128 contiguous bytes"),
        (f"{LINE} q_stride=16384x8192x64x1", "q is not rows of 128 contiguous bytes"),
        (f"{LINE} q_stride=16384x8192x128x2", "q is not rows of 128 contiguous bytes"),
        (f"{LINE} q_stride=32768x8192x128x1", "q has 32768 from one request to the next"),
        (f"{LINE} q_stride=8192x16384x128x1", "q has 8192 from one request to the next"),
    ],
)
def test_each_thing_that_the_kernels_cannot_do_is_one_reason(line: str, words: str) -> None:
    (reason,) = reasons(line)
    assert reason.startswith(words)


@pytest.mark.usefixtures("hopper")
def test_all_reasons_are_told_at_once() -> None:
    line = LINE.replace("fp8", "mxfp8").replace("H=64 D=128 P=64", "H=24 D=96 P=5")
    assert len(reasons(f"{line} q_off=8 cache_off=4 cache_stride=9999 q_stride=9999x9x8x1")) == 8


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "line",
    [
        "paged fp8 B=1 next_n=2 H=64 D=128 P=64 blocks=1 columns=1 L=9 q_stride=5x16384x128x1",
        "paged fp8 B=3 next_n=1 H=64 D=128 P=64 blocks=9 columns=1 L=9 q_stride=16384x5x128x1",
        "paged fp8 B=1 next_n=1 H=64 D=128 P=64 blocks=9 columns=1 L=9 q_stride=5x5x256x1",
        "paged fp8 B=2 next_n=2 H=64 D=128 P=64 blocks=1 columns=1 L=9 cache_stride=5x132x132x1",
        "paged fp8 B=2 next_n=2 H=64 D=128 P=64 blocks=0 columns=1 L=9 cache_stride=5x132x132x1",
    ],
)
def test_strides_of_dimensions_of_size_one_are_no_reason(line: str) -> None:
    assert reasons(line) == []


@pytest.mark.usefixtures("hopper")
def test_a_line_may_leave_out_strides_of_inner_dimensions() -> None:
    whole = "q_stride=32768x8192x128x1"
    for part in ("q_stride=32768", "q_stride=32768x8192", whole):
        assert reasons(f"{LINE} {part}") == reasons(f"{LINE} {whole}") != []
