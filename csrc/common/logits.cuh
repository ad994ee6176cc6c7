// Writing logits: one entry, and runs of -inf.
#pragma once

#include <cuda/std/cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/windows.cuh"
#include "ptx/control.cuh"
#include "ptx/copy.cuh"

namespace mqa {

template <typename Logit>
__device__ __forceinline__ Logit round_to(float value);
template <>
__device__ __forceinline__ float round_to<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half round_to<__half>(float value) {
  return __float2half_rn(value);
}

// The result [rows, width] as a kernel sees it. Compressed: entry j of a row is token
// window.start + j; otherwise entry n is token n.
template <typename Logit>
struct Logits {
  Logit* data;
  int64_t stride;
  int width;
  bool compressed;

  // Entries [first, end) of a row that its window fills.
  __device__ __forceinline__ int2 filled(Window window) const {
    if (window.empty()) return {0, 0};
    if (!compressed) return {window.start, window.end};
    return {0, min(window.end - window.start, width)};
  }
};

constexpr int kFillBytes = 8192;

// -inf as far as one bulk store reaches.
struct alignas(128) FillStorage {
  unsigned char bytes[kFillBytes];
};

template <typename Logit>
__device__ __forceinline__ Logit minus_infinity() {
  return round_to<Logit>(-__int_as_float(0x7f800000));
}

// Writes -inf over the whole storage, by one warp, and shows it to the async proxy.
template <typename Logit>
__device__ __forceinline__ void prepare_fill(FillStorage& storage) {
  Logit* values = reinterpret_cast<Logit*>(storage.bytes);
#pragma unroll 1
  for (int i = threadIdx.x % kWarpSize; i < kFillBytes / static_cast<int>(sizeof(Logit));
       i += kWarpSize)
    values[i] = minus_infinity<Logit>();
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

// Fills [begin, end) with -inf, by one warp: ordinary stores up to a 16-byte boundary and after the
// last one, bulk stores between. The caller commits the bulk stores and waits for them.
template <typename Logit>
__device__ __forceinline__ void fill_range(Logit* begin, Logit* end, const FillStorage& storage) {
  const int lane = threadIdx.x % kWarpSize;
  const uint64_t first = reinterpret_cast<uint64_t>(begin), last = reinterpret_cast<uint64_t>(end);
  const uint64_t bulk = min((first + 15) / 16 * 16, last);
  const uint64_t bulk_end = max(last / 16 * 16, bulk);
  Logit* const tail = reinterpret_cast<Logit*>(bulk_end);
  if (begin + lane < reinterpret_cast<Logit*>(bulk)) begin[lane] = minus_infinity<Logit>();
  if (tail + lane < end) tail[lane] = minus_infinity<Logit>();
  const uint32_t source = ptx::shared_address(storage.bytes);
  for (uint64_t at = bulk + lane * kFillBytes; at < bulk_end; at += kWarpSize * kFillBytes) {
    const uint64_t left = bulk_end - at;
    ptx::cp_async_bulk_store(reinterpret_cast<void*>(at), source,
                             static_cast<uint32_t>(left < kFillBytes ? left : kFillBytes));
  }
}

// Of -inf in [begin, end) of a row, piece `index` of `pieces`, by `fill(begin, end)`.
template <typename Logit, typename Fill>
__device__ __forceinline__ void fill_piece(
    Logit* line, int begin, int end, int index, int pieces, Fill fill) {
  const uint32_t length = end - begin, size = ceil_div(end - begin, pieces);
  const uint32_t from = min(index * size, length), to = min(from + size, length);
  fill(line + begin + from, line + begin + to);
}

// Writes -inf to every entry outside the windows, CTA `part` of `parts` its share, by one warp: rows
// in turn, each by one CTA, or by several where there are more CTAs than rows.
template <typename Logit, typename RowWindows>
__device__ __forceinline__ void clean_rows(const Logits<Logit>& logits,
                                           const RowWindows& windows,
                                           int part,
                                           int parts,
                                           FillStorage& storage) {
  const int pieces = max(parts / windows.rows, 1), step = parts / pieces;
  const int first = part / pieces, index = part % pieces;
  if (first >= step) return;
  prepare_fill<Logit>(storage);
  const auto fill = [&](Logit* begin, Logit* end) { fill_range(begin, end, storage); };
  Window window = windows[first];
  for (int row = first; row < windows.rows;) {
    Logit* line = logits.data + row * logits.stride;
    const int2 filled = logits.filled(window);
    // The next window is on its way while this row is written. Rows may end near 2^31.
    const int next = row < windows.rows - step ? row + step : windows.rows;
    window = windows[next];
    fill_piece(line, 0, filled.x, index, pieces, fill);
    fill_piece(line, filled.y, logits.width, index, pieces, fill);
    ptx::cp_async_bulk_commit_group();
    row = next;
  }
  ptx::cp_async_bulk_wait_group_0();
}

// The same range by all threads of a CTA: ordinary stores of 16 bytes, and of single entries before
// and after them.
template <typename Logit>
__device__ __forceinline__ void fill_range_by_stores(Logit* begin, Logit* end) {
  constexpr int kAtOnce = 16 / sizeof(Logit);
  alignas(16) Logit values[kAtOnce];
#pragma unroll
  for (Logit& value : values)
    value = minus_infinity<Logit>();
  const uint4 vector = *reinterpret_cast<const uint4*>(values);
  const uint64_t first = reinterpret_cast<uint64_t>(begin), last = reinterpret_cast<uint64_t>(end);
  const uint64_t body = min((first + 15) / 16 * 16, last);
  const uint64_t body_end = max(last / 16 * 16, body);
  Logit* const tail = reinterpret_cast<Logit*>(body_end);
  const int thread = threadIdx.x;
  if (begin + thread < reinterpret_cast<Logit*>(body)) begin[thread] = values[0];
  if (tail + thread < end) tail[thread] = values[0];
#pragma unroll 1
  for (uint64_t at = body + thread * 16; at < body_end; at += uint64_t{blockDim.x} * 16)
    *reinterpret_cast<uint4*>(at) = vector;
}

// What clean_rows writes, for GPUs without bulk stores: by all threads of a CTA, at least 8, without
// shared memory. They need not meet.
template <typename Logit, typename RowWindows>
__device__ __forceinline__ void clean_rows_by_stores(const Logits<Logit>& logits,
                                                     const RowWindows& windows,
                                                     int part,
                                                     int parts) {
  const int pieces = max(parts / windows.rows, 1), step = parts / pieces;
  const int first = part / pieces, index = part % pieces;
  if (first >= step) return;
#pragma unroll 1
  for (int row = first; row < windows.rows;) {
    Logit* line = logits.data + row * logits.stride;
    const int2 filled = logits.filled(windows[row]);
    fill_piece(line, 0, filled.x, index, pieces, fill_range_by_stores<Logit>);
    fill_piece(line, filled.y, logits.width, index, pieces, fill_range_by_stores<Logit>);
    row = row < windows.rows - step ? row + step : windows.rows;  // rows may end near 2^31
  }
}

}  // namespace mqa
