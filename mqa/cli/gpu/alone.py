"""Rows for their own time: calls and schedules beside the shortest kernel there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import mqa
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.graphs import Prepared
from mqa.cli.gpu.inputs import draw
from mqa.cli.gpu.judge import WrongResult
from mqa.cli.gpu.peers import Peer
from mqa.cli.gpu.rows import Alone, Metadata
from mqa.cli.gpu.windows import Batch
from mqa.reference import schedule
from mqa.testing.timing import Ratio, Work, interleaved


def measure_alone(row: Alone, device: Device, peer: Peer, rounds: int) -> dict[str, Any]:
    """A call beside the shortest kernel; its inputs are those of every replay."""
    inputs = draw(row.ours, torch.Generator(device.where).manual_seed(0))
    ours = Prepared(row.ours, [inputs], device, peer)
    error = ours.error()
    ratio = _beside_one_number(ours.replays[0], device, rounds)
    facts = {"backend": ours.backend, **row.ours.windows.sizes(), "H": row.ours.H, "D": row.ours.D}
    return {
        "hot": True,
        "ratio": asdict(ratio),
        "errors": {"ours": error},
        "ours": {"who": row.ours.who, "label": row.ours.label, **facts, **asdict(row.ours.call)},
        "limit_seconds": row.at_most,
        "held": ratio.b_seconds <= row.at_most,
    }


def measure_metadata(row: Metadata, device: Device, rounds: int) -> dict[str, Any]:
    """A schedule against the shortest kernel: the rest of it is launch."""
    make, wanted = _schedule(row, device.where)
    cuts = make()
    device.synchronize()
    mine, _ = device.capture(lambda: make(out=cuts))
    cuts.zero_()
    mine()
    if not torch.equal(cuts.cpu(), wanted):
        raise WrongResult("the schedule differs from that of the reference")
    ratio = _beside_one_number(mine, device, rounds)
    extra = ratio.b_seconds - ratio.a_seconds
    entry = {"hot": True, "ratio": asdict(ratio), "extra_seconds": extra}
    if row.at_most is not None:
        entry |= {"limit_seconds": row.at_most, "held": extra <= row.at_most}
    return entry


def _schedule(row: Metadata, where: torch.device) -> tuple[Callable[..., Tensor], Tensor]:
    """The call that makes it, and what the reference makes of the same."""
    windows, sms = row.windows, mqa.get_num_sms(where)
    if isinstance(windows, Batch):
        lens = torch.from_numpy(windows.lens).int()
        # Runs of four rows are a request, but the first one is shorter.
        indices = (torch.arange(len(lens)).int() + 1) // 4 if row.varlen else None
        there = None if indices is None else indices.to(where)
        make = functools.partial(
            mqa.get_paged_mqa_logits_metadata, lens.to(where), windows.page, sms, there
        )
        return make, schedule.paged_metadata(lens, sms, indices)
    start, end = (torch.from_numpy(bound).int() for bound in (windows.start, windows.end))
    bounds = (start.to(where), end.to(where))
    make = functools.partial(mqa.get_mqa_logits_metadata, *bounds, windows.keys, row.H)
    return make, schedule.dense_metadata(start, end, windows.keys, row.H, sms)


def _beside_one_number(work: Work, device: Device, rounds: int) -> Ratio:
    """Times of a kernel that writes one number, and of `work`."""
    number = torch.zeros(1, device=device.where)

    def write() -> Tensor:
        return number.fill_(1.0)

    write()
    device.synchronize()
    shortest, _ = device.capture(write)
    shortest()
    return interleaved(shortest, work, rounds=rounds, before=device.keep_busy, timer=device.seconds)
