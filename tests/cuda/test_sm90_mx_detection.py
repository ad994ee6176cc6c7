"""The suite that judges MX on Hopper would notice a wrong kernel: planted faults show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mx_cases import FORMATS, mx_line, scale_bytes
from paged_cases import pool
from torch import Tensor

from mqa.testing import BOUNDED_FAULTS, EXACT_FAULTS, Case, flagged_fraction
from mqa.testing.faults import DETECTED

pytestmark = pytest.mark.gpu
SEEDS = range(8)
"""One in four moves the scales of q and k apart."""


def lines(format: str, facts: str) -> list[str]:
    dense = f"dense {format} S=4 N=40 windows=full {facts}"
    return [dense, mx_line(format, 16, 40, f"next_n=2 {facts}", B=2)]


@pytest.mark.parametrize(("H", "D"), [(8, 64), (8, 128), (64, 64)])
@pytest.mark.parametrize("format", FORMATS)
def test_bounded_cases_show_every_fault_on_every_seed(
    sm90: Any, format: Any, H: int, D: int
) -> None:
    model = sm90.model_of(format)
    for seed in SEEDS:
        for line in lines(format, f"H={H} D={D} seed={seed}"):
            case = sm90.case(line)
            for fault in BOUNDED_FAULTS:
                share = flagged_fraction(case, fault.logits(case, model), model)
                assert share >= DETECTED, (line, fault.name, share)


@pytest.mark.parametrize(("H", "D"), [(8, 64), (8, 128), (64, 64)])
@pytest.mark.parametrize("format", FORMATS)
def test_exact_cases_show_every_fault_on_every_seed(sm90: Any, format: Any, H: int, D: int) -> None:
    for seed in SEEDS:
        for line in lines(format, f"H={H} D={D} regime=exact seed={seed}"):
            case = sm90.case(line)
            for fault in EXACT_FAULTS:
                if fault.applies(case.data):
                    share = flagged_fraction(case, fault.logits(case))
                    assert share >= DETECTED, (line, fault.name, share)


def _drop_head(t: dict[str, Tensor], _: Tensor, __: Tensor) -> None:
    t["w"][:, -1] = 0


def _swap_weights(t: dict[str, Tensor], _: Tensor, __: Tensor) -> None:
    t["w"][:, :2] = t["w"][:, :2].flip(1)


def _swap_dims(t: dict[str, Tensor], _: Tensor, __: Tensor) -> None:
    """Neighbours: the nibbles of a byte, of MXFP4."""
    q = t["q"].view(torch.uint8)
    if t["q"].dtype == torch.float8_e4m3fn:
        q[..., :2] = q[..., :2].flip(-1)
    else:
        q[:] = q >> 4 | q << 4


def _drop_last_step(t: dict[str, Tensor], _: Tensor, __: Tensor) -> None:
    t["q"].view(torch.uint8)[..., -(t["q"].shape[-1] // 4) :] = 0


def _shift_k_scale(_: dict[str, Tensor], __: Tensor, scales: Tensor) -> None:
    scales.copy_(scales.roll(1, -1))


def _reverse_k_scale_bytes(t: dict[str, Tensor], codes: Tensor, scales: Tensor) -> None:
    blocks = codes.shape[-1] // (32 if t["q"].dtype == torch.float8_e4m3fn else 16)
    octets = scale_bytes(scales.contiguous())
    octets[..., :blocks] = octets[..., :blocks].flip(-1)
    scales.copy_(octets.view(torch.int32).squeeze(-1))


def _shift_q_scale(t: dict[str, Tensor], _: Tensor, __: Tensor) -> None:
    t["q_scale"].copy_(t["q_scale"].roll(1, -1))


def _shift_k_dims(_: dict[str, Tensor], codes: Tensor, __: Tensor) -> None:
    """By four dims of MXFP8, eight of MXFP4: a word, as if steps took others of k than of q."""
    codes.copy_(codes.roll(4, -1))


PLANTED: tuple[Callable[[dict[str, Tensor], Tensor, Tensor], None], ...] = (
    _drop_head,
    _swap_weights,
    _swap_dims,
    _drop_last_step,
    _shift_k_scale,
    _reverse_k_scale_bytes,
    _shift_q_scale,
    _shift_k_dims,
)


def keys(case: Case) -> tuple[Tensor, Tensor]:
    """Codes, bytes, and packed scales, as views."""
    t = case.tensors
    return pool(case) if "cache" in t else (t["kv"].view(torch.uint8), t["kv_scale"])


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.parametrize("H", [8, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_a_fault_fed_to_the_kernels_is_flagged(
    sm90: Any, format: Any, H: int, plant: Callable[[dict[str, Tensor], Tensor, Tensor], None]
) -> None:
    model = sm90.model_of(format)
    for seed in range(2):
        paged = [
            mx_line(format, 16, 48, f"next_n={next_n} H={H} D=64 clean=1 seed={seed}", B=2)
            for next_n in (1, 8)
        ]
        for line in (f"dense {format} S=16 N=64 H={H} D=64 windows=full seed={seed}", *paged):
            case = sm90.case(line)
            assert flagged_fraction(case, sm90.run(case), model) == 0, line
            plant(dict(case.tensors), *keys(case))
            assert flagged_fraction(case, sm90.run(case), model) >= DETECTED, line
