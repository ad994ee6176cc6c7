"""Operands lie where CuTe's layout algebra puts them, and registers hold what it says.

A program of this folder, compiled with the headers of the installed `nvidia-cutlass`, prints the
bytes of all elements of canonical tiles and the descriptors that CuTe makes of them. The emulator
gets the descriptors alone.
"""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from tutorials import HERE, Array, once, source

from mqa.emulator import mma, wgmma
from mqa.emulator.tensor_layouts import swizzled

Tiles = dict[tuple[str, ...], tuple[int, Array]]
"""Descriptor, and the byte of each element, by type, major, span, rows and step along K."""
FRAGMENTS = {"C16": (128, 8), "C64": (128, 32), "C256": (128, 128)} | {
    "A8": (128, 4),
    "A16": (128, 8),
    "A32": (128, 16),
}
CASES = [("b8", "K"), ("b16", "K"), ("b32", "K"), ("b16", "MN")]
SIZES = {"b8": 1, "b16": 2, "b32": 4}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = ["nvcc", "-std=c++17", f"-I{source() / 'include'}"]
    command.append(str(HERE / "foreign" / "layouts.cpp"))
    program = once(tmp_path_factory, "layouts", [command])
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return output.splitlines()


@pytest.fixture(scope="module")
def tiles(printed: list[str]) -> Tiles:
    found = {}
    for line in printed:
        if line.startswith("tile "):
            name, numbers = line.removeprefix("tile ").split(":")
            words = tuple(name.split())
            descriptor, *places = map(int, numbers.split())
            found[words] = descriptor, np.array(places).reshape(int(words[3]), -1)
    return found


@pytest.fixture(scope="module")
def fragments(printed: list[str]) -> dict[str, Array]:
    found = {}
    for line in printed:
        if line.startswith("fragment "):
            (name, *shape), numbers = (part.split() for part in line[9:].split(":"))
            found[name] = np.array(numbers, int).reshape([int(x) for x in shape])
    return found


@pytest.fixture(scope="module")
def loads(printed: list[str]) -> dict[str, tuple[Array, Array]]:
    """Of ldmatrix: elements that threads get, [threads, values], and where rows begin."""
    found = {}
    for line in printed:
        if line.startswith("load "):
            (name, threads, values), numbers = (part.split() for part in line[5:].split(":"))
            count = int(threads) * int(values)
            given = np.array(numbers, int)
            found[name] = given[:count].reshape(int(threads), int(values)), given[count:]
    return found


def places(descriptor: int, rows: int, major: str, size: int) -> Array:
    """Byte of each element as the emulator decodes a descriptor, [rows, K]."""
    if major == "MN":
        groups = wgmma.chunks_across(descriptor, rows).T
        return (groups[:, None] + np.arange(0, 16, size)[:, None]).reshape(rows, -1)
    halves = wgmma.chunks_of(descriptor, rows)
    return (halves[..., None] + np.arange(0, 16, size)).reshape(rows, -1)


@pytest.mark.parametrize("base", [0, 0x8400, 0x2_FC00])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_descriptors_name_the_bytes_of_canonical_tiles(
    tiles: Tiles, case: tuple[str, str], span: int, base: int
) -> None:
    chosen = {words: tile for words, tile in tiles.items() if words[:3] == (*case, str(span))}
    assert len(chosen) >= 3
    for (kind, major, _, rows, _), (descriptor, want) in chosen.items():
        got = places(descriptor + (base >> 4), int(rows), major, SIZES[kind])
        assert np.array_equal(got - base, want)


@pytest.mark.parametrize("name", ["C16", "C64", "C256"])
def test_accumulators_lie_in_registers_as_in_cute(fragments: dict[str, Array], name: str) -> None:
    row, column = wgmma.fragment(int(name[1:]))
    got = np.concatenate([row + 16 * warp + 64 * column for warp in range(4)], axis=1).T
    assert got.shape == FRAGMENTS[name]
    assert np.array_equal(got, fragments[name])


@pytest.mark.parametrize("name", ["A8", "A16", "A32"])
def test_registers_of_a_hold_the_elements_that_cute_says(
    fragments: dict[str, Array], name: str
) -> None:
    size = 32 // int(name[1:])
    row, byte = (
        x.transpose(1, 0, 2).reshape(32, 16)[:, ::size]
        for x in np.broadcast_arrays(*wgmma._fragment_a())
    )
    got = np.concatenate([row + 16 * warp + 64 * (byte // size) for warp in range(4)])
    assert got.shape == FRAGMENTS[name]
    assert np.array_equal(got, fragments[name])


@pytest.mark.parametrize("depth", mma.DEPTHS)
def test_registers_of_warp_products_hold_the_elements_that_cute_says(
    fragments: dict[str, Array], depth: int
) -> None:
    for name, rows, (row, k) in (
        (f"mmaA{depth}", mma.ROWS, mma.places_of_a(depth)),
        (f"mmaB{depth}", mma.COLUMNS, mma.places_of_b(depth)),
    ):
        got = (row + rows * k).transpose(1, 0, 2).reshape(32, -1)
        assert np.array_equal(got, fragments[name])
    row, column = mma.places_of_d()
    assert np.array_equal((row + mma.ROWS * column).T, fragments[f"mmaC{depth}"])
    for operand in "ABC":
        assert np.array_equal(fragments[f"half{operand}16"], fragments[f"mma{operand}16"])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loads_of_matrices_give_the_elements_that_cute_says(
    loads: dict[str, tuple[Array, Array]], count: int, across: bool
) -> None:
    want, rows = loads[f"x{count}{'.trans' * across}"]
    got = mma._dealt(np.arange(64 * count), across=across)
    assert np.array_equal(got.transpose(1, 0, 2).reshape(32, -1), want)
    assert np.array_equal(rows[: 8 * count], 8 * np.arange(8 * count))


TILE = 0x8400
WORKED = {
    128: {
        (0, 0): 0x8400,
        (1, 0): 0x8490,
        (3, 20): 0x85A4,
        (4, 0): 0x8640,
        (5, 5): 0x86D5,
        (5, 37): 0x86F5,
        (9, 4): 0x8894,
        (9, 36): 0x88B4,
        (9, 100): 0x88F4,
        (127, 31): 0xC3EF,
    },
    64: {
        (0, 0): 0x8400,
        (1, 0): 0x8440,
        (3, 20): 0x84C4,
        (4, 0): 0x8520,
        (5, 5): 0x8565,
        (5, 37): 0x8545,
        (9, 4): 0x8644,
        (9, 36): 0x8664,
        (127, 31): 0xA3EF,
    },
    32: {
        (0, 0): 0x8400,
        (1, 0): 0x8420,
        (3, 20): 0x8474,
        (4, 0): 0x8490,
        (5, 5): 0x84B5,
        (9, 4): 0x8524,
        (127, 31): 0x93EF,
    },
}
"""Bytes of elements (row, byte along K) of 8-bit tiles at 0x8400 whose rows are a span wide."""
DESCRIPTORS = {128: 0x4000004000010840, 64: 0x8000002000010840, 32: 0xC000001000010840}


@pytest.mark.parametrize("span", [32, 64, 128])
def test_descriptors_name_the_bytes_of_worked_examples(span: int) -> None:
    for (row, byte), place in WORKED[span].items():
        chunks = wgmma.chunks_of(DESCRIPTORS[span] + byte // 32 * 2, 128)
        assert chunks[row, byte % 32 // 16] + byte % 16 == place
        # A tensor copy of rows that wide puts the byte there as well.
        assert swizzled(np.array([TILE + row * span + byte]), span)[0] == place
