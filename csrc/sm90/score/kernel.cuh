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

// Barriers and tensor maps, by one thread, of another warp than those that read the schedule.
template <typename Tiling>
__device__ __forceinline__ void prepare(const ptx::TensorMap& q_map,
                                        const ptx::TensorMap& k_map,
                                        int k_arrivals,
                                        typename Tiling::Storage& shared) {
  if (threadIdx.x != kWarpSize) return;
  ptx::prefetch_tensormap(&q_map);
  ptx::prefetch_tensormap(&k_map);
  for (int i = 0; i < 2; i++) {
    ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]), 1 + ptx::kWarpArrivals + kWarpSize);
    ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]), kMathWarps * ptx::kWarpArrivals);
  }
  for (int i = 0; i < Tiling::kStages; i++) {
    ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]), k_arrivals);
    ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]),
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
  if (args.schedule != nullptr) Range<Tiling, Source>::read_range(args, shared);
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
    Source::narrow(args, shared);
    ptx::bar_sync(kRangeBarrier, kThreads);  // feed has looked around meanwhile
    if constexpr (kHandOut) ptx::setmaxnreg_inc<kMathRegisters>();
    Math<Tiling>::math(shared, [&](const Piece& piece, int buffer) {
      if constexpr (Tiling::Format::kConverted)
        Queries<Tiling>::bring(args, piece.row, buffer, shared);
    });
  } else {
    if constexpr (kHandOut) ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp != kCleanWarp) {
      Feed<Tiling, Source>::feed(warp, q_map, k_map, args, shared);
      return;
    }
    ptx::bar_sync(kRangeBarrier, kThreads);
    if (args.clean) {
      clean_rows(Source::logits(args), Source::windows(args), blockIdx.x, gridDim.x, shared.fill);
    }
  }
}

}  // namespace mqa::sm90
