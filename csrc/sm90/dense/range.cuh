// Which tasks a CTA of the dense kernels does.
#pragma once

#include "common/windows.cuh"
#include "sm90/dense/storage.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Range {
  using Storage = typename Tiling::Storage;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kBlock = Tiling::kBlock;

  // Warpgroup sets that split the tiles of a block of which `rows` rows exist.
  static __device__ __forceinline__ int groups_for(int rows) {
    return rows <= kRows ? 4 : rows <= 2 * kRows ? 2 : 1;
  }

  // What a block weighs where no schedule is given: its start takes about as long as a task.
  static __device__ __forceinline__ Weights weigh(int rows, int tasks) {
    const int counted = kBlock / groups_for(rows);
    return {tasks > 0 ? 1 + counted : 1, counted, tasks};
  }

  // Whether all threads have to find this CTA's range together; else each warp does that alone.
  static __device__ __forceinline__ bool range_by_all(const DenseArguments& args) {
    return args.schedule == nullptr && args.rows > kBlock * kWarpSize;
  }

  // This CTA's cuts of a schedule, read once: its warps must not see different ones, even if
  // somebody writes to the schedule meanwhile. By two threads.
  static __device__ __forceinline__ void read_range(const DenseArguments& args, Storage& shared) {
    const int i = threadIdx.x, blocks = ceil_div(args.rows, kBlock);
    if (i >= 2) return;
    const int32_t* entry =
        args.schedule + (static_cast<int64_t>(blockIdx.x) + i) * args.schedule_row_stride;
    Cut cut{entry[0], max(entry[args.schedule_column_stride], 0)};
    if (cut.block < 0) cut = {0, 0};
    if (cut.block >= blocks) cut = {blocks, 0};
    shared.cuts.cuts[i] = cut;
  }

  static __device__ __forceinline__ void find_range_by_all(const DenseArguments& args,
                                                           Storage& shared) {
    find_cuts<kThreads>(Tiling::windows_of(args), kBlock, kAutoSplit, blockIdx.x, gridDim.x,
                        shared.cuts, weigh);
  }

  // This CTA's range of tasks [cuts[0], cuts[1]): from the schedule, else balanced by cost.
  static __device__ __forceinline__ void find_range(const DenseArguments& args,
                                                    const Windows& windows,
                                                    const Storage& shared,
                                                    Cut (&cuts)[2]) {
    const int part = blockIdx.x, parts = gridDim.x, blocks = ceil_div(args.rows, kBlock);
    if (args.schedule != nullptr || range_by_all(args)) {
      cuts[0] = shared.cuts.cuts[0], cuts[1] = shared.cuts.cuts[1];
    } else {
      find_cuts_by_warp(windows, kBlock, kAutoSplit, part, parts, cuts, weigh);
    }
    // Whatever is stored, the first and the last part reach to the ends.
    if (part == 0) cuts[0] = {0, 0};
    if (part == parts - 1) cuts[1] = {blocks, 0};
  }

  // What a range has of a block, by one thread.
  static __device__ __forceinline__ Piece piece_of(const DenseArguments& args,
                                                   const Windows& windows,
                                                   const Cut (&range)[2],
                                                   int block) {
    const int split = args.schedule == nullptr ? kAutoSplit : kScheduleSplit;
    const Hull hull = hull_of_block(windows, kBlock, block);
    const int splits = hull.splits(split);
    const int from = block == range[0].block ? min(range[0].split, splits) : 0;
    const int to = block == range[1].block ? min(range[1].split, splits) : splits;
    if (from >= to) return {};
    const int first = hull.first + from * split;
    const int end = to == splits ? hull.end : hull.first + to * split;
    return {first, static_cast<uint32_t>(end - first), 1, 0};
  }
};

}  // namespace mqa::sm90
