"""The static model of docs/performance.md: clocks a tile by unit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def model(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("pipeline_model")


def test_a_tile_of_fp8_by_hand(model: ModuleType) -> None:
    """128 keys of 128 bytes by 256 columns, 4 rows of 64 heads: every unit worked out here."""
    tile = model.tile_of("fp8", 64, 128)
    assert (tile.columns, tile.pairs) == (256, 512)
    assert tile.clocks["tensor"] == 128 * 256 * 128 / 8192 == 512
    # keys come (16 KiB) and are read with q (48 KiB); scales come and are read by four sets
    assert tile.clocks["shared memory"] == (16384 + 49152 + 5 * 512) / 128 == 532
    assert tile.clocks["tensor memory"] == 128 * 256 * 4 / 512 == 256
    # a multiply-add and a relu for each of 64 heads, on 192 lanes
    assert tile.clocks["FMA"] == tile.clocks["ALU"] == pytest.approx(512 * 128 / 192)
    assert tile.clocks["L2"] == 128 * 132 / 64 == 264
    assert tile.clocks["DRAM"] == pytest.approx(512 * 4 / (8e12 / 148 / 1.85e9))
    assert "issue" not in tile.clocks
    assert tile.bottleneck == "shared memory"
    assert tile.clocks_per_pair == pytest.approx(532 / 512)


def test_a_tile_with_block_scales_by_hand(model: ModuleType) -> None:
    tile = model.tile_of("mxfp4", 64, 128)
    assert tile.clocks["tensor"] == 128 * 192 * 128 / 16384 == 192
    # scales come, are read, written in another order and copied
    assert tile.clocks["shared memory"] == (8192 + 320 * 64 + 4 * 512) / 128 == 240


def test_a_tile_in_passes_by_hand(model: ModuleType) -> None:
    """Keys come once and are read three times."""
    tile = model.tile_of("mxfp8", 64, 128)
    assert (tile.columns, tile.pairs) == (512, 1024)
    assert tile.clocks["tensor"] == 128 * 512 * 128 / 8192 == tile.pairs
    assert tile.clocks["tensor memory"] == 512
    shared = (16384 + (3 * 128 + 512) * 128 + 4 * 512) / 128
    assert tile.clocks["shared memory"] == shared == 1040
    assert tile.clocks_per_pair == pytest.approx(1040 / 1024)
    alone = model.tile_of("mxfp8", 64, 128, columns=192)
    assert alone.clocks_per_pair == pytest.approx(464 / 384)


def test_counts_take_the_place_of_the_least_work_and_change_the_bottleneck(
    model: ModuleType,
) -> None:
    tile = model.tile_of("mxfp4", 64, 128, counted=model.Counted(0.5, 0.6, 0.75, shared_loads=0.25))
    assert tile.clocks["FMA"] == 0.5 * tile.pairs
    assert tile.clocks["issue"] == 0.75 * tile.pairs
    bare = model.tile_of("mxfp4", 64, 128)
    assert tile.clocks["shared memory"] == bare.clocks["shared memory"] + 0.25 * tile.pairs / 32
    assert tile.bottleneck == "issue"
    assert tile.clocks_per_pair == 0.75


def test_keys_from_memory_and_narrow_logits(model: ModuleType) -> None:
    dense = model.tile_of("fp8", 64, 128, columns=64)
    paged = model.tile_of("fp8", 64, 128, columns=64, from_dram=True)
    assert (paged.clocks["DRAM"] - dense.clocks["DRAM"]) * model.DRAM_BYTES == pytest.approx(
        128 * 132
    )
    assert paged.bottleneck == "DRAM"
    narrow = model.tile_of("fp8", 8, 128, logit_bytes=2)
    assert narrow.clocks["DRAM"] == pytest.approx(model.tile_of("fp8", 8, 128).clocks["DRAM"] / 2)


def test_tables_mark_what_was_not_counted(model: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    one = {"format": "fp8", "H": 64, "D": 128}
    one |= {"fma": 0.8, "alu": 0.5, "issue": 1.25, "shared_loads": 1.0}
    facts = {"arch": "sm_100f", "nvrtc": "1.2.3", "how": "by hand"}
    path.write_text(json.dumps(facts | {"kernels": [one]}))
    text = model.markdown_tables(path)
    assert "| fp8 H=64 | 256 | 512 | 512 | 532 | 256 | 410 | 256 | 640 |" in text
    assert "| issue | 1.250 |" in text
    assert "| fp8 H=32 * |" in text
    assert "kernels compiled for sm_100f by NVRTC 1.2.3: by hand." in text
    assert "not counted" in text
    bare = model.markdown_tables(tmp_path / "none.json")
    assert "| fp8 H=64 * |" in bare
    assert "compiled for" not in bare
