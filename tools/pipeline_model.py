"""Clocks that each unit of an SM needs for one tile of the Blackwell kernels, by published rates.

Static: from the tiles of `mqa.cuda.sm100_tiles` and, for the math units, from instructions counted
in compiled kernels (docs/pipes/sm100.json). Nothing here was measured on such a GPU. A kernel whose
parts overlap perfectly is as fast as its busiest unit; no kernel is faster.

    python tools/pipeline_model.py        # the tables of docs/performance.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ROOT / "docs" / "pipes" / "sm100.json"
sys.path.insert(0, str(ROOT))

from mqa.cli.tables import TextTable, markdown  # noqa: E402
from mqa.cuda import sm100_tiles  # noqa: E402

ELEMENTS = {"fp8": "Fp8", "mxfp8": "Mxfp8", "mxfp4": "Mxfp4"}
HEADS = (8, 16, 32, 64, 128)

TENSOR_MACS = {"fp8": 8192, "mxfp8": 8192, "mxfp4": 16384}
"""Multiply-adds a clock of an SM."""
SHARED_BYTES = 128
"""Bytes a clock to or from shared memory, reads of the tensor unit and copies of TMA included."""
TENSOR_MEMORY_BYTES = 512
L2_BYTES = 64
"""Bytes a clock between an SM and L2, each way."""
DRAM_BYTES = 8e12 / 148 / 1.85e9
"""Bytes a clock that are an SM's share of 8 TB/s: 148 SMs at 1.85 GHz."""
FMA_LANES, ALU_LANES = 128, 64
_KEYS = 128
"""Keys of a tile, a lane of tensor memory each."""
_SCALE_BYTES = 4
_DOT_BYTES = 4
_BLOCK_SCALE_TRIPS = 3
"""Times that a tile's block scales pass through shared memory after they came: read and written by
the warp that orders them, read by the copy to tensor memory."""


@dataclass(frozen=True)
class Counted:
    """Clocks a pair of the math loop's units, from instructions counted in a compiled kernel."""

    fma: float
    alu: float
    issue: float


@dataclass(frozen=True)
class Tile:
    """What a tile of 128 keys by `columns` (row, head) needs; all in clocks, but `pairs`."""

    format: str
    heads: int
    dim: int
    columns: int
    pairs: int
    clocks: dict[str, float]
    """By unit."""

    @property
    def bottleneck(self) -> str:
        return max(self.clocks, key=lambda unit: self.clocks[unit])

    @property
    def clocks_per_pair(self) -> float:
        """Of the busiest unit: the kernel cannot be faster."""
        return max(self.clocks.values()) / self.pairs


def tile_of(
    kind: str,
    heads: int,
    dim: int,
    *,
    columns: int | None = None,
    logit_bytes: int = 4,
    counted: Counted | None = None,
    from_dram: bool = False,
) -> Tile:
    """The tile of a kernel for (format, H, D): `columns` as the largest block has, unless given.

    Without `counted`, the math units have their least work: a multiply-add and a relu for each
    head, relus shared out so that both units end together. `from_dram`: keys come from memory, as
    in decoding; else from L2, where other blocks have read them too.
    """
    columns = sm100_tiles.most_columns(heads, ELEMENTS[kind]) if columns is None else columns
    t = sm100_tiles.tiles(heads, dim, columns, ELEMENTS[kind])
    pairs = _KEYS * columns // heads
    keys = _KEYS * (t.row_bytes + _SCALE_BYTES)
    written = pairs * logit_bytes
    least = pairs * heads * 2 / (FMA_LANES + ALU_LANES)
    clocks = {
        "tensor": _KEYS * columns * dim / TENSOR_MACS[kind],
        "shared memory": _shared_bytes(t) / SHARED_BYTES,
        "tensor memory": _KEYS * columns * _DOT_BYTES / TENSOR_MEMORY_BYTES,
        "FMA": least if counted is None else counted.fma * pairs,
        "ALU": least if counted is None else counted.alu * pairs,
        "L2": max(keys, written) / L2_BYTES,
        "DRAM": (written + (keys if from_dram else 0)) / DRAM_BYTES,
    }
    if counted is not None:
        clocks["issue"] = counted.issue * pairs
    return Tile(kind, heads, dim, columns, pairs, clocks)


def _shared_bytes(t: sm100_tiles.Tiles) -> int:
    """Bytes to and from shared memory for one tile: keys and their scales come, keys are read in
    every pass and queries once, scales are read by math (a warp of each set) or ordered and copied,
    and math warps read some weights again, a clock for four that all lanes get."""
    scales = _KEYS * _SCALE_BYTES
    operands = (t.passes * _KEYS + t.columns) * t.row_bytes
    trips = _BLOCK_SCALE_TRIPS if t.scaled else t.sets
    weights = 4 * t.groups * t.read_again // 4 * SHARED_BYTES
    return t.k_bytes + operands + scales * (1 + trips) + weights


def read_counts(path: Path = COUNTS) -> dict[tuple[str, int, int], Counted]:
    """Counted kernels by (format, H, D): float32 logits, dense, window test on every store."""
    if not path.exists():
        return {}
    kernels = json.loads(path.read_text("utf-8"))["kernels"]
    return {
        (one["format"], one["H"], one["D"]): Counted(one["fma"], one["alu"], one["issue"])
        for one in kernels
    }


def dense_table(counts: Mapping[tuple[str, int, int], Counted], dim: int = 128) -> TextTable:
    """Clocks a tile by unit, for every format and H."""
    rows = []
    for kind in ELEMENTS:
        for heads in HEADS:
            found = counts.get((kind, heads, dim))
            tile = tile_of(kind, heads, dim, counted=found)
            rows.append((f"{kind} H={heads}{'' if found else ' *'}", *_cells(tile)))
    return TextTable(
        f"clocks a tile by unit, dense, D={dim}, float32 logits", _COLUMNS, tuple(rows)
    )


def columns_table(heads: int = 64, dim: int = 128) -> TextTable:
    """What the number of columns that share a key tile does to units that math does not use."""
    rows = []
    for kind in ELEMENTS:
        # With scales there is no room for two accumulators of 256: 512 are three passes.
        for columns in (64, 128, 192, 256 if kind == "fp8" else 512):
            tile = tile_of(kind, heads, dim, columns=columns)
            a_pair = (tile.clocks[unit] / tile.pairs for unit in _BY_COLUMNS)
            accumulators = sm100_tiles.tiles(heads, dim, columns, ELEMENTS[kind]).slots
            rows.append((f"{kind} {columns}", *(f"{c:.2f}" for c in a_pair), str(accumulators)))
    names = ("columns", *(f"{unit}, clocks a pair" for unit in _BY_COLUMNS), "accumulators")
    return TextTable(f"columns that share a tile of keys, H={heads} D={dim}", names, tuple(rows))


def paged_table(dim: int = 128) -> TextTable:
    """Decoding: blocks of few rows, keys from memory."""
    rows = []
    for kind in ELEMENTS:
        for next_n, columns in ((1, 64), (2, 128)):
            tile = tile_of(kind, 64, dim, columns=columns, from_dram=True)
            t = sm100_tiles.tiles(64, dim, columns, ELEMENTS[kind])
            held = t.stages * (t.k_bytes + _KEYS * _SCALE_BYTES)
            cells = _cells(tile, units=_DECODING)
            rows.append((f"{kind} next_n={next_n}", *cells, f"{held / DRAM_BYTES:.0f}"))
    names = ("kernel", "columns", "pairs", *_DECODING, "busiest", "clocks/pair", "ring, clocks")
    return TextTable(
        f"clocks a tile by unit, paged, H=64 D={dim}, float32 logits", names, tuple(rows)
    )


_UNITS = ("tensor", "shared memory", "tensor memory", "FMA", "ALU", "issue", "L2", "DRAM")
_DECODING = ("tensor", "shared memory", "tensor memory", "L2", "DRAM")
_BY_COLUMNS = ("tensor", "shared memory", "L2")
_COLUMNS = ("kernel", "columns", "pairs", *_UNITS, "busiest", "clocks/pair")


def _cells(tile: Tile, units: Sequence[str] = _UNITS) -> tuple[str, ...]:
    clocks = (f"{tile.clocks[unit]:.0f}" if unit in tile.clocks else "–" for unit in units)
    return (
        str(tile.columns),
        str(tile.pairs),
        *clocks,
        tile.bottleneck,
        f"{tile.clocks_per_pair:.3f}",
    )


def markdown_tables(path: Path = COUNTS) -> str:
    """The tables of docs/performance.md, with what the counts were taken of."""
    counts = read_counts(path)
    made = [dense_table(counts), columns_table(), paged_table()]
    note = "\\* not counted: FMA and ALU at their least, a multiply-add and a relu for each head.\n"
    if counts:
        facts = json.loads(path.read_text("utf-8"))
        note = (
            f"FMA, ALU and issue are counted in kernels {facts['sources']}, compiled for "
            f"{facts['arch']} by NVRTC {facts['nvrtc']}: {facts['how']}.\n"
            + (note if any((k, h, 128) not in counts for k in ELEMENTS for h in HEADS) else "")
        )
    first, *rest = map(markdown, made)
    return "\n".join([first, note, *rest])


if __name__ == "__main__":
    sys.stdout.write(markdown_tables())
