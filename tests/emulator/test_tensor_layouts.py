"""Operands, sums and scales of Blackwell lie where CuTe's layout algebra puts them.

A program of this folder, compiled with the headers of the installed `nvidia-cutlass`, prints places
of all elements, and the descriptors that CuTe makes. The emulator gets the descriptors alone.
"""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from tutorials import HERE, once, source

from mqa.emulator.tensor_layouts import (
    COPIES,
    FRAGMENTS,
    chunks_across,
    chunks_of,
    fragment,
    lanes_of_copy,
    places_of_scales,
    places_of_sums,
    scales_of,
)

Printed = dict[tuple[str, ...], list[int]]
"""Numbers by what they are of."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    headers = f"-I{source() / 'include'}"
    program = once(
        tmp_path_factory,
        "tensor_layouts",
        [["nvcc", "-std=c++17", headers, str(HERE / "foreign" / "tensor_layouts.cpp")]],
    )
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    found: Printed = {}
    for line in output.splitlines():
        words, colon, numbers = line.partition(": ")
        if colon and words.split()[0] in ("tile", "sums", "scales", "registers", "copy", "source"):
            found[tuple(words.split())] = [int(number) for number in numbers.split()]
    return found


def of(printed: Printed, *words: str) -> dict[tuple[str, ...], list[int]]:
    """What begins so, by the other words."""
    count = len(words)
    return {key[count:]: value for key, value in printed.items() if key[:count] == words}


@pytest.mark.parametrize("base", [0, 0x8400, 0x2_FC00])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_descriptors_name_the_chunks_of_k_major_tiles(
    printed: Printed, span: int, base: int
) -> None:
    """Rows of 128 bytes, of which each product takes 32."""
    tiles = of(printed, "tile", "b8", "K", str(span))
    assert {(int(rows), int(step)) for rows, step in tiles} == {
        (rows, step) for rows in (8, 24, 128, 256) for step in range(4)
    }
    for (rows, _), (descriptor, *places) in tiles.items():
        got = chunks_of(descriptor + (base >> 4), int(rows), 32) - base
        assert np.array_equal(got.ravel(), places)


@pytest.mark.parametrize("base", [0, 0x8400])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("kind", "rows", "size"), [("b16", 256, 2), ("b8", 128, 1)])
def test_descriptors_name_the_chunks_of_tiles_whose_rows_are_contiguous(
    printed: Printed, kind: str, rows: int, size: int, span: int, base: int
) -> None:
    tiles = of(printed, "tile", kind, "MN", str(span), str(rows))
    assert len(tiles) == 4
    for descriptor, *places in tiles.values():
        got = chunks_across(descriptor + (base >> 4), rows, 32 // size, 16 // size) - base
        assert np.array_equal(got.ravel(), places)


SUMS = {(rows, columns, 1) for rows in (64, 128) for columns in (16, 32, 64, 128, 256)}
SUMS |= {(64, 8, 1), (64, 24, 1), (128, 16, 2)}
SUMS |= {(rows, columns, 2) for rows in (128, 256) for columns in (32, 64, 128, 256)}


def test_sums_lie_in_tensor_memory_as_in_cute(printed: Printed) -> None:
    found = of(printed, "sums")
    assert {tuple(map(int, words)) for words in found} == SUMS
    for words, numbers in found.items():
        rows, columns, ctas = map(int, words)
        index, *places = np.array(numbers).reshape(-1, 4).T
        assert np.array_equal(np.sort(index), np.arange(rows * columns))
        for got, want in zip(places_of_sums(rows, columns, ctas), places, strict=True):
            # CuTe counts elements with the rows running first.
            assert np.array_equal(got[index % rows, index // rows], want)


KIND_OF_SCALES = {1: ("mxf8f6f4", 32), 2: ("mxf4", 32), 4: ("mxf4nvf4", 16)}
"""Kind and elements of a block, by how many scales of a row a product takes."""


@pytest.mark.parametrize("per", [1, 2, 4])
@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize(("which", "ctas"), [("A", 1), ("B", 1), ("B", 2)])
def test_scales_lie_in_tensor_memory_as_in_cute(
    printed: Printed, which: str, ctas: int, rows: int, per: int
) -> None:
    """Eight scales of each row: a word, and a word of the next group of columns. Those of B for
    128 rows of a pair of CTAs are the ones whose two halves lie in two quarters each."""
    numbers = of(printed, "scales", which, str(rows), str(per), str(ctas))[()]
    lane, column = places_of_scales(rows, parted=ctas == 2)
    want = np.array(numbers).reshape(8, *lane.shape, 3)
    kind, block = KIND_OF_SCALES[per]
    group = int(column.max()) + 1
    for scale, (lanes, columns, bytes_) in enumerate(np.moveaxis(want, -1, 1)):
        product, within = divmod(scale, per)
        word, first = divmod(product * per, 4)
        assert np.array_equal(lanes, lane)
        assert np.array_equal(columns, np.broadcast_to(column[:, None] + word * group, lane.shape))
        assert set(bytes_.ravel()) == {scales_of(kind, block, first)[within]}


SHAPES = {
    "16dp256b": "16x256b",
    "16dp128b": "16x128b",
    "16dp64b": "16x64b",
    "16dp32b": "16x32bx2",
    "32dp32b": "32x32b",
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", ["ld", "st"])
def test_registers_of_loads_and_stores_hold_the_cells_that_cute_says(
    printed: Printed, way: str, name: str
) -> None:
    shape = SHAPES[name]
    per, most = FRAGMENTS[shape]
    for count in (1 << i for i in range(most.bit_length())):
        whole = of(printed, "registers", f"{way}_{name}{count}x")[()]
        packed = of(printed, "registers", f"{way}_{name}{count}x_16b")[()]
        lane, column = np.broadcast_arrays(*fragment(shape, count, count))
        for numbers, step in ((whole, 1), (packed, 2)):
            want = np.array(numbers).reshape(per * count, 2, 32, 3)
            for half in range(2):
                lanes, columns, bits = np.moveaxis(want[:, half], -1, 0)
                second = half * (step - 1)
                assert np.array_equal(lanes, lane)
                assert np.array_equal(columns, column * step + second)
                assert set(bits.ravel()) == {0 if step == 2 else 16 * half}


@pytest.mark.parametrize("shape", COPIES)
def test_rows_of_copies_go_to_the_lanes_that_cute_says(printed: Printed, shape: str) -> None:
    ((words, numbers),) = of(printed, "copy", shape).items()
    _, row_bytes = COPIES[shape]
    assert np.prod([int(word) for word in words]) * row_bytes * 8 == len(numbers) // 2 * 32
    found = np.array(numbers).reshape(-1, row_bytes // 4, 2)
    assert np.array_equal(
        found[..., 1], np.broadcast_to(np.arange(row_bytes // 4), found.shape[:2])
    )
    # CuTe counts copies after all rows.
    got = found[..., 0].reshape(-1, row_bytes // 4)
    assert np.array_equal(got, np.broadcast_to(lanes_of_copy(shape).T.reshape(-1, 1), got.shape))


@pytest.mark.parametrize("shape", ["32x128b.warpx4", "64x128b.warpx2::02_13", "128x128b"])
def test_descriptors_of_copies_name_rows_of_16_bytes(printed: Printed, shape: str) -> None:
    descriptor, *places = of(printed, "source", shape)[()]
    rows, row_bytes = COPIES[shape]
    assert np.array_equal(chunks_of(descriptor, rows, row_bytes).ravel(), places)
