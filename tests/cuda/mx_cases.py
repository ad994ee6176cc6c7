"""MX calls in the forms that tests of them share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from paged_cases import in_pages, paged_line
from torch import Tensor

import mqa
from mqa.testing import Case, assert_bitwise

FORMATS = ("mxfp8", "mxfp4")
HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 128)
KINDS = [*itertools.product(FORMATS, HEADS, HEAD_DIMS)]
NEXT_N = (1, 2, 3, 4, 8, 9)
"""Groups of 1 to 8 rows: with all H, every number of columns that a paged kernel is made for."""
RANGE = {"mxfp8": (10, 246), "mxfp4": (2, 252)}
"""The first and last scale code for which results are guaranteed."""
NAN_SCALE, ONE = 0xFF, 127
NAN_CODES = (0x7F, 0xFF)
"""Of E4M3."""


def spread(format: str) -> list[tuple[str, int, int, int]]:
    """(format, H, next_n, D): 64, 128, 256 and 512 columns, and groups of two blocks."""
    shapes = ((8, 1, 64), (16, 8, 128), (64, 1, 128), (64, 2, 64), (32, 8, 64), (128, 8, 128))
    return [(format, *shape) for shape in shapes]


SPREAD = [shape for format in FORMATS for shape in spread(format)]


def short_dtype(format: str, H: int, D: int) -> str:
    """The logits dtype that is tried beside float32: each more is a kernel more to compile."""
    turn = FORMATS.index(format) + HEADS.index(H) + HEAD_DIMS.index(D)
    return ("bfloat16", "float16")[turn % 2]


def mx_line(format: str, P: int, tokens: int, facts: str, *, B: int = 3) -> str:
    return paged_line(P, tokens, facts, B=B, format=format)


def scale_bytes(scales: Tensor) -> Tensor:
    """A view uint8 [..., 4] of packed scales: byte b is that of dims 32b .. 32b + 31."""
    return scales.unsqueeze(-1).view(torch.uint8)


def poison_dim(codes: Tensor, at: tuple[Any, ...], dim: int) -> None:
    """An E4M3 element becomes NaN; `dim` chooses which NaN."""
    codes.view(torch.uint8)[(*at, dim)] = NAN_CODES[dim % 2]


def paged_call(sm90: Any, arguments: dict[str, Any], **changes: Any) -> Tensor:
    with sm90.guard():
        return mqa.fp8_fp4_paged_mqa_logits(
            **(arguments | {"backend": sm90.backend.name} | changes)
        )


def assert_paged_alike(sm90: Any, case: Case, want: Tensor) -> None:
    """The rows of a dense case, whose windows begin at 0, have these logits from pages too."""
    for P, next_n in ((8, 1), (64, 2), (256, 4), (32, 8)):
        if case.problem.rows % next_n == 0:
            got = paged_call(sm90, in_pages(case, P, next_n))
            assert_bitwise(got, want, replay=f"{case.problem} P={P} next_n={next_n}")
