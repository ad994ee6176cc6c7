"""What one call costs on the host: `mqa bench --suite host`."""

from __future__ import annotations

import dataclasses
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
from mqa.cli.gpu.windows import batch, causal
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

    party: Party
    sets: Sequence[Inputs]
    device: Device
    peer: Peer
    calls: int
    """Runs that all works of the row will see, together."""


Make = Callable[[Setup], list[Work]]
"""One call for each set of inputs."""


def _with_out(setup: Setup) -> list[Work]:
    return [_call(setup.party, inputs, _out(setup)) for inputs in setup.sets]


def _fresh(setup: Setup) -> list[Work]:
    return [_call(setup.party, inputs) for inputs in setup.sets]


def _scheduled(setup: Setup) -> list[Work]:
    party = _with_call(setup.party, schedule="fresh")
    return [_call(party, inputs, _out(setup)) for inputs in setup.sets]


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

    backend_of(setup.party, setup.device.where)
    return [functools.partial(call, inputs) for inputs in setup.sets]


def _compiled(setup: Setup) -> list[Work]:
    @torch.compile(fullgraph=True)
    def logits(
        q: Tensor, k: Tensor, scale: Tensor, w: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        return mqa.fp8_fp4_mqa_logits((q, None), (k, scale), w, start, end, False)

    return [functools.partial(logits, *_tensors(inputs)) for inputs in setup.sets]


def _peers(setup: Setup) -> list[Work]:
    return [setup.peer.work(inputs, setup.party.call) for inputs in setup.sets]


def _with_call(party: Party, **options: Any) -> Party:
    return dataclasses.replace(party, call=dataclasses.replace(party.call, **options))


def _mxfp8(party: Party) -> Party:
    return _with_call(party, format="mxfp8")


def _paged(party: Party) -> Party:
    """As many requests of one row as the dense call has rows."""
    windows = batch(party.windows.rows, 1, party.windows.keys)
    return dataclasses.replace(party, windows=windows)


def _dense(party: Party) -> Party:
    return party


HOST_ROWS: dict[str, tuple[Make, Callable[[Party], Party]]] = {
    "mqa, out=": (_with_out, _dense),
    "mqa, fresh result": (_fresh, _dense),
    "mqa, out= and schedule_meta": (_scheduled, _dense),
    "mqa, a new N each call": (_new_sizes, _dense),
    "mqa, torch.compile": (_compiled, _dense),
    "mqa, mxfp8, out=": (_with_out, _mxfp8),
    "mqa, paged, out=": (_with_out, _paged),
    "mqa, paged, out= and schedule_meta": (_scheduled, _paged),
    "mqa, paged mxfp8, out= and schedule_meta": (_scheduled, lambda party: _mxfp8(_paged(party))),
    "peer": (_peers, _dense),
}
"""How a row's works are made, and of what, given `PROBLEM`."""


def measure_host(name: str, device: Device, peer: Peer, chunks: int) -> dict[str, Any]:
    """Seconds of one call on the host: same tensors each time, and rotating over 64 addresses."""
    make, change = HOST_ROWS[name]
    party, generator = change(PROBLEM), torch.Generator(device.where).manual_seed(0)
    sets = [draw(party, generator) for _ in range(ADDRESSES)]
    works = make(Setup(party, sets, device, peer, calls=ADDRESSES + 2 * chunks * CALLS))
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


def _call(party: Party, inputs: Inputs, out: Tensor | None = None) -> Work:
    backend_of(party, inputs.q.device)
    return call_mqa(inputs, party.call, out)


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    assert inputs.k_scale is not None
    return inputs.q, inputs.k, inputs.k_scale, inputs.w, inputs.start, inputs.end


def _out(setup: Setup) -> Tensor:
    windows = setup.party.windows
    return torch.empty(windows.rows, windows.keys, device=setup.device.where)
