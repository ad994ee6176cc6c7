"""The rows of the suite of portable kernels: against Hopper's own and against the fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from mqa.cli.gpu.dense_rows import EVEN
from mqa.cli.gpu.rows import MQA, Call, Comparison, Limit, Party, Row, ScheduleKind
from mqa.cli.gpu.windows import batch, causal
from mqa.problem import Format

_DENSE: tuple[tuple[Format, int, int], ...] = (
    ("fp8", 64, 128),
    ("fp8", 64, 64),
    ("mxfp8", 64, 128),
    ("mxfp4", 64, 128),
    ("bf16", 64, 128),
)
"""(format, H, D)"""
_PAGED: tuple[tuple[Format, int, int, int], ...] = (
    ("fp8", 64, 1, 65536),
    ("fp8", 64, 1, 8192),
    ("fp8", 256, 1, 8192),
    ("mxfp8", 64, 1, 65536),
    ("mxfp4", 64, 1, 65536),
    ("bf16", 64, 1, 65536),
)
"""(format, B, next_n, tokens)"""
_OF_HOPPERS_RATE = 0.25
"""Least rate of the first dense row, as a share of Hopper's own kernel."""
_OVER_FALLBACK = 20.0
_FALLBACK_ROUNDS = 3


def _dense(group: str, other: str, limits: Sequence[Limit], rounds: int = 0) -> Iterator[Row]:
    """With a limit for each row, or for the first ones."""
    for (kind, heads, dim), limit in zip_longest(_DENSE, limits):
        first, second = (
            Party(MQA, by, causal(*EVEN), heads, dim, Call(format=kind, by=by))
            for by in (other, "portable")
        )
        name = f"{kind} {EVEN[0]}×{EVEN[1]} H={heads} D={dim}"
        yield Comparison(group, name, first, second, limit, rounds=rounds)


def _paged(group: str, other: str, limit: Limit | None, rounds: int = 0) -> Iterator[Row]:
    fresh: ScheduleKind = "fresh"
    for kind, requests, next_n, tokens in _PAGED:
        windows = batch(requests, next_n, tokens)
        first, second = (
            Party(MQA, by, windows, 64, 128, Call(schedule=fresh, format=kind, by=by))
            for by in (other, "portable")
        )
        name = f"{kind} B={requests} next_n={next_n} tokens={tokens}"
        yield Comparison(group, name, first, second, limit, rounds=rounds)


def _against_hopper() -> Iterator[Row]:
    yield from _dense("portable dense", "sm90", [Limit("at_least", _OF_HOPPERS_RATE)])
    yield from _paged("portable paged", "sm90", None)


def _against_fallback() -> Iterator[Row]:
    limit = Limit("at_least", _OVER_FALLBACK)
    group, other = "portable fallback", "reference"
    yield from _dense(group, other, [limit] * len(_DENSE), _FALLBACK_ROUNDS)
    yield from _paged(group, other, limit, _FALLBACK_ROUNDS)


PORTABLE: tuple[Callable[[], Iterator[Row]], ...] = (_against_hopper, _against_fallback)
