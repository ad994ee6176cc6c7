"""Copies that combine what they bring with what is there: cp.reduce.async.bulk, linear and tiles.

Elements are combined one by one when the operation completes. Which of several operations comes
first is the scheduler's choice, as it is the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mqa.emulator import halves
from mqa.emulator.alu import DTYPES, Binder, fail
from mqa.emulator.engines import (
    Change,
    Tile,
    bulk_out,
    check_bulk,
    copy_in,
    shared_reader,
    targets_of,
    tensor_out,
)
from mqa.emulator.floats import Array
from mqa.emulator.parser import Instruction
from mqa.emulator.program import Effect, addresses, effect, values
from mqa.emulator.reports import Finding, Kind
from mqa.emulator.warp import Warp, lanes

_COMBINE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
}
_NUMBERS, _BITS = {"add", "min", "max"}, {"and", "or", "xor"}
GLOBAL = {
    "u32": _NUMBERS | {"inc", "dec"},
    "s32": _NUMBERS,
    "u64": _NUMBERS,
    "s64": {"min", "max"},
    "b32": _BITS,
    "b64": _BITS,
    "f16": _NUMBERS,
    "bf16": _NUMBERS,
    "f32": {"add"},
    "f64": {"add"},
}
"""What is combined in global memory, by type."""
SHARED = {"u32": _NUMBERS | {"inc", "dec"}, "s32": _NUMBERS, "u64": {"add"}, "b32": _BITS}
"""What is combined in shared memory of a cluster."""
_OF_MAPS = {
    "UINT32": "u32",
    "INT32": "s32",
    "UINT64": "u64",
    "INT64": "s64",
    "FLOAT16": "f16",
    "BFLOAT16": "bf16",
    "FLOAT32": "f32",
    "FLOAT64": "f64",
}
"""Types of elements by a tensor map's."""


def change_of(name: str, kind: str) -> Change:
    """Old bytes and new ones to what memory holds then."""
    dtype = DTYPES[kind]
    combine = _COMBINE[name]
    if kind in halves.HALVES:
        found = halves.function(name, (), kind)
        assert found is not None
        combine = found

    def change(old: Array, new: Array) -> Array:
        given = (np.ascontiguousarray(x).view(dtype) for x in (old, new))
        return np.asarray(combine(*given), dtype).view(np.uint8)

    return change


@effect("cp.reduce.async.bulk.tensor")
def tensor_reduce(b: Binder, at: Instruction) -> Effect:
    """The type of elements is the map's."""
    rank, form, name = at.parts[5], ".".join(at.parts[6:8]), (*at.parts[8:9], "")[0]
    rest = set(at.parts[9:])
    if rank not in ("1d", "2d", "3d", "4d", "5d"):
        fail(at, f"expected 1d to 5d, got {rank}")
    if form != "global.shared::cta" or name not in _COMBINE:
        fail(at, "this form is not modelled")
    if not rest <= {"tile", "bulk_group", "L2::cache_hint"} or "bulk_group" not in rest:
        fail(at, "this form is not modelled")

    def change_for(tile: Tile) -> Change:
        kind = _OF_MAPS.get(tile.map.data_type, "")
        bits = f"b{kind[1:]}"
        kind = bits if name in GLOBAL.get(bits, ()) and kind[:1] in ("u", "s") else kind
        if name not in GLOBAL.get(kind, ()):
            raise Finding(
                Kind.DESCRIPTOR, f"{tile} of type {tile.map.data_type} is combined by {name}"
            )
        return change_of(name, kind)

    return tensor_out(b, at, int(rank[0]), change_for)


@effect("cp.reduce.async.bulk")
def bulk_reduce(b: Binder, at: Instruction) -> Effect:
    """Also to shared memory of a CTA of the cluster, which then counts bytes at its barrier."""
    form, (*rest, kind) = ".".join(at.parts[4:6]), at.parts[6:] or ("",)
    name = next((word for word in rest if word in _COMBINE), "")
    if name == "add" and kind in halves.HALVES and "noftz" not in rest:
        fail(at, "expected .noftz, which says that subnormal numbers stay")
    modifiers = {word for word in rest if word not in (name, "noftz")}
    to_global = {"bulk_group"} <= modifiers <= {"bulk_group", "L2::cache_hint"}
    if form == "global.shared::cta" and name in GLOBAL.get(kind, ()) and to_global:
        return bulk_out(b, at, change_of(name, kind))
    to_cluster = modifiers == {"mbarrier::complete_tx::bytes"}
    if form == "shared::cluster.shared::cta" and name in SHARED.get(kind, ()) and to_cluster:
        return _to_cluster(b, at, change_of(name, kind))
    fail(at, "this form is not modelled")


def _to_cluster(b: Binder, at: Instruction, change: Change) -> Effect:
    target, source = (addresses(b, operand, at, "u32") for operand in at.operands[:2])
    sizes, barrier = values(b, at.operands[2], "u32", at), addresses(b, at.operands[3], at, "u32")

    def run(warp: Warp, mask: int) -> None:
        for lane in np.flatnonzero(lanes(mask)):
            place, origin = int(target(warp)[lane]), int(source(warp)[lane])
            size = int(sizes(warp)[lane])
            check_bulk(place, origin, size)
            name = f"bulk reduction of {size} bytes to shared address {place:#x}"
            ((cta, offset, found),) = targets_of(warp, place, int(barrier(warp)[lane]), None)
            cta.shared.words(offset, size)
            first = offset - cta.shared.start
            read = shared_reader(warp, origin, size, name, found)

            def combined(
                read: Any = read, memory: Array = cta.shared.data[first : first + size]
            ) -> Array:
                return change(memory, read())

            chunks = np.arange(first, first + size, 16)
            copy_in(warp, name, combined, [(cta.shared, chunks, found)], size, combines=True)

    return run
