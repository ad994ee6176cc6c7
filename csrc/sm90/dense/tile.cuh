// 64 keys against the 128 columns of a warpgroup, from products to stored logits.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/dense/storage.cuh"

namespace mqa::sm90 {

template <typename Tiling>
struct Tile {
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kOutputs = Tiling::kOutputs;
  static constexpr auto kLogitBytes = Tiling::kLogitBytes;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kDim = Tiling::kDim;

  // One thread's part of a warpgroup's columns, 2 of every 8, and of its results.
  struct Thread {
    float weights[kColumns / 4];
    int tile_row;     // of a tile's 64 keys, the one whose logits this thread stores
    const Row* rows;  // of those logits

    // Whether relu of this head is taken as x + |x| = 2 relu(x), with half the weight: every other
    // one. Splitting the relus between two pipes pays; NaN and +0 stay, and the product is the same
    // unless the weight is subnormal.
    static __device__ __forceinline__ constexpr bool doubled(int i) { return i % 2 == 1; }
  };

  static __device__ __forceinline__ void start_block(const Storage& shared,
                                                     int stage,
                                                     int columns,
                                                     Thread& thread) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
    const float* weights = shared.weights[stage] + columns + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kColumns / 4; i += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(weights + i * 4);
      thread.weights[i] = Thread::doubled(i) ? pair.x * 0.5f : pair.x;
      thread.weights[i + 1] = Thread::doubled(i + 1) ? pair.y * 0.5f : pair.y;
    }
    const int row = columns / kHeads + (kRows > 1 ? lane / 2 % 2 * kOutputs : 0);
    thread.rows = &shared.rows[stage][row];
    thread.tile_row = warp * 16 + lane / 4 + lane % 2 * 8;
  }

  // Sums over this thread's heads: [row][key, of two that are 8 apart].
  static __device__ __forceinline__ void weigh_heads(const float (&dots)[kColumns / 2],
                                                     const Thread& thread,
                                                     float (&sums)[kRows][2]) {
    constexpr int kPerRow = kHeads / 4;
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
          sums[row][key] = fmaf(thread.weights[i], relu, head == 0 ? 0.0f : sums[row][key]);
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

  // 64 keys against this warpgroup's columns. `k` and `q` are descriptors. `release` is called once
  // the stage is read.
  template <typename Release, typename Store>
  static __device__ __forceinline__ void tile(uint64_t q,
                                              uint64_t k,
                                              const float* k_scale_at,
                                              const Thread& thread,
                                              Release release,
                                              Store store) {
    float dots[kColumns / 2];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 32; step++)
      ptx::wgmma_m64n128k32_e4m3(dots, k + step * 2, q + step * 2, step == 0);
    ptx::wgmma_commit_group();
    const float k_scale = *k_scale_at;
    ptx::wgmma_wait_group_0(dots);
    release();
    float sums[kRows][2], totals[kOutputs];
    weigh_heads(dots, thread, sums);
    reduce(sums, totals);
    // + 0.0 so that no scale turns a zero into -0.
#pragma unroll
    for (int i = 0; i < kOutputs; i++)
      store(i, round_to<Logit>(fmaf(totals[i], k_scale, 0.0f)));
  }
};

}  // namespace mqa::sm90
