"""What times are held against: floors of the chip, rates, limits of the rows."""

from __future__ import annotations

from typing import Any

import torch

from mqa.cli.gpu.rows import Comparison, Party
from mqa.testing.timing import Ratio

_TENSOR_CLOCKS = 2.0
"""SM clocks of the tensor unit per pair at H=64, D=128: 8192 multiply-adds at 4096 a clock."""
_BFLOAT16_TIMES = 2
"""MX formats, and all in portable kernels, go through 16 bits, whose multiply-adds take that many
times as long."""
_EPILOGUE_CLOCKS = 1.0
"""SM clocks of the FP32 pipes per pair at 64 heads: 64 relus and 64 multiply-adds, 128 lanes."""
_FULL = 64 * 128
_SLACK = 5e-6
"""Seconds that an uneven call may take beyond its work at the even case's rate."""


_HOPPER, _BLACKWELL = 9, 10
"""Major compute capabilities; from the latter on there is tensor memory."""


def floors(party: Party, major: int) -> dict[str, float]:
    """SM clocks per pair below which the units cannot go, each for itself, by compute capability;
    nothing of portable kernels on GPUs whose units were not measured.

    Blackwell: 8192 multiply-adds a clock, 16384 of E2M1; a relu on one of two units, of 64 and 128
    lanes, of which the wider one has the multiply-adds too; 128 dots a clock from tensor memory.
    """
    if party.call.by == "portable" and major != _HOPPER:
        return {}
    if major >= _BLACKWELL:
        rate = 16384 if party.call.format == "mxfp4" else 8192
        tensor = party.H * party.D / rate
        return {"tensor": tensor, "epilogue": party.H / 96, "tensor memory": party.H / 128}
    as_it_is = party.call.format == "fp8" and party.call.by != "portable"
    times = 1 if as_it_is else _BFLOAT16_TIMES
    return {
        "tensor": times * _TENSOR_CLOCKS * party.H * party.D / _FULL,
        "epilogue": _EPILOGUE_CLOCKS * party.H / 64,
    }


def bound(
    row: Comparison, ratio: Ratio, set_bytes: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """What the row's group is held against, if that isn't the other party's time."""
    ours, windows = row.ours, row.ours.windows
    if row.group == "few rows":
        return {"read_seconds": set_bytes / ceilings["read"]}
    if row.group == "sizes":
        scale = ours.H * ours.D / _FULL
        return {"rate_over_even": ratio.median * scale}
    if row.group == "ragged":
        even, mine = row.other.windows.hull(row.other.H), windows.hull(ours.H)
        most = ratio.a_seconds * mine / even + _SLACK
        return {"hull": mine, "limit_seconds": most, "of_limit": ratio.b_seconds / most}
    if row.group in ("paged", "portable paged"):
        rate = ours.kv_bytes / ratio.b_seconds
        return {"read_rate": rate, "share_of_read": rate / ceilings["read"]}
    if row.group == "cleaning":
        cells = windows.rows * windows.keys
        every, outside = (_fill(row.other, n, ceilings) for n in (cells, cells - windows.pairs))
        extra = ratio.a_seconds - ratio.b_seconds
        return {"fill_seconds": every, "outside_seconds": outside, "extra_seconds": extra}
    return {}


def limit(row: Comparison, ratio: Ratio, ceilings: dict[str, float]) -> dict[str, Any]:
    """What the ratio has to be and whether its interval is.

    Where cleaning is compared with none it may take as long as the fill, if that is longer.
    """
    if row.limit is None:
        return {}
    value = row.limit.value
    facts: dict[str, Any] = {}
    if row.other.call.clean and not row.ours.call.clean:
        windows = row.other.windows
        cells = windows.rows * windows.keys - windows.pairs
        fill = _fill(row.other, cells, ceilings)
        value *= max(1.0, fill / ratio.b_seconds)
        facts["fill_seconds"] = fill
    least = row.limit.sense == "at_least"
    held = ratio.low >= value if least else ratio.high <= value
    return facts | {"limit": {row.limit.sense: value}, "held": held}


def _fill(party: Party, cells: int, ceilings: dict[str, float]) -> float:
    """Seconds that writing so many logits takes at best."""
    itemsize: int = getattr(torch, party.call.logits).itemsize
    return cells * itemsize / ceilings["fill"]
