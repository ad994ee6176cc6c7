// Cut points of a schedule, int32 [parts + 1, 2], by one cluster.
// Meaning: mqa/reference/schedule.py, equal bit for bit.
//
// Cut i is the first task that begins at or after weight floor(i * total / parts). Each CTA takes a
// stretch of the groups, kRound at a time, and tells the others what it weighs; then it looks for the
// cuts that lie in its own.
#pragma once

#include "common/cuts.cuh"
#include "common/groups.cuh"
#include "common/windows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/control.cuh"

namespace mqa::sm90 {

constexpr int kMetadataCtas = 8;
constexpr int kMetadataThreads = 1024;
constexpr int kMetadataWarps = kMetadataThreads / kWarpSize;
constexpr int kEach = 4;  // groups of a thread in a round
constexpr int kRound = kEach * kMetadataThreads;

// Both field by field as in mqa/cuda/sm90.py. Strides are in elements.
struct DenseMetadata {
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
  __device__ __forceinline__ Weights weights(int index) const {
    const Windows windows{start, end, start_stride, end_stride, rows, tokens};
    const int count = min(block, rows - index * block);
    return {1, count, hull_of_block(windows, block, index).splits(kScheduleSplit)};
  }
  // First coordinate of a group's tasks, of those of the one after it, of the end.
  __device__ __forceinline__ int place(int index) const { return index; }
  __device__ __forceinline__ int next_place(int index) const { return index + 1; }
  __device__ __forceinline__ int end_place() const { return groups(); }
};

struct PagedMetadata {
  const int32_t* lens;
  const int32_t* indices;  // or null
  int32_t* cuts;
  int64_t lens_request_stride;
  int64_t lens_row_stride;
  int64_t indices_stride;
  int64_t cuts_stride;
  int32_t rows;
  int32_t next_n;
  int32_t parts;

  __device__ __forceinline__ Groups grouping() const {
    return {indices, indices_stride, rows, next_n};
  }
  __device__ __forceinline__ int groups() const { return grouping().count(); }
  __device__ __forceinline__ Weights weights(int index) const {
    const Group group = grouping()[index];
    if (group.rows == 0) return {};
    const Lens all{lens, lens_request_stride, lens_row_stride, rows, next_n, 0x7fffffff, false};
    return {1, group.rows, hull_of_rows(all, group.row, group.rows).splits(kScheduleSplit)};
  }
  __device__ __forceinline__ int place(int index) const { return grouping().row_of(index); }
  __device__ __forceinline__ int next_place(int index) const {
    const Group group = grouping()[index];
    return group.row + group.rows;
  }
  __device__ __forceinline__ int end_place() const { return rows; }
};

struct MetadataStorage {
  int64_t begins[kRound];  // weight before each group of a round, from the round's first on
  int64_t sums[kEach * kMetadataWarps];
  int64_t round_total;
  int64_t totals[kMetadataCtas];
};

// Fills in begins and round_total for the groups from `first` on, below `end`.
template <typename Source>
__device__ __forceinline__ void weigh_round(const Source& source,
                                            int first,
                                            int end,
                                            MetadataStorage& storage) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int64_t weights[kEach], sums[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int64_t group = static_cast<int64_t>(first) + i * kMetadataThreads + threadIdx.x;
    weights[i] = group < end ? source.weights(static_cast<int>(group)).total() : 0;
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    sums[i] = inclusive_scan_by_warp(weights[i]);
    if (lane == kWarpSize - 1) storage.sums[i * kMetadataWarps + warp] = sums[i];
  }
  __syncthreads();
  if (warp == 0) {
    int64_t own[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      own[i] = storage.sums[lane * kEach + i], sum += own[i];
    int64_t before = inclusive_scan_by_warp(sum) - sum;
    if (lane == kWarpSize - 1) storage.round_total = before + sum;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      storage.sums[lane * kEach + i] = before, before += own[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; i++)
    storage.begins[i * kMetadataThreads + threadIdx.x] =
        storage.sums[i * kMetadataWarps + warp] + sums[i] - weights[i];
  __syncthreads();
}

// The last group of a round that begins at or before `into`: the one that holds it.
__device__ __forceinline__ int holder(const MetadataStorage& storage, int64_t into) {
  int low = 0;
#pragma unroll
  for (int step = kRound / 2; step > 0; step /= 2)
    if (storage.begins[low + step] <= into) low += step;
  return low;
}

template <typename Source>
__device__ __forceinline__ void write_cut(const Source& source, int index, int first, int split) {
  source.cuts[index * source.cuts_stride] = first;
  source.cuts[index * source.cuts_stride + 1] = split;
}

// The cuts that lie in the round from group `first` on, which begins at weight `before`.
template <typename Source>
__device__ __forceinline__ void cut_round(const Source& source,
                                          int first,
                                          int64_t before,
                                          int64_t total,
                                          const MetadataStorage& storage) {
#pragma unroll 1
  for (int i = threadIdx.x; i <= source.parts; i += kMetadataThreads) {
    const int64_t into = share(total, i, source.parts) - before;
    if (into < 0 || into >= storage.round_total) continue;
    const int at = holder(storage, into), group = first + at;
    const Weights weights = source.weights(group);
    const int task = weights.first_task(into - storage.begins[at]);
    if (task > 0 && task >= weights.tasks) {
      write_cut(source, i, source.next_place(group), 0);
    } else {
      write_cut(source, i, source.place(group), task);
    }
  }
}

template <typename Source>
__global__ void __cluster_dims__(kMetadataCtas, 1, 1) __launch_bounds__(kMetadataThreads, 1)
    metadata(const __grid_constant__ Source source) {
  __shared__ MetadataStorage storage;
  ptx::barrier_cluster_arrive_relaxed();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int rank = ptx::cluster_ctarank(), groups = source.groups();
  const int stretch = ceil_div(groups, kMetadataCtas);
  const int begin = min(static_cast<int64_t>(rank) * stretch, static_cast<int64_t>(groups));
  const int end = min(static_cast<int64_t>(begin) + stretch, static_cast<int64_t>(groups));

  int64_t own = 0;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kRound) {
    weigh_round(source, first, end, storage);
    own += storage.round_total;
    __syncthreads();
  }
  __syncwarp();
  ptx::barrier_cluster_wait();
  if (threadIdx.x < kMetadataCtas)
    ptx::st_shared_cluster(ptx::mapa(ptx::shared_address(&storage.totals[rank]), threadIdx.x), own);
  ptx::barrier_cluster();
  int64_t before = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kMetadataCtas; i++) {
    if (i == rank) before = total;
    total += storage.totals[i];
  }

#pragma unroll 1
  for (int64_t first = begin; first < end; first += kRound) {
    if (stretch > kRound) weigh_round(source, first, end, storage);  // else it is still there
    cut_round(source, first, before, total, storage);
    before += storage.round_total;
    __syncthreads();
  }
  if (rank == 0)
    for (int i = threadIdx.x; i <= source.parts; i += kMetadataThreads)
      if (share(total, i, source.parts) == total) write_cut(source, i, source.end_place(), 0);
}

}  // namespace mqa::sm90
