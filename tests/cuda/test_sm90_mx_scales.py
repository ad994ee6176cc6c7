"""MX elements and block scales on Hopper mean what the definition says, code by code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mx_cases import FORMATS, NAN_CODES, ONE, RANGE, assert_paged_alike, scale_bytes
from torch import Tensor

from mqa.reference import definition
from mqa.testing import Case, assert_bitwise

pytestmark = pytest.mark.gpu
SHAPES = ((8, 64), (64, 128), (128, 64))
MODERATE = 80
"""Results whose scales amount to 2^+-80 are exact: no partial sum leaves float32's normal range."""


def full_case(sm90: Any, format: str, H: int, D: int, *, S: int = 16, N: int = 130) -> Case:
    """Every row sees every token; small integers, whose sums are exact."""
    return sm90.case(f"dense {format} S={S} N={N} H={H} D={D} windows=full regime=exact seed=4")


def defined(case: Case) -> Tensor:
    t = case.tensors
    inputs = (t["q"], t["q_scale"], t["kv"], t["kv_scale"], t["w"], t["start"], t["end"])
    return definition.round_once(definition.dense(*inputs), torch.float32)


def shuffled(low: int, high: int, count: int, device: Any) -> Tensor:
    """Each of low .. high once or more, in a random order: large and small ones side by side."""
    codes = torch.arange(count) % (high + 1 - low) + low
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return codes[order].to(torch.uint8).to(device)


@pytest.mark.parametrize(("H", "D"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_guaranteed_scale_code_scales(sm90: Any, format: str, H: int, D: int) -> None:
    """One code a row, one a token. What is too small is tiny, what is too large may be anything."""
    case = full_case(sm90, format, H, D, S=256, N=300)
    t, bounds = case.tensors, RANGE[format]
    rows, tokens = shuffled(*bounds, 256, sm90.device), shuffled(*bounds, 300, sm90.device)
    scale_bytes(t["q_scale"])[:] = rows[:, None, None]
    scale_bytes(t["kv_scale"])[:] = tokens[:, None]
    got, want = sm90.call(case), defined(case)
    power = rows.int()[:, None] + tokens.int() - 2 * ONE
    moderate = power.abs() <= MODERATE
    assert moderate.float().mean() > 0.3
    assert_bitwise(torch.where(moderate, got, 0.0), torch.where(moderate, want, 0.0))
    small = power < -MODERATE
    assert (got[small].abs() < 2.0 ** (40 - MODERATE)).all()
    assert_paged_alike(sm90, case, got)


@pytest.mark.parametrize("far", [0, 1, 2, 60, 110])
@pytest.mark.parametrize(("H", "D"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_q_and_k_may_lie_far_apart(
    sm90: Any, format: str, H: int, D: int, far: int
) -> None:
    """q's blocks large where k's are tiny and the other way round, so that products are moderate.

    Blocks of one token, and tokens of one tile, have scales above 2 and below.
    """
    case = full_case(sm90, format, H, D)
    t = case.tensors
    blocks = torch.tensor((1, -1, -1, 1), device=sm90.device) * far
    q, k = scale_bytes(t["q_scale"]), scale_bytes(t["kv_scale"])
    head, token = (torch.arange(n, device=sm90.device) for n in (H, 130))
    q[:] = (ONE + blocks + head[:, None] % 2).to(torch.uint8)
    k[:] = (ONE - blocks + token[:, None] % 3).to(torch.uint8)
    got, want = sm90.call(case), defined(case)
    assert_bitwise(got, want, replay=case.problem)
    assert (got != 0).float().mean() > 0.2
    assert_paged_alike(sm90, case, got)


@pytest.mark.parametrize("code", [126, 127, 128, 129, 130])
@pytest.mark.parametrize("format", FORMATS)
def test_one_large_scale_in_a_tile_scales_its_own_block_alone(
    sm90: Any, format: str, code: int
) -> None:
    """Scales above 2 may take another way, which all tokens of a tile then take."""
    case = full_case(sm90, format, 64, 128)
    k = scale_bytes(case.tensors["kv_scale"])
    scale_bytes(case.tensors["q_scale"])[:] = ONE
    case.tensors["w"].sign_()  # Smaller sums: scales of one token are up to 2^5 apart.
    k[:] = torch.arange(126, 130, device=sm90.device).to(torch.uint8)
    k[::3] = 125
    for token, block in ((0, 0), (9, 1), (63, 2), (64, 3), (127, 1), (129, 3)):
        k[token, block] = code
    got = sm90.call(case)
    assert_bitwise(got, defined(case), replay=case.problem)
    assert_paged_alike(sm90, case, got)


@pytest.mark.parametrize(("H", "D"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_behind_the_blocks_are_ignored(sm90: Any, format: str, H: int, D: int) -> None:
    case = full_case(sm90, format, H, D)
    t, want = case.tensors, sm90.call(case)
    for filler in (0, 1, 254, 0xFF):
        for name in ("q_scale", "kv_scale"):
            scale_bytes(t[name])[..., D // 32 :] = filler
        assert_bitwise(sm90.call(case), want)
        assert_paged_alike(sm90, case, want)


def every_code(format: str, rows: int, D: int, device: Any) -> Tensor:
    """Codes of [rows, D] elements, as stored: every code but NaN at every dim, from 256 rows on."""
    row, dim = torch.arange(rows)[:, None], torch.arange(D)
    codes = row + 17 * dim
    if format == "mxfp8":
        codes %= 256
        codes[(codes == NAN_CODES[0]) | (codes == NAN_CODES[1])] = 0x80
        return codes.to(torch.uint8).to(device)
    codes %= 16
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).to(device)


def one_hot(format: str, rows: int, D: int, device: Any) -> Tensor:
    """[rows, D] elements, as stored: row r has 1 or, from row D on, -1 at dim r % D."""
    one, minus = (0x38, 0xB8) if format == "mxfp8" else (2, 10)
    row = torch.arange(rows)
    codes = torch.zeros(rows, D, dtype=torch.int64)
    codes[row, row % D] = torch.where(row < D, one, minus)
    if format == "mxfp4":
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.to(torch.uint8).to(device)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_every_element_code_of_k_is_decoded_at_every_dim(sm90: Any, format: str, D: int) -> None:
    case = full_case(sm90, format, 8, D, S=2 * D, N=256)
    t = case.tensors
    t["kv"].view(torch.uint8)[:] = every_code(format, 256, D, sm90.device)
    q = one_hot(format, 2 * D, D, sm90.device)
    t["q"].view(torch.uint8)[:] = q[:, None]
    scale_bytes(t["q_scale"])[:] = ONE
    t["w"].zero_()
    row = torch.arange(2 * D, device=sm90.device)
    t["w"][row, row % 8] = 1.0
    for scale in (ONE - 3, ONE, ONE + 1, ONE + 5):
        scale_bytes(t["kv_scale"])[:] = scale
        got = sm90.call(case)
        assert_bitwise(got, defined(case), replay=f"{case.problem} {scale}")
        assert_paged_alike(sm90, case, got)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_every_element_code_of_q_is_decoded_at_every_dim(sm90: Any, format: str, D: int) -> None:
    case = full_case(sm90, format, 8, D, S=256, N=2 * D)
    t = case.tensors
    t["kv"].view(torch.uint8)[:] = one_hot(format, 2 * D, D, sm90.device)
    t["q"].view(torch.uint8)[:] = every_code(format, 256, D, sm90.device)[:, None]
    scale_bytes(t["kv_scale"])[:] = ONE
    t["w"].zero_()
    row = torch.arange(256, device=sm90.device)
    t["w"][row, row % 8] = 1.0
    for scale in (ONE - 3, ONE, ONE + 1, ONE + 5):
        scale_bytes(t["q_scale"])[:] = scale
        got = sm90.call(case)
        assert_bitwise(got, defined(case), replay=f"{case.problem} {scale}")
        assert_paged_alike(sm90, case, got)
