"""One row of a suite: build both parties, check their results, time them, say what it means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import mqa
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.inputs import Inputs, rotation
from mqa.cli.gpu.judge import WrongResult, assert_agree, assert_defined
from mqa.cli.gpu.peers import Peer
from mqa.cli.gpu.rows import PEER, Call, Comparison, Metadata, Party
from mqa.cli.gpu.windows import causal
from mqa.reference import schedule
from mqa.testing.timing import Ratio, Work, interleaved

_TENSOR_CLOCKS = 2.0
"""SM clocks of the tensor unit per pair at H=64, D=128: 8192 multiply-adds at 4096 a clock."""
_EPILOGUE_CLOCKS = 1.0
"""SM clocks of the FP32 pipes per pair at 64 heads: 64 relus and 64 multiply-adds, 128 lanes."""
_FULL = 64 * 128
_SLACK = 5e-6
"""Seconds that an uneven call may take beyond its work at the even case's rate."""


class Turn:
    """Works that take turns: each call runs the next one."""

    def __init__(self, works: Sequence[Work], first: int = 0) -> None:
        self._works, self._at = works, first

    def __call__(self) -> None:
        self._works[self._at % len(self._works)]()
        self._at += 1


def measure(
    row: Comparison | Metadata, device: Device, peer: Peer, rounds: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """The row's entry in a report. Raises what building, checking or timing it raises."""
    try:
        if isinstance(row, Metadata):
            return _metadata(row, device, rounds)
        return _compare(row, device, peer, rounds, ceilings)
    finally:
        device.free()


def call_mqa(
    inputs: Inputs, call: Call, longest: int, out: Tensor | None = None
) -> Callable[[], Tensor]:
    """The public function, as an engine calls it; the schedule is made here, once."""
    cuts = None
    if call.scheduled:
        bounds = (inputs.start, inputs.end)
        cuts = mqa.get_mqa_logits_metadata(*bounds, len(inputs.k), inputs.q.shape[1])
    return functools.partial(
        mqa.fp8_fp4_mqa_logits,
        (inputs.q, None),
        (inputs.k, inputs.k_scale),
        inputs.w,
        inputs.start,
        inputs.end,
        clean_logits=call.clean,
        max_seqlen_k=longest if call.compressed else 0,
        logits_dtype=getattr(torch, call.logits),
        schedule_meta=cuts,
        out=out,
    )


def backend_of(party: Party, where: torch.device) -> str | None:
    """Which of our backends runs the party's calls. Raises WrongResult if a GPU would fall back."""
    found = mqa.supports(party.H, party.D, "fp8", **party.call.variant(), device=where)
    if where.type == "cuda" and found.backend in (None, "reference"):
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in found.reasons.items())
        raise WrongResult(f"no CUDA backend takes H={party.H} D={party.D}: {reasons}")
    return found.backend


class _Prepared:
    """A party with a graph for each set of inputs; `result` is what the first one fills."""

    def __init__(self, party: Party, sets: Sequence[Inputs], device: Device, peer: Peer) -> None:
        self.party, self.inputs = party, sets[0]
        self.backend = None if party.who == PEER else backend_of(party, device.where)
        # Replays read what the calls hold, such as schedules, so the calls must live as long.
        self._calls: list[Work] = []
        captured: list[tuple[Work, Tensor]] = []
        for inputs in sets:
            if party.who == PEER:
                work = peer.work(inputs, party.call)
            else:
                work = call_mqa(inputs, party.call, party.windows.longest)
            if not captured:
                work()  # compiles and loads
                device.synchronize()
            self._calls.append(work)
            captured.append(device.capture(work))
        self.replays = [replay for replay, _ in captured]
        self.results = [result for _, result in captured]
        self.results[0].fill_(torch.nan)
        for replay in self.replays:
            replay()
        device.synchronize()

    def error(self) -> float:
        return assert_defined(self.results[0], self.inputs, self.party.call)


def _compare(
    row: Comparison, device: Device, peer: Peer, rounds: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    sets = rotation(row.ours, device.where, device.l2_bytes)
    same = _same_inputs(row)
    others = sets if same else rotation(row.other, device.where, device.l2_bytes)
    other = _Prepared(row.other, others, device, peer)
    ours = _Prepared(row.ours, sets, device, peer)
    errors = {"ours": ours.error(), "other": other.error()}
    if same and row.other.call == row.ours.call:
        agree = (ours.results[0], other.results[0])
        errors["each other"] = assert_agree(*agree, ours.inputs, row.ours.call)
    turns = Turn(other.replays, len(others) // 2), Turn(ours.replays)
    ratio = interleaved(*turns, rounds=rounds, before=device.keep_busy, timer=device.seconds)
    hz = device.clock_hz(turns[1], ratio.b_seconds)
    return {
        "ratio": asdict(ratio),
        "errors": errors,
        "sets": len(sets),
        "set_bytes": sets[0].nbytes,
        "clock_mhz": hz / 1e6,
        "other": _side(other, ratio.a_seconds, device, hz),
        "ours": _side(ours, ratio.b_seconds, device, hz),
        **_bound(row, ratio, sets[0].nbytes, ceilings),
    }


def _same_inputs(row: Comparison) -> bool:
    a, b = row.other, row.ours
    sizes = (a.H, a.D, a.windows.rows, a.windows.keys, a.call.weights)
    return (
        sizes == (b.H, b.D, b.windows.rows, b.windows.keys, b.call.weights)
        and bool((a.windows.start == b.windows.start).all())
        and bool((a.windows.end == b.windows.end).all())
    )


def _side(side: _Prepared, seconds: float, device: Device, hz: float) -> dict[str, Any]:
    """What one party did, and how close that is to the floors. `hz` was read under ours."""
    party = side.party
    work, pairs = party.H * party.D, party.windows.pairs
    floors = {
        "tensor": _TENSOR_CLOCKS * work / _FULL,
        "epilogue": _EPILOGUE_CLOCKS * party.H / 64,
    }
    clocks = seconds * hz * device.sms / pairs
    return {
        "who": party.who,
        "label": party.label,
        "backend": side.backend,
        "S": party.windows.rows,
        "N": party.windows.keys,
        "H": party.H,
        "D": party.D,
        **asdict(party.call),
        "seconds": seconds,
        "pairs": pairs,
        "tflops": 2 * work * pairs / seconds / 1e12,
        "clocks_per_pair": clocks,
        "floor_clocks": floors,
        "share_of_floor": max(floors.values()) / clocks,
    }


def _bound(
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
        limit = ratio.a_seconds * mine / even + _SLACK
        return {"hull": mine, "limit_seconds": limit, "of_limit": ratio.b_seconds / limit}
    if row.group == "cleaning":
        itemsize = getattr(torch, row.other.call.logits).itemsize
        cells = windows.rows * windows.keys
        every, outside = (n * itemsize / ceilings["fill"] for n in (cells, cells - windows.pairs))
        extra = ratio.a_seconds - ratio.b_seconds
        return {"fill_seconds": every, "outside_seconds": outside, "extra_seconds": extra}
    return {}


def _metadata(row: Metadata, device: Device, rounds: int) -> dict[str, Any]:
    """The schedule of causal windows against the shortest kernel: the rest of it is launch."""
    windows = causal(row.S, row.N)
    start, end = (torch.from_numpy(bound).int() for bound in (windows.start, windows.end))
    arguments = (start.to(device.where), end.to(device.where), row.N, row.H)
    one, cuts = torch.zeros(1, device=device.where), mqa.get_mqa_logits_metadata(*arguments)
    works: tuple[Callable[[], Tensor], ...] = (
        lambda: one.fill_(1.0),
        lambda: mqa.get_mqa_logits_metadata(*arguments, out=cuts),
    )
    for work in works:
        work()
    device.synchronize()
    (shortest, _), (mine, _) = (device.capture(work) for work in works)
    cuts.zero_()
    shortest()
    mine()
    wanted = schedule.dense_metadata(start, end, row.N, row.H, mqa.get_num_sms(device.where))
    if not torch.equal(cuts.cpu(), wanted):
        raise WrongResult("the schedule differs from that of the reference")
    ratio = interleaved(
        shortest, mine, rounds=rounds, before=device.keep_busy, timer=device.seconds
    )
    extra = ratio.b_seconds - ratio.a_seconds
    return {"hot": True, "ratio": asdict(ratio), "extra_seconds": extra}
