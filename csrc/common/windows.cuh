// Windows of query rows and hulls of query blocks.
#pragma once

#include <cuda/std/cstdint>

#include "common/divisor.cuh"

namespace mqa {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int kScheduleSplit = 256;    // KV tokens of a task of a schedule
constexpr int kScheduleColumns = 512;  // columns (row, head) of a block of a dense schedule

// Of non-negative numbers up to 2^31 - 1.
__host__ __device__ constexpr int ceil_div(int a, int b) {
  const uint32_t n = a, d = b;  // for which there are fewer instructions
  return static_cast<int>(n / d + (n % d != 0));
}

// KV tokens [start, end) of one row, clamped to [0, tokens); start >= end if it sees none.
struct Window {
  int start;
  int end;

  __device__ __forceinline__ bool empty() const { return start >= end; }
};

// cu_seq_len_k_start and _end, int32 [rows], with strides in elements.
struct Windows {
  const int32_t* start;
  const int32_t* end;
  int64_t start_stride;
  int64_t end_stride;
  int rows;
  int tokens;

  // Rows past the last, also past 2^31, see nothing. Without a branch, so that several loads are on
  // their way at once; there is at least one row.
  __device__ __forceinline__ Window operator[](int row) const {
    const uint32_t last = rows - 1, existing = min(static_cast<uint32_t>(row), last);
    const int low = start[existing * start_stride], high = end[existing * end_stride];
    const bool exists = static_cast<uint32_t>(row) <= last;
    return {min(max(low, 0), tokens), exists ? min(max(high, 0), tokens) : 0};
  }
};

// The same of a paged call, row by row: request * next_n + j sees [0, its len), cut at `limit`.
// context_lens is int32 [B, next_n] or, `last_only`, [B]: the len of a request's last row, of which
// those before lack a token each. Strides are in elements.
struct Lens {
  const int32_t* lens;
  int64_t request_stride;
  int64_t row_stride;
  int rows;
  Divisor next_n;
  int limit;
  bool last_only;

  // What context_lens says of row `j` of a request.
  __device__ __forceinline__ int given_of(int request, int j) const {
    return lens[request * request_stride + j * row_stride];
  }

  // The len of that row.
  __device__ __forceinline__ int at(int request, int j) const {
    const int given = max(given_of(request, j), 0);
    return min(last_only ? max(given - (next_n.value - 1 - j), 0) : given, limit);
  }

  __device__ __forceinline__ Window operator[](int row) const {
    const uint32_t last = rows - 1, existing = min(static_cast<uint32_t>(row), last);
    const int request = next_n.divide(existing);
    const int len = at(request, existing - request * next_n.value);
    return {0, static_cast<uint32_t>(row) <= last ? len : 0};
  }
};

// KV tokens [first, end) that the rows of one query block see, first rounded down to a multiple of
// 4; first >= end if they see none.
struct Hull {
  int first;
  int end;

  __device__ __forceinline__ void add(Window window) {
    if (window.empty()) return;
    first = min(first, window.start);
    end = max(end, window.end);
  }
  __device__ __forceinline__ Hull rounded() const { return {first / 4 * 4, end}; }
  __device__ __forceinline__ int splits(int split) const {
    return first < end ? ceil_div(end - first, split) : 0;
  }
};

// The hull of `count` rows, by one thread that looks at kAtOnce at once.
template <int kAtOnce = 8>
__device__ __forceinline__ Hull hull_of_rows(const Windows& windows, int first, int count) {
  Hull hull{windows.tokens, 0};
#pragma unroll kAtOnce
  for (int row = 0; row < count; row++)
    hull.add(windows[first + row]);
  return hull.rounded();
}

}  // namespace mqa
