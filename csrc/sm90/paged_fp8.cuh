// logits[r, n] = k_scale[n] * sum_h weights[r, h] * relu(dot(q[r, h], k[n])),  n < len of row r,
// where request r / next_n has its keys in pages of a KV cache.
// Meaning: docs/semantics.md.
//
// The kernel is that of dense_fp8.cuh, with other blocks and another load: a block is a group, at
// most 8 rows of one request, and its keys are read once for all of them. A stage is filled page by
// page; a page that does not exist is zeros. kBlockColumns columns hold a group: 512, four warpgroups
// with 128 of their own each, or 64, 128 or 256 that warpgroups share, taking stages in turn.
#pragma once

#include "ptx/copy.cuh"
#include "score/paged.cuh"
#include "sm90/score/kernel.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

template <int kHeads,
          int kDim,
          typename Logit,
          int kStages,
          int kStageRows,
          int kBlockColumns,
          int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1)
    paged_fp8(const __grid_constant__ ptx::TensorMap q_map,
              const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ PagedArguments args) {
  using Kernel = Tiling<Fp8, kHeads, kDim, Logit, kStages, kStageRows, kBlockColumns>;
  score<Kernel, Paged<Kernel>, kSharedBytes>(q_map, k_map, args);
}

}  // namespace mqa::sm90
