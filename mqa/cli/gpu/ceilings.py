"""What the GPU can do at best, measured in the same run: matrix products, writing, reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mqa.cli.gpu.device import Device
from mqa.testing.timing import Work

SIDE = 8192
_FILL_BYTES = 1 << 30
_SUM_BYTES = 2 << 30
_TIMES = 15


@dataclass(frozen=True)
class Ceiling:
    """Work whose rate is a ceiling: `amount` of `unit` in one run."""

    title: str
    unit: str
    amount: float
    make: Callable[[torch.device], Work]


CEILINGS = {
    "fp8": Ceiling(f"FP8 product {SIDE}³", "FLOP", 2.0 * SIDE**3, lambda where: _product(where)),
    "fill": Ceiling("fill 1 GiB", "B", float(_FILL_BYTES), lambda where: _fill(where)),
    "read": Ceiling("sum over 2 GiB", "B", float(_SUM_BYTES), lambda where: _sum(where)),
}


def measure_ceilings(device: Device) -> tuple[dict[str, float], dict[str, str]]:
    """Rates a second by name: FLOP for fp8, bytes for fill and read. And, by name, why there is
    none: what torch cannot do on a GPU must not end a suite there."""
    rates, failures = {}, {}
    for name, ceiling in CEILINGS.items():
        try:
            rates[name] = ceiling.amount / _median(ceiling.make(device.where), device)
        except RuntimeError as error:
            failures[name] = f"{type(error).__name__}: {error}"
        device.free()
    return rates, failures


def _median(work: Work, device: Device) -> float:
    seconds = []
    for _ in range(_TIMES):
        work()
        device.keep_busy()
        seconds.append(device.seconds(work))
    return float(np.median(seconds))


def _product(where: torch.device) -> Work:
    a, b = (torch.randn(SIDE, SIDE, device=where).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=where)
    return lambda: torch._scaled_mm(
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _fill(where: torch.device) -> Work:
    block = torch.empty(_FILL_BYTES // 4, device=where)
    return lambda: block.fill_(-torch.inf)


def _sum(where: torch.device) -> Work:
    block = torch.zeros(_SUM_BYTES // 4, device=where)
    return block.sum
