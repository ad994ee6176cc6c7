// What a math warp knows of its set of columns: weights and windows.
#pragma once

#include "common/windows.cuh"
#include "ptx/pairs.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

// A value that all lanes have, in a form that the compiler knows to be uniform.
template <typename T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(kAllLanes, value, 0);
}

template <typename Tiling>
struct Set {
  using Storage = typename Tiling::Storage;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kStripColumns = Tiling::kStripColumns;
  static constexpr bool kInPasses = Tiling::kPasses > 1;
  static constexpr int kKept = (Tiling::kColumns - Tiling::kReadAgain) / 2;  // pairs of weights

  uint64_t weights[kKept];
  uint32_t again;         // address of the others
  const Row* rows;        // the first
  uint32_t start[kRows];  // of each row's window
  uint32_t end[kRows];    // 0 where it has no tokens
  uint32_t latest;        // start; past all tokens if a strip has no rows

  // Of set `number` of block `stage`, whose weights are at that address. For `nothing` see
  // ld_shared_uniform_pair.
  __device__ __forceinline__ void load(
      const Storage& shared, int stage, uint32_t number, uint32_t first, uint32_t nothing) {
#pragma unroll
    for (int i = 0; i < kKept; i++)
      weights[i] = ptx::ld_shared_uniform_pair(first + bytes_before(i), nothing);
    again = first + bytes_before(kKept);
    rows = &shared.rows[stage][Tiling::row_in_block(number, 0)];
    latest = 0;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const Row& row = shared.rows[stage][Tiling::row_in_block(number, i)];
      const uint32_t from = uniform(row.start), length = uniform(row.length);
      start[i] = from, end[i] = length > 0 ? from + length : 0;
      if (length > 0) latest = max(latest, from);
    }
#pragma unroll
    for (int strip = 0; kInPasses && strip < Tiling::kStrips; strip++)
      if (!has(strip)) latest = 0xffffffff;
  }

  // Bytes from the set's first weights to those of a pair.
  static __device__ __forceinline__ int bytes_before(int pair) {
    const int strip = 2 * pair / kStripColumns;
    const int column = (Tiling::strip_in_block(0, strip) - strip) * kStripColumns + 2 * pair;
    return column * static_cast<int>(sizeof(float));
  }

  // Weights of two pairs that are not kept.
  __device__ __forceinline__ void read_again(int pair, uint64_t (&two)[2]) const {
    ptx::ld_shared_pairs(two[0], two[1], again + (pair - kKept) * 8);
  }

  // With two strips registers are short: what the hot loop does not need is read again.
  __device__ __forceinline__ uint32_t start_of(int row) const {
    return kInPasses ? rows[Tiling::row_in_block(0, row)].start : start[row];
  }

  // Whether a strip has rows with tokens.
  __device__ __forceinline__ bool has(int strip) const {
    uint32_t tokens = 0;
#pragma unroll
    for (int row = strip * kStripColumns / kHeads;
         row < ceil_div((strip + 1) * kStripColumns, kHeads); row++)
      tokens |= end[row];
    return tokens > 0;
  }
};

}  // namespace mqa::sm100
