"""The dense rows of the Hopper suite: two parties each, ours second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mqa.cli.gpu.rows import MQA, PEER, Call, Comparison, Metadata, Party, Row
from mqa.cli.gpu.windows import Windows, causal, halves, one_row, packed

SIZES = ((64, 128), (32, 128), (64, 64))
"""(H, D) of the main rows."""
LONG = (8192, 65536)
EVEN = (2048, 32768)
"""(S, N) of the row whose rate the others are held against."""


def _against_peer(
    group: str, windows: Windows, heads: int, dim: int, call: Call = Call()
) -> Comparison:
    name = f"{windows.rows}×{windows.keys} H={heads} D={dim} {call.logits}"
    peer, ours = (Party(who, who, windows, heads, dim, call) for who in (PEER, MQA))
    return Comparison(group, name, peer, ours)


def _main() -> list[Row]:
    return [
        _against_peer("main", causal(*shape), *size, Call(logits=logits))
        for logits in ("float32", "bfloat16")
        for shape in ((2048, 8192), EVEN, LONG)
        for size in SIZES
    ]


def _variants() -> list[Row]:
    plain = Call()
    small = Call(clean=True, compressed=True, logits="float16", weights="bfloat16")
    pairs = {
        "compressed / full": (Call(compressed=True), plain),
        "cleaned / uncleaned": (Call(clean=True), plain),
        "float16, bfloat16 weights, compressed, cleaned / float32 full": (small, plain),
    }
    return [
        Comparison(
            "variants",
            f"{title}, {EVEN[0]}×{EVEN[1]} H={heads} D={dim}",
            Party(MQA, title.partition(" / ")[0], causal(*EVEN), heads, dim, one),
            Party(MQA, title.partition(" / ")[2], causal(*EVEN), heads, dim, other),
        )
        for title, (one, other) in pairs.items()
        for heads, dim in SIZES
    ]


def _few_rows() -> list[Row]:
    return [
        _against_peer("few rows", causal(rows, 65536), heads, dim)
        for heads, dim in SIZES[:2]
        for rows in (1, 16, 128)
    ]


def _cleaning() -> list[Row]:
    windows = packed([(1024, 8192)] * 8)
    cleaned = Party(MQA, "cleaned", windows, 64, 128, Call(clean=True))
    plain = Party(MQA, "uncleaned", windows, 64, 128, Call())
    return [Comparison("cleaning", "8 packed requests of 1024×8192 H=64 D=128", cleaned, plain)]


def _ragged() -> list[Row]:
    lengths = (8192, 128, 4096, 256, 2048, 512, 1024)
    short = (1, 64)
    workloads = {
        "packed requests, 128 to 8192 tokens each": packed([(n, n) for n in lengths]),
        "context-parallel halves of 32768": halves(2048, 32768),
        "one of 65536 among 1023 of 64": packed([short] * 511 + [(1, 65536)] + [short] * 512),
        "all of 2048 rows empty but one of 32768": one_row(2048, 32768, 1000),
    }
    even = Party(MQA, "even", causal(*EVEN), 64, 128, Call())
    scheduled = Call(schedule="fresh")
    return [
        Comparison("ragged", name, even, Party(MQA, "ragged", windows, 64, 128, scheduled))
        for name, windows in workloads.items()
    ]


def _sizes() -> list[Row]:
    even = Party(MQA, "H=64 D=128", causal(*EVEN), 64, 128, Call())
    rows: list[Row] = []
    for heads, dim in ((8, 128), (16, 128), (128, 128), (64, 32)):
        ours = dataclasses.replace(even, label=f"H={heads} D={dim}", H=heads, D=dim)
        rows.append(Comparison("sizes", f"{EVEN[0]}×{EVEN[1]} {ours.label}", even, ours))
    return rows


def _metadata() -> list[Row]:
    return [
        Metadata("metadata", f"S={rows} N=65536 H=64", causal(rows, 65536), 64)
        for rows in (2048, 8192, 32768)
    ]


DENSE: tuple[Callable[[], list[Row]], ...] = (
    _main,
    _variants,
    _few_rows,
    _cleaning,
    _ragged,
    _sizes,
    _metadata,
)
