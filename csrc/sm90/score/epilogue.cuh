// What follows a product of 64 keys with columns of a warpgroup, up to stored logits.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "sm90/score/storage.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Epilogue {
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  static constexpr auto kColumns = Tiling::kProductColumns;
  static constexpr auto kRows = Tiling::kProductRows;
  static constexpr auto kOutputs = Tiling::kOutputs;
  static constexpr auto kLogitBytes = Tiling::kLogitBytes;
  static constexpr auto kHeads = Tiling::kHeads;

  // Whether weights stay in registers for a block. Converted keys need the room, unless a block is one
  // product.
  static constexpr bool kKeepWeights =
      !Tiling::Format::kConverted || Tiling::kBlockColumns == Tiling::kProductColumns;

  // One thread's part of a warpgroup's columns, 2 of every 8, and of its results.
  struct Thread {
    float kept[kKeepWeights ? kColumns / 4 : 1];
    const float* weights;    // in shared memory
    const Columns* columns;  // of each set
    int tile_row;            // of a tile's 64 keys, the one whose logits this thread stores
    const Row* rows;         // of those logits

    // Whether relu of this head is taken as x + |x| = 2 relu(x), with half the weight. That takes
    // another pipe than a maximum does: every other one pays, and all where conversions fill that of
    // the maximum. NaN and +0 stay, and the product is the same unless the weight is subnormal. Of
    // -infinity it would make NaN, and bfloat16 has that.
    static __device__ __forceinline__ constexpr bool doubled(int i) {
      return Tiling::Format::kConverted ? !Tiling::Format::kInfinities : i % 2 == 1;
    }
  };

  static __device__ __forceinline__ void start_block(const Storage& shared,
                                                     int stage,
                                                     int columns,
                                                     Thread& thread) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    thread.weights = shared.weights[stage] + columns + lane % 4 * 2;
    thread.columns = shared.columns[stage];
    if constexpr (kKeepWeights) load_weights(thread.weights, thread.kept);
    const int row = columns / kHeads + (kRows > 1 ? lane / 2 % 2 * kOutputs : 0);
    thread.rows = &shared.rows[stage][row];
    thread.tile_row = warp * 16 + Tiling::key_of(lane / 4) + lane % 2 * 8;
  }

  static __device__ __forceinline__ void load_weights(const float* weights,
                                                      float (&loaded)[kColumns / 4]) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(weights + i * 4);
      loaded[i] = Thread::doubled(i) ? pair.x * 0.5f : pair.x;
      loaded[i + 1] = Thread::doubled(i + 1) ? pair.y * 0.5f : pair.y;
    }
  }

  // Sums over this thread's heads: [row][key, of two that are 8 apart]. Those of a row that more
  // than one product has go on unless this one is its `first`.
  static __device__ __forceinline__ void weigh_heads(const float (&dots)[kColumns / 2],
                                                     const float (&weights)[kColumns / 4],
                                                     bool first,
                                                     float (&sums)[kRows][2]) {
    constexpr int kPerRow = kColumns / 4 / kRows;
#pragma unroll
    for (int head = 0; head < kPerRow; head++)
#pragma unroll
      for (int row = 0; row < kRows; row++)
#pragma unroll
        for (int key = 0; key < 2; key++) {
          const int i = row * kPerRow + head;
          const float x = dots[i / 2 * 4 + key * 2 + i % 2];
          const float relu = Thread::doubled(i) ? x + fabsf(x) : ptx::max_nan(x, 0.0f);
          // A chain starts from +0: a negative weight times 0 must not leave -0.
          sums[row][key] = fmaf(weights[i], relu, first && head == 0 ? 0.0f : sums[row][key]);
        }
  }

  // Adds the four lanes that share a key, (0 + 1) + (2 + 3), leaving each with the rows it stores:
  // lane bit 0 picks the key, bit 1 the half of the rows.
  static __device__ __forceinline__ void reduce(const float (&sums)[kRows][2],
                                                float (&totals)[kOutputs]) {
    const bool key = threadIdx.x & 1, half = threadIdx.x & 2;
    float pairs[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      const float other = __shfl_xor_sync(kAllLanes, key ? sums[row][0] : sums[row][1], 1);
      pairs[row] = (key ? sums[row][1] : sums[row][0]) + other;
    }
    if constexpr (kRows == 1) {
      totals[0] = pairs[0] + __shfl_xor_sync(kAllLanes, pairs[0], 2);
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; i++) {
        const float other = __shfl_xor_sync(kAllLanes, half ? pairs[i] : pairs[i + kOutputs], 2);
        totals[i] = (half ? pairs[i + kOutputs] : pairs[i]) + other;
      }
    }
  }

  // Where a thread's logits of one key go: tests windows.
  struct TestedStore {
    const Row* rows;
    int token;

    __device__ __forceinline__ void operator()(int i, Logit logit) const {
      const Row row = rows[i];
      if (static_cast<uint32_t>(token - row.start) < row.length)
        ptx::st_global(row.origin + static_cast<int64_t>(token) * kLogitBytes, logit);
    }
  };

  // The same where every row has the token. Addresses stay in registers if there are few.
  struct WholeStore {
    static constexpr bool kKeep = kOutputs <= 2;
    const Row* rows;
    uint64_t at[kKeep ? kOutputs : 1];  // of this thread's key in the first tile
    int token;                          // that key

    __device__ __forceinline__ WholeStore(const Row* rows, int token) : rows(rows), token(token) {
      if constexpr (kKeep) {
#pragma unroll
        for (int i = 0; i < kOutputs; i++)
          at[i] = address(i, token);
      }
    }
    __device__ __forceinline__ void advance(int tokens) {
      token += tokens;
      if constexpr (kKeep) {
#pragma unroll
        for (int i = 0; i < kOutputs; i++)
          at[i] += tokens * kLogitBytes;
      }
    }
    __device__ __forceinline__ uint64_t address(int i, int token) const {
      return rows[i].origin + static_cast<int64_t>(token) * kLogitBytes;
    }
    __device__ __forceinline__ void operator()(int i, int tile, Logit logit) const {
      if constexpr (kKeep) {
        ptx::st_global(at[i] + tile * kTileRows * kLogitBytes, logit);
      } else {
        ptx::st_global(address(i, token + tile * kTileRows), logit);
      }
    }
  };
};

}  // namespace mqa::sm90
