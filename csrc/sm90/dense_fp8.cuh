// logits[s, n] = k_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n])),  n in the window of s
// Meaning: docs/semantics.md. Why this shape, and what others gave: docs/performance.md.
//
// A CTA takes a range of tasks (query block, KV tokens) and goes through it block by block. A query
// block is 512 / H rows, so 512 columns (row, head) of q stay in shared memory while key stages of
// kStageRows tokens stream past them.
//
//   math     4 warpgroups   each owns 128 columns (128 / H rows); all read the same 64-key tiles:
//                           wgmma, relu, weighted head sum, k scale, one store per logit (two
//                           lanes store the same one where H = 128)
//   load     1 warp         q and k by TMA, k scales by bulk copies or cp.async
//   rows     1 warp         windows and result addresses of a block's rows
//   weights  1 warp         weights of a block's rows, by cp.async if they are float32
//   clean    1 warp         -inf outside the windows, by bulk stores
//
//   barrier       filled by                                          arrivals   waited on by
//   q_full        load (tx bytes), rows, weights (every lane)              34   math
//   q_empty       math, a lane of each warp                                16   load, rows, weights
//   k_full        load (tx bytes), its cp.async if scales need them   1 or 33   math
//   k_empty       math, a lane of each warp                                16   load
//   range_known   math, a lane of the first two warps, once                 2   all
//   loading       load, a lane, once, if rows are cleaned last              1   clean
//
// load, rows and weights go through the same blocks in the same order, each by its own arithmetic,
// and end the sequence with an empty block. Each block's stages are filled up with empty ones to a
// multiple of kAligned, so that the hot loop's stages lie at fixed places. Blocks of few rows use
// fewer columns: then warpgroups share columns and split the tiles.
//
// Writes logits[s, n] for n in the window of s alone, and -inf elsewhere if asked; reads q, k and
// scales of existing rows and tokens alone, whatever windows and schedule hold. Keys past the last
// token are zeros that TMA fills in.
#pragma once

#include "ptx/copy.cuh"
#include "score/dense.cuh"
#include "sm90/score/kernel.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

template <int kHeads, int kDim, typename Logit, int kStages, int kStageRows, int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1)
    dense_fp8(const __grid_constant__ ptx::TensorMap q_map,
              const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ DenseArguments args) {
  using Kernel = Tiling<Fp8, kHeads, kDim, Logit, kStages, kStageRows, 512>;
  score<Kernel, Dense<Kernel>, kSharedBytes>(q_map, k_map, args);
}

}  // namespace mqa::sm90
