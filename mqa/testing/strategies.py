"""Hypothesis strategies of problems: small, of every kind, each a one-line replay of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from hypothesis import reject
from hypothesis import strategies as st

from mqa.problem import (
    FORMATS,
    LENS,
    LOGITS_DTYPES,
    MX_FORMATS,
    REGIMES,
    WEIGHTS_DTYPES,
    WINDOWS,
    DenseProblem,
    Format,
    Layout,
    PagedProblem,
)

HEADS = (1, 2, 3, 5, 7, 8, 11, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 96, 128)
_SEEDS = 2**16

_P = TypeVar("_P", DenseProblem, PagedProblem)
_Facts: TypeAlias = dict[str, tuple[int, ...]]


@st.composite
def dense_problems(
    draw: st.DrawFn,
    *,
    formats: Sequence[Format] = FORMATS,
    regimes: Sequence[str] = REGIMES,
    heads: Sequence[int] = HEADS,
    head_dims: Sequence[int] = HEAD_DIMS,
    weights: Sequence[str] = WEIGHTS_DTYPES,
    outs: Sequence[str] = LOGITS_DTYPES,
    windows: Sequence[str] = WINDOWS,
    max_rows: int = 9,
    max_keys: int = 70,
    layouts: bool = True,
    schedules: bool = True,
    accepted_by: Callable[[DenseProblem], bool] | None = None,
) -> DenseProblem:
    """Dense problems: full and compressed, S and N from 0, every window pattern.

    With `layouts`, about half have strided or offset tensors: weights of any row stride, k scales
    at any 4-byte address, strided windows, an `out` of any row stride, and (one in four) q, its
    scales and k values that are not contiguous. `accepted_by` keeps what it is true for.
    """
    fmt = draw(st.sampled_from(list(formats)))
    rows, keys = draw(st.integers(0, max_rows)), draw(st.integers(0, max_keys))
    longest = draw(st.one_of(st.just(0), st.integers(1, keys + 5)))
    problem = DenseProblem(
        format=fmt,
        S=rows,
        N=keys,
        H=draw(st.sampled_from(list(heads))),
        D=draw(st.sampled_from(list(head_dims))),
        M=longest,
        weights=draw(st.sampled_from(list(weights))),
        out=draw(st.sampled_from(list(outs))),
        clean=draw(st.booleans()),
        sms=draw(st.sampled_from((0, 0, 1, 7, 132))) if schedules else 0,
        regime=draw(st.sampled_from(list(regimes))),
        windows=draw(st.sampled_from(list(windows))),
        seed=draw(st.integers(0, _SEEDS)),
    )
    if layouts and draw(st.booleans()):
        problem = _with_layout(problem, draw(_dense_layouts(problem)))
    return _accepted(problem, accepted_by)


@st.composite
def paged_problems(
    draw: st.DrawFn,
    *,
    formats: Sequence[Format] = FORMATS,
    regimes: Sequence[str] = REGIMES,
    heads: Sequence[int] = HEADS,
    head_dims: Sequence[int] = HEAD_DIMS,
    weights: Sequence[str] = WEIGHTS_DTYPES,
    outs: Sequence[str] = LOGITS_DTYPES,
    lens: Sequence[str] = LENS,
    page_sizes: Sequence[int] = (1, 2, 3, 5, 16, 31, 32, 64),
    max_batch: int = 5,
    max_next_n: int = 8,
    max_keys: int = 70,
    layouts: bool = True,
    schedules: bool = True,
    accepted_by: Callable[[PagedProblem], bool] | None = None,
) -> PagedProblem:
    """Paged problems: any page size, next_n 1 .. 8, varlen, lens of rank 1 and 2, shared pages.

    max_context_len lies below, at or above columns * P. With `layouts`, about half have strided or
    offset lens, table, indices, weights and `out`, and cache blocks further apart than they are
    long. `accepted_by` keeps the problems it is true for.
    """
    fmt = draw(st.sampled_from(list(formats)))
    page = draw(st.sampled_from(list(page_sizes)))
    varlen = draw(st.booleans())
    columns = draw(st.integers(0, max(1, max_keys // page)))
    problem = PagedProblem(
        format=fmt,
        B=draw(st.integers(0, 3 * max_batch if varlen else max_batch)),
        next_n=1 if varlen else draw(st.integers(1, max_next_n)),
        H=draw(st.sampled_from(list(heads))),
        D=draw(st.sampled_from(list(head_dims))),
        P=page,
        blocks=draw(st.integers(0, 2 * columns + 3)),
        columns=columns,
        L=draw(st.one_of(st.just(columns * page), st.integers(0, columns * page + 9))),
        weights=draw(st.sampled_from(list(weights))),
        out=draw(st.sampled_from(list(outs))),
        clean=draw(st.booleans()),
        lens_rank=draw(st.sampled_from((1, 2))),
        varlen=varlen,
        sms=draw(st.sampled_from((0, 0, 1, 7, 132))) if schedules else 0,
        regime=draw(st.sampled_from(list(regimes))),
        lens=draw(st.sampled_from(list(lens))),
        seed=draw(st.integers(0, _SEEDS)),
    )
    if layouts and draw(st.booleans()):
        problem = _with_layout(problem, draw(_paged_layouts(problem)))
    return _accepted(problem, accepted_by)


@st.composite
def _dense_layouts(draw: st.DrawFn, problem: DenseProblem) -> Layout:
    facts = draw(_row_layouts(problem))
    scaled, unit = problem.format != "bf16", 2 if problem.format == "bf16" else 1
    if scaled:
        _offer(draw, facts, "kv_scale_off", st.sampled_from((4, 8, 12)))
    _offer(draw, facts, "start_stride", st.integers(1, 4))
    _offer(draw, facts, "end_stride", st.integers(1, 4))
    _offer(draw, facts, "start_off", st.sampled_from((4, 8, 12)))
    if draw(st.integers(0, 3)) == 0:
        item = problem.D // 2 if problem.format == "mxfp4" else problem.D
        _offer(draw, facts, "kv_stride", st.integers(item, item + 40))
        _offer(draw, facts, "kv_off", st.integers(1, 16 // unit - 1), unit)
        if scaled:
            _offer(draw, facts, "kv_scale_stride", st.integers(1, 3))
        _offer(draw, facts, "q_stride", st.integers(problem.H * item, problem.H * item + 40))
        if problem.format in MX_FORMATS:
            _offer(draw, facts, "q_scale_stride", st.integers(problem.H, problem.H + 9))
    return tuple(sorted(facts.items()))


@st.composite
def _paged_layouts(draw: st.DrawFn, problem: PagedProblem) -> Layout:
    facts = draw(_row_layouts(problem))
    _offer(draw, facts, "lens_stride", st.integers(problem.next_n, problem.next_n + 3))
    _offer(draw, facts, "lens_off", st.sampled_from((4, 8, 12)))
    _offer(draw, facts, "table_stride", st.integers(problem.columns, problem.columns + 5))
    _offer(draw, facts, "table_off", st.sampled_from((4, 8, 12)))
    if problem.varlen:
        _offer(draw, facts, "indices_stride", st.integers(1, 3))
    item = problem.D // 2 if problem.format == "mxfp4" else problem.D
    item += 0 if problem.format == "bf16" else 4
    block = -(-problem.P * item // 16) * 16
    _offer(draw, facts, "cache_stride", st.sampled_from((block, block + 16, block + 512)))
    return tuple(sorted(facts.items()))


@st.composite
def _row_layouts(draw: st.DrawFn, problem: DenseProblem | PagedProblem) -> _Facts:
    """Weights and `out`, which dense and paged problems share."""
    facts: _Facts = {}
    weight_bytes = 2 if problem.weights == "bfloat16" else 4
    out_bytes = 4 if problem.out == "float32" else 2
    _offer(draw, facts, "w_stride", st.integers(problem.H, problem.H + 40))
    _offer(draw, facts, "w_off", st.integers(1, 16 // weight_bytes - 1), weight_bytes)
    _offer(draw, facts, "out_stride", st.integers(problem.width, problem.width + 40))
    _offer(draw, facts, "out_off", st.integers(1, 16 // out_bytes - 1), out_bytes)
    return facts


def _offer(
    draw: st.DrawFn, facts: _Facts, name: str, values: st.SearchStrategy[int], unit: int = 1
) -> None:
    """Add the fact to about half of the layouts."""
    if draw(st.booleans()):
        facts[name] = (draw(values) * unit,)


def _with_layout(problem: _P, layout: Layout) -> _P:
    return dataclasses.replace(problem, layout=layout)


def _accepted(problem: _P, accepted_by: Callable[[_P], bool] | None) -> _P:
    if accepted_by is not None and not accepted_by(problem):
        reject()
    return problem
