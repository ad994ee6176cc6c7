// The math warpgroups: dots from tensor memory, relu, weighted sums of heads, logits.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pairs.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Tiling>
struct Math {
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  static constexpr auto kColumns = Tiling::kColumns;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kTurns = Tiling::kTurns;
  static constexpr int kPairs = kColumns / 2;
  static constexpr int kLoaded = 32;  // columns at a time

  // A value that all lanes have, in a form that the compiler knows to be uniform.
  template <typename T>
  static __device__ __forceinline__ T uniform(T value) {
    return __shfl_sync(kAllLanes, value, 0);
  }

  // What a warp knows of its set of columns.
  struct Set {
    uint64_t weights[kPairs];
    const Row* rows;
    uint32_t sums;  // where the first accumulator has its columns, of this warp's lanes
  };

  // Sums of the heads of each row, pair by pair: even heads in the low halves.
  static __device__ __forceinline__ void weigh(const Set& set, uint32_t from, float (&totals)[kRows]) {
    uint64_t sums[kRows];
#pragma unroll
    for (int row = 0; row < kRows; row++)
      sums[row] = 0;
#pragma unroll
    for (int first = 0; first < kColumns; first += kLoaded) {
      uint32_t dots[kLoaded];
      ptx::tcgen05_ld_32x32b_x32(dots, from + first);
      ptx::tcgen05_wait_ld(dots);
#pragma unroll
      for (int i = 0; i < kLoaded; i += 2) {
        const int pair = (first + i) / 2, row = (first + i) / kHeads;
        sums[row] = ptx::fma_f32x2(relu(dots[i], dots[i + 1], pair), set.weights[pair], sums[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      const float2 halves = ptx::halves_of(sums[row]);
      totals[row] = halves.x + halves.y;
    }
  }

  // relu of two columns, or twice that; NaN stays.
  static __device__ __forceinline__ uint64_t relu(uint32_t x, uint32_t y, int pair) {
    if (Tiling::doubled(pair)) {
      const uint64_t both = ptx::pair_of(x, y);
      return ptx::add_f32x2(both, ptx::abs_f32x2(both));
    }
    const float low = ptx::max_nan(__uint_as_float(x), 0.0f);
    const float high = ptx::max_nan(__uint_as_float(y), 0.0f);
    return ptx::pair_of(__float_as_uint(low), __float_as_uint(high));
  }

  // One tile: the sums at `from`, of this thread's token.
  template <typename Release>
  static __device__ __forceinline__ void tile(
      const Set& set, uint32_t from, const float* k_scale_at, int token, Release release) {
    float totals[kRows];
    weigh(set, from, totals);
    const float k_scale = Tiling::kScaled ? 1.0f : *k_scale_at;
    release();
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const Row row = set.rows[i];
      // + 0.0 so that no scale turns a zero into -0.
      if (static_cast<uint32_t>(token - row.start) < row.length)
        ptx::st_global(row.origin + static_cast<int64_t>(token) * Tiling::kLogitBytes,
                       round_to<Logit>(Tiling::kScaled ? totals[i] : fmaf(totals[i], k_scale, 0.0f)));
    }
  }

  // This warpgroup's tiles of a piece. `tiles` counts those of all warpgroups and pieces.
  static __device__ __forceinline__ void score_tiles(Storage& shared,
                                                     StageRing& ring,
                                                     uint32_t& tiles,
                                                     uint32_t turn,
                                                     const Set& set,
                                                     int first,
                                                     uint32_t length) {
    const int lane = threadIdx.x % 128;
    const uint32_t stages = (length + kTileRows - 1) / kTileRows;
    const uint32_t skipped = (turn + kTurns - tiles % kTurns) % kTurns;  // kTurns may be 3
    StageRing mine = ring;
    mine.advance(skipped);
#pragma unroll 1
    for (uint32_t i = skipped; i < stages; i += kTurns) {
      const uint32_t number = tiles + i, slot = number % Tiling::kSlots;
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[slot]),
                                number / Tiling::kSlots & 1);
      ptx::tcgen05_fence_after_thread_sync();
      tile(set, set.sums + slot * Tiling::kBlockColumns, &shared.k_scale[mine.stage][lane],
           first + static_cast<int>(i) * kTileRows + lane, [&] {
             ptx::tcgen05_fence_before_thread_sync();
             ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.k_empty[mine.stage]));
           });
      mine.template advance<kTurns>();
    }
    ring.advance(stages);
    tiles += stages;
  }

  static __device__ __forceinline__ void load_set(
      const Storage& shared, int stage, uint32_t number, Set& set) {
    set.rows = &shared.rows[stage][number * kRows];
    const uint64_t* weights =
        reinterpret_cast<const uint64_t*>(&shared.weights[stage][number * kColumns]);
#pragma unroll
    for (int i = 0; i < kPairs; i++)
      set.weights[i] = weights[i];
  }

  static __device__ __forceinline__ void math(Storage& shared) {
    const uint32_t warp = uniform(threadIdx.x / kWarpSize), group = warp / 4;
    const uint32_t number = group % Tiling::kSets, turn = group / Tiling::kSets;
    BlockRing blocks;
    StageRing stages;
    uint32_t tiles = 0;
    Set set;
    set.sums = uniform(shared.tensor_memory) + warp % 4 * kWarpSize * ptx::kTensorLane +
               number * kColumns;
    while (true) {
      const int stage = blocks.stage();
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[stage]), blocks.parity());
      const int first = uniform(shared.piece[stage].first);
      const uint32_t length = uniform(shared.piece[stage].length);
      if (uniform(shared.piece[stage].groups) == 0) break;
      load_set(shared, stage, number, set);
      score_tiles(shared, stages, tiles, turn, set, first, length);
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_empty[stage]));
      blocks.advance();
    }
  }
};

}  // namespace mqa::sm100
