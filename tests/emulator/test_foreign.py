"""The tutorials for Hopper of the installed `nvidia-cutlass` package multiply matrices.

Matrices hold ±1, so that float16 sums are exact, and the product is numpy's. Nothing here knows
how the kernels do it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tutorials import HOPPER, Array, Launch, Source, Tutorial, compiled, example, launch

from mqa.emulator import EmulationError, Kind
from mqa.emulator.scheduler import SCHEDULES

# nvcc takes a minute for them.
pytestmark = [pytest.mark.no_cover, pytest.mark.slow]

NAMES = ("wgmma_tma_sm90", "wgmma_sm90")
LAYOUTS = (("N", "T"), ("T", "N"))
"""Both that the tutorials have: rows of A and B contiguous in memory, or their K."""


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tutorial]:
    files = {name: example(f"cute/tutorial/hopper/{name}.cu") for name in NAMES}
    return {
        name: compiled(tmp_path_factory, name, Source(file, HOPPER)) for name, file in files.items()
    }


def recorded(
    tutorial: Tutorial, folder: Path, layouts: tuple[str, str], m: int, n: int, k: int
) -> tuple[Launch, Array, Array]:
    """A launch with the matrix it will write, [M, N], and the product that has to be there."""
    found = launch(tutorial, folder, m, n, k, *layouts)
    pointers = [int.from_bytes(raw, "little") for raw in found.params if len(raw) == 8]
    a, b, c = (found.memory[x].view(np.float16) for x in pointers if x in found.memory)
    first = a.reshape(k, m).T if layouts[0] == "N" else a.reshape(m, k)
    second = b.reshape(k, n) if layouts[1] == "T" else b.reshape(n, k).T
    assert set(np.unique(first)) == {-1, 1}
    product = first.astype(np.float64) @ second.astype(np.float64)
    return found, c.reshape(n, m).T, product


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_tutorial_with_tensor_copies_multiplies(
    tutorials: dict[str, Tutorial], tmp_path: Path, layouts: tuple[str, str], schedule: str
) -> None:
    tutorial = tutorials["wgmma_tma_sm90"]
    found, got, want = recorded(tutorial, tmp_path, layouts, 256, 256, 320)
    assert (found.cluster, len(found.maps)) == ((2, 1, 1), 2)
    assert not np.array_equal(got, want)
    found.run(tutorial.ptx, schedule=schedule, seed=3, ignore=(Kind.UNFINISHED,))
    assert np.array_equal(got, want)


def test_it_ends_while_tiles_come_that_nobody_waits_for(
    tutorials: dict[str, Tutorial], tmp_path: Path
) -> None:
    """Its loop asks for tiles past the end of K."""
    tutorial = tutorials["wgmma_tma_sm90"]
    found, _, _ = recorded(tutorial, tmp_path, ("T", "N"), 256, 256, 320)
    with pytest.raises(EmulationError) as caught:
        found.run(tutorial.ptx, schedule="hunt", seed=3)
    assert caught.value.report.kind is Kind.UNFINISHED


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_tutorial_with_copies_of_threads_multiplies_where_its_fences_are_not_looked_for(
    tutorials: dict[str, Tutorial], tmp_path: Path, layouts: tuple[str, str]
) -> None:
    tutorial = tutorials["wgmma_sm90"]
    found, got, want = recorded(tutorial, tmp_path, layouts, 128, 256, 256)
    found.run(tutorial.ptx, ignore=(Kind.PROXY_FENCE,))
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    ("schedule", "ignored", "kind"),
    [
        ("eager", (), Kind.PROXY_FENCE),
        ("lazy", (Kind.PROXY_FENCE,), Kind.RACE),
        ("hunt", (Kind.PROXY_FENCE,), Kind.RACE),
    ],
)
def test_it_has_no_fence_and_no_barrier_between_copies_and_products(
    tutorials: dict[str, Tutorial],
    tmp_path: Path,
    schedule: str,
    ignored: tuple[Kind, ...],
    kind: Kind,
) -> None:
    tutorial = tutorials["wgmma_sm90"]
    found, _, _ = recorded(tutorial, tmp_path, ("T", "N"), 128, 128, 256)
    with pytest.raises(EmulationError) as caught:
        found.run(tutorial.ptx, schedule=schedule, seed=3, ignore=ignored)
    assert caught.value.report.kind is kind
    assert caught.value.report.instruction.startswith("wgmma.mma_async")


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_both_it_multiplies_under_every_schedule(
    tutorials: dict[str, Tutorial], tmp_path: Path, layouts: tuple[str, str], schedule: str
) -> None:
    tutorial = tutorials["wgmma_sm90"]
    fence = "wgmma.fence.sync.aligned;"
    mended = f"fence.proxy.async.shared::cta;\nbar.sync 0;\n{fence}"
    found, got, want = recorded(tutorial, tmp_path, layouts, 128, 128, 320)
    found.run(tutorial.ptx.replace(fence, mended), schedule=schedule, seed=5)
    assert np.array_equal(got, want)


def test_tiles_that_the_matrix_does_not_fill_are_stored_past_its_end(
    tutorials: dict[str, Tutorial], tmp_path: Path
) -> None:
    """Both tutorials say that their epilogue is unpredicated."""
    tutorial = tutorials["wgmma_tma_sm90"]
    found, _, _ = recorded(tutorial, tmp_path, ("T", "N"), 200, 128, 192)
    with pytest.raises(EmulationError) as caught:
        found.run(tutorial.ptx)
    assert caught.value.report.kind is Kind.OUT_OF_BOUNDS
    assert caught.value.report.instruction.startswith("st.global")
