// Groups of rows of a paged call: at most 8 rows of one request, which share its keys.
//
// Meaning: mqa/reference/schedule.py.
#pragma once

#include <cuda/std/cstdint>

#include "common/cuts.cuh"
#include "common/windows.cuh"

namespace mqa {

constexpr int kGroupRows = 8;

struct Group {
  int request;  // of its first row
  int first;    // that row's place in the request
  int rows;     // 0: there is none
};

// The groups of a call. Without `indices` a request is next_n rows, cut every 8; groups are numbered.
// With `indices` (varlen) there is one row an entry, a request is a run of equal indices, also cut at
// multiples of 8, and a group has the number of its first row; other rows' numbers have none.
struct Groups {
  const int32_t* indices;
  int64_t indices_stride;
  int requests;
  Divisor next_n;
  Divisor per_request;  // groups of a request

  __device__ __forceinline__ int rows() const { return requests * next_n.value; }
  __device__ __forceinline__ int count() const { return requests * per_request.value; }

  __device__ __forceinline__ int request_of(int group) const { return per_request.divide(group); }

  __device__ __forceinline__ int row_of(int group) const {
    const int request = request_of(group);
    return request * next_n.value + (group - request * per_request.value) * kGroupRows;
  }

  // The group of a row; in varlen calls, where it could begin at the earliest.
  __device__ __forceinline__ int with_row(int row) const {
    if (indices != nullptr) return row & ~(kGroupRows - 1);
    const int request = next_n.divide(row);
    return request * per_request.value +
           static_cast<uint32_t>(row - request * next_n.value) / kGroupRows;
  }

  __device__ __forceinline__ bool same(int row, int other) const {
    return indices[row * indices_stride] == indices[other * indices_stride];
  }

  __device__ __forceinline__ Group operator[](int group) const {
    if (indices == nullptr) {
      const int request = request_of(group),
                first = (group - request * per_request.value) * kGroupRows;
      return {request, first, min(kGroupRows, next_n.value - first)};
    }
    const uint32_t row = group;
    if (row % kGroupRows != 0 && same(row, row - 1)) return {group, 0, 0};
    const uint32_t most = min(kGroupRows - row % kGroupRows, requests - row);
    uint32_t count = 1;
#pragma unroll 1
    while (count < most && same(row, row + count))
      count++;
    return {group, 0, static_cast<int>(count)};
  }

  // KV tokens that `count` rows of a group see, from the `before`th on; their windows begin at 0.
  __device__ __forceinline__ Hull hull(const Lens& lens,
                                       const Group& group,
                                       int before,
                                       int count) const {
    int longest = 0;
#pragma unroll 2
    for (int i = before; i < before + count; i++)
      longest = max(longest, indices != nullptr ? lens.at(group.request + i, 0)
                                                : lens.at(group.request, group.first + i));
    return {0, longest};
  }

  // A cut point, which names a row, as one that names a group: the first group that begins at or
  // after the row, from the split on only if it begins there.
  __device__ __forceinline__ Cut cut_of(Cut entry) const {
    if (entry.block < 0) return {0, 0};
    if (entry.block >= rows()) return {count(), 0};
    const int request = next_n.divide(entry.block);
    const uint32_t first = entry.block - request * next_n.value;
    return {request * per_request.value + ceil_div(first, kGroupRows),
            first % kGroupRows == 0 ? entry.split : 0};
  }
};

// The first of the longest rows of the run of equal indices that `row` belongs to, by a warp.
__device__ __forceinline__ int longest_of_run(const Groups& groups, const Lens& lens, int row) {
  const int lane = threadIdx.x % kWarpSize;
  int best = row, longest = -1;
  // Rows from `at` on in steps of `step`, as long as they belong to the run; the next of them.
  auto look = [&](int at, int step) {
    while (true) {
      const int mine = at + lane * step;
      const bool exists = 0 <= mine && mine < groups.requests;
      const uint32_t others = __ballot_sync(kAllLanes, !exists || !groups.same(mine, row));
      const int len = exists ? lens.at(mine, 0) : 0;
      const bool belongs = others == 0 || lane < __ffs(others) - 1;
      if (belongs && (len > longest || (len == longest && mine < best))) longest = len, best = mine;
      if (others != 0) return;
      at += kWarpSize * step;
    }
  };
  look(row, 1);
  look(row - 1, -1);
  const int most = __reduce_max_sync(kAllLanes, longest);
  return __reduce_min_sync(kAllLanes, longest == most ? best : groups.requests);
}

}  // namespace mqa
