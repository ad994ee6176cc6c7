// The math warpgroups: dots from tensor memory, relu, weighted sums of heads, logits.
#pragma once

#include "common/logits.cuh"
#include "ptx/control.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pairs.cuh"
#include "ptx/tcgen05.cuh"
#include "sm100/score/set.cuh"
#include "sm100/score/storage.cuh"

namespace mqa::sm100 {

template <typename Tiling>
struct Math {
  using Logit = typename Tiling::Logit;
  using Storage = typename Tiling::Storage;
  using StageRing = typename Tiling::StageRing;
  using Set = sm100::Set<Tiling>;
  static constexpr auto kColumns = Tiling::kColumns;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kRows = Tiling::kRows;
  static constexpr auto kTurns = Tiling::kTurns;
  static constexpr auto kStrips = Tiling::kStrips;
  static constexpr auto kStripColumns = Tiling::kStripColumns;
  static constexpr auto kPassColumns = Tiling::kPassColumns;
  static constexpr bool kInPasses = Tiling::kPasses > 1;
  static constexpr int kLoaded = kColumns > 64 ? 16 : 32;  // columns at a time: weights leave room
  static constexpr int kMine = Tiling::kSlots / kTurns;    // accumulators of a warpgroup
  static constexpr auto kAligned = Tiling::kAligned;
  static constexpr auto kPaired = Tiling::kPaired;
  static_assert(kTurns > 1 || kAligned % (kInPasses ? 2 : 2 * kMine) == 0, "and the same phases");

  // Where the logits of this thread's token of a tile lie, and of those that follow it.
  struct Lines {
    uint64_t at[kRows];
    uint32_t token;

    __device__ __forceinline__ void advance(uint32_t tokens) {
#pragma unroll
      for (int i = 0; i < kRows; i++)
        at[i] += tokens * Tiling::kLogitBytes;
      token += tokens;
    }
  };

  // What a warp's tiles have in common.
  struct Place {
    uint32_t sums[kStrips];  // this warp's lanes of a strip's columns in the first accumulator
    uint32_t pass[kStrips];  // that the strip is of
    uint32_t turn;
  };

  // The accumulator of a strip in this warpgroup's tile `number`.
  static __device__ __forceinline__ uint32_t slot_of(const Place& place,
                                                     int strip,
                                                     uint32_t number) {
    if (kInPasses) return (number * Tiling::kPasses + place.pass[strip]) % Tiling::kSlots;
    return number % kMine * kTurns + (kTurns > 1 ? place.turn : 0);
  }
  // Of passes, phases go by tiles.
  static __device__ __forceinline__ void wait_sums(const Storage& shared,
                                                   const Place& place,
                                                   int strip,
                                                   uint32_t number) {
    const uint32_t sums = kInPasses ? place.pass[strip] : slot_of(place, strip, number);
    ptx::mbarrier_wait_parity(ptx::shared_address(&shared.sums_full[sums]),
                              (kInPasses ? number : number / kMine) & 1);
    ptx::tcgen05_fence_after_thread_sync();
  }

  // A strip of the tile in ring stage `stage` has been read.
  static __device__ __forceinline__ void release(Storage& shared,
                                                 const Place& place,
                                                 int strip,
                                                 int stage) {
    ptx::tcgen05_fence_before_thread_sync();
    ptx::mbarrier_arrive_warp(ptx::shared_address(kInPasses ? &shared.sums_empty[place.pass[strip]]
                                                            : &shared.k_empty[stage]));
  }

  // Adds what columns [first, first + kLoaded) have to the sums of their rows: even heads and odd ones.
  static __device__ __forceinline__ void weigh(const Set& set,
                                               const uint32_t (&dots)[kLoaded],
                                               int first,
                                               uint64_t (&sums)[kRows]) {
    uint64_t again[2];
#pragma unroll
    for (int i = 0; i < kLoaded; i += 2) {
      const int column = first + i, pair = column / 2;
      const int sum = kPaired ? column / (2 * kHeads) * 2 + pair % 2 : column / kHeads;
      if (pair >= Set::kKept && pair % 2 == 0) set.read_again(pair, again);
      const uint64_t weights = pair < Set::kKept ? set.weights[pair] : again[pair % 2];
      sums[sum] = ptx::fma_f32x2(relu(dots[i], dots[i + 1], pair), weights, sums[sum]);
    }
  }

  // Both sums of each row added, times the key's scale. + 0.0 so that no scale turns a zero into -0.
  // Whether halves of a pair are two heads or two rows: a row's even heads were summed in ascending
  // order, its odd ones too, and now both.
  static __device__ __forceinline__ void finish(const uint64_t (&sums)[kRows],
                                                int row,
                                                float k_scale,
                                                float (&logits)[kPaired ? 2 : 1]) {
    float2 halves = ptx::halves_of(sums[row]);
    if constexpr (kPaired) {
      const uint32_t bits = __float_as_uint(k_scale);
      uint64_t total = ptx::add_f32x2(sums[row], sums[row + 1]);
      if (!Tiling::kScaled) total = ptx::fma_f32x2(total, ptx::pair_of(bits, bits), 0);
      halves = ptx::halves_of(total);
      logits[0] = halves.x, logits[1] = halves.y;
    } else {
      const float total = halves.x + halves.y;
      logits[0] = Tiling::kScaled ? total : fmaf(total, k_scale, 0.0f);
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

  // `kTiles` of this warpgroup's tiles from its tile `number` on, in ring stages from `stage` on.
  template <int kTiles>
  static __device__ __forceinline__ void score(Storage& shared,
                                               const Place& place,
                                               uint32_t number,
                                               int stage,
                                               const Set& set,
                                               Lines& lines) {
    static_assert(kTiles == 1 || kTurns == 1, "stages follow each other");
    const int lane = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      uint64_t sums[kRows] = {};
#pragma unroll
      for (int strip = 0; strip < kStrips; strip++) {
        wait_sums(shared, place, strip, number + i);
        const uint32_t from = place.sums[strip] + slot_of(place, strip, number + i) * kPassColumns;
        const float k_scale = Tiling::kScaled ? 1.0f : shared.k_scale[stage + i][lane];
        if (kTiles == 1 && kInPasses && !set.has(strip)) {
          release(shared, place, strip, stage + i);
          continue;
        }
#pragma unroll
        for (int first = strip * kStripColumns; first < (strip + 1) * kStripColumns;
             first += kLoaded) {
          uint32_t dots[kLoaded];
          ptx::tcgen05_ld_32x32b(dots, from + first % kStripColumns);
          ptx::tcgen05_wait_ld(dots);
          if ((first + kLoaded) % kStripColumns == 0) release(shared, place, strip, stage + i);
          weigh(set, dots, first, sums);
          store<(kTiles > 1)>(set, lines, i * kTileRows, first, sums, k_scale);
        }
      }
    }
    lines.advance(kTiles * kTurns * kTileRows);
  }

  // Stores logits of the rows whose last columns are among [first, first + kLoaded), where the window
  // has the token. It may be known that none comes before a row's start.
  template <bool kStarted>
  static __device__ __forceinline__ void store(const Set& set,
                                               const Lines& lines,
                                               uint32_t further,  // than the lines' token
                                               int first,
                                               const uint64_t (&sums)[kRows],
                                               float k_scale) {
    constexpr int kAtOnce = kPaired ? 2 : 1;
    const uint32_t token = lines.token + further;
#pragma unroll
    for (int row = 0; row < kRows; row += kAtOnce) {
      const int end = (row + kAtOnce) * kHeads;
      if (end <= first || end > first + kLoaded) continue;
      float logits[kAtOnce];
      finish(sums, row, k_scale, logits);
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        if (token < set.end[row + i] && (kStarted || token >= set.start_of(row + i)))
          ptx::st_global(lines.at[row + i] + further * Tiling::kLogitBytes,
                         round_to<Logit>(logits[i]));
    }
  }

  // This warpgroup's tiles of a piece, from token `first` on, where they are all. They come in multiples
  // of kAligned, so that each of so many always has the same accumulator and phase, and stages that
  // follow each other.
  static __device__ __forceinline__ void score_all(Storage& shared,
                                                   StageRing& ring,
                                                   const Place& place,
                                                   const Set& set,
                                                   Lines& lines,
                                                   uint32_t first,
                                                   int tiles) {
    while (true) {
#pragma unroll 1
      for (; tiles >= kAligned && first >= set.latest; tiles -= kAligned) {
        score<kAligned>(shared, place, 0, ring.stage, set, lines);
        ring.template advance<kAligned>();
        first += kAligned * kTileRows;
      }
      if (tiles <= 0) break;
      score_some(shared, ring.stage, place, set, lines, tiles);
      ring.template advance<kAligned>();
      first += kAligned * kTileRows;
      tiles -= kAligned;
    }
  }

  // Up to kAligned of them, one after the other, then empty stages.
  static __device__ __forceinline__ void score_some(
      Storage& shared, int stage, const Place& place, const Set& set, Lines& lines, int tiles) {
#pragma unroll 1
    for (int i = 0; i < kAligned; i++) {
      if (i < tiles) {
        score<1>(shared, place, i, stage + i, set, lines);
      } else {
#pragma unroll
        for (int strip = 0; strip < kStrips; strip++) {
          wait_sums(shared, place, strip, i);
          release(shared, place, strip, stage + i);
        }
      }
    }
  }

  // The same where warpgroups take tiles in turn. `done` counts tiles of all of them and all pieces.
  static __device__ __forceinline__ void score_in_turn(Storage& shared,
                                                       StageRing& ring,
                                                       const Place& place,
                                                       const Set& set,
                                                       Lines& lines,
                                                       uint32_t skipped,
                                                       uint32_t done,
                                                       uint32_t tiles) {
    uint32_t number = (done + skipped) / kTurns;
    StageRing mine = ring;
    mine.advance(skipped);
#pragma unroll 1
    for (uint32_t i = skipped; i < tiles; i += kTurns, number++) {
      score<1>(shared, place, number, mine.stage, set, lines);
      mine.template advance<kTurns>();
    }
    ring.advance(tiles);
  }

  static __device__ __forceinline__ void score_piece(Storage& shared,
                                                     StageRing& ring,
                                                     uint32_t& done,
                                                     const Place& place,
                                                     const Set& set,
                                                     const Row* rows,
                                                     uint32_t number,
                                                     uint32_t first,
                                                     uint32_t length) {
    const uint32_t tiles = (length + kTileRows - 1) / kTileRows;
    const uint32_t skipped = (place.turn + kTurns - done % kTurns) % kTurns;
    Lines lines;
    lines.token = first + skipped * kTileRows + threadIdx.x % 128;
#pragma unroll
    for (int row = 0; row < kRows; row++)
      lines.at[row] = rows[Tiling::row_in_block(number, row)].origin +
                      static_cast<int64_t>(lines.token) * Tiling::kLogitBytes;
    if constexpr (kTurns == 1) {
      score_all(shared, ring, place, set, lines, first, static_cast<int>(tiles));
    } else {
      score_in_turn(shared, ring, place, set, lines, skipped, done, tiles);
    }
    done += tiles;
  }

  static __device__ __forceinline__ void math(Storage& shared) {
    const uint32_t warp = uniform(threadIdx.x / kWarpSize), group = warp / 4;
    const uint32_t number = group % Tiling::kSets, turn = group / Tiling::kSets;
    Place place;
    place.turn = turn;
#pragma unroll
    for (int i = 0; i < kStrips; i++) {
      const uint32_t column = Tiling::strip_in_block(number, i) * kStripColumns;
      place.pass[i] = column / kPassColumns;
      place.sums[i] = uniform(shared.tensor_memory) + warp % 4 * kWarpSize * ptx::kTensorLane +
                      column % kPassColumns;
    }
    const uint32_t nothing = warp >> 16;
    BlockRing blocks;
    StageRing stages;
    uint32_t done = 0;  // tiles
    const uint32_t column = Tiling::strip_in_block(number, 0) * kStripColumns;
    uint32_t weights = ptx::shared_address(&shared.weights[0][column]);
    const uint32_t both = weights + ptx::shared_address(&shared.weights[1][column]);
    while (true) {
      const int stage = blocks.stage();
      ptx::mbarrier_wait_parity(ptx::shared_address(&shared.q_full[stage]), blocks.parity());
      const uint32_t first = uniform(shared.piece[stage].first);
      const uint32_t length = uniform(shared.piece[stage].length);
      if (uniform(shared.piece[stage].groups) == 0) break;
      Set set;
      set.load(shared, stage, number, weights, nothing);
      score_piece(shared, stages, done, place, set, shared.rows[stage], number, first, length);
      ptx::mbarrier_arrive_warp(ptx::shared_address(&shared.q_empty[stage]));
      blocks.advance();
      weights = both - weights;
    }
  }
};

}  // namespace mqa::sm100
