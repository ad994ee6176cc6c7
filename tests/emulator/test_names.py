"""Reports name parts of shared memory as the kernels' source does."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from mqa.cuda import compiler, sm90, sm90_paged
from mqa.cuda.plan import Kernel
from mqa.cuda.operands import HEAD_DIMS, HEADS, MX_DIMS
from mqa.cuda.sm90_tiles import Tiles, shared_parts
from mqa.emulator import run

pytestmark = pytest.mark.skipif(
    compiler.unavailable() is not None, reason="NVRTC is missing, which compiles the kernels"
)
HEADER = """#include "sm90/score/storage.cuh"
namespace mqa::sm90 {
template <typename Storage, typename Member>
__device__ int offset(const Storage& storage, const Member& member) {
  return reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&storage);
}
template <typename Storage>
__device__ void tell(const Storage& s, int*& to) {
"""


def some_tiles() -> list[Tiles]:
    """One for each kind of elements and size of a block."""
    found = {}
    for elements in sm90.ACCUMULATORS:
        dims = HEAD_DIMS if elements.startswith("Fp8") else MX_DIMS
        for heads, dim in itertools.product(HEADS, dims):
            every = [sm90_paged.paged_tiles(heads, dim, n, elements) for n in range(1, 9)]
            for tiles in (sm90.tiles(heads, dim, elements), *every):
                found[elements, tiles.columns, tiles.stages] = tiles
    return [*found.values()]


def storage(t: Tiles) -> str:
    numbers = (t.stages, t.stage_rows, t.columns)
    return (
        f"Tiling<{t.elements}, {t.heads}, {t.dim}, float, {', '.join(map(str, numbers))}>::Storage"
    )


def test_parts_of_shared_memory_lie_where_the_kernels_have_them(tmp_path: Path) -> None:
    """A kernel that tells the offset and the size of every member, run by the emulator itself."""
    every = some_tiles()
    assert len(every) > 16
    names = list(dict.fromkeys(part.name.partition("[")[0] for part in shared_parts(every[0])))
    body = "".join(f"*to++ = offset(s, s.{name}), *to++ = sizeof(s.{name});\n" for name in names)
    calls = "".join(
        f"tell(*reinterpret_cast<{storage(t)}*>(at), to), *to++ = sizeof({storage(t)});\n"
        for t in every
    )
    header = tmp_path / "parts.cuh"
    header.write_text(
        HEADER + body + "}\ntemplate <int>\n__global__ void parts(char* at, int* to) {\n" + calls
        + "}\n}"
    )  # fmt: skip
    binary = compiler.compile_kernel(Kernel(str(header), "mqa::sm90::parts", ("0",)), "sm_90a")
    told = np.zeros((len(every), 2 * len(names) + 1), np.int32)
    run(binary.ptx, binary.symbol, 1, 1, [1 << 20, told])
    for t, values in zip(every, told.tolist(), strict=True):
        members = {name: values[2 * i : 2 * i + 2] for i, name in enumerate(names)}
        assert t.shared_bytes == values[-1]
        count = dict.fromkeys(names, 0)
        for part in shared_parts(t):
            count[part.name.partition("[")[0]] += 1
        for name, offset in shared_parts(t):
            member, _, rest = name.partition("[")
            first, size = members[member]
            index = int(rest.rstrip("]") or 0)
            assert offset == first + index * (size // count[member]), (t, name)
