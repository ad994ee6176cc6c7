// What all kernels that score are made of: barriers, ranges, roles.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "score/clean.cuh"
#include "score/feed.cuh"
#include "score/range.cuh"
#include "sm90/score/math.cuh"
#include "sm90/score/queries.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

// Barriers but the first, while the schedule is on its way, by one warp.
template <typename Tiling>
__device__ __forceinline__ void prepare(int k_arrivals, typename Tiling::Storage& shared) {
  if (threadIdx.x % kWarpSize == 0) {
    for (int i = 0; i < 2; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]),
                         1 + ptx::kWarpArrivals + kWarpSize);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]), kMathWarps * ptx::kWarpArrivals);
    }
    for (int i = 0; i < Tiling::kStages; i++) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]), k_arrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]),
                         Tiling::kReaderWarps * ptx::kWarpArrivals);
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
  static_assert(sizeof(Storage) == kSharedBytes,
                "mqa/cuda/sm90_tiles.py and SharedStorage disagree");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);

  prepare_first<Tiling>(q_map, k_map, shared);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  // The schedule is on its way while the warps meet and prepare.
  Cut entry{};
  if (args.schedule != nullptr) entry = Range<Tiling, Source>::read_entry(args);
  __syncthreads();
  Source::prefetch(args);
  if (args.schedule != nullptr) Range<Tiling, Source>::store_entry(args, entry, shared);
  if (Range<Tiling, Source>::range_by_all(args)) {
    Range<Tiling, Source>::find_range_by_all(args, shared);
    __syncthreads();
  }

  // setmaxnreg hands out what the launch got, 96 registers a thread, unless all need the same.
  constexpr int kMathRegisters = Tiling::math_registers(Source::kPaged);
  constexpr int kOtherRegisters = (96 * kThreads - kMathRegisters * kMathThreads) / kOtherThreads;
  constexpr bool kHandOut = kMathRegisters != kOtherRegisters;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (warp < kMathWarps) {
    if (warp == kPreparingWarp) prepare<Tiling>(Source::k_arrivals(args), shared);
    if (args.schedule == nullptr && !Range<Tiling, Source>::range_by_all(args) && warp == 0)
      Range<Tiling, Source>::find_range_by_warp(args, shared);
    Source::narrow(args, shared);
    if (warp == 0) ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.range_known));
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.range_known), 0);
    if constexpr (kHandOut) ptx::setmaxnreg_inc<kMathRegisters>();
    Math<Tiling>::math(shared, [&](const Piece& piece, int buffer) {
      if constexpr (Tiling::Format::kConverted)
        Queries<Tiling>::bring(args, piece.row, buffer, shared);
    });
    Clean<Tiling, Source>::math_is_through(args);
  } else {
    if constexpr (kHandOut) ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp != kCleanWarp) {
      Feed<Tiling, Source>::feed(warp, q_map, k_map, args, shared);
    } else {
      Clean<Tiling, Source>::clean(args, shared);
    }
  }
}

}  // namespace mqa::sm90
