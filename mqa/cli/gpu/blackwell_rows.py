"""The rows of the Blackwell suite: every format, beside what others report of the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mqa.cli.gpu.dense_rows import EVEN, LONG, SIZES
from mqa.cli.gpu.paged_rows import AGAINST_PEER
from mqa.cli.gpu.rows import MQA, PEER, Call, Comparison, Metadata, Party, Reported, Row
from mqa.cli.gpu.windows import Windows, batch, causal, drawn, packed
from mqa.problem import Format

FORMATS: tuple[Format, ...] = ("fp8", "mxfp8", "mxfp4")
_MAIN = (64, 128)
_SHAPES = ((2048, 8192), EVEN, LONG)
_GB200 = "GB200, 152 SMs"
_H200 = "H200, sgl-deep-gemm 0.1.4"
_COMPLETE = {
    ("mxfp8", EVEN, _MAIN): Reported(412e-6, _GB200),
    ("mxfp4", EVEN, _MAIN): Reported(408e-6, _GB200),
    ("mxfp8", LONG, _MAIN): Reported(3022e-6, _GB200),
    ("mxfp4", LONG, _MAIN): Reported(2969e-6, _GB200),
    ("fp8", (2048, 8192), (64, 128)): Reported(242e-6, _H200),
    ("fp8", (2048, 8192), (32, 128)): Reported(141e-6, _H200),
    ("fp8", (2048, 8192), (64, 64)): Reported(186e-6, _H200),
    ("fp8", EVEN, (64, 128)): Reported(1002e-6, _H200),
    ("fp8", EVEN, (32, 128)): Reported(584e-6, _H200),
    ("fp8", EVEN, (64, 64)): Reported(765e-6, _H200),
    ("fp8", LONG, (64, 128)): Reported(8313e-6, _H200),
    ("fp8", LONG, (32, 128)): Reported(4721e-6, _H200),
    ("fp8", LONG, (64, 64)): Reported(6050e-6, _H200),
}
"""Complete calls, cleaned, float32 logits, by format, (S, N) and (H, D). Row s sees N - S + s
tokens."""
_FEW_ROWS = {
    (64, 128): {1: 225e-6, 16: 231e-6, 128: 237e-6},
    (32, 128): {1: 245e-6, 16: 257e-6, 128: 268e-6},
}
"""FP8 calls on an H200 by (H, D) and query rows, 65536 tokens, uncleaned."""
_COMPRESSED = {
    ((2048, 8192), (64, 128)): 250e-6,
    ((2048, 8192), (32, 128)): 141e-6,
    ((2048, 8192), (64, 64)): 191e-6,
    (EVEN, (64, 128)): 1097e-6,
    (EVEN, (32, 128)): 603e-6,
    (EVEN, (64, 64)): 801e-6,
    (LONG, (64, 128)): 9085e-6,
    (LONG, (32, 128)): 4857e-6,
    (LONG, (64, 64)): 6356e-6,
}
"""FP8 calls on an H200 with max_seqlen_k, by (S, N) and (H, D)."""
_PAGED = {
    (1, 1, 65536): 6.24e-6,
    (8, 1, 32768): 14.5e-6,
    (64, 1, 8192): 22.6e-6,
    (64, 2, 8192): 25.7e-6,
    (64, 1, 65536): 150e-6,
    (256, 1, 8192): 79.7e-6,
    (256, 2, 8192): 90.3e-6,
}
"""The same by (B, next_n, tokens), pages of 64."""
_SCHEDULES = {1024: 11.5e-6, 8192: 20e-6, 32768: 56e-6}
"""Paged schedules on an H200 by requests, as graphs of one kernel: launch included."""


def _complete() -> Iterator[Row]:
    for kind in FORMATS:
        for rows, keys in _SHAPES:
            for size in SIZES:
                name = f"{kind} {rows}×{keys} H={size[0]} D={size[1]}"
                windows, plain = _before(rows, keys), Call(format=kind)
                first = Party(MQA, "uncleaned", windows, *size, plain)
                second = Party(MQA, "cleaned", windows, *size, Call(clean=True, format=kind))
                said = _COMPLETE.get((kind, (rows, keys), size))
                yield Comparison("complete", name, first, second, reported=said)


def _before(rows: int, keys: int) -> Windows:
    """Row s sees the N - S + s tokens before its own."""
    position = np.arange(rows, dtype=np.int64)
    return Windows(np.zeros_like(position), keys - rows + position, keys)


def _compressed() -> Iterator[Row]:
    for ((rows, keys), size), seconds in _COMPRESSED.items():
        name = f"{rows}×{keys} H={size[0]} D={size[1]}"
        calls = {"full": Call(), "compressed": Call(compressed=True)}
        first, second = (
            Party(MQA, label, causal(rows, keys), *size, call) for label, call in calls.items()
        )
        yield Comparison("compressed", name, first, second, reported=Reported(seconds, _H200))


def _formats() -> Iterator[Row]:
    """The MX formats beside FP8, for each shape that has a reported figure of FP8."""
    fresh = {kind: Call(schedule="fresh", format=kind) for kind in FORMATS}
    plain = {kind: Call(format=kind) for kind in FORMATS}
    shapes: list[tuple[str, Windows, tuple[int, int], dict[Format, Call], float]] = [
        (f"{rows}×65536 H={size[0]} D={size[1]}", causal(rows, 65536), size, plain, seconds)
        for size, figures in _FEW_ROWS.items()
        for rows, seconds in figures.items()
    ]
    shapes += [
        (f"paged B={b} next_n={n} tokens={length}", batch(b, n, length), _MAIN, fresh, seconds)
        for (b, n, length), seconds in _PAGED.items()
    ]
    for shape, windows, size, calls, seconds in shapes:
        for kind in FORMATS[1:]:
            first, second = (
                Party(MQA, c.format, windows, *size, c) for c in (calls["fp8"], calls[kind])
            )
            yield Comparison(
                "formats", f"{kind}, {shape}", first, second, reported=Reported(seconds, _H200)
            )


def _cleaning() -> Iterator[Row]:
    windows = packed([(1024, 8192)] * 8)
    for kind in FORMATS:
        first, second = (
            Party(MQA, label, windows, *_MAIN, Call(clean=label == "cleaned", format=kind))
            for label in ("cleaned", "uncleaned")
        )
        yield Comparison("cleaning", f"{kind}, 8 packed requests of 1024×8192", first, second)


def _variants() -> Iterator[Row]:
    for kind in FORMATS:
        full = Party(MQA, "full", causal(*EVEN), *_MAIN, Call(format=kind))
        for label, call in {
            "compressed": Call(compressed=True, format=kind),
            "bfloat16": Call(logits="bfloat16", format=kind),
        }.items():
            other = Party(MQA, label, causal(*EVEN), *_MAIN, call)
            yield Comparison("variants", f"{kind}, {label} / full float32", other, full)
        shape = batch(64, 1, 8192)
        none, fresh = (Call(schedule=cuts, format=kind) for cuts in ("", "fresh"))
        first, second = (Party(MQA, c.schedule, shape, *_MAIN, c) for c in (none, fresh))
        name = f"{kind}, paged B=64 tokens=8192, no schedule / fresh"
        yield Comparison("variants", name, first, second)


def _sizes() -> Iterator[Row]:
    for kind in FORMATS:
        even = Party(MQA, "H=64 D=128", causal(*EVEN), *_MAIN, Call(format=kind))
        for size in ((8, 128), (16, 128), (32, 128), (128, 128), (64, 64)):
            label = f"H={size[0]} D={size[1]}"
            ours = Party(MQA, label, causal(*EVEN), *size, Call(format=kind))
            yield Comparison("sizes", f"{kind} {EVEN[0]}×{EVEN[1]} {label}", even, ours)


def _schedules() -> Iterator[Row]:
    for rows in (2048, 32768):
        yield Metadata("schedules", f"dense S={rows} N=65536", causal(rows, 65536), _MAIN[0])
    for requests, seconds in _SCHEDULES.items():
        said = Reported(seconds, _H200)
        windows = drawn(requests, 1, 8192)
        yield Metadata("schedules", f"paged B={requests}", windows, _MAIN[0], reported=said)


def _peer() -> Iterator[Row]:
    for kind in FORMATS:
        dense = {f"{rows}×{keys}": causal(rows, keys) for rows, keys in _SHAPES}
        dense |= {f"{rows}×65536": causal(rows, 65536) for rows in _FEW_ROWS[_MAIN]}
        for name, windows in dense.items():
            yield _against(f"{kind} {name}", windows, Call(format=kind))
        for b, n, length in AGAINST_PEER:
            call = Call(schedule="fresh", format=kind)
            name = f"{kind} paged B={b} next_n={n} tokens={length}"
            yield _against(name, batch(b, n, length), call, after_kernel=(b, n) == (1, 1))


def _against(name: str, windows: Windows, call: Call, *, after_kernel: bool = False) -> Comparison:
    first, second = (Party(who, who, windows, *_MAIN, call) for who in (PEER, MQA))
    return Comparison("peer", name, first, second, after_kernel=after_kernel)


BLACKWELL: tuple[Callable[[], Iterator[Row]], ...] = (
    _complete,
    _compressed,
    _formats,
    _cleaning,
    _variants,
    _sizes,
    _schedules,
    _peer,
)
