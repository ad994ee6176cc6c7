"""What Blackwell's kernels ask of each unit of an SM stays within limits, in clocks a pair by
published rates. Counted in compiled kernels, on the longest way round the math loop: no time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mqa.cuda.operands import HEADS

UNITS = ("tensor", "shared memory", "tensor memory", "FMA", "ALU", "issue")
MATH = ("FMA", "ALU", "issue")
MOST_CLOCKS = {"fp8": 1.05, "mxfp8": 1.10, "mxfp4": 0.80}
"""A pair of 64 heads of 128 dims."""
MOST_OF_MATH = 0.85
"""Of FP8: the tensor unit needs 1 clock, and math has to end sooner."""
MOST_INSTRUCTIONS = {"fp8": 1.8, "mxfp8": 1.75, "mxfp4": 1.75}
"""Of a warp, a key and head of 8."""


@pytest.fixture(scope="module")
def counter(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("count_pipes")


@pytest.fixture(scope="module")
def model(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("pipeline_model")


@pytest.fixture(scope="module")
def counted(counter: ModuleType) -> Callable[..., dict[str, Any]]:
    once = functools.cache(counter.count)
    return lambda kind, heads, logits="float32": once(kind, heads, 128, logits)


def clocks(model: ModuleType, one: dict[str, Any]) -> dict[str, float]:
    """A pair, by unit."""
    math = model.Counted(one["fma"], one["alu"], one["issue"], one["shared_loads"])
    tile = model.tile_of(one["format"], one["H"], one["D"], counted=math)
    return {unit: tile.clocks[unit] / tile.pairs for unit in UNITS}


@pytest.mark.parametrize("logits", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MOST_CLOCKS)
def test_no_unit_needs_more_clocks_for_64_heads_than_was_set(
    model: ModuleType, counted: Callable[..., dict[str, Any]], kind: str, logits: str
) -> None:
    units = clocks(model, counted(kind, 64, logits))
    assert max(units.values()) <= MOST_CLOCKS[kind], units
    if kind == "fp8":
        assert max(units[unit] for unit in MATH) <= MOST_OF_MATH, units


@pytest.mark.parametrize("kind", MOST_INSTRUCTIONS)
def test_8_heads_take_few_instructions_each(
    counted: Callable[..., dict[str, Any]], kind: str
) -> None:
    one = counted(kind, 8)
    assert one["instructions_per_element"] <= MOST_INSTRUCTIONS[kind]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", MOST_CLOCKS)
def test_stored_counts_are_those_of_the_kernels(
    counter: ModuleType, counted: Callable[..., dict[str, Any]], kind: str, heads: int
) -> None:
    stored = json.loads(counter.COUNTS.read_text("utf-8"))["kernels"]
    assert counted(kind, heads) in stored, "run tools/count_pipes.py, then make performance"
