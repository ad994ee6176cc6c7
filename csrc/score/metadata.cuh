// Cut points of a schedule, int32 [parts + 1, 2], by one cluster, or by one CTA where there are no
// clusters. Meaning: mqa/reference/schedule.py, equal bit for bit.
//
// Cut i is the first task that begins at or after weight floor(i * total / parts). Each CTA takes a
// stretch of the groups, kRound at a time. Its warps weigh 32 groups at once, a chunk, and tell all
// CTAs what theirs weigh together; then each CTA looks for the cuts that lie in its own stretch, first
// the chunk, then the group.
#pragma once

#include "common/cuts.cuh"
#include "common/groups.cuh"
#include "common/windows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"

namespace mqa::score {

constexpr int kMetadataCtas = 8;
constexpr int kMetadataThreads = 1024;
constexpr int kMetadataWarps = kMetadataThreads / kWarpSize;
constexpr int kEach = 4;  // groups of a thread in a round
constexpr int kRound = kEach * kMetadataThreads;
constexpr int kChunks = kRound / kWarpSize;

// Rows and tasks of a group. Its weight is 1 + kUnit * rows * tasks; 0 rows are no group.
struct Load {
  int rows;
  int tasks;
};

// Both field by field as in mqa/cuda/metadata.py. Strides are in elements.
struct DenseMetadata {
  static constexpr int kUnit = 1;

  const int32_t* start;
  const int32_t* end;
  int32_t* cuts;
  int64_t start_stride;
  int64_t end_stride;
  int64_t cuts_stride;
  int32_t rows;
  int32_t tokens;
  int32_t block;  // rows of a query block
  int32_t parts;

  __device__ __forceinline__ int groups() const { return ceil_div(rows, block); }
  // Of every kMetadataThreads'th group from `first` on, below `end`.
  __device__ __forceinline__ void weigh(uint32_t first, uint32_t end, Load (&loads)[kEach]) const {
    const Windows windows{start, this->end, start_stride, end_stride, rows, tokens};
#pragma unroll 1
    for (int i = 0; i < kEach; i++) {
      const uint32_t group = first + i * kMetadataThreads;
      const int count = group < end ? min(block, rows - static_cast<int>(group) * block) : 0;
      loads[i] =
          count == 0
              ? Load{}
              : Load{count, hull_of_rows(windows, group * block, block).splits(kScheduleSplit)};
    }
  }
  // First coordinate of a group's tasks, of those of the one after it, of the end.
  __device__ __forceinline__ int place(int group) const { return group; }
  __device__ __forceinline__ int next_place(int group, Load) const { return group + 1; }
  __device__ __forceinline__ int end_place() const { return groups(); }
};

struct PagedMetadata {
  static constexpr int kUnit = 64;

  const int32_t* lens;
  const int32_t* indices;  // or null
  int32_t* cuts;
  int64_t lens_request_stride;
  int64_t lens_row_stride;
  int64_t indices_stride;
  int64_t cuts_stride;
  int32_t requests;
  Divisor next_n;
  Divisor groups_of_request;
  int32_t parts;

  __device__ __forceinline__ Groups grouping() const {
    return {indices, indices_stride, requests, next_n, groups_of_request};
  }
  __device__ __forceinline__ Lens all() const {
    return {lens, lens_request_stride, lens_row_stride, requests * next_n.value, next_n, 0x7fffffff,
            false};
  }
  __device__ __forceinline__ int groups() const { return grouping().count(); }

  // Loads of all groups are on their way at once. Groups from `end` on exist, or nearly: their
  // numbers are cut.
  __device__ __forceinline__ void weigh(uint32_t first, uint32_t end, Load (&loads)[kEach]) const {
    if (indices != nullptr) {
      weigh_runs(first, end, loads);
      return;
    }
    Group group[kEach];
    int longest[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; i++)
      group[i] = grouping()[min(first + i * kMetadataThreads, end - 1)];
#pragma unroll 4
    for (int j = 0; j < min(next_n.value, kGroupRows); j++)
#pragma unroll
      for (int i = 0; i < kEach; i++)
        longest[i] =
            max(longest[i], all().at(group[i].request, group[i].first + min(j, group[i].rows - 1)));
#pragma unroll
    for (int i = 0; i < kEach; i++)
      loads[i] = first + i * kMetadataThreads < end
                     ? Load{group[i].rows, Hull{0, longest[i]}.splits(kScheduleSplit)}
                     : Load{};
  }

  // Of runs of equal indices. A warp has 32 rows from a multiple of 8 on, and looks at them together.
  __device__ __forceinline__ void weigh_runs(uint32_t first,
                                             uint32_t end,
                                             Load (&loads)[kEach]) const {
    const int lane = threadIdx.x % kWarpSize;
    int index[kEach], longest[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t row = min(first + i * kMetadataThreads, end - 1);
      index[i] = indices[row * indices_stride];
      longest[i] = all().at(row, 0);
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const bool exists = first + i * kMetadataThreads < end;
      const int lower = __shfl_up_sync(kAllLanes, index[i], 1);
      const bool starts = lane % kGroupRows == 0 || !exists || index[i] != lower;
      // This lane's run ends before the next start.
      const uint32_t later = __ballot_sync(kAllLanes, starts) >> lane >> 1;
      const int rows = later != 0 ? __ffs(later) : kWarpSize - lane;
#pragma unroll
      for (int step = 1; step < kGroupRows; step *= 2) {
        const int other = __shfl_down_sync(kAllLanes, longest[i], step);
        if (step < rows) longest[i] = max(longest[i], other);
      }
      loads[i] = exists && starts ? Load{rows, Hull{0, longest[i]}.splits(kScheduleSplit)} : Load{};
    }
  }

  __device__ __forceinline__ int place(int group) const { return grouping().row_of(group); }
  __device__ __forceinline__ int next_place(int group, Load load) const {
    return place(group) + load.rows;
  }
  __device__ __forceinline__ int end_place() const { return requests * next_n.value; }
};

struct MetadataStorage {
  Load loads[kRound];             // of a round
  int64_t chunks[kChunks];        // what they weigh, 32 together
  int64_t begins[kChunks];        // the sum of what those before weigh
  int64_t weight;                 // of the round
  int64_t totals[kMetadataCtas];  // of all rounds of each CTA
};

// Weighs the groups of a round, from `first` on, below `end`. The first warp adds up chunks, and gets
// the weight of the round; others find it in the storage after they met that warp again.
template <typename Source>
__device__ __forceinline__ int64_t
weigh_round(const Source& source, uint32_t first, uint32_t end, MetadataStorage& storage) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Load loads[kEach];
  source.weigh(first + threadIdx.x, end, loads);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const uint64_t product = static_cast<uint64_t>(loads[i].rows) * loads[i].tasks;  // <= 2^32
    const uint32_t groups = __popc(__ballot_sync(kAllLanes, loads[i].rows > 0));
    // In two parts, so that no sum of 32 overflows.
    const int64_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(product & 0xffff));
    const int64_t high = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(product >> 16));
    storage.loads[i * kMetadataThreads + threadIdx.x] = loads[i];
    if (lane == 0)
      storage.chunks[i * kMetadataWarps + warp] = groups + Source::kUnit * (low + (high << 16));
  }
  __syncthreads();
  if (warp != 0) return 0;
  constexpr int kOfLane = kChunks / kWarpSize;
  int64_t chunks[kOfLane], sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; i++)
    chunks[i] = storage.chunks[lane * kOfLane + i], sum += chunks[i];
  int64_t begin = inclusive_scan_by_warp(sum) - sum;
#pragma unroll
  for (int i = 0; i < kOfLane; i++)
    storage.begins[lane * kOfLane + i] = begin, begin += chunks[i];
  if (lane == kWarpSize - 1) storage.weight = begin;
  return __shfl_sync(kAllLanes, begin, kWarpSize - 1);
}

template <typename Source>
__device__ __forceinline__ void write_cut(const Source& source, int index, int first, int split) {
  source.cuts[index * source.cuts_stride] = first;
  source.cuts[index * source.cuts_stride + 1] = split;
}

// Writes cut `index`, which lies at weight `into` of a chunk. By a warp.
template <typename Source>
__device__ __forceinline__ void write_cut_in(
    const Source& source, int index, int first, int64_t into, const Load* chunk) {
  const int lane = threadIdx.x % kWarpSize;
  const Load load = chunk[lane];
  const Weights weights{1, Source::kUnit * load.rows, load.tasks};
  const int64_t weight = load.rows > 0 ? weights.total() : 0;
  const int64_t begin = inclusive_scan_by_warp(weight) - weight;
  if (into < begin || into >= begin + weight) return;
  const int group = first + lane, task = weights.first_task(into - begin);
  if (task > 0 && task >= weights.tasks) {
    write_cut(source, index, source.next_place(group, load), 0);
  } else {
    write_cut(source, index, source.place(group), task);
  }
}

// The cuts that lie in the round from group `first` on, which begins at weight `before`. Cuts that lie
// close together go to different warps.
template <typename Source>
__device__ __forceinline__ void cut_round(const Source& source,
                                          int first,
                                          int64_t before,
                                          int64_t total,
                                          const MetadataStorage& storage) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll 1
  for (int base = warp; base <= source.parts; base += kMetadataThreads) {
    const int mine = base + lane * kMetadataWarps;
    const int64_t target = mine <= source.parts ? share(total, mine, source.parts) - before : -1;
    uint32_t found = __ballot_sync(kAllLanes, target >= 0 && target < storage.weight);
#pragma unroll 1
    for (; found != 0; found &= found - 1) {
      const int holder = __ffs(found) - 1;
      const int64_t into = __shfl_sync(kAllLanes, target, holder);
      int chunk = -1;  // the last one that begins at or before it
#pragma unroll
      for (int i = 0; i < kChunks; i += kWarpSize)
        chunk += __popc(__ballot_sync(kAllLanes, storage.begins[i + lane] <= into));
      write_cut_in(source, base + holder * kMetadataWarps, first + chunk * kWarpSize,
                   into - storage.begins[chunk], storage.loads + chunk * kWarpSize);
    }
  }
}

// Shows all CTAs what each one's groups weigh, which this one's first warp knows.
template <int kCtas>
__device__ __forceinline__ void share_totals(int rank, int64_t own, MetadataStorage& storage) {
  if constexpr (kCtas == 1) {
    if (threadIdx.x == 0) storage.totals[0] = own;
    __syncthreads();
  } else {
    ptx::barrier_cluster_wait();
    if (threadIdx.x < kCtas)
      ptx::st_shared_cluster(ptx::mapa(ptx::shared_address(&storage.totals[rank]), threadIdx.x),
                             own);
    __syncwarp();
    ptx::barrier_cluster();
  }
}

// Writes the cuts, by kCtas CTAs: by each those that lie in its stretch of the groups.
template <int kCtas, typename Source>
__device__ __forceinline__ void write_cuts(const Source& source, MetadataStorage& storage) {
  if constexpr (kCtas > 1) ptx::barrier_cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  int rank = 0;
  if constexpr (kCtas > 1) rank = ptx::cluster_ctarank();
  const int64_t groups = source.groups();
  // Whole chunks, so that a warp's groups begin at a multiple of 8.
  const int64_t stretch = (groups + kCtas * kWarpSize - 1) / (kCtas * kWarpSize) * kWarpSize;
  const int64_t begin = min(rank * stretch, groups), end = min(begin + stretch, groups);

  int64_t own = 0;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kRound) {
    own += weigh_round(source, first, end, storage);
    __syncthreads();
  }
  share_totals<kCtas>(rank, own, storage);
  int64_t before = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kCtas; i++) {
    if (i == rank) before = total;
    total += storage.totals[i];
  }

#pragma unroll 1
  for (int64_t first = begin; first < end; first += kRound) {
    if (stretch > kRound) {  // else it is still there
      weigh_round(source, first, end, storage);
      __syncthreads();
    }
    cut_round(source, first, before, total, storage);
    before += storage.weight;
    __syncthreads();
  }
  if (rank == 0)
    for (int i = threadIdx.x; i <= source.parts; i += kMetadataThreads)
      if (share(total, i, source.parts) == total) write_cut(source, i, source.end_place(), 0);
}

#if __CUDA_ARCH__ >= 900
template <typename Source>
__global__ void __cluster_dims__(kMetadataCtas, 1, 1) __launch_bounds__(kMetadataThreads, 1)
    metadata(const __grid_constant__ Source source) {
  __shared__ MetadataStorage storage;
  write_cuts<kMetadataCtas>(source, storage);
}
#endif

}  // namespace mqa::score
