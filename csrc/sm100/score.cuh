// logits[s, n] = k_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n])),  n in the window of s
// Formats with block scales have these in the dot instead of k_scale.
// Meaning: docs/semantics.md. A key tile's way through the kernel: docs/kernels.md. Why this shape:
// docs/performance.md.
//
// A CTA takes a range of tasks (query block, KV tokens) and goes through it block by block. A block's
// columns (row, head) of q stay in shared memory while stages of 128 keys stream past. One product of a
// stage, keys by columns, fills an accumulator in tensor memory: a lane a key. There are two
// accumulators or more. A product has 256 columns at most, 192 with block scales. So has a block, or it
// has 512, multiplied in passes: several products of each stage, one after the other.
//
//   math      2 to 4 warpgroups   each sums a set of 64 columns, or of a row where that has more, for
//                                 128 keys, a thread a key: relu, weighted head sum, k scale, stores.
//                                 Where there is but one set, warpgroups take tiles in turn. Those
//                                 that are not needed leave at once. Of a block in passes, each sums
//                                 two strips of 64 columns, which may be of different passes
//   load      1 warp              q and k by TMA, k scales by bulk copies or cp.async
//   rows      1 warp              windows and result addresses of a block's rows
//   weights   1 warp              weights of a block's rows, and its block scales
//   clean     1 warp              -inf outside the windows, by bulk stores; when: Tiling::cleaning
//   multiply  1 thread            products, copies of block scales to tensor memory, commits; its warp
//                                 allocates tensor memory and frees it
//   scales    1 warp              block scales of keys into the order that tensor memory takes
//
//   barrier       filled by                                              arrivals   waited on by
//   q_full        load (tx bytes), rows, weights (every lane)                  34   math, multiply, scales
//   q_empty       math (a lane of each warp), multiply (commit), scales   9 to 18   load, rows, weights
//   k_full        load (tx bytes), its cp.async if scales need them       1 or 33   multiply, scales
//   k_empty       math that has the tile (a lane of each warp; of         1 to 17   load, multiply
//                 passes nobody), multiply (commit)
//   scales_full   scales, a lane                                                1   multiply
//   sums_full     multiply (commit)                                             1   math
//   sums_empty    of passes: math that has a strip of it (a lane of       8 to 12   multiply
//                 each warp)
//   range_known   math, a lane of the first two warps, once                     2   all
//   loading       load, a lane, once, if cleaning waits for loads               1   clean
//
// load, rows and weights go through the same blocks in the same order, each by its own arithmetic, and
// end the sequence with an empty block. Where warpgroups do not take turns, each block's stages are
// filled up with empty ones to a multiple of kAligned: the hot loop's tiles then always have the same
// accumulators and phases.
//
// k_empty tells two things: load may fill the stage again, once products (commit) and math, which reads
// k scales, are through with it; and multiply may overwrite the accumulator that the stage's product
// went to. For that, multiply waits for the k_empty of the tile as many tiles ago as there are
// accumulators. Block scales in tensor memory belong to an accumulator, those of q to one of the two
// blocks that are on their way, so that no copy overwrites what a product may still read.
//
// Passes have a barrier pair each, sums_full and sums_empty, and take the two accumulators in turn:
// multiply waits for the sums_empty of the pass before the last one. k_empty then tells of the stage
// alone. Block scales of keys belong to every other tile: once math has a tile's second pass, all
// products of the tile before are done. Passes of rows that do not exist are told of without a product.
//
// Where -inf is written last, math warps that are through meet the clean warp at a named barrier of its
// own, kCleanBarrier.
//
// Writes logits[s, n] for n in the window of s alone, and -inf elsewhere if asked; reads q, k and
// scales of existing rows and tokens alone, whatever windows and schedule hold. Keys past the last
// token are zeros that TMA fills in.
#pragma once

#include "ptx/copy.cuh"
#include "score/dense.cuh"
#include "score/paged.cuh"
#include "sm100/score/kernel.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Format,
          int kHeads,
          int kDim,
          typename Logit,
          int kStages,
          int kColumns,
          int kBytes>
__global__ void __launch_bounds__(kThreads, 1) dense(const __grid_constant__ ptx::TensorMap q_map,
                                                     const __grid_constant__ ptx::TensorMap k_map,
                                                     const __grid_constant__ DenseArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kColumns>;
  score<Kernel, Dense<Kernel>, kBytes>(q_map, k_map, args);
}

template <typename Format,
          int kHeads,
          int kDim,
          typename Logit,
          int kStages,
          int kColumns,
          int kBytes>
__global__ void __launch_bounds__(kThreads, 1) paged(const __grid_constant__ ptx::TensorMap q_map,
                                                     const __grid_constant__ ptx::TensorMap k_map,
                                                     const __grid_constant__ PagedArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kColumns>;
  score<Kernel, Paged<Kernel>, kBytes>(q_map, k_map, args);
}

}  // namespace mqa::sm100
