"""The paged rows of the Hopper suite, and the formats that go through bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from mqa.cli.gpu.rows import MQA, PEER, Alone, Call, Comparison, Limit, Metadata, Party, Row
from mqa.cli.gpu.windows import Windows, batch, causal, drawn, ending

_HEADS, _DIM = 64, 128
AGAINST_PEER = {
    (8, 1, 32768): 0.98,
    (64, 2, 8192): 0.98,
    (64, 1, 65536): 0.98,
    (256, 1, 8192): 0.98,
    (256, 2, 8192): 0.98,
    (64, 1, 8192): 1.12,
    (1, 1, 65536): 1.2,
}
"""Least ratio to the peer by (B, next_n, tokens)."""
_PREFILL = 4096
_WIDE = 1 << 20
"""A max_context_len far beyond the lens."""
_MANY = 32768
"""Requests of the rows that hold what costs time without tokens."""
_FRESH = Call(schedule="fresh")


def _paged() -> Iterator[Row]:
    for (requests, next_n, length), least in AGAINST_PEER.items():
        windows = batch(requests, next_n, length)
        peer, ours = (_party(who, windows, _FRESH, who) for who in (PEER, MQA))
        name = f"B={requests} next_n={next_n} tokens={length}"
        one = (requests, next_n) == (1, 1)
        yield Comparison("paged", name, peer, ours, Limit("at_least", least), one)


def _rows() -> Iterator[Row]:
    one = _party(MQA, batch(256, 1, 8192), _FRESH, "next_n=1")
    for next_n, most in ((4, 1.7), (8, 3.2)):
        many = _party(MQA, batch(256, next_n, 8192), _FRESH, f"next_n={next_n}")
        name = f"next_n={next_n} / next_n=1, B=256 tokens=8192"
        yield Comparison("paged rows", name, many, one, Limit("at_most", most))
    plan = _party(MQA, batch(64, 1, 8192), _FRESH, "schedule")
    none = dataclasses.replace(plan, label="no schedule", call=Call())
    yield Comparison("variants", "no schedule / fresh, paged B=64 tokens=8192", none, plan)
    pages = _party(MQA, batch(1, _PREFILL, _PREFILL), _FRESH, "pages")
    dense = _party(MQA, causal(_PREFILL, _PREFILL), _FRESH, "dense")
    name = f"prefill of {_PREFILL} tokens, pages / dense"
    yield Comparison("paged rows", name, pages, dense, Limit("at_most", 1.3))
    plain = _party(MQA, batch(8, 1, 32768, _WIDE), _FRESH, "uncleaned")
    clean = dataclasses.replace(plain, label="cleaned", call=Call(clean=True, schedule="fresh"))
    name = f"cleaned / uncleaned, B=8 next_n=1 tokens=32768 max_context_len={_WIDE}"
    yield Comparison("paged rows", name, clean, plain, Limit("at_most", 1.1))


def _formats() -> Iterator[Row]:
    mx8, mx4 = (Call(schedule="fresh", format=name) for name in ("mxfp8", "mxfp4"))
    windows = batch(64, 1, 65536)
    fp8 = _party(MQA, windows, _FRESH, "fp8")
    for call, least in ((mx8, 0.9), (mx4, 1.4)):
        mx = _party(MQA, windows, call, call.format)
        name = f"fp8 / {call.format}, B=64 next_n=1 tokens=65536"
        yield Comparison("paged formats", name, fp8, mx, Limit("at_least", least))
    even = causal(2048, 32768)
    plain = _party(MQA, even, Call(), "fp8")
    for call in (mx8, mx4):
        mx = _party(MQA, even, Call(format=call.format), call.format)
        name = f"{call.format} / fp8, dense 2048×32768"
        yield Comparison("paged formats", name, mx, plain, Limit("at_most", 2.3))


def _metadata() -> Iterator[Row]:
    for next_n, varlen, most in ((1, False, 5e-6), (1, True, 5e-6), (4, False, 8e-6)):
        name = f"lens [{_MANY}, {next_n}]{', indices' if varlen else ''}"
        windows = drawn(_MANY, next_n, 8192)
        yield Metadata("paged metadata", name, windows, _HEADS, varlen, most)


def _empty() -> Iterator[Row]:
    for last in (0, 256, 8192):
        title = "all lens 0" + (f" but the last, {last}" if last else "")
        windows = ending(_MANY, last, 8192)
        for kind in ("fresh", "stale", "reversed", "random"):
            ours = _party(MQA, windows, Call(schedule=kind), kind)
            yield Alone("paged empty", f"{title}, {kind} schedule", ours, at_most=15e-6)


def _party(who: str, windows: Windows, call: Call, label: str) -> Party:
    return Party(who, label, windows, _HEADS, _DIM, call)


PAGED: tuple[Callable[[], Iterator[Row]], ...] = (_paged, _rows, _formats, _metadata, _empty)
