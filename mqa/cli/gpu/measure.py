"""One row of a suite: build both parties, check their results, time them, say what it means."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from mqa.cli.gpu.alone import measure_alone, measure_metadata
from mqa.cli.gpu.bounds import bound, floors, limit
from mqa.cli.gpu.calls import Unsupported, backend_of
from mqa.cli.gpu.device import Device
from mqa.cli.gpu.graphs import Prepared, Turn
from mqa.cli.gpu.inputs import rotation
from mqa.cli.gpu.judge import assert_agree
from mqa.cli.gpu.peers import Peer
from mqa.cli.gpu.rows import PEER, Alone, Comparison, Metadata, Party, Row
from mqa.testing.timing import Work, interleaved


def measure(
    row: Row, device: Device, peer: Peer, rounds: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """The row's entry in a report. Raises what building, checking or timing it raises.

    A row of formats that no CUDA backend takes, or of a backend that is not for this GPU, is left
    out, and its entry says why.
    """
    try:
        if isinstance(row, Metadata):
            return measure_metadata(row, device, rounds) | _reported(row)
        if isinstance(row, Alone):
            return measure_alone(row, device, peer, rounds)
        return _compare(row, device, peer, rounds, ceilings)
    except Unsupported as error:
        if all(party.call.format == "fp8" and not party.call.by for party in row.parties):
            raise
        return {"left_out": str(error)}
    finally:
        device.free()


def _compare(
    row: Comparison, device: Device, peer: Peer, rounds: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    for party in row.parties:  # before their inputs are drawn
        if party.who != PEER:
            backend_of(party, device.where)
    sets = rotation(row.ours, device.where, device.l2_bytes)
    shared = _same_data(row) and _same_form(row)
    others = sets if shared else rotation(row.other, device.where, device.l2_bytes)
    others = others[: row.rounds or None]  # so few rounds need no more
    other = Prepared(row.other, others, device, peer)
    ours = Prepared(row.ours, sets, device, peer)
    errors = {"ours": ours.error(), "other": other.error()}
    if _same_data(row) and replace(row.other.call, by="") == replace(row.ours.call, by=""):
        agree = (ours.results[0], other.results[0])
        errors["each other"] = assert_agree(*agree, ours.inputs, row.ours.call)
    turns = Turn(other.replays, len(others) // 2), Turn(ours.replays)
    before = _after_kernel(device) if row.after_kernel else device.keep_busy
    pairs = row.rounds or rounds
    ratio = interleaved(*turns, rounds=pairs, before=before, timer=device.seconds)
    hz = device.clock_hz(turns[1], ratio.b_seconds)
    return {
        "ratio": asdict(ratio),
        "errors": errors,
        "sets": len(sets),
        "set_bytes": sets[0].nbytes,
        "clock_mhz": hz / 1e6,
        "other": _side(other, ratio.a_seconds, device, hz),
        "ours": _side(ours, ratio.b_seconds, device, hz),
        **bound(row, ratio, sets[0].nbytes, ceilings),
        **limit(row, ratio, ceilings),
        **_reported(row),
    }


def _reported(row: Comparison | Metadata) -> dict[str, Any]:
    return {} if row.reported is None else {"reported": asdict(row.reported)}


def _after_kernel(device: Device) -> Work:
    """Keeps the device busy, last with a kernel of torch, which triggers no dependents."""
    number = torch.zeros(1, device=device.where)

    def work() -> None:
        device.keep_busy()
        number.fill_(1.0)

    return work


def _same_data(row: Comparison) -> bool:
    """Whether the parties' inputs are the same, in pages or not: `draw` sees to that."""
    a, b = row.other, row.ours
    return (
        _facts(a) == _facts(b)
        and bool((a.windows.start == b.windows.start).all())
        and bool((a.windows.end == b.windows.end).all())
    )


def _facts(party: Party) -> tuple[object, ...]:
    windows, call = party.windows, party.call
    sizes = (party.H, party.D, windows.rows, windows.keys, windows.tokens)
    return (*sizes, call.weights, call.format)


def _same_form(row: Comparison) -> bool:
    a, b = row.other.windows, row.ours.windows
    return type(a) is type(b) and a.sizes() == b.sizes()


def _side(side: Prepared, seconds: float, device: Device, hz: float) -> dict[str, Any]:
    """What one party did, and how close that is to the floors. `hz` was read under ours."""
    party = side.party
    work, pairs = party.H * party.D, party.windows.pairs
    least = floors(party, device.major)
    clocks = seconds * hz * device.sms / pairs
    return {
        "who": party.who,
        "label": party.label,
        "backend": side.backend,
        **party.windows.sizes(),
        "H": party.H,
        "D": party.D,
        **asdict(party.call),
        "seconds": seconds,
        "pairs": pairs,
        "kv_bytes": party.kv_bytes,
        "tflops": 2 * work * pairs / seconds / 1e12,
        "clocks_per_pair": clocks,
        "floor_clocks": least,
        "share_of_floor": max(least.values()) / clocks if least else None,
    }
