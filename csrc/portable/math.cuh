// A warp's tokens against the columns of a block: products, head sums, logits.
#pragma once

#include "common/logits.cuh"
#include "portable/load.cuh"
#include "portable/storage.cuh"
#include "ptx/control.cuh"
#include "ptx/mma.cuh"

namespace mqa::portable {

// Token i * 16 + r * 8 + g of a chunk is row g (lane / 4) of fragment half r of tile i. Lanes of four
// share its heads, and after the last sum each has the logits of its own kOutputs tokens.
template <typename Tiling>
struct Math {
  using Storage = typename Tiling::Storage;
  using Format = typename Tiling::Format;
  using Logit = typename Tiling::Logit;
  using Row = typename Tiling::Row;
  static constexpr auto kHeads = Tiling::kHeads;
  static constexpr auto kTiles = Tiling::kTiles;
  static constexpr auto kSteps = Tiling::kSteps;
  static constexpr int kOutputs = kTiles / 2;

  // The operand A: all dims of the warp's tokens.
  using Keys = uint32_t[kTiles][kSteps][4];
  // Of the tokens that this lane stores.
  using Scales = float[kOutputs];
  // Of rows g of the halves of tiles, over this lane's heads.
  using Sums = float[kTiles * 2];

  static __device__ __forceinline__ int token_of(int output) {
    const int lane = threadIdx.x % kWarpSize, value = lane % 4 * kOutputs + output;
    return value * 8 + lane / 4;
  }

  // From shared memory to registers, where they become what tensor cores take.
  static __device__ __forceinline__ void take(const Storage& shared, Keys& keys, Scales& scales) {
    const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4;
    uint32_t lost[2] = {};  // two, since each waits for the last one
#pragma unroll
    for (int half = 0; half < kTiles * 2; half++) {
      const uint32_t codes = Format::kBlockScaled ? shared.scales[warp][half * 8 + g] : 0;
#pragma unroll
      for (int part = 0; part < Row::kParts; part++) {
        uint32_t words[Row::kWords];
        load_words(shared.k[warp], half, part, words);
        Pairs pairs[Row::kPartSteps];
        uint32_t nan[Row::kPartSteps];
        Row::convert(words, Row::code(codes, part, threadIdx.x % 4), pairs, nan);
#pragma unroll
        for (int i = 0; i < Row::kPartSteps; i++) {
          uint32_t (&a)[4] = keys[half / 2][part * Row::kPartSteps + i];
          a[half % 2] = pairs[i].low, a[half % 2 + 2] = pairs[i].high;
          if constexpr (Format::kLosesNan) lost[i % 2] |= nan[i];
        }
      }
    }
#pragma unroll
    for (int output = 0; output < kOutputs; output++) {
      scales[output] = 1.0f;
      if constexpr (Format::kScaled && !Format::kBlockScaled)
        scales[output] = __uint_as_float(shared.scales[warp][token_of(output)]);
    }
    if constexpr (Format::kLosesNan) {
      if (__any_sync(kAllLanes, ((lost[0] | lost[1]) & 0x80808080) != 0))
        find_nan(shared.k[warp], scales);
    }
  }

  // This thread's words of a part of row g of a half.
  static __device__ __forceinline__ void load_words(const unsigned char* keys,
                                                    int half,
                                                    int part,
                                                    uint32_t (&words)[Row::kWords]) {
    const int c = threadIdx.x % 4, g = threadIdx.x % kWarpSize / 4;
    if constexpr (Row::kChunk == 16) {
      // All rows g are swizzled alike.
      const uint4 loaded = *reinterpret_cast<const uint4*>(
          keys + swizzled<Row::kBytes>(g, part * 4 + c) + half * 8 * Row::kBytes);
      words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    } else {
#pragma unroll
      for (int word = 0; word < Row::kWords; word++)
        words[word] = *reinterpret_cast<const uint32_t*>(keys + (half * 8 + g) * Row::kBytes +
                                                         (part * 4 + c) * Row::kChunk + word * 4);
    }
  }

  // Keys with a NaN make all logits of their token NaN, whatever the queries: by its scale.
  static __device__ __forceinline__ void find_nan(const unsigned char* keys, Scales& scales) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int half = 0; half < kTiles * 2; half++) {
      uint32_t nan = 0;
#pragma unroll 1
      for (int part = 0; part < Row::kParts; part++) {
        uint32_t words[Row::kWords];
        load_words(keys, half, part, words);
        for (int word = 0; word < Row::kWords; word++)
          nan |= ((words[word] & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
      }
      const uint32_t lanes = __ballot_sync(kAllLanes, nan != 0);
      const bool lost = (lanes >> lane / 4 * 4 & 15) != 0;
#pragma unroll
      for (int output = 0; output < kOutputs; output++)
        if (lost && half == lane % 4 * kOutputs + output)
          scales[output] = __int_as_float(0x7fffffff);
    }
  }

  // Warps that share a scheduler begin to multiply in turn, one when the other is half through: so one
  // converts keys or adds up heads while the other multiplies, and for the rest both do, since one
  // alone cannot keep the tensor cores busy. Both take as many turns.
  static __device__ __forceinline__ void begin_turns() {
    if (threadIdx.x >= kThreads / 2) pass_turn();
  }
  static __device__ __forceinline__ void take_turn() {
    ptx::bar_sync(kTurnBarrier + threadIdx.x / kWarpSize, 2 * kWarpSize);
  }
  static __device__ __forceinline__ void pass_turn() {
    ptx::bar_arrive(kTurnBarrier + (threadIdx.x / kWarpSize ^ kWarps / 2), 2 * kWarpSize);
  }
  static __device__ __forceinline__ void end_turns() {
    if (threadIdx.x < kThreads / 2) take_turn();
  }

  // Adds `heads` heads of a row of the block: 8 at a time, each one's products and then its weight.
  // Calls `half_way` once.
  template <typename HalfWay>
  static __device__ __forceinline__ void multiply(
      const Storage& shared, const Keys& keys, int row, int heads, Sums& sums, HalfWay half_way) {
    // Two eights at a time, so that products of one fill the waits of the other.
    constexpr int kAtOnce = kHeads < 16 ? 1 : 2;
    const int turns = ceil_div(heads, 8 * kAtOnce);
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
      if (turn == turns / 2) half_way();
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        add_eight(shared, keys, row, turn * kAtOnce + i, heads, sums);
    }
  }

  static __device__ __forceinline__ void add_eight(
      const Storage& shared, const Keys& keys, int row, int eight, int heads, Sums& sums) {
    const int lane = threadIdx.x % kWarpSize, head = eight * 8 + lane % 4 * 2;
    float dots[kTiles][4] = {};
#pragma unroll
    for (int two = 0; two < kSteps / 2; two++) {
      const uint4 b = shared.q[row * (kHeads / 8) + eight][two][lane];
#pragma unroll
      for (int i = 0; i < kTiles; i++)
        product(dots[i], keys[i][two * 2], b.x, b.y);
#pragma unroll
      for (int i = 0; i < kTiles; i++)
        product(dots[i], keys[i][two * 2 + 1], b.z, b.w);
    }
    weigh(dots, *reinterpret_cast<const float2*>(&shared.weights[row * kHeads + head]),
          heads - head, sums);
  }

  // Adds two heads, of which the first `exist` do.
  static __device__ __forceinline__ void weigh(const float (&dots)[kTiles][4],
                                               float2 weight,
                                               int exist,
                                               Sums& sums) {
#pragma unroll
    for (int i = 0; i < kTiles; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float first = Format::relu(dots[i][r * 2]), second = Format::relu(dots[i][r * 2 + 1]);
        // Weights of zero hide what is finite; zeros by infinite keys are NaN.
        if (Format::kInfinities && exist < 1) first = 0;
        if (Format::kInfinities && exist < 2) second = 0;
        float& sum = sums[i * 2 + r];
        sum = fmaf(weight.x, first, sum);
        sum = fmaf(weight.y, second, sum);
      }
  }

  static __device__ __forceinline__ void product(float (&dots)[4],
                                                 const uint32_t (&a)[4],
                                                 uint32_t b0,
                                                 uint32_t b1) {
    if constexpr (Format::kHalf)
      ptx::mma_m16n8k16_f16(dots, a, b0, b1);
    else
      ptx::mma_m16n8k16_bf16(dots, a, b0, b1);
  }

  // Sums over the four lanes that share a token, each of which gets those of its outputs: halves are
  // exchanged, then quarters.
  static __device__ __forceinline__ void reduce(const Sums& sums, float (&totals)[kOutputs]) {
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    float halves[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      const float kept = upper ? sums[kTiles + i] : sums[i];
      const float given = upper ? sums[i] : sums[kTiles + i];
      halves[i] = kept + __shfl_xor_sync(kAllLanes, given, 2);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i++) {
      const float kept = odd ? halves[kOutputs + i] : halves[i];
      const float given = odd ? halves[i] : halves[kOutputs + i];
      totals[i] = kept + __shfl_xor_sync(kAllLanes, given, 1);
    }
  }

  // The logits of a row of the block for the tokens from `first` on, before `end`.
  static __device__ __forceinline__ void store(
      const score::Row& row, uint32_t first, uint32_t end, const Sums& sums, const Scales& scales) {
    float totals[kOutputs];
    reduce(sums, totals);
#pragma unroll
    for (int output = 0; output < kOutputs; output++) {
      const uint32_t token = first + token_of(output);
      // + 0.0 so that no scale turns a zero into -0.
      const float logit = fmaf(totals[output], scales[output], 0.0f);
      if (token < end && token - row.start < row.length)
        ptx::st_global(row.origin + token * sizeof(Logit), round_to<Logit>(logit));
    }
  }
};

}  // namespace mqa::portable
