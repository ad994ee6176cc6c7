// logits[s, n] = k_scale[n] * sum_h weights[s, h] * relu(dot(q[s, h], k[n])),  n in the window of s
// Meaning: docs/semantics.md.
#pragma once

#include "ptx/copy.cuh"
#include "score/dense.cuh"
#include "score/paged.cuh"
#include "sm100/score/kernel.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Format, int kHeads, int kDim, typename Logit, int kStages, int kColumns, int kBytes>
__global__ void __launch_bounds__(kThreads, 1) dense(const __grid_constant__ ptx::TensorMap q_map,
                                                     const __grid_constant__ ptx::TensorMap k_map,
                                                     const __grid_constant__ DenseArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kColumns>;
  score<Kernel, Dense<Kernel>, kBytes>(q_map, k_map, args);
}

template <typename Format, int kHeads, int kDim, typename Logit, int kStages, int kColumns, int kBytes>
__global__ void __launch_bounds__(kThreads, 1) paged(const __grid_constant__ ptx::TensorMap q_map,
                                                     const __grid_constant__ ptx::TensorMap k_map,
                                                     const __grid_constant__ PagedArguments args) {
  using Kernel = Tiling<Format, kHeads, kDim, Logit, kStages, kColumns>;
  score<Kernel, Paged<Kernel>, kBytes>(q_map, k_map, args);
}

}  // namespace mqa::sm100
