// Dense and paged logits of formats that become bfloat16, MXFP8, MXFP4, and FP8 for accuracy, and of
// bfloat16, which goes the same way as it is.
// Meaning: docs/semantics.md.
//
//   logits[s, n] = sum_h weights[s, h] * relu(dot(q[s, h], k[n])),  q and k with their block scales
//
// The kernels are those of dense_fp8.cuh and paged_fp8.cuh but for the products. Math warpgroups
// convert keys in registers on their way from shared memory to the tensor cores; a block's queries
// they convert once, into shared memory.
#pragma once

#include "ptx/copy.cuh"
#include "score/dense.cuh"
#include "score/paged.cuh"
#include "sm90/score/elements.cuh"
#include "sm90/score/kernel.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

template <typename Format,
          int kHeads,
          int kDim,
          typename Logit,
          int kStages,
          int kStageRows,
          int kBlockColumns,
          int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1)
    dense_converted(const __grid_constant__ ptx::TensorMap k_map,
                    const __grid_constant__ DenseArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kStageRows, kBlockColumns>;
  score<Kernel, Dense<Kernel>, kSharedBytes>(k_map, k_map, args);
}

template <typename Format,
          int kHeads,
          int kDim,
          typename Logit,
          int kStages,
          int kStageRows,
          int kBlockColumns,
          int kSharedBytes>
__global__ void __launch_bounds__(kThreads, 1)
    paged_converted(const __grid_constant__ ptx::TensorMap k_map,
                    const __grid_constant__ PagedArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kStageRows, kBlockColumns>;
  score<Kernel, Paged<Kernel>, kSharedBytes>(k_map, k_map, args);
}

}  // namespace mqa::sm90
