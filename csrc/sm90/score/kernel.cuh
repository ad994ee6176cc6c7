// What all kernels that score are made of: barriers, ranges, roles.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/score/feed.cuh"
#include "sm90/score/math.cuh"
#include "sm90/score/queries.cuh"
#include "sm90/score/range.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

// Barriers and tensor maps, by a warp other than that which reads the schedule.
template <typename Tiling>
__device__ __forceinline__ void prepare(const ptx::TensorMap& q_map,
                                        const ptx::TensorMap& k_map,
                                        int k_arrivals,
                                        typename Tiling::Storage& shared) {
  if (threadIdx.x / kWarpSize != 1) return;
  const int lane = threadIdx.x % kWarpSize;
  static_assert(Tiling::kStages <= kWarpSize, "a lane for each stage");
  if (lane == 0) {
    ptx::prefetch_tensormap(&q_map);
    ptx::prefetch_tensormap(&k_map);
    ptx::mbarrier_init(ptx::shared_address(&shared.range_known), ptx::kWarpArrivals);
  }
  if (lane < 2) {
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full[lane]),
                       1 + ptx::kWarpArrivals + kWarpSize);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[lane]), kMathWarps * ptx::kWarpArrivals);
  }
  if (lane < Tiling::kStages) {
    ptx::mbarrier_init(ptx::shared_address(&shared.k_full[lane]), k_arrivals);
    ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[lane]),
                       Tiling::kReaderWarps * ptx::kWarpArrivals);
  }
  ptx::fence_mbarrier_init();
}

template <typename Tiling, typename Source, int kSharedBytes>
__device__ __forceinline__ void score(const ptx::TensorMap& q_map,
                                      const ptx::TensorMap& k_map,
                                      const typename Source::Arguments& args) {
  using Storage = typename Tiling::Storage;
  static_assert(sizeof(Storage) == kSharedBytes, "mqa/cuda/sm90.py and SharedStorage disagree");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);

  prepare<Tiling>(q_map, k_map, Source::k_arrivals(args), shared);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  Source::prefetch(args);
  // The schedule is on its way while the warps meet.
  Cut entry{};
  if (args.schedule != nullptr) entry = Range<Tiling, Source>::read_entry(args);
  __syncthreads();
  if (args.schedule != nullptr) Range<Tiling, Source>::store_entry(args, entry, shared);
  if (Range<Tiling, Source>::range_by_all(args)) {
    Range<Tiling, Source>::find_range_by_all(args, shared);
    __syncthreads();
  }

  // setmaxnreg hands out what the launch got: 96 registers a thread.
  constexpr int kMathRegisters = Source::kMathRegisters;
  constexpr int kOtherRegisters = (96 * kThreads - kMathRegisters * kMathThreads) / kOtherThreads;
  constexpr bool kHandOut = kMathRegisters != kOtherRegisters;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (warp < kMathWarps) {
    if (args.schedule == nullptr && !Range<Tiling, Source>::range_by_all(args) && warp == 0)
      Range<Tiling, Source>::find_range_by_warp(args, shared);
    Source::narrow(args, shared);
    if (warp == 0) ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.range_known));
    if constexpr (kHandOut) ptx::setmaxnreg_inc<kMathRegisters>();
    Math<Tiling>::math(shared, [&](const Piece& piece, int buffer) {
      if constexpr (Tiling::Format::kConverted)
        Queries<Tiling>::bring(args, piece.row, buffer, shared);
    });
  } else {
    if constexpr (kHandOut) ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp != kCleanWarp) {
      Feed<Tiling, Source>::feed(warp, q_map, k_map, args, shared);
    } else if (args.clean) {
      clean_rows(Source::logits(args), Source::windows(args), blockIdx.x, gridDim.x, shared.fill);
    }
  }
}

}  // namespace mqa::sm90
