// Schedules: weights of blocks of rows, and cut points.
//
// Meaning: mqa/reference/schedule.py, which the metadata kernels match bit for bit.
#pragma once

#include <cuda/std/cstdint>

#include "common/windows.cuh"
#include "ptx/control.cuh"

namespace mqa {

// A task's place: query block and split. Tasks are in lexicographic order.
struct Cut {
  int block;
  int split;
};

// A cut point of some schedule, as one of a call of `blocks` blocks.
__device__ __forceinline__ Cut cut_among(int blocks, Cut entry) {
  if (entry.block < 0) return {0, 0};
  return entry.block < blocks ? entry : Cut{blocks, 0};
}

// What a block of `rows` rows (as they count) and `tasks` tasks weighs: once + rows * tasks, `once`
// with its first task. In schedules `once` is 1.
struct Weights {
  int once;
  int rows;
  int tasks;

  __device__ __forceinline__ int64_t total() const {  // 0 for no block at all
    return once + static_cast<int64_t>(rows) * tasks;
  }
  // The first task of the block that begins at or after `into`; `tasks` if there is none.
  __device__ __forceinline__ int first_task(int64_t into) const {
    if (into == 0) return 0;
    const uint32_t past = static_cast<uint32_t>(max(into - once, int64_t{0}));
    return max(static_cast<int>(past / rows + (past % rows != 0)), 1);
  }
};

// floor(i * total / parts), for i up to parts + 1.
__device__ __forceinline__ int64_t share(int64_t total, int i, int parts) {
  if (total >> 32 != 0 || parts >= 1 << 15) return total / parts * i + total % parts * i / parts;
  // A 64-bit division takes 100 instructions, which few calls need.
  const uint32_t sum = static_cast<uint32_t>(total), count = static_cast<uint32_t>(parts);
  return static_cast<int64_t>(sum / count) * i + sum % count * static_cast<uint32_t>(i) / count;
}

template <int kThreads>
struct CutStorage {
  int64_t warp_sums[kThreads / kWarpSize];
  Cut cuts[2];
};

// Sum of `value` over this lane and lower ones.
__device__ __forceinline__ int64_t inclusive_scan_by_warp(int64_t value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int64_t lower = __shfl_up_sync(kAllLanes, value, step);
    if (static_cast<int>(threadIdx.x) % kWarpSize >= step) value += lower;
  }
  return value;
}

// Sum of `value` over lower threads (returned) and over all (total), by kThreads threads that meet
// at barrier 1.
template <int kThreads>
__device__ __forceinline__ int64_t exclusive_scan(int64_t value,
                                                  CutStorage<kThreads>& storage,
                                                  int64_t& total) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t inclusive = inclusive_scan_by_warp(value);
  if (lane == kWarpSize - 1) storage.warp_sums[warp] = inclusive;
  ptx::bar_sync(1, kThreads);
  int64_t before = 0;
  total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; other++) {
    if (other == warp) before = total;
    total += storage.warp_sums[other];
  }
  return before + inclusive - value;
}

// The task of block `block` that begins at or after weight `into` of it, or the next block's first.
__device__ __forceinline__ Cut cut_within(int block, Weights weights, int64_t into) {
  const int task = weights.first_task(into);
  return task > 0 && task >= weights.tasks ? Cut{block + 1, 0} : Cut{block, task};
}

// Cut points `first_cut` and the one after of a schedule of `blocks` blocks for `parts` parts, found
// by the CTA's kThreads threads. They meet at barrier 1, and the caller has to make them meet once
// more before it reads storage.cuts. A block weighs `weights_of(block)`.
//
// Cut i is the first task that begins at or after weight floor(i * total / parts). Blocks are taken
// kThreads at a time: once for the total, and if they are more, once more to find the place.
template <int kThreads, typename WeightsOf>
__device__ __forceinline__ void find_cuts(
    int blocks, int first_cut, int parts, CutStorage<kThreads>& storage, WeightsOf weights_of) {
  Weights weights{};
  int64_t mine = 0, total;
#pragma unroll 1
  for (int block = threadIdx.x; block < blocks; block += kThreads) {
    weights = weights_of(block);
    mine += weights.total();
  }
  int64_t before = exclusive_scan(mine, storage, total), at = 0;
  int64_t targets[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    targets[i] = share(total, first_cut + i, parts);
    if (targets[i] == total && threadIdx.x == 0) storage.cuts[i] = {blocks, 0};
  }
#pragma unroll 1
  for (int first = 0; first < blocks && at <= targets[1]; first += kThreads) {
    const int block = first + threadIdx.x;
    if (blocks > kThreads) {
      weights = block < blocks ? weights_of(block) : Weights{};
      ptx::bar_sync(1, kThreads);  // the scan before has been read
      before = at + exclusive_scan(weights.total(), storage, total);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t into = targets[i] - before;
      if (into < 0 || into >= weights.total()) continue;
      storage.cuts[i] = cut_within(block, weights, into);
    }
    at += total;
  }
}

// The same by each warp for itself, for at most 32 blocks.
template <typename WeightsOf>
__device__ __forceinline__ void find_cuts_by_warp(
    int blocks, int first_cut, int parts, Cut (&cuts)[2], WeightsOf weights_of) {
  const int block = threadIdx.x % kWarpSize;
  const Weights weights = block < blocks ? weights_of(block) : Weights{};
  const int64_t inclusive = inclusive_scan_by_warp(weights.total());
  const int64_t total = __shfl_sync(kAllLanes, inclusive, kWarpSize - 1);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t into = share(total, first_cut + i, parts) - (inclusive - weights.total());
    const bool holds = into >= 0 && into < weights.total();
    const Cut cut = holds ? cut_within(block, weights, into) : Cut{};
    const uint32_t holder = __ballot_sync(kAllLanes, holds);
    const int lane = __ffs(holder) - 1;
    cuts[i] = {__shfl_sync(kAllLanes, cut.block, lane), __shfl_sync(kAllLanes, cut.split, lane)};
    if (holder == 0) cuts[i] = {blocks, 0};
  }
}

}  // namespace mqa
