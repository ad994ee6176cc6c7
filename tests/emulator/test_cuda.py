"""Kernels of plain CUDA, with the headers of the toolkit: results are those of plain loops."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ptx_kernels import Array

from mqa.emulator import run

SOURCE = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/barrier>
namespace cg = cooperative_groups;
#define KERNEL extern "C" __global__ void
__constant__ unsigned table[8] = {1, 2, 4, 8, 16, 32, 64, 128};
__device__ unsigned counter = 5;

KERNEL tiles(unsigned* out) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  out[threadIdx.x] = cg::reduce(tile, (int)threadIdx.x, cg::plus<int>());
}
KERNEL labels(unsigned* out) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  auto group = cg::labeled_partition(warp, (int)(threadIdx.x & 3));
  out[threadIdx.x] = cg::reduce(group, (int)threadIdx.x, cg::plus<int>());
}
KERNEL two_groups(unsigned* out) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  auto group = cg::binary_partition(warp, threadIdx.x % 3 == 0);
  out[threadIdx.x] = group.size() * 100 + group.thread_rank();
}
KERNEL counts(unsigned* out) {
  int all = __syncthreads_and(threadIdx.x < 60), any = __syncthreads_or(threadIdx.x == 50);
  out[threadIdx.x] = __syncthreads_count(threadIdx.x % 5 == 0) * 4 + any * 2 + all;
}
KERNEL locals(unsigned* out) {
  unsigned squares[16], sum = 0;
  for (int i = 0; i < 16; ++i) squares[i] = i * i + threadIdx.x;
  for (int i = 0; i < blockDim.x; ++i) sum += squares[(i * 7 + threadIdx.x) & 15];
  out[threadIdx.x] = sum;
}
KERNEL cases(unsigned* out) {
  unsigned v = threadIdx.x;
  switch (v % 5) {
    case 0: v *= 3; break;
    case 1: v += 100;
    case 2: v ^= 55; break;
    case 3: v = ~v; break;
  }
  out[threadIdx.x] = v;
}
KERNEL numbers(unsigned* out) {
  out[threadIdx.x] = table[threadIdx.x & 7] + (atomicAdd(&counter, 1u) - 5 < 64);
}
KERNEL barriers(unsigned* out) {
  __shared__ alignas(8) unsigned char raw[sizeof(cuda::barrier<cuda::thread_scope_block>)];
  auto& barrier = *reinterpret_cast<cuda::barrier<cuda::thread_scope_block>*>(raw);
  __shared__ unsigned cells[64];
  if (threadIdx.x == 0) init(&barrier, blockDim.x);
  __syncthreads();
  cells[threadIdx.x] = threadIdx.x;
  barrier.arrive_and_wait();
  unsigned v = cells[63 - threadIdx.x];
  barrier.arrive_and_wait();
  cells[threadIdx.x] = v + 1;
  barrier.arrive_and_wait();
  out[threadIdx.x] = cells[(threadIdx.x + 1) & 63];
}
KERNEL peers(unsigned* out) {
  __shared__ unsigned cells[16];
  auto cluster = cg::this_cluster();
  cells[threadIdx.x] = threadIdx.x + 100 * cluster.block_rank();
  cluster.sync();
  unsigned* theirs = cluster.map_shared_rank(cells, (cluster.block_rank() + 1) % 4);
  unsigned v = theirs[15 - threadIdx.x];
  cluster.sync();
  out[blockIdx.x * 16 + threadIdx.x] = v;
}
"""


def groups(of: Callable[[int], int], *, told: bool = False) -> list[int]:
    """What threads get whose warp is divided by a label: the sum, or the size and their rank."""
    found = []
    for i in range(64):
        mates = [j for j in range(i // 32 * 32, i // 32 * 32 + 32) if of(j) == of(i)]
        found.append(len(mates) * 100 + mates.index(i) if told else sum(mates))
    return found


T = range(64)
WANTED = {
    "tiles": groups(lambda i: i // 8),
    "labels": groups(lambda i: i & 3),
    "two_groups": groups(lambda i: i % 3 == 0, told=True),
    "counts": [13 * 4 + 2] * 64,
    "locals": [sum(((i * 7 + t) & 15) ** 2 + t for i in range(64)) for t in T],
    "cases": [[v * 3, (v + 100) ^ 55, v ^ 55, ~v, v][v % 5] for v in T],
    "numbers": [(1 << (i & 7)) + 1 for i in T],
    "barriers": [63 - ((i + 1) & 63) + 1 for i in T],
    "peers": [15 - i % 16 + 100 * ((i // 16 + 1) % 4) for i in T],
}


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    folder: Path = tmp_path_factory.mktemp("cuda")
    (folder / "all.cu").write_text(SOURCE)
    command = ["nvcc", "-std=c++17", "-ptx", "-lineinfo", "-arch=sm_90a", "all.cu"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "all.ptx").read_text()


@pytest.mark.parametrize("schedule", ["eager", "hunt"])
@pytest.mark.parametrize("name", WANTED)
def test_kernels_give_what_plain_loops_give(ptx: str, name: str, schedule: str) -> None:
    out: Array = np.zeros(64, np.uint32)
    grid, block, cluster = (4, 16, 4) if name == "peers" else (1, 64, None)
    run(ptx, name, grid, block, [out], cluster=cluster, schedule=schedule, seed=3)
    assert out.view(np.int32).tolist() == WANTED[name]
