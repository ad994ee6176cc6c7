// What all kernels that score are made of: barriers, tensor memory, ranges, roles.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "score/clean.cuh"
#include "score/feed.cuh"
#include "score/range.cuh"
#include "sm100/score/math.cuh"
#include "sm100/score/multiply.cuh"
#include "sm100/score/scales.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

// Barriers but the first, while the schedule is on its way, by one warp.
template <typename Tiling>
__device__ __forceinline__ void prepare(int k_arrivals, typename Tiling::Storage& shared) {
  if (threadIdx.x % kWarpSize == 0) {
    for (int i = 0; i < 2; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]),
                         1 + ptx::kWarpArrivals + kWarpSize);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]),
                         1 + (Tiling::kActiveWarps + Tiling::kScaled) * ptx::kWarpArrivals);
    }
    for (int i = 0; i < Tiling::kStages; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]), k_arrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]),
                         1 + Tiling::kReaderWarps * ptx::kWarpArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.scales_full[i]), ptx::kWarpArrivals);
    }
    for (int i = 0; i < Tiling::kSums; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.sums_full[i]), 1);
      if constexpr (Tiling::kPasses > 1)
        ptx::mbarrier_init(ptx::shared_address(&shared.sums_empty[i]),
                           Tiling::readers_of(i) * ptx::kWarpArrivals);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.loading), ptx::kWarpArrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.range_known));
}

template <typename Tiling, typename Source, int kSharedBytes>
__device__ __forceinline__ void score(const ptx::TensorMap& q_map,
                                      const ptx::TensorMap& k_map,
                                      const typename Source::Arguments& args) {
  using Storage = typename Tiling::Storage;
  using Ranges = Range<Tiling, Source>;
  static_assert(sizeof(Storage) == kSharedBytes,
                "mqa/cuda/sm100_tiles.py and SharedStorage disagree");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);

  prepare_first<Tiling>(q_map, k_map, shared);
  if (warp == kMmaWarp) {
    ptx::tcgen05_alloc<kTensorColumns>(ptx::shared_address(&shared.tensor_memory));
    ptx::tcgen05_relinquish_alloc_permit();
  }
  ptx::griddepcontrol_wait();
  // The schedule is on its way while the warps meet and prepare.
  Cut entry{};
  if (args.schedule != nullptr) entry = Ranges::read_entry(args);
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  // Not before this CTA has its tensor memory, which a dependent beside it could take.
  ptx::griddepcontrol_launch_dependents();
  Source::prefetch(args);
  if (args.schedule != nullptr) Ranges::store_entry(args, entry, shared);
  if (Ranges::range_by_all(args)) {
    Ranges::find_range_by_all(args, shared);
    __syncthreads();
  }

  // setmaxnreg hands out what the launch got, 80 registers a thread.
  constexpr int kIdleGroups = kMathGroups - Tiling::kGroups, kIdleRegisters = 24;
  constexpr int kOtherRegisters = 40;
  constexpr int kMathRegisters =
      (80 * kThreads - kOtherRegisters * kOtherThreads - kIdleRegisters * kIdleGroups * 128) /
      (Tiling::kGroups * 128) / 8 * 8;
  if (warp < kMathWarps) {
    if (warp == kPreparingWarp) prepare<Tiling>(Source::k_arrivals(args), shared);
    if (args.schedule == nullptr && !Ranges::range_by_all(args) && warp == 0)
      Ranges::find_range_by_warp(args, shared);
    Source::narrow(args, shared);
    if (warp == 0) ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.range_known));
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
    if (kIdleGroups > 0 && warp >= Tiling::kActiveWarps) {
      ptx::setmaxnreg_dec<kIdleRegisters>();
      return;
    }
    ptx::setmaxnreg_inc<kMathRegisters>();
    Math<Tiling>::math(shared);
    Clean<Tiling, Source>::math_is_through(args);
    return;
  }
  ptx::setmaxnreg_dec<kOtherRegisters>();
  if (warp < kCleanWarp) {
    Feed<Tiling, Source>::feed(warp, q_map, k_map, args, shared);
  } else if (warp == kMmaWarp) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
    if (ptx::elect_one()) Multiply<Tiling>::multiply(shared);
    __syncwarp();
    ptx::tcgen05_dealloc<kTensorColumns>(shared.tensor_memory);
  } else if (Tiling::kScaled && warp == kScalesWarp) {
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
    Scales<Tiling>::reorder(shared);
  } else if (warp == kCleanWarp) {
    Clean<Tiling, Source>::clean(args, shared);
  }
}

}  // namespace mqa::sm100
