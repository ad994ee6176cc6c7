"""What one call costs on the host: `mqa bench --suite host`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mqa
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.inputs import Inputs, draw
from mqa.cli.gpu.measure import backend_of, call_mqa
from mqa.cli.gpu.peers import Peer
from mqa.cli.gpu.rows import MQA, Call, Party
from mqa.cli.gpu.windows import causal
from mqa.testing.timing import Work

CALLS = 200
"""Calls between two synchronisations: fewer than the launch queue holds."""
ADDRESSES = 64
"""Sets of tensors in the rotating measurement."""
PROBLEM = Party(MQA, "host", causal(16, 1024), 64, 128, Call())
"""Small, so that the GPU keeps up with the host."""

Make = Callable[[Sequence[Inputs], Device, Peer], list[Work]]
"""One call for each set of inputs."""


def _with_out(sets: Sequence[Inputs], device: Device, peer: Peer) -> list[Work]:
    return [_call(inputs, out=_out(device)) for inputs in sets]


def _fresh(sets: Sequence[Inputs], device: Device, peer: Peer) -> list[Work]:
    return [_call(inputs) for inputs in sets]


def _scheduled(sets: Sequence[Inputs], device: Device, peer: Peer) -> list[Work]:
    call = Call(scheduled=True)
    return [_call(inputs, call, out=_out(device)) for inputs in sets]


def _compiled(sets: Sequence[Inputs], device: Device, peer: Peer) -> list[Work]:
    @torch.compile(fullgraph=True)
    def logits(
        q: Tensor, k: Tensor, scale: Tensor, w: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        return mqa.fp8_fp4_mqa_logits((q, None), (k, scale), w, start, end, False)

    return [lambda inputs=inputs: logits(*vars(inputs).values()) for inputs in sets]  # type: ignore[misc]


def _peers(sets: Sequence[Inputs], device: Device, peer: Peer) -> list[Work]:
    return [peer.work(inputs, PROBLEM.call) for inputs in sets]


HOST_ROWS: dict[str, Make] = {
    "mqa, out=": _with_out,
    "mqa, fresh result": _fresh,
    "mqa, out= and schedule_meta": _scheduled,
    "mqa, torch.compile": _compiled,
    "peer": _peers,
}


def measure_host(make: Make, device: Device, peer: Peer, chunks: int) -> dict[str, Any]:
    """Seconds of one call on the host: same tensors each time, and rotating over 64 addresses."""
    generator = torch.Generator(device.where).manual_seed(0)
    works = make([draw(PROBLEM, generator) for _ in range(ADDRESSES)], device, peer)
    for work in works:
        work()
    return {
        "warm_seconds": _host_seconds(works[:1], device, chunks),
        "rotating_seconds": _host_seconds(works, device, chunks),
        "addresses": len(works),
        "chunks": chunks,
    }


def _host_seconds(works: Sequence[Work], device: Device, chunks: int) -> float:
    """Median over chunks of the time of a chunk's calls, none of them waited for, by call."""
    seconds = []
    turns = [works[index % len(works)] for index in range(CALLS)]
    for _ in range(chunks):
        device.synchronize()
        begin = time.perf_counter()
        for work in turns:
            work()
        seconds.append((time.perf_counter() - begin) / CALLS)
    device.synchronize()
    return float(np.median(seconds))


def _call(inputs: Inputs, call: Call = PROBLEM.call, out: Tensor | None = None) -> Work:
    backend_of(PROBLEM, inputs.q.device)
    return call_mqa(inputs, call, PROBLEM.windows.longest, out)


def _out(device: Device) -> Tensor:
    return torch.empty(PROBLEM.windows.rows, PROBLEM.windows.keys, device=device.where)
