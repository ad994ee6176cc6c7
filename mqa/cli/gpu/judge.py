"""Is a result right? What is wrong is not timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mqa.cli.gpu.inputs import Inputs
from mqa.cli.gpu.rows import Call
from mqa.reference import definition

_LIMIT = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 2e-3}
"""Relative rms error allowed, by logits dtype: accumulators of this hardware reach 1.3e-4, and a
bfloat16 logit that rounds to the other neighbour is off by up to 2^-8."""
_CHUNK = 1 << 24
"""Logits compared at once."""
_ROWS = 64
"""Random rows that are held against the definition."""


class WrongResult(RuntimeError):
    """A party computed something else than it should."""


def assert_agree(got: Tensor, other: Tensor, inputs: Inputs, call: Call) -> float:
    """Relative rms difference of two results of one call over its valid entries.

    Raises WrongResult where it is too large or anything valid is NaN.
    """
    return _judged(_relative_rms(got, other, inputs, call), call, "the other party")


def assert_defined(got: Tensor, inputs: Inputs, call: Call, seed: int = 0) -> float:
    """Relative rms error against the float64 definition, rounded once, on up to 64 random rows.

    Raises WrongResult where it is too large, a valid entry is NaN, or a cleaned result has
    anything but -inf outside the windows, in any row.
    """
    if call.clean:
        _assert_cleaned(got, inputs, call)
    rows = _some_rows(inputs, seed)
    rounded = definition.round_once(_exact(inputs, rows, got.shape[1], call), got.dtype)
    error = _relative_rms(got[rows], rounded, _rows_of(inputs, rows), call)
    return _judged(error, call, "the definition")


def _some_rows(inputs: Inputs, seed: int) -> Tensor:
    """Random ones and, first, the one that sees most: most windows may be empty."""
    lengths = inputs.end - inputs.start
    rows = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))[:_ROWS]
    rows[0] = int(lengths.argmax())
    return rows.to(lengths.device)


def _exact(inputs: Inputs, rows: Tensor, width: int, call: Call) -> Tensor:
    """Logits of these rows by the definition, float64."""
    some = _rows_of(inputs, rows)
    if some.table is not None:
        options = (some.lens, some.table, width)
        return definition.paged(some.q, some.q_scale, some.k, some.w, *options)
    dense = (some.q, some.q_scale, some.k, some.k_scale, some.w, some.start, some.end)
    return definition.dense(*dense, width if call.compressed else 0)


def _judged(error: float, call: Call, judge: str) -> float:
    limit = _LIMIT[call.logits]
    if not error < limit:  # NaN never passes
        raise WrongResult(f"relative rms difference to {judge} is {error:.3g}, limit {limit:g}")
    return error


def _rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    """The inputs of these rows alone; in a paged call each becomes a request of one row."""
    q, q_scale, table = inputs.q, inputs.q_scale, inputs.table
    if table is not None:
        table = table[rows // q.shape[1]]
        q = q.flatten(0, 1).unsqueeze(1)
        q_scale = None if q_scale is None else q_scale.flatten(0, 1).unsqueeze(1)
    return dataclasses.replace(
        inputs,
        q=q.view(torch.uint8)[rows].view(q.dtype),  # float8 has no index_select
        q_scale=None if q_scale is None else q_scale[rows],
        w=inputs.w[rows],
        start=inputs.start[rows],
        end=inputs.end[rows],
        table=table,
    )


def _relative_rms(got: Tensor, want: Tensor, inputs: Inputs, call: Call) -> float:
    """||got - want|| / ||want|| over valid entries; 0 if there are none."""
    off = torch.zeros((), dtype=torch.float64, device=got.device)
    norm = torch.zeros_like(off)
    for rows, valid in _valid(got, inputs, call):
        a, b = (side[rows].float().masked_fill(~valid, 0.0) for side in (got, want))
        off += (a - b).square().sum(dtype=torch.float64)
        norm += b.square().sum(dtype=torch.float64)
    if float(norm) == 0.0 and float(off) == 0.0:
        return 0.0
    return math.sqrt(float(off)) / math.sqrt(float(norm)) if float(norm) else math.inf


def _assert_cleaned(got: Tensor, inputs: Inputs, call: Call) -> None:
    dirty = torch.zeros((), dtype=torch.int64, device=got.device)
    for rows, valid in _valid(got, inputs, call):
        dirty += (~valid & (got[rows] != -torch.inf)).sum()
    if int(dirty):
        raise WrongResult(f"{int(dirty)} entries outside the windows are not -inf")


def _valid(got: Tensor, inputs: Inputs, call: Call) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time and which of their entries are inside the windows."""
    position = torch.arange(got.shape[1], device=got.device)
    step = max(1, _CHUNK // max(got.shape[1], 1))
    for first in range(0, len(got), step):
        rows = slice(first, first + step)
        start, end = (bound[rows, None].long() for bound in (inputs.start, inputs.end))
        at = position + start if call.compressed else position
        yield rows, (at >= start) & (at < end)
