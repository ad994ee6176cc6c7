// Which tasks a CTA does.
#pragma once

#include "common/cuts.cuh"
#include "score/storage.cuh"

namespace mqa::score {

// Source is Dense or Paged: what is scored, and in which blocks.
template <typename Tiling, typename Source>
struct Range {
  using Storage = typename Tiling::Storage;
  using Arguments = typename Source::Arguments;

  // Whether all threads have to find this CTA's range together; else one warp does.
  static __device__ __forceinline__ bool range_by_all(const Arguments& args) {
    return args.schedule == nullptr && Source::groups(args) > kWarpSize;
  }

  // This CTA's cuts of a schedule, read once, by two threads: its warps must not see different ones,
  // even if somebody writes to the schedule meanwhile.
  static __device__ __forceinline__ Cut read_entry(const Arguments& args) {
    if (threadIdx.x >= 2) return {};
    const int32_t* entry =
        args.schedule + (static_cast<int64_t>(blockIdx.x) + threadIdx.x) * args.schedule_row_stride;
    return {entry[0], entry[args.schedule_column_stride]};
  }

  // Whatever is stored, the first and the last part reach to the ends.
  static __device__ __forceinline__ void store_entry(const Arguments& args,
                                                     Cut entry,
                                                     Storage& shared) {
    const int i = threadIdx.x;
    if (i >= 2) return;
    Cut cut = Source::cut_of(args, {entry.block, max(entry.split, 0)});
    if (blockIdx.x + i == 0) cut = {0, 0};
    if (blockIdx.x + i == gridDim.x) cut = {Source::groups(args), 0};
    shared.cuts.cuts[i] = cut;
  }

  // Without a schedule, balanced by cost.
  static __device__ __forceinline__ void find_range_by_all(const Arguments& args, Storage& shared) {
    find_cuts<Tiling::kThreads>(Source::groups(args), blockIdx.x, gridDim.x, shared.cuts,
                                [&](int group) { return Source::weigh(args, group); });
  }

  static __device__ __forceinline__ void find_range_by_warp(const Arguments& args,
                                                            Storage& shared) {
    Cut cuts[2];
    find_cuts_by_warp(Source::groups(args), blockIdx.x, gridDim.x, cuts,
                      [&](int group) { return Source::weigh(args, group); });
    if (threadIdx.x % kWarpSize == 0) shared.cuts.cuts[0] = cuts[0], shared.cuts.cuts[1] = cuts[1];
  }

  // What a range has of a block of `rows` rows of `group`, whose tokens are `hull`. By one thread.
  static __device__ __forceinline__ Found
  part_of(const Arguments& args, const Cut (&range)[2], int group, int rows, Hull hull) {
    const int split = args.schedule == nullptr ? Source::kAutoSplit : kScheduleSplit;
    const int splits = hull.splits(split);
    const int from = group == range[0].block ? min(range[0].split, splits) : 0;
    const int to = group == range[1].block ? min(range[1].split, splits) : splits;
    if (from >= to) return {};
    const int first = hull.first + from * split;
    const int end = to == splits ? hull.end : hull.first + to * split;
    return {first, static_cast<uint32_t>(end - first), rows};
  }
};

}  // namespace mqa::score
