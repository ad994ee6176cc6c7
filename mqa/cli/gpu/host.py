"""What one call costs on the host: `mqa bench --suite host`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mqa
from mqa.cli.gpu.calls import backend_of, call_mqa
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.inputs import Inputs, draw
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


@dataclass(frozen=True)
class Setup:
    """What a row is made of."""

    sets: Sequence[Inputs]
    device: Device
    peer: Peer
    calls: int
    """Runs that all works of the row will see, together."""


Make = Callable[[Setup], list[Work]]
"""One call for each set of inputs."""


def _with_out(setup: Setup) -> list[Work]:
    return [_call(inputs, out=_out(setup.device)) for inputs in setup.sets]


def _fresh(setup: Setup) -> list[Work]:
    return [_call(inputs) for inputs in setup.sets]


def _scheduled(setup: Setup) -> list[Work]:
    call = Call(schedule="fresh")
    return [_call(inputs, call, out=_out(setup.device)) for inputs in setup.sets]


def _new_sizes(setup: Setup) -> list[Work]:
    """Each call has one KV token more than any before: its result has a shape never seen.

    Windows stay, so the GPU has no more to do. All sets share k, whose views are made ahead.
    """
    first = setup.sets[0]
    tokens = len(first.k) + setup.calls
    k, scale = first.k.new_zeros(tokens, first.k.shape[1]), first.w.new_ones(tokens)
    sizes = range(len(first.k) + 1, tokens + 1)
    views = iter([(k[:size], scale[:size]) for size in sizes])

    def call(inputs: Inputs) -> None:
        bounds = inputs.start, inputs.end
        mqa.fp8_fp4_mqa_logits((inputs.q, None), next(views), inputs.w, *bounds, False)

    backend_of(PROBLEM, setup.device.where)
    return [functools.partial(call, inputs) for inputs in setup.sets]


def _compiled(setup: Setup) -> list[Work]:
    @torch.compile(fullgraph=True)
    def logits(
        q: Tensor, k: Tensor, scale: Tensor, w: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        return mqa.fp8_fp4_mqa_logits((q, None), (k, scale), w, start, end, False)

    return [functools.partial(logits, *_tensors(inputs)) for inputs in setup.sets]


def _peers(setup: Setup) -> list[Work]:
    return [setup.peer.work(inputs, PROBLEM.call) for inputs in setup.sets]


HOST_ROWS: dict[str, Make] = {
    "mqa, out=": _with_out,
    "mqa, fresh result": _fresh,
    "mqa, out= and schedule_meta": _scheduled,
    "mqa, a new N each call": _new_sizes,
    "mqa, torch.compile": _compiled,
    "peer": _peers,
}


def measure_host(make: Make, device: Device, peer: Peer, chunks: int) -> dict[str, Any]:
    """Seconds of one call on the host: same tensors each time, and rotating over 64 addresses."""
    generator = torch.Generator(device.where).manual_seed(0)
    sets = [draw(PROBLEM, generator) for _ in range(ADDRESSES)]
    works = make(Setup(sets, device, peer, calls=ADDRESSES + 2 * chunks * CALLS))
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
    return call_mqa(inputs, call, out)


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    assert inputs.k_scale is not None
    return inputs.q, inputs.k, inputs.k_scale, inputs.w, inputs.start, inputs.end


def _out(device: Device) -> Tensor:
    return torch.empty(PROBLEM.windows.rows, PROBLEM.windows.keys, device=device.where)
