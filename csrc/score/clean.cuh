// The warp that writes -inf outside the windows, and when it does.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/mbarrier.cuh"
#include "score/storage.cuh"

namespace mqa::score {

template <typename Tiling, typename Source>
struct Clean {
  using Arguments = typename Source::Arguments;
  using Storage = typename Tiling::Storage;
  static constexpr Cleaning kWhen = cleaning_or(Tiling::cleaning(Source::kPaged));
  static constexpr int kThreads = Tiling::kActiveWarps * kWarpSize + kWarpSize;

  // By the load warp: all keys of this CTA are on their way.
  static __device__ __forceinline__ void loads_are_out(Storage& shared) {
    if constexpr (kWhen == Cleaning::kAfterLoads)
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.loading));
  }

  // By each math warp: it has stored its last logit.
  static __device__ __forceinline__ void math_is_through(const Arguments& args) {
    if constexpr (kWhen == Cleaning::kAfterMath) {
      __syncwarp();
      if (args.clean) ptx::bar_arrive(kCleanBarrier, kThreads);
    }
  }

  // By the clean warp.
  static __device__ __forceinline__ void clean(const Arguments& args, Storage& shared) {
    if (!args.clean) return;
    if constexpr (kWhen == Cleaning::kAfterLoads) {
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.loading), 0);
    } else if constexpr (kWhen == Cleaning::kAfterMath) {
      ptx::bar_sync(kCleanBarrier, kThreads);
    }
    clean_rows(Source::logits(args), Source::windows(args), blockIdx.x, gridDim.x, shared.fill);
  }
};

}  // namespace mqa::score
