// Which tasks a CTA does.
#pragma once

#include "common/cuts.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

// Source is Dense or Paged: what is scored, and in which blocks.
template <typename Tiling, typename Source>
struct Range {
  using Storage = typename Tiling::Storage;
  using Arguments = typename Source::Arguments;

  // Whether all threads have to find this CTA's range together; else each warp does that alone.
  static __device__ __forceinline__ bool range_by_all(const Arguments& args) {
    return args.schedule == nullptr && Source::groups(args) > kWarpSize;
  }

  // This CTA's cuts of a schedule, read once: its warps must not see different ones, even if
  // somebody writes to the schedule meanwhile. By two threads.
  static __device__ __forceinline__ void read_range(const Arguments& args, Storage& shared) {
    const int i = threadIdx.x;
    if (i >= 2) return;
    const int32_t* entry =
        args.schedule + (static_cast<int64_t>(blockIdx.x) + i) * args.schedule_row_stride;
    Cut cut = Source::cut_of(args, {entry[0], max(entry[args.schedule_column_stride], 0)});
    // Whatever is stored, the first and the last part reach to the ends.
    if (blockIdx.x + i == 0) cut = {0, 0};
    if (blockIdx.x + i == gridDim.x) cut = {Source::groups(args), 0};
    shared.cuts.cuts[i] = cut;
  }

  static __device__ __forceinline__ void find_range_by_all(const Arguments& args, Storage& shared) {
    find_cuts<kThreads>(Source::groups(args), blockIdx.x, gridDim.x, shared.cuts,
                        [&](int group) { return Source::weigh(args, group); });
  }

  // This CTA's range of tasks [cuts[0], cuts[1]): from the schedule, else balanced by cost.
  static __device__ __forceinline__ void find_range(const Arguments& args,
                                                    const Storage& shared,
                                                    Cut (&cuts)[2]) {
    if (args.schedule != nullptr || range_by_all(args)) {
      cuts[0] = shared.cuts.cuts[0], cuts[1] = shared.cuts.cuts[1];
    } else {
      find_cuts_by_warp(Source::groups(args), blockIdx.x, gridDim.x, cuts,
                        [&](int group) { return Source::weigh(args, group); });
    }
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

}  // namespace mqa::sm90
