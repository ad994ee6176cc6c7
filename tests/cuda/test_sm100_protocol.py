"""Barriers of Blackwell plans, as the kernels' head comment and docs/kernels.md name them."""

import itertools
import re
from pathlib import Path

import pytest

from mqa.cuda import compiler
from mqa.cuda.sm100_tiles import barriers, dense_tiles, paged_tiles

ROOT = Path(__file__).parents[2]


def _told():
    """Arrivals by barrier, as a range, from the table in csrc/sm100/score.cuh."""
    source = (compiler.sources() / "sm100" / "score.cuh").read_text()
    line = re.compile(
        r"^//   (\w+) .*?  +(?:(\d+) (?:to|or) )?(\d+)   (?:math|load|multiply|all|clean)",
        re.MULTILINE,
    )
    return {name: (int(low or high), int(high)) for name, low, high in line.findall(source)}


def _plans():
    for elements, heads in itertools.product(("Fp8", "Mxfp8", "Mxfp4"), (8, 16, 32, 64, 128)):
        every = [dense_tiles(heads, 64, elements)]
        every += [paged_tiles(heads, 64, rows, elements) for rows in range(1, 9)]
        for t in every:
            for arrivals in (1, 33):
                yield [(one.name, one.arrivals) for one in barriers(t, arrivals, t.k_bytes)]


def test_head_comment_has_the_arrivals_of_every_plan():
    told, seen = _told(), {}
    for plan in _plans():
        for name, count in plan:
            seen.setdefault(name, set()).add(count)
    assert set(told) == set(seen)
    assert {name: (min(counts), max(counts)) for name, counts in seen.items()} == told


@pytest.mark.parametrize("name", sorted(_told()))
def test_the_page_has_a_row_for_each_barrier(name):
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    blackwell, _, hopper = page.partition("## Hopper")
    assert f"| `{name}` |" in blackwell
    assert (f"| `{name}` |" in hopper) is (name not in ("scales_full", "sums_full", "sums_empty"))
